"""The words of a key-value command, and options of store and retrieve.

A key of up to 16 bytes stands in the command itself: bytes 0 to 7 in word 1 (cdw2, cdw3), bytes 8 to 15 in
word 7 (cdw14, cdw15), the rest zero. Word 5 says how long key and value are. Words 0, 3 and 4 are those of
any command; the answer to a retrieve has the value's full size in dw0 of its completion, however small the
buffer was.

`KEY_VALUE_COMMAND` is the entry as a NumPy dtype, for the host; `key_words` and `key_of_words` turn keys into
words and back, for the host too. The other functions are device code, under the rules that
`warpwell.nvme.command` states.

Source: NVM Express Key Value Command Set Specification, "Store", "Retrieve", "List", "Delete", "Exist".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._check import require_layout

MAX_KEY_BYTES = 16

# Index of the 64-bit words that hold the key, and of the one that holds the sizes.
WORD_KEY_LOW = 1
WORD_KEY_HIGH = 7
WORD_SIZES = 5

# Options, bits 15:8 of cdw11.
STORE_IF_EXISTS = 0x01  # bit 8: do not store where the key does not exist
STORE_IF_MISSING = 0x02  # bit 9: do not store where the key exists
RETRIEVE_RAW = 0x01  # bit 8: do not decompress

KEY_VALUE_COMMAND: np.dtype[Any] = np.dtype(
    [
        ("opc", "<u1"),
        ("flags", "<u1"),
        ("cid", "<u2"),
        ("nsid", "<u4"),
        ("key_low", "<u8"),  # cdw2, cdw3: bytes 0 to 7 of the key, the first one lowest
        ("mptr", "<u8"),
        ("prp1", "<u8"),
        ("prp2", "<u8"),
        ("value_size", "<u4"),  # cdw10: of the value in a store, of the buffer in a retrieve or list
        ("key_size", "<u1"),  # cdw11 from here
        ("options", "<u1"),
        ("reserved", "<u2"),
        ("cdw12", "<u4"),
        ("cdw13", "<u4"),
        ("key_high", "<u8"),  # cdw14, cdw15: bytes 8 to 15
    ]
)

require_layout(
    KEY_VALUE_COMMAND,
    64,
    {
        "opc": 0,
        "flags": 1,
        "cid": 2,
        "nsid": 4,
        "key_low": WORD_KEY_LOW * 8,
        "mptr": 16,
        "prp1": 24,
        "prp2": 32,
        "value_size": WORD_SIZES * 8,
        "key_size": WORD_SIZES * 8 + 4,
        "options": WORD_SIZES * 8 + 5,
        "reserved": WORD_SIZES * 8 + 6,
        "cdw12": 48,
        "cdw13": 52,
        "key_high": WORD_KEY_HIGH * 8,
    },
)


def key_words(key: bytes) -> tuple[int, int]:
    """Return the two words of a key, signed (host).

    Parameters
    ----------
    key : bytes
        At most `MAX_KEY_BYTES`.

    Raises
    ------
    ValueError
        It is longer.
    """
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes: a command holds at most {MAX_KEY_BYTES}, so hash longer ones")
    low, high = np.frombuffer(key.ljust(MAX_KEY_BYTES, b"\0"), "<i8").tolist()
    return low, high


def key_of_words(low: int, high: int, size: int) -> bytes:
    """Return the key of two words, signed or not, and its size in bytes (host)."""
    return b"".join((word % 2**64).to_bytes(8, "little") for word in (low, high))[:size]


def key_value_word5(value_size: int, key_size: int, options: int) -> int:
    """Build word 5: cdw10 is the size of the value or of the host's buffer, cdw11 key size and options.

    Parameters
    ----------
    value_size : int
        Bytes, 32 bits: of the value in a store, of the buffer in a retrieve or list, 0 elsewhere.
    key_size : int
        Bytes of the key, 0 to `MAX_KEY_BYTES`.
    options : int
        8 bits, for example `STORE_IF_MISSING`.

    Returns
    -------
    int
        The word; never negative.
    """
    return ((options & 0xFF) << 40) | ((key_size & 0xFF) << 32) | (value_size & 0xFFFFFFFF)


def word5_value_size(word: int) -> int:
    """Take the size of the value or buffer, in bytes, out of word 5."""
    return word & 0xFFFFFFFF


def word5_key_size(word: int) -> int:
    """Take the size of the key, in bytes, out of word 5."""
    return (word >> 32) & 0xFF


def word5_options(word: int) -> int:
    """Take the options out of word 5."""
    return (word >> 40) & 0xFF
