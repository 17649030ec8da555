"""`run`: the native loop of an `EmulatedLink`: it reports each chunk when the link would have delivered it."""

from __future__ import annotations

from warpwell.pool.transport import bulk
from warpwell.pool.transport.table import OVER, READY
from warpwell.targets import device
from warpwell.targets.primitives import SYSTEM, call_foreign, clock_ns, fetch_add, load_acquire, rem, store_release

AHEAD = 64
"""Chunks of a transfer that are on the emulated link at once."""

G_DOORBELL, G_STOP, G_ROWS, G_TABLE, G_SYSCALL, G_FUTEX, G_LATENCY, G_SECONDS, G_NANOSECONDS = range(0, 8 * 9, 8)
GLOBAL_WORDS = 9

L_FREE, L_COST = 0, 8
"""A link: the time at which it is free (ns), and the time of a byte (ps)."""

E_STATE, E_INNER, E_OUTER, E_LINK, E_NBYTES, E_CHUNK, E_CHUNKS, E_SEEN, E_TOLD, E_TIMES = range(0, 8 * 10, 8)
ROW_BYTES = E_TIMES + 8 * AHEAD

_WAIT, _WAKE, _EVERYBODY = 128, 129, 2**31 - 1
_POLL, _IDLE = 30_000, 100_000_000


@device
def word(address: int) -> int:
    """Return a word."""
    return load_acquire(address, SYSTEM)


@device
def run(g: int) -> int:
    """Serve transfers until the stop word is set."""
    while word(g + G_STOP) == 0:
        doorbell = word(g + G_DOORBELL)
        nap = _IDLE
        for k in range(word(g + G_ROWS)):
            e = word(g + G_TABLE) + ROW_BYTES * k
            if word(e + E_STATE) == READY:
                nap = min(nap, serve(g, e))
        if nap > 0:
            store_release(g + G_SECONDS, 0, SYSTEM)
            store_release(g + G_NANOSECONDS, nap, SYSTEM)
            call_foreign(
                word(g + G_SYSCALL),
                word(g + G_FUTEX),
                g + G_DOORBELL,
                _WAIT,
                doorbell & 0xFFFFFFFF,
                g + G_SECONDS,
                0,
                0,
            )
    return 0


@device
def serve(g: int, e: int) -> int:
    """Serve a transfer; return the nanoseconds until it needs service again."""
    inner = word(e + E_INNER)
    outer = word(e + E_OUTER)
    status = word(outer + 8 * bulk.STATUS)
    below = word(inner + 8 * bulk.STATUS)
    held = word(inner + 8 * bulk.HELD)
    now = clock_ns()
    timed_chunks = word(e + E_SEEN)
    reported_chunks = word(e + E_TOLD)
    completed_chunks = word(inner + 8 * bulk.COMPLETED)
    while timed_chunks < completed_chunks and timed_chunks - reported_chunks < AHEAD:
        nbytes = min(word(e + E_CHUNK), word(e + E_NBYTES) - timed_chunks * word(e + E_CHUNK))
        over = occupy(word(e + E_LINK), nbytes, now)
        store_release(e + E_TIMES + 8 * rem(timed_chunks, AHEAD), over + word(g + G_LATENCY), SYSTEM)
        timed_chunks += 1
    before = reported_chunks
    nap = _POLL
    while reported_chunks < timed_chunks:
        left = word(e + E_TIMES + 8 * rem(reported_chunks, AHEAD)) - now
        if left > 0:
            nap = min(left, _POLL)
            break
        reported_chunks += 1
    store_release(e + E_SEEN, timed_chunks, SYSTEM)
    store_release(e + E_TOLD, reported_chunks, SYSTEM)
    if reported_chunks > before and status == bulk.RUNNING:
        store_release(outer + 8 * bulk.COMPLETED, reported_chunks, SYSTEM)
        if reported_chunks == word(e + E_CHUNKS):
            store_release(outer + 8 * bulk.STATUS, bulk.DONE, SYSTEM)
    elif status == bulk.RUNNING and below == bulk.LOST and reported_chunks == completed_chunks:
        store_release(outer + 8 * bulk.STATUS, bulk.LOST, SYSTEM)
    elif status == bulk.RUNNING:
        return nap
    # chunks are due for a report
    if word(outer + 8 * bulk.STATUS) != bulk.RUNNING:
        if held == 0:
            store_release(outer + 8 * bulk.HELD, 0, SYSTEM)
            store_release(e + E_STATE, OVER, SYSTEM)
        elif below == bulk.LOST:  # the transfer's memory is never released
            store_release(e + E_STATE, OVER, SYSTEM)
    fetch_add(outer + 8 * bulk.CHANGES, 1, SYSTEM)
    call_foreign(word(g + G_SYSCALL), word(g + G_FUTEX), outer + 8 * bulk.CHANGES, _WAKE, _EVERYBODY, 0, 0, 0)
    return nap


@device
def occupy(link: int, nbytes: int, now: int) -> int:
    """Send `nbytes` over a link after earlier data; return the time at which they have passed."""
    over = max(now, word(link + L_FREE)) + nbytes * word(link + L_COST) // 1000
    store_release(link + L_FREE, over, SYSTEM)
    return over
