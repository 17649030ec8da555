"""Serve commands: check, start, complete and post them, as device code for native threads and `interp`."""

from __future__ import annotations

from warpwell.nvme import (
    FLUSH,
    INVALID_FIELD,
    INVALID_NAMESPACE,
    INVALID_OPCODE,
    KV_DELETE,
    KV_EXIST,
    KV_INVALID_KEY_SIZE,
    KV_KEY_DOES_NOT_EXIST,
    KV_KEY_EXISTS,
    KV_LIST,
    KV_RETRIEVE,
    KV_STORE,
    LBA_OUT_OF_RANGE,
    NAMESPACE_NOT_READY,
    READ,
    WRITE,
    completion_word0,
    completion_word1,
    word0_cid,
    word0_nsid,
    word0_opc,
    word5_key_size,
    word5_options,
    word5_value_size,
)
from warpwell.queues import field
from warpwell.queues import layout as at
from warpwell.targets import (
    SYSTEM,
    backoff,
    call_native,
    compare_exchange,
    device,
    exchange,
    fetch_add,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)

from .returns import lend, with_place

BLOCK = 512
"""Bytes of a logical block."""

# -- control record (host memory) -----------------------------------------------------------------------------
K_STOP = 0
K_LAUNCHES = 1
"""Launches in flight: without one the threads park once nothing is under way."""
K_SPIN = 2
K_N_PORTS = 3
K_WINDOW = 4
"""Most commands under way where threads share all ports (`warpwell.storage.arbitration`); 0: each has its own."""
K_QUIESCE = 5
"""1 if other controllers lack threads: threads without work park at once."""
K_SHARED = 8
"""Words of the threads that share ports."""
K_PORTS = 16
"""Addresses of the port records, 0 where one was taken away; the position is the port's index in tags."""
MAX_PORTS = 1024

# -- namespace record (host memory), one for each namespace id; of the first, word 0 bounds the ids in use ----
NS_START = 0
"""Address of the medium's start function; 0 where no namespace is attached."""
NS_COMPLETE = 1
"""Address of its complete function, or 0."""
NS_STATE = 2
NS_BYTES = 3
"""Capacity in bytes, rounded up to blocks."""
NS_ERRORS = 4
NS_KIND = 5
NS_STRAY = 6
"""Completions that were dropped, because no command was under way."""
NS_MEMORY = 7
"""Address of the data if they are in memory, so that commands never wait, else 0."""
NS_NON_BLOCKING = 8
"""1 if its complete function never waits: completions are posted together."""
NS_WORDS = 16

BLOCKS = 0
"""Kind of a namespace: of logical blocks."""
KEY_VALUE = 1
"""Kind of a namespace: of keys and values."""

PENDING = -1

FETCH = 32
"""Most commands that a thread fetches at a time."""
USES = 31
"""Mask of how often an id was used, in the tag of a key-value command (see `mark_started`)."""
USES_SHIFT = 26
"""Where it stands in the tag, above the port's index and the id."""


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
def begin(record, word0, buffer, slba, blocks, index):
    """Check a command and hand it to its medium; return the status field, or PENDING."""
    function = load_acquire(record + 8 * NS_START, SYSTEM)
    if function == 0:
        return INVALID_NAMESPACE
    opcode = word0_opc(word0)
    status = 0
    if opcode != READ and opcode != WRITE and opcode != FLUSH:
        status = INVALID_OPCODE
    elif opcode != FLUSH and (slba < 0 or (slba + blocks) * BLOCK > load_relaxed(record + 8 * NS_BYTES, SYSTEM)):
        status = LBA_OUT_OF_RANGE
    else:
        state = load_relaxed(record + 8 * NS_STATE, SYSTEM)
        tag = (index << 16) | word0_cid(word0)
        status = call_native(function, state, opcode, slba * BLOCK, blocks * BLOCK, buffer, tag)
    if status > 0:
        fetch_add(record + 8 * NS_ERRORS, 1, SYSTEM)
    return status


@device
def execute_key_value(port, index, record, word0, key0, buffer, word5, key1):
    """Run a command on keys and values."""
    function = load_acquire(record + 8 * NS_START, SYSTEM)
    opcode = word0_opc(word0)
    size = word5_key_size(word5)
    shortest = 1
    if opcode == KV_LIST or opcode == FLUSH:
        shortest = 0
    answer = 0
    if function == 0:
        answer = INVALID_NAMESPACE
    elif (
        opcode != KV_RETRIEVE
        and opcode != KV_STORE
        and opcode != KV_EXIST
        and opcode != KV_DELETE
        and opcode != KV_LIST
        and opcode != FLUSH
    ):
        answer = INVALID_OPCODE
    elif size < shortest or size > 16:
        answer = KV_INVALID_KEY_SIZE
    else:
        cid = word0_cid(word0)
        uses = mark_started(port, cid)
        if buffer == 0 and opcode == KV_RETRIEVE and word5_value_size(word5) > 0 and field(port, at.P_RETURNS) != 0:
            buffer = lend(port, cid)
        state = load_relaxed(record + 8 * NS_STATE, SYSTEM)
        # bits 31:16 of cdw11, which the command set reserves: where in the value to begin, in units of 512 bytes
        operation = opcode | (size << 8) | (word5_options(word5) << 16) | (((word5 >> 48) & 0xFFFF) << 24)
        tag = (uses << USES_SHIFT) | (index << 16) | cid
        tail = (tag << 32) | word5_value_size(word5)
        answer = INVALID_FIELD
        if field(port, at.P_RETURNS) != 0:
            answer = NAMESPACE_NOT_READY  # no place is free: to be submitted again
        if buffer != 0 or word5_value_size(word5) == 0:
            answer = call_native(function, state, operation, key0, key1, buffer, tail)
        if answer != PENDING and not mark_done(port, cid, uses):
            # it was completed as well, and that was posted
            fetch_add(record + 8 * NS_STRAY, 1, SYSTEM)
            answer = PENDING
    if answer != PENDING:
        count_error(record, answer & 0xFFFF)
        post(port, word0_cid(word0), answer & 0xFFFF, answer >> 16)


@device
def mark_started(port, cid):
    """Note that a key-value command is in flight; return how often its id was used, modulo the tag's range.

    So a duplicate completion is not mistaken for that of the id's next command.
    """
    flight = load_relaxed(port + 8 * at.P_FLIGHTS, SYSTEM) + 8 * cid
    uses = (load_relaxed(flight, SYSTEM) >> 1) + 1
    store_release(flight, (uses << 1) | 1, SYSTEM)
    return uses & USES


@device
def mark_done(port, cid, uses):
    """Note that a key-value command is done; return False if it was not in flight."""
    flight = load_relaxed(port + 8 * at.P_FLIGHTS, SYSTEM) + 8 * cid
    now = load_acquire(flight, SYSTEM)
    if now & 1 == 0 or (now >> 1) & USES != uses:
        return False
    return compare_exchange(flight, now, now - 1, SYSTEM) == now


@device
def count_error(record, status):
    """Count a failed command. An absent key, a key that exists, and no free place are answers, not failures."""
    if status != 0 and status != NAMESPACE_NOT_READY and status != KV_KEY_DOES_NOT_EXIST and status != KV_KEY_EXISTS:
        fetch_add(record + 8 * NS_ERRORS, 1, SYSTEM)


@device
def serve_media(control, ended, namespaces):
    """Post the commands that media with a complete function have finished (any service thread); return the number.

    `ended` has room for `FETCH` words.
    """
    done = 0
    for nsid in range(1, load_relaxed(namespaces, SYSTEM)):
        record = namespaces + nsid * (8 * NS_WORDS)
        function = load_acquire(record + 8 * NS_COMPLETE, SYSTEM)
        if function == 0:
            continue
        state = load_relaxed(record + 8 * NS_STATE, SYSTEM)
        keyed = load_relaxed(record + 8 * NS_KIND, SYSTEM) == KEY_VALUE
        count = 0
        for _ in range(FETCH):
            finished = call_native(function, state, 0, 0, 0, 0, 0)
            if finished < 0:
                break
            done += 1
            if keyed:
                finish_key_value(control, record, finished >> 16, finished & 0xFFFF)
                continue
            if finished & 0xFFFF != 0:
                fetch_add(record + 8 * NS_ERRORS, 1, SYSTEM)
            store_relaxed(ended + 8 * count, finished, SYSTEM)
            count += 1
            if load_relaxed(record + 8 * NS_NON_BLOCKING, SYSTEM) == 0:
                count = post_port(control, ended, count)
        while count > 0:
            count = post_port(control, ended, count)
    return done


@device
def post_port(control, ended, count):
    """Post those of `count` ended commands that are of the port of the first; return how many are left, moved up."""
    index = load_relaxed(ended, SYSTEM) >> 32
    port = port_of(control, index)
    left = 0
    lock_ring(port)
    for k in range(count):
        finished = load_relaxed(ended + 8 * k, SYSTEM)
        if finished >> 32 == index:
            put(port, (finished >> 16) & 0xFFFF, finished & 0xFFFF, 0)
        else:
            store_relaxed(ended + 8 * left, finished, SYSTEM)
            left += 1
    store_release(port + 8 * at.P_POST_LOCK, 0, SYSTEM)
    return left


@device
def finish_key_value(control, record, tag, status):
    """Post a pending key-value command's completion with its result, or drop it if no command is in flight."""
    function = load_relaxed(record + 8 * NS_COMPLETE, SYSTEM)
    result = call_native(function, load_relaxed(record + 8 * NS_STATE, SYSTEM), 1, tag, 0, 0, 0)
    port = port_of(control, (tag >> 16) & (MAX_PORTS - 1))
    cid = tag & 0xFFFF
    if port == 0 or cid >> field(port, at.P_DEPTH_SHIFT) != 0 or not mark_done(port, cid, (tag >> USES_SHIFT) & USES):
        fetch_add(record + 8 * NS_STRAY, 1, SYSTEM)
        return
    count_error(record, status)
    post(port, cid, status, result)


@device
def post(port, cid, status, result):
    """Post a completion (any service thread)."""
    lock_ring(port)
    put(port, cid, status, result)
    store_release(port + 8 * at.P_POST_LOCK, 0, SYSTEM)


@device
def post_all(port, done, count):
    """Post completions without results, pairs of id and status (any service thread)."""
    lock_ring(port)
    for k in range(count):
        put(port, load_relaxed(done + 16 * k, SYSTEM), load_relaxed(done + 16 * k + 8, SYSTEM), 0)
    store_release(port + 8 * at.P_POST_LOCK, 0, SYSTEM)


@device
def lock_ring(port):
    """Take the right to post to a port's ring."""
    attempt = 0
    while exchange(port + 8 * at.P_POST_LOCK, 1, SYSTEM) != 0:
        backoff(attempt)
        attempt += 1


@device
def put(port, cid, status, result):
    """Write the next completion of a locked ring. The phase word is stored last, with release order.

    The ring cannot be full: ids in flight are fewer than its entries.
    """
    shift = field(port, at.P_DEPTH_SHIFT)
    mask = (1 << shift) - 1
    tail = load_relaxed(port + 8 * at.P_CQ_TAIL, SYSTEM)
    entry = field(port, at.P_CQ) + 16 * (tail & mask)
    phase = ((tail >> shift) & 1) ^ 1
    fetched = load_acquire(port + 8 * at.P_SQ_HEAD, SYSTEM) & mask
    store_relaxed(entry, completion_word0(with_place(port, cid, status, result)), SYSTEM)
    store_release(entry + 8, completion_word1(fetched, field(port, at.P_SQID), cid, phase, status), SYSTEM)
    # released: who sees it sees at least as many commands fetched
    store_release(port + 8 * at.P_CQ_TAIL, tail + 1, SYSTEM)


@device
def under_way(port):
    """Return how many commands of a port were fetched and are not complete (a snapshot)."""
    posted = load_acquire(port + 8 * at.P_CQ_TAIL, SYSTEM)
    return load_relaxed(port + 8 * at.P_SQ_HEAD, SYSTEM) - posted


@device
def may_park(control, idle, first):
    """Return whether a thread that was idle `idle` times may park: all but one (`first`) leave commands in flight."""
    if load_acquire(control + 8 * K_LAUNCHES, SYSTEM) != 0:
        return False
    if (idle <= 64 or idle & 63 != 0) and load_relaxed(control + 8 * K_QUIESCE, SYSTEM) == 0:
        return False
    for index in range(load_relaxed(control + 8 * K_N_PORTS, SYSTEM)):
        port = port_of(control, index)
        if port == 0:
            continue
        # the last launch may have rung after the look at the doorbell that found nothing
        mask = (1 << field(port, at.P_DEPTH_SHIFT)) - 1
        tail = load_acquire(field(port, at.P_SQ_DOORBELL), SYSTEM)
        if load_relaxed(port + 8 * at.P_SQ_HEAD, SYSTEM) & mask != tail or (first != 0 and under_way(port) != 0):
            return False
    return True


@device
def relax(control, idle):
    """Wait between two polls of the doorbells, at most some 60 us; with K_SPIN set, spin first.

    Spinning is limited, because other controllers may need the same cores.
    """
    if load_relaxed(control + 8 * K_SPIN, SYSTEM) == 0:
        backoff(min(idle, 26))
    elif idle > 1000:
        backoff(min((idle - 1000) >> 7, 26))
