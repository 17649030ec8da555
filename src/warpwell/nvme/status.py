"""Status: the 15 bits of a completion that say how the command went, without the phase bit.

sc (status code) in bits 7:0, sct (status code type) in 10:8, crd (retry delay) in 12:11, more in 13 and dnr
(do not retry) in 14. 0 is success. The constants below are sct and sc together, as ``sct << 8 | sc``.

The ``status_*`` functions are device code, under the rules that `warpwell.nvme.command` states.

Source: NVM Express Base Specification, "Status Field Definition", and the two command set specifications.
"""

from __future__ import annotations

# sct 0, generic command status
SUCCESS = 0x000
INVALID_OPCODE = 0x001
INVALID_FIELD = 0x002
COMMAND_ID_CONFLICT = 0x003
DATA_TRANSFER_ERROR = 0x004
ABORTED_POWER_LOSS = 0x005
INTERNAL_ERROR = 0x006
ABORTED_BY_REQUEST = 0x007
ABORTED_SQ_DELETION = 0x008
INVALID_NAMESPACE = 0x00B
COMMAND_SEQUENCE_ERROR = 0x00C
PRP_OFFSET_INVALID = 0x013
NAMESPACE_WRITE_PROTECTED = 0x020
COMMAND_INTERRUPTED = 0x021
LBA_OUT_OF_RANGE = 0x080
CAPACITY_EXCEEDED = 0x081
NAMESPACE_NOT_READY = 0x082
KV_INVALID_VALUE_SIZE = 0x085
KV_INVALID_KEY_SIZE = 0x086
KV_KEY_DOES_NOT_EXIST = 0x087
KV_UNRECOVERED_ERROR = 0x088
KV_KEY_EXISTS = 0x089

# sct 1, command specific status
WRITE_TO_READ_ONLY_RANGE = 0x182

# sct 2, media and data integrity errors
WRITE_FAULT = 0x280
UNRECOVERED_READ_ERROR = 0x281
COMPARE_FAILURE = 0x285
ACCESS_DENIED = 0x286
DEALLOCATED_BLOCK = 0x287

_TYPES = {
    0: "generic",
    1: "command specific",
    2: "media and data integrity",
    3: "path",
    7: "vendor specific",
}

# Also codes that Warpwell's own controller never posts, so that one of a drive is put into words too.
_NAMES = {
    SUCCESS: "success",
    INVALID_OPCODE: "invalid command opcode",
    INVALID_FIELD: "invalid field in command",
    COMMAND_ID_CONFLICT: "command identifier conflict",
    DATA_TRANSFER_ERROR: "data transfer error",
    ABORTED_POWER_LOSS: "aborted due to power loss notification",
    INTERNAL_ERROR: "internal error",
    ABORTED_BY_REQUEST: "aborted by request",
    ABORTED_SQ_DELETION: "aborted due to submission queue deletion",
    0x009: "aborted due to failed fused command",
    0x00A: "aborted due to missing fused command",
    INVALID_NAMESPACE: "invalid namespace or format",
    COMMAND_SEQUENCE_ERROR: "command sequence error",
    0x00D: "invalid SGL segment descriptor",
    0x00E: "invalid number of SGL descriptors",
    0x00F: "data SGL length invalid",
    0x010: "metadata SGL length invalid",
    0x011: "SGL descriptor type invalid",
    0x012: "invalid use of controller memory buffer",
    PRP_OFFSET_INVALID: "PRP offset invalid",
    0x014: "atomic write unit exceeded",
    0x015: "operation denied",
    0x016: "SGL offset invalid",
    0x01C: "sanitize failed",
    0x01D: "sanitize in progress",
    NAMESPACE_WRITE_PROTECTED: "namespace is write protected",
    COMMAND_INTERRUPTED: "command interrupted",
    0x022: "transient transport error",
    LBA_OUT_OF_RANGE: "LBA out of range",
    CAPACITY_EXCEEDED: "capacity exceeded",
    NAMESPACE_NOT_READY: "namespace not ready",
    0x083: "reservation conflict",
    0x084: "format in progress",
    KV_INVALID_VALUE_SIZE: "invalid value size",
    KV_INVALID_KEY_SIZE: "invalid key size",
    KV_KEY_DOES_NOT_EXIST: "key does not exist",
    KV_UNRECOVERED_ERROR: "unrecovered error",
    KV_KEY_EXISTS: "key exists",
    0x180: "conflicting attributes",
    0x181: "invalid protection information",
    WRITE_TO_READ_ONLY_RANGE: "attempted write to read only range",
    WRITE_FAULT: "write fault",
    UNRECOVERED_READ_ERROR: "unrecovered read error",
    0x282: "end-to-end guard check error",
    0x283: "end-to-end application tag check error",
    0x284: "end-to-end reference tag check error",
    COMPARE_FAILURE: "compare failure",
    ACCESS_DENIED: "access denied",
    DEALLOCATED_BLOCK: "deallocated or unwritten logical block",
    0x300: "internal path error",
    0x370: "host pathing error",
    0x371: "command aborted by host",
}


def describe(status: int) -> str:
    """Put a status into words, for messages.

    Parameters
    ----------
    status : int
        15 bits, without the phase.

    Returns
    -------
    str
        For example ``"unrecovered read error (media and data integrity, sct 2 sc 0x81, do not retry)"``.
    """
    sct, sc = (status >> 8) & 7, status & 0xFF
    facts = [_TYPES.get(sct, "reserved type"), f"sct {sct} sc 0x{sc:02x}"]
    if (status >> 14) & 1:
        facts.append("do not retry")
    return f"{_NAMES.get(status & 0x7FF, 'unknown status')} ({', '.join(facts)})"


def status_of(code: int, dnr: int) -> int:
    """Build a status with crd and more 0.

    Parameters
    ----------
    code : int
        sct and sc, 11 bits: one of the constants of this module.
    dnr : int
        1 where the same command would fail again, else 0.

    Returns
    -------
    int
        15 bits.
    """
    return ((dnr & 1) << 14) | (code & 0x7FF)


def status_code(status: int) -> int:
    """Take sct and sc together out of a status, to compare with the constants of this module."""
    return status & 0x7FF


def status_sc(status: int) -> int:
    """Take the status code out of a status."""
    return status & 0xFF


def status_sct(status: int) -> int:
    """Take the status code type out of a status."""
    return (status >> 8) & 7


def status_more(status: int) -> int:
    """Take the bit for more in the error log out of a status."""
    return (status >> 13) & 1


def status_dnr(status: int) -> int:
    """Take the do-not-retry bit out of a status."""
    return (status >> 14) & 1
