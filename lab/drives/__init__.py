"""NVMe drives and disks for tests, without hardware.

================  =======================================================================================
qemu.py           `QemuDrive`: an NVMe drive that QEMU emulates, without a guest
qtest.py          `QtestTransport`: registers and memory of that drive, by QEMU's qtest protocol
qtest_store.py    stores to its registers by native threads
qemu_pack.py      packs QEMU for a machine that cannot install it
nbd.py            `NbdServer`: a disk for QEMU that loses unflushed writes when its client is killed
scripted.py       `ScriptedController`: serves a cache's rings from another process, with wrong completions on request
scripted_drive.py `ScriptedDrive`: a controller in this process, for tests of the drive's driver
================  =======================================================================================
"""
