"""Conformance suites for new media, devices, transports, executors and policies, and what they need.

A subclass of a suite says how to make the thing that is tested. Files, suites first:

- media.py             `MediumConformance`: every storage medium
- arrays.py            `ArrayConformance`: arrays on every device: cache, tiers, life, launches
- array_items.py       ... items, subscripts and host indexing
- array_kernels.py     ... the kernels of both
- transports.py        `TransportConformance`: every transport of a pool
- transport_checks.py  ... the programs that its ranks run
- executors.py         `ExecutorConformance`: every executor of the scheduler
- policies.py          `PolicyConformance`: every policy of the scheduler
- pool_agents.py       a pool whose agents are threads of this process
- emulated_device.py   a device whose memory is behind a copy engine, without a GPU
- until.py             wait for other threads or processes
"""
