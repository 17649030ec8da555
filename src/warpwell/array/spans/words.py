"""Spans by words in registers, for `cuda` and `interp`: each lane reads up to four groups of 16 bytes at once.

A *group* is what one lane takes of each array: the same few neighbouring items, 16 bytes of the widest. A *row* is a
group for each lane. The look at the pages of up to four rows, by each lane for itself:

1. Acquire the page's word. (A shuffle would order nothing: it is each lane's own acquire that shows it the page.)
2. Load the groups, relaxed, all of them in flight. The word may say INVALID: then the groups are of frame 0, and nobody
   uses them.
3. Execute an acquire-release fence, one for all pages and arrays of the rows.
4. Load the word again, relaxed. The same frame and generation: the groups are the page's. If a group was stored by who
   filled the frame anew, its fence and this one make the INVALID word visible to this load, and the generation differs.
5. Only then is an item given to anyone.

A lane whose look fails pins the page for as long as it loads the groups, one page at a time, with whichever lanes come
with it. Nobody waits under such a pin, so runs that are longer than the cache end.

Four rows are stored without a call, where their pages are in the cache:

1. Who will pin loads the page's word while the source is loaded: a thread alone for itself; of a warp, lane r for row
   r, or the first lane where four rows are in one page.
2. The items are computed. Nothing waits from here on: a program's function might.
3. A pin and DIRTY are added to exactly that word, if it is VALID. This acquires the page. Nobody evicts it or writes it
   back as long as it has the pin, so DIRTY may come before the stores.
4. A barrier of the warp orders all lanes behind the pins, and shuffles tell them the frames.
5. Each lane executes a fence: a reader that takes a new item for one of the frame's old page then sees that page's new
   word. Then it stores, relaxed, four groups in flight.
6. A barrier, and a fence of who pinned, order all lanes' stores before a relaxed addition that takes the pin away. Who
   writes the page back reads its word from this addition, or from a read-modify-write behind it, and acquires it.
7. If a page is not there, the pins of the others are taken away, and the path that may wait stores the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...cache import (
    count_read,
    fault_in,
    frame_of,
    load_word,
    mark_referenced,
    pin_to_store,
    read_pinned,
    store_groups,
    unpin_stored,
    validate_read,
)
from ...targets import (
    DEVICE,
    activemask,
    ballot,
    device,
    fence,
    lane_id,
    load_pair,
    load_relaxed,
    shfl,
    store_pair,
    store_relaxed,
    syncwarp,
)
from ..items import item_of

Maker = Callable[..., Any]

I8 = np.dtype(np.int64)
ALL_LANES = 0xFFFFFFFF
GROUP_BYTES = 16
ROWS = 4
"""Rows that are in flight together: 64 bytes a lane."""
ROWS_BYTES = ROWS * 32 * GROUP_BYTES
"""Bytes of these rows of a whole warp."""


class Stored(NamedTuple):
    """An array behind a cache: what its walks are compiled for."""

    code: str
    """What an item is, see `items.item_of`."""
    shift: int
    """log2 of the page size."""
    direct_mapped: bool
    """Whether each page has a frame of its own."""
    full: bool

    @property
    def size(self) -> int:
        """Bytes of an item."""
        return item_of(self.code).stored.itemsize

    @property
    def small(self) -> bool:
        """Whether the groups of four rows may lie in several pages."""
        return 1 << self.shift < ROWS_BYTES


class Look(NamedTuple):
    """What the walks use of an array behind a cache: device functions of one thread.

    Item i begins the lane's first group; its other groups are `step` items apart.
    """

    first_group: Maker
    """``(view, lo)`` to the item that the first lane begins at: up to a row before lo, in the same page."""
    together: Maker
    """``(view, i, step)``: whether the groups of four rows can be read, or stored, at once."""
    four: Maker
    """``(view, i, step)`` to whether the look held, and four groups as eight words."""
    one: Maker
    """``(view, i)`` to whether the look held, and the two words of a group."""
    brought: Maker
    """``(view, i, last)``: have the group's page in the cache; whether no error is latched (converged lanes)."""
    pinned: Maker
    """``(view, i)`` to the two words of a group, each read under a pin (converged lanes)."""
    ahead: Maker
    """``(view, i, step)`` to the word, as it is now, of the page that this lane pins for `store_now`."""
    store_now: Maker
    """``(view, i, step, words, seen)``: store four groups, if their pages are in the cache; whether that was done
    (converged lanes). `seen` is of `ahead`. Waits for nothing."""
    store_four: Maker
    """``(view, i, step, words)``: store four groups under a pin; whether no error is latched (converged lanes)."""
    store_one: Maker
    """``(view, i, lo, hi, first, second)``: store what of a group is in [lo, hi), likewise."""


@functools.cache
def looking(array: Stored, group: int, shared: bool) -> Look:
    """Return the device functions for an array behind a cache, of which a lane takes groups of `group` items.

    `shared` tells whether the lanes of a warp share a run.
    """
    size, shift, small = array.size, array.shift, array.small
    nbytes = group * size
    is_resident, data_of, frame_place = places_of(array.direct_mapped, shift)
    load = _load_one(nbytes)

    @device
    def page_of(view, i):
        return (view.origin + i * size) >> shift

    @device
    def together(view, i, step):
        return page_of(view, i) == page_of(view, i + 3 * step)

    @device
    def marks(i, step):
        """Tell whether this lane marks the page as used: one of a warp does."""
        return step == group or i & (32 * group - 1) == 0

    @device
    def one(view, i):
        at = view.origin + i * size
        if is_resident(view):
            a, b = load(data_of(view) + at)
            return True, a, b
        page = at >> shift
        seen = load_page_word(view, page)
        a, b = load(frame_place(view, seen) + at - (page << shift))
        fence(DEVICE)
        good = validate_page(view, page, seen)
        if good:
            mark_page(view, page, seen)
        return good, a, b

    @device
    def four(view, i, step):
        at = view.origin + i * size
        if is_resident(view):
            return True, load_four(data_of(view) + at, step * size)
        page = at >> shift
        seen = load_page_word(view, page)
        words = load_four(frame_place(view, seen) + at - (page << shift), step * size)
        fence(DEVICE)
        good = validate_page(view, page, seen)
        if good and marks(i, step):
            mark_page(view, page, seen)
        return good, words

    load_four = loader(nbytes)
    storing = *_storing_now(array, nbytes, shared), *_store(array, group)
    cold = _brought(size, shift), _pinned(size, nbytes, shift), *storing
    row = 32 * nbytes
    if small and shared and row <= 1 << shift:
        return Look(_first_group(size, group, row), *_rows_of(array, load, nbytes), one, *cold)
    if small:
        return Look(_first_group(size, group, 0), _always, _four_pages(array, load, nbytes), one, *cold)
    return Look(_first_group(size, group, 0), together, four, one, *cold)


@device
def _always(view, i, step):
    return True


# -- pages ---------------------------------------------------------------------------------------------------------


@device
def load_page_word(view, page):
    """Return the word of a page of a view (thread; acquire)."""
    return load_word(view.table + 8 * page)


@device
def validate_page(view, page, seen):
    """Return whether groups that were loaded since `load_page_word` are the page's (thread; relaxed, after a fence)."""
    return validate_read(view.table + 8 * page, seen)


@device
def mark_page(view, page, seen):
    """Mark a page that was read as used (thread; relaxed)."""
    mark_referenced(view.table + 8 * page, seen, view.once)


@functools.cache
def places_of(direct_mapped: bool, shift: int) -> tuple[Maker, Maker, Maker]:
    """Return whether all pages lie one after another; from where on; and the frame that a word names, else frame 0."""

    @device
    def frame_place(view, seen):
        return view.frames + (frame_of(seen) << shift)

    if not direct_mapped:

        @device
        def never(view):
            return False

        @device
        def nowhere(view):
            return 0

        return never, nowhere, frame_place

    @device
    def is_resident(view):
        return view.fully_resident != 0

    @device
    def data_of(view):
        return view.data

    return is_resident, data_of, frame_place


# -- groups --------------------------------------------------------------------------------------------------------


@functools.cache
def _load_one(nbytes: int) -> Maker:
    """Return what loads one group: two words, or in the first the bytes that it has."""
    if nbytes == GROUP_BYTES:
        return load_pair

    @device
    def load_part(address):
        return load_relaxed(address & -8, DEVICE) >> (8 * (address & 7)), 0

    return load_part


@functools.cache
def loader(nbytes: int) -> Maker:
    """Return ``(address, step)`` to four groups, `step` bytes apart, all of them in flight."""
    one = _load_one(nbytes)

    @device
    def load_four(address, step):
        a, b = one(address)
        c, d = one(address + step)
        e, f = one(address + 2 * step)
        g, h = one(address + 3 * step)
        return a, b, c, d, e, f, g, h

    return load_four


def _four_pages(array: Stored, load: Maker, nbytes: int) -> Maker:
    """Return `Look.four` where each group may lie in a page of its own: four pages, one fence."""
    size, shift = array.size, array.shift
    is_resident, data_of, _ = places_of(array.direct_mapped, shift)
    load_four, address = loader(nbytes), _address(array)

    @device
    def page(view, i):
        return (view.origin + i * size) >> shift

    @device
    def four_pages(view, i, step):
        if is_resident(view):
            return True, load_four(data_of(view) + view.origin + i * size, step * size)
        j, k, m = i + step, i + 2 * step, i + 3 * step
        s, t = load_page_word(view, page(view, i)), load_page_word(view, page(view, j))
        u, v = load_page_word(view, page(view, k)), load_page_word(view, page(view, m))
        a, b = load(address(view, i, s))
        c, d = load(address(view, j, t))
        e, f = load(address(view, k, u))
        g, h = load(address(view, m, v))
        fence(DEVICE)
        good = validate_page(view, page(view, i), s) & validate_page(view, page(view, j), t)
        good &= validate_page(view, page(view, k), u) & validate_page(view, page(view, m), v)
        if good:
            mark_page(view, page(view, i), s)
            mark_page(view, page(view, j), t)
            mark_page(view, page(view, k), u)
            mark_page(view, page(view, m), v)
        return good, (a, b, c, d, e, f, g, h)

    return four_pages


@functools.cache
def _address(array: Stored) -> Maker:
    """Return ``(view, i, seen)`` to where item i is in the frame that a page's word names."""
    size, inside = array.size, (1 << array.shift) - 1
    frame_place = places_of(array.direct_mapped, array.shift)[2]

    @device
    def address(view, i, seen):
        return frame_place(view, seen) + ((view.origin + i * size) & inside)

    return address


def _rows_of(array: Stored, load: Maker, nbytes: int) -> tuple[Maker, Maker]:
    """Return `Look.together` and `Look.four` of lanes that share their rows, each row in one page: four looks a warp.

    A load that acquires ends before the next one begins, so four of them take four times as long as one. Therefore:

    - Lane r acquires the word of row r, and loads it again. A barrier of the warp orders all lanes' groups behind the
      first, and the second behind all lanes' fences: a lane that loaded a group of who filled the frame anew
      synchronizes with it by its fence, and the barrier hands that on to the lane that looks again.
    - The other lanes do what these four do: nobody has to tell them apart.
    """
    size, shift, row = array.size, array.shift, 32 * nbytes
    is_resident, data_of, _ = places_of(array.direct_mapped, shift)
    load_four, address = loader(nbytes), _address(array)

    @device
    def by_rows(view, i, step):
        """Tell whether all lanes of a warp are here, with each row of theirs in one page."""
        if activemask() != ALL_LANES:
            return False
        begin = view.origin + i * size - nbytes * lane_id()
        apart = (begin ^ shfl(ALL_LANES, begin, 0)) | ((begin | (step * size)) & (row - 1))
        return ballot(ALL_LANES, apart == 0) == ALL_LANES

    @device
    def four_rows(view, i, step):
        if is_resident(view):
            return True, load_four(data_of(view) + view.origin + i * size, step * size)
        own = (view.origin + (i + (lane_id() & 3) * step) * size) >> shift
        seen = load_page_word(view, own)
        syncwarp(ALL_LANES)
        s, t = shfl(ALL_LANES, seen, 0), shfl(ALL_LANES, seen, 1)
        u, v = shfl(ALL_LANES, seen, 2), shfl(ALL_LANES, seen, 3)
        a, b = load(address(view, i, s))
        c, d = load(address(view, i + step, t))
        e, f = load(address(view, i + 2 * step, u))
        g, h = load(address(view, i + 3 * step, v))
        fence(DEVICE)
        syncwarp(ALL_LANES)
        good = ballot(ALL_LANES, validate_page(view, own, seen)) == ALL_LANES
        if good and lane_id() < 4:
            mark_page(view, own, seen)
        return good, (a, b, c, d, e, f, g, h)

    return by_rows, four_rows


@functools.cache
def _first_group(size: int, group: int, row: int) -> Maker:
    """Return ``(view, lo)`` to the item that the first lane begins at: a group's first, or a whole row's."""
    if not row:

        @device
        def first_group(view, lo):
            return lo & -group
    else:
        shift = size.bit_length() - 1

        @device
        def first_group(view, lo):
            return (((view.origin + (lo << shift)) & -row) - view.origin) >> shift

    return first_group


# -- stores that wait for nothing ------------------------------------------------------------------------------------


def _storing_now(array: Stored, nbytes: int, shared: bool) -> tuple[Maker, Maker]:
    """Return `Look.ahead` and `Look.store_now`: four groups, stored where their pages are in the cache.

    Inlined: across a call each lane would save up to 50 registers in memory, and the fences would wait for that.
    """
    if nbytes < 8:
        return _no_word, _store_never
    return (_storing_shared if shared else _storing_alone)(array, nbytes)


@device
def _no_word(view, i, step):
    return 0


@device
def _store_never(view, i, step, words, seen):
    return False


@functools.cache
def _putting(array: Stored, nbytes: int) -> tuple[Maker, Maker]:
    """Return ``(view, i)`` to the page of item i, and ``(view, i, frame, first, second)``, which stores a group."""
    size, shift, inside = array.size, array.shift, (1 << array.shift) - 1
    pairs = nbytes == GROUP_BYTES

    @device
    def page_of(view, i):
        return (view.origin + i * size) >> shift

    @device
    def put(view, i, frame, first, second):
        address = view.frames + (frame << shift) + ((view.origin + i * size) & inside)
        if pairs:
            store_pair(address, first, second)
        else:
            store_relaxed(address, first, DEVICE)

    return page_of, put


@functools.cache
def _storing_alone(array: Stored, nbytes: int) -> tuple[Maker, Maker]:
    page_of, put = _putting(array, nbytes)

    @device
    def ahead(view, i, step):
        return load_relaxed(view.table + 8 * page_of(view, i), DEVICE)

    @device
    def store_alone(view, i, step, words, seen):
        page = page_of(view, i)
        if page != page_of(view, i + 3 * step):
            return False
        word = view.table + 8 * page
        frame = pin_to_store(word, seen)
        if frame < 0:
            return False
        fence(DEVICE)
        a, b, c, d, e, f, g, h = words
        put(view, i, frame, a, b)
        put(view, i + step, frame, c, d)
        put(view, i + 2 * step, frame, e, f)
        put(view, i + 3 * step, frame, g, h)
        fence(DEVICE)
        unpin_stored(word)
        return True

    return ahead, store_alone


@functools.cache
def _storing_shared(array: Stored, nbytes: int) -> tuple[Maker, Maker]:
    page_of, put = _putting(array, nbytes)
    rows = 4 if array.small else 1

    @device
    def own_word(view, i, step):
        return view.table + 8 * page_of(view, i + (lane_id() & (rows - 1)) * step)

    @device
    def ahead(view, i, step):
        return load_relaxed(own_word(view, i, step), DEVICE)

    @device
    def store_shared(view, i, step, words, seen):
        if activemask() != ALL_LANES:
            return False
        if rows == 1:
            page = page_of(view, i)
            if ballot(ALL_LANES, page == shfl(ALL_LANES, page, 0)) != ALL_LANES:
                return False
        word = own_word(view, i, step)
        frame = -1
        if lane_id() < rows:
            frame = pin_to_store(word, seen)
        good = ballot(ALL_LANES, lane_id() < rows and frame < 0) == 0
        syncwarp(ALL_LANES)
        if good:
            fence(DEVICE)
            a, b, c, d, e, f, g, h = words
            put(view, i, shfl(ALL_LANES, frame, 0), a, b)
            put(view, i + step, shfl(ALL_LANES, frame, 1 % rows), c, d)
            put(view, i + 2 * step, shfl(ALL_LANES, frame, 2 % rows), e, f)
            put(view, i + 3 * step, shfl(ALL_LANES, frame, 3 % rows), g, h)
        syncwarp(ALL_LANES)
        fence(DEVICE)
        if frame >= 0:
            unpin_stored(word)
        return good

    return ahead, store_shared


# -- through the slow path -----------------------------------------------------------------------------------------


@functools.cache
def _brought(size: int, shift: int) -> Maker:
    @device
    def brought(view, i, last):
        final = (view.origin + last * size) >> shift
        return fault_in(view.space, (view.origin + i * size) >> shift, final) != 0

    return brought


@functools.cache
def _pinned(size: int, nbytes: int, shift: int) -> Maker:
    each = min(nbytes, 8)

    @device
    def word(view, at):
        page = at >> shift
        return read_pinned(view.space, page, at - (page << shift), each)

    @device
    def pinned(view, i):
        at = view.origin + i * size
        second = 0
        if nbytes == GROUP_BYTES:
            second = word(view, at + 8)
        return word(view, at), second

    return pinned


@functools.cache
def _store(array: Stored, group: int) -> tuple[Maker, Maker]:
    """Return `Look.store_four` and `Look.store_one`."""
    size, shift = array.size, array.shift
    shape = size | (group * size) << 8 | shift << 16

    @device
    def store_one(view, i, lo, hi, first, second):
        bounds = max(lo - i, 0) * size | (max(i + group - hi, 0) * size) << 8
        return (
            store_groups(
                view.space,
                view.table,
                view.frames,
                view.origin + i * size,
                0,
                1,
                shape,
                bounds,
                first,
                second,
                0,
                0,
                0,
                0,
                0,
                0,
            )
            != 0
        )

    @device
    def store_four(view, i, step, words):
        return (
            store_groups(view.space, view.table, view.frames, view.origin + i * size, step * size, 4, shape, 0, *words)
            != 0
        )

    return store_four, store_one


# -- items of groups -----------------------------------------------------------------------------------------------


@functools.cache
def _unpack(code: str) -> Maker:
    """Return ``(first, second, k)`` to item k of a group."""
    item = item_of(code)
    size, decode = item.stored.itemsize, item.decode
    bits_mask = -1 if size == 8 else (1 << (8 * size)) - 1

    @device
    def unpack(first, second, k):
        word = first
        if k * size >= 8:
            word = second
        return decode((word >> (8 * (k * size & 7))) & bits_mask)

    return unpack


@functools.cache
def _pack(code: str) -> Maker:
    """Return ``(first, second, k, value)`` to the words of a group with another item k, which was 0."""
    item = item_of(code)
    size, encode = item.stored.itemsize, item.encode
    bits_mask = -1 if size == 8 else (1 << (8 * size)) - 1

    @device
    def pack(first, second, k, value):
        bits = (encode(value) & bits_mask) << (8 * (k * size & 7))
        if k * size >= 8:
            return first, second | bits
        return first | bits, second

    return pack


# -- walks ---------------------------------------------------------------------------------------------------------


@functools.cache
def tally_of(full: bool, size: int) -> Maker:
    """Return ``(view, items, hit)``, which counts the items of a look for the statistics."""
    if not full:

        @device
        def nothing(view, items, hit):
            pass

        return nothing

    @device
    def tally(view, items, hit):
        count_read(view.core, items, items * size, hit)

    return tally


@device
def _fold_item(f, total, item, i, args):
    return f(total, item, *args)


@device
def _fold_indexed(f, total, item, i, args):
    return f(total, item, i, *args)


@functools.cache
def folding(source: Stored, place: Maker, shared: bool, *, indexed: bool = False) -> Maker:
    """Return ``(f, start, view, lo, hi, *args)``, which folds the caller's share of an array behind a cache.

    Parameters
    ----------
    place : callable
        Device function to the caller's rank, and among how many threads.
    shared : bool
        Whether the lanes of a warp share a run.
    indexed : bool
        Whether f is told the index of an item, too.
    """
    group = GROUP_BYTES // source.size
    look = looking(source, group, shared)
    first_group, together, four, one, brought, pinned = look[:6]
    unpack, tally = _unpack(source.code), tally_of(source.full, source.size)
    fold_item = _fold_indexed if indexed else _fold_item

    @device
    def fold_group(f, total, first, second, i, args):
        for k in range(group):
            total = fold_item(f, total, unpack(first, second, k), i + k, args)
        return total

    @device
    def fold_four(f, total, words, i, step, args):
        total = fold_group(f, total, words[0], words[1], i, args)
        total = fold_group(f, total, words[2], words[3], i + step, args)
        total = fold_group(f, total, words[4], words[5], i + 2 * step, args)
        return fold_group(f, total, words[6], words[7], i + 3 * step, args)

    @device
    def fold_words(f, start, view, lo, hi, *args):
        rank, lanes = place()
        step = group * lanes
        total = start
        i = first_group(view, lo) + group * rank
        again = False
        while i < hi:
            if not again and i >= lo and i + 3 * step + group <= hi and together(view, i, step):
                good, words = four(view, i, step)
                tally(view, 4 * group, good)
                if good:
                    total = fold_four(f, total, words, i, step, args)
                    i += 4 * step
                    continue
            else:
                good, first, second = one(view, i)
                begin, end = min(max(lo - i, 0), group), min(hi - i, group)
                tally(view, end - begin, good)
                if good or again:
                    if not good:
                        first, second = pinned(view, i)
                    for k in range(begin, end):
                        total = fold_item(f, total, unpack(first, second, k), i + k, args)
                    i += step
                    again = False
                    continue
            if not brought(view, i, hi - 1):
                break
            again = True
        return total

    return fold_words


@functools.cache
def storing(target: Stored, source: Stored | None, items: Maker, place: Maker, shared: bool) -> Maker:
    """Return ``(f, target, source, lo, hi, *args)``, which stores f of each item of a source, behind a cache or not.

    Parameters
    ----------
    source : Stored, optional
    items : callable
        Device function ``(source, i)`` to a tuple of items, where the source is not behind a cache.
    place : callable
        Device function to the caller's rank, and among how many threads.
    shared : bool
        Whether the lanes of a warp share a run.
    """
    if source is None:
        return _storing_items(target, items, place, shared)
    group = GROUP_BYTES // max(target.size, source.size)
    into, of = (looking(kind, group, shared) for kind in (target, source))
    together, together_into, store_four, store_one = of.together, into.together, into.store_four, into.store_one
    ahead, store_now = into.ahead, into.store_now
    first_group, _, four, one, brought, pinned = of[:6]
    unpack, pack, tally = _unpack(source.code), _pack(target.code), tally_of(source.full, source.size)

    @device
    def map_group(f, first, second, begin, end, args):
        a, b = 0, 0
        for k in range(begin, end):
            a, b = pack(a, b, k, f(unpack(first, second, k), *args))
        return a, b

    @device
    def map_words(f, target, source, lo, hi, *args):
        rank, lanes = place()
        step = group * lanes
        i = first_group(source, lo) + group * rank
        again = False
        while i < hi:
            if (
                not again
                and i >= lo
                and i + 3 * step + group <= hi
                and together(source, i, step)
                and together_into(target, i, step)
            ):
                seen = ahead(target, i, step)
                good, words = four(source, i, step)
                tally(source, 4 * group, good)
                if good:
                    a, b = map_group(f, words[0], words[1], 0, group, args)
                    c, d = map_group(f, words[2], words[3], 0, group, args)
                    e, g = map_group(f, words[4], words[5], 0, group, args)
                    h, j = map_group(f, words[6], words[7], 0, group, args)
                    words = (a, b, c, d, e, g, h, j)
                    if not store_now(target, i, step, words, seen) and not store_four(target, i, step, words):
                        break
                    i += 4 * step
                    continue
            else:
                good, first, second = one(source, i)
                begin, end = min(max(lo - i, 0), group), min(hi - i, group)
                tally(source, end - begin, good)
                if good or again:
                    if not good:
                        first, second = pinned(source, i)
                    first, second = map_group(f, first, second, begin, end, args)
                    if begin < end and not store_one(target, i, lo, hi, first, second):
                        break
                    i += step
                    again = False
                    continue
            if not brought(source, i, hi - 1):
                break
            again = True

    return map_words


def _storing_items(target: Stored, items: Maker, place: Maker, shared: bool) -> Maker:
    group = GROUP_BYTES // target.size
    look = looking(target, group, shared)
    first_group, together, ahead, store_now = look.first_group, look.together, look.ahead, look.store_now
    store_four, store_one, pack = look.store_four, look.store_one, _pack(target.code)

    @device
    def item_group(f, source, i, begin, end, args):
        a, b = 0, 0
        for k in range(begin, end):
            a, b = pack(a, b, k, f(*(items(source, i + k) + args)))
        return a, b

    @device
    def store_items(f, target, source, lo, hi, *args):
        rank, lanes = place()
        step = group * lanes
        i = first_group(target, lo) + group * rank
        while i < hi:
            if i >= lo and i + 3 * step + group <= hi and together(target, i, step):
                a, b = item_group(f, source, i, 0, group, args)
                c, d = item_group(f, source, i + step, 0, group, args)
                e, g = item_group(f, source, i + 2 * step, 0, group, args)
                h, j = item_group(f, source, i + 3 * step, 0, group, args)
                words = (a, b, c, d, e, g, h, j)
                seen = ahead(target, i, step)
                if not store_now(target, i, step, words, seen) and not store_four(target, i, step, words):
                    break
                i += 4 * step
            else:
                begin, end = max(lo - i, 0), min(hi - i, group)
                a, b = item_group(f, source, i, begin, end, args)
                if begin < end and not store_one(target, i, lo, hi, a, b):
                    break
                i += step

    return store_items


@functools.cache
def handing(source: Stored, put: Maker, place: Maker, shared: bool) -> Maker:
    """Return ``(f, target, source, lo, hi, *args)``, which stores f of each item of a source behind a cache elsewhere.

    Parameters
    ----------
    source : Stored
    put : callable
        Device function ``(target, i, value)``.
    place : callable
        Device function to the caller's rank, and among how many threads.
    shared : bool
        Whether the lanes of a warp share a run.
    """
    group = GROUP_BYTES // source.size
    look = looking(source, group, shared)
    first_group, together, four, one, brought, pinned = look[:6]
    unpack, tally = _unpack(source.code), tally_of(source.full, source.size)

    @device
    def hand_group(f, target, first, second, i, begin, end, args):
        for k in range(begin, end):
            put(target, i + k, f(unpack(first, second, k), *args))

    @device
    def hand_words(f, target, view, lo, hi, *args):
        rank, lanes = place()
        step = group * lanes
        i = first_group(view, lo) + group * rank
        again = False
        while i < hi:
            if not again and i >= lo and i + 3 * step + group <= hi and together(view, i, step):
                good, words = four(view, i, step)
                tally(view, 4 * group, good)
                if good:
                    hand_group(f, target, words[0], words[1], i, 0, group, args)
                    hand_group(f, target, words[2], words[3], i + step, 0, group, args)
                    hand_group(f, target, words[4], words[5], i + 2 * step, 0, group, args)
                    hand_group(f, target, words[6], words[7], i + 3 * step, 0, group, args)
                    i += 4 * step
                    continue
            else:
                good, first, second = one(view, i)
                begin, end = min(max(lo - i, 0), group), min(hi - i, group)
                tally(view, end - begin, good)
                if good or again:
                    if not good:
                        first, second = pinned(view, i)
                    hand_group(f, target, first, second, i, begin, end, args)
                    i += step
                    again = False
                    continue
            if not brought(view, i, hi - 1):
                break
            again = True

    return hand_words
