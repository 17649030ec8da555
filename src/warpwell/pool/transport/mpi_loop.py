"""`run`: the native loop that moves everything of an `MpiTransport` without the interpreter lock.

Device code over the words of `mpi_words`; MPI is called by address. It does what `mpi_progress` does in Python, with
the same fragments, and returns where Python has to act: a peer was lost, or closing is over.
"""

from __future__ import annotations

from ...targets import (
    SYSTEM,
    call_foreign,
    clock_ns,
    copy_bytes,
    device,
    fetch_add,
    load_acquire,
    load_relaxed,
    rem,
    store_relaxed,
    store_release,
)
from . import bulk
from . import mpi_words as w
from .stream_framing import DATA, DRAIN, DRAINED, FRAGMENT, GOODBYE
from .transport import WINDOW

_HEADER = 32
CONTROL = 1
"""MPI tag of fragments."""

_WAIT, _WAKE, _EVERYBODY = 128, 129, 2**31 - 1

LOSSES, FINISHED = 1, 2
"""What `run` returns: `lost` peers to be told of (call it again then), or that it has ended."""


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
    call_foreign(word(g + w.G_SYSCALL), word(g + w.G_FUTEX), address, _WAKE, _EVERYBODY, 0, 0, 0)


@device
def run(g: int) -> int:
    """Move everything until Python has to act."""
    nap = w.SHORTEST
    idle = 0
    found = clock_ns()
    while True:
        seen = load_acquire(g + w.G_DOORBELL, SYSTEM)
        now = clock_ns()
        moved = 0
        under_way = 0
        for k in range(word(g + w.G_PEERS)):
            p = word(g + w.G_PEER_TABLE) + k * w.PEER_BYTES
            if word(p + w.P_GONE) == 0:
                came = fragments(g, p, now)
                moved += came
                if word(p + w.P_ENDED) != 0:
                    put_word(p + w.P_QUIET, word(p + w.P_QUIET) + 1 if came == 0 else 0)
                if word(p + w.P_DRAIN) != 0:
                    moved += drain(g, p)
                    under_way += 1
                under_way += word(p + w.P_SENDS) - word(p + w.P_SENT)
        for k in range(load_acquire(g + w.G_ROWS, SYSTEM)):
            r = word(g + w.G_ROW_TABLE) + k * w.ROW_BYTES
            if load_acquire(r + w.R_STATE, SYSTEM) == w.READY:
                moved += transfer(g, r, now)
                under_way += word(r + w.R_POSTED) - word(r + w.R_DONE)
        watched = now - word(g + w.G_WATCHED)
        if watched > 50 * w.MS:  # after a look at what there is
            watch(g, now, watched)
            put_word(g + w.G_WATCHED, now)
        if word(g + w.G_LOSSES) != 0:
            return LOSSES
        if load_acquire(g + w.G_CLOSE_BY, SYSTEM) != 0 and finished(g, now):
            return FINISHED
        idle += word(g + w.G_PEERS)
        if moved != 0:
            nap = w.SHORTEST
            idle = 0
            found = now
        elif idle >= w.LOOKS:
            idle = 0
            put_word(g + w.G_TIME, 0)
            longest = w.IN_FLIGHT if under_way > 0 else w.LONGEST
            nap = min(nap, longest)
            put_word(g + w.G_TIME + 8, nap)
            call_foreign(
                word(g + w.G_SYSCALL),
                word(g + w.G_FUTEX),
                g + w.G_DOORBELL,
                _WAIT,
                seen & 0xFFFFFFFF,
                g + w.G_TIME,
                0,
                0,
            )
            if now - found > w.HOT:
                nap += nap // 2


@device
def watch(g: int, now: int, passed: int) -> None:
    """Find peers that are silent, or whose process has ended and of whom nothing came since."""
    for k in range(word(g + w.G_PEERS)):
        p = word(g + w.G_PEER_TABLE) + k * w.PEER_BYTES
        if passed > 1000 * w.MS:  # this process itself stood still: what they said was not heard yet
            put_word(p + w.P_HEARD, word(p + w.P_HEARD) + passed)
        ended = load_acquire(p + w.P_ENDED, SYSTEM)
        if word(p + w.P_GONE) != 0:
            continue
        if now - word(p + w.P_HEARD) > word(g + w.G_SILENCE):
            lose(g, p, w.SILENT, now - word(p + w.P_HEARD))
        elif ended != 0 and now - max(ended, word(p + w.P_HEARD)) > w.LAST_WORDS:
            if word(p + w.P_QUIET) > w.QUIET:  # a thread that stood still has to look first
                lose(g, p, w.ENDED, 0)


@device
def lose(g: int, p: int, why: int, code: int) -> None:
    """Note that a peer is gone, for Python."""
    if word(p + w.P_GONE) == 0:
        put_word(p + w.P_CODE, code)
        put_word(p + w.P_GONE, why)
        put_word(g + w.G_LOSSES, word(g + w.G_LOSSES) + 1)


@device
def over(g: int, p: int, request: int) -> bool:
    """Tell whether a request has ended. If MPI fails, the peer is lost."""
    put_word(g + w.G_FLAG, 0)
    code = call_foreign(word(g + w.G_TEST), request, g + w.G_FLAG, g + w.G_STATUS, 0, 0, 0, 0) & 0xFFFFFFFF
    if code != 0:
        lose(g, p, w.MPI_FAILED, code)
        return False
    return (word(g + w.G_FLAG) & 0xFFFFFFFF) != 0


@device
def begin(g: int, p: int, function: int, address: int, nbytes: int, tag: int, request: int) -> bool:
    """Start a send or a receive. If MPI fails, the peer is lost."""
    code = (
        call_foreign(
            function, address, nbytes, word(g + w.G_BYTE), word(p + w.P_RANK), tag, word(g + w.G_COMM), request
        )
        & 0xFFFFFFFF
    )
    if code != 0:
        lose(g, p, w.MPI_FAILED, code)
    return code == 0


# -- fragments ------------------------------------------------------------------------------------------------


@device
def expect(g: int, p: int, slot: int) -> bool:
    """Expect a fragment in a slot."""
    return begin(
        g,
        p,
        word(g + w.G_IRECV),
        word(p + w.P_RECEIVE_BUFFERS) + slot * FRAGMENT,
        FRAGMENT,
        CONTROL,
        p + w.P_RECEIVE_REQUESTS + 8 * slot,
    )


@device
def fragments(g: int, p: int, now: int) -> int:
    """Receive and send what is there; return how much."""
    moved = 0
    while True:
        slot = rem(word(p + w.P_RECEIVED), w.SLOTS)
        if not over(g, p, p + w.P_RECEIVE_REQUESTS + 8 * slot):
            break
        moved += 1
        put_word(p + w.P_HEARD, now)
        put_word(p + w.P_RECEIVED, word(p + w.P_RECEIVED) + 1)
        fragment = word(p + w.P_RECEIVE_BUFFERS) + slot * FRAGMENT
        if word(fragment + 16) > word(p + w.P_ACKNOWLEDGED):
            store_release(p + w.P_ACKNOWLEDGED, word(fragment + 16), SYSTEM)
            raise_signal(g, g + w.G_ACKNOWLEDGED)
        take(g, p, fragment)
        kind = word(fragment)
        if kind == GOODBYE:
            lose(g, p, w.SAID_GOODBYE, 0)
            return moved
        if kind == DRAIN:
            put_word(p + w.P_DRAIN, word(fragment + 24))
        elif kind == DRAINED:
            put_word(word(p + w.P_ASKING) + w.R_ASKED, now)
            put_word(p + w.P_ASKING, 0)
        if not expect(g, p, slot):
            return moved
    while word(p + w.P_SENT) < word(p + w.P_SENDS):
        if not over(g, p, p + w.P_SEND_REQUESTS + 8 * rem(word(p + w.P_SENT), w.SLOTS)):
            break
        put_word(p + w.P_SENT, word(p + w.P_SENT) + 1)
    while word(p + w.P_GONE) == 0 and word(p + w.P_SENDS) - word(p + w.P_SENT) < w.SLOTS:
        due = load_relaxed(p + w.P_CONSUMED, SYSTEM) - word(p + w.P_REPORTED) >= WINDOW // 4
        silent = now - word(p + w.P_SAID) > word(g + w.G_SILENCE) // 8
        if word(p + w.P_GOODBYE) != 0:
            break
        kind = DRAIN if word(p + w.P_ASK) != 0 else DRAINED if word(p + w.P_ANSWER) != 0 else DATA
        nothing = word(p + w.P_OUT_HEAD) == load_acquire(p + w.P_OUT_TAIL, SYSTEM)
        if kind == DATA and not due and not silent and nothing:
            break
        say(g, p, kind, now)
        moved += 1
    return moved


@device
def say(g: int, p: int, kind: int, now: int) -> None:
    """Send a fragment. A goodbye is over once everything before it has arrived."""
    slot = rem(word(p + w.P_SENDS), w.SLOTS)
    fragment = word(p + w.P_SEND_BUFFERS) + slot * FRAGMENT
    consumed = load_relaxed(p + w.P_CONSUMED, SYSTEM)
    put_word(p + w.P_REPORTED, consumed)
    nbytes = fill(p, fragment)
    put_word(fragment, kind)
    put_word(fragment + 8, nbytes - _HEADER)
    put_word(fragment + 16, consumed)
    put_word(fragment + 24, word(p + w.P_ASK))
    if kind == DRAIN:
        put_word(p + w.P_ASK, 0)
    elif kind == DRAINED:
        put_word(p + w.P_ANSWER, 0)
    put_word(p + w.P_SAID, now)
    function = word(g + w.G_ISSEND) if kind == GOODBYE else word(g + w.G_ISEND)
    if begin(g, p, function, fragment, nbytes, CONTROL, p + w.P_SEND_REQUESTS + 8 * slot):
        put_word(p + w.P_SENDS, word(p + w.P_SENDS) + 1)


@device
def fill(p: int, fragment: int) -> int:
    """Write messages that wait into a fragment (see `Outgoing.fill`); return the bytes used."""
    at = _HEADER
    head = word(p + w.P_OUT_HEAD)
    tail = load_acquire(p + w.P_OUT_TAIL, SYSTEM)
    offset = word(p + w.P_OFFSET)
    while head < tail and at + 8 <= FRAGMENT:
        entry = word(p + w.P_OUT) + 16 * rem(head, word(p + w.P_OUT_ROOM))
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
    put_word(p + w.P_OFFSET, offset)
    store_release(p + w.P_OUT_HEAD, head, SYSTEM)
    return at


@device
def take(g: int, p: int, fragment: int) -> None:
    """Put the messages of a fragment together (see `Incoming.take`), and whole ones into the inbox."""
    at = fragment + _HEADER
    end = at + word(fragment + 8)
    arrived = 0
    while at < end:
        if word(p + w.P_FILLED) < 0:
            copy_bytes(p + w.P_LENGTH, at, 8)  # not aligned
            at += 8
            size = max(word(p + w.P_LENGTH), 1)
            put_word(p + w.P_MESSAGE, call_foreign(word(g + w.G_MALLOC), size, 0, 0, 0, 0, 0, 0))
            put_word(p + w.P_FILLED, 0)
        filled = word(p + w.P_FILLED)
        length = word(p + w.P_LENGTH)
        part = min(length - filled, end - at)
        copy_bytes(word(p + w.P_MESSAGE) + filled, at, part)
        at += part
        filled += part
        if filled == length:
            tail = word(g + w.G_INBOX_TAIL)
            entry = word(g + w.G_INBOX) + 24 * rem(tail, word(g + w.G_INBOX_ROOM))
            put_word(entry, word(p + w.P_RANK))
            put_word(entry + 8, word(p + w.P_MESSAGE))
            put_word(entry + 16, length)
            store_release(g + w.G_INBOX_TAIL, tail + 1, SYSTEM)
            arrived += 1
            filled = -1
        put_word(p + w.P_FILLED, filled)
    if arrived > 0:
        raise_signal(g, g + w.G_ARRIVED)


# -- transfers ------------------------------------------------------------------------------------------------


@device
def drain(g: int, p: int) -> int:
    """Take what the peer has sent for a copy that was given up, and drop it: only its receiver can end a send.

    MPI matches in order, so that what nobody has taken is what `MPI_Improbe` finds. The peer gives the tag to no other
    copy before it has the answer.
    """
    asked = word(p + w.P_DRAIN)
    chunk = asked & 0xFFFFFFFF
    scratch = word(p + w.P_SCRATCH)
    if scratch == 0:
        scratch = call_foreign(word(g + w.G_MALLOC), chunk, 0, 0, 0, 0, 0, 0)
        if scratch == 0:
            return 0  # later there may be room
        put_word(p + w.P_SCRATCH, scratch)
    elif not over(g, p, p + w.P_SCRATCH_REQUEST):
        return 0
    put_word(g + w.G_FLAG, 0)
    message = p + w.P_SCRATCH_MESSAGE
    code = (
        call_foreign(
            word(g + w.G_IMPROBE),
            word(p + w.P_RANK),
            asked >> 32,
            word(g + w.G_COMM),
            g + w.G_FLAG,
            message,
            g + w.G_STATUS,
            0,
        )
        & 0xFFFFFFFF
    )
    found = code == 0 and (word(g + w.G_FLAG) & 0xFFFFFFFF) != 0
    if found:
        code = (
            call_foreign(
                word(g + w.G_IMRECV), scratch, chunk, word(g + w.G_BYTE), message, p + w.P_SCRATCH_REQUEST, 0, 0
            )
            & 0xFFFFFFFF
        )
    if code != 0:
        lose(g, p, w.MPI_FAILED, code)
    elif not found:
        call_foreign(word(g + w.G_FREE), scratch, 0, 0, 0, 0, 0, 0)
        put_word(p + w.P_SCRATCH, 0)
        put_word(p + w.P_DRAIN, 0)
        put_word(p + w.P_ANSWER, 1)
    return 1


@device
def transfer(g: int, r: int, now: int) -> int:
    """See what is over of a transfer and start what may; return whether there was anything."""
    p = word(r + w.R_PEER)
    words = word(r + w.R_WORDS)
    if word(p + w.P_GONE) != 0:
        if word(p + w.P_TOLD) != 0:
            give_up(g, r)
        return 0
    before = word(r + w.R_DONE)
    done = before
    posted = word(r + w.R_POSTED)
    while done < posted and over(g, p, r + w.R_REQUESTS + 8 * rem(done, w.AHEAD)):
        done += 1
    put_word(r + w.R_DONE, done)
    outgoing = word(r + w.R_OUTGOING) != 0
    if load_acquire(words + 8 * bulk.STATUS, SYSTEM) == bulk.CANCELLED:
        if not outgoing:
            for k in range(done, posted):
                call_foreign(word(g + w.G_CANCEL), r + w.R_REQUESTS + 8 * rem(k, w.AHEAD), 0, 0, 0, 0, 0, 0)
        elif done < posted and word(p + w.P_ASKING) == 0 and now - word(r + w.R_ASKED) > w.AGAIN:
            put_word(p + w.P_ASKING, r)
            put_word(p + w.P_ASK, (word(r + w.R_TAG) << 32) | word(r + w.R_CHUNK))
            return 1
        if done == posted and word(p + w.P_ASKING) != r:  # else its tag may still be looked for
            let_go(g, r, 0)
        return done - before
    limit = min(load_acquire(words + 8 * bulk.ALLOWED, SYSTEM), done + w.AHEAD)
    function = word(g + w.G_ISSEND) if outgoing else word(g + w.G_IRECV)
    moved = done - before
    chunk = word(r + w.R_CHUNK)
    while posted < limit and word(p + w.P_GONE) == 0:
        slots = word(r + w.R_SLOTS)
        slot = posted if slots == 0 else rem(posted, slots)
        nbytes = min(chunk, word(r + w.R_NBYTES) - posted * chunk)
        address = word(r + w.R_ADDRESS) + slot * chunk
        if begin(g, p, function, address, nbytes, word(r + w.R_TAG), r + w.R_REQUESTS + 8 * rem(posted, w.AHEAD)):
            posted += 1
            moved += 1
    put_word(r + w.R_POSTED, posted)
    if done > before:
        store_release(words + 8 * bulk.COMPLETED, done, SYSTEM)
        if done == word(r + w.R_CHUNKS):
            let_go(g, r, bulk.DONE)
        else:
            raise_signal(g, words + 8 * bulk.CHANGES)
    return moved


@device
def give_up(g: int, r: int) -> None:
    """End a transfer whose peer is gone. Memory that MPI may still touch stays held for ever."""
    p = word(r + w.R_PEER)
    words = word(r + w.R_WORDS)
    done = word(r + w.R_DONE)
    posted = word(r + w.R_POSTED)
    while done < posted and over(g, p, r + w.R_REQUESTS + 8 * rem(done, w.AHEAD)):
        done += 1  # the peer's last words came first
    put_word(r + w.R_DONE, done)
    store_release(words + 8 * bulk.COMPLETED, done, SYSTEM)
    held = 0
    for k in range(done, posted):
        request = r + w.R_REQUESTS + 8 * rem(k, w.AHEAD)
        if word(r + w.R_OUTGOING) == 0:
            call_foreign(word(g + w.G_CANCEL), request, 0, 0, 0, 0, 0, 0)
        put_word(g + w.G_FLAG, 0)
        code = call_foreign(word(g + w.G_TEST), request, g + w.G_FLAG, g + w.G_STATUS, 0, 0, 0, 0) & 0xFFFFFFFF
        if code == 0 and (word(g + w.G_FLAG) & 0xFFFFFFFF) == 0:
            held += 1
    if done == word(r + w.R_CHUNKS):
        let_go(g, r, bulk.DONE)
    elif held == 0:
        let_go(g, r, bulk.LOST)
    else:
        if word(words + 8 * bulk.STATUS) == bulk.RUNNING:
            put_word(words + 8 * bulk.STATUS, bulk.LOST)
        raise_signal(g, words + 8 * bulk.CHANGES)
        store_release(r + w.R_STATE, w.ABANDONED, SYSTEM)


@device
def let_go(g: int, r: int, status: int) -> None:
    """End a transfer: nothing touches its memory any more."""
    words = word(r + w.R_WORDS)
    if word(words + 8 * bulk.STATUS) == bulk.RUNNING:
        put_word(words + 8 * bulk.STATUS, status)
    store_release(words + 8 * bulk.HELD, 0, SYSTEM)
    raise_signal(g, words + 8 * bulk.CHANGES)
    store_release(r + w.R_STATE, w.OVER, SYSTEM)
    store_release(g + w.G_ENDED, word(g + w.G_ENDED) + 1, SYSTEM)


@device
def finished(g: int, now: int) -> bool:
    """Go on with closing; tell whether nothing is left to do."""
    by = word(g + w.G_CLOSE_BY)
    late = now > by
    if not late:
        for k in range(word(g + w.G_ROWS)):
            if word(word(g + w.G_ROW_TABLE) + k * w.ROW_BYTES + w.R_STATE) == w.READY:
                return False
    left = 0
    for k in range(word(g + w.G_PEERS)):
        p = word(g + w.G_PEER_TABLE) + k * w.PEER_BYTES
        if word(p + w.P_GONE) != 0:
            continue
        under_way = word(p + w.P_SENDS) - word(p + w.P_SENT)
        if word(p + w.P_GOODBYE) == 0:
            if not late and word(p + w.P_OUT_HEAD) < load_acquire(p + w.P_OUT_TAIL, SYSTEM):
                left += 1
            elif under_way < w.SLOTS:
                say(g, p, GOODBYE, now)
                put_word(p + w.P_GOODBYE, 1)
                left += 1
            elif not late:
                left += 1
        elif under_way > 0 and not late:
            left += 1
    return left == 0 or now > by + 100 * w.MS
