"""The hit path: read an item of a page that is in the cache, without a call and without a pin.

A reader acquires the page's word (`load_word`), loads the bytes from the frame that it names, and validates the read
(`validate_read`): it loads the word again, relaxed, and compares frame and generation. The same frame and generation
mean that the bytes are this page's. All other cases go to `cache.access`, and the loaded bytes are not used.

The loads of the bytes are ordered before the second load of the word in one of two ways:

- One item has acquire order (`item_reader`).
- Several loads are relaxed, and an acquire-release fence follows them: one for all pages that are validated after it
  (`copy_part`; `array.spans`; `read_units` in `array.gather`).

If a byte was stored by a thread that filled the frame again, its fence (`transfer.fill`) and this order make the
INVALID word visible to the second load, and the generation differs.

In a resident pool (see `cache.frames`) a frame holds bytes of one page only: a reader that has seen the word VALID
reads the item, and does not validate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from warpwell.queues.layout import I8
from warpwell.targets import device
from warpwell.targets.primitives import (
    DEVICE,
    as_bits,
    bits_as,
    copy_foreign,
    fence,
    fetch_add_as,
    fetch_or_as,
    load_acquire,
    load_passing_as,
    load_relaxed,
    load_relaxed_as,
)

from . import layout as at
from .access import ADD_F4, ADD_F8, ADD_I4, ADD_I8, LOAD, STORE, access, copy_run, item_of, pin_long, unpin_long
from .lookup import count
from .paging import pin_valid
from .pins import HELD, add_pin, remove_pin
from .word import DIRTY, IDENTITY, PIN, READABLE, REF, VALID, frame_of, state_of

Maker = Callable[..., Any]

ADDITIONS = {"i4": ADD_I4, "u4": ADD_I4, "i8": ADD_I8, "u8": ADD_I8, "f4": ADD_F4, "f8": ADD_F8}
"""Operations of `access`, by kind and size of the item."""
PIN_TRIES = 4
"""Attempts to pin a page to store, if other threads change the same word, before the path that waits is taken."""


@device
def load_word(address):
    """Return the page word at an address, for the first time in a read (thread; acquire).

    Called by `item_reader`, by `copy_part`, by the reads of spans, and by the kernels that gather. Each lane calls it
    for itself: a shuffle would order nothing.
    """
    return load_acquire(address, DEVICE)


@device
def validate_read(address, word):
    """Return whether bytes that were loaded since `load_word` returned `word` are the page's (thread; relaxed).

    Called like `load_word`. The loads of the bytes are ordered before this one: they have acquire order, or the caller
    has executed a fence, or a barrier of the warp has ordered it behind the fences of all lanes.
    """
    again = load_relaxed(address, DEVICE)
    return word & READABLE != 0 and (word ^ again) & IDENTITY == 0


@device
def mark_referenced(address, word, no_reuse):
    """Set a page's second chance after a read, unless it is set or pages are read once (thread; relaxed).

    Called like `validate_read`, after it returned True.
    """
    if word & REF == 0 and no_reuse == 0:
        fetch_or_as(address, REF, I8)


@device
def copy_part(space, address, frames, shift, page, first, nbytes, last, buffer, no_reuse):
    """Copy bytes of a page to memory of this thread; return whether it was a hit, and whether no error is latched.

    This is a validated read or, if that fails, a copy under a transient pin, which loads the page if it is missing.
    Only validated bytes may be used (thread; `cpu` and `interp`).

    Parameters
    ----------
    space : int
    address, frames : int
        Addresses of the page's word, and of frame 0.
    shift : int
        log2 of the bytes of a page.
    page, first, nbytes, last : int
        As for `copy_run`.
    buffer : int
        Address of the memory.
    no_reuse : int
        1 if pages are read once, else 0.
    """
    word = load_word(address)
    copy_foreign(buffer, frames + (frame_of(word) << shift) + first, nbytes)
    fence(DEVICE)
    if validate_read(address, word):
        mark_referenced(address, word, no_reuse)
        return True, True
    return False, copy_run(space, page, first, nbytes, last, buffer, 0) != 0


@device
def count_read(core, items, nbytes, is_hit):
    """Count a read of `items` items in the statistics (thread; relaxed). Called if statistics are full."""
    if is_hit:
        count(core, at.N_HITS, items)
    count(core, at.N_WANTED, nbytes)


def item_reader(dtype: np.dtype[Any], shift: int, *, direct_mapped: bool, full: bool) -> Maker:
    """Return a device function ``(view, offset) -> item``: the read of ``a[i]`` in a kernel.

    Parameters
    ----------
    dtype : dtype
        Of an aligned item of 1, 2, 4 or 8 bytes.
    shift : int
        log2 of the bytes of a page.
    direct_mapped : bool
        Whether each page has a frame of its own.
    full : bool
        Whether hits and bytes are counted.
    """
    nbytes = dtype.itemsize

    @device
    def read(view, offset):
        page = offset >> shift
        address = view.table + 8 * page
        inside = offset - (page << shift)
        word = load_word(address)
        if word & READABLE != 0:
            item = load_passing_as(view.frames + (frame_of(word) << shift) + inside, dtype)
            # load the word again: the same frame and generation mean that the item is this page's
            if validate_read(address, word):
                mark_referenced(address, word, view.once)
                if full:
                    count_read(view.core, 1, nbytes, True)
                return item
        if full:
            count_read(view.core, 1, nbytes, False)
        return bits_as(access(view.space, page, item_of(inside, nbytes, LOAD), 0), dtype)

    @device
    def read_direct_mapped(view, offset):
        if view.fully_resident == 0:
            page = offset >> shift
            if load_word(view.table + 8 * page) & READABLE == 0:
                if full:
                    count_read(view.core, 1, nbytes, False)
                item = item_of(offset - (page << shift), nbytes, LOAD)
                return bits_as(access(view.space, page, item, 0), dtype)
        if full:
            count_read(view.core, 1, nbytes, True)
        return load_relaxed_as(view.data + offset, dtype)

    return read_direct_mapped if direct_mapped else read


def item_writer(dtype: np.dtype[Any], shift: int) -> Maker:
    """Return a device function ``(view, offset, value)``, which stores an aligned item of 1, 2, 4 or 8 bytes.

    `access` takes a pin and provides the memory order: the hit path changes nothing.
    """
    change = _changer(STORE, dtype.itemsize, shift)

    @device
    def write(view, offset, value):
        change(view, offset, as_bits(value, dtype))

    return write


def item_adder(dtype: np.dtype[Any], shift: int) -> Maker | None:
    """Return a device function ``(view, offset, value) -> old item``, or None if no addition takes items of the dtype.

    Like `item_writer`. The addition is relaxed.
    """
    operation = ADDITIONS.get(dtype.str[1:])
    if operation is None:
        return None
    change = _changer(operation, dtype.itemsize, shift)

    @device
    def add(view, offset, value):
        return bits_as(change(view, offset, as_bits(value, dtype)), dtype)

    return add


def _changer(operation: int, nbytes: int, shift: int) -> Maker:
    @device
    def change(view, offset, bits):
        page = offset >> shift
        inside = offset - (page << shift)
        return access(view.space, page, item_of(inside, nbytes, operation), bits)

    return change


# -- stores of spans: pins of pages that are there --------------------------------------------------------------------


@device
def pin_to_store(address, word):
    """Pin the page whose word was `word`, and mark it dirty; return its frame, or -1 (thread; acquire).

    Called by `store_alone` and `store_shared` of `array.spans.words`, which execute a fence before they store.
    """
    for _ in range(PIN_TRIES):
        if state_of(word) != VALID:
            break
        if pin_valid(address, word, DIRTY):
            return frame_of(word)
        word = load_relaxed(address, DEVICE)
    return -1


@device
def unpin_stored(address):
    """Remove a pin of `pin_to_store`, after a fence of this thread (thread; relaxed). Called like `pin_to_store`."""
    fetch_add_as(address, -PIN, I8)


# -- long pins of kernels: ``a.pin(i)`` and ``a.unpin(i)`` call these for a page of the array, in each lane -----------


@device
def pin_page(view, page):
    """Take a long pin of a page; return whether it is pinned (all converged lanes, each its own page)."""
    return pin_long(view.space, page) != 0


@device
def unpin_page(view, page):
    """Release a kernel's long pin; return False and latch an error if the page has no such pin (thread)."""
    return unpin_long(view.space, page) != 0


@device
def pin_direct_mapped(view, page):
    """Pin like `pin_page`, if each page has a frame of its own: one acquire, one relaxed addition (thread)."""
    if view.fully_resident == 0 and load_word(view.table + 8 * page) & READABLE == 0:
        return pin_long(view.space, page) != 0
    return add_pin(view.owned + 8 * page, at.KERNEL_PIN) == HELD


@device
def unpin_direct_mapped(view, page):
    """Unpin like `unpin_page`, if each page has a frame of its own (thread; relaxed)."""
    return remove_pin(view.owned + 8 * page, at.KERNEL_PIN) or unpin_long(view.space, page) != 0


PIN_FUNCTIONS = {False: (pin_page, unpin_page), True: (pin_direct_mapped, unpin_direct_mapped)}
"""Device functions ``(view, page)`` that pin and unpin, by whether each page has a frame of its own."""
