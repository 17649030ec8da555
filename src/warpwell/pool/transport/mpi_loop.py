"""`run`: the native loop of an `MpiTransport`, which moves all messages and transfers without the GIL.

This is device code over blocks of 64-bit fields, which `MpiTransport` allocates: one global block (G_), one for each
peer (P_), and one for each transfer (R_, a row of the `TransferTable`). It calls MPI by address. Only the transport's
thread runs these functions. `run` returns when Python has to act.

Messages are sent in fragments of one size. A fragment is a header of four fields (kind, payload bytes, bytes of
messages that the sender has received, operand of a DRAIN), then messages, each after its length. A long message
continues in the next fragments; short messages share one.
"""

from __future__ import annotations

import itertools

from ...targets import device
from ...targets.primitives import (
    SYSTEM,
    call_foreign,
    clock_ns,
    copy_bytes,
    fetch_add,
    load_acquire,
    load_relaxed,
    rem,
    store_relaxed,
    store_release,
)
from . import bulk
from .signal import FUTEX_ALL, FUTEX_WAIT, FUTEX_WAKE
from .table import ABANDONED, OVER, READY
from .transport import WINDOW

CONTROL, FIRST_BULK = 1, 16
"""MPI tags: of fragments, and the first one for bulk data."""

FRAGMENT = 32 << 10
"""Size of a fragment in bytes. Open MPI sends up to 64 KiB over TCP eagerly."""

HEADER = 32
"""Size of the header of a fragment in bytes."""

DATA, GOODBYE, DRAIN, DRAINED = range(4)
"""Kinds of fragments. DATA without messages is a heartbeat. MPI cannot withdraw a send, so the sender of a cancelled
copy sends DRAIN (operand: ``tag << 32 | chunk bytes``). The peer receives and discards the data with this tag, then
answers DRAINED."""

LOSSES, FINISHED = 1, 2
"""Return values of `run`: peers were lost (report them, then call `run` again); the transport is closed."""

SLOTS = 4
"""Number of fragments in flight to and from a peer."""

AHEAD = 4
"""Number of chunks of a transfer in flight. Sends are synchronous, so this bounds the memory that MPI buffers."""

MS = 1_000_000
"""Nanoseconds in a millisecond."""

MIN_NAP, MAX_NAP, MAX_ACTIVE_NAP = 20_000, 500_000, 100_000
"""Naps in nanoseconds: the shortest, the longest, and the longest while data is in flight."""

EXIT_DELAY = 300 * MS
"""Nanoseconds after a process has exited during which its data may still arrive: TCP may retransmit a packet."""

NAP_GROWTH_DELAY = 1 * MS
"""Nanoseconds without progress after which naps grow. A reply takes some hundred microseconds."""

IDLE_POLLS = 8
"""Number of MPI calls without progress before a nap: Open MPI polls its sockets in every eighth call."""

DRAIN_INTERVAL = 2 * MS
"""Nanoseconds after a DRAINED before the sender of a cancelled copy repeats DRAIN."""

EXIT_POLLS = 2 * IDLE_POLLS
"""Number of polls without data, in addition to `EXIT_DELAY`, after which an exited process counts as lost."""

# -- the global block: byte offsets of its fields ----------------------------------------------------------------
_offsets = itertools.count(0, 8)
# Signals: from Python to the loop; a message has arrived; a peer has received messages.
G_DOORBELL, G_ARRIVED, G_ACKNOWLEDGED = itertools.islice(_offsets, 3)
# Number of lost peers to report to Python; deadline of closing, or 0; time of the last `check_peers`.
G_LOSSES, G_CLOSE_BY, G_CHECKED = itertools.islice(_offsets, 3)
# MPI handles and functions, other foreign functions, and the number of the system call futex.
G_COMM, G_BYTE, G_ISEND, G_ISSEND, G_IRECV, G_TEST, G_CANCEL, G_IMPROBE, G_IMRECV = itertools.islice(_offsets, 9)
G_MALLOC, G_FREE, G_SYSCALL, G_FUTEX = itertools.islice(_offsets, 4)
# Nanoseconds after which a silent peer is lost; number of peers, and of rows of transfers, each with their address.
G_SILENCE, G_PEERS, G_PEER_TABLE, G_ROWS, G_ROW_TABLE = itertools.islice(_offsets, 5)
# Ring of (rank, address, bytes): its address, its slots, entries taken by Python, entries put by the loop.
G_INBOX, G_INBOX_SLOTS, G_INBOX_HEAD, G_INBOX_TAIL = itertools.islice(_offsets, 4)
# Number of finished transfers; scratch memory: the flag of MPI, its status, a timespec.
G_FINISHED, G_FLAG, G_STATUS = itertools.islice(_offsets, 3)
G_TIME = G_STATUS + 8 * 16
GLOBAL_WORDS = G_TIME // 8 + 2

# -- a peer: byte offsets of its fields --------------------------------------------------------------------------
_offsets = itertools.count(0, 8)
# Why the peer is lost, or 0; detail of the loss: an MPI error, nanoseconds of silence, or bytes; 1: Python has reported
# the loss, so transfers may fail.
P_RANK, P_LOST, P_CODE, P_LOSS_REPORTED = itertools.islice(_offsets, 4)
# Bytes of messages: that the peer has received from this process; that Python has received from the peer; that were
# last reported to the peer.
P_ACKNOWLEDGED, P_CONSUMED, P_REPORTED = itertools.islice(_offsets, 3)
# Times of the last fragment received and sent; 1: GOODBYE was sent; when Python learned that the process has exited, or
# 0; consecutive polls since then without data.
P_LAST_RECEIVE, P_LAST_SEND, P_GOODBYE, P_EXITED, P_EXIT_POLLS = itertools.islice(_offsets, 5)
# Ring of (address, bytes): its address, its slots, entries taken by the loop, entries put by Python; bytes of the first
# message that are in fragments, or -1: not even its length.
P_OUT, P_OUT_SLOTS, P_OUT_HEAD, P_OUT_TAIL, P_OFFSET = itertools.islice(_offsets, 5)
# The message that is being received: its address, bytes, bytes received (-1: no message).
P_MESSAGE, P_LENGTH, P_FILLED = itertools.islice(_offsets, 3)
# Number of fragments whose send has completed, whose send was started, and that were received; their buffers.
P_SENT, P_SENDS, P_RECEIVED, P_SEND_BUFFERS, P_RECEIVE_BUFFERS = itertools.islice(_offsets, 5)
# Operand of the DRAIN to send, or 0; row of the transfer whose DRAIN is unanswered, or 0; operand of the DRAIN that the
# peer has sent, or 0; 1: DRAINED is to be sent.
P_DRAIN_REQUEST, P_DRAINING_ROW, P_DRAIN, P_DRAIN_DONE = itertools.islice(_offsets, 4)
# Memory for discarded data, or 0; the matched message; the request of its receive.
P_SCRATCH, P_SCRATCH_MESSAGE, P_SCRATCH_REQUEST, P_SEND_REQUESTS = itertools.islice(_offsets, 4)
P_RECEIVE_REQUESTS = P_SEND_REQUESTS + 8 * SLOTS
PEER_BYTES = P_RECEIVE_REQUESTS + 8 * SLOTS

SILENT, PEER_CLOSED, MPI_FAILED, EXITED, NO_MEMORY = 1, 2, 3, 4, 5
"""Reasons why a peer is lost."""

# -- a transfer: byte offsets of its fields ----------------------------------------------------------------------
_offsets = itertools.count(0, 8)
# State; address of the block of the peer; whether this side sends; tag; address of the control words of the `Transfer`.
R_STATE, R_PEER, R_OUTGOING, R_TAG, R_CONTROL = itertools.islice(_offsets, 5)
# The fields of the region.
R_ADDRESS, R_NBYTES, R_CHUNK, R_SLOTS, R_CHUNKS = itertools.islice(_offsets, 5)
# Number of chunks that were started, and that have completed; time of the last DRAINED; requests.
R_POSTED, R_DONE, R_DRAINED, R_REQUESTS = itertools.islice(_offsets, 4)
ROW_BYTES = R_REQUESTS + 8 * AHEAD


@device
def word(address: int) -> int:
    """Return a field. Relaxed: only this thread writes it, or the order does not matter."""
    return load_relaxed(address, SYSTEM)


@device
def put_word(address: int, value: int) -> None:
    """Write a field. Relaxed."""
    store_relaxed(address, value, SYSTEM)


@device
def futex(g: int, address: int, operation: int, value: int, timeout: int) -> None:
    """Call futex(2). `timeout` is the address of a timespec, or 0."""
    call_foreign(word(g + G_SYSCALL), word(g + G_FUTEX), address, operation, value, timeout, 0, 0)


@device
def raise_signal(g: int, address: int) -> None:
    """Increment the `Signal` at `address` and wake all sleeping threads."""
    fetch_add(address, 1, SYSTEM)
    futex(g, address, FUTEX_WAKE, FUTEX_ALL, 0)


@device
def run(g: int) -> int:
    """Move messages and transfers until peers are lost or the transport is closed; return LOSSES or FINISHED."""
    nap = MIN_NAP
    idle = 0
    last_progress = clock_ns()
    while True:
        version = load_acquire(g + G_DOORBELL, SYSTEM)
        now = clock_ns()
        moved = 0
        in_flight = 0
        for k in range(word(g + G_PEERS)):
            p = word(g + G_PEER_TABLE) + k * PEER_BYTES
            if word(p + P_LOST) == 0:
                count = move_fragments(g, p, now)
                moved += count
                if word(p + P_EXITED) != 0:
                    put_word(p + P_EXIT_POLLS, word(p + P_EXIT_POLLS) + 1 if count == 0 else 0)
                if word(p + P_DRAIN) != 0:
                    moved += drain(g, p)
                    in_flight += 1
                in_flight += word(p + P_SENDS) - word(p + P_SENT)
        for k in range(load_acquire(g + G_ROWS, SYSTEM)):
            r = word(g + G_ROW_TABLE) + k * ROW_BYTES
            if load_acquire(r + R_STATE, SYSTEM) == READY:
                moved += move_chunks(g, r, now)
                in_flight += word(r + R_POSTED) - word(r + R_DONE)
        since_check = now - word(g + G_CHECKED)
        if since_check > 50 * MS:  # after fragments that have arrived were received
            check_peers(g, now, since_check)
            put_word(g + G_CHECKED, now)
        if word(g + G_LOSSES) != 0:
            return LOSSES
        if load_acquire(g + G_CLOSE_BY, SYSTEM) != 0 and close_peers(g, now):
            return FINISHED
        idle += word(g + G_PEERS)
        if moved != 0:
            nap = MIN_NAP
            idle = 0
            last_progress = now
        elif idle >= IDLE_POLLS:
            idle = 0
            put_word(g + G_TIME, 0)
            nap = min(nap, MAX_ACTIVE_NAP if in_flight > 0 else MAX_NAP)
            put_word(g + G_TIME + 8, nap)
            futex(g, g + G_DOORBELL, FUTEX_WAIT, version & 0xFFFFFFFF, g + G_TIME)
            if now - last_progress > NAP_GROWTH_DELAY:
                nap += nap // 2


@device
def check_peers(g: int, now: int, since_check: int) -> None:
    """Mark silent peers as lost, and exited peers after their last data has arrived."""
    for k in range(word(g + G_PEERS)):
        p = word(g + G_PEER_TABLE) + k * PEER_BYTES
        if since_check > 1000 * MS:  # this process itself was stopped, so received data may be unread
            put_word(p + P_LAST_RECEIVE, word(p + P_LAST_RECEIVE) + since_check)
        exited = load_acquire(p + P_EXITED, SYSTEM)
        if word(p + P_LOST) != 0:
            continue
        if now - word(p + P_LAST_RECEIVE) > word(g + G_SILENCE):
            lose(g, p, SILENT, now - word(p + P_LAST_RECEIVE))
        elif exited != 0 and now - max(exited, word(p + P_LAST_RECEIVE)) > EXIT_DELAY:
            if word(p + P_EXIT_POLLS) > EXIT_POLLS:  # a thread that was stopped must poll first
                lose(g, p, EXITED, 0)


@device
def lose(g: int, p: int, cause: int, code: int) -> None:
    """Record the loss of a peer for Python, unless it is lost."""
    if word(p + P_LOST) == 0:
        put_word(p + P_CODE, code)
        put_word(p + P_LOST, cause)
        put_word(g + G_LOSSES, word(g + G_LOSSES) + 1)


@device
def test_request(g: int, request: int) -> int:
    """Test the MPI request at `request`; return the code of MPI. `is_flag_set` returns whether it has completed."""
    put_word(g + G_FLAG, 0)
    return call_foreign(word(g + G_TEST), request, g + G_FLAG, g + G_STATUS, 0, 0, 0, 0) & 0xFFFFFFFF


@device
def is_flag_set(g: int) -> bool:
    """Return the flag that the last MPI function has set."""
    return (word(g + G_FLAG) & 0xFFFFFFFF) != 0


@device
def completed(g: int, p: int, request: int) -> bool:
    """Return True if the MPI request at `request` has completed. If MPI fails, the peer is lost."""
    code = test_request(g, request)
    if code != 0:
        lose(g, p, MPI_FAILED, code)
        return False
    return is_flag_set(g)


@device
def start(g: int, p: int, function: int, address: int, nbytes: int, tag: int, request: int) -> bool:
    """Start a send or a receive and return True. If MPI fails, the peer is lost."""
    byte, rank, comm = word(g + G_BYTE), word(p + P_RANK), word(g + G_COMM)
    code = call_foreign(function, address, nbytes, byte, rank, tag, comm, request) & 0xFFFFFFFF
    if code != 0:
        lose(g, p, MPI_FAILED, code)
    return code == 0


# -- fragments ------------------------------------------------------------------------------------------------


@device
def start_receive(g: int, p: int, slot: int) -> bool:
    """Start to receive a fragment into a slot and return True. If MPI fails, the peer is lost."""
    fragment, request = word(p + P_RECEIVE_BUFFERS) + slot * FRAGMENT, p + P_RECEIVE_REQUESTS + 8 * slot
    return start(g, p, word(g + G_IRECV), fragment, FRAGMENT, CONTROL, request)


@device
def move_fragments(g: int, p: int, now: int) -> int:
    """Receive all fragments that have arrived and send those that are due; return their number."""
    moved = 0
    while True:
        slot = rem(word(p + P_RECEIVED), SLOTS)
        if not completed(g, p, p + P_RECEIVE_REQUESTS + 8 * slot):
            break
        moved += 1
        put_word(p + P_LAST_RECEIVE, now)
        put_word(p + P_RECEIVED, word(p + P_RECEIVED) + 1)
        fragment = word(p + P_RECEIVE_BUFFERS) + slot * FRAGMENT
        if word(fragment + 16) > word(p + P_ACKNOWLEDGED):
            store_release(p + P_ACKNOWLEDGED, word(fragment + 16), SYSTEM)
            raise_signal(g, g + G_ACKNOWLEDGED)
        unpack(g, p, fragment)
        if word(p + P_LOST) != 0:
            return moved
        kind = word(fragment)
        if kind == GOODBYE:
            lose(g, p, PEER_CLOSED, 0)
            return moved
        if kind == DRAIN:
            put_word(p + P_DRAIN, word(fragment + 24))
        elif kind == DRAINED:
            put_word(word(p + P_DRAINING_ROW) + R_DRAINED, now)
            put_word(p + P_DRAINING_ROW, 0)
        if not start_receive(g, p, slot):
            return moved
    while word(p + P_SENT) < word(p + P_SENDS):
        if not completed(g, p, p + P_SEND_REQUESTS + 8 * rem(word(p + P_SENT), SLOTS)):
            break
        put_word(p + P_SENT, word(p + P_SENT) + 1)
    while word(p + P_LOST) == 0 and word(p + P_GOODBYE) == 0 and word(p + P_SENDS) - word(p + P_SENT) < SLOTS:
        acknowledges = load_relaxed(p + P_CONSUMED, SYSTEM) - word(p + P_REPORTED) >= WINDOW // 4
        heartbeat = now - word(p + P_LAST_SEND) > word(g + G_SILENCE) // 8
        kind = DRAIN if word(p + P_DRAIN_REQUEST) != 0 else DRAINED if word(p + P_DRAIN_DONE) != 0 else DATA
        is_empty = word(p + P_OUT_HEAD) == load_acquire(p + P_OUT_TAIL, SYSTEM)
        if kind == DATA and not acknowledges and not heartbeat and is_empty:
            break
        send_fragment(g, p, kind, now)
        moved += 1
    return moved


@device
def send_fragment(g: int, p: int, kind: int, now: int) -> None:
    """Send a fragment. GOODBYE is a synchronous send: it completes after all earlier fragments were received."""
    slot = rem(word(p + P_SENDS), SLOTS)
    fragment = word(p + P_SEND_BUFFERS) + slot * FRAGMENT
    consumed = load_relaxed(p + P_CONSUMED, SYSTEM)
    put_word(p + P_REPORTED, consumed)
    nbytes = pack(p, fragment)
    put_word(fragment, kind)
    put_word(fragment + 8, nbytes - HEADER)
    put_word(fragment + 16, consumed)
    put_word(fragment + 24, word(p + P_DRAIN_REQUEST))
    if kind == DRAIN:
        put_word(p + P_DRAIN_REQUEST, 0)
    elif kind == DRAINED:
        put_word(p + P_DRAIN_DONE, 0)
    put_word(p + P_LAST_SEND, now)
    function = word(g + G_ISSEND) if kind == GOODBYE else word(g + G_ISEND)
    if start(g, p, function, fragment, nbytes, CONTROL, p + P_SEND_REQUESTS + 8 * slot):
        put_word(p + P_SENDS, word(p + P_SENDS) + 1)


@device
def pack(p: int, fragment: int) -> int:
    """Copy queued messages into a fragment; return the bytes used, with the header."""
    used = HEADER
    head = word(p + P_OUT_HEAD)
    tail = load_acquire(p + P_OUT_TAIL, SYSTEM)
    offset = word(p + P_OFFSET)
    while head < tail and used + 8 <= FRAGMENT:
        entry = word(p + P_OUT) + 16 * rem(head, word(p + P_OUT_SLOTS))
        length = word(entry + 8)
        if offset < 0:
            copy_bytes(fragment + used, entry + 8, 8)  # not aligned
            used += 8
            offset = 0
        part = min(length - offset, FRAGMENT - used)
        copy_bytes(fragment + used, word(entry) + offset, part)
        used += part
        offset += part
        if offset < length:
            break
        head += 1
        offset = -1
    put_word(p + P_OFFSET, offset)
    store_release(p + P_OUT_HEAD, head, SYSTEM)
    return used


@device
def unpack(g: int, p: int, fragment: int) -> None:
    """Append the messages in a fragment to the inbox. If memory for a message cannot be allocated, the peer is lost."""
    address = fragment + HEADER
    end = address + word(fragment + 8)
    arrived = 0
    while address < end:
        if word(p + P_FILLED) < 0:
            copy_bytes(p + P_LENGTH, address, 8)  # not aligned
            address += 8
            size = max(word(p + P_LENGTH), 1)
            message = call_foreign(word(g + G_MALLOC), size, 0, 0, 0, 0, 0, 0)
            if message == 0:
                lose(g, p, NO_MEMORY, size)
                break
            put_word(p + P_MESSAGE, message)
            put_word(p + P_FILLED, 0)
        filled = word(p + P_FILLED)
        length = word(p + P_LENGTH)
        part = min(length - filled, end - address)
        copy_bytes(word(p + P_MESSAGE) + filled, address, part)
        address += part
        filled += part
        if filled == length:
            tail = word(g + G_INBOX_TAIL)
            entry = word(g + G_INBOX) + 24 * rem(tail, word(g + G_INBOX_SLOTS))
            put_word(entry, word(p + P_RANK))
            put_word(entry + 8, word(p + P_MESSAGE))
            put_word(entry + 16, length)
            store_release(g + G_INBOX_TAIL, tail + 1, SYSTEM)
            arrived += 1
            filled = -1
        put_word(p + P_FILLED, filled)
    if arrived > 0:
        raise_signal(g, g + G_ARRIVED)


# -- transfers ------------------------------------------------------------------------------------------------


@device
def drain(g: int, p: int) -> int:
    """Receive and discard one chunk of a cancelled copy; return 1 if there was progress.

    Only a receive can complete a synchronous send. MPI matches in order, so `MPI_Improbe` finds exactly the chunks
    without a receive. The peer does not reuse the tag before it gets DRAINED.
    """
    operand = word(p + P_DRAIN)
    chunk = operand & 0xFFFFFFFF
    scratch = word(p + P_SCRATCH)
    if scratch == 0:
        scratch = call_foreign(word(g + G_MALLOC), chunk, 0, 0, 0, 0, 0, 0)
        if scratch == 0:
            return 0  # retried in the next round
        put_word(p + P_SCRATCH, scratch)
    elif not completed(g, p, p + P_SCRATCH_REQUEST):
        return 0
    put_word(g + G_FLAG, 0)
    message = p + P_SCRATCH_MESSAGE
    rank, tag, comm, status = word(p + P_RANK), operand >> 32, word(g + G_COMM), g + G_STATUS
    code = call_foreign(word(g + G_IMPROBE), rank, tag, comm, g + G_FLAG, message, status, 0) & 0xFFFFFFFF
    found = code == 0 and is_flag_set(g)
    if found:
        byte, request = word(g + G_BYTE), p + P_SCRATCH_REQUEST
        code = call_foreign(word(g + G_IMRECV), scratch, chunk, byte, message, request, 0, 0) & 0xFFFFFFFF
    if code != 0:
        lose(g, p, MPI_FAILED, code)
    elif not found:
        call_foreign(word(g + G_FREE), scratch, 0, 0, 0, 0, 0, 0)
        put_word(p + P_SCRATCH, 0)
        put_word(p + P_DRAIN, 0)
        put_word(p + P_DRAIN_DONE, 1)
    return 1


@device
def move_chunks(g: int, r: int, now: int) -> int:
    """Count the completed chunks of a transfer and start those that may move; return the number of both."""
    p = word(r + R_PEER)
    control = word(r + R_CONTROL)
    if word(p + P_LOST) != 0:
        if word(p + P_LOSS_REPORTED) != 0:
            fail_transfer(g, r)
        return 0
    before = word(r + R_DONE)
    done = before
    posted = word(r + R_POSTED)
    while done < posted and completed(g, p, r + R_REQUESTS + 8 * rem(done, AHEAD)):
        done += 1
    put_word(r + R_DONE, done)
    outgoing = word(r + R_OUTGOING) != 0
    if load_acquire(control + 8 * bulk.STATUS, SYSTEM) == bulk.CANCELLED:
        if not outgoing:
            for k in range(done, posted):
                call_foreign(word(g + G_CANCEL), r + R_REQUESTS + 8 * rem(k, AHEAD), 0, 0, 0, 0, 0, 0)
        elif done < posted and word(p + P_DRAINING_ROW) == 0 and now - word(r + R_DRAINED) > DRAIN_INTERVAL:
            put_word(p + P_DRAINING_ROW, r)
            put_word(p + P_DRAIN_REQUEST, (word(r + R_TAG) << 32) | word(r + R_CHUNK))
            return 1
        if done == posted and word(p + P_DRAINING_ROW) != r:  # otherwise the peer may still probe for the tag
            finish_transfer(g, r, 0)
        return done - before
    limit = min(load_acquire(control + 8 * bulk.ALLOWED, SYSTEM), done + AHEAD)
    function = word(g + G_ISSEND) if outgoing else word(g + G_IRECV)
    moved = done - before
    chunk = word(r + R_CHUNK)
    while posted < limit and word(p + P_LOST) == 0:
        slots = word(r + R_SLOTS)
        slot = posted if slots == 0 else rem(posted, slots)
        nbytes = min(chunk, word(r + R_NBYTES) - posted * chunk)
        address = word(r + R_ADDRESS) + slot * chunk
        if start(g, p, function, address, nbytes, word(r + R_TAG), r + R_REQUESTS + 8 * rem(posted, AHEAD)):
            posted += 1
            moved += 1
    put_word(r + R_POSTED, posted)
    if done > before:
        store_release(control + 8 * bulk.COMPLETED, done, SYSTEM)
        if done == word(r + R_CHUNKS):
            finish_transfer(g, r, bulk.DONE)
        else:
            raise_signal(g, control + 8 * bulk.CHANGES)
    return moved


@device
def fail_transfer(g: int, r: int) -> None:
    """Fail a transfer whose peer is lost. Memory that MPI may still access is never released."""
    p = word(r + R_PEER)
    control = word(r + R_CONTROL)
    done = word(r + R_DONE)
    posted = word(r + R_POSTED)
    while done < posted and completed(g, p, r + R_REQUESTS + 8 * rem(done, AHEAD)):
        done += 1  # received before the loss
    put_word(r + R_DONE, done)
    store_release(control + 8 * bulk.COMPLETED, done, SYSTEM)
    held = 0
    for k in range(done, posted):
        request = r + R_REQUESTS + 8 * rem(k, AHEAD)
        if word(r + R_OUTGOING) == 0:
            call_foreign(word(g + G_CANCEL), request, 0, 0, 0, 0, 0, 0)
        if test_request(g, request) == 0 and not is_flag_set(g):
            held += 1
    if done == word(r + R_CHUNKS):
        finish_transfer(g, r, bulk.DONE)
    elif held == 0:
        finish_transfer(g, r, bulk.LOST)
    else:
        if word(control + 8 * bulk.STATUS) == bulk.RUNNING:
            put_word(control + 8 * bulk.STATUS, bulk.LOST)
        raise_signal(g, control + 8 * bulk.CHANGES)
        store_release(r + R_STATE, ABANDONED, SYSTEM)


@device
def finish_transfer(g: int, r: int, status: int) -> None:
    """Set the final status of a transfer, unless one is set, and release its memory."""
    control = word(r + R_CONTROL)
    if word(control + 8 * bulk.STATUS) == bulk.RUNNING:
        put_word(control + 8 * bulk.STATUS, status)
    store_release(control + 8 * bulk.HELD, 0, SYSTEM)
    raise_signal(g, control + 8 * bulk.CHANGES)
    store_release(r + R_STATE, OVER, SYSTEM)
    store_release(g + G_FINISHED, word(g + G_FINISHED) + 1, SYSTEM)


@device
def close_peers(g: int, now: int) -> bool:
    """Send GOODBYE after the last transfers and messages; return True if all peers have it, or 0.1 s too late."""
    deadline = word(g + G_CLOSE_BY)
    is_late = now > deadline
    if not is_late:
        for k in range(word(g + G_ROWS)):
            if word(word(g + G_ROW_TABLE) + k * ROW_BYTES + R_STATE) == READY:
                return False
    open_peers = 0
    for k in range(word(g + G_PEERS)):
        p = word(g + G_PEER_TABLE) + k * PEER_BYTES
        if word(p + P_LOST) != 0:
            continue
        in_flight = word(p + P_SENDS) - word(p + P_SENT)
        has_messages = word(p + P_OUT_HEAD) < load_acquire(p + P_OUT_TAIL, SYSTEM)
        if word(p + P_GOODBYE) == 0 and in_flight < SLOTS and (is_late or not has_messages):
            send_fragment(g, p, GOODBYE, now)
            put_word(p + P_GOODBYE, 1)
            open_peers += 1
        elif not is_late and (word(p + P_GOODBYE) == 0 or in_flight > 0):
            open_peers += 1
    return open_peers == 0 or now > deadline + 100 * MS
