"""Admin commands: queues, Identify, log pages, the number of queues. Each function builds one `COMMAND`.

The queue that submits a command sets its cid. Addresses are those of the controller (DMA addresses). Figures: NVM
Express Base Specification, "Opcodes for Admin Commands" and "... - Command Dword 10" (11) of each command, "Number of
Queues - Command Dword 11", "Error Information Log Entry Data Structure", "SMART / Health Information Log Page".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._check import table
from .command import COMMAND

DELETE_SQ = 0x00
CREATE_SQ = 0x01
GET_LOG_PAGE = 0x02
DELETE_CQ = 0x04
CREATE_CQ = 0x05
IDENTIFY = 0x06
ABORT = 0x08
SET_FEATURES = 0x09
GET_FEATURES = 0x0A
ASYNC_EVENT = 0x0C
FORMAT_NVM = 0x80
SANITIZE = 0x84

_NAMES = {
    DELETE_SQ: "delete I/O submission queue",
    CREATE_SQ: "create I/O submission queue",
    GET_LOG_PAGE: "get log page",
    DELETE_CQ: "delete I/O completion queue",
    CREATE_CQ: "create I/O completion queue",
    IDENTIFY: "identify",
    ABORT: "abort",
    SET_FEATURES: "set features",
    GET_FEATURES: "get features",
    ASYNC_EVENT: "asynchronous event request",
    FORMAT_NVM: "format NVM",
    SANITIZE: "sanitize",
}

FEATURE_QUEUES = 0x07
"""Feature identifier: number of queues."""
LOG_ERRORS = 0x01
"""Log identifier: error information."""
LOG_HEALTH = 0x02
"""Log identifier: SMART / health information."""
ALL_NAMESPACES = 0xFFFFFFFF
"""NSID that means every namespace, or the controller."""

ERROR_ENTRY: np.dtype[Any] = table(
    ("error_count", "<u8", 0, 7),  # 0: the entry is not used
    ("sqid", "<u2", 8, 9),
    ("cid", "<u2", 10, 11),
    ("status", "<u2", 12, 13),  # with the phase in bit 0
    ("location", "<u2", 14, 15),  # byte of the command that is wrong
    ("lba", "<u8", 16, 23),
    ("nsid", "<u4", 24, 27),
    size=64,
)
"""An entry of the error information log."""

HEALTH: np.dtype[Any] = table(
    ("critical_warning", "u1", 0, 0),
    ("temperature", "<u2", 1, 2),  # kelvin
    ("available_spare", "u1", 3, 3),  # percent
    ("spare_threshold", "u1", 4, 4),
    ("percentage_used", "u1", 5, 5),
    ("data_units_read", "<u8", 32, 39),  # thousands of 512 bytes; the lower half of 16 bytes, as those below
    ("data_units_written", "<u8", 48, 55),
    ("host_reads", "<u8", 64, 71),
    ("host_writes", "<u8", 80, 87),
    ("power_on_hours", "<u8", 128, 135),
    ("unsafe_shutdowns", "<u8", 144, 151),
    ("media_errors", "<u8", 160, 167),
    size=512,
)
"""SMART / health information."""


def admin_opcode_name(opc: int) -> str:
    """Name an admin opcode, for messages: for example ``"identify"``, or ``"admin opcode 0x7f"``."""
    return _NAMES.get(opc, f"admin opcode 0x{opc:02x}")


def _command(opc: int, **fields: int) -> NDArray[Any]:
    entry = np.zeros((), COMMAND)
    entry["opc"] = opc
    for name, value in fields.items():
        entry[name] = value
    return entry


def identify(cns: int, address: int, *, nsid: int = 0, csi: int = 0) -> NDArray[Any]:
    """Build Identify: 4,096 bytes at `address`, page-aligned, of what `cns` names."""
    return _command(IDENTIFY, nsid=nsid, prp1=address, cdw10=cns, cdw11=csi << 24)


def get_log_page(lid: int, address: int, nbytes: int, *, nsid: int = ALL_NAMESPACES) -> NDArray[Any]:
    """Build Get Log Page: `nbytes` (a multiple of 4, one page at most) at `address` of the log `lid`."""
    dwords = nbytes // 4 - 1
    return _command(
        GET_LOG_PAGE, nsid=nsid, prp1=address, cdw10=lid | (dwords & 0xFFFF) << 16, cdw11=dwords >> 16 & 0xFFFF
    )


def set_queues(pairs: int) -> NDArray[Any]:
    """Build Set Features of the number of queues: ask for so many pairs; `queues_granted` reads the answer."""
    return _command(SET_FEATURES, cdw10=FEATURE_QUEUES, cdw11=(pairs - 1) << 16 | (pairs - 1))


def queues_granted(dw0: int) -> int:
    """Return how many pairs of queues dw0 of the completion of `set_queues` grants."""
    return min(dw0 & 0xFFFF, dw0 >> 16 & 0xFFFF) + 1


def create_completion_queue(qid: int, entries: int, address: int) -> NDArray[Any]:
    """Build Create I/O Completion Queue: physically contiguous at `address`, without interrupts."""
    return _command(CREATE_CQ, prp1=address, cdw10=qid | (entries - 1) << 16, cdw11=1)


def create_submission_queue(qid: int, entries: int, address: int, cqid: int) -> NDArray[Any]:
    """Build Create I/O Submission Queue: contiguous at `address`; its completions go to queue `cqid`."""
    return _command(CREATE_SQ, prp1=address, cdw10=qid | (entries - 1) << 16, cdw11=1 | cqid << 16)


def delete_submission_queue(qid: int) -> NDArray[Any]:
    """Build Delete I/O Submission Queue, which comes before that of its completion queue."""
    return _command(DELETE_SQ, cdw10=qid)


def delete_completion_queue(qid: int) -> NDArray[Any]:
    """Build Delete I/O Completion Queue."""
    return _command(DELETE_CQ, cdw10=qid)
