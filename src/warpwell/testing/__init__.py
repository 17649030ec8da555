"""Conformance suites for new media and executors; drives, disks and controllers that fail.

A subclass of a suite says how to make the thing that is tested. Files, suites first:

- media.py             `MediumConformance`: every storage medium
- gated.py             `GatedMedium`: commands wait until a test lets them complete
- executors.py         `ExecutorConformance`: every executor of the scheduler
- qemu.py              `QemuDrive`: an NVMe drive that QEMU emulates
- scripted.py          `ScriptedController`: serves a cache's rings from another process, and answers wrongly on request
- nbd.py               `NbdServer`: a disk for QEMU that loses what was not flushed when its client is killed
"""
