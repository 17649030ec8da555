"""Programs and models for studying Warpwell: never installed, imported only from a checkout.

``python -m lab`` lists the commands. Nothing in ``src/warpwell`` imports or names this package. It imports the public
names of `warpwell` and `warpwell.testing`, and the internal modules that ``lab/internal.txt`` lists.

===============  ===================================================================================
bench/           benchmarks and the command that runs them
campaigns/       randomized stress tests that run for minutes or hours
cli.py           parsers of commands, and the function that runs a command
commands.py      the table of commands
driver/          the fake CUDA driver: the driver's interface without a GPU
drives/          NVMe drives for tests: QEMU, qtest, scripted controllers, a network block device
fake_cufile.py   the functions of libcufile over pread, with planted faults
kv/              YCSB workloads and other key-value systems
link.py          a transport of the pool that is as slow as a network; link_loop.py: its native loop
media/           emulated drives and fault injection, as storage media
paper/           experiments of the source documents, and their shapes as checks
sched/           scheduler studies: simulator, traces, workloads
===============  ===================================================================================
"""
