"""Stores to the registers of QEMU's controller by threads that do not hold the interpreter lock.

`qtest` has the rules of the socket. A store is sent without waiting for its answer.
"""

from __future__ import annotations

import ctypes

import numpy as np

from warpwell.storage import set_word, word
from warpwell.targets import device, native
from warpwell.targets.primitives import (
    SYSTEM,
    backoff,
    call_foreign,
    clock_ns,
    fence,
    load_relaxed_as,
    store_relaxed_as,
)

MOST_OWED = 64
"""Maximum number of requests without an answer."""
ENOUGH_OWED = 32
"""At this number of requests without an answer, a thread reads the available answers."""
NO_WAIT = 0x40 | 0x4000
"""MSG_DONTWAIT and MSG_NOSIGNAL."""

# State words. The lock has the first five, 40 bytes.
S_LOCK = 0
S_OWED = 5
"""Number of pending answers for requests of native threads."""
S_LOST = 6
"""1 if the socket must not be used any more."""
S_SOCKET = 7
"""File descriptor of the socket."""
S_BAR0 = 8
"""Address of the registers, below 4 GiB."""
S_NANOSECONDS = 9
"""Timeout of pending answers, in nanoseconds."""
S_MUTEX_LOCK, S_MUTEX_UNLOCK, S_SEND, S_RECV = 10, 11, 12, 13
"""Functions of the C library."""
S_TEXT = 16
"""A request, 64 bytes."""
S_ANSWERS = 24
"""Answers, 512 bytes."""
ANSWER_BYTES = 512
STATE_WORDS = 88

U1 = np.dtype(np.uint8)
U8 = np.dtype(np.int64)

_libc = ctypes.CDLL(None)
FUNCTIONS = {
    at: int(ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value or 0)
    for at, name in (
        (S_MUTEX_LOCK, "pthread_mutex_lock"),
        (S_MUTEX_UNLOCK, "pthread_mutex_unlock"),
        (S_SEND, "send"),
        (S_RECV, "recv"),
    )
}


@device
def _put_hex(at, value):
    """Store 8 hexadecimal digits at `at` (thread)."""
    for k in range(8):
        digit = (value >> (28 - 4 * k)) & 15
        store_relaxed_as(at + k, digit + 48 if digit < 10 else digit + 87, U1)


@device
def _take_answers(state):
    """Read the available answers; return their bytes, 0 or less without answers (thread, lock held)."""
    buffer = state + 8 * S_ANSWERS
    got = call_foreign(word(state, S_RECV), word(state, S_SOCKET), buffer, ANSWER_BYTES, NO_WAIT, 0, 0, 0)
    owed = word(state, S_OWED)
    for k in range(got):
        if load_relaxed_as(buffer + k, U1) == 10:
            owed -= 1
    set_word(state, S_OWED, owed)
    return got


@device
def _send_store(state, offset, value):
    """Send one store and return 0, or -1 (thread, lock held)."""
    if word(state, S_LOST) != 0:
        return -1
    if word(state, S_OWED) >= ENOUGH_OWED:
        _take_answers(state)
    if word(state, S_OWED) >= MOST_OWED:
        until = clock_ns() + word(state, S_NANOSECONDS)
        attempt = 0
        while word(state, S_OWED) >= MOST_OWED:
            if _take_answers(state) == 0 or clock_ns() > until:
                return -1
            backoff(attempt)
            attempt += 1
    text = state + 8 * S_TEXT
    _put_hex(text + 9, word(state, S_BAR0) + offset)
    _put_hex(text + 20, value)
    if call_foreign(word(state, S_SEND), word(state, S_SOCKET), text, 29, NO_WAIT, 0, 0, 0) != 29:
        return -1
    set_word(state, S_OWED, word(state, S_OWED) + 1)
    return 0


@native
def store(state, offset, value, _c, _d, _e):
    """Store 32 bits to the register at `offset`; return 0, or -1 if the drive is lost (thread)."""
    fence(SYSTEM)
    call_foreign(word(state, S_MUTEX_LOCK), state, 0, 0, 0, 0, 0, 0)
    done = _send_store(state, offset, value)
    if done != 0:
        set_word(state, S_LOST, 1)
    call_foreign(word(state, S_MUTEX_UNLOCK), state, 0, 0, 0, 0, 0, 0)
    return done
