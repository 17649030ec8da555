"""Wire format of I/O commands: the 64-byte submission entry, the 16-byte completion entry, and the opcodes.

`COMMAND` and `COMPLETION` are the entries as NumPy dtypes, for the host. Device code sees the same bytes as
little-endian 64-bit words; the functions here build those words and take fields out of them.

======  ==========================  ==================================================================
word    command, low half first     in a read or write command
======  ==========================  ==================================================================
0       opc, flags, cid | nsid      opcode, fuse and psdt, command identifier; namespace
1       cdw2 | cdw3
2       mptr                        metadata pointer
3       prp1                        first physical region page: address of the data
4       prp2                        second page, or address of a list of pages
5       cdw10 | cdw11               slba, starting logical block address
6       cdw12 | cdw13               nlb (number of blocks less one) and control bits
7       cdw14 | cdw15
======  ==========================  ==================================================================

Word 0 of a completion is the result of the command (dw0 and dw1); word 1 is:

==========  ==========  ===============================================================================
bits        field
==========  ==========  ===============================================================================
15:0        sqhd        submission queue head: the controller has fetched all entries before it
31:16       sqid        submission queue identifier
47:32       cid         identifier of the command that completed
48          phase       flips with each round of the ring: distinguishes new entries from old ones
63:49       status      see `warpwell.nvme.status`
==========  ==========  ===============================================================================

`status` means these 15 bits throughout Warpwell, *without* the phase: 0 is success. Only the field of `COMPLETION` has
the phase in its bit 0, as in the specification. A consumer loads word 1 with acquire, compares its phase, and only then
reads word 0.

The functions are device code: only shifts, masks and signed 64-bit arithmetic, so that they mean the same when compiled
and when run as Python. A word whose top bit is set is a negative number. `>>` copies its sign, so the functions
mask after the shift. Before they shift a half to the top, they extend its sign by ``(x ^ 0x80000000) - 0x80000000``,
which also keeps Python's unbounded integers within 64 bits. Bits beyond a field's width are dropped.

Source: NVM Express Base Specification, "Submission Queue Entry", "Completion Queue Entry"; NVM Command Set and Key
Value Command Set specifications, "Opcodes for ... Commands". The two command sets share opcodes: the namespace
determines which set a command belongs to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..targets import device

FLUSH = 0x00
WRITE = 0x01
READ = 0x02

KV_STORE = 0x01
KV_RETRIEVE = 0x02
KV_LIST = 0x06
KV_DELETE = 0x10
KV_EXIST = 0x14


def layout(*fields: tuple[str, str, int, int], size: int) -> np.dtype[Any]:
    """Return the dtype of a struct of `size` bytes.

    A field is its name, its format, and its first and last byte as in the specification's table. Raise ImportError if
    they contradict each other. This is not an assertion: ``python -O`` must not switch it off.
    """
    end = -1
    for name, format, first, last in fields:
        if first <= end or np.dtype(format).itemsize != last - first + 1 or last >= size:
            raise ImportError(f"field {name!r} of a wire struct is not bytes {first} to {last} of {size}")
        end = last
    names, formats, offsets = [f[0] for f in fields], [f[1] for f in fields], [f[2] for f in fields]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


COMMAND: np.dtype[Any] = layout(
    ("opc", "<u1", 0, 0),  # opcode
    ("flags", "<u1", 1, 1),  # fuse in bits 1:0, psdt in bits 7:6
    ("cid", "<u2", 2, 3),  # command identifier
    ("nsid", "<u4", 4, 7),  # namespace identifier
    ("cdw2", "<u4", 8, 11),
    ("cdw3", "<u4", 12, 15),
    ("mptr", "<u8", 16, 23),  # metadata pointer
    ("prp1", "<u8", 24, 31),  # data pointer, two physical region pages
    ("prp2", "<u8", 32, 39),
    ("cdw10", "<u4", 40, 43),  # the opcode determines the meaning of this field and those after it
    ("cdw11", "<u4", 44, 47),
    ("cdw12", "<u4", 48, 51),
    ("cdw13", "<u4", 52, 55),
    ("cdw14", "<u4", 56, 59),
    ("cdw15", "<u4", 60, 63),
    size=64,
)
COMPLETION: np.dtype[Any] = layout(
    ("dw0", "<u4", 0, 3),  # command specific
    ("dw1", "<u4", 4, 7),
    ("sqhd", "<u2", 8, 9),  # submission queue head pointer
    ("sqid", "<u2", 10, 11),  # submission queue identifier
    ("cid", "<u2", 12, 13),  # command identifier
    ("status", "<u2", 14, 15),  # phase in bit 0, then the 15 bits that are called status elsewhere
    size=16,
)


@device
def command_word0(opc: int, cid: int, nsid: int) -> int:
    """Return word 0 as a signed 64-bit integer, with flags 0: not fused, data at prp1 and prp2.

    Parameters
    ----------
    opc : int
        Opcode, 8 bits.
    cid : int
        Command identifier, 16 bits, unique among the commands in flight of the queue.
    nsid : int
        Namespace identifier, 32 bits.
    """
    high = ((nsid & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    return (high << 32) | ((cid & 0xFFFF) << 16) | (opc & 0xFF)


@device
def word0_opc(word: int) -> int:
    """Return the opcode in word 0."""
    return word & 0xFF


@device
def word0_cid(word: int) -> int:
    """Return the command identifier in word 0."""
    return (word >> 16) & 0xFFFF


@device
def word0_nsid(word: int) -> int:
    """Return the namespace identifier in word 0."""
    return (word >> 32) & 0xFFFFFFFF


@device
def word5_slba(word: int) -> int:
    """Return the starting logical block address in word 5, as a signed 64-bit integer."""
    return word


@device
def command_word6(nlb: int, control: int) -> int:
    """Return word 6 of a read or write, which is never negative; cdw13 is 0.

    Parameters
    ----------
    nlb : int
        Number of logical blocks *less one*, 16 bits: 0 means one block.
    control : int
        Upper half of cdw12, 16 bits; 0x4000 forces unit access.
    """
    return ((control & 0xFFFF) << 16) | (nlb & 0xFFFF)


@device
def word6_nlb(word: int) -> int:
    """Return the number of logical blocks less one in word 6."""
    return word & 0xFFFF


@device
def completion_word0(result: int) -> int:
    """Return word 0 as a signed 64-bit integer: dw0 in the low half of `result`, dw1 in the high half."""
    high = (((result >> 32) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    return (high << 32) | (result & 0xFFFFFFFF)


@device
def completion_word1(sqhd: int, sqid: int, cid: int, phase: int, status: int) -> int:
    """Return word 1, which a controller stores last, with release, as a signed 64-bit integer.

    Parameters
    ----------
    sqhd : int
        Submission queue head, 16 bits.
    sqid : int
        Submission queue identifier, 16 bits.
    cid : int
        Identifier of the command that completed, 16 bits.
    phase : int
        0 or 1.
    status : int
        15 bits, without the phase; see `warpwell.nvme.status_of`. With its dnr bit, the word is negative.
    """
    top = ((status & 0x7FFF) << 1) | (phase & 1)
    top = (top ^ 0x8000) - 0x8000
    return (top << 48) | ((cid & 0xFFFF) << 32) | ((sqid & 0xFFFF) << 16) | (sqhd & 0xFFFF)


@device
def word1_sqhd(word: int) -> int:
    """Return the submission queue head in word 1."""
    return word & 0xFFFF


@device
def word1_sqid(word: int) -> int:
    """Return the submission queue identifier in word 1."""
    return (word >> 16) & 0xFFFF


@device
def word1_cid(word: int) -> int:
    """Return the command identifier in word 1."""
    return (word >> 32) & 0xFFFF


@device
def word1_phase(word: int) -> int:
    """Return the phase bit, 0 or 1, in word 1."""
    return (word >> 48) & 1


@device
def word1_status(word: int) -> int:
    """Return the 15-bit status, without the phase, in word 1; 0 is success."""
    return (word >> 49) & 0x7FFF
