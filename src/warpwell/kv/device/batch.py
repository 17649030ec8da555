"""Kernels of a batch: one thread for each row; the rows of a warp share a queue and copy their values together.

``begin_rows`` merges equal keys, reads values from the device cache, and submits commands for the remaining rows; it
never waits. ``finish_rows`` waits for these commands, submits commands for rows that found no free id, and fills the
cache; a second launch does nothing. ``spread_rows`` copies rows to other rows with the same key.
"""

from __future__ import annotations

from warpwell.nvme.status import KV_KEY_DOES_NOT_EXIST
from warpwell.queues import field
from warpwell.queues.layout import Q_WORDS
from warpwell.targets import device, kernel
from warpwell.targets.primitives import (
    DEVICE,
    activemask,
    ballot,
    bits_as,
    compare_exchange,
    div,
    fetch_add,
    ffs,
    grid,
    lane_id,
    load_relaxed,
    popc,
    store_relaxed,
    store_relaxed_as,
    warp_size,
)

from ..index.sealed import UINT8, hash_of
from .device_cache import copy_each, look_up
from .requests import K_CACHE, N_COMMANDS, N_HITS, N_MERGED, execute, queue_at, serve, start

# -- record of a batch in device memory, in words --------------------------------------------------------------
B_KEYS = 0
"""Address of the keys, one or two words for each row."""
B_LENGTHS = 1
"""Address of the key lengths, one word for each row; 0 if all keys have `B_LENGTH` bytes."""
B_TABLE = 2
"""Address of the hash table that finds equal keys; an entry is row + 1, or 0."""
B_TABLE_MASK = 3
B_FIRST = 4
"""Address of one word for each row: the first row with the same key."""
B_TICKETS = 5
"""Address of one word for each row: the id of its command, `NO_TICKET` or `DONE`, minus `DONE`."""
B_SIZES = 6
"""Address of one word for each row: the value's size, negative for an absent key."""
B_FOUND = 7
"""Address of one byte for each row."""
B_ROWS = 8
B_STRIDE = 9
B_ROOM = 10
"""Maximum number of bytes of a value in a row."""
B_SALT = 11
"""Offset of the first row's queue, so that batches begin at different queues."""
B_PITCH = 12
"""Size of a key in `B_KEYS`, 8 or 16 bytes."""
B_LENGTH = 13
B_UNIQUE = 14
"""1 if all keys differ, so that no rows are merged."""
B_FAILED = 16
"""Number + 1 of a row that failed, followed by its status; 0 if no row failed."""
B_STATUS = 17
B_ALL = 32

DONE = -2
"""Ticket of a row that has its value, or shares the value of another row. Stored as 0, the memory's first content."""
NO_TICKET = -1
NO_VALUE = -1


@device
def key_word(batch, row, k):
    """Return a word of a row's key (thread)."""
    pitch = field(batch, B_PITCH)
    if 8 * k >= pitch:
        return 0
    return load_relaxed(field(batch, B_KEYS) + pitch * row + 8 * k, DEVICE)


@device
def key_length(batch, row):
    """Return the length of a row's key (thread)."""
    lengths = field(batch, B_LENGTHS)
    if lengths == 0:
        return field(batch, B_LENGTH)
    return load_relaxed(lengths + 8 * row, DEVICE)


@device
def first_of(batch, row, key0, key1, length):
    """Return the row that represents all rows with this key; this row, if it is the first (thread)."""
    if field(batch, B_UNIQUE) != 0:
        return row
    mask = field(batch, B_TABLE_MASK)
    at = hash_of(key0, key1, length) & mask
    while True:
        candidate = compare_exchange(field(batch, B_TABLE) + 8 * at, 0, row + 1, DEVICE) - 1
        if candidate < 0:
            return row
        same = key_word(batch, candidate, 0) == key0 and key_word(batch, candidate, 1) == key1
        if same and key_length(batch, candidate) == length:
            return candidate
        at = (at + 1) & mask


@device
def store_result(batch, row, size):
    """Store the result of a row (thread)."""
    store_relaxed(field(batch, B_SIZES) + 8 * row, size, DEVICE)
    is_found = 0
    if size >= 0:
        is_found = 1
    store_relaxed_as(field(batch, B_FOUND) + row, bits_as(is_found, UINT8), UINT8)


@device
def queue_of_row(core, batch, row):
    """Return the queue of a row: the same for all rows of a warp (thread)."""
    return queue_at(core, (div(row, warp_size()) + field(batch, B_SALT)) & 0x7FFFFFFF)


@kernel
def begin_rows(core, batch):
    """Run one step of a batch; see the module's docstring."""
    row = grid(1)
    mask = activemask()
    lane = lane_id()
    key0 = key_word(batch, row, 0)
    key1 = key_word(batch, row, 1)
    length = key_length(batch, row)
    first = first_of(batch, row, key0, key1, length)
    store_relaxed(field(batch, B_FIRST) + 8 * row, first, DEVICE)
    want = first == row
    ticket = DONE
    cache = field(core, K_CACHE)
    if cache != 0:
        to = field(batch, B_ROWS) + row * field(batch, B_STRIDE)
        size = look_up(cache, want, key0, key1, length, to, field(batch, B_ROOM), mask, lane)
        if want and size >= 0:
            store_result(batch, row, size)
            want = False
        hits = ballot(mask, size >= 0)
        if hits != 0 and lane == ffs(hits) - 1:
            fetch_add(core + 8 * N_HITS, popc(hits), DEVICE)
    if want:
        queue = queue_of_row(core, batch, row)
        ticket = start(core, queue, key0, key1, length, field(batch, B_ROOM))
        fetch_add(core + 8 * N_COMMANDS, 1, DEVICE)
    elif first != row:
        fetch_add(core + 8 * N_MERGED, 1, DEVICE)
    store_relaxed(field(batch, B_TICKETS) + 8 * row, ticket - DONE, DEVICE)


@kernel
def finish_rows(core, batch):
    """Run one step of a batch; see the module's docstring."""
    row = grid(1)
    mask = activemask()
    lane = lane_id()
    leader = ffs(mask) - 1
    key0 = key_word(batch, row, 0)
    key1 = key_word(batch, row, 1)
    length = key_length(batch, row)
    ticket = load_relaxed(field(batch, B_TICKETS) + 8 * row, DEVICE) + DONE
    want = ticket != DONE
    room = field(batch, B_ROOM)
    to = field(batch, B_ROWS) + row * field(batch, B_STRIDE)
    queue = queue_of_row(core, batch, row)
    answer = execute(core, queue, want, ticket, key0, key1, length, to, room, mask, lane, leader)
    status = answer & 0xFFFF
    size = answer >> 16
    if want:
        # An interrupted launch is repeated, and must not find an id that belongs to another command at that time.
        store_relaxed(field(batch, B_TICKETS) + 8 * row, 0, DEVICE)
        if status == 0:
            store_result(batch, row, size)
        else:
            store_result(batch, row, NO_VALUE)
            if status != KV_KEY_DOES_NOT_EXIST and compare_exchange(batch + 8 * B_FAILED, 0, row + 1, DEVICE) == 0:
                store_relaxed(batch + 8 * B_STATUS, status, DEVICE)


@kernel
def spread_rows(batch):
    """Run one step of a batch; see the module's docstring."""
    row = grid(1)
    mask = activemask()
    lane = lane_id()
    first = load_relaxed(field(batch, B_FIRST) + 8 * row, DEVICE)
    shared = first != row
    size = load_relaxed(field(batch, B_SIZES) + 8 * first, DEVICE)
    rows = field(batch, B_ROWS)
    stride = field(batch, B_STRIDE)
    count = max(0, min(size, field(batch, B_ROOM)))
    shared_lanes = ballot(mask, shared and count > 0)
    copy_each(shared_lanes, rows + row * stride, rows + first * stride, count, mask, lane)
    if shared:
        store_result(batch, row, size)


@kernel
def settle(core, queues, count):
    """Drain queues, and release ids of commands that were given up (one thread; the host, between launches)."""
    for k in range(count):
        serve(queues + k * (8 * Q_WORDS), 1, 0, 0)
