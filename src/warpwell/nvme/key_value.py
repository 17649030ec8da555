"""The words of a key-value command, and options of store and retrieve.

A key of up to 16 bytes stands in the command itself: bytes 0 to 7 in word 1 (cdw2, cdw3), bytes 8 to 15 in
word 7 (cdw14, cdw15), the rest zero. Word 5 says how long key and value are. Words 0, 3 and 4 are those of
any command; the answer to a retrieve has the value's full size in dw0 of its completion, however small the
buffer was.

The functions are device code, under the rules that `warpwell.nvme.command` states.

Source: NVM Express Key Value Command Set Specification, "Store", "Retrieve", "List", "Delete", "Exist".
"""

from __future__ import annotations

__all__ = [
    "MAX_KEY_BYTES",
    "RETRIEVE_RAW",
    "STORE_IF_EXISTS",
    "STORE_IF_MISSING",
    "WORD_KEY_HIGH",
    "WORD_KEY_LOW",
    "key_value_word5",
    "word5_key_size",
    "word5_options",
    "word5_value_size",
]

MAX_KEY_BYTES = 16

# Index of the 64-bit words that hold the key.
WORD_KEY_LOW = 1
WORD_KEY_HIGH = 7

# Options, bits 15:8 of cdw11.
STORE_IF_EXISTS = 0x01  # bit 8: do not store where the key does not exist
STORE_IF_MISSING = 0x02  # bit 9: do not store where the key exists
RETRIEVE_RAW = 0x01  # bit 8: do not decompress


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
