"""Load on key-value queues with values that can be checked: each one contains its key and its size."""

from __future__ import annotations

from typing import Any

import numpy as np

from warpwell.nvme import KV_RETRIEVE, KV_UNRECOVERED_ERROR, command_word0, key_value_word5
from warpwell.queues.completion import drain, result_of, take_ready
from warpwell.queues.layout import ASYNC, ID_PAGE, ID_STATE, ID_STATUS, Q_WORDS, TAKEN
from warpwell.queues.submission import id_record, release_id, staging_of, submit_entry, take_id
from warpwell.targets import device, kernel
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    backoff,
    clock_ns,
    element_address,
    fetch_add,
    grid,
    i64,
    lane_id,
    load_relaxed,
    rem,
    store_relaxed,
    store_release,
)

from .key_value_memory import NOTHING, TIMED_OUT, settle, wait

GOOD = 0
WRONG = 1
"""The value, or its size, is not the key's."""
FAILED = 2
"""Unrecovered error."""
TOO_SLOW = 3
"""No completion in time."""
FULL = 4
"""No id was free."""
BAD_STATUS = 5
"""Any other status."""
OUTCOMES = 6

VALUE_WORDS = 8
NBYTES = 8 * VALUE_WORDS
GOLDEN = -0x61C8864680B583EB


@device
def content(key: int, index: int) -> Any:
    """Return a word of the value of a key."""
    return i64(i64(key + 1) * GOLDEN) ^ index


@device
def words_of_value(key: int) -> int:
    """Return how many words the value of a key has."""
    return 1 + (key & (VALUE_WORDS - 1))


def fill_checked(store: Any, keys: int) -> None:
    """Put the values of keys 0 to ``keys - 1`` into a `KeyValueMemory`."""
    for key in range(keys):
        content_words = np.array([content(key, k) for k in range(words_of_value(key))])
        store.fill(np.array([key]), content_words.view(np.uint8)[None])


@device
def send_retrieve(queue: int, nsid: int, key: int, kind: int) -> Any:
    """Request the value of an 8-byte key; return the id, now in state `kind`, or `NOTHING` (thread)."""
    cid = take_id(queue, 0)
    if cid < 0:
        return NOTHING
    staging = staging_of(queue, cid)
    for k in range(VALUE_WORDS):
        store_relaxed(staging + 8 * k, -1, SYSTEM)
    record = id_record(queue, cid)
    store_relaxed(record + 8 * ID_PAGE, key, DEVICE)
    store_release(record + 8 * ID_STATE, kind, DEVICE)
    word0 = command_word0(KV_RETRIEVE, cid, nsid)
    submit_entry(queue, word0, key, staging, key_value_word5(NBYTES, 8, 0), 0, 0)
    return cid


@device
def outcome_of(queue: int, cid: int, key: int, answer: int) -> int:
    """Check what came for a key."""
    if answer == TIMED_OUT:
        return TOO_SLOW
    status = answer & 0xFFFF
    if status == KV_UNRECOVERED_ERROR:
        return FAILED
    if status != 0:
        return BAD_STATUS
    count = words_of_value(key)
    if answer >> 16 != 8 * count:
        return WRONG
    staging = staging_of(queue, cid)
    for k in range(VALUE_WORDS):
        expected = -1
        if k < count:
            expected = content(key, k)
        if load_relaxed(staging + 8 * k, SYSTEM) != expected:
            return WRONG
    return GOOD


@kernel
def retrieve_checked(
    queues: int, n_queues: int, nsid: int, keys: int, each: int, limit: int, counts: Any, slowest: Any
) -> None:
    """Each thread retrieves `each` values one after the other, and counts outcomes; `slowest` in ns."""
    i = grid(1)
    queue = queues + rem(i, n_queues) * (8 * Q_WORDS)
    longest = 0
    for n in range(each):
        key = rem(i * 7919 + n, keys)
        since = clock_ns()
        cid = send_retrieve(queue, nsid, key, TAKEN)
        outcome = FULL
        if cid >= 0:
            answer = wait(queue, cid, limit)
            outcome = outcome_of(queue, cid, key, answer)
            if answer != TIMED_OUT:
                release_id(queue, cid)
        else:
            settle(queue)
        longest = max(longest, clock_ns() - since)
        fetch_add(element_address(counts, outcome), 1, DEVICE)
    slowest[i] = longest


@device
def keep_busy(queue: int, nsid: int, keys: int, max_in_flight: int, until: int, counts: Any) -> None:
    """Keep `max_in_flight` retrieves in flight until that time, then drain the queue (one thread a queue)."""
    held = 0
    n = 0
    attempt = 0
    while held > 0 or clock_ns() < until:
        worked = False
        if held < max_in_flight and clock_ns() < until:
            key = rem(n, keys)
            cid = send_retrieve(queue, nsid, key, ASYNC)
            if cid >= 0:
                held += 1
                n += 1
                worked = True
        if not worked:
            lane = lane_id()
            drain(queue, 1 << lane, lane, lane)
        cid = take_ready(queue)
        while cid >= 0:
            record = id_record(queue, cid)
            answer = load_relaxed(record + 8 * ID_STATUS, DEVICE) | (result_of(queue, cid) << 16)
            outcome = outcome_of(queue, cid, load_relaxed(record + 8 * ID_PAGE, DEVICE), answer)
            release_id(queue, cid)
            fetch_add(element_address(counts, outcome), 1, DEVICE)
            held -= 1
            worked = True
            cid = take_ready(queue)
        attempt = 0 if worked else attempt + 1
        if attempt > 0:
            backoff(min(attempt, 20))


@kernel
def keep_all_busy(queues: int, nsid: int, keys: int, max_in_flight: int, nanoseconds: int, counts: Any) -> None:
    """Thread i keeps queue i busy."""
    until = clock_ns() + nanoseconds
    keep_busy(queues + grid(1) * (8 * Q_WORDS), nsid, keys, max_in_flight, until, counts)


@kernel
def one_beside_busy(
    queues: int, nsid: int, keys: int, max_in_flight: int, nanoseconds: int, counts: Any, times: Any
) -> None:
    """Thread 0 retrieves one value after the other and notes each time (ns); the others keep their queues busy."""
    i = grid(1)
    queue = queues + i * (8 * Q_WORDS)
    until = clock_ns() + nanoseconds
    if i > 0:
        keep_busy(queue, nsid, keys, max_in_flight, until, counts)
        return
    n = 0
    while n < len(times) and clock_ns() < until:
        since = clock_ns()
        key = rem(n, keys)
        cid = send_retrieve(queue, nsid, key, TAKEN)
        answer = wait(queue, cid, 1 << 40)
        fetch_add(element_address(counts, outcome_of(queue, cid, key, answer)), 1, DEVICE)
        release_id(queue, cid)
        times[n] = clock_ns() - since
        n += 1
