"""`Progress`: the thread that moves everything of an `MpiTransport`, in plain Python.

It alone calls MPI after the start, and names the peer in each call: after a failure MPI takes neither ANY_SOURCE nor
collectives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .bulk import CANCELLED, Transfer
from .region import Region
from .signal import Signal, short_naps
from .stream_framing import DATA, DRAIN, DRAINED, FRAGMENT, GOODBYE, HEADER, Incoming, Outgoing
from .transport import WINDOW

CONTROL, FIRST_BULK = 1, 16
"""MPI tags: of fragments, and the first one of bulk data."""

GOODBYE_SAID = "it closed its transport"
"""The reason for which a peer is lost that meant to go."""

SLOTS = 4
"""Fragments to and from a peer that are under way at once."""

AHEAD = 4
"""Chunks of a transfer that are under way at once. Each waits for its receiver: memory in flight stays bounded."""

AGAIN = 2e-3
"""Seconds after which a peer is asked again to take what is left of a copy that was given up."""

LAST_WORDS, QUIET = 0.3, 16
"""Seconds, and looks, without a word after which a peer is lost whose process has ended: a packet may be late."""

SHORTEST, LONGEST, IN_FLIGHT = 20e-6, 500e-6, 100e-6
"""Seconds of naps: the first, the longest, and the longest while something is under way."""


class Progress:
    """Owns the requests of all peers.

    Parameters
    ----------
    comm : mpi4py communicator
        This thread's alone.
    peers : iterable of int
    silence : float
        Seconds after which a peer that says nothing is lost.
    lost : callable
        ``lost(peer, reason)``, called from the thread.
    """

    def __init__(self, comm: Any, peers: Any, silence: float, lost: Callable[[int, str], None]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._silence = silence
        self._lost = lost
        self._doorbell = Signal()
        self._inbox: deque[tuple[int, bytes]] = deque()
        self.arrived = Signal()
        self.acknowledged = Signal()
        now = time.monotonic()
        self._peers = {peer: _Peer(MPI, comm, peer, now) for peer in peers}
        self._comm = comm
        upper = comm.Get_attr(MPI.TAG_UB) or 32767
        self._tags = min(int(upper) + 1, 1 << 30) - FIRST_BULK
        self._new: deque[_Motion] = deque()
        self._motions: list[_Motion] = []
        self._abandoned: list[Any] = []  # memory that MPI may still touch
        self._closing_until = 0.0
        self._thread = threading.Thread(target=self._run, name="warpwell mpi transport", daemon=True)
        self._thread.start()

    # -- called by the transport's users ----------------------------------------------------------------------

    def wake(self) -> None:
        """Let the thread look now."""
        self._doorbell.raise_()

    def post(self, peer: int, message: bytes) -> None:
        """Send a message."""
        self._peers[peer].outgoing.append(message)
        self.wake()

    def clear_up(self) -> None:
        """Let go of the memory of transfers that are over: the thread does that itself."""

    def take(self) -> tuple[int, bytes] | None:
        """Return the next message that came, if there is one. (One thread.)"""
        return self._inbox.popleft() if self._inbox else None

    def received_by(self, peer: int) -> int:
        """Return how many bytes of messages (and their overhead) `peer` has received of this process."""
        return self._peers[peer].acknowledged

    def consumed(self, peer: int, nbytes: int) -> None:
        """Tell that so many more bytes of messages of `peer` were received here."""
        state = self._peers[peer]
        state.consumed += nbytes
        if state.due():
            self.wake()

    def start(self, transfer: Transfer, outgoing: bool) -> None:
        """Take a transfer over."""
        self._new.append(_Motion(transfer, outgoing, self._comm, FIRST_BULK + transfer.tag % self._tags))
        self.wake()

    def lose(self, peer: int, reason: str) -> None:
        """Take a peer for lost as soon as nothing more comes of it."""
        state = self._peers[peer]
        state.ended_at, state.ended = time.monotonic(), reason

    def stop(self, timeout: float) -> None:
        """Send what waits, let transfers end, say goodbye, all within `timeout` seconds, and end the thread."""
        self._closing_until = time.monotonic() + timeout
        self.wake()
        self._thread.join(timeout + 5.0)

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._move_all()
        except BaseException as error:  # nothing moves any more, and everybody who waits has to hear of it
            for state in self._peers.values():
                state.gone = state.gone or f"the transport failed: {type(error).__name__}: {error}"
                self._lost(state.peer, state.gone)
            for motion in [*self._motions, *self._new]:
                motion.transfer.fail(f"the transport failed: {error}", keep=motion)
            self.acknowledged.raise_()
            self.arrived.raise_()
            raise

    def _move_all(self) -> None:
        short_naps()
        nap, watched = SHORTEST, time.monotonic()
        while True:
            seen = self._doorbell.value
            now = time.monotonic()
            moved = self._step(now)
            if now - watched > 0.05:  # after a look at what there is
                self._watch(now, now - watched)
                watched = now
            if self._closing_until and self._finished(now):
                break
            if moved:
                nap = SHORTEST
                continue
            busy = any(m.requests for m in self._motions) or any(p.sent or p.drain for p in self._peers.values())
            self._doorbell.sleep(seen, min(nap, IN_FLIGHT) if busy else nap)
            nap = min(nap * 1.5, LONGEST)
        for state in self._peers.values():
            if not state.gone:
                self._abandon(state.end())
        for motion in self._motions:
            self._give_up(motion, "this transport was closed")

    def _step(self, now: float) -> bool:
        moved = False
        for state in self._peers.values():
            if state.gone:
                continue
            try:
                came = self._fragments(state, now)
                state.quiet = state.quiet + 1 if state.ended and not came else 0
                moved = came or moved
                if not state.gone:
                    moved = state.take_drained() or moved
            except self._mpi.Exception as error:
                self._lose(state, _said(error))
        while self._new:
            self._motions.append(self._new.popleft())
        for motion in self._motions:
            state = self._peers[motion.transfer.peer]
            try:
                if not state.gone:
                    moved = motion.step(state, now) or moved
            except self._mpi.Exception as error:
                self._lose(state, _said(error))
            if state.gone:  # found by this one or by an earlier one
                self._give_up(motion, state.gone)
        self._motions = [motion for motion in self._motions if not motion.over()]
        return moved

    def _fragments(self, state: _Peer, now: float) -> bool:
        moved = False
        while (fragment := state.received()) is not None:
            moved = True
            state.heard = now
            kind, acknowledged, messages = state.incoming.take(fragment)
            if acknowledged > state.acknowledged:
                state.acknowledged = acknowledged
                self.acknowledged.raise_()
            for message in messages:
                self._inbox.append((state.peer, message))
            if messages:
                self.arrived.raise_()
            if kind == GOODBYE:
                self._lose(state, GOODBYE_SAID)
                return True
            if kind == DRAIN:
                drain = HEADER.unpack_from(fragment)[3]
                state.drain = _Drain(self._comm, state.peer, drain >> 32, drain & 0xFFFFFFFF)
            elif kind == DRAINED:
                assert state.asking is not None
                state.asking.asked, state.asking = now, None
            state.post_receive()
        state.collect_sent()
        while state.free and (following := state.next_kind(now, self._silence)) is not None:
            state.send(following, now)
            moved = True
        return moved

    def _watch(self, now: float, passed: float) -> None:
        """Find those who are silent."""
        for state in self._peers.values():
            if passed > 1.0:  # this process itself stood still: what they said meanwhile was not heard yet
                state.heard += passed
            if not state.gone and now - state.heard > self._silence:
                self._lose(state, f"it has not answered for {now - state.heard:.1f} s")
            last = max(state.heard, state.ended_at)
            if not state.gone and state.ended and now - last > LAST_WORDS and state.quiet > QUIET:
                self._lose(state, state.ended)

    def _lose(self, state: _Peer, reason: str) -> None:
        if state.gone:
            return
        state.gone = reason
        self._abandon(state.end())
        self._lost(state.peer, reason)
        self.acknowledged.raise_()
        self.arrived.raise_()

    def _give_up(self, motion: _Motion, reason: str) -> None:
        with contextlib.suppress(self._mpi.Exception):
            motion.collect()  # the peer's last words came before these were looked at
        if motion.transfer.done:
            return
        kept = motion.end()
        self._abandon(kept)
        motion.transfer.fail(reason, keep=kept or None)

    def _abandon(self, kept: list[Any]) -> None:
        self._abandoned += kept

    def _finished(self, now: float) -> bool:
        """Go on with closing; return whether nothing is left to do."""
        late = now > self._closing_until
        if self._motions and not late:
            return False
        left = False
        for state in self._peers.values():
            if state.gone:
                continue
            if state.goodbye is None:
                if (state.outgoing or not state.free) and not late:
                    left = True
                elif state.free:
                    with contextlib.suppress(self._mpi.Exception):
                        state.send(GOODBYE, now)
                    left = True
            elif state.sent and not late:
                left = True
        return not left or now > self._closing_until + 0.1


class _Peer:
    """Fragments to and from one peer."""

    def __init__(self, mpi: Any, comm: Any, peer: int, now: float) -> None:
        self._mpi = mpi
        self._comm = comm
        self.peer = peer
        self.outgoing, self.incoming = Outgoing(), Incoming()
        self.acknowledged = 0  # by the peer
        self.consumed = self._reported = 0  # here, and what the peer knows of it
        self.heard = self.told = now
        self.gone = self.ended = ""
        self.ended_at, self.quiet = 0.0, 0  # when its process had ended, and looks since then that found nothing
        self.goodbye: Any = None
        self.ask = 0  # what it is to be asked to drain, and for which transfer it was asked and has not answered
        self.asking: _Motion | None = None
        self.drain: _Drain | None = None  # what it has asked for, and whether it is to be told that this is done
        self.answer = False
        self.free = [bytearray(FRAGMENT) for _ in range(SLOTS)]
        self.sent: deque[tuple[Any, bytearray]] = deque()
        self._expected: deque[tuple[Any, bytearray]] = deque()
        for _ in range(SLOTS):
            self._receive_into(bytearray(FRAGMENT))
        self._spare: bytearray | None = None

    def due(self) -> bool:
        """Whether the peer should hear soon what was received, since it may wait for that."""
        return self.consumed - self._reported >= WINDOW // 4

    def next_kind(self, now: float, silence: float) -> int | None:
        """Return the kind of the fragment that should go now, if one should."""
        if self.ask:
            return DRAIN
        if self.answer:
            return DRAINED
        return DATA if self.outgoing or self.due() or now - self.told > silence / 8 else None

    def take_drained(self) -> bool:
        """Go on with what the peer has asked to be taken; return whether there was anything."""
        if self.drain is None or not self.drain.step():
            return False
        if self.drain.over:
            self.drain, self.answer = None, True
        return True

    def received(self) -> memoryview | None:
        """Return the next fragment, if it is there; `post_receive` gives its memory back."""
        request, buffer = self._expected[0]
        if not request.Test():
            return None
        self._expected.popleft()
        self._spare = buffer
        return memoryview(buffer)

    def post_receive(self) -> None:
        """Expect one more fragment."""
        assert self._spare is not None
        self._receive_into(self._spare)

    def _receive_into(self, buffer: bytearray) -> None:
        self._expected.append((self._comm.Irecv([buffer, self._mpi.BYTE], self.peer, CONTROL), buffer))

    def collect_sent(self) -> None:
        """Take back what has been sent."""
        while self.sent and self.sent[0][0].Test():
            self.free.append(self.sent.popleft()[1])

    def send(self, kind: int, now: float) -> None:
        """Send a fragment. A goodbye is over once everything before it has arrived."""
        buffer = self.free.pop()
        self._reported = consumed = self.consumed
        nbytes = self.outgoing.fill(memoryview(buffer), kind, consumed, self.ask)
        if kind == DRAIN:
            self.ask = 0
        elif kind == DRAINED:
            self.answer = False
        start = self._comm.Issend if kind == GOODBYE else self._comm.Isend
        request = start([buffer, nbytes, self._mpi.BYTE], self.peer, CONTROL)
        self.sent.append((request, buffer))
        self.told = now
        if kind == GOODBYE:
            self.goodbye = request

    def end(self) -> list[Any]:
        """Let go of all requests; return what MPI may still touch."""
        kept: list[Any] = []
        for request, buffer in (*self.sent, *self._expected):
            kept += _let_go(request, buffer, self._mpi, cancel=(request, buffer) in self._expected)
        return kept if self.drain is None else [*kept, self.drain]


class _Drain:
    """Takes what a peer has sent for a copy that was given up, and drops it: only its receiver can end a send.

    MPI matches in order, so that what nobody has taken is what `Improbe` finds. The peer gives the tag to no other
    copy before it has the answer.
    """

    def __init__(self, comm: Any, peer: int, tag: int, chunk: int) -> None:
        self._comm, self._peer, self._tag, self._chunk = comm, peer, tag, chunk
        self._under_way: tuple[Any, Any] | None = None  # a request, and its memory
        self.over = False

    def step(self) -> bool:
        """Take one chunk more, or find that there is none; return whether there was anything."""
        if self._under_way is not None and not self._under_way[0].Test():
            return False
        try:
            scratch = np.empty(self._chunk, np.uint8)
        except MemoryError:
            return False  # later there may be room
        self._under_way = None
        message = self._comm.Improbe(self._peer, self._tag)
        if message is None:
            self.over = True
        else:
            self._under_way = message.Irecv(scratch), scratch
        return True


class _Motion:
    """A transfer under way, and its requests."""

    def __init__(self, transfer: Transfer, outgoing: bool, comm: Any, tag: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.transfer = transfer
        self._outgoing = outgoing
        # A synchronous send is over once its receiver has begun, so chunks never pile up on the other side.
        self._start = comm.Issend if outgoing else comm.Irecv
        self._tag = tag
        self._region = transfer.region
        self._chunk = transfer.region.chunk if transfer.region is not None else 0
        self._posted = 0
        self._ended = False
        self.asked = 0.0  # when the peer last answered that what this one had sent is drained
        self.requests: deque[Any] = deque()

    def step(self, peer: _Peer, now: float) -> bool:
        """See what is over and start what may; return whether there was anything."""
        collected = self.collect()
        if self.transfer.status == CANCELLED:
            if not self._outgoing:
                for request in self.requests:
                    request.Cancel()
            elif self.requests and peer.asking is None and now - self.asked > AGAIN:
                peer.asking = self
                peer.ask = self._tag << 32 | self._chunk
                return True
            if not self.requests and peer.asking is not self:  # else its tag may still be looked for
                self.transfer.finish(CANCELLED)
            return collected
        region = self._region
        assert isinstance(region, Region)
        limit = min(self.transfer.allowed, self._posted - len(self.requests) + AHEAD)
        moved = collected or self._posted < limit
        while self._posted < limit:
            address, nbytes = region.place(self._posted)
            memory = self._mpi.buffer.fromaddress(address, nbytes)
            self.requests.append(self._start([memory, self._mpi.BYTE], self.transfer.peer, self._tag))
            self._posted += 1
        return moved

    def collect(self) -> bool:
        """See what is over; return whether there was anything."""
        before = len(self.requests)
        while self.requests and self.requests[0].Test():
            self.requests.popleft()
        if len(self.requests) < before and self.transfer.status != CANCELLED:
            self.transfer.advance(self._posted - len(self.requests))
        return len(self.requests) < before

    def over(self) -> bool:
        """Whether there is nothing left to do."""
        return self.transfer.done or self._ended

    def end(self) -> list[Any]:
        """Let go of all requests; return what MPI may still touch."""
        self._ended = True
        kept: list[Any] = []
        for request in self.requests:
            kept += _let_go(request, self._region, self._mpi, cancel=not self._outgoing)
        return kept


def _let_go(request: Any, memory: Any, mpi: Any, *, cancel: bool) -> list[Any]:
    """Cancel a request where that is possible; return it with its memory if MPI may still touch that."""
    try:
        if cancel:
            request.Cancel()
        if request.Test():
            return []
    except mpi.Exception:
        return []  # it has failed, and so is over
    return [(request, memory)]


def _said(error: Any) -> str:
    return f"MPI says: {error.Get_error_string()}"
