"""Command: the 64-byte submission queue entry.

`COMMAND` is the entry as a NumPy dtype, for the host. Device code sees the same bytes as eight little-endian
64-bit words: the functions here build those words and take them apart.

======  ==========================  ==================================================================
word    fields, low half first      in a read or write command
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

The functions are device code: only shifts, masks and signed 64-bit arithmetic, so they mean the same when
compiled and when run as Python. A word whose top bit is set is a negative number. `>>` then copies the sign,
so the mask comes after it; and before a shift into the top half, that half is given its sign by
``(x ^ 0x80000000) - 0x80000000``, which keeps Python's unbounded integers within 64 bits too. None of them
calls another, so each can be registered as device code alone.

Source: NVM Express Base Specification, "Submission Queue Entry"; NVM Command Set Specification, "Read",
"Write".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._check import require_layout

COMMAND: np.dtype[Any] = np.dtype(
    [
        ("opc", "<u1"),  # opcode
        ("flags", "<u1"),  # fuse in bits 1:0, psdt in bits 7:6
        ("cid", "<u2"),  # command identifier
        ("nsid", "<u4"),  # namespace identifier
        ("cdw2", "<u4"),
        ("cdw3", "<u4"),
        ("mptr", "<u8"),  # metadata pointer
        ("prp1", "<u8"),  # data pointer, two physical region pages
        ("prp2", "<u8"),
        ("cdw10", "<u4"),  # from here on the opcode gives the meaning
        ("cdw11", "<u4"),
        ("cdw12", "<u4"),
        ("cdw13", "<u4"),
        ("cdw14", "<u4"),
        ("cdw15", "<u4"),
    ]
)

COMMAND_BYTES = 64
COMMAND_WORDS = 8

# Index of a 64-bit word in a command.
WORD_ID = 0
WORD_CDW2 = 1
WORD_MPTR = 2
WORD_PRP1 = 3
WORD_PRP2 = 4
WORD_CDW10 = 5
WORD_CDW12 = 6
WORD_CDW14 = 7

# Values of `flags`.
FUSE_FIRST = 0x01
FUSE_SECOND = 0x02
PSDT_SGL = 0x40

# Values of `control`, which is the upper half of cdw12 of a read or write.
CONTROL_FUA = 0x4000  # force unit access: the data is durable when the command completes
CONTROL_LIMITED_RETRY = 0x8000

# nlb has 16 bits and counts from zero.
MAX_BLOCKS = 65536

require_layout(
    COMMAND,
    COMMAND_BYTES,
    {
        "opc": WORD_ID * 8,
        "flags": WORD_ID * 8 + 1,
        "cid": WORD_ID * 8 + 2,
        "nsid": WORD_ID * 8 + 4,
        "cdw2": WORD_CDW2 * 8,
        "cdw3": WORD_CDW2 * 8 + 4,
        "mptr": WORD_MPTR * 8,
        "prp1": WORD_PRP1 * 8,
        "prp2": WORD_PRP2 * 8,
        "cdw10": WORD_CDW10 * 8,
        "cdw11": WORD_CDW10 * 8 + 4,
        "cdw12": WORD_CDW12 * 8,
        "cdw13": WORD_CDW12 * 8 + 4,
        "cdw14": WORD_CDW14 * 8,
        "cdw15": WORD_CDW14 * 8 + 4,
    },
)


def command_word0(opc: int, cid: int, nsid: int) -> int:
    """Build word 0: opcode, command identifier and namespace; flags 0 (not fused, data at prp1 and prp2).

    Parameters
    ----------
    opc : int
        Opcode, 8 bits.
    cid : int
        Command identifier, 16 bits, unique among the queue's commands under way.
    nsid : int
        Namespace identifier, 32 bits.

    Returns
    -------
    int
        The word as a signed 64-bit integer. Bits beyond a field's width are dropped.
    """
    high = ((nsid & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    return (high << 32) | ((cid & 0xFFFF) << 16) | (opc & 0xFF)


def word0_opc(word: int) -> int:
    """Take the opcode out of word 0."""
    return word & 0xFF


def word0_flags(word: int) -> int:
    """Take fuse (bits 1:0) and psdt (bits 7:6) out of word 0."""
    return (word >> 8) & 0xFF


def word0_cid(word: int) -> int:
    """Take the command identifier out of word 0."""
    return (word >> 16) & 0xFFFF


def word0_nsid(word: int) -> int:
    """Take the namespace identifier out of word 0."""
    return (word >> 32) & 0xFFFFFFFF


def command_word5(slba: int) -> int:
    """Build word 5 of a read or write: the starting logical block address, 64 bits.

    Parameters
    ----------
    slba : int
        First logical block.

    Returns
    -------
    int
        The word as a signed 64-bit integer.
    """
    high = (((slba >> 32) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    return (high << 32) | (slba & 0xFFFFFFFF)


def word5_slba(word: int) -> int:
    """Take the starting logical block address out of word 5, as a signed 64-bit integer."""
    return word


def command_word6(nlb: int, control: int) -> int:
    """Build word 6 of a read or write; cdw13 is 0.

    Parameters
    ----------
    nlb : int
        Number of logical blocks *less one*, 16 bits: 0 means one block.
    control : int
        Upper half of cdw12, 16 bits, for example `CONTROL_FUA`.

    Returns
    -------
    int
        The word; never negative.
    """
    return ((control & 0xFFFF) << 16) | (nlb & 0xFFFF)


def word6_nlb(word: int) -> int:
    """Take the number of logical blocks less one out of word 6."""
    return word & 0xFFFF


def word6_control(word: int) -> int:
    """Take the upper half of cdw12 out of word 6."""
    return (word >> 16) & 0xFFFF


def word_of(low: int, high: int) -> int:
    """Build any word from its two 32-bit halves, for example word 1 from cdw2 and cdw3.

    Parameters
    ----------
    low, high : int
        The halves, 32 bits each.

    Returns
    -------
    int
        The word as a signed 64-bit integer.
    """
    return ((((high & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000) << 32) | (low & 0xFFFFFFFF)


def word_low(word: int) -> int:
    """Take the lower 32 bits out of a word, unsigned: cdw2, cdw10, cdw12 or cdw14."""
    return word & 0xFFFFFFFF


def word_high(word: int) -> int:
    """Take the upper 32 bits out of a word, unsigned: cdw3, cdw11, cdw13 or cdw15."""
    return (word >> 32) & 0xFFFFFFFF
