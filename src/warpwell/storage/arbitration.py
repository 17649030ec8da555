"""Arbitration: ports that all service threads share, served round-robin with weights.

A free thread fetches a few commands under a lock, as many from a port as its weight, and runs them without the lock. A
window bounds the commands in flight, so that commands wait in the rings, where weights apply, and not in a drive's
queue, where the client with the most commands would win. If `serve.serve` gives every thread its own ports, weights
apply only among these.
"""

from __future__ import annotations

from warpwell.queues import layout as at
from warpwell.queues.submission import field
from warpwell.targets import (
    SYSTEM,
    clock_ns,
    device,
    exchange,
    fetch_add,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)

from .serve import (
    K_N_PORTS,
    K_SHARED,
    K_STOP,
    K_WINDOW,
    KEY_VALUE,
    NS_KIND,
    execute,
    execute_key_value,
    may_park,
    namespace_of,
    port_of,
    relax,
    serve_media,
)

LOCK = K_SHARED
TURN = K_SHARED + 1
"""Index of the port whose turn it is."""
LEFT = K_SHARED + 2
"""Commands that it may still send in this turn."""
WRITTEN_OFF = K_SHARED + 3
"""Commands under way that count no more: nothing completed for long while they filled the window."""
POSTED = K_SHARED + 4
"""Completions of all ports when a full window was first seen without further ones."""
SINCE = K_SHARED + 5
"""When that was (ns)."""
SILENCE_NS = 10**9

BATCH = 8
"""Most commands that a thread takes at a time."""
COMMAND_WORDS = 8


@device
def share(control, batch, namespaces):
    """Fetch some commands of all ports and run them; return the number. `batch` is the thread's own memory."""
    count = fetch(control, batch)
    for k in range(count):
        words = batch + k * (8 * COMMAND_WORDS)
        index = load_relaxed(words + 16, SYSTEM)
        word0 = load_relaxed(words, SYSTEM)
        buffer = load_relaxed(words + 24, SYSTEM)
        word5 = load_relaxed(words + 40, SYSTEM)
        record = namespace_of(namespaces, word0)
        if record != 0 and load_relaxed(record + 8 * NS_KIND, SYSTEM) == KEY_VALUE:
            key0 = load_relaxed(words + 8, SYSTEM)
            key1 = load_relaxed(words + 56, SYSTEM)
            execute_key_value(port_of(control, index), index, record, word0, key0, buffer, word5, key1)
        else:
            word6 = load_relaxed(words + 48, SYSTEM)
            execute(port_of(control, index), index, record, word0, buffer, word5, word6)
    return count


@device
def fetch(control, batch):
    """Copy the next commands into `batch`; return their number: also 0 if another thread is fetching."""
    lock = control + 8 * LOCK
    if load_relaxed(lock, SYSTEM) != 0 or exchange(lock, 1, SYSTEM) != 0:
        return 0
    ports = load_acquire(control + 8 * K_N_PORTS, SYSTEM)
    room = min(BATCH, room_in_window(control, ports))
    turn = load_relaxed(control + 8 * TURN, SYSTEM)
    left = load_relaxed(control + 8 * LEFT, SYSTEM)
    count = 0
    without = 0
    while count < room and without < ports:
        port = port_of(control, turn)
        taken = 0
        if port != 0 and left > 0:
            taken = take(port, turn, min(left, room - count), batch + count * (8 * COMMAND_WORDS))
        count += taken
        left -= taken
        if taken > 0:
            without = 0
        if count < room or left <= 0:
            # it has had its turn, or has nothing more: what it leaves is not saved up
            if taken == 0:
                without += 1
            turn += 1
            if turn >= ports:
                turn = 0
            left = 0
            port = port_of(control, turn)
            if port != 0:
                left = load_relaxed(port + 8 * at.P_WEIGHT, SYSTEM)
    store_relaxed(control + 8 * TURN, turn, SYSTEM)
    store_relaxed(control + 8 * LEFT, left, SYSTEM)
    store_release(lock, 0, SYSTEM)
    return count


@device
def take(port, index, most, batch):
    """Copy up to `most` commands of a port into `batch` and let their entries be written again."""
    mask = (1 << field(port, at.P_DEPTH_SHIFT)) - 1
    head = load_relaxed(port + 8 * at.P_SQ_HEAD, SYSTEM)
    tail = load_acquire(field(port, at.P_SQ_DOORBELL), SYSTEM)
    count = 0
    while count < most and (head & mask) != tail:
        entry = field(port, at.P_SQ) + 64 * (head & mask)
        words = batch + count * (8 * COMMAND_WORDS)
        for k in range(COMMAND_WORDS):
            if k != 2 and k != 4:  # mptr and prp2 are not used
                store_relaxed(words + 8 * k, load_relaxed(entry + 8 * k, SYSTEM), SYSTEM)
        store_relaxed(words + 16, index, SYSTEM)
        head += 1
        count += 1
        # released, because it tells submitters that the entry was read
        store_release(port + 8 * at.P_SQ_HEAD, head, SYSTEM)
    if count > 0:
        fetch_add(port + 8 * at.P_OUTSTANDING, count, SYSTEM)
        store_relaxed(port + 8 * at.P_COMMANDS, load_relaxed(port + 8 * at.P_COMMANDS, SYSTEM) + count, SYSTEM)
    return count


@device
def room_in_window(control, ports):
    """Return how many commands may be fetched (under the lock).

    Commands that a drive lost must not fill the window: if no command completed for a second, those in flight no longer
    count.
    """
    under_way = total(control, ports, at.P_OUTSTANDING)
    off = min(load_relaxed(control + 8 * WRITTEN_OFF, SYSTEM), under_way)
    room = load_relaxed(control + 8 * K_WINDOW, SYSTEM) - (under_way - off)
    if room <= 0:
        posted = total(control, ports, at.P_CQ_TAIL)
        now = clock_ns()
        if posted != load_relaxed(control + 8 * POSTED, SYSTEM) or load_relaxed(control + 8 * SINCE, SYSTEM) == 0:
            store_relaxed(control + 8 * POSTED, posted, SYSTEM)
            store_relaxed(control + 8 * SINCE, now, SYSTEM)
        elif now - load_relaxed(control + 8 * SINCE, SYSTEM) > SILENCE_NS:
            off = under_way
            store_relaxed(control + 8 * SINCE, 0, SYSTEM)
    else:
        store_relaxed(control + 8 * SINCE, 0, SYSTEM)
    store_relaxed(control + 8 * WRITTEN_OFF, off, SYSTEM)
    return room


@device
def total(control, ports, word):
    """Return the sum of a word of all port records."""
    out = 0
    for index in range(ports):
        port = port_of(control, index)
        if port != 0:
            out += load_relaxed(port + 8 * word, SYSTEM)
    return out


@device
def serve_shared(control, batch, namespaces):
    """Serve all ports together with other threads; `serve.serve` serves only some."""
    idle = 0
    while load_acquire(control + 8 * K_STOP, SYSTEM) == 0:
        work = share(control, batch, namespaces) + serve_media(control, namespaces)
        if work > 0:
            idle = 0
            continue
        idle += 1
        if may_park(control, idle, 0, 1):
            return idle
        relax(control, idle)
    return idle
