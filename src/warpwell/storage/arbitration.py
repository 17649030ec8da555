"""Arbitration: all service threads of a controller share its ports, round-robin with weights.

A free thread fetches some commands of a port under the port's lock, runs them without it, and posts together the
answers that need no waiting. Without a window each thread goes round the ports by itself. With one, all go round
together, under one lock, and at most so many commands are in flight: the others wait in the rings, where weights apply,
and not in a drive's queue, where the client with the most commands would win.
"""

from __future__ import annotations

from warpwell.nvme import INVALID_NAMESPACE, READ, word0_cid, word0_opc, word5_slba, word6_nlb
from warpwell.queues import field
from warpwell.queues import layout as at
from warpwell.targets import (
    SYSTEM,
    clock_ns,
    device,
    exchange,
    load_acquire,
    load_relaxed,
    prefetch,
    store_relaxed,
    store_release,
    take_seat,
)

from .commands import seat_of
from .serve import (
    FETCH,
    K_N_PORTS,
    K_SHARED,
    K_STOP,
    K_WINDOW,
    KEY_VALUE,
    NS_KIND,
    NS_MEMORY,
    PENDING,
    begin,
    execute_key_value,
    may_park,
    namespace_of,
    port_of,
    post,
    post_all,
    relax,
    serve_media,
    under_way,
)

# -- words of the control record, of threads that go round together --------------------------------------------
LOCK = K_SHARED
TURNS = K_SHARED + 1
"""A turn, as in the record of a thread."""
WRITTEN_OFF = K_SHARED + 3
"""Commands under way that count no more: nothing completed for long while they filled the window."""
POSTED = K_SHARED + 4
"""Completions of all ports when a full window was first seen without further ones."""
SINCE = K_SHARED + 5
"""When that was (ns)."""
SILENCE_NS = 10**9

# -- record of a thread (host memory, its own) -------------------------------------------------------------------
T_TURN = 0
"""Index of the port whose turn it is."""
T_LEFT = 1
"""Commands that it may still send in this turn."""
T_FIRST = 2
"""1 of the thread that stays, without a launch, while commands are in flight."""
T_ROUNDS = 3
"""Rounds that it has begun: two more mean that it is out of every function that it was in."""
T_SEAT = 4
"""Number of the thread (`commands.seat_of`)."""
T_DONE = 16
"""Answers that are not posted yet: pairs of id and status."""
T_BATCH = T_DONE + 2 * FETCH
"""Commands that were fetched."""
COMMAND_WORDS = 8
THREAD_WORDS = T_BATCH + COMMAND_WORDS * FETCH + 16

AHEAD = 4
"""Commands whose data are fetched while earlier ones are copied."""
BATCH = 8
"""Most commands that a thread takes at a time where a window bounds those in flight."""


@device
def share(control, thread, namespaces):
    """Fetch some commands and run them; return the number. `thread` is the record of the calling thread."""
    count = fetch(control, thread)
    done = thread + 8 * T_DONE
    unposted = 0
    port = 0
    for k in range(min(count, AHEAD)):
        expect(thread + 8 * (T_BATCH + k * COMMAND_WORDS), namespaces)
    for k in range(count):
        words = thread + 8 * (T_BATCH + k * COMMAND_WORDS)
        if k + AHEAD < count:
            expect(words + 8 * AHEAD * COMMAND_WORDS, namespaces)
        index = load_relaxed(words + 16, SYSTEM)
        word0 = load_relaxed(words, SYSTEM)
        buffer = load_relaxed(words + 24, SYSTEM)
        word5 = load_relaxed(words + 40, SYSTEM)
        record = namespace_of(namespaces, word0)
        memory = 0
        if record != 0:
            memory = load_relaxed(record + 8 * NS_MEMORY, SYSTEM)
        if unposted > 0 and (memory == 0 or port != port_of(control, index)):
            # this command may take long, or its answer goes elsewhere
            post_all(port, done, unposted)
            unposted = 0
        port = port_of(control, index)
        if record != 0 and load_relaxed(record + 8 * NS_KIND, SYSTEM) == KEY_VALUE:
            key0 = load_relaxed(words + 8, SYSTEM)
            key1 = load_relaxed(words + 56, SYSTEM)
            execute_key_value(port, index, record, word0, key0, buffer, word5, key1)
            continue
        status = INVALID_NAMESPACE
        if record != 0:
            word6 = load_relaxed(words + 48, SYSTEM)
            status = begin(record, word0, buffer, word5_slba(word5), word6_nlb(word6) + 1, index)
        if status != PENDING and memory == 0:
            post(port, word0_cid(word0), status, 0)
        elif status != PENDING:
            store_relaxed(done + 16 * unposted, word0_cid(word0), SYSTEM)
            store_relaxed(done + 16 * unposted + 8, status, SYSTEM)
            unposted += 1
    if unposted > 0:
        post_all(port, done, unposted)
    return count


@device
def expect(words, namespaces):
    """Bring the start of a command's data near the processor, if they are in memory: it copies them soon."""
    word0 = load_relaxed(words, SYSTEM)
    record = namespace_of(namespaces, word0)
    if record == 0 or word0_opc(word0) != READ:
        return
    memory = load_relaxed(record + 8 * NS_MEMORY, SYSTEM)
    if memory == 0:
        return
    data = memory + (word5_slba(load_relaxed(words + 40, SYSTEM)) << 9)
    buffer = load_relaxed(words + 24, SYSTEM)
    for line in range(8):
        prefetch(data + 64 * line)
        prefetch(buffer + 64 * line)


@device
def fetch(control, thread):
    """Copy the next commands to the thread's record; return their number: also 0 if other threads are fetching."""
    window = load_relaxed(control + 8 * K_WINDOW, SYSTEM)
    lock = control + 8 * LOCK
    turns = thread
    if window != 0:
        if load_relaxed(lock, SYSTEM) != 0 or exchange(lock, 1, SYSTEM) != 0:
            return 0
        turns = control + 8 * TURNS
    ports = load_acquire(control + 8 * K_N_PORTS, SYSTEM)
    room = FETCH
    if window != 0:
        room = min(BATCH, room_in_window(control, ports))
    turn = load_relaxed(turns + 8 * T_TURN, SYSTEM)
    left = load_relaxed(turns + 8 * T_LEFT, SYSTEM)
    count = 0
    without = 0
    while count < room and without <= ports:
        port = port_of(control, turn)
        taken = 0
        if port != 0 and left > 0:
            taken = take(port, turn, min(left, room - count), thread + 8 * (T_BATCH + count * COMMAND_WORDS))
        count += taken
        left -= taken
        without += 1
        if taken > 0:
            without = 0
        if taken == 0 or left <= 0:
            # it has had its turn, or has nothing more: what it leaves is not saved up
            turn += 1
            if turn >= ports:
                turn = 0
            left = 0
            port = port_of(control, turn)
            if port != 0:
                left = load_relaxed(port + 8 * at.P_WEIGHT, SYSTEM)
                if window == 0:
                    left = load_relaxed(port + 8 * at.P_BURST, SYSTEM)
        if window == 0 and count > 0:
            break
    store_relaxed(turns + 8 * T_TURN, turn, SYSTEM)
    store_relaxed(turns + 8 * T_LEFT, left, SYSTEM)
    if window != 0:
        store_release(lock, 0, SYSTEM)
    return count


@device
def take(port, index, most, batch):
    """Copy up to `most` commands of a port into `batch` and let their entries be written again.

    Return 0 also if another thread is at it. A thread leaves others a share of what waits, as commands may take long.
    """
    mask = (1 << field(port, at.P_DEPTH_SHIFT)) - 1
    doorbell = field(port, at.P_SQ_DOORBELL)
    if load_relaxed(port + 8 * at.P_SQ_HEAD, SYSTEM) & mask == load_relaxed(doorbell, SYSTEM):
        return 0
    lock = port + 8 * at.P_FETCH_LOCK
    if load_relaxed(lock, SYSTEM) != 0 or exchange(lock, 1, SYSTEM) != 0:
        return 0
    head = load_relaxed(port + 8 * at.P_SQ_HEAD, SYSTEM)
    tail = load_acquire(doorbell, SYSTEM)
    waiting = (tail - head) & mask
    count = min(most, min(waiting, 1 + (waiting >> 3)))
    for k in range(count):
        entry = field(port, at.P_SQ) + 64 * ((head + k) & mask)
        words = batch + k * (8 * COMMAND_WORDS)
        store_relaxed(words, load_relaxed(entry, SYSTEM), SYSTEM)
        store_relaxed(words + 8, load_relaxed(entry + 8, SYSTEM), SYSTEM)
        store_relaxed(words + 16, index, SYSTEM)  # mptr and prp2 are not used
        store_relaxed(words + 24, load_relaxed(entry + 24, SYSTEM), SYSTEM)
        store_relaxed(words + 40, load_relaxed(entry + 40, SYSTEM), SYSTEM)
        store_relaxed(words + 48, load_relaxed(entry + 48, SYSTEM), SYSTEM)
        store_relaxed(words + 56, load_relaxed(entry + 56, SYSTEM), SYSTEM)
    if count > 0:
        # released, because it tells submitters that the entries were read
        store_release(port + 8 * at.P_SQ_HEAD, head + count, SYSTEM)
        store_relaxed(port + 8 * at.P_COMMANDS, load_relaxed(port + 8 * at.P_COMMANDS, SYSTEM) + count, SYSTEM)
    store_release(lock, 0, SYSTEM)
    return count


@device
def room_in_window(control, ports):
    """Return how many commands may be fetched (under the lock).

    Commands that a drive lost must not fill the window: if no command completed for a second, those in flight no longer
    count.
    """
    going = 0
    posted = 0
    for index in range(ports):
        port = port_of(control, index)
        if port != 0:
            going += under_way(port)
            posted += load_relaxed(port + 8 * at.P_CQ_TAIL, SYSTEM)
    off = min(load_relaxed(control + 8 * WRITTEN_OFF, SYSTEM), going)
    room = load_relaxed(control + 8 * K_WINDOW, SYSTEM) - (going - off)
    if room <= 0:
        now = clock_ns()
        if posted != load_relaxed(control + 8 * POSTED, SYSTEM) or load_relaxed(control + 8 * SINCE, SYSTEM) == 0:
            store_relaxed(control + 8 * POSTED, posted, SYSTEM)
            store_relaxed(control + 8 * SINCE, now, SYSTEM)
        elif now - load_relaxed(control + 8 * SINCE, SYSTEM) > SILENCE_NS:
            off = going
            store_relaxed(control + 8 * SINCE, 0, SYSTEM)
    else:
        store_relaxed(control + 8 * SINCE, 0, SYSTEM)
    store_relaxed(control + 8 * WRITTEN_OFF, off, SYSTEM)
    return room


@device
def serve(control, thread, namespaces):
    """Serve the ports of a controller together with other threads, until told to stop, or idle without a launch."""
    idle = 0
    rounds = thread + 8 * T_ROUNDS
    number = load_relaxed(thread + 8 * T_SEAT, SYSTEM)
    while load_acquire(control + 8 * K_STOP, SYSTEM) == 0:
        store_release(rounds, load_relaxed(rounds, SYSTEM) + 1, SYSTEM)
        take_seat(seat_of(number, idle))
        work = share(control, thread, namespaces) + serve_media(control, thread + 8 * T_DONE, namespaces)
        if work > 0:
            idle = 0
            continue
        idle += 1
        if may_park(control, idle, load_relaxed(thread + 8 * T_FIRST, SYSTEM)):
            return idle
        relax(control, idle)
    return idle
