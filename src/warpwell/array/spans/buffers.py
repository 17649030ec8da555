"""Spans by buffers, for `cpu`, and of arrays in memory, for all targets.

A thread copies a part of a page, looks again, and computes from its copy; arrays in memory it reads where they lie.

No compiler merges or vectorizes atomic loads. A copy by a function that the compiler does not know may be as wide as
the processor likes, and the loop over the thread's own memory, or over arrays in memory, is a plain one. The look is
that of `words`: acquire the word, copy, fence, load the word again. If it fails, the page is copied under a pin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ...cache import copy_run, count_read, load_word, mark_referenced, validate_read
from ...targets import (
    DEVICE,
    bits_as,
    copy_foreign,
    device,
    fence,
    i64,
    items_at,
    items_of_array,
    load_weak_as,
    scratch,
    store_weak_as,
)
from ..items import item_of
from .words import Stored, addresses_of

Maker = Callable[..., Any]

BUFFER = 4096
"""Maximum size in bytes of a copy: it stays in the L1 cache of a CPU core."""


class Window(NamedTuple):
    """How a walk reads or writes one array. All are device functions of one thread."""

    room: Maker
    """``(array, i, n)``: at least 1: how many of n items from item i on can be accessed together."""
    open: Maker
    """``(array, i, n, last, buffer)``: have these items where `items` finds them; whether no error is latched."""
    items: Maker
    """``(array, i, n, buffer)`` to something that `get` or `put` subscripts."""
    get: Maker
    """``(items, array, i, k)`` to item i + k."""
    put: Maker
    """``(items, array, i, k, value)``: it becomes item i + k."""
    close: Maker
    """``(array, i, n, buffer)``: store what was put; whether no error is latched."""


@device
def _all(array, i, n):
    return n


@device
def _open_nothing(array, i, n, last, buffer):
    return True


@device
def _close_nothing(array, i, n, buffer):
    return True


@device
def _get(items, array, i, k):
    return items[k]


@device
def _put(items, array, i, k, value):
    items[k] = value


@functools.cache
def plain_window(get: Maker, put: Maker | None) -> Window:
    """Return how to walk an array whose items are subscripted by `get` and `put`, of a flat index."""

    @device
    def items(array, i, n, buffer):
        return 0

    @device
    def get_item(items, array, i, k):
        return get(array, i + k)

    if put is None:
        return Window(_all, _open_nothing, items, get_item, _put, _close_nothing)

    @device
    def put_item(items, array, i, k, value):
        put(array, i + k, value)

    return Window(_all, _open_nothing, items, get_item, put_item, _close_nothing)


@functools.cache
def _accesses(code: str) -> tuple[Maker, Maker]:
    """Return `get` and `put` of items that are stored one after another."""
    item = item_of(code)
    if item.plain:
        return _get, _put
    decode, encode, stored = item.decode, item.encode, item.stored

    @device
    def get_decoded(items, array, i, k):
        return decode(i64(items[k]))

    @device
    def put_encoded(items, array, i, k, value):
        items[k] = bits_as(encode(value), stored)

    return get_decoded, put_encoded


@functools.cache
def direct_window(code: str) -> Window:
    """Return how to walk an array on storage whose data is in memory, its items one after another."""
    dtype = item_of(code).stored
    size = dtype.itemsize
    get, put = _accesses(code)

    @device
    def items(view, i, n, buffer):
        return items_at(view.data + i * size, n, dtype)

    return Window(_all, _open_nothing, items, get, put, _close_nothing)


@functools.cache
def flat_window(code: str) -> Window:
    """Return the same where device functions cannot return arrays, on `cuda`: an address, and weak accesses."""
    item = item_of(code)
    dtype, size = item.stored, item.stored.itemsize
    decode, encode, plain = item.decode, item.encode, item.plain

    @device
    def items(view, i, n, buffer):
        return view.data + i * size

    if plain:

        @device
        def get(items, view, i, k):
            return load_weak_as(items + k * size, dtype)

        @device
        def put(items, view, i, k, value):
            store_weak_as(items + k * size, value, dtype)

        return Window(_all, _open_nothing, items, get, put, _close_nothing)

    @device
    def get_decoded(items, view, i, k):
        return decode(i64(load_weak_as(items + k * size, dtype)))

    @device
    def put_encoded(items, view, i, k, value):
        store_weak_as(items + k * size, encode(value), dtype)

    return Window(_all, _open_nothing, items, get_decoded, put_encoded, _close_nothing)


@device
def _array_items(array, i, n, buffer):
    return 0


@device
def _get_of_array(items, array, i, k):
    return items_of_array(array, i + k, 1)[0]


@device
def _put_to_array(items, array, i, k, value):
    items_of_array(array, i + k, 1)[0] = value


ARRAY = Window(_all, _open_nothing, _array_items, _get_of_array, _put_to_array, _close_nothing)
"""How to walk a C-contiguous NumPy or device array."""


@functools.cache
def copied_window(array: Stored, stores: bool) -> Window:
    """Return how to walk an array behind a cache."""
    dtype, size = item_of(array.code).stored, array.size
    get, put = _accesses(array.code)
    shift, full = array.shift, array.full
    is_resident, data_of, frame_address = addresses_of(array.direct_mapped, shift)

    @device
    def room(view, i, n):
        if is_resident(view) and not stores:
            return n
        at = view.origin + i * size
        left = (((at >> shift) + 1) << shift) - at
        return min(n, min(left, BUFFER - 8) // size)

    @device
    def open_copied(view, i, n, last, buffer):
        if is_resident(view):
            return True
        at = view.origin + i * size
        page = at >> shift
        # whole words: the items begin at the same place in the first word of the buffer
        first = (at - (page << shift)) & -8
        nbytes = (n * size + (at & 7) + 7) & -8
        address = view.table + 8 * page
        word = load_word(address)
        copy_foreign(buffer, frame_address(view, word) + first, nbytes)
        fence(DEVICE)
        is_valid = validate_read(address, word)
        if full:
            count_read(view.core, n, n * size, is_valid)
        if is_valid:
            mark_referenced(address, word, view.once)
            return True
        return copy_run(view.space, page, first, nbytes, (view.origin + last * size) >> shift, buffer, 0) != 0

    @device
    def items(view, i, n, buffer):
        at = view.origin + i * size
        if is_resident(view) and not stores:
            return items_at(data_of(view) + at, n, dtype)
        return items_at(buffer + (at & 7), n, dtype)

    if not stores:
        return Window(room, open_copied, items, get, put, _close_nothing)

    @device
    def close(view, i, n, buffer):
        at = view.origin + i * size
        page = at >> shift
        return copy_run(view.space, page, at - (page << shift), n * size, page, buffer + (at & 7), 1) != 0

    return Window(room, _open_nothing, items, get, put, close)


# -- several sources -----------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """The windows of all sources: `source` is a tuple unless there is one, `items` and what `get` returns always are.

    `buffers` is the address of one buffer after another.
    """

    number: int
    room: Maker
    open: Maker
    items: Maker
    get: Maker


@functools.cache
def windows(sources: tuple[Window, ...], single: bool) -> Windows:
    """Return how to walk several sources together; `single`: the source is one array, and not in a tuple."""
    last = len(sources) - 1
    own = _windows(sources[last], last, single)
    if last == 0:
        return own
    room_before, open_before, items_before, get_before = windows(sources[:last], False)[1:]
    room_own, open_own, items_own, get_own = own[1:]

    @device
    def room(source, i, n):
        return min(room_before(source, i, n), room_own(source, i, n))

    @device
    def open_all(source, i, n, last, buffers):
        return open_before(source, i, n, last, buffers) and open_own(source, i, n, last, buffers)

    @device
    def items_of(source, i, n, buffers):
        return items_before(source, i, n, buffers) + items_own(source, i, n, buffers)

    @device
    def get(items, source, i, k):
        return get_before(items, source, i, k) + get_own(items, source, i, k)

    return Windows(len(sources), room, open_all, items_of, get)


def _windows(window: Window, position: int, single: bool) -> Windows:
    """Return the functions of one window. Its array is the source, or a member of it."""
    room_one, open_one, items_one, get_one = window[:4]
    array_of = _itself if single else _member(position)
    member = _member(position)
    offset = BUFFER * position

    @device
    def room(source, i, n):
        return room_one(array_of(source), i, n)

    @device
    def open_it(source, i, n, last, buffers):
        return open_one(array_of(source), i, n, last, buffers + offset)

    @device
    def items_of(source, i, n, buffers):
        return (items_one(array_of(source), i, n, buffers + offset),)

    @device
    def get(items, source, i, k):
        return (get_one(member(items), array_of(source), i, k),)

    return Windows(position + 1, room, open_it, items_of, get)


@device
def _itself(source):
    return source


@functools.cache
def _member(position: int) -> Maker:
    @device
    def member(source):
        return source[position]

    return member


# -- walks ---------------------------------------------------------------------------------------------------------


@functools.cache
def folding_memory(sources: Windows, rank_of: Maker) -> Maker:
    """Return ``(f, start, source, lo, hi, *args)``, which folds the caller's share of arrays in memory.

    `rank_of` is a device function to the caller's rank, and the number of threads that share the run.
    """
    items_of, get = sources.items, sources.get

    @device
    def fold_memory(f, start, source, lo, hi, *args):
        rank, step = rank_of()
        items = items_of(source, lo, hi - lo, 0)
        total = start
        k = rank
        while k < hi - lo:  # a range with a step would begin by a division
            total = f(total, *(get(items, source, lo, k) + args))
            k += step
        return total

    return fold_memory


@functools.cache
def mapping_memory(target: Window, sources: Windows, rank_of: Maker) -> Maker:
    """Return ``(f, target, source, lo, hi, *args)``, which stores f of the caller's share of arrays in memory."""
    items_of, get, into_of, put = sources.items, sources.get, target.items, target.put

    @device
    def map_memory(f, target, source, lo, hi, *args):
        rank, step = rank_of()
        items, into = items_of(source, lo, hi - lo, 0), into_of(target, lo, hi - lo, 0)
        k = rank
        while k < hi - lo:
            put(into, target, lo, k, f(*(get(items, source, lo, k) + args)))
            k += step

    return map_memory


@functools.cache
def folding(sources: Windows) -> Maker:
    """Return ``(f, start, source, lo, hi, *args)``, which folds the items of sources."""
    number, room, open_all, items_of, get = sources
    nbytes = number * BUFFER

    @device
    def fold_buffers(f, start, source, lo, hi, *args):
        buffers = scratch(nbytes)
        total = start
        i = lo
        while i < hi:
            n = room(source, i, hi - i)
            if not open_all(source, i, n, hi - 1, buffers):
                break
            items = items_of(source, i, n, buffers)
            for k in range(n):
                total = f(total, *(get(items, source, i, k) + args))
            i += n
        return total

    return fold_buffers


@functools.cache
def mapping(target: Window, sources: Windows) -> Maker:
    """Return ``(f, target, source, lo, hi, *args)``, which stores f of the items of sources."""
    number, room, open_all, items_of, get = sources
    room_target, into_of, put, close = target.room, target.items, target.put, target.close
    offset = number * BUFFER
    nbytes = offset + BUFFER

    @device
    def map_buffers(f, target, source, lo, hi, *args):
        buffers = scratch(nbytes)
        i = lo
        while i < hi:
            n = min(room(source, i, hi - i), room_target(target, i, hi - i))
            if not open_all(source, i, n, hi - 1, buffers):
                break
            items, into = items_of(source, i, n, buffers), into_of(target, i, n, buffers + offset)
            for k in range(n):
                put(into, target, i, k, f(*(get(items, source, i, k) + args)))
            if not close(target, i, n, buffers + offset):
                break
            i += n

    return map_buffers
