"""Bulk walks by words in registers, for `cuda` and `interp`: each lane reads up to four groups of 16 bytes at once.

A *group* is the part of each array that one lane takes: the same few neighboring items, 16 bytes of the widest. A *row*
is a group for each lane. Each lane reads the pages of up to four rows for itself, as `warpwell.cache.hit` describes:

1. Acquire the page's word. (A shuffle would order nothing: it is each lane's own acquire that shows it the page.)
2. Load the groups, relaxed, all of them in flight. If the word is INVALID, the groups are of frame 0, and are not used.
3. Execute an acquire-release fence, one for all pages and arrays of the rows.
4. Load the word again, relaxed. The same frame and generation: the groups are the page's. If a group was stored by a
   thread that filled the frame again, its fence and this one make the INVALID word visible to this load, and the
   generation differs.
5. Only then is an item used.

A lane whose read is not valid pins the page for as long as it loads the groups, one page at a time, with the lanes that
are converged with it. No thread waits under such a pin, so runs that are longer than the cache end.

Four rows are stored without a call if their pages are in the cache:

1. The pinning lane loads the page's word while the source is loaded. In a warp, lane r pins for row r, or the first
   lane if four rows are in one page; a single thread pins for itself.
2. The items are computed. Nothing waits from here on: a program's function might.
3. A pin and DIRTY are added to exactly that word, if it is VALID. This acquires the page. While it is pinned, it is
   not evicted and not written back, so DIRTY may be set before the stores.
4. A barrier of the warp orders all lanes after the pins, and shuffles pass the frames to them.
5. Each lane executes a fence: a reader that takes a new item for one of the frame's old page then sees that page's new
   word. Then it stores, relaxed, four groups in flight.
6. A barrier, and a fence of the pinning lane, order all lanes' stores before a relaxed addition that removes the pin. A
   thread that writes the page back reads its word from this addition, or from a later read-modify-write, and acquires
   it.
7. If a page is missing, the pins of the other pages are removed, and the path that may wait stores the rows.
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
from ...targets import device
from ...targets.primitives import (
    DEVICE,
    activemask,
    ballot,
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
"""Number of rows that are in flight together: 64 bytes for each lane."""
ROWS_BYTES = ROWS * 32 * GROUP_BYTES
"""Bytes of these rows of a whole warp."""


class Stored(NamedTuple):
    """Compile-time parameters of walks of an array behind a cache."""

    code: str
    """Code of an item, see `items.item_of`."""
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
        """Whether four rows of a warp may be in several pages."""
        return 1 << self.shift < ROWS_BYTES


class PageAccess(NamedTuple):
    """How walks access an array behind a cache: device functions of one thread.

    Item i begins the lane's first group; its other groups are `step` items apart.
    """

    aligned_start: Maker
    """``(view, lo)`` to the item that the first lane begins at: up to a row before lo, in the same page."""
    same_page: Maker
    """``(view, i, step)``: whether the groups of four rows can be read, or stored, at once."""
    read_four: Maker
    """``(view, i, step)`` to whether the read is valid, and four groups as eight words."""
    read_one: Maker
    """``(view, i, step)`` to whether the read is valid, and the two words of a group."""
    load_page: Maker
    """``(view, i, last)``: load the group's page into the cache; whether no error is latched (converged lanes)."""
    read_under_pin: Maker
    """``(view, i)`` to the two words of a group, each read under a pin (converged lanes)."""
    peek_word: Maker
    """``(view, i, step)`` to the word, at this time, of the page that this lane pins for `store_now`."""
    store_now: Maker
    """``(view, i, step, groups, word)``: store four groups of `same_page`, if their pages are in the cache; whether
    that was done (converged lanes). `word` is from `peek_word`. Waits for nothing."""
    store_four: Maker
    """``(view, i, step, groups)``: store four groups under a pin; whether no error is latched (converged lanes)."""
    store_one: Maker
    """``(view, i, lo, hi, first, second)``: store the items of a group that are in [lo, hi), likewise."""


@functools.cache
def page_access(array: Stored, group: int, shared: bool) -> PageAccess:
    """Return the access to an array behind a cache, of which a lane takes groups of `group` items.

    `shared` is whether the lanes of a warp share a run.
    """
    size, shift = array.size, array.shift
    nbytes = group * size
    by_rows = shared and array.small
    load, load_four = _loading(nbytes)

    @device
    def same_page(view, i, step):
        return (view.origin + i * size) >> shift == (view.origin + (i + 3 * step) * size) >> shift

    @device
    def load_page(view, i, last):
        final = (view.origin + last * size) >> shift
        return fault_in(view.space, (view.origin + i * size) >> shift, final) != 0

    @device
    def read_word(view, at):
        page = at >> shift
        return read_pinned(view.space, page, at - (page << shift), min(nbytes, 8))

    @device
    def read_under_pin(view, i):
        at = view.origin + i * size
        second = 0
        if nbytes == GROUP_BYTES:
            second = read_word(view, at + 8)
        return read_word(view, at), second

    return PageAccess(
        _aligned_start(size, group, 32 * nbytes if by_rows else 0),
        *(_reading_rows(array, nbytes) if by_rows else (same_page, _reading(array, group, load_four))),
        _reading(array, group, load),
        load_page,
        read_under_pin,
        *_storing_now(array, nbytes, shared),
        *_storing_pinned(array, group),
    )


# -- groups --------------------------------------------------------------------------------------------------------


@functools.cache
def _loading(nbytes: int) -> tuple[Maker, Maker]:
    """Return two functions of ``(address, step)``: for one group, as two words or as bytes in the first; and for four.

    The four are `step` bytes apart, and all of them in flight.
    """
    is_pair = nbytes == GROUP_BYTES

    @device
    def load(address, step):
        if is_pair:
            return load_pair(address)
        return load_relaxed(address & -8, DEVICE) >> (8 * (address & 7)), 0

    @device
    def load_four(address, step):
        a, b = load(address, step)
        c, d = load(address + step, step)
        e, f = load(address + 2 * step, step)
        g, h = load(address + 3 * step, step)
        return a, b, c, d, e, f, g, h

    return load, load_four


def _reading(array: Stored, group: int, load: Maker) -> Maker:
    """Return ``(view, i, step)`` to whether the read is valid, and the groups that `load` returns, all of one page."""
    size, shift, direct_mapped = array.size, array.shift, array.direct_mapped

    @device
    def read(view, i, step):
        at = view.origin + i * size
        if direct_mapped:
            if view.fully_resident != 0:
                return True, load(view.data + at, step * size)
        page = at >> shift
        address = view.table + 8 * page
        word = load_word(address)
        groups = load(view.frames + (frame_of(word) << shift) + at - (page << shift), step * size)
        fence(DEVICE)
        is_valid = validate_read(address, word)
        # if lanes share a row, one lane is enough
        if is_valid and (step == group or i & (32 * group - 1) == 0):
            mark_referenced(address, word, view.once)
        return is_valid, groups

    return read


def _reading_rows(array: Stored, nbytes: int) -> tuple[Maker, Maker]:
    """Return `same_page` and `read_four` of lanes that share rows of small pages, each row in one page.

    A load that acquires ends before the next one begins, so four of them take four times as long as one. Therefore:

    - Lane r acquires the word of row r, and validates it. A barrier of the warp orders all lanes' groups after the
      acquire, and the validation after all lanes' fences: if a lane loaded a group of a frame that was filled again,
      its fence synchronizes with that thread's, and the barrier passes this on to the lane that validates.
    - The other lanes execute the same instructions as these four, so that the warp does not diverge.
    """
    size, shift, direct_mapped, row = array.size, array.shift, array.direct_mapped, 32 * nbytes
    load, load_four = _loading(nbytes)

    @device
    def same_pages(view, i, step):
        """Return whether all lanes of the warp are converged, and each of their rows is in one page."""
        if activemask() != ALL_LANES:
            return False
        begin = view.origin + i * size - nbytes * lane_id()
        offsets = (begin ^ shfl(ALL_LANES, begin, 0)) | ((begin | (step * size)) & (row - 1))
        return ballot(ALL_LANES, offsets == 0) == ALL_LANES

    @device
    def load_row(view, i, word):
        return load(view.frames + (frame_of(word) << shift) + ((view.origin + i * size) & ((1 << shift) - 1)), 0)

    @device
    def read_rows(view, i, step):
        if direct_mapped:
            if view.fully_resident != 0:
                return True, load_four(view.data + view.origin + i * size, step * size)
        own = view.table + 8 * ((view.origin + (i + (lane_id() & 3) * step) * size) >> shift)
        word = load_word(own)
        syncwarp(ALL_LANES)
        s, t = shfl(ALL_LANES, word, 0), shfl(ALL_LANES, word, 1)
        u, v = shfl(ALL_LANES, word, 2), shfl(ALL_LANES, word, 3)
        a, b = load_row(view, i, s)
        c, d = load_row(view, i + step, t)
        e, f = load_row(view, i + 2 * step, u)
        g, h = load_row(view, i + 3 * step, v)
        fence(DEVICE)
        syncwarp(ALL_LANES)
        is_valid = ballot(ALL_LANES, validate_read(own, word)) == ALL_LANES
        if is_valid and lane_id() < 4:
            mark_referenced(own, word, view.once)
        return is_valid, (a, b, c, d, e, f, g, h)

    return same_pages, read_rows


@functools.cache
def _aligned_start(size: int, group: int, row: int) -> Maker:
    """Return `aligned_start`: the first item of a group, or of a whole row of `row` bytes."""
    shift = size.bit_length() - 1

    @device
    def aligned_start(view, lo):
        if row:
            return (((view.origin + (lo << shift)) & -row) - view.origin) >> shift
        return lo & -group

    return aligned_start


# -- stores that wait for nothing ------------------------------------------------------------------------------------


@functools.cache
def _storing_now(array: Stored, nbytes: int, shared: bool) -> tuple[Maker, Maker]:
    """Return `peek_word` and `store_now`.

    The functions are inlined: at a call each lane would save up to 50 registers in memory, and the fences would wait
    for these stores.
    """
    if nbytes < 8:
        return _NO_PAGE.peek_word, _NO_PAGE.store_now
    size, shift, inside = array.size, array.shift, (1 << array.shift) - 1
    is_pair, rows = nbytes == GROUP_BYTES, 4 if shared and array.small else 1

    @device
    def page_of(view, i):
        return (view.origin + i * size) >> shift

    @device
    def put(view, i, frame, first, second):
        address = view.frames + (frame << shift) + ((view.origin + i * size) & inside)
        if is_pair:
            store_pair(address, first, second)
        else:
            store_relaxed(address, first, DEVICE)

    @device
    def own_address(view, i, step):
        return view.table + 8 * page_of(view, i + (lane_id() & (rows - 1)) * step)

    @device
    def peek_word(view, i, step):
        return load_relaxed(own_address(view, i, step), DEVICE)

    @device
    def store_alone(view, i, step, groups, word):
        address = view.table + 8 * page_of(view, i)
        frame = pin_to_store(address, word)
        if frame < 0:
            return False
        fence(DEVICE)
        a, b, c, d, e, f, g, h = groups
        put(view, i, frame, a, b)
        put(view, i + step, frame, c, d)
        put(view, i + 2 * step, frame, e, f)
        put(view, i + 3 * step, frame, g, h)
        fence(DEVICE)
        unpin_stored(address)
        return True

    @device
    def store_shared(view, i, step, groups, word):
        if activemask() != ALL_LANES:
            return False
        if rows == 1:
            page = page_of(view, i)
            if ballot(ALL_LANES, page == shfl(ALL_LANES, page, 0)) != ALL_LANES:
                return False
        address = own_address(view, i, step)
        frame = -1
        if lane_id() < rows:
            frame = pin_to_store(address, word)
        is_pinned = ballot(ALL_LANES, lane_id() < rows and frame < 0) == 0
        syncwarp(ALL_LANES)
        if is_pinned:
            fence(DEVICE)
            a, b, c, d, e, f, g, h = groups
            put(view, i, shfl(ALL_LANES, frame, 0), a, b)
            put(view, i + step, shfl(ALL_LANES, frame, 1 % rows), c, d)
            put(view, i + 2 * step, shfl(ALL_LANES, frame, 2 % rows), e, f)
            put(view, i + 3 * step, shfl(ALL_LANES, frame, 3 % rows), g, h)
        syncwarp(ALL_LANES)
        fence(DEVICE)
        if frame >= 0:
            unpin_stored(address)
        return is_pinned

    return peek_word, store_shared if shared else store_alone


@functools.cache
def _storing_pinned(array: Stored, group: int) -> tuple[Maker, Maker]:
    """Return `store_four` and `store_one`, which load missing pages."""
    size = array.size
    shape = size | (group * size) << 8 | array.shift << 16

    @device
    def store(view, i, step, count, bounds, groups):
        start = view.origin + i * size
        return store_groups(view.space, view.table, view.frames, start, step * size, count, shape, bounds, *groups) != 0

    @device
    def store_four(view, i, step, groups):
        return store(view, i, step, 4, 0, groups)

    @device
    def store_one(view, i, lo, hi, first, second):
        bounds = max(lo - i, 0) * size | (max(i + group - hi, 0) * size) << 8
        return store(view, i, 0, 1, bounds, (first, second, 0, 0, 0, 0, 0, 0))

    return store_four, store_one


# -- items of groups -----------------------------------------------------------------------------------------------


@functools.cache
def _packing(code: str) -> tuple[Maker, Maker]:
    """Return `unpack` and `pack`.

    ``unpack(first, second, k)`` returns item k of a group, and ``pack(first, second, k, value)`` the words of a group
    with another item k, which was 0.
    """
    item = item_of(code)
    size, decode, encode = item.stored.itemsize, item.decode, item.encode
    bits_mask = -1 if size == 8 else (1 << (8 * size)) - 1

    @device
    def unpack(first, second, k):
        word = first
        if k * size >= 8:
            word = second
        return decode((word >> (8 * (k * size & 7))) & bits_mask)

    @device
    def pack(first, second, k, value):
        bits = (encode(value) & bits_mask) << (8 * (k * size & 7))
        if k * size >= 8:
            return first, second | bits
        return first | bits, second

    return unpack, pack


# -- walks ---------------------------------------------------------------------------------------------------------


@device
def _always(view, i, step):
    return True


@device
def _read_no_groups(view, i, step):
    return True, (0, 0, 0, 0, 0, 0, 0, 0)


@device
def _read_no_group(view, i, step):
    return True, (0, 0)


@device
def _never(view, i, last):
    return False


@device
def _pin_no_page(view, i):
    return 0, 0


@device
def _no_word(view, i, step):
    return 0


@device
def _store_never(view, i, step, groups, word):
    return False


_NO_PAGE = PageAccess(
    _no_word, _always, _read_no_groups, _read_no_group, _never, _pin_no_page, _no_word, _store_never, _never, _never
)
"""The access of a walk that has no source, or no target, behind a cache; its starts and its stores are not called."""


@device
def _target(target, source):
    return target


@device
def _source(target, source):
    return source


def _walking(
    target: Stored | None,
    source: Stored | None,
    group: int,
    rank_of: Maker,
    shared: bool,
    use_four: Maker,
    use_one: Maker,
) -> Maker:
    """Return ``(f, total, target, source, lo, hi, args)``, which walks the caller's share and returns the last total.

    Parameters
    ----------
    target, source : Stored or None
        None if a walk has no array behind a cache in this role.
    use_four : callable
        Device function ``(f, total, target, source, groups, word, i, step, args)`` to whether the walk continues, and
        the total.
    use_one : callable
        Device function ``(f, total, target, source, pair, i, lo, hi, args)``, likewise, for the items of a group in
        [lo, hi).
    """
    size, full = (source.size, source.full) if source else (0, False)
    of = page_access(source, group, shared) if source else _NO_PAGE
    to = page_access(target, group, shared) if target else _NO_PAGE
    first, aligned_start = (_source, of.aligned_start) if source else (_target, to.aligned_start)
    _, same_page, read_four, read_one, load_page, read_under_pin = of[:6]
    same_page_of_target, peek_word = to.same_page, to.peek_word

    @device
    def same_pages(target, source, i, step):
        return same_page(source, i, step) and same_page_of_target(target, i, step)

    @device
    def walk(f, total, target, source, lo, hi, args):
        rank, lanes = rank_of()
        step = group * lanes
        i = aligned_start(first(target, source), lo) + group * rank
        was_loaded = False
        while i < hi:
            if not was_loaded and i >= lo and i + 3 * step + group <= hi and same_pages(target, source, i, step):
                word = peek_word(target, i, step)
                is_valid, groups = read_four(source, i, step)
                if full:
                    count_read(source.core, 4 * group, 4 * group * size, is_valid)
                if is_valid:
                    is_done, total = use_four(f, total, target, source, groups, word, i, step, args)
                    if not is_done:
                        break
                    i += 4 * step
                    continue
            else:
                is_valid, pair = read_one(source, i, group)
                if full:
                    count = min(hi - i, group) - min(max(lo - i, 0), group)
                    count_read(source.core, count, count * size, is_valid)
                if is_valid or was_loaded:
                    if not is_valid:
                        pair = read_under_pin(source, i)
                    is_done, total = use_one(f, total, target, source, pair, i, lo, hi, args)
                    if not is_done:
                        break
                    i += step
                    was_loaded = False
                    continue
            if not load_page(source, i, hi - 1):
                break
            was_loaded = True
        return total

    return walk


@device
def fold_item(f, total, item, i, args):
    """Return the next total of `fold`."""
    return f(total, item, *args)


@device
def fold_indexed_item(f, total, item, i, args):
    """Return the next total of a fold whose function takes the index of an item, too."""
    return f(total, item, i, *args)


@functools.cache
def folding(source: Stored, rank_of: Maker, shared: bool, fold_one: Maker = fold_item) -> Maker:
    """Return ``(f, start, source, lo, hi, *args)``, which folds the caller's share of an array behind a cache.

    Parameters
    ----------
    rank_of : callable
        Device function to the caller's rank, and the number of threads that share the run.
    shared : bool
        Whether the lanes of a warp share a run.
    fold_one : callable
        Device function ``(f, total, item, i, args)`` to the next total.
    """
    group = GROUP_BYTES // source.size
    unpack, _ = _packing(source.code)

    @device
    def fold_group(f, total, first, second, i, args):
        for k in range(group):
            total = fold_one(f, total, unpack(first, second, k), i + k, args)
        return total

    @device
    def fold_four(f, total, target, source, groups, word, i, step, args):
        total = fold_group(f, total, groups[0], groups[1], i, args)
        total = fold_group(f, total, groups[2], groups[3], i + step, args)
        total = fold_group(f, total, groups[4], groups[5], i + 2 * step, args)
        return True, fold_group(f, total, groups[6], groups[7], i + 3 * step, args)

    @device
    def fold_part(f, total, target, source, pair, i, lo, hi, args):
        first, second = pair
        for k in range(min(max(lo - i, 0), group), min(hi - i, group)):
            total = fold_one(f, total, unpack(first, second, k), i + k, args)
        return True, total

    walk = _walking(None, source, group, rank_of, shared, fold_four, fold_part)

    @device
    def fold_words(f, start, source, lo, hi, *args):
        return walk(f, start, 0, source, lo, hi, args)

    return fold_words


@functools.cache
def storing_elsewhere(source: Stored, put: Maker, rank_of: Maker, shared: bool) -> Maker:
    """Return ``(f, target, source, lo, hi, *args)``, which stores f of each item of a cached source by `put`.

    `put` is a device function ``(target, i, value)``; the other parameters are those of `folding`.
    """

    @device
    def store_item(f, total, item, i, target_and_args):
        put(target_and_args[0], i, f(item, *target_and_args[1]))
        return total

    walk = folding(source, rank_of, shared, store_item)

    @device
    def store_elsewhere(f, target, source, lo, hi, *args):
        walk(f, 0, source, lo, hi, target, args)

    return store_elsewhere


@functools.cache
def storing(target: Stored, source: Stored | None, items: Maker, rank_of: Maker, shared: bool) -> Maker:
    """Return ``(f, target, source, lo, hi, *args)``, which stores f of each item of a source, behind a cache or not.

    `items` is `buffers.Window.get` of a source that is not behind a cache; the other parameters are those of `folding`.
    """
    group = GROUP_BYTES // max(target.size, source.size if source else 0)
    has_items = source is not None
    unpack, pack = _packing(source.code if source else target.code)[0], _packing(target.code)[1]
    store_now, store_four, store_one = page_access(target, group, shared)[7:]

    @device
    def items_of(source, first, second, i, k):
        if has_items:
            return (unpack(first, second, k),)
        return items(source, 0, i, k)

    @device
    def map_group(f, source, first, second, i, begin, end, args):
        a, b = 0, 0
        for k in range(begin, end):
            a, b = pack(a, b, k, f(*(items_of(source, first, second, i, k) + args)))
        return a, b

    @device
    def map_four(f, total, target, source, groups, word, i, step, args):
        a, b = map_group(f, source, groups[0], groups[1], i, 0, group, args)
        c, d = map_group(f, source, groups[2], groups[3], i + step, 0, group, args)
        e, g = map_group(f, source, groups[4], groups[5], i + 2 * step, 0, group, args)
        h, j = map_group(f, source, groups[6], groups[7], i + 3 * step, 0, group, args)
        groups = (a, b, c, d, e, g, h, j)
        return store_now(target, i, step, groups, word) or store_four(target, i, step, groups), total

    @device
    def map_part(f, total, target, source, pair, i, lo, hi, args):
        begin, end = min(max(lo - i, 0), group), min(hi - i, group)
        first, second = pair
        first, second = map_group(f, source, first, second, i, begin, end, args)
        return begin >= end or store_one(target, i, lo, hi, first, second), total

    walk = _walking(target, source, group, rank_of, shared, map_four, map_part)

    @device
    def map_words(f, target, source, lo, hi, *args):
        walk(f, 0, target, source, lo, hi, args)

    return map_words
