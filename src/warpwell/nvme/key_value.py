"""Words of a key-value command, and options of a store command.

A key of up to 16 bytes is part of the command: bytes 0 to 7 are word 1 (cdw2, cdw3), bytes 8 to 15 are word 7 (cdw14,
cdw15), padded with zeros. Word 5 has the sizes of key and value. Words 0, 3 and 4 are those of any command. The
completion of a retrieve has the full size of the value in dw0, even if the buffer was smaller.

All functions but `key_words` are device code, under the rules that `warpwell.nvme.wire` states.

Source: NVM Express Key Value Command Set Specification, "Store", "Retrieve", "List", "Delete", "Exist".
"""

from __future__ import annotations

import struct

from ..targets import device

MAX_KEY_BYTES = 16

STORE_IF_EXISTS = 0x01
"""Option, bit 8 of cdw11: do not store if the key does not exist."""
STORE_IF_MISSING = 0x02
"""Option, bit 9 of cdw11: do not store if the key exists."""


def key_words(key: bytes) -> tuple[int, int]:
    """Return the two words of a key, signed, as key-value functions in kernels take them (host).

    Parameters
    ----------
    key : bytes
        At most 16.

    Raises
    ------
    ValueError
        The key is longer.
    """
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"key must have at most {MAX_KEY_BYTES} bytes, got {len(key)} bytes; hash longer keys")
    low, high = struct.unpack("<qq", key.ljust(MAX_KEY_BYTES, b"\0"))
    return low, high


@device
def key_value_word5(value_size: int, key_size: int, options: int) -> int:
    """Return word 5, which is never negative: cdw10 is the size of value or buffer, cdw11 key size and options.

    Parameters
    ----------
    value_size : int
        Bytes, 32 bits: of the value in a store, of the buffer in a retrieve or list, 0 in other commands.
    key_size : int
        Bytes of the key, 0 to `MAX_KEY_BYTES`.
    options : int
        8 bits, for example `STORE_IF_MISSING`.
    """
    return ((options & 0xFF) << 40) | ((key_size & 0xFF) << 32) | (value_size & 0xFFFFFFFF)


@device
def word5_value_size(word: int) -> int:
    """Return the size of the value or buffer, in bytes, in word 5."""
    return word & 0xFFFFFFFF


@device
def word5_key_size(word: int) -> int:
    """Return the size of the key, in bytes, in word 5."""
    return (word >> 32) & 0xFF


@device
def word5_options(word: int) -> int:
    """Return the options in word 5."""
    return (word >> 40) & 0xFF
