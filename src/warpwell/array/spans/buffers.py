"""Spans by buffers, for `cpu`, and of arrays in memory, for all targets.

A thread copies a part of a page, validates the copy, and computes from it. Arrays in memory are read in place.

No compiler merges or vectorizes atomic loads. A copy by an external function may use the widest loads of the processor,
and the loop over the thread's own memory, or over arrays in memory, is an ordinary loop. The copy is validated as in
`words` (`warpwell.cache.hit.copy_part`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ...cache import copy_part, copy_run, count_read
from ...targets import device
from ...targets.primitives import bits_as, i64, items_at, items_of_array, scratch
from ..items import item_of
from .words import Stored

Maker = Callable[..., Any]

BUFFER = 4096
"""Maximum size in bytes of a copy: it stays in the L1 cache of a CPU core."""


class Window(NamedTuple):
    """How a walk accesses an array, or a tuple of them. All functions are device functions of one thread."""

    nbytes: int
    """Bytes of the buffer, 0 for an array in memory."""
    room: Maker
    """``(array, i, n)``: number of the n items from item i on that can be accessed together, at least 1."""
    open: Maker
    """``(array, i, n, last, buffer)``: make these items readable by `get`; return whether no error is latched."""
    get: Maker
    """``(array, buffer, i, k)`` to item i + k, of a run that was opened from item i on; a tuple for a tuple."""
    put: Maker | None = None
    """``(array, buffer, i, k, value)``: store item i + k."""
    close: Maker | None = None
    """``(array, i, n, buffer)``: write the items that were put; return whether no error is latched."""


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
def _own_index(source, buffer, i, k):
    return (i + k,)


INDICES = Window(0, _all, _open_nothing, _own_index)
"""The source of `fill`: item i is i."""


@functools.cache
def memory_window(get: Maker, put: Maker) -> Window:
    """Return the window of an array in memory; `get` and `put` access an item by its flat index."""

    @device
    def get_item(array, buffer, i, k):
        return get(array, i + k)

    @device
    def put_item(array, buffer, i, k, value):
        put(array, i + k, value)

    return Window(0, _all, _open_nothing, get_item, put_item, _close_nothing)


@device
def _get_of_array(array, i):
    return items_of_array(array, i, 1)[0]


@device
def _put_to_array(array, i, value):
    items_of_array(array, i, 1)[0] = value


ARRAY = memory_window(_get_of_array, _put_to_array)
"""The window of a C-contiguous NumPy or device array."""


def _accessors(code: str, address_of: Maker) -> tuple[Maker, Maker]:
    """Return `get` and `put` of contiguous items from ``address_of(array, buffer, i)`` on.

    Both subscript an array, because compilers do not vectorize loops over addresses that are integers.
    """
    item = item_of(code)
    decode, encode, stored = item.decode, item.encode, item.stored

    @device
    def get(array, buffer, i, k):
        return items_at(address_of(array, buffer, i), k + 1, stored)[k]

    @device
    def put(array, buffer, i, k, value):
        items_at(address_of(array, buffer, i), k + 1, stored)[k] = value

    if item.plain:
        return get, put

    @device
    def get_decoded(array, buffer, i, k):
        return decode(i64(get(array, buffer, i, k)))

    @device
    def put_encoded(array, buffer, i, k, value):
        put(array, buffer, i, k, bits_as(encode(value), stored))

    return get_decoded, put_encoded


@functools.cache
def direct_window(code: str) -> Window:
    """Return the window of an array on storage whose data is in memory, with contiguous items (`cpu`)."""
    size = item_of(code).stored.itemsize

    @device
    def address_of(view, buffer, i):
        return view.data + i * size

    return Window(0, _all, _open_nothing, *_accessors(code, address_of), _close_nothing)


@functools.cache
def copied_window(array: Stored, stores: bool) -> Window:
    """Return the window of an array behind a cache."""
    size, shift, full = array.size, array.shift, array.full
    reads_in_place = array.direct_mapped and not stores

    @device
    def room(view, i, n):
        if reads_in_place:
            if view.fully_resident != 0:
                return n
        at = view.origin + i * size
        left = (((at >> shift) + 1) << shift) - at
        return min(n, min(left, BUFFER - 8) // size)

    @device
    def open_copied(view, i, n, last, buffer):
        if reads_in_place:
            if view.fully_resident != 0:
                return True
        at = view.origin + i * size
        page = at >> shift
        # copy whole words: the items begin at the same byte of the first word of the buffer
        first = (at - (page << shift)) & -8
        nbytes = (n * size + (at & 7) + 7) & -8
        address, last_page = view.table + 8 * page, (view.origin + last * size) >> shift
        is_hit, is_copied = copy_part(
            view.space, address, view.frames, shift, page, first, nbytes, last_page, buffer, view.once
        )
        if full:
            count_read(view.core, n, n * size, is_hit)
        return is_copied

    @device
    def address_of(view, buffer, i):
        at = view.origin + i * size
        if reads_in_place:
            if view.fully_resident != 0:
                return view.data + at
        return buffer + (at & 7)

    @device
    def close(view, i, n, buffer):
        at = view.origin + i * size
        page = at >> shift
        return copy_run(view.space, page, at - (page << shift), n * size, page, buffer + (at & 7), 1) != 0

    get, put = _accessors(array.code, address_of)
    return Window(BUFFER, room, _open_nothing if stores else open_copied, get, put, close)


# -- several sources -----------------------------------------------------------------------------------------------


@functools.cache
def windows(members: tuple[Window, ...], single: bool) -> Window:
    """Return the window of several arrays that are read together, or, with `single`, of one array without a tuple."""
    last = len(members) - 1
    own = _member_window(members[last], last, single, sum(window.nbytes for window in members[:last]))
    if last == 0:
        return own
    before = windows(members[:last], False)
    _, room_before, open_before, get_before = before[:4]
    nbytes, room_own, open_own, get_own = own[:4]

    @device
    def room(source, i, n):
        return min(room_before(source, i, n), room_own(source, i, n))

    @device
    def open_all(source, i, n, last, buffers):
        return open_before(source, i, n, last, buffers) and open_own(source, i, n, last, buffers)

    @device
    def get(source, buffers, i, k):
        return get_before(source, buffers, i, k) + get_own(source, buffers, i, k)

    return Window(before.nbytes + nbytes, room, open_all, get)


def _member_window(window: Window, position: int, single: bool, offset: int) -> Window:
    """Return the window of the array at a position of the source; its buffer begins at an offset."""
    nbytes, room_one, open_one, get_one = window[:4]

    @device
    def array_of(source):
        if single:
            return source
        return source[position]

    @device
    def room(source, i, n):
        return room_one(array_of(source), i, n)

    @device
    def open_it(source, i, n, last, buffers):
        return open_one(array_of(source), i, n, last, buffers + offset)

    @device
    def get(source, buffers, i, k):
        return (get_one(array_of(source), buffers + offset, i, k),)

    return Window(nbytes, room, open_it, get)


@functools.cache
def indexed(source: Window) -> Window:
    """Return a source of pairs of an item and its index."""
    get_items = source.get

    @device
    def get(source, buffers, i, k):
        return get_items(source, buffers, i, k) + (i + k,)  # noqa: RUF005 - compilers unpack no tuple here

    return source._replace(get=get)


# -- walks ---------------------------------------------------------------------------------------------------------


@functools.cache
def folding(sources: Window, rank_of: Maker) -> Maker:
    """Return ``(f, start, source, lo, hi, *args)``, which folds the caller's share of the items of sources.

    `rank_of` is a device function to the caller's rank, and the number of threads that share the run.
    """
    nbytes, room, open_all, get = sources[:4]

    @device
    def fold_buffers(f, start, source, lo, hi, *args):
        rank, step = rank_of()
        buffers = 0
        if nbytes:
            buffers = scratch(nbytes)
        total = start
        i = lo
        while i < hi:
            n = room(source, i, hi - i)
            if not open_all(source, i, n, hi - 1, buffers):
                break
            k = rank
            while k < n:  # a range with a step would begin by a division
                total = f(total, *(get(source, buffers, i, k) + args))
                k += step
            i += n
        return total

    return fold_buffers


@functools.cache
def mapping(target: Window, sources: Window, rank_of: Maker) -> Maker:
    """Return ``(f, target, source, lo, hi, *args)``, which stores f of the caller's share of the items of sources."""
    offset, room, open_all, get = sources[:4]
    nbytes, room_target, _, _, put, close = target
    nbytes += offset

    @device
    def map_buffers(f, target, source, lo, hi, *args):
        rank, step = rank_of()
        buffers = 0
        if nbytes:
            buffers = scratch(nbytes)
        i = lo
        while i < hi:
            n = min(room(source, i, hi - i), room_target(target, i, hi - i))
            if not open_all(source, i, n, hi - 1, buffers):
                break
            k = rank
            while k < n:
                put(target, buffers + offset, i, k, f(*(get(source, buffers, i, k) + args)))
                k += step
            if not close(target, i, n, buffers + offset):
                break
            i += n

    return map_buffers
