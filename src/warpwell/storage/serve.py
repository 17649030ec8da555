"""Serving a port: what a controller does for one queue pair, as device code for native threads and `interp`."""

from __future__ import annotations

from warpwell.nvme import (
    FLUSH,
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
from warpwell.queues.layout import (
    P_COMMANDS,
    P_CQ,
    P_CQ_TAIL,
    P_DEPTH_SHIFT,
    P_OUTSTANDING,
    P_POST_LOCK,
    P_SQ,
    P_SQ_DOORBELL,
    P_SQ_HEAD,
    P_SQID,
    P_WORDS,
)
from warpwell.queues.submission import field
from warpwell.targets import (
    SYSTEM,
    backoff,
    call_native,
    device,
    exchange,
    fetch_add,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)

for _function in (completion_word0, completion_word1, word0_cid, word0_nsid, word0_opc, word5_slba, word6_nlb):
    device(_function)

BLOCK = 512
"""Bytes of a logical block."""

# -- namespace record (host memory), one for each namespace id; of the first, word 0 bounds the ids in use ----
NS_START = 0
"""Address of the medium's start function; 0 where no namespace is attached."""
NS_COMPLETE = 1
"""Address of its complete function, or 0."""
NS_STATE = 2
NS_BYTES = 3
"""Capacity in bytes, rounded up to blocks."""
NS_ERRORS = 4
NS_WORDS = 8

PENDING = -1
INVALID_OPCODE = 0x0001
INVALID_NAMESPACE = 0x000B
LBA_OUT_OF_RANGE = 0x0080

FETCH = 32
"""Most commands fetched from a port in one round."""


@device
def serve_port(port, index, namespaces):
    """Fetch and start what a port's doorbell announces (one service thread at a time); return the number."""
    shift = field(port, P_DEPTH_SHIFT)
    mask = (1 << shift) - 1
    head = load_relaxed(port + 8 * P_SQ_HEAD, SYSTEM)
    done = 0
    tail = load_acquire(field(port, P_SQ_DOORBELL), SYSTEM)
    while (head & mask) != tail and done < FETCH:
        entry = field(port, P_SQ) + 64 * (head & mask)
        word0 = load_relaxed(entry, SYSTEM)
        buffer = load_relaxed(entry + 24, SYSTEM)
        slba = load_relaxed(entry + 40, SYSTEM)
        control = load_relaxed(entry + 48, SYSTEM)
        head += 1
        # released, because it tells submitters that the entry was read
        store_release(port + 8 * P_SQ_HEAD, head, SYSTEM)
        fetch_add(port + 8 * P_OUTSTANDING, 1, SYSTEM)
        cid = word0_cid(word0)
        status = begin(namespaces, word0, buffer, word5_slba(slba), word6_nlb(control) + 1, index)
        if status != PENDING:
            post(port, cid, status)
        done += 1
    if done > 0:
        store_relaxed(port + 8 * P_COMMANDS, load_relaxed(port + 8 * P_COMMANDS, SYSTEM) + done, SYSTEM)
    return done


@device
def begin(namespaces, word0, buffer, slba, blocks, index):
    """Check a command and hand it to its medium; return the status field, or PENDING."""
    nsid = word0_nsid(word0)
    if nsid < 1 or nsid >= load_relaxed(namespaces, SYSTEM):
        return INVALID_NAMESPACE
    record = namespaces + nsid * (8 * NS_WORDS)
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
def serve_media(ports, namespaces):
    """Post what media with a complete function have finished (any service thread); return the number."""
    done = 0
    for nsid in range(1, load_relaxed(namespaces, SYSTEM)):
        record = namespaces + nsid * (8 * NS_WORDS)
        function = load_acquire(record + 8 * NS_COMPLETE, SYSTEM)
        if function == 0:
            continue
        state = load_relaxed(record + 8 * NS_STATE, SYSTEM)
        for _ in range(FETCH):
            finished = call_native(function, state, 0, 0, 0, 0, 0)
            if finished < 0:
                break
            tag = finished >> 16
            status = finished & 0xFFFF
            if status != 0:
                fetch_add(record + 8 * NS_ERRORS, 1, SYSTEM)
            post(ports + (tag >> 16) * (8 * P_WORDS), tag & 0xFFFF, status)
            done += 1
    return done


@device
def post(port, cid, status):
    """Post a completion (any service thread). The phase word is stored last, with release order.

    The ring cannot be full: ids in flight are fewer than its entries.
    """
    lock = port + 8 * P_POST_LOCK
    attempt = 0
    while exchange(lock, 1, SYSTEM) != 0:
        backoff(attempt)
        attempt += 1
    shift = field(port, P_DEPTH_SHIFT)
    mask = (1 << shift) - 1
    tail = load_relaxed(port + 8 * P_CQ_TAIL, SYSTEM)
    entry = field(port, P_CQ) + 16 * (tail & mask)
    phase = ((tail >> shift) & 1) ^ 1
    fetched = load_acquire(port + 8 * P_SQ_HEAD, SYSTEM) & mask
    store_relaxed(entry, completion_word0(0), SYSTEM)
    store_release(entry + 8, completion_word1(fetched, field(port, P_SQID), cid, phase, status), SYSTEM)
    store_relaxed(port + 8 * P_CQ_TAIL, tail + 1, SYSTEM)
    fetch_add(port + 8 * P_OUTSTANDING, -1, SYSTEM)
    store_release(lock, 0, SYSTEM)


@device
def serve(control, ports, first, stride, n_ports, namespaces):
    """Serve every `stride`-th port from `first` until ``control[0]`` is set or nothing was to do for long.

    ``control[1]`` is the number of launches in flight: without one the thread returns (parks) once nothing
    is outstanding on its ports.
    """
    idle = 0
    while load_acquire(control, SYSTEM) == 0:
        work = 0
        for index in range(first, n_ports, stride):
            work += serve_port(ports + index * (8 * P_WORDS), index, namespaces)
        work += serve_media(ports, namespaces)
        if work > 0:
            idle = 0
            continue
        idle += 1
        if idle > 64 and idle & 63 == 0 and load_acquire(control + 8, SYSTEM) == 0:
            outstanding = 0
            for index in range(first, n_ports, stride):
                outstanding += load_relaxed(ports + index * (8 * P_WORDS) + 8 * P_OUTSTANDING, SYSTEM)
            if outstanding == 0:
                return idle
        relax(control, idle)
    return idle


@device
def relax(control, idle):
    """Wait between two looks at the doorbells, some 60 us at most; ``control[2]`` set means: spin first.

    Spinning ends after a while, because other controllers, idle or not, may want the same cores.
    """
    if load_relaxed(control + 16, SYSTEM) == 0:
        backoff(min(idle, 26))
    elif idle > 1000:
        backoff(min((idle - 1000) >> 7, 26))
