"""Status: the 15 bits of a completion that report how the command went, without the phase bit.

sc (status code) in bits 7:0, sct (status code type) in 10:8, crd (retry delay) in 12:11, more in 13 and dnr
(do not retry) in 14. 0 is success. The constants below are sct and sc together, as ``sct << 8 | sc``.

Source: NVM Express Base Specification, "Status Code - Generic Command Status Values", "... Command Specific Status
Values", "... Media and Data Integrity Error Values", "... Path Related Status Values", and the tables of the same names
of the NVM, Key Value and Zoned Namespace Command Set specifications.
"""

from __future__ import annotations

from ..targets import device

_TYPES = {
    0: "generic",
    1: "command specific",
    2: "media and data integrity",
    3: "path",
    7: "vendor specific",
}

# Codes without a constant: Warpwell's controller never posts them, but a drive may.
_TEXTS = {
    int(entry[:3], 16): entry[4:]
    for entry in """\
003 command identifier conflict|005 aborted due to power loss notification|007 aborted by request
008 aborted due to submission queue deletion|009 aborted due to failed fused command
00A aborted due to missing fused command|00C command sequence error
00D invalid SGL segment descriptor|00E invalid number of SGL descriptors|00F data SGL length invalid
010 metadata SGL length invalid|011 SGL descriptor type invalid|012 invalid use of controller memory buffer
014 atomic write unit exceeded|015 operation denied|016 SGL offset invalid|018 host identifier inconsistent format
019 keep alive timer expired|01A keep alive timeout invalid|01B aborted due to preempt and abort|01C sanitize failed
01D sanitize in progress|01E SGL data block granularity invalid
01F command not supported for queue in controller memory buffer|022 transient transport error
023 command prohibited by command and feature lockdown|024 admin command media not ready|083 reservation conflict
084 format in progress|100 completion queue invalid|103 abort command limit exceeded
105 asynchronous event request limit exceeded|106 invalid firmware slot|107 invalid firmware image
108 invalid interrupt vector|10A invalid format|10B firmware activation requires conventional reset
10D feature identifier not saveable|10E feature not changeable|10F feature not namespace specific
110 firmware activation requires NVM subsystem reset|111 firmware activation requires controller level reset
112 firmware activation requires maximum time violation|113 firmware activation prohibited|114 overlapping range
115 namespace insufficient capacity|116 namespace identifier unavailable|118 namespace already attached
119 namespace is private|11A namespace not attached|11B thin provisioning not supported|11C controller list invalid
11D device self-test in progress|11E boot partition write prohibited|11F invalid controller identifier
120 invalid secondary controller state|121 invalid number of controller resources|122 invalid resource identifier
123 sanitize prohibited while persistent memory region is enabled|124 ANA group identifier invalid
125 ANA attach failed|126 insufficient capacity|127 namespace attachment limit exceeded
128 prohibition of command execution not supported|129 I/O command set not supported|12A I/O command set not enabled
12B I/O command set combination rejected|12C invalid I/O command set|12D identifier unavailable
180 conflicting attributes|181 invalid protection information|183 command size limit exceeded
1B8 zoned boundary error|1B9 zone is full|1BA zone is read only|1BB zone is offline|1BC zone invalid write
1BD too many active zones|1BE too many open zones|1BF invalid zone state transition|282 end-to-end guard check error
283 end-to-end application tag check error|284 end-to-end reference tag check error|285 compare failure
286 access denied|287 deallocated or unwritten logical block|288 end-to-end storage tag check error
300 internal path error|301 asymmetric access persistent loss|302 asymmetric access inaccessible
303 asymmetric access transition|360 controller pathing error|370 host pathing error""".replace("\n", "|").split("|")
}


def _code(code: int, text: str) -> int:
    """Enter the text of a code into the table, and return the code."""
    _TEXTS[code] = text
    return code


SUCCESS = _code(0x000, "success")
INVALID_OPCODE = _code(0x001, "invalid command opcode")
INVALID_FIELD = _code(0x002, "invalid field in command")
DATA_TRANSFER_ERROR = _code(0x004, "data transfer error")
INTERNAL_ERROR = _code(0x006, "internal error")
INVALID_NAMESPACE = _code(0x00B, "invalid namespace or format")
PRP_OFFSET_INVALID = _code(0x013, "PRP offset invalid")
NAMESPACE_WRITE_PROTECTED = _code(0x020, "namespace is write protected")
COMMAND_INTERRUPTED = _code(0x021, "command interrupted")
LBA_OUT_OF_RANGE = _code(0x080, "LBA out of range")
CAPACITY_EXCEEDED = _code(0x081, "capacity exceeded")
NAMESPACE_NOT_READY = _code(0x082, "namespace not ready")
KV_INVALID_VALUE_SIZE = _code(0x085, "invalid value size")
KV_INVALID_KEY_SIZE = _code(0x086, "invalid key size")
KV_KEY_DOES_NOT_EXIST = _code(0x087, "key does not exist")
KV_UNRECOVERED_ERROR = _code(0x088, "unrecovered error")
KV_KEY_EXISTS = _code(0x089, "key exists")
INVALID_QUEUE_ID = _code(0x101, "invalid queue identifier")
INVALID_QUEUE_SIZE = _code(0x102, "invalid queue size")
INVALID_LOG_PAGE = _code(0x109, "invalid log page")
INVALID_QUEUE_DELETION = _code(0x10C, "invalid queue deletion")
WRITE_TO_READ_ONLY_RANGE = _code(0x182, "attempted write to read only range")
WRITE_FAULT = _code(0x280, "write fault")
UNRECOVERED_READ_ERROR = _code(0x281, "unrecovered read error")
ABORTED_BY_HOST = _code(0x371, "command aborted by host")


def describe(status: int) -> str:
    """Return the text of a status of 15 bits.

    For example ``"unrecovered read error (media and data integrity, sct 2 sc 0x81, do not retry)"``.
    """
    sct, sc = (status >> 8) & 7, status & 0xFF
    facts = [_TYPES.get(sct, "reserved type"), f"sct {sct} sc 0x{sc:02x}"]
    if (status >> 14) & 1:
        facts.append("do not retry")
    return f"{_TEXTS.get(status & 0x7FF, 'unknown status')} ({', '.join(facts)})"


def status_of(code: int, dnr: int) -> int:
    """Return a status of 15 bits, with crd and more 0.

    Parameters
    ----------
    code : int
        sct and sc, 11 bits: one of the constants of this module.
    dnr : int
        1 if the same command would fail again, else 0.
    """
    return ((dnr & 1) << 14) | (code & 0x7FF)


@device
def status_dnr(status: int) -> int:
    """Return the do-not-retry bit of a status."""
    return (status >> 14) & 1
