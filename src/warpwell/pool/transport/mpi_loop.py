"""`run`: the native loop that moves everything of an `MpiTransport` without the interpreter lock.

Device code over three kinds of blocks of words, which it shares with `mpi_progress.Progress`; MPI is called by address.
It returns where Python has to act: a peer was lost, or closing is over.

Messages travel in fragments of one size. A fragment is a header of four words (its kind, the bytes that follow, the
bytes of messages that the sender has received, and what a DRAIN is about) and the messages, each behind its length, as
many as fit. A long message continues in the next fragments. So short messages that wait share a fragment, and a message
may have any size.
"""

from __future__ import annotations

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
from .table import ABANDONED, OVER, READY
from .transport import WINDOW

CONTROL, FIRST_BULK = 1, 16
"""MPI tags: of fragments, and the first one of bulk data."""

FRAGMENT = 32 << 10
"""Bytes of a fragment with its header. Open MPI sends up to 64 KiB over TCP without asking first."""

HEADER = 32
"""Bytes of its header."""

DATA, GOODBYE, DRAIN, DRAINED = range(4)
"""Kinds of fragments. One without messages is a sign of life. DRAIN asks the peer to receive, and drop, what was sent
with the MPI tag of a copy that was given up (its word is ``tag << 32 | bytes of a chunk``), since MPI cannot take back
a send; DRAINED answers that nothing of it is left."""

_WAIT, _WAKE, _EVERYBODY = 128, 129, 2**31 - 1

LOSSES, FINISHED = 1, 2
"""What `run` returns: `lost` peers to be told of (call it again then), or that it has ended."""

SLOTS = 4
"""Fragments to and from a peer that are under way at once."""

AHEAD = 4
"""Chunks of a transfer that are under way at once. Each waits for its receiver: memory in flight stays bounded."""

MS = 1_000_000
SHORTEST, LONGEST, IN_FLIGHT = 20_000, 500_000, 100_000
"""Nanoseconds of naps: the first, the longest, and the longest while something is under way."""

LAST_WORDS = 300 * MS
"""Nanoseconds for which what a process has sent may still come after its end: a packet may have to be sent again."""

HOT = 1 * MS
"""Nanoseconds without a find after which naps become longer: an answer takes some hundred microseconds."""

LOOKS = 8
"""Calls of MPI without a find before a nap: Open MPI looks at its sockets only every eighth time."""

AGAIN = 2 * MS
"""Nanoseconds after which a peer is asked again to take what is left of a copy that was given up."""

QUIET = 2 * LOOKS
"""Looks without a find, besides, after which nothing comes any more of a process that has ended."""

# -- the whole ------------------------------------------------------------------------------------------------
(
    G_DOORBELL,  # signals: of Python to the loop,
    G_ARRIVED,  # that a message came,
    G_ACKNOWLEDGED,  # that a peer has received some
    G_LOSSES,  # peers lost that Python has not heard of
    G_CLOSE_BY,  # when closing has to be over, 0: not closing
    G_WATCHED,  # when somebody last looked for silent peers
    G_COMM,  # handles and functions of MPI
    G_BYTE,
    G_ISEND,
    G_ISSEND,
    G_IRECV,
    G_TEST,
    G_CANCEL,
    G_IMPROBE,
    G_IMRECV,
    G_MALLOC,
    G_FREE,
    G_SYSCALL,
    G_FUTEX,
    G_SILENCE,
    G_PEERS,  # how many, and where the blocks are
    G_PEER_TABLE,
    G_ROWS,
    G_ROW_TABLE,
    G_INBOX,  # ring of (peer, address, bytes): where, how many fit, taken by Python, put by the loop
    G_INBOX_ROOM,
    G_INBOX_HEAD,
    G_INBOX_TAIL,
    G_ENDED,  # how many transfers the loop is done with
    G_FLAG,  # scratch: MPI's flag, its status, a timespec
    G_STATUS,
    G_STATUS_END,
) = range(0, 8 * 32, 8)
G_TIME = G_STATUS + 8 * 16
GLOBAL_WORDS = G_TIME // 8 + 2

# -- a peer ---------------------------------------------------------------------------------------------------
(
    P_RANK,
    P_GONE,  # why it is lost, 0: it is not
    P_CODE,  # MPI's error
    P_TOLD,  # Python has heard of the loss, so transfers may fail
    P_ACKNOWLEDGED,  # bytes of messages that the peer has received
    P_CONSUMED,  # that Python has received of it
    P_REPORTED,  # that the peer knows of
    P_HEARD,  # when it last said something
    P_SAID,  # when it was last told something
    P_GOODBYE,  # 1: said
    P_ENDED,  # since when it is known that its process has ended, 0: it has not
    P_QUIET,  # looks since then, one after the other, that found nothing of it
    P_OUT,  # ring of (address, bytes): where, how many fit, taken by the loop, put by Python
    P_OUT_ROOM,
    P_OUT_HEAD,
    P_OUT_TAIL,
    P_OFFSET,  # bytes of the first message that are sent, -1: not even its length
    P_MESSAGE,  # what is put together: where, bytes, bytes there (-1: nothing)
    P_LENGTH,
    P_FILLED,
    P_SENT,  # fragments: sent, and under way or sent
    P_SENDS,
    P_RECEIVED,
    P_SEND_BUFFERS,
    P_RECEIVE_BUFFERS,
    P_ASK,  # what the peer is to be asked to drain, 0: nothing
    P_ASKING,  # row of the transfer for which it was asked and has not answered, 0: none
    P_DRAIN,  # what the peer has asked to be drained here, 0: nothing
    P_ANSWER,  # 1: it is to be told that this is done
    P_SCRATCH,  # memory for it, 0: none yet; the message that it is for, and its request
    P_SCRATCH_MESSAGE,
    P_SCRATCH_REQUEST,
    P_SEND_REQUESTS,
) = range(0, 8 * 33, 8)
P_RECEIVE_REQUESTS = P_SEND_REQUESTS + 8 * SLOTS
PEER_BYTES = P_RECEIVE_REQUESTS + 8 * SLOTS

SILENT, SAID_GOODBYE, MPI_FAILED, ENDED, NO_MEMORY = 1, 2, 3, 4, 5
"""Why a peer is gone."""

# -- a transfer -----------------------------------------------------------------------------------------------
(
    R_STATE,
    R_PEER,  # address of the peer's block
    R_OUTGOING,
    R_TAG,
    R_WORDS,  # address of the `Transfer`'s words
    R_ADDRESS,  # the region
    R_NBYTES,
    R_CHUNK,
    R_SLOTS,
    R_CHUNKS,
    R_POSTED,
    R_DONE,
    R_ASKED,  # when the peer last answered that what this one had sent is drained
    R_REQUESTS,
) = range(0, 8 * 14, 8)
ROW_BYTES = R_REQUESTS + 8 * AHEAD


@device
def word(address: int) -> int:
    """Return a word that only this thread writes, or whose order does not matter."""
    return load_relaxed(address, SYSTEM)


@device
def put_word(address: int, value: int) -> None:
    """Write such a word."""
    store_relaxed(address, value, SYSTEM)


@device
def raise_signal(g: int, address: int) -> None:
    """Do what `Signal.raise_` does."""
    fetch_add(address, 1, SYSTEM)
    call_foreign(word(g + G_SYSCALL), word(g + G_FUTEX), address, _WAKE, _EVERYBODY, 0, 0, 0)


@device
def run(g: int) -> int:
    """Move everything until Python has to act."""
    nap = SHORTEST
    idle = 0
    found = clock_ns()
    while True:
        seen = load_acquire(g + G_DOORBELL, SYSTEM)
        now = clock_ns()
        moved = 0
        under_way = 0
        for k in range(word(g + G_PEERS)):
            p = word(g + G_PEER_TABLE) + k * PEER_BYTES
            if word(p + P_GONE) == 0:
                came = fragments(g, p, now)
                moved += came
                if word(p + P_ENDED) != 0:
                    put_word(p + P_QUIET, word(p + P_QUIET) + 1 if came == 0 else 0)
                if word(p + P_DRAIN) != 0:
                    moved += drain(g, p)
                    under_way += 1
                under_way += word(p + P_SENDS) - word(p + P_SENT)
        for k in range(load_acquire(g + G_ROWS, SYSTEM)):
            r = word(g + G_ROW_TABLE) + k * ROW_BYTES
            if load_acquire(r + R_STATE, SYSTEM) == READY:
                moved += transfer(g, r, now)
                under_way += word(r + R_POSTED) - word(r + R_DONE)
        watched = now - word(g + G_WATCHED)
        if watched > 50 * MS:  # after a look at what there is
            watch(g, now, watched)
            put_word(g + G_WATCHED, now)
        if word(g + G_LOSSES) != 0:
            return LOSSES
        if load_acquire(g + G_CLOSE_BY, SYSTEM) != 0 and finished(g, now):
            return FINISHED
        idle += word(g + G_PEERS)
        if moved != 0:
            nap = SHORTEST
            idle = 0
            found = now
        elif idle >= LOOKS:
            idle = 0
            put_word(g + G_TIME, 0)
            longest = IN_FLIGHT if under_way > 0 else LONGEST
            nap = min(nap, longest)
            put_word(g + G_TIME + 8, nap)
            call_foreign(
                word(g + G_SYSCALL),
                word(g + G_FUTEX),
                g + G_DOORBELL,
                _WAIT,
                seen & 0xFFFFFFFF,
                g + G_TIME,
                0,
                0,
            )
            if now - found > HOT:
                nap += nap // 2


@device
def watch(g: int, now: int, passed: int) -> None:
    """Find peers that are silent, or whose process has ended and of whom nothing came since."""
    for k in range(word(g + G_PEERS)):
        p = word(g + G_PEER_TABLE) + k * PEER_BYTES
        if passed > 1000 * MS:  # this process itself stood still: what they said was not heard yet
            put_word(p + P_HEARD, word(p + P_HEARD) + passed)
        ended = load_acquire(p + P_ENDED, SYSTEM)
        if word(p + P_GONE) != 0:
            continue
        if now - word(p + P_HEARD) > word(g + G_SILENCE):
            lose(g, p, SILENT, now - word(p + P_HEARD))
        elif ended != 0 and now - max(ended, word(p + P_HEARD)) > LAST_WORDS:
            if word(p + P_QUIET) > QUIET:  # a thread that stood still has to look first
                lose(g, p, ENDED, 0)


@device
def lose(g: int, p: int, why: int, code: int) -> None:
    """Note that a peer is gone, for Python."""
    if word(p + P_GONE) == 0:
        put_word(p + P_CODE, code)
        put_word(p + P_GONE, why)
        put_word(g + G_LOSSES, word(g + G_LOSSES) + 1)


@device
def over(g: int, p: int, request: int) -> bool:
    """Tell whether a request has ended. If MPI fails, the peer is lost."""
    put_word(g + G_FLAG, 0)
    code = call_foreign(word(g + G_TEST), request, g + G_FLAG, g + G_STATUS, 0, 0, 0, 0) & 0xFFFFFFFF
    if code != 0:
        lose(g, p, MPI_FAILED, code)
        return False
    return (word(g + G_FLAG) & 0xFFFFFFFF) != 0


@device
def begin(g: int, p: int, function: int, address: int, nbytes: int, tag: int, request: int) -> bool:
    """Start a send or a receive. If MPI fails, the peer is lost."""
    code = (
        call_foreign(function, address, nbytes, word(g + G_BYTE), word(p + P_RANK), tag, word(g + G_COMM), request)
        & 0xFFFFFFFF
    )
    if code != 0:
        lose(g, p, MPI_FAILED, code)
    return code == 0


# -- fragments ------------------------------------------------------------------------------------------------


@device
def expect(g: int, p: int, slot: int) -> bool:
    """Expect a fragment in a slot."""
    return begin(
        g,
        p,
        word(g + G_IRECV),
        word(p + P_RECEIVE_BUFFERS) + slot * FRAGMENT,
        FRAGMENT,
        CONTROL,
        p + P_RECEIVE_REQUESTS + 8 * slot,
    )


@device
def fragments(g: int, p: int, now: int) -> int:
    """Receive and send what is there; return how much."""
    moved = 0
    while True:
        slot = rem(word(p + P_RECEIVED), SLOTS)
        if not over(g, p, p + P_RECEIVE_REQUESTS + 8 * slot):
            break
        moved += 1
        put_word(p + P_HEARD, now)
        put_word(p + P_RECEIVED, word(p + P_RECEIVED) + 1)
        fragment = word(p + P_RECEIVE_BUFFERS) + slot * FRAGMENT
        if word(fragment + 16) > word(p + P_ACKNOWLEDGED):
            store_release(p + P_ACKNOWLEDGED, word(fragment + 16), SYSTEM)
            raise_signal(g, g + G_ACKNOWLEDGED)
        take(g, p, fragment)
        if word(p + P_GONE) != 0:
            return moved
        kind = word(fragment)
        if kind == GOODBYE:
            lose(g, p, SAID_GOODBYE, 0)
            return moved
        if kind == DRAIN:
            put_word(p + P_DRAIN, word(fragment + 24))
        elif kind == DRAINED:
            put_word(word(p + P_ASKING) + R_ASKED, now)
            put_word(p + P_ASKING, 0)
        if not expect(g, p, slot):
            return moved
    while word(p + P_SENT) < word(p + P_SENDS):
        if not over(g, p, p + P_SEND_REQUESTS + 8 * rem(word(p + P_SENT), SLOTS)):
            break
        put_word(p + P_SENT, word(p + P_SENT) + 1)
    while word(p + P_GONE) == 0 and word(p + P_SENDS) - word(p + P_SENT) < SLOTS:
        due = load_relaxed(p + P_CONSUMED, SYSTEM) - word(p + P_REPORTED) >= WINDOW // 4
        silent = now - word(p + P_SAID) > word(g + G_SILENCE) // 8
        if word(p + P_GOODBYE) != 0:
            break
        kind = DRAIN if word(p + P_ASK) != 0 else DRAINED if word(p + P_ANSWER) != 0 else DATA
        nothing = word(p + P_OUT_HEAD) == load_acquire(p + P_OUT_TAIL, SYSTEM)
        if kind == DATA and not due and not silent and nothing:
            break
        say(g, p, kind, now)
        moved += 1
    return moved


@device
def say(g: int, p: int, kind: int, now: int) -> None:
    """Send a fragment. A goodbye is over once everything before it has arrived."""
    slot = rem(word(p + P_SENDS), SLOTS)
    fragment = word(p + P_SEND_BUFFERS) + slot * FRAGMENT
    consumed = load_relaxed(p + P_CONSUMED, SYSTEM)
    put_word(p + P_REPORTED, consumed)
    nbytes = fill(p, fragment)
    put_word(fragment, kind)
    put_word(fragment + 8, nbytes - HEADER)
    put_word(fragment + 16, consumed)
    put_word(fragment + 24, word(p + P_ASK))
    if kind == DRAIN:
        put_word(p + P_ASK, 0)
    elif kind == DRAINED:
        put_word(p + P_ANSWER, 0)
    put_word(p + P_SAID, now)
    function = word(g + G_ISSEND) if kind == GOODBYE else word(g + G_ISEND)
    if begin(g, p, function, fragment, nbytes, CONTROL, p + P_SEND_REQUESTS + 8 * slot):
        put_word(p + P_SENDS, word(p + P_SENDS) + 1)


@device
def fill(p: int, fragment: int) -> int:
    """Write messages that wait into a fragment; return the bytes used."""
    at = HEADER
    head = word(p + P_OUT_HEAD)
    tail = load_acquire(p + P_OUT_TAIL, SYSTEM)
    offset = word(p + P_OFFSET)
    while head < tail and at + 8 <= FRAGMENT:
        entry = word(p + P_OUT) + 16 * rem(head, word(p + P_OUT_ROOM))
        length = word(entry + 8)
        if offset < 0:
            copy_bytes(fragment + at, entry + 8, 8)  # not aligned
            at += 8
            offset = 0
        part = min(length - offset, FRAGMENT - at)
        copy_bytes(fragment + at, word(entry) + offset, part)
        at += part
        offset += part
        if offset < length:
            break
        head += 1
        offset = -1
    put_word(p + P_OFFSET, offset)
    store_release(p + P_OUT_HEAD, head, SYSTEM)
    return at


@device
def take(g: int, p: int, fragment: int) -> None:
    """Append a fragment to the messages of a peer; lose the peer if memory for a message cannot be allocated."""
    at = fragment + HEADER
    end = at + word(fragment + 8)
    arrived = 0
    while at < end:
        if word(p + P_FILLED) < 0:
            copy_bytes(p + P_LENGTH, at, 8)  # not aligned
            at += 8
            size = max(word(p + P_LENGTH), 1)
            message = call_foreign(word(g + G_MALLOC), size, 0, 0, 0, 0, 0, 0)
            if message == 0:
                lose(g, p, NO_MEMORY, size)
                break
            put_word(p + P_MESSAGE, message)
            put_word(p + P_FILLED, 0)
        filled = word(p + P_FILLED)
        length = word(p + P_LENGTH)
        part = min(length - filled, end - at)
        copy_bytes(word(p + P_MESSAGE) + filled, at, part)
        at += part
        filled += part
        if filled == length:
            tail = word(g + G_INBOX_TAIL)
            entry = word(g + G_INBOX) + 24 * rem(tail, word(g + G_INBOX_ROOM))
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
    """Take what the peer has sent for a copy that was given up, and drop it: only its receiver can end a send.

    MPI matches in order, so that what nobody has taken is what `MPI_Improbe` finds. The peer gives the tag to no other
    copy before it has the answer.
    """
    asked = word(p + P_DRAIN)
    chunk = asked & 0xFFFFFFFF
    scratch = word(p + P_SCRATCH)
    if scratch == 0:
        scratch = call_foreign(word(g + G_MALLOC), chunk, 0, 0, 0, 0, 0, 0)
        if scratch == 0:
            return 0  # later there may be room
        put_word(p + P_SCRATCH, scratch)
    elif not over(g, p, p + P_SCRATCH_REQUEST):
        return 0
    put_word(g + G_FLAG, 0)
    message = p + P_SCRATCH_MESSAGE
    code = (
        call_foreign(
            word(g + G_IMPROBE),
            word(p + P_RANK),
            asked >> 32,
            word(g + G_COMM),
            g + G_FLAG,
            message,
            g + G_STATUS,
            0,
        )
        & 0xFFFFFFFF
    )
    found = code == 0 and (word(g + G_FLAG) & 0xFFFFFFFF) != 0
    if found:
        code = (
            call_foreign(word(g + G_IMRECV), scratch, chunk, word(g + G_BYTE), message, p + P_SCRATCH_REQUEST, 0, 0)
            & 0xFFFFFFFF
        )
    if code != 0:
        lose(g, p, MPI_FAILED, code)
    elif not found:
        call_foreign(word(g + G_FREE), scratch, 0, 0, 0, 0, 0, 0)
        put_word(p + P_SCRATCH, 0)
        put_word(p + P_DRAIN, 0)
        put_word(p + P_ANSWER, 1)
    return 1


@device
def transfer(g: int, r: int, now: int) -> int:
    """See what is over of a transfer and start what may; return whether there was anything."""
    p = word(r + R_PEER)
    words = word(r + R_WORDS)
    if word(p + P_GONE) != 0:
        if word(p + P_TOLD) != 0:
            give_up(g, r)
        return 0
    before = word(r + R_DONE)
    done = before
    posted = word(r + R_POSTED)
    while done < posted and over(g, p, r + R_REQUESTS + 8 * rem(done, AHEAD)):
        done += 1
    put_word(r + R_DONE, done)
    outgoing = word(r + R_OUTGOING) != 0
    if load_acquire(words + 8 * bulk.STATUS, SYSTEM) == bulk.CANCELLED:
        if not outgoing:
            for k in range(done, posted):
                call_foreign(word(g + G_CANCEL), r + R_REQUESTS + 8 * rem(k, AHEAD), 0, 0, 0, 0, 0, 0)
        elif done < posted and word(p + P_ASKING) == 0 and now - word(r + R_ASKED) > AGAIN:
            put_word(p + P_ASKING, r)
            put_word(p + P_ASK, (word(r + R_TAG) << 32) | word(r + R_CHUNK))
            return 1
        if done == posted and word(p + P_ASKING) != r:  # else its tag may still be looked for
            let_go(g, r, 0)
        return done - before
    limit = min(load_acquire(words + 8 * bulk.ALLOWED, SYSTEM), done + AHEAD)
    function = word(g + G_ISSEND) if outgoing else word(g + G_IRECV)
    moved = done - before
    chunk = word(r + R_CHUNK)
    while posted < limit and word(p + P_GONE) == 0:
        slots = word(r + R_SLOTS)
        slot = posted if slots == 0 else rem(posted, slots)
        nbytes = min(chunk, word(r + R_NBYTES) - posted * chunk)
        address = word(r + R_ADDRESS) + slot * chunk
        if begin(g, p, function, address, nbytes, word(r + R_TAG), r + R_REQUESTS + 8 * rem(posted, AHEAD)):
            posted += 1
            moved += 1
    put_word(r + R_POSTED, posted)
    if done > before:
        store_release(words + 8 * bulk.COMPLETED, done, SYSTEM)
        if done == word(r + R_CHUNKS):
            let_go(g, r, bulk.DONE)
        else:
            raise_signal(g, words + 8 * bulk.CHANGES)
    return moved


@device
def give_up(g: int, r: int) -> None:
    """End a transfer whose peer is gone. Memory that MPI may still touch stays held for ever."""
    p = word(r + R_PEER)
    words = word(r + R_WORDS)
    done = word(r + R_DONE)
    posted = word(r + R_POSTED)
    while done < posted and over(g, p, r + R_REQUESTS + 8 * rem(done, AHEAD)):
        done += 1  # the peer's last words came first
    put_word(r + R_DONE, done)
    store_release(words + 8 * bulk.COMPLETED, done, SYSTEM)
    held = 0
    for k in range(done, posted):
        request = r + R_REQUESTS + 8 * rem(k, AHEAD)
        if word(r + R_OUTGOING) == 0:
            call_foreign(word(g + G_CANCEL), request, 0, 0, 0, 0, 0, 0)
        put_word(g + G_FLAG, 0)
        code = call_foreign(word(g + G_TEST), request, g + G_FLAG, g + G_STATUS, 0, 0, 0, 0) & 0xFFFFFFFF
        if code == 0 and (word(g + G_FLAG) & 0xFFFFFFFF) == 0:
            held += 1
    if done == word(r + R_CHUNKS):
        let_go(g, r, bulk.DONE)
    elif held == 0:
        let_go(g, r, bulk.LOST)
    else:
        if word(words + 8 * bulk.STATUS) == bulk.RUNNING:
            put_word(words + 8 * bulk.STATUS, bulk.LOST)
        raise_signal(g, words + 8 * bulk.CHANGES)
        store_release(r + R_STATE, ABANDONED, SYSTEM)


@device
def let_go(g: int, r: int, status: int) -> None:
    """End a transfer: nothing touches its memory any more."""
    words = word(r + R_WORDS)
    if word(words + 8 * bulk.STATUS) == bulk.RUNNING:
        put_word(words + 8 * bulk.STATUS, status)
    store_release(words + 8 * bulk.HELD, 0, SYSTEM)
    raise_signal(g, words + 8 * bulk.CHANGES)
    store_release(r + R_STATE, OVER, SYSTEM)
    store_release(g + G_ENDED, word(g + G_ENDED) + 1, SYSTEM)


@device
def finished(g: int, now: int) -> bool:
    """Go on with closing; tell whether nothing is left to do."""
    by = word(g + G_CLOSE_BY)
    late = now > by
    if not late:
        for k in range(word(g + G_ROWS)):
            if word(word(g + G_ROW_TABLE) + k * ROW_BYTES + R_STATE) == READY:
                return False
    left = 0
    for k in range(word(g + G_PEERS)):
        p = word(g + G_PEER_TABLE) + k * PEER_BYTES
        if word(p + P_GONE) != 0:
            continue
        under_way = word(p + P_SENDS) - word(p + P_SENT)
        if word(p + P_GOODBYE) == 0:
            if not late and word(p + P_OUT_HEAD) < load_acquire(p + P_OUT_TAIL, SYSTEM):
                left += 1
            elif under_way < SLOTS:
                say(g, p, GOODBYE, now)
                put_word(p + P_GOODBYE, 1)
                left += 1
            elif not late:
                left += 1
        elif under_way > 0 and not late:
            left += 1
    return left == 0 or now > by + 100 * MS
