"""Serve commands: fetch, check, start, complete and post them, as device code for native threads and `interp`.

All I/O threads of a controller share its ports, round-robin with weights. A free thread fetches some commands of a port
under the port's lock, runs them without the lock, and posts together the answers that need no waiting. Without a
window, each thread visits the ports independently. With a window, all threads visit the ports in one common order,
under one lock, and at most `K_WINDOW` commands are in flight. Other commands wait in the rings, where weights apply,
instead of in a drive's queue, where the client with the most commands would dominate.
"""

from __future__ import annotations

from warpwell.nvme import (
    READ,
    WRITE,
    completion_word0,
    completion_word1,
    word0_cid,
    word0_nsid,
    word0_opc,
    word5_slba,
    word6_nlb,
)
from warpwell.nvme.status import INVALID_NAMESPACE, LBA_OUT_OF_RANGE
from warpwell.queues import field
from warpwell.queues import layout as at
from warpwell.targets import device
from warpwell.targets.primitives import (
    SYSTEM,
    backoff,
    clock_ns,
    exchange,
    load_acquire,
    load_relaxed,
    prefetch,
    store_relaxed,
    store_release,
    take_seat,
)

from .commands import (
    A_RESULT,
    A_STATUS,
    A_TAG,
    ANSWER_WORDS,
    BLOCK,
    C_BLOCK,
    C_BLOCKS,
    C_WORD0,
    COMMAND_WORDS,
    PENDING,
    call_complete,
    call_start,
    lock,
    seat_of,
    unlock,
    word,
    write_answer,
)
from .return_slots import assign_return_slot, with_return_slot

# -- control record (host memory) -----------------------------------------------------------------------------
K_STOP = 0
K_LAUNCHES = 1
"""Launches in flight: without a launch, the threads park when no command is in flight."""
K_SPIN = 2
K_N_PORTS = 3
K_WINDOW = 4
"""Maximum number of commands in flight if threads share all ports; 0: no limit, and each thread visits the ports
independently."""
K_QUIESCE = 5
"""1 if other controllers lack threads: threads without work park at once."""
K_SHARED = 8
"""First word of the state of threads that share ports."""
K_PORTS = 16
"""Addresses of the port records, 0 if a port was removed; the position is the port's index in tags."""
MAX_PORTS = 1024

# -- namespace record (host memory), one for each namespace id; word 0 of the first limits the ids in use ----
NS_START = 0
"""Address of the medium's start function; 0 if no namespace is attached."""
NS_COMPLETE = 1
"""Address of its complete function, or 0."""
NS_STATE = 2
NS_BYTES = 3
"""Capacity in bytes, rounded up to blocks."""
NS_KIND = 4
NS_MEMORY = 5
"""Address of the data if they are in memory, so that commands never wait, else 0."""
NS_NON_BLOCKING = 6
"""1 if its complete function never waits: completions are posted together."""
NS_WORDS = 8

BLOCKS = 0
"""Kind of a namespace of logical blocks: ranges of its commands are checked against `NS_BYTES`."""
KEY_VALUE = 1
"""Kind of a namespace of any other commands; they may request a return slot."""

FETCH = 32
"""Maximum number of commands that a thread fetches at a time."""

# -- words of the control record for threads that visit ports together --------------------------------------------
LOCK = K_SHARED
TURNS = K_SHARED + 1
"""A turn, as in the record of a thread."""
WRITTEN_OFF = K_SHARED + 3
"""Number of commands in flight that no longer count, because no command completed for a second while they filled the
window."""
POSTED = K_SHARED + 4
"""Completions of all ports when a full window was first seen without further ones."""
SINCE = K_SHARED + 5
"""Time of `POSTED` (ns)."""
SILENCE_NS = 10**9

# -- record of a thread (host memory, its own) -------------------------------------------------------------------
T_TURN = 0
"""Index of the port that has the turn."""
T_LEFT = 1
"""Commands that it may still send in this turn."""
T_ROUNDS = 2
"""Number of rounds that the thread has begun: after two more, it has left every function that it was in."""
T_SEAT = 3
"""Number of the thread (`commands.seat_of`). Without a launch, thread 0 stays while commands are in flight."""
T_ANSWERS = 16
"""Answers that are not posted yet."""
T_BATCH = T_ANSWERS + ANSWER_WORDS * FETCH
"""Commands that were fetched."""
PORT_INDEX = 2
"""Word of a fetched command that has the index of its port, instead of mptr."""
THREAD_WORDS = T_BATCH + COMMAND_WORDS * FETCH + 16

AHEAD = 4
"""Number of commands whose data are prefetched while earlier commands are copied."""
BATCH = 8
"""Maximum number of commands that a thread takes at a time if a window limits the commands in flight."""


@device
def port_of(control, index):
    """Return the address of a port record, or 0."""
    return load_relaxed(control + 8 * (K_PORTS + index), SYSTEM)


@device
def namespace_of(namespaces, word0):
    """Return the record of a command's namespace, or 0 if it does not exist."""
    nsid = word0_nsid(word0)
    if nsid < 1 or nsid >= load_relaxed(namespaces, SYSTEM):
        return 0
    return namespaces + nsid * (8 * NS_WORDS)


@device
def start_command(control, record, command):
    """Check a command and start it; return ``status | result << 16``, or PENDING."""
    function = load_acquire(record + 8 * NS_START, SYSTEM)
    if function == 0:
        return INVALID_NAMESPACE
    state = load_relaxed(record + 8 * NS_STATE, SYSTEM)
    word0 = load_relaxed(command, SYSTEM)
    tag = (load_relaxed(command + 8 * PORT_INDEX, SYSTEM) << 16) | word0_cid(word0)
    opcode = word0_opc(word0)
    if load_relaxed(record + 8 * NS_KIND, SYSTEM) == KEY_VALUE:
        status = assign_return_slot(port_of(control, port_index(tag)), word0_cid(word0), command)
        if status != 0:
            return status
    elif opcode == READ or opcode == WRITE:
        slba = word5_slba(load_relaxed(command + 8 * C_BLOCK, SYSTEM))
        end = (slba + word6_nlb(load_relaxed(command + 8 * C_BLOCKS, SYSTEM)) + 1) * BLOCK
        if slba < 0 or end > load_relaxed(record + 8 * NS_BYTES, SYSTEM):
            return LBA_OUT_OF_RANGE
    return call_start(function, state, command, tag)


@device
def port_index(tag):
    """Return the index of a command's port, which its tag names."""
    return (tag >> 16) & (MAX_PORTS - 1)


@device
def poll_media(control, answers, namespaces):
    """Post the commands that media with a complete function have completed (any I/O thread); return their number.

    `answers` has room for `FETCH` answers.
    """
    done = 0
    for nsid in range(1, load_relaxed(namespaces, SYSTEM)):
        record = namespaces + nsid * (8 * NS_WORDS)
        function = load_acquire(record + 8 * NS_COMPLETE, SYSTEM)
        if function == 0:
            continue
        state = load_relaxed(record + 8 * NS_STATE, SYSTEM)
        count = 0
        for _ in range(FETCH):
            answer = answers + 8 * ANSWER_WORDS * count
            if not call_complete(function, state, answer):
                break
            done += 1
            count += 1
            if load_relaxed(record + 8 * NS_NON_BLOCKING, SYSTEM) == 0:
                post_answers(control, answers, count)
                count = 0
        post_answers(control, answers, count)
    return done


@device
def post_answers(control, answers, count):
    """Post the completions of `count` answers, port by port (any I/O thread)."""
    while count > 0:
        index = port_index(word(answers, A_TAG))
        port = port_of(control, index)
        left = 0
        lock(port + 8 * at.P_POST_LOCK)
        for k in range(count):
            answer = answers + 8 * ANSWER_WORDS * k
            tag = word(answer, A_TAG)
            if port_index(tag) == index:
                write_completion(port, tag & 0xFFFF, word(answer, A_STATUS), word(answer, A_RESULT))
            else:
                remaining = answers + 8 * ANSWER_WORDS * left
                write_answer(remaining, tag, word(answer, A_STATUS), word(answer, A_RESULT))
                left += 1
        unlock(port + 8 * at.P_POST_LOCK)
        count = left


@device
def write_completion(port, cid, status, result):
    """Write the next completion of a locked ring. The phase word is stored last, with release order.

    The ring cannot be full, because there are fewer ids than entries.
    """
    shift = field(port, at.P_DEPTH_SHIFT)
    mask = (1 << shift) - 1
    tail = load_relaxed(port + 8 * at.P_CQ_TAIL, SYSTEM)
    entry = field(port, at.P_CQ) + 16 * (tail & mask)
    phase = ((tail >> shift) & 1) ^ 1
    fetched = load_acquire(port + 8 * at.P_SQ_HEAD, SYSTEM) & mask
    store_relaxed(entry, completion_word0(with_return_slot(port, cid, status, result)), SYSTEM)
    store_release(entry + 8, completion_word1(fetched, field(port, at.P_SQID), cid, phase, status), SYSTEM)
    # release order: a reader that sees this value sees at least as many fetched commands
    store_release(port + 8 * at.P_CQ_TAIL, tail + 1, SYSTEM)


@device
def in_flight(port):
    """Return how many commands of a port were fetched and are not complete (a snapshot)."""
    posted = load_acquire(port + 8 * at.P_CQ_TAIL, SYSTEM)
    return load_relaxed(port + 8 * at.P_SQ_HEAD, SYSTEM) - posted


@device
def can_idle(control, idle, number):
    """Return whether a thread that was idle `idle` times may park. Thread 0 stays while commands are in flight."""
    if load_acquire(control + 8 * K_LAUNCHES, SYSTEM) != 0:
        return False
    if (idle <= 64 or idle & 63 != 0) and load_relaxed(control + 8 * K_QUIESCE, SYSTEM) == 0:
        return False
    for index in range(load_relaxed(control + 8 * K_N_PORTS, SYSTEM)):
        port = port_of(control, index)
        if port == 0:
            continue
        # the last launch may have rung after this thread found that the doorbell had not changed
        mask = (1 << field(port, at.P_DEPTH_SHIFT)) - 1
        tail = load_acquire(field(port, at.P_SQ_DOORBELL), SYSTEM)
        if load_relaxed(port + 8 * at.P_SQ_HEAD, SYSTEM) & mask != tail or (number == 0 and in_flight(port) != 0):
            return False
    return True


@device
def idle_backoff(control, idle):
    """Wait between two polls of the doorbells, at most some 60 us; with K_SPIN set, spin first.

    Spinning is limited, because other controllers may need the same cores.
    """
    if load_relaxed(control + 8 * K_SPIN, SYSTEM) == 0:
        backoff(min(idle, 26))
    elif idle > 1000:
        backoff(min((idle - 1000) >> 7, 26))


@device
def process_batch(control, thread, namespaces):
    """Fetch some commands and start them; return the number. `thread` is the record of the calling thread."""
    count = fetch_commands(control, thread)
    answers = thread + 8 * T_ANSWERS
    unposted = 0
    for k in range(min(count, AHEAD)):
        prefetch_data(thread + 8 * (T_BATCH + k * COMMAND_WORDS), namespaces)
    for k in range(count):
        command = thread + 8 * (T_BATCH + k * COMMAND_WORDS)
        if k + AHEAD < count:
            prefetch_data(command + 8 * AHEAD * COMMAND_WORDS, namespaces)
        word0 = word(command, C_WORD0)
        record = namespace_of(namespaces, word0)
        result = INVALID_NAMESPACE
        memory = 0
        if record != 0:
            memory = word(record, NS_MEMORY)
            if memory == 0:
                # this command may take long
                post_answers(control, answers, unposted)
                unposted = 0
            result = start_command(control, record, command)
        if result == PENDING:
            continue
        tag = (word(command, PORT_INDEX) << 16) | word0_cid(word0)
        write_answer(answers + 8 * ANSWER_WORDS * unposted, tag, result & 0xFFFF, result >> 16)
        unposted += 1
        if memory == 0:
            post_answers(control, answers, unposted)
            unposted = 0
    post_answers(control, answers, unposted)
    return count


@device
def prefetch_data(command, namespaces):
    """Prefetch the start of a command's data into the processor's cache, if they are in memory."""
    word0 = load_relaxed(command, SYSTEM)
    record = namespace_of(namespaces, word0)
    if record == 0 or word0_opc(word0) != READ:
        return
    memory = load_relaxed(record + 8 * NS_MEMORY, SYSTEM)
    if memory == 0:
        return
    data = memory + (word5_slba(load_relaxed(command + 40, SYSTEM)) << 9)
    buffer = load_relaxed(command + 24, SYSTEM)
    for line in range(8):
        prefetch(data + 64 * line)
        prefetch(buffer + 64 * line)


@device
def fetch_commands(control, thread):
    """Copy the next commands to the thread's record; return their number, 0 also if other threads are fetching."""
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
        room = min(BATCH, window_capacity(control, ports))
    turn = load_relaxed(turns + 8 * T_TURN, SYSTEM)
    left = load_relaxed(turns + 8 * T_LEFT, SYSTEM)
    count = 0
    without = 0
    while count < room and without <= ports:
        port = port_of(control, turn)
        fetched = 0
        if port != 0 and left > 0:
            fetched = fetch_from_port(
                port, turn, min(left, room - count), thread + 8 * (T_BATCH + count * COMMAND_WORDS)
            )
        count += fetched
        left -= fetched
        without += 1
        if fetched > 0:
            without = 0
        if fetched == 0 or left <= 0:
            # the port's turn is over, or its ring is empty: unused commands of a turn do not accumulate
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
def fetch_from_port(port, index, limit, batch):
    """Copy up to `limit` commands of a port into `batch` and release their entries.

    Return 0 also if another thread fetches from the port. A thread leaves some waiting commands to other threads,
    because a command may take long.
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
    count = min(limit, min(waiting, 1 + (waiting >> 3)))
    for k in range(count):
        entry = field(port, at.P_SQ) + 64 * ((head + k) & mask)
        command = batch + k * (8 * COMMAND_WORDS)
        store_relaxed(command, load_relaxed(entry, SYSTEM), SYSTEM)
        store_relaxed(command + 8, load_relaxed(entry + 8, SYSTEM), SYSTEM)
        store_relaxed(command + 8 * PORT_INDEX, index, SYSTEM)  # prp2 is not used
        store_relaxed(command + 24, load_relaxed(entry + 24, SYSTEM), SYSTEM)
        store_relaxed(command + 40, load_relaxed(entry + 40, SYSTEM), SYSTEM)
        store_relaxed(command + 48, load_relaxed(entry + 48, SYSTEM), SYSTEM)
        store_relaxed(command + 56, load_relaxed(entry + 56, SYSTEM), SYSTEM)
    if count > 0:
        # release order, because submitters see from this value that the entries were read
        store_release(port + 8 * at.P_SQ_HEAD, head + count, SYSTEM)
    store_release(lock, 0, SYSTEM)
    return count


@device
def window_capacity(control, ports):
    """Return how many commands may be fetched (under the lock).

    Commands that a drive lost must not fill the window: if no command completed for a second, the commands in flight no
    longer count.
    """
    going = 0
    posted = 0
    for index in range(ports):
        port = port_of(control, index)
        if port != 0:
            going += in_flight(port)
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
def poll_queues(control, thread, namespaces):
    """Serve the ports of a controller with other threads, until a stop is requested, or idle without a launch."""
    idle = 0
    rounds = thread + 8 * T_ROUNDS
    number = load_relaxed(thread + 8 * T_SEAT, SYSTEM)
    while load_acquire(control + 8 * K_STOP, SYSTEM) == 0:
        store_release(rounds, load_relaxed(rounds, SYSTEM) + 1, SYSTEM)
        take_seat(seat_of(number, idle))
        work = process_batch(control, thread, namespaces) + poll_media(control, thread + 8 * T_ANSWERS, namespaces)
        if work > 0:
            idle = 0
            continue
        idle += 1
        if can_idle(control, idle, number):
            return idle
        idle_backoff(control, idle)
    return idle
