"""ArrayView: the struct that kernels receive for an array."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import errors
from ..targets import DeviceStruct, Part, struct_function
from . import elements


@dataclass(frozen=True)
class ViewStatic:
    """Compile-time parameters of a view; a kernel is compiled once for each."""

    dtype: str
    ndim: int
    cached: bool
    writable: bool
    full: bool
    aligned: bool
    stride: int
    """Bytes between the items of the last dimension."""
    shift: int = 12
    """log2 of the page size; not used by a view without a cache."""
    direct_mapped: bool = False
    """Whether each page has a frame of its own."""
    fields: tuple[ViewField, ...] = ()
    """Fields of records."""
    packed: bool = False
    """Whether the items follow each other and are numbers of 1 to 8 bytes, item 0 at a multiple of 16 bytes."""


class ViewField(NamedTuple):
    """A field of records: ``a["name"]`` in a kernel is a view of it."""

    name: str
    offset: int
    shape: tuple[int, ...]
    """Shape of the field, if it is an array itself."""
    strides: tuple[int, ...]
    static: ViewStatic


class ArrayView(DeviceStruct):
    """An array in device code: subscripts, ``len``, ``shape``, and `methods`."""

    methods: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prefetch": ("view", "index"),
        "pin": ("view", "index"),
        "unpin": ("view", "index"),
    }

    def __init__(
        self,
        static: ViewStatic,
        values: dict[str, int | tuple[int, ...]],
        moved: Callable[[], bool] | None = None,
        owner: object = None,
    ) -> None:
        super().__init__(static, values)
        self._moved = moved
        self._owner = owner  # owner of the memory: an abandoned launch may still read it

    def _check(self) -> None:
        """Raise if the frames have moved or the array was closed since the view was created."""
        if self._moved is not None and self._moved():
            raise errors.ClosedError(
                "the view is outdated, because its array was closed, or another array was opened or closed on its "
                "cache: call a.view() for each launch"
            )

    @property
    def address(self) -> int:
        """Return the address of the flat words, while it is valid."""
        self._check()
        return super().address

    def flat(self) -> tuple[int, ...]:
        """Return the values in the order of the layout, while they are valid."""
        self._check()
        return super().flat()

    @classmethod
    def layout(cls, static: ViewStatic) -> Sequence[tuple[str, int | None]]:
        """Return the members: addresses, sizes, then shape and strides (bytes)."""
        names: tuple[str, ...] = elements.DIRECT_MEMBERS
        if static.cached:
            names = elements.DIRECT_MAPPED_MEMBERS if static.direct_mapped else elements.CACHED_MEMBERS
        return [*((name, None) for name in names), ("shape", static.ndim), ("strides", static.ndim)]

    @classmethod
    def part(cls, static: ViewStatic, name: str) -> Part:
        """Return how the view of a field is derived from the view of the records."""
        field = next((field for field in static.fields if field.name == name), None)
        if field is None:
            names = ", ".join(field.name for field in static.fields) or "none: the array is not an array of records"
            raise errors.DTypeError(f"items of {static.dtype} have no field {name!r}: known are {names}")
        moved = {"origin" if static.cached else "data": field.offset}
        return Part(
            field.static, moved, {"size": math.prod(field.shape)}, {"shape": field.shape, "strides": field.strides}
        )

    @classmethod
    def implementation(cls, name: str, static: ViewStatic, key: int | str | None) -> Callable[..., Any] | None:
        """Return the device function for a subscript or method."""
        if name == "len":
            return elements.length
        if not isinstance(key, int):
            return None
        if key != static.ndim:
            loop = "; loop over a[i, j], or use gpu.fold for a run of items" if key < static.ndim else ""
            raise errors.DTypeError(
                f"{key} {'index' if key == 1 else 'indices'} for an array of {static.ndim} dimensions: a kernel "
                f"subscripts one item, a[i, j]{loop}"
            )
        return _implementation(name, static)


@functools.cache
def _implementation(name: str, static: ViewStatic) -> Callable[..., Any] | None:
    if not 1 <= static.ndim <= elements.MAX_NDIM:
        raise errors.DTypeError(f"kernels subscript arrays of 1 to {elements.MAX_NDIM} dimensions: use a.reshape(...)")
    position = elements.position_of(static.ndim, static.stride)
    if name in ("prefetch", "pin", "unpin"):
        return elements.residency(name, position, static)
    maker = {"getitem": elements.reader, "setitem": elements.writer, "atomic_add": elements.adder}[name]
    return maker(static.dtype, position, static)


def atomic_add(array: Any, index: Any, value: Any) -> Any:
    """Add to an item of an array in a kernel; return the item's old value (thread).

    Parameters
    ----------
    array : Array or ndarray
        A storage-backed array, or a NumPy or device array.
    index : int or tuple of int
    value : number
        Converted to the array's dtype, a 4- or 8-byte integer or float; other dtypes raise a typing error.

    Notes
    -----
    Relaxed order, device scope: it does not order other accesses.
    """
    if isinstance(array, DeviceStruct):
        return array._call("atomic_add", index, value)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError("atomic_add to a read-only array: pass a writable one (an array of ww.open needs mode='r+')")
    return elements.add_to_ndarray(array, index, value)


struct_function(atomic_add, "atomic_add", elements.add_to_ndarray)
