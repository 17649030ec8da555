"""The registers of a controller in memory space (BAR0): offsets, fields, and where doorbells lie.

Figures of the NVM Express Base Specification: "Property Definition" (the offsets), "CAP - Controller
Capabilities", "VS - Version", "CC - Controller Configuration", "CSTS - Controller Status", "AQA - Admin Queue
Attributes"; NVM Express PCIe Transport Specification: "SQyTDBL" and "CQyHDBL" (the doorbells).
"""

from __future__ import annotations

CAP = 0x00
"""Controller capabilities, 64 bits."""
VS = 0x08
"""Version, 32 bits, as all that follow but ASQ and ACQ."""
INTMS = 0x0C
"""Interrupt mask set."""
CC = 0x14
"""Controller configuration."""
CSTS = 0x1C
"""Controller status."""
AQA = 0x24
"""Entries of the admin queues, each less one."""
ASQ = 0x28
"""Address of the admin submission queue, 64 bits."""
ACQ = 0x30
"""Address of the admin completion queue, 64 bits."""
DOORBELLS = 0x1000
"""The first doorbell."""

ALL_ONES = 0xFFFFFFFF
"""What a register of a device reads as that is no longer there."""

CSS_NVM = 0x01
"""Bit of CAP.CSS: the NVM command set."""
CSS_ADMIN_ONLY = 0x80
"""Bit of CAP.CSS: no I/O command set at all."""

SHUTDOWN_NORMAL = 1
"""CC.SHN: the controller may lose power soon."""
SHUTDOWN_COMPLETE = 2
"""CSTS.SHST."""

TIMEOUT_UNIT = 0.5
"""Seconds of one step of CAP.TO."""


def cap_entries(cap: int) -> int:
    """Return the most entries of an I/O queue: CAP.MQES, which counts from zero, plus one."""
    return (cap & 0xFFFF) + 1


def cap_timeout(cap: int) -> float:
    """Return the longest time that CSTS.RDY takes to follow CC.EN, in seconds (CAP.TO)."""
    return ((cap >> 24) & 0xFF) * TIMEOUT_UNIT


def cap_stride(cap: int) -> int:
    """Return the bytes from one doorbell to the next (CAP.DSTRD)."""
    return 4 << ((cap >> 32) & 0xF)


def cap_command_sets(cap: int) -> int:
    """Return CAP.CSS, 8 bits."""
    return (cap >> 37) & 0xFF


def cap_smallest_page(cap: int) -> int:
    """Return the smallest memory page in bytes (CAP.MPSMIN)."""
    return 4096 << ((cap >> 48) & 0xF)


def cap_largest_page(cap: int) -> int:
    """Return the largest memory page in bytes (CAP.MPSMAX)."""
    return 4096 << ((cap >> 52) & 0xF)


def vs_text(vs: int) -> str:
    """Return a version as text, for example ``"1.4.0"``."""
    return f"{vs >> 16}.{(vs >> 8) & 0xFF}.{vs & 0xFF}"


def cc_value(*, enable: bool, shutdown: int = 0) -> int:
    """Build CC: the NVM command set, memory pages of 4 KiB, entries of 64 and 16 bytes, queues in turn.

    Parameters
    ----------
    enable : bool
        CC.EN.
    shutdown : int
        CC.SHN, 2 bits.
    """
    return (4 << 20) | (6 << 16) | (shutdown << 14) | int(enable)


def csts_ready(csts: int) -> bool:
    """Tell whether the controller takes commands (CSTS.RDY)."""
    return bool(csts & 1)


def csts_fatal(csts: int) -> bool:
    """Tell whether the controller has failed (CSTS.CFS)."""
    return bool(csts & 2)


def csts_shutdown(csts: int) -> int:
    """Return CSTS.SHST, 2 bits."""
    return (csts >> 2) & 3


def aqa_value(entries: int) -> int:
    """Build AQA: admin queues with so many entries each."""
    return (entries - 1) << 16 | (entries - 1)


def submission_doorbell(queue: int, stride: int) -> int:
    """Return the offset of a submission queue's tail doorbell; `stride` as of `cap_stride`."""
    return DOORBELLS + 2 * queue * stride


def completion_doorbell(queue: int, stride: int) -> int:
    """Return the offset of a completion queue's head doorbell; `stride` as of `cap_stride`."""
    return DOORBELLS + (2 * queue + 1) * stride
