"""Completion: the 16-byte completion queue entry.

`COMPLETION` is the entry as a NumPy dtype, for the host. Device code sees two little-endian 64-bit words:
word 0 is the command's result (dw0 and dw1), word 1 says whose it is and how it went.

==========  ==========  ===============================================================================
bits of     field
word 1
==========  ==========  ===============================================================================
15:0        sqhd        submission queue head: entries before it may be written again
31:16       sqid        submission queue identifier
47:32       cid         identifier of the command that completed
48          phase       flips each time the controller comes round the ring: tells new entries from old
56:49       sc          status code
59:57       sct         status code type
61:60       crd         command retry delay
62          more        more can be read from the error log
63          dnr         do not retry: the same command would fail again
==========  ==========  ===============================================================================

`status` means the upper 15 of these bits throughout Warpwell, sc to dnr, *without* the phase: 0 is success;
only the field of `COMPLETION` keeps the phase in its bit 0, as the specification does. A consumer reads word
1 with acquire, compares its phase, and only then reads word 0. The functions are device code, under the rules
that `warpwell.nvme.command` states.

Source: NVM Express Base Specification, "Completion Queue Entry".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._check import require_layout

COMPLETION: np.dtype[Any] = np.dtype(
    [
        ("dw0", "<u4"),  # command specific
        ("dw1", "<u4"),
        ("sqhd", "<u2"),  # submission queue head pointer
        ("sqid", "<u2"),  # submission queue identifier
        ("cid", "<u2"),  # command identifier
        ("status", "<u2"),  # phase in bit 0, then the 15 bits that are called status elsewhere
    ]
)

COMPLETION_BYTES = 16
COMPLETION_WORDS = 2

# Index of a 64-bit word in a completion.
WORD_RESULT = 0
WORD_STATUS = 1

require_layout(
    COMPLETION,
    COMPLETION_BYTES,
    {
        "dw0": WORD_RESULT * 8,
        "dw1": WORD_RESULT * 8 + 4,
        "sqhd": WORD_STATUS * 8,
        "sqid": WORD_STATUS * 8 + 2,
        "cid": WORD_STATUS * 8 + 4,
        "status": WORD_STATUS * 8 + 6,
    },
)


def completion_word0(result: int) -> int:
    """Build word 0: the result of the command, dw0 in the low half and dw1 in the high half.

    Parameters
    ----------
    result : int
        64 bits, what they mean is up to the opcode.

    Returns
    -------
    int
        The word as a signed 64-bit integer.
    """
    high = (((result >> 32) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    return (high << 32) | (result & 0xFFFFFFFF)


def completion_word1(sqhd: int, sqid: int, cid: int, phase: int, status: int) -> int:
    """Build word 1, the one that a controller publishes last, with release.

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
        15 bits, without the phase; see `warpwell.nvme.status_of`.

    Returns
    -------
    int
        The word as a signed 64-bit integer: negative where status has its dnr bit.
    """
    top = ((status & 0x7FFF) << 1) | (phase & 1)
    top = (top ^ 0x8000) - 0x8000
    return (top << 48) | ((cid & 0xFFFF) << 32) | ((sqid & 0xFFFF) << 16) | (sqhd & 0xFFFF)


def word1_sqhd(word: int) -> int:
    """Take the submission queue head out of word 1."""
    return word & 0xFFFF


def word1_sqid(word: int) -> int:
    """Take the submission queue identifier out of word 1."""
    return (word >> 16) & 0xFFFF


def word1_cid(word: int) -> int:
    """Take the command identifier out of word 1."""
    return (word >> 32) & 0xFFFF


def word1_phase(word: int) -> int:
    """Take the phase bit, 0 or 1, out of word 1."""
    return (word >> 48) & 1


def word1_status(word: int) -> int:
    """Take the 15-bit status, without the phase, out of word 1; 0 is success."""
    return (word >> 49) & 0x7FFF
