"""Functions for kernels that walk a range of items, and look up each page of the range once.

`fold`, `map` and `fill` walk the items [lo, hi) of arrays by flat indices in C order. In a function without a suffix,
one thread walks all items; with the suffix ``_warp`` or ``_block``, the threads of a warp or block share the items.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import errors
from ...cache import latch_index
from ...targets import ArrayKind, DeviceStruct, StructKind, chosen, current, device
from ...targets.primitives import ballot, block_threads, div, i64, lane_id, popc, rem, syncwarp, thread_index
from .. import elements
from . import buffers, words

Maker = Callable[..., Any]

SOURCES_MAX = 4
"""Maximum number of arrays in the tuple of a source."""


def fold(f: Any, start: Any, source: Any, lo: int, hi: int, *args: Any) -> Any:
    """Return ``start`` after ``start = f(start, item, *args)`` for each item of [lo, hi), in order (thread).

    Parameters
    ----------
    f : device function, `operator.add`, `min` or `max`
        It is compiled into the kernel. With a tuple of sources it is called as ``f(start, item0, item1, ..., *args)``.
    start : number or tuple
        First argument of the first call of `f`. It must have the type that `f` returns: for floats, pass 0.0 and not 0.
    source : array, or tuple of up to four arrays
        Arrays on storage, NumPy and device arrays.
    lo, hi : int
        Flat indices in C order. An array on storage checks them: an index out of range latches an error, as a subscript
        does, and items out of range are left out. For other arrays, the indices must be in range.
    *args
        Passed to `f`.

    Notes
    -----
    Each item is read as by a subscript, with the same memory order.
    """
    return _interpreted(_choose_fold, 0, f, start, source, lo, hi, *args)


def fold_warp(f: Any, start: Any, source: Any, lo: int, hi: int, *args: Any) -> Any:
    """Fold the caller's share of [lo, hi); return it (all converged threads of the warp, same `lo` and `hi`).

    This is like `fold`, but each thread starts with its own `start` and returns the result of its share; `reduce_warp`
    combines the results. Neighboring threads take neighboring items. On `cpu` and `interp` a warp is one thread.
    """
    return _interpreted(_choose_fold, 1, f, start, source, lo, hi, *args)


def fold_indexed_warp(f: Any, start: Any, source: Any, lo: int, hi: int, *args: Any) -> Any:
    """Fold the caller's share of [lo, hi) of one array by ``f(start, item, i, *args)``, for item i; see `fold_warp`."""
    return _interpreted(_choose_indexed, 1, f, start, source, lo, hi, *args)


def fold_block(f: Any, start: Any, source: Any, lo: int, hi: int, *args: Any) -> Any:
    """Fold the caller's share of [lo, hi); return it (all threads of the block, same `lo` and `hi`).

    This is like `fold_warp`, for a block. It is not a barrier.
    """
    return _interpreted(_choose_fold, 2, f, start, source, lo, hi, *args)


def map(f: Any, target: Any, source: Any, lo: int, hi: int, *args: Any) -> None:
    """Store ``f(item, *args)`` of each item of a source as the item of a target (thread).

    Parameters
    ----------
    f : device function
        With a tuple of sources it is called as ``f(item0, item1, ..., *args)``.
    target : array
        The target may be the source itself.
    source : array, or tuple of up to four arrays
    lo, hi : int
        Flat indices in C order, of target and sources alike; see `fold`.
    *args
        Passed to `f`.
    """
    return _interpreted(_choose_map, 0, f, target, source, lo, hi, *args)


def map_warp(f: Any, target: Any, source: Any, lo: int, hi: int, *args: Any) -> None:
    """Store ``f(item, *args)`` for the caller's share of [lo, hi) (all converged threads of the warp); see `map`."""
    return _interpreted(_choose_map, 1, f, target, source, lo, hi, *args)


def map_block(f: Any, target: Any, source: Any, lo: int, hi: int, *args: Any) -> None:
    """Store ``f(item, *args)`` for the caller's share of [lo, hi) (all threads of the block); see `map`."""
    return _interpreted(_choose_map, 2, f, target, source, lo, hi, *args)


def fill(f: Any, target: Any, lo: int, hi: int, *args: Any) -> None:
    """Store ``f(i, *args)`` as item i of a target, for each i of [lo, hi) (thread).

    Parameters
    ----------
    f : device function
    target : array
    lo, hi : int
        Flat indices in C order; see `fold`.
    *args
        Passed to `f`.
    """
    return _interpreted(_choose_fill, 0, f, target, lo, hi, *args)


def fill_warp(f: Any, target: Any, lo: int, hi: int, *args: Any) -> None:
    """Store ``f(i, *args)`` for the caller's share of [lo, hi) (all converged threads of the warp); see `fill`."""
    return _interpreted(_choose_fill, 1, f, target, lo, hi, *args)


def fill_block(f: Any, target: Any, lo: int, hi: int, *args: Any) -> None:
    """Store ``f(i, *args)`` for the caller's share of [lo, hi) (all threads of the block); see `fill`."""
    return _interpreted(_choose_fill, 2, f, target, lo, hi, *args)


# -- ranks of threads ------------------------------------------------------------------------------------------------


@device
def _alone():
    return 0, 1


@device
def _in_warp():
    # a vote of all lanes, not activemask: bar.warp.sync does not reconverge diverged lanes, so each part would count
    # only itself
    mask = ballot(words.ALL_LANES, True)
    return popc(mask & ((1 << lane_id()) - 1)), popc(mask)


@device
def _in_block():
    return thread_index(), block_threads()


_RANKS = (_alone, _in_warp, _in_block)


# -- items by flat index -------------------------------------------------------------------------------------------


@functools.cache
def _access(kind: Any, name: str) -> Any:
    """Return ``(array, i) -> item`` ("getitem") or ``(array, i, value)`` ("setitem") for a flat index."""
    ndim = kind.static.ndim if isinstance(kind, StructKind) else kind.ndim
    if not 1 <= ndim <= elements.MAX_NDIM:
        raise errors.DTypeError(f"kernels walk arrays of 1 to {elements.MAX_NDIM} dimensions: use a.reshape(...)")
    index_of = _INDEX_OF[ndim]
    access = _subscript(kind, name)

    @device
    def item(array, i):
        return access(array, index_of(array, i))

    @device
    def set_item(array, i, value):
        access(array, index_of(array, i), value)

    return item if name == "getitem" else set_item


def _subscript(kind: Any, name: str) -> Any:
    if isinstance(kind, ArrayKind):
        return _get if name == "getitem" else _put
    access = kind.cls.implementation(name, kind.static, kind.static.ndim)
    if access is None:
        raise errors.DTypeError(f"{kind.cls.__name__} has no items")
    return access


@device
def _get(array, index):
    return array[index]


@device
def _put(array, index, value):
    array[index] = value


@device
def _index1(array, i):
    return i


@device
def _index2(array, i):
    n = array.shape[1]
    return div(i, n), rem(i, n)


@device
def _index3(array, i):
    m, n = array.shape[1], array.shape[2]
    row = div(i, n)
    return div(row, m), rem(row, m), rem(i, n)


@device
def _index4(array, i):
    m, n, o = array.shape[1], array.shape[2], array.shape[3]
    row = div(i, o)
    plane = div(row, n)
    return div(plane, m), rem(plane, m), rem(row, n), rem(i, o)


_INDEX_OF = {1: _index1, 2: _index2, 3: _index3, 4: _index4}


# -- variants -------------------------------------------------------------------------------------------------------

BUFFERED = {"cpu"}
"""Targets whose threads copy pages to buffers; others read words into registers."""


def _choose_fold(
    scope: int, target: str, f: Any, start: Any, source: Any, *_: Any, has_indices: bool = False
) -> Maker | None:
    if not (_is_array(source) if has_indices else _walkable(source)):
        return None
    if target not in BUFFERED and (stored := _stored(source)) is not None:
        fold_one = words.fold_indexed_item if has_indices else words.fold_item
        walk = words.folding(stored, _RANKS[scope], scope > 0, fold_one)
    else:
        windows = _windows(target, source)
        walk = buffers.folding(buffers.indexed(windows) if has_indices else windows, _RANKS[scope])
    return _in_range(scope, None, source, walk)


_choose_indexed = functools.partial(_choose_fold, has_indices=True)


def _choose_map(scope: int, target: str, f: Any, into: Any, source: Any, *_: Any) -> Maker | None:
    if not _is_array(into) or not _walkable(source):
        return None
    return _mapping(scope, target, into, source)


def _choose_fill(scope: int, target: str, f: Any, into: Any, *_: Any) -> Maker | None:
    return _fill_by(_mapping(scope, target, into, INDEX)) if _is_array(into) else None


INDEX = "index"
"""The kind of a source whose items are their indices."""


def _mapping(scope: int, target: str, into: Any, source: Any) -> Maker:
    rank_of, of, to = _RANKS[scope], _stored(source), _stored(into)
    in_words = target not in BUFFERED and not _read_only(into)
    if in_words and to is not None:
        walk = words.storing(to, of, _windows(target, source).get, rank_of, scope > 0)
    elif in_words and of is not None:
        walk = words.storing_elsewhere(of, _access(into, "setitem"), rank_of, scope > 0)
    else:
        walk = buffers.mapping(_window(target, into, stores=True), _windows(target, source), rank_of)
    return _in_range(scope, into, source, walk)


def _read_only(kind: Any) -> bool:
    """Return whether an array is read-only: its subscript latches the error of a store."""
    return isinstance(kind, StructKind) and not kind.static.writable


def _packed(kind: Any) -> bool:
    return isinstance(kind, StructKind) and kind.static.packed


def _stored(kind: Any) -> words.Stored | None:
    """Return the compile-time parameters of walks of an array, if it is behind a cache and contiguous."""
    if not _packed(kind) or not kind.static.cached:
        return None
    static = kind.static
    return words.Stored(static.dtype, static.shift, static.direct_mapped, static.full)


def _members(kind: Any) -> tuple[Any, ...]:
    return (kind,) if _is_single(kind) else kind


def _window(target: str, kind: Any, *, stores: bool = False) -> buffers.Window:
    if not (stores and _read_only(kind)):
        stored = _stored(kind)
        if target in BUFFERED and stored is not None:
            return buffers.copied_window(stored, stores)
        if _packed(kind) and stored is None:
            if target in BUFFERED:
                return buffers.direct_window(kind.static.dtype)
            return buffers.memory_window(*elements.flat_accessors(kind.static))
        if isinstance(kind, ArrayKind) and kind.contiguous and kind.ndim > 0:
            return buffers.ARRAY
    return buffers.memory_window(_access(kind, "getitem"), _access(kind, "setitem"))


def _windows(target: str, kind: Any) -> buffers.Window:
    if kind is INDEX:
        return buffers.INDICES
    return buffers.windows(tuple(_window(target, each) for each in _members(kind)), _is_single(kind))


@functools.cache
def _clip(kinds: tuple[Any, ...], single: bool) -> Maker:
    """Return ``(source, lo, hi)`` to the part of the run that is in range; arrays on storage latch other indices."""
    ranged = [position for position, kind in enumerate(kinds) if isinstance(kind, StructKind)]
    if not ranged:
        return _all
    if single:
        return _clip_one
    position = ranged[-1]
    before = _clip(kinds[:position], False)

    @device
    def clip(source, lo, hi):
        lo, hi = before(source, lo, hi)
        return _clip_one(source[position], lo, hi)

    return clip


@device
def _all(source, lo, hi):
    return i64(lo), i64(hi)


@device
def _clip_one(array, lo, hi):
    lo, hi = i64(lo), i64(hi)
    if lo < hi and (lo < 0 or hi > array.size):
        wrong = max(lo, array.size)
        if lo < 0:
            wrong = lo
        latch_index(array.space, wrong, array.size)
        lo, hi = max(lo, 0), min(hi, array.size)
    return lo, hi


@functools.cache
def _in_range(scope: int, target: Any, source: Any, walk: Maker) -> Maker:
    """Return a walk of the items of a run that are in range; the lanes of a warp converge before it and after it.

    `target` is the type of the target, or None for a fold.
    """
    clip_target, clip_source = _clip((target,), True), _clip(_members(source), _is_single(source))

    is_warp = scope == 1

    @device
    def walk_in_range(f, target, source, lo, hi, *args):
        if is_warp:  # diverged lanes would each take the whole run; lanes that have left the kernel count as converged
            syncwarp(words.ALL_LANES)
        lo, hi = clip_target(target, lo, hi)
        lo, hi = clip_source(source, lo, hi)
        out = walk(f, target, source, lo, hi, *args)
        if is_warp:
            syncwarp(words.ALL_LANES)
        return out

    return walk_in_range


@functools.cache
def _fill_by(walk: Maker) -> Maker:
    @device
    def fill_mapped(f, target, lo, hi, *args):
        walk(f, target, 0, lo, hi, *args)

    return fill_mapped


def _is_array(kind: Any) -> bool:
    return isinstance(kind, StructKind | ArrayKind)


def _is_single(kind: Any) -> bool:
    """Return whether a source is not a tuple of arrays; kinds of arrays are tuples themselves."""
    return _is_array(kind) or not isinstance(kind, tuple)


def _walkable(kind: Any) -> bool:
    """Return whether a type is a source: an array, or a tuple of up to `SOURCES_MAX`."""
    if _is_array(kind):
        return True
    return isinstance(kind, tuple) and 1 <= len(kind) <= SOURCES_MAX and all(_is_array(each) for each in kind)


def _interpreted(choose: Maker, scope: int, *values: Any) -> Any:
    """Call the variant for the types of values: the interpreter runs the functions above in this way."""
    current()
    function = choose(scope, "interp", *(_kind_of(value) for value in values))
    if function is None:
        raise errors.DTypeError(
            f"a span's arrays are arrays on storage, NumPy or device arrays, or a tuple of up to {SOURCES_MAX} of them"
        )
    return function(*values)


def _kind_of(value: Any) -> Any:
    if isinstance(value, DeviceStruct):
        return StructKind(type(value), value.static)
    if isinstance(value, np.ndarray):
        return ArrayKind(value.ndim, False)  # subscripts check
    if isinstance(value, tuple):
        return tuple(_kind_of(each) for each in value)
    return value if callable(value) else None


REGISTERS = 64
"""Registers of a thread: four groups of 16 bytes are in flight, and their addresses and the pages' words are kept."""

for _scope, (_fold, _map, _fill) in enumerate(
    ((fold, map, fill), (fold_warp, map_warp, fill_warp), (fold_block, map_block, fill_block))
):
    chosen(_fold, functools.partial(_choose_fold, _scope), REGISTERS)
    chosen(_map, functools.partial(_choose_map, _scope), REGISTERS)
    chosen(_fill, functools.partial(_choose_fill, _scope), REGISTERS)
chosen(fold_indexed_warp, functools.partial(_choose_indexed, 1), REGISTERS)
