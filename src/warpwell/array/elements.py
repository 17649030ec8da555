"""Subscripts in kernels: from an index to an item, by dtype and tier.

The makers here return plain Python device functions for the compile-time parameters of a view. An item behind a cache
is read by `warpwell.cache.item_reader`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import errors
from ..cache import (
    PIN_FUNCTIONS,
    item_adder,
    item_reader,
    item_writer,
    latch_index,
    latch_read_only,
    prefetch_pages,
)
from ..targets import device
from ..targets.primitives import as_bits, bits_as, element_address, fetch_add_as, i64, load_weak_as, store_weak_as
from .items import BFLOAT16, item_of

CACHED_MEMBERS = (
    "core",
    "space",
    "table",
    "frames",
    "origin",
    "once",
    "size",
)
"""Members of a view behind a cache; `origin` is the byte of item 0 in the file."""
DIRECT_MAPPED_MEMBERS = (*CACHED_MEMBERS, "data", "owned", "fully_resident")
"""Members if each page has a frame of its own: `data` and `owned` are the addresses of the first page and of its owner
word, and `fully_resident` is 1 if all pages are there."""
DIRECT_MEMBERS = ("data", "space", "size")
"""Members of a view of memory; errors are latched in `space`."""
MAX_NDIM = 4

Maker = Callable[..., Any]


@device
def length(view):
    """Return the extent of the first dimension (thread)."""
    return view.shape[0]


# -- where an item lies ------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """How the indices of a view are read, as device functions ``(view, index)``."""

    within: Maker
    """Whether each index is in its range (no negative ones)."""
    offset: Maker
    """Byte offset from item 0, of an index in range."""
    outside: Maker
    """Latches the first index that is out of range."""


@device
def outside1(view, index):
    """Latch the index of a 1-d view (thread)."""
    latch_index(view.space, i64(index), view.shape[0])


@device
def outside2(view, index):
    """Latch the first index that is out of its range (thread)."""
    i = i64(index[0])
    if i < 0 or i >= view.shape[0]:
        latch_index(view.space, i, view.shape[0])
    else:
        latch_index(view.space, i64(index[1]), view.shape[1])


def _outside_with(axis: int, outside: Maker) -> Maker:
    """Return the function that latches an index of ``axis + 1`` dimensions, from the function of `axis` dimensions."""

    @device
    def outside_inner(view, index):
        k = i64(index[axis])
        if k < 0 or k >= view.shape[axis]:
            latch_index(view.space, k, view.shape[axis])
        else:
            outside(view, index)

    return outside_inner


outside3 = _outside_with(2, outside2)
outside4 = _outside_with(3, outside3)
OUTSIDE = {1: outside1, 2: outside2, 3: outside3, 4: outside4}


@functools.cache
def position_of(ndim: int, stride: int) -> Position:
    """Return the `Position` of a view; `stride` of the last dimension is known when the kernel is compiled.

    The range check and the offset are two functions: a sentinel offset would need one more comparison per item, which
    no compiler can remove.
    """

    @device
    def inside1(view, index):
        i = i64(index)
        return i >= 0 and i < view.shape[0]

    @device
    def offset1(view, index):
        return i64(index) * stride

    @device
    def inside2(view, index):
        i = i64(index[0])
        j = i64(index[1])
        return i >= 0 and i < view.shape[0] and j >= 0 and j < view.shape[1]

    @device
    def offset2(view, index):
        return i64(index[0]) * view.strides[0] + i64(index[1]) * stride

    @device
    def inside3(view, index):
        k = i64(index[2])
        return inside2(view, index) and k >= 0 and k < view.shape[2]

    @device
    def offset3(view, index):
        return i64(index[0]) * view.strides[0] + i64(index[1]) * view.strides[1] + i64(index[2]) * stride

    @device
    def inside4(view, index):
        m = i64(index[3])
        return inside3(view, index) and m >= 0 and m < view.shape[3]

    @device
    def offset4(view, index):
        outer = i64(index[0]) * view.strides[0] + i64(index[1]) * view.strides[1]
        return outer + i64(index[2]) * view.strides[2] + i64(index[3]) * stride

    inside = {1: inside1, 2: inside2, 3: inside3, 4: inside4}[ndim]
    offset = {1: offset1, 2: offset2, 3: offset3, 4: offset4}[ndim]
    return Position(inside, offset, OUTSIDE[ndim])


# -- items by their offset ---------------------------------------------------------------------------------------


def _stored_accessors(dtype: np.dtype[Any], static: Any) -> tuple[Maker, Maker]:
    """Return ``(view, offset) -> item`` and ``(view, offset, value)`` of items as they are stored."""
    if dtype.kind == "c":
        return _complex_accessors(dtype, static)
    if not (static.aligned or dtype.itemsize == 1):
        return _byte_accessors(dtype, static)
    cached = static.cached
    load = item_reader(dtype, static.shift, direct_mapped=static.direct_mapped, full=static.full)
    store = item_writer(dtype, static.shift)

    @device
    def read(view, offset):
        if cached:
            return load(view, view.origin + offset)
        return load_weak_as(view.data + offset, dtype)

    @device
    def write(view, offset, value):
        if cached:
            store(view, view.origin + offset, value)
        else:
            store_weak_as(view.data + offset, value, dtype)

    return read, write


def _complex_accessors(dtype: np.dtype[Any], static: Any) -> tuple[Maker, Maker]:
    half = dtype.itemsize // 2
    read_part, write_part = _stored_accessors(np.dtype(f"f{half}"), static)

    @device
    def read_complex64(view, offset):
        return np.complex64(complex(read_part(view, offset), read_part(view, offset + half)))

    @device
    def read_complex128(view, offset):
        return complex(read_part(view, offset), read_part(view, offset + half))

    @device
    def write(view, offset, value):
        write_part(view, offset, value.real)
        write_part(view, offset + half, value.imag)

    return read_complex64 if half == 4 else read_complex128, write


def _byte_accessors(dtype: np.dtype[Any], static: Any) -> tuple[Maker, Maker]:
    """Return accessors that load and store an item byte by byte.

    An item may cross two pages, but a thread never has two pins. A GPU loads no item from an odd address.
    """
    read_byte, write_byte = _stored_accessors(np.dtype(np.uint8), static)
    nbytes = dtype.itemsize

    @device
    def read(view, offset):
        bits = 0
        for k in range(nbytes):
            bits |= np.int64(read_byte(view, offset + k)) << (8 * k)
        return bits_as(bits, dtype)

    @device
    def write(view, offset, value):
        bits = as_bits(value, dtype)
        for k in range(nbytes):
            write_byte(view, offset + k, (bits >> (8 * k)) & 0xFF)

    return read, write


def _accessors(code: str, static: Any) -> tuple[Maker, Maker]:
    """Return ``(view, offset) -> value`` and ``(view, offset, value)`` of items of a code."""
    item = item_of(code)
    decode, encode = item.decode, item.encode
    load, store = _stored_accessors(item.stored, static)
    if item.plain:
        return load, store

    @device
    def read(view, offset):
        return decode(i64(load(view, offset)))

    @device
    def write(view, offset, value):
        store(view, offset, encode(value))

    return read, write


@functools.cache
def flat_accessors(static: Any) -> tuple[Maker, Maker]:
    """Return ``(view, i) -> item`` and ``(view, i, value)`` of a view with contiguous items; unchecked."""
    (read, write), size = _accessors(static.dtype, static), static.stride

    @device
    def get(view, i):
        return read(view, i * size)

    @device
    def put(view, i, value):
        write(view, i * size, value)

    return get, put


# -- subscripts -------------------------------------------------------------------------------------------------


def reader(code: str, position: Position, static: Any) -> Callable[..., Any]:
    """Return ``a[index]`` for a view."""
    read, _ = _accessors(code, static)
    zero = np.zeros((), item_of(code).value)[()]
    within, offset, outside = position

    @device
    def getitem(view, index):
        if within(view, index):
            return read(view, offset(view, index))
        outside(view, index)
        return zero

    return getitem


def writer(code: str, position: Position, static: Any) -> Callable[..., Any]:
    """Return ``a[index] = value`` for a view."""
    within, offset, outside = position
    writable = static.writable
    _, write = _accessors(code, static)

    @device
    def setitem(view, index, value):
        if writable:
            if within(view, index):
                write(view, offset(view, index), value)
            else:
                outside(view, index)
        else:
            latch_read_only(view.space)

    return setitem


def adder(code: str, position: Position, static: Any) -> Callable[..., Any]:
    """Return ``atomic_add(a, index, value)`` for a view."""
    name = code if code == BFLOAT16 else str(np.dtype(code))
    add_cached = None if code == BFLOAT16 or not static.aligned else item_adder(np.dtype(code), static.shift)
    if add_cached is None:
        raise errors.DTypeError(
            f"atomic_add takes aligned 4- and 8-byte integers and floats, not {name}: use one of those dtypes"
        )
    dtype, writable, cached = np.dtype(code), static.writable, static.cached
    zero = np.zeros((), dtype)[()]
    within, offset, outside = position

    @device
    def add(view, index, value):
        if writable:
            if within(view, index):
                if cached:
                    return add_cached(view, view.origin + offset(view, index), value)
                return fetch_add_as(view.data + offset(view, index), value, dtype)
            outside(view, index)
        else:
            latch_read_only(view.space)
        return zero

    return add


def residency(name: str, position: Position, static: Any) -> Callable[..., Any]:
    """Return ``a.prefetch(i)``, ``a.pin(i)`` or ``a.unpin(i)`` for a view."""
    within, offset, shift, cached = position.within, position.offset, static.shift, static.cached
    change_pin = PIN_FUNCTIONS[static.direct_mapped][name == "unpin"]

    @device
    def prefetch(view, index):
        if cached:
            page = -1
            if within(view, index):
                page = (view.origin + offset(view, index)) >> shift
            prefetch_pages(view.space, page)
            return page >= 0
        return True

    @device
    def pin_or_unpin(view, index):
        if cached:
            if within(view, index):
                return change_pin(view, (view.origin + offset(view, index)) >> shift)
            return False
        return True

    return prefetch if name == "prefetch" else pin_or_unpin


def add_to_ndarray(array, index, value):
    """Add to an item of a NumPy or device array; return the old value (thread)."""
    return fetch_add_as(element_address(array, index), value, array.dtype)
