"""Keys: the types that callers may pass, the arrays for the log and the index, and the order of keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_bytes
from ..nvme import MAX_KEY_BYTES as MAX_KEY
from ..nvme import key_words
from .log.format import INTEGER, KEY_LEN_SHIFT, LONG

Key = int | bytes | str
LONGEST_KEY = 511
"""Size of the longest key in bytes. The index has hashes of keys above `MAX_KEY` bytes; kernels cannot find these."""
SUFFIX_BYTES = LONGEST_KEY + 2
"""Size of the longest suffix in bytes; see `suffix_of`."""
INT_KEY = 8
"""Size of an integer's key in bytes; the order is little-endian."""

_INT64 = np.dtype(np.int64)


class Keys(NamedTuple):
    """Checked keys of a batch.

    Attributes
    ----------
    words : numpy.ndarray
        int64 [N] if all keys have 8 bytes; otherwise int64 [N, 2], zero-padded. C order.
    lengths : numpy.ndarray or None
        uint8 [N]; None if every key has 8 bytes and `words` is flat.
    integers : numpy.ndarray, bool or None
        Which keys were passed as integers: bool [N], or one bool for all. None is True if `words` is flat, else False.
    full : numpy.ndarray or None
        The bytes of long keys (more than 16 bytes), object [N], with None for shorter keys; None without long keys.
        The words of a long key are its hash, and its length is `LONG`. Keys from the log have only the hash.
    """

    words: NDArray[np.int64]
    lengths: NDArray[np.uint8] | None
    integers: NDArray[np.bool_] | bool | None = None
    full: NDArray[np.object_] | None = None

    @property
    def size(self) -> int:
        """Number of keys."""
        return len(self.words)

    def padded(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return uint8 [N, 16], zero-padded, and uint8 [N] lengths; for long keys the hash and `LONG`."""
        if self.lengths is not None:
            return self.words.view(np.uint8), self.lengths
        out = np.zeros((self.size, 2), np.int64)
        out[:, 0] = self.words
        return out.view(np.uint8), np.full(self.size, INT_KEY, np.uint8)

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """Return the keys as uint8 [N, width], zero-padded, and their lengths [N]; `width` is at least 16."""
        if self.full is None:
            return self.padded()
        raw = [self.raw(k) for k in range(self.size)]
        lengths = np.fromiter(map(len, raw), np.uint16, self.size)
        width = int(lengths.max(initial=MAX_KEY))
        return np.frombuffer(b"".join(key.ljust(width, b"\0") for key in raw), np.uint8).reshape(-1, width), lengths

    def marked(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the result of `padded`, with the flag `INTEGER` in the lengths of integers."""
        padded, lengths = self.padded()
        kinds = self.kinds
        if kinds is not False:
            lengths = lengths | np.where(kinds, INTEGER, 0).astype(np.uint8)
        return padded, lengths

    @property
    def kinds(self) -> NDArray[np.bool_] | bool:
        """Which keys are integers: bool [N], or one bool for all."""
        return self.lengths is None if self.integers is None else self.integers

    @property
    def all_integers(self) -> bool:
        """Whether every key is an integer."""
        return bool(np.all(self.kinds))

    def numbers(self) -> NDArray[np.int64]:
        """Return the first 8 bytes of each key as an integer."""
        return self.words if self.words.ndim == 1 else self.words[:, 0]

    def take(self, rows: NDArray[Any] | slice) -> Keys:
        """Return the keys of some rows (indices, a mask or a slice)."""
        lengths = None if self.lengths is None else self.lengths[rows]
        integers = self.integers[rows] if isinstance(self.integers, np.ndarray) else self.integers
        full = None if self.full is None else self.full[rows]
        return Keys(np.ascontiguousarray(self.words[rows]), lengths, integers, full)

    def copied(self) -> Keys:
        """Return a copy of the keys, so that the caller may change its array."""
        lengths = None if self.lengths is None else self.lengths.copy()
        return self._replace(words=self.words.copy(), lengths=lengths)

    def raw(self, k: int) -> bytes:
        """Return the bytes of one key."""
        if self.lengths is None:
            return int(self.words[k]).to_bytes(INT_KEY, "little", signed=True)
        if self.full is not None and self.full[k] is not None:
            return bytes(self.full[k])
        return bytes(self.words[k].tobytes()[: int(self.lengths[k])])

    def row(self, k: int) -> int | bytes:
        """Return one key, as an integer or as bytes."""
        kinds = self.kinds
        if kinds[k] if isinstance(kinds, np.ndarray) else kinds:
            return int(self.numbers()[k])
        return self.raw(k)

    def to_list(self) -> list[int | bytes]:
        """Return the keys: integers as int, all others as bytes."""
        kinds = self.kinds
        if kinds is True:
            numbers: list[int | bytes] = self.numbers().tolist()
            return numbers
        padded, lengths = self.padded()
        raw = padded.tobytes()
        out: list[int | bytes] = [raw[16 * k : 16 * k + n] for k, n in enumerate(lengths.tolist())]
        if isinstance(kinds, np.ndarray):
            rows = np.flatnonzero(kinds)
            for k, number in zip(rows.tolist(), self.numbers()[rows].tolist(), strict=True):
                out[k] = number
        if self.full is not None:
            out = [key if full is None else full for key, full in zip(out, self.full, strict=True)]
        return out


def keys_in(slots: NDArray[np.int64]) -> Keys:
    """Return the keys in slots (int64 [N, 4]: key0, key1, loc0, loc1); long keys without `full`."""
    marked = slots[:, 3] >> KEY_LEN_SHIFT
    lengths = (marked & (INTEGER - 1)).astype(np.uint8)
    return Keys(np.ascontiguousarray(slots[:, :2]), lengths, marked & INTEGER != 0)


def as_key(key: Any) -> bytes:
    """Return one key as bytes.

    Parameters
    ----------
    key : int, bytes or str
        A 64-bit integer becomes its 8 bytes, little-endian; a string becomes UTF-8.

    Raises
    ------
    ArgumentError
        The key has 0 or more than 511 bytes, is an integer of more than 64 bits, or has another type.
    """
    if isinstance(key, bytes):
        raw = key
    elif isinstance(key, str):
        raw = checked_bytes(key, "key")
    elif is_integer(key):
        try:
            return int(key).to_bytes(INT_KEY, "little", signed=True)
        except OverflowError:
            raise errors.ArgumentError(
                f"key {int(key)} is not a signed 64-bit integer: pass it as bytes, at most {LONGEST_KEY}", name="key"
            ) from None
    elif isinstance(key, (bytearray, memoryview)):
        raw = bytes(key)
    else:
        raise errors.ArgumentError(
            f"a key has type {type(key).__name__}: pass an int of 64 bits, bytes or str", name="key"
        )
    if not 1 <= len(raw) <= LONGEST_KEY:
        raise _length_error(raw, len(raw))
    return raw


def hash_of_long(key: bytes) -> bytes:
    """Return the 16 bytes that stand for a long key in the index."""
    return hashlib.blake2b(key, digest_size=MAX_KEY).digest()


def one_key(key: bytes) -> Keys:
    """Return a checked key as a batch; long keys are faster than by `from_bytes`."""
    if len(key) <= MAX_KEY:
        return from_bytes([key])
    long_key_words = np.frombuffer(hash_of_long(key), np.int64).reshape(1, 2)
    return Keys(long_key_words, np.full(1, LONG, np.uint8), None, np.array([key], np.object_))


def words_of(key: bytes) -> tuple[int, int, int]:
    """Return the two words and the length by which the index finds a key."""
    if len(key) > MAX_KEY:
        return *key_words(hash_of_long(key)), LONG
    return *key_words(key), len(key)


def suffix_of(key: bytes) -> bytes:
    """Return the bytes that are stored after the value of a long key: the key, and its length in two bytes."""
    return key + len(key).to_bytes(2, "little")


def long_key_in(end: bytes, hashed: bytes) -> bytes:
    """Return the long key in the last `SUFFIX_BYTES` of a stored value; b"" if it is damaged."""
    length = int.from_bytes(end[-2:], "little")
    key = end[-2 - length : -2]
    return key if MAX_KEY < length == len(key) and hash_of_long(key) == hashed else b""


def is_integer(key: Any) -> bool:
    """Return whether a key is an integer."""
    return isinstance(key, (int, np.integer)) and not isinstance(key, bool)


def shown(key: Any) -> int | bytes:
    """Return a key as messages show it: an integer as int, all others as bytes."""
    raw = as_key(key)
    return int(key) if is_integer(key) else raw


def as_keys(keys: Any) -> Keys:
    """Check the keys of a batch and convert them to arrays.

    Parameters
    ----------
    keys : array or iterable
        An array of integers [N]; uint8 [N, width] (keys of `width` bytes), alone or in a tuple with the keys'
        lengths [N]; an array of strings, or ``S`` of one length; or an iterable, or an Arrow array, of int, bytes and
        str.

    Raises
    ------
    ArgumentError
        As for `as_key`.
    """
    if isinstance(keys, Keys):
        return keys
    if isinstance(keys, tuple) and len(keys) == 2 and isinstance(keys[0], np.ndarray) and keys[0].ndim == 2:
        return _padded(keys[0], np.asarray(keys[1]))
    if hasattr(keys, "to_pylist"):  # of Arrow
        keys = keys.to_pylist()
    if hasattr(keys, "__dlpack__") and not isinstance(keys, np.ndarray):
        keys = np.from_dlpack(keys)
    if isinstance(keys, np.ndarray):
        if keys.dtype == _INT64 and keys.ndim == 1:
            return Keys(np.ascontiguousarray(keys), None)
        return _from_array(keys)
    if isinstance(keys, (str, bytes, int)) or not isinstance(keys, Iterable):
        raise errors.ArgumentError(
            f"keys is a single {type(keys).__name__}: pass a list or an array of keys, or use the method for one key",
            name="keys",
        )
    listed = list(keys)
    if listed and all(type(k) is int for k in listed):
        try:
            return Keys(np.array(listed, np.int64), None)
        except OverflowError:
            pass  # `as_key` raises an error that names the key
    return _from_list(listed)


def _from_list(keys: list[Any]) -> Keys:
    kinds = set(map(type, keys))
    if kinds == {bytes} and (longest := max(map(len, keys))) <= LONGEST_KEY and all(keys):
        return from_bytes(keys, longest)
    out = from_bytes([as_key(k) for k in keys])
    if kinds <= {bytes, str}:
        return out
    integers = np.fromiter(map(is_integer, keys), np.bool_, len(keys))
    return out._replace(integers=integers) if integers.any() else out


def from_bytes(keys: list[bytes], longest: int = LONGEST_KEY) -> Keys:
    """Convert checked keys that are not integers, of at most `longest` bytes, to arrays."""
    full = None
    lengths: NDArray[Any] = np.fromiter(map(len, keys), np.uint8 if longest <= MAX_KEY else np.uint16, len(keys))
    if longest > MAX_KEY and (lengths > MAX_KEY).any():
        lengths = np.minimum(lengths, LONG)
        full = np.array([k if len(k) > MAX_KEY else None for k in keys], np.object_)
        keys = [hash_of_long(k) if len(k) > MAX_KEY else k for k in keys]
    raw = b"".join([k.ljust(MAX_KEY, b"\0") for k in keys])
    pairs = np.frombuffer(bytearray(raw), np.int64).reshape(-1, 2)
    if len(keys) and (lengths == INT_KEY).all():
        return Keys(np.ascontiguousarray(pairs[:, 0]), None, False)
    return Keys(pairs, lengths.astype(np.uint8, copy=False), None, full)


def _from_array(keys: NDArray[Any]) -> Keys:
    kind = keys.dtype.kind
    if keys.ndim == 2 and keys.dtype == np.uint8:
        return _padded(keys, np.full(len(keys), keys.shape[1]))
    if keys.ndim != 1:
        raise errors.ArgumentError(
            f"an array of keys of shape {keys.shape} and dtype {keys.dtype}: pass integers [N] or uint8 [N, 16]",
            name="keys",
        )
    if not keys.size:
        return Keys(np.zeros(0, np.int64), None)  # the dtype of an empty array is arbitrary
    if kind in "iu":
        if keys.dtype == np.uint64 and keys.size and keys.max() > np.uint64((1 << 63) - 1):
            raise errors.ArgumentError(
                f"key {int(keys.max())} is not a signed 64-bit integer: pass keys.view('int64'), or bytes", name="keys"
            )
        return Keys(np.ascontiguousarray(keys, np.int64), None)
    require_no_padding(keys, "keys")
    if kind in "SUOT":
        return _from_list(keys.tolist())
    raise errors.ArgumentError(
        f"an array of keys of dtype {keys.dtype}: pass integers [N] or uint8 [N, 16]", name="keys"
    )


def require_no_padding(array: Any, name: str) -> None:
    """Raise ArgumentError for an array of bytes in which some items are shorter than others."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "S":
        return
    last_bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)[array.itemsize - 1 :: array.itemsize]
    if not last_bytes.all():
        raise errors.ArgumentError(
            f"{name} is an array of dtype {array.dtype} in which some items are shorter: it does not distinguish zeros"
            " at the end of an item from padding. Pass the list of bytes that it was made of",
            name=name,
        )


def _padded(keys: NDArray[Any], lengths: NDArray[Any]) -> Keys:
    if keys.dtype != np.uint8 or not 1 <= keys.shape[1] <= LONGEST_KEY:
        raise errors.ArgumentError(
            f"an array of keys of shape {keys.shape} and dtype {keys.dtype}: pass uint8 [N, 1 to {LONGEST_KEY}]",
            name="keys",
        )
    if lengths.shape != (len(keys),) or lengths.dtype.kind not in "iu":
        raise errors.ArgumentError(
            f"lengths of shape {lengths.shape} and dtype {lengths.dtype} for {len(keys)} keys: pass one per key",
            name="keys",
        )
    wrong = np.flatnonzero((lengths < 1) | (lengths > keys.shape[1]))
    if wrong.size:
        raise _length_error(keys[wrong[0]].tobytes(), int(lengths[wrong[0]]))
    if keys.shape[1] > MAX_KEY:
        return from_bytes([key.tobytes()[:n] for key, n in zip(keys, lengths.tolist(), strict=True)])
    out = np.zeros((len(keys), MAX_KEY), np.uint8)
    out[:, : keys.shape[1]] = keys
    lengths = lengths.astype(np.uint8)
    # bytes after a key's length do not belong to it
    out[np.arange(MAX_KEY) >= lengths[:, None]] = 0
    if len(keys) and (lengths == INT_KEY).all():
        return Keys(np.ascontiguousarray(out.view(np.int64)[:, 0]), None, False)
    return Keys(out.view(np.int64), lengths)


def _length_error(raw: bytes, length: int) -> errors.ArgumentError:
    shown = raw[:24]
    more = "..." if len(raw) > len(shown) else ""
    return errors.ArgumentError(
        f"key {shown!r}{more} has {length} bytes: keys have 1 to {LONGEST_KEY}; hash longer ones", name="key"
    )


Columns = tuple[NDArray[Any], ...]


def in_order(keys: Keys) -> Keys:
    """Return keys in the order of stores: integers ascending, then all other keys in byte order."""
    if keys.all_integers:
        return Keys(np.sort(keys.numbers()), None)
    if keys.full is not None:
        listed = keys.to_list()
        return keys.take(np.array(sorted(range(keys.size), key=lambda k: _rank(listed[k])), np.intp))
    return keys.take(np.lexsort(_columns(keys)))


def with_prefix(keys: Keys, prefix: bytes, start: int | bytes | None) -> Keys:
    """Return the keys that begin with `prefix` (integers never do) and are not before `start` in order."""
    if keys.full is not None or (isinstance(start, bytes) and len(start) > MAX_KEY):
        begin = None if start is None else _rank(start)
        listed = keys.to_list()
        fits = np.array([not prefix or (isinstance(key, bytes) and key.startswith(prefix)) for key in listed], np.bool_)
        return keys.take(fits & np.array([begin is None or _rank(key) >= begin for key in listed], np.bool_))
    raw, lengths = keys.padded()
    keep = lengths >= len(prefix)
    if prefix and len(prefix) <= raw.shape[1]:
        keep &= (raw[:, : len(prefix)] == np.frombuffer(prefix, np.uint8)).all(axis=1) & ~np.asarray(keys.kinds)
    if start is not None:
        later = np.ones(keys.size, np.bool_)
        for column, first in zip(_columns(keys), _columns(as_keys([start])), strict=True):  # least significant first
            later = (column > first[0]) | (column == first[0]) & later
        keep &= later
    return keys if keep.all() else keys.take(keep)


def _rank(key: int | bytes) -> tuple[bool, Any]:
    """Return a value that orders keys as `in_order` does."""
    return isinstance(key, bytes), key


def _columns(keys: Keys) -> Columns:
    """Return the sort columns of keys, the most significant last: padded bytes, then the length."""
    raw, lengths = keys.padded()
    big = np.ascontiguousarray(raw).view(">u8").reshape(-1, 2).astype(np.uint64)
    integers = np.broadcast_to(keys.kinds, keys.size)
    big[integers, 0] = keys.numbers()[integers].view(np.uint64) ^ np.uint64(1 << 63)
    return lengths, big[:, 1], big[:, 0], ~integers
