"""Registers of a controller in memory space (BAR0), and admin commands: queues, Identify, log pages, features.

Each function that builds a command returns one `COMMAND`; the submitting queue sets its cid. Addresses are DMA
addresses, as the controller uses them.

Source: NVM Express Base Specification, "Property Definition" (the offsets), "CAP - Controller Capabilities", "VS -
Version", "CC - Controller Configuration", "CSTS - Controller Status", "AQA - Admin Queue Attributes", "Opcodes for
Admin Commands" and "... - Command Dword 10" (11) of each command, "Number of Queues - Command Dword 11"; NVM Express
PCIe Transport Specification: "SQyTDBL" and "CQyHDBL" (the doorbells).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .wire import COMMAND

CAP = 0x00
"""Controller capabilities, 64 bits."""
VS = 0x08
"""Version, 32 bits, like all registers below except ASQ and ACQ."""
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
"""Value of a register of a device that was removed."""
CSS_NVM = 0x01
"""Bit of CAP.CSS: the NVM command set."""
SHUTDOWN_NORMAL = 1
"""CC.SHN: the controller may lose power soon."""
SHUTDOWN_COMPLETE = 2
"""CSTS.SHST."""

DELETE_SQ = 0x00
CREATE_SQ = 0x01
DELETE_CQ = 0x04
CREATE_CQ = 0x05
IDENTIFY = 0x06
SET_FEATURES = 0x09

FEATURE_QUEUES = 0x07
"""Feature identifier: number of queues."""


def cap_entries(cap: int) -> int:
    """Return the maximum number of entries of an I/O queue: CAP.MQES, which counts from zero, plus one."""
    return (cap & 0xFFFF) + 1


def cap_timeout(cap: int) -> float:
    """Return the longest time that CSTS.RDY takes to follow CC.EN, in seconds (CAP.TO, steps of 0.5 s)."""
    return ((cap >> 24) & 0xFF) * 0.5


def cap_stride(cap: int) -> int:
    """Return the bytes from one doorbell to the next (CAP.DSTRD)."""
    return 4 << ((cap >> 32) & 0xF)


def cap_command_sets(cap: int) -> int:
    """Return CAP.CSS, 8 bits."""
    return (cap >> 37) & 0xFF


def cap_smallest_page(cap: int) -> int:
    """Return the smallest memory page in bytes (CAP.MPSMIN)."""
    return 4096 << ((cap >> 48) & 0xF)


def vs_text(vs: int) -> str:
    """Return a version as text, for example ``"1.4.0"``."""
    return f"{vs >> 16}.{(vs >> 8) & 0xFF}.{vs & 0xFF}"


def cc_value(*, enable: bool, shutdown: int = 0) -> int:
    """Return CC: the NVM command set, memory pages of 4 KiB, entries of 64 and 16 bytes, round-robin arbitration.

    Parameters
    ----------
    enable : bool
        CC.EN.
    shutdown : int
        CC.SHN, 2 bits.
    """
    return (4 << 20) | (6 << 16) | (shutdown << 14) | int(enable)


def csts_ready(csts: int) -> bool:
    """Return True if the controller accepts commands (CSTS.RDY)."""
    return bool(csts & 1)


def csts_fatal(csts: int) -> bool:
    """Return True if the controller has failed (CSTS.CFS)."""
    return bool(csts & 2)


def csts_shutdown(csts: int) -> int:
    """Return CSTS.SHST, 2 bits."""
    return (csts >> 2) & 3


def aqa_value(entries: int) -> int:
    """Return AQA for admin queues of `entries` entries each."""
    return (entries - 1) << 16 | (entries - 1)


def submission_doorbell(queue: int, stride: int) -> int:
    """Return the offset of a submission queue's tail doorbell; `stride` as of `cap_stride`."""
    return DOORBELLS + 2 * queue * stride


def completion_doorbell(queue: int, stride: int) -> int:
    """Return the offset of a completion queue's head doorbell; `stride` as of `cap_stride`."""
    return DOORBELLS + (2 * queue + 1) * stride


def _command(opc: int, **fields: int) -> NDArray[Any]:
    """Return a `COMMAND` whose other fields are 0."""
    entry = np.zeros((), COMMAND)
    for name, value in {"opc": opc, **fields}.items():
        entry[name] = value
    return entry


def identify(cns: int, address: int, *, nsid: int = 0) -> NDArray[Any]:
    """Return Identify, which writes the 4,096 bytes of structure `cns` to a page-aligned `address`."""
    return _command(IDENTIFY, nsid=nsid, prp1=address, cdw10=cns)


def set_queues(pairs: int) -> NDArray[Any]:
    """Return Set Features that requests `pairs` pairs of queues; `queues_granted` reads the completion."""
    return _command(SET_FEATURES, cdw10=FEATURE_QUEUES, cdw11=(pairs - 1) << 16 | (pairs - 1))


def queues_granted(dw0: int) -> int:
    """Return how many pairs of queues dw0 of the completion of `set_queues` grants."""
    return min(dw0 & 0xFFFF, dw0 >> 16 & 0xFFFF) + 1


def create_completion_queue(qid: int, entries: int, address: int) -> NDArray[Any]:
    """Return Create I/O Completion Queue: physically contiguous at `address`, without interrupts."""
    return _command(CREATE_CQ, prp1=address, cdw10=qid | (entries - 1) << 16, cdw11=1)


def create_submission_queue(qid: int, entries: int, address: int, cqid: int) -> NDArray[Any]:
    """Return Create I/O Submission Queue: contiguous at `address`; its completions go to queue `cqid`."""
    return _command(CREATE_SQ, prp1=address, cdw10=qid | (entries - 1) << 16, cdw11=1 | cqid << 16)


def delete_submission_queue(qid: int) -> NDArray[Any]:
    """Return Delete I/O Submission Queue, which must precede the deletion of its completion queue."""
    return _command(DELETE_SQ, cdw10=qid)


def delete_completion_queue(qid: int) -> NDArray[Any]:
    """Return Delete I/O Completion Queue."""
    return _command(DELETE_CQ, cdw10=qid)
