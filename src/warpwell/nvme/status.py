"""Status: the 15 bits of a completion that say how the command went, without the phase bit.

sc (status code) in bits 7:0, sct (status code type) in 10:8, crd (retry delay) in 12:11, more in 13 and dnr
(do not retry) in 14. 0 is success. The constants below are sct and sc together, as ``sct << 8 | sc``.

The ``status_*`` functions are device code, under the rules that `warpwell.nvme.command` states.

Source: NVM Express Base Specification, "Status Code - Generic Command Status Values", "... Command Specific Status
Values", "... Media and Data Integrity Error Values", "... Path Related Status Values", and the tables of the same names
of the NVM, Key Value and Zoned Namespace Command Set specifications.
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
INVALID_QUEUE_ID = 0x101
INVALID_QUEUE_SIZE = 0x102
INVALID_LOG_PAGE = 0x109
INVALID_QUEUE_DELETION = 0x10C
WRITE_TO_READ_ONLY_RANGE = 0x182

# sct 2, media and data integrity errors
WRITE_FAULT = 0x280
UNRECOVERED_READ_ERROR = 0x281
COMPARE_FAILURE = 0x285
ACCESS_DENIED = 0x286
DEALLOCATED_BLOCK = 0x287

# sct 3, path related status
ABORTED_BY_HOST = 0x371

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
    0x018: "host identifier inconsistent format",
    0x019: "keep alive timer expired",
    0x01A: "keep alive timeout invalid",
    0x01B: "aborted due to preempt and abort",
    0x01C: "sanitize failed",
    0x01D: "sanitize in progress",
    0x01E: "SGL data block granularity invalid",
    0x01F: "command not supported for queue in controller memory buffer",
    NAMESPACE_WRITE_PROTECTED: "namespace is write protected",
    COMMAND_INTERRUPTED: "command interrupted",
    0x022: "transient transport error",
    0x023: "command prohibited by command and feature lockdown",
    0x024: "admin command media not ready",
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
    0x100: "completion queue invalid",
    INVALID_QUEUE_ID: "invalid queue identifier",
    INVALID_QUEUE_SIZE: "invalid queue size",
    0x103: "abort command limit exceeded",
    0x105: "asynchronous event request limit exceeded",
    0x106: "invalid firmware slot",
    0x107: "invalid firmware image",
    0x108: "invalid interrupt vector",
    INVALID_LOG_PAGE: "invalid log page",
    0x10A: "invalid format",
    0x10B: "firmware activation requires conventional reset",
    INVALID_QUEUE_DELETION: "invalid queue deletion",
    0x10D: "feature identifier not saveable",
    0x10E: "feature not changeable",
    0x10F: "feature not namespace specific",
    0x110: "firmware activation requires NVM subsystem reset",
    0x111: "firmware activation requires controller level reset",
    0x112: "firmware activation requires maximum time violation",
    0x113: "firmware activation prohibited",
    0x114: "overlapping range",
    0x115: "namespace insufficient capacity",
    0x116: "namespace identifier unavailable",
    0x118: "namespace already attached",
    0x119: "namespace is private",
    0x11A: "namespace not attached",
    0x11B: "thin provisioning not supported",
    0x11C: "controller list invalid",
    0x11D: "device self-test in progress",
    0x11E: "boot partition write prohibited",
    0x11F: "invalid controller identifier",
    0x120: "invalid secondary controller state",
    0x121: "invalid number of controller resources",
    0x122: "invalid resource identifier",
    0x123: "sanitize prohibited while persistent memory region is enabled",
    0x124: "ANA group identifier invalid",
    0x125: "ANA attach failed",
    0x126: "insufficient capacity",
    0x127: "namespace attachment limit exceeded",
    0x128: "prohibition of command execution not supported",
    0x129: "I/O command set not supported",
    0x12A: "I/O command set not enabled",
    0x12B: "I/O command set combination rejected",
    0x12C: "invalid I/O command set",
    0x12D: "identifier unavailable",
    0x180: "conflicting attributes",
    0x181: "invalid protection information",
    WRITE_TO_READ_ONLY_RANGE: "attempted write to read only range",
    0x183: "command size limit exceeded",
    0x1B8: "zoned boundary error",
    0x1B9: "zone is full",
    0x1BA: "zone is read only",
    0x1BB: "zone is offline",
    0x1BC: "zone invalid write",
    0x1BD: "too many active zones",
    0x1BE: "too many open zones",
    0x1BF: "invalid zone state transition",
    WRITE_FAULT: "write fault",
    UNRECOVERED_READ_ERROR: "unrecovered read error",
    0x282: "end-to-end guard check error",
    0x283: "end-to-end application tag check error",
    0x284: "end-to-end reference tag check error",
    COMPARE_FAILURE: "compare failure",
    ACCESS_DENIED: "access denied",
    DEALLOCATED_BLOCK: "deallocated or unwritten logical block",
    0x288: "end-to-end storage tag check error",
    0x300: "internal path error",
    0x301: "asymmetric access persistent loss",
    0x302: "asymmetric access inaccessible",
    0x303: "asymmetric access transition",
    0x360: "controller pathing error",
    0x370: "host pathing error",
    ABORTED_BY_HOST: "command aborted by host",
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
