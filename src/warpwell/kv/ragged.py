"""Ragged: items of different lengths in one buffer, as in Arrow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import imported
from ..targets.primitives import copy_bytes, load_weak_as
from .native import INT64, UINT8, address_of, compiled


class Ragged:
    """A sequence of items of different lengths in one buffer: arrays, bytes or strings.

    Batches that a store returns have ragged fields in this form, and `Store.put_many` stores a `Ragged` without a
    Python loop over the records. ``ragged[i]`` is an item: an array that is a view of the buffer, bytes, or a string.
    Indexing by a slice, a mask or an array of positions selects items without a copy.

    Parameters
    ----------
    values : array
        [total] or [total, ...]: the items one after the other, along the first axis. For bytes and strings uint8.
    offsets : array of int
        [N + 1]. Item i is ``values[offsets[i]:offsets[i + 1]]``.
    item_type : {numpy.ndarray, bytes, str}
        The type of the items; strings are UTF-8.

    Attributes
    ----------
    item_type : type
    dtype : numpy.dtype
    item_shape : tuple of int
        Shape of a row of an item; ``()`` if items have one dimension.
    lengths : numpy.ndarray
        int64 [N]: the lengths of the items along the first axis.

    Raises
    ------
    ArgumentError
        The offsets decrease or exceed the values, or the values have a wrong type.
    """

    __slots__ = ("_is_padded", "_items", "_width", "dtype", "item_shape", "item_type", "lengths")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Any, offsets: Any, item_type: type = np.ndarray) -> None:
        array, bounds = np.asarray(values), np.asarray(offsets)
        if item_type not in (np.ndarray, bytes, str):
            raise errors.ArgumentError(
                f"item_type must be numpy.ndarray, bytes or str, got {item_type!r}", name="item_type"
            )
        if array.ndim < 1 or array.dtype.kind not in "biufc":
            raise errors.ArgumentError(
                f"values must be an array of numbers with one dimension or more, got {array.dtype} {array.shape}",
                name="values",
            )
        if item_type is not np.ndarray and (array.dtype != UINT8 or array.ndim != 1):
            raise errors.ArgumentError(
                f"values must be uint8 [total] for items of type {item_type.__name__}, got {array.dtype} {array.shape}",
                name="values",
            )
        if bounds.ndim != 1 or not bounds.size or bounds.dtype.kind not in "iu":
            raise errors.ArgumentError(
                f"offsets must be an integer array of shape (N + 1,), got {bounds.dtype} {bounds.shape}", name="offsets"
            )
        bounds = bounds.astype(np.int64)
        lengths = np.diff(bounds)
        if bounds[0] < 0 or bounds[-1] > len(array) or (lengths < 0).any():
            raise errors.ArgumentError(
                f"offsets must not decrease and must be between 0 and {len(array)}, the number of values: check them",
                name="offsets",
            )
        shape = array.shape[1:]
        self._set(np.ascontiguousarray(array).reshape(-1), bounds[:-1] * _size(shape), lengths, shape, item_type)

    def _set(
        self,
        source: NDArray[Any],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        shape: tuple[int, ...],
        item_type: type,
    ) -> None:
        lengths = np.ascontiguousarray(lengths)  # native code reads them; the lengths of `ragged[::2]` are strided
        self._items = source, starts  # one tuple, because `_packed` replaces both at once
        self.item_shape, self._width = shape, _size(shape)
        self.dtype, self.lengths, self.item_type = source.dtype, lengths, item_type
        self._is_padded = False  # whether only zeros are known to be between the items
        lengths.setflags(write=False)  # native code copies items of these lengths

    @classmethod
    def of_pieces(
        cls,
        source: NDArray[Any],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        shape: tuple[int, ...] = (),
        item_type: type = np.ndarray,
    ) -> Ragged:
        """Return items at any positions of a contiguous array, without checks.

        `starts` are positions in `source`, which has one dimension; `shape` is the shape of a row of an item.
        """
        made = cls.__new__(cls)
        made._set(source, starts, lengths, shape, item_type)
        return made

    @classmethod
    def from_arrow(cls, array: Any) -> Ragged:
        """Return the items of an Arrow array of binaries, strings or lists of numbers; values are not copied.

        Parameters
        ----------
        array : pyarrow.Array or pyarrow.ChunkedArray
            Or an object that exports one of them (``__arrow_c_array__``, ``__arrow_c_stream__``).

        Raises
        ------
        ArgumentError
            The array has nulls, or items of another type.
        """
        pa = imported("pyarrow", "table")
        if not isinstance(array, pa.Array | pa.ChunkedArray):
            array = pa.chunked_array(array) if hasattr(array, "__arrow_c_stream__") else pa.array(array)
        item_type: type = np.ndarray
        kind = array.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            large = pa.large_list(kind.value_type)
        else:
            item_type, large = (str, pa.large_string()) if "string" in str(kind) else (bytes, pa.large_binary())
        try:
            array = array.cast(large)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise errors.ArgumentError(
                f"an Arrow array of type {kind} does not have items of different lengths: cast it to binaries, strings"
                " or lists of numbers",
                name="array",
            ) from None
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        _refuse_nulls(array)
        if item_type is np.ndarray:
            return cls(numbers_of_lists(array.values), array.offsets.to_numpy())
        _, bounds, contents = array.buffers()
        if not len(array):
            return cls(np.empty(0, np.uint8), [0], item_type)
        offsets = np.frombuffer(bounds, np.int64, len(array) + 1, 8 * array.offset)
        return cls(np.frombuffer(contents or b"", np.uint8), offsets, item_type)

    # -- contents -------------------------------------------------------------------------------------------

    @property
    def values(self) -> NDArray[Any]:
        """The items one after the other, [total] or [total, ...]; non-contiguous items are copied at first use."""
        return self._packed()[0]

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Positions in `values` where items begin and end: int64 [N + 1]; the first one is 0."""
        return self._packed()[1]

    def _packed(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        source, starts = self._items
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        ends = offsets * self._width
        first = int(starts[0]) if len(starts) else 0
        if not np.array_equal(starts - first, ends[:-1]):
            source, first = np.empty(int(ends[-1]), self.dtype), 0
            self.copy_to(source, ends[:-1] * self.dtype.itemsize)
            self._items = source, ends[:-1]
        return source[first : first + int(ends[-1])].reshape(-1, *self.item_shape), offsets

    def copy_to(self, target: NDArray[Any], positions: NDArray[np.int64]) -> None:
        """Copy the items to byte positions in `target`, which has room for them."""
        source, starts = self._items
        itemsize = self.dtype.itemsize
        copy_items(address_of(source) + starts * itemsize, self.lengths * (self._width * itemsize), target, positions)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        source, starts = self._items
        try:
            start, length = starts[index], self.lengths[index]
            if np.ndim(start) > 1 or isinstance(index, bool):
                raise IndexError
        except IndexError:
            if not isinstance(index, int | np.integer) or isinstance(index, bool):
                raise errors.ArgumentError(
                    f"index {index!r:.60} does not select items of a Ragged: use a number, a slice, a mask or an array"
                    " of positions",
                    name="index",
                ) from None
            raise errors.IndexRangeError(
                f"index {index} of a Ragged with {len(self)} items", array="Ragged", index=int(index), size=len(self)
            ) from None
        if isinstance(start, np.ndarray):
            return Ragged.of_pieces(source, start, length, self.item_shape, self.item_type)
        contents: Any = source if self.item_type is np.ndarray else source.data
        return self._item(contents, int(start), int(start + length * self._width))

    def __iter__(self) -> Iterator[Any]:
        source, starts = self._items
        ends = starts + self.lengths * self._width
        contents: Any = source if self.item_type is np.ndarray else source.data
        return map(self._item, itertools.repeat(contents), starts.tolist(), ends.tolist())

    def _item(self, source: Any, start: int, end: int) -> Any:
        if self.item_type is np.ndarray:
            return source[start:end].reshape(-1, *self.item_shape) if self.item_shape else source[start:end]
        return bytes(source[start:end]) if self.item_type is bytes else str(source[start:end], "utf-8")

    def to_list(self) -> list[Any]:
        """Return the items in a list."""
        return list(self)

    def to_arrow(self) -> Any:
        """Return the items as a pyarrow array of large binaries, strings or lists, which shares `values`."""
        pa = imported("pyarrow", "table")
        values, offsets = self._packed()
        if self.item_type is not np.ndarray:
            kind = pa.large_string() if self.item_type is str else pa.large_binary()
            return pa.Array.from_buffers(kind, len(self), [None, pa.py_buffer(offsets), pa.py_buffer(values)])
        try:
            items = pa.array(values.reshape(-1))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise errors.ArgumentError(
                f"Arrow has no type for {self.dtype}: use values and offsets instead", name="dtype"
            ) from None
        for extent in reversed(self.item_shape):
            items = pa.FixedSizeListArray.from_arrays(items, extent)
        return pa.LargeListArray.from_arrays(pa.array(offsets), items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        is_same_type = (self.item_type, self.dtype, self.item_shape) == (other.item_type, other.dtype, other.item_shape)
        return bool(
            is_same_type and np.array_equal(self.lengths, other.lengths) and np.array_equal(self.values, other.values)
        )

    def __reduce__(self) -> Any:
        return Ragged, (*self._packed(), self.item_type)

    def __repr__(self) -> str:
        name = str(self.dtype) if self.item_type is np.ndarray else self.item_type.__name__
        shape = f" [..., {', '.join(map(str, self.item_shape))}]" if self.item_shape else ""
        return f"<Ragged of {len(self)} items, {name}{shape}, {int(self.lengths.sum())} values>"


def copy_items(
    addresses: NDArray[np.int64], sizes: NDArray[np.int64], target: NDArray[Any], positions: NDArray[np.int64]
) -> None:
    """Copy `sizes` bytes from `addresses` to byte positions in `target`, which has room for them."""
    arrays = [np.ascontiguousarray(array) for array in (addresses, sizes, target, positions)]
    compiled(_copy_items)(*(address_of(array) for array in arrays), len(sizes))


def _copy_items(addresses, sizes, target, positions, count):  # type: ignore[no-untyped-def]
    for k in range(count):
        to = target + load_weak_as(positions + 8 * k, INT64)
        copy_bytes(to, load_weak_as(addresses + 8 * k, INT64), load_weak_as(sizes + 8 * k, INT64))
    return 0


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _refuse_nulls(array: Any) -> None:
    if array.null_count:
        raise errors.ArgumentError(
            f"an Arrow array has {array.null_count} nulls, but records have a value in each field: fill or drop them",
            name="array",
        )


def numbers_of_lists(array: Any) -> NDArray[Any]:
    """Return the items of an Arrow array of numbers, or of lists of a fixed size, as an array [N, ...].

    Raises
    ------
    ArgumentError
        The array has nulls.
    """
    pa = imported("pyarrow", "table")
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    shape: list[int] = []
    while True:
        _refuse_nulls(array)
        if not pa.types.is_fixed_size_list(array.type):
            break
        shape.append(array.type.list_size)
        array = array.flatten()
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values.reshape(-1, *shape)
