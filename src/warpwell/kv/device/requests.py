"""Requests: device threads fetch and look up records through the queues.

A converged group of lanes works on one queue. Every lane with a request takes a command id and submits its own command.
The group drains the ring, and all lanes together copy each arrived value from the id's part of the staging arena. A
value larger than that part arrives in pieces, each requested by its offset. If a piece comes from another location of
the log than the first piece, the value was replaced, and the read starts again. No lane waits for an id while it holds
another id, so a group of any size makes progress with a single id.
"""

from __future__ import annotations

from warpwell.kv.log.shards import shard_of
from warpwell.nvme import KV_RETRIEVE, command_word0, key_value_word5
from warpwell.nvme.status import NAMESPACE_NOT_READY
from warpwell.queues import (
    drain,
    field,
    id_record,
    lost,
    orphan,
    poll,
    release_id,
    result_of,
    staging_of,
    submit_entry,
    take_id,
    take_ready,
)
from warpwell.queues.layout import ID_STATE, ID_USER, ORPHAN, Q_IN_USE, Q_N_IDS, Q_PROGRESS, Q_WORDS, TAKEN
from warpwell.storage import free_return_slot, return_slot_of
from warpwell.targets import device, kernel
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    backoff,
    ballot,
    clock_ns,
    compare_exchange,
    fence,
    load_relaxed,
    popc,
    rem,
    shfl,
    store_relaxed,
    syncwarp,
)

from ..index.serve import WITH_VERSION, version_at
from .device_cache import abandon, bytes_of, claim, copy_each, publish, wipe

# -- record of a store in device memory, in words --------------------------------------------------------------
K_QUEUES = 0
"""Address of the first queue record."""
K_N_QUEUES = 1
K_NSID = 2
"""Namespace of the first shard; the namespaces of the other shards follow."""
K_SHARDS = 3
K_CHUNK = 4
"""Maximum number of bytes of a value that one command transfers."""
K_TIMEOUT = 5
"""Time without any completion after which a waiter gives up, in nanoseconds."""
K_CACHE = 6
"""Address of the device cache's record, or 0."""
K_ABORT = 7
"""Address of a word of shared memory that the host sets to end all waits."""
K_RETURNS = 8
"""1 if values arrive in slots of a return value queue, 0 if they arrive in the staging buffers of ids."""
K_RESERVE = 9
"""Number of ids of each queue that are reserved for waiting lanes; see `start`."""
K_STOPPED = 16
"""1 after a waiter gave up or saw the host's word. In its own cache line."""
K_NEXT_POLL = 17
"""Time at which the next thread loads the host's word."""
K_STATUS = 18
"""Status of the last failed command, followed by the number of failed commands; the host raises after the launch."""
K_FAILED = 19
K_COUNTERS = 32
N_HITS = 32
"""Number of values that were found in the device cache."""
N_COMMANDS = 33
K_WORDS = 48

NO_SLOT = NAMESPACE_NOT_READY
"""Status of a retrieve for which no slot of the return value queue was free."""
TIMED_OUT = 0x7FFF
"""Instead of a status: no completion arrived, or the host ended the wait."""
BAD_TICKET = 0x7FFE
"""Instead of a status: the ticket is not held, because it was taken, was given up, or is not a ticket."""
BAD_BUFFER = 0x7FFD
"""Instead of a status: the items of the array are not contiguous."""
CHANGED = 0x7FFC
"""Instead of a status: the value was changed between its pieces `MAX_RESTARTS` times."""
MAX_RESTARTS = 1024
"""Maximum number of restarts of a read of several pieces because the value changed."""
LOST_TIMEOUTS = 4
"""Timeouts after which a command without a completion is given up while other commands complete."""
ALL_LANES, SUBMITTED_LANES = 1, 2
"""Results of `timed_out_lanes`: all lanes, or the lanes that have submitted a command."""
# Words of an id's record while it waits for a second or later piece. A ticket uses the words before these.
ID_VERSION = ID_USER + 4
"""Location of the first piece's value, two words."""
ID_ENTRY = ID_USER + 6
"""Entry of the device cache that receives the value, or 0."""
ABORT_POLL_NS = 10**6


@device
def queue_at(core, number):
    """Return the queue record for any number that is not negative (thread)."""
    return field(core, K_QUEUES) + rem(number, field(core, K_N_QUEUES)) * (8 * Q_WORDS)


@device
def begin(core, queue, cid, key0, key1, length, nbytes, offset):
    """Submit a Retrieve under an id that the thread holds (thread); return False if the ring is stuck.

    The command requests the bytes of the value from `offset` to `nbytes`, or as many as one command carries.
    """
    nsid = field(core, K_NSID)
    shards = field(core, K_SHARDS)
    if shards > 1:
        nsid += shard_of(key0, key1, length, shards)
    count = min(nbytes - offset, field(core, K_CHUNK))
    buffer = staging_of(queue, cid)
    if field(core, K_RETURNS) != 0:
        buffer = 0
    word5 = key_value_word5(count, length, WITH_VERSION)
    # the command set reserves word 6 of a retrieve: see `serve.C_FIRST`
    return submit_entry(queue, command_word0(KV_RETRIEVE, cid, nsid), key0, buffer, word5, offset, key1)


@device
def start(core, queue, key0, key1, length, nbytes):
    """Take an id and submit a Retrieve; return the id, or -1 if none is free (thread).

    The caller may hold the id, and the slot of its value in a return value queue, for any time. So some ids are
    reserved for `execute`, which holds an id only until the value has arrived. Otherwise tickets could hold all ids.
    """
    cid = take_id(queue, field(core, K_RESERVE))
    if cid < 0:
        return -1
    if not begin(core, queue, cid, key0, key1, length, nbytes, 0):
        release_id(queue, cid)
        return -1
    return cid


@device
def word_of(queue, cid, index):
    """Return a word of an id's record that its holder stored (thread)."""
    return load_relaxed(id_record(queue, cid) + 8 * index, DEVICE)


@device
def serve(queue, mask, lane, leader):
    """Drain a queue, and release the id of one command that was given up (all lanes of `mask`)."""
    syncwarp(mask)
    drain(queue, mask, lane, leader)
    if lane == leader:
        cid = take_ready(queue)
        if cid >= 0:
            free_return_slot(queue, cid)
            release_id(queue, cid)
    syncwarp(mask)


@device
def should_stop(core, since):
    """Return whether to stop waiting: the timeout since `since` is over, or the host aborted (thread)."""
    if load_relaxed(core + 8 * K_STOPPED, DEVICE) != 0:
        return True
    now = clock_ns()
    due = load_relaxed(core + 8 * K_NEXT_POLL, DEVICE)
    over = now - since > field(core, K_TIMEOUT)
    # one thread per millisecond reads the word over the bus
    if now >= due and compare_exchange(core + 8 * K_NEXT_POLL, due, now + ABORT_POLL_NS, DEVICE) == due:
        over = over or load_relaxed(field(core, K_ABORT), SYSTEM) != 0 or lost(field(core, K_QUEUES))
    if over:
        store_relaxed(core + 8 * K_STOPPED, 1, DEVICE)
    return over


@device
def execute(core, queue, want, key0, key1, length, at, nbytes, mask, lane, leader):
    """Retrieve a value for each lane with a request and wait for it (all lanes of `mask`, one queue).

    Parameters
    ----------
    want : bool
        Whether the lane has a request.
    at, nbytes : int
        Address of the value's buffer, and its bytes; with 0 bytes only the value's size is requested.

    Returns
    -------
    int
        ``status | size << 16``; status 0 is success, `TIMED_OUT` a timeout: of this lane's command alone
        (`LOST_TIMEOUTS`), or of all commands (`should_stop`). The lane has acquired the value and has released its id.

    Values are copied to the device cache first, if it exists, because other threads may write to a kernel's memory.
    """
    answer = 0
    cid = -1
    offset = 0
    restarts = 0
    attempt = 0
    since = clock_ns()
    own = since
    completions = 0
    refused = False
    while True:
        seeking = ballot(mask, want and cid < 0)
        if seeking != 0:
            free = free_ids(queue, mask, lane, leader)
            if free > 0:
                own = 0
            cid = submit_some(core, queue, seeking, free, cid, key0, key1, length, nbytes, lane)
        if ballot(mask, want) == 0:
            return answer
        status = -1
        if want and cid >= 0:
            status = poll(queue, cid)
        if status == NO_SLOT and field(core, K_RETURNS) != 0:
            # No slot is free: submit the same command again, until a thread has freed a slot.
            if submit_piece(core, queue, cid, key0, key1, length, nbytes, offset):
                status = -1
            refused = True
        if ballot(mask, status >= 0) != 0:
            size, piece, stale, more, entry = pull_pieces(
                core, queue, status, cid, key0, key1, length, at, nbytes, offset, mask, lane
            )
            if status >= 0:
                free_return_slot(queue, cid)
                refused = False
                if stale and restarts == MAX_RESTARTS:
                    stale = False
                    status = CHANGED
                restarts += stale
                offset += piece
                cid, offset, answer = after_piece(
                    core, queue, cid, status, key0, key1, length, at, nbytes, offset, size, entry, stale, more
                )
                want = cid >= 0
            own = 0
            attempt = 0
            continue
        serve(queue, mask, lane, leader)
        over = 0
        unanswered = ballot(mask, refused)
        if lane == leader and attempt & 15 == 15:
            over, completions, since, own = timed_out_lanes(core, queue, unanswered, completions, since, own)
        over = shfl(mask, over, leader)
        if want and (over == ALL_LANES or (over == SUBMITTED_LANES and cid >= 0)) and discard(core, queue, cid, offset):
            answer = TIMED_OUT
            want = False
            cid = -1
        backoff(attempt)
        attempt += 1


# -- steps of `execute` -----------------------------------------------------------------------------------------


@device
def free_ids(queue, mask, lane, leader):
    """Return the number of free ids of a queue, as the leader sees it (all lanes of `mask`)."""
    free = 0
    if lane == leader:
        free = field(queue, Q_N_IDS) - load_relaxed(queue + 8 * Q_IN_USE, DEVICE)
    return shfl(mask, free, leader)


@device
def submit_some(core, queue, seeking, free, cid, key0, key1, length, nbytes, lane):
    """Take an id for at most `free` of the lanes in `seeking`, and submit the lane's command (thread).

    Return the lane's id, or -1. If all lanes tried, their counts would hide free ids from other groups.
    """
    bit = 1 << lane
    if seeking & bit != 0 and popc(seeking & (bit - 1)) < free:
        cid = take_id(queue, 0)
        if cid >= 0 and not begin(core, queue, cid, key0, key1, length, nbytes, 0):
            release_id(queue, cid)
            return -1
    return cid


@device
def submit_piece(core, queue, cid, key0, key1, length, nbytes, offset):
    """Submit the command of an id again, for the piece at `offset` (thread); return False if the ring is stuck."""
    store_relaxed(id_record(queue, cid) + 8 * ID_STATE, TAKEN, DEVICE)
    return begin(core, queue, cid, key0, key1, length, nbytes, offset)


@device
def source_of(core, queue, status, cid):
    """Return the address of a lane's value that has arrived, or 0 (thread)."""
    if status < 0:
        return 0
    if field(core, K_RETURNS) != 0:
        return return_slot_of(queue, cid)
    return staging_of(queue, cid)


@device
def piece_of(core, queue, status, cid, source, nbytes, offset):
    """Read a lane's completed piece (thread).

    Returns
    -------
    size : int
        Bytes of the whole value.
    piece : int
        Bytes that arrived at `source`, from byte `offset` of the value.
    stale : bool
        The piece belongs to another version of the value than the first piece.
    more : bool
        Another piece is needed.
    """
    size = 0
    piece = 0
    if status >= 0:
        size = result_of(queue, cid)
    if status == 0:
        piece = max(0, min(field(core, K_CHUNK), min(size, nbytes) - offset))
    version = version_at(source, min(nbytes - offset, field(core, K_CHUNK)))
    stale = False
    if status == 0 and offset > 0:
        # without a slot, an empty value has replaced the value of the first piece
        stale = source == 0
    if status == 0 and offset > 0 and not stale:
        stale = load_relaxed(version, DEVICE) != word_of(queue, cid, ID_VERSION)
        stale = stale or load_relaxed(version + 8, DEVICE) != word_of(queue, cid, ID_VERSION + 1)
    if stale:
        piece = 0
    more = piece > 0 and offset + piece < min(size, nbytes)
    if more and offset == 0:
        record = id_record(queue, cid) + 8 * ID_VERSION
        store_relaxed(record, load_relaxed(version, DEVICE), DEVICE)
        store_relaxed(record + 8, load_relaxed(version + 8, DEVICE), DEVICE)
    return size, piece, stale, more


@device
def entry_for(cache, queue, status, cid, key0, key1, length, size, nbytes, offset, more):
    """Return the entry of the device cache for a lane's value, or 0 (thread)."""
    if status >= 0 and offset > 0:
        return word_of(queue, cid, ID_ENTRY)
    entry = 0
    if status == 0:
        if size <= nbytes:
            entry = claim(cache, key0, key1, length, size)
        if more:
            store_relaxed(id_record(queue, cid) + 8 * ID_ENTRY, entry, DEVICE)
    return entry


@device
def fill_entries(cache, entry, offset, source, piece, mask, lane):
    """Copy pieces into the device cache; return the address of the lane's piece (all lanes of `mask`)."""
    filling = ballot(mask, entry != 0 and piece > 0)
    if filling == 0:
        return source
    to = 0
    if entry != 0:
        to = bytes_of(cache, entry) + offset
    # a reader that sees a new byte must also see the odd version: each lane synchronizes with its writer, then fences
    syncwarp(mask)
    fence(DEVICE)
    copy_each(filling, to, source, piece, mask, lane)
    syncwarp(mask)
    if entry != 0:
        return to  # the later copies read the device's memory: the value passes the bus once
    return source


@device
def pull_pieces(core, queue, status, cid, key0, key1, length, at, nbytes, offset, mask, lane):
    """Copy the pieces that have arrived to the device cache and to the lanes' buffers (all lanes of `mask`).

    Return size, piece, stale and more (see `piece_of`), and the entry of the device cache that the value goes to, or 0.
    """
    syncwarp(mask)
    source = source_of(core, queue, status, cid)
    size, piece, stale, more = piece_of(core, queue, status, cid, source, nbytes, offset)
    cache = field(core, K_CACHE)
    entry = 0
    if cache != 0:
        entry = entry_for(cache, queue, status, cid, key0, key1, length, size, nbytes, offset, more)
        source = fill_entries(cache, entry, offset, source, piece, mask, lane)
    copy_each(ballot(mask, piece > 0), at + offset, source, piece, mask, lane)
    syncwarp(mask)
    return size, piece, stale, more, entry


@device
def after_piece(core, queue, cid, status, key0, key1, length, at, nbytes, offset, size, entry, stale, more):
    """Request the next piece, start the value again if it is `stale`, or end the command (thread).

    Returns
    -------
    cid : int
        The id of the command, or -1 if it has ended.
    offset : int
        Offset of the next piece.
    answer : int
        See `execute`.
    """
    if stale or (status > 0 and offset > 0):
        # the earlier pieces belong to a replaced value
        wipe(at, offset)
        if entry != 0:
            abandon(entry)
        entry = 0
        offset = 0
    if stale or more:
        if submit_piece(core, queue, cid, key0, key1, length, nbytes, offset):
            return cid, offset, 0
        if entry != 0:
            abandon(entry)
        release_id(queue, cid)
        return -1, offset, TIMED_OUT
    if entry != 0:
        publish(entry, key0, key1, length, size)
    release_id(queue, cid)
    return -1, offset, status | (size << 16)


@device
def timed_out_lanes(core, queue, unanswered, completions, since, own):
    """Return which waits have timed out, `ALL_LANES`, `SUBMITTED_LANES` or 0, and the state for the next call.

    For the leader of a group.

    `completions` is the number of completions at the time `since`; `own` is the time at which the lanes' commands were
    submitted (0: now). A refusal (`unanswered`) does not count as progress: all slots may be held by tickets that no
    thread takes.
    """
    now = load_relaxed(field(queue, Q_PROGRESS), DEVICE)
    if now != completions and unanswered == 0:
        completions = now
        since = clock_ns()
    if own == 0:
        own = since
    if should_stop(core, since):
        return ALL_LANES, completions, since, own
    if since - own > LOST_TIMEOUTS * field(core, K_TIMEOUT):
        return SUBMITTED_LANES, completions, since, 0
    return 0, completions, since, own


@device
def discard(core, queue, cid, offset):
    """Abandon a command to the next drain of its queue; return False if its completion has just arrived (thread)."""
    entry = 0
    if offset > 0 and field(core, K_CACHE) != 0:
        entry = word_of(queue, cid, ID_ENTRY)
    if cid >= 0 and orphan(queue, cid, ORPHAN) >= 0:
        return False
    if entry != 0:
        abandon(entry)
    return True


@kernel
def drain_abandoned(core, queues, count):
    """Drain queues, and release ids of commands that were given up (one thread; the host, between launches)."""
    for k in range(count):
        serve(queues + k * (8 * Q_WORDS), 1, 0, 0)
