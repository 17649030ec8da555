"""`MpiTransport`: the processes of an MPI job."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from ...errors import AgentError, ArgumentError, ClosedError, PoolVersionError, StallError
from ..several import several
from .bulk import Region, Transfer
from .handshake import NBYTES, Hello
from .mpi_progress import GOODBYE_SAID, Progress, compiled_loop
from .peers import CLOSED, PeerTransport
from .transport import OVERHEAD, SEND_TIMEOUT, TAGS, WINDOW, Bytes

_HELLO = 2

SILENCE = 3.0
"""Seconds after which a process that says nothing is lost: with everything else, less than 5."""


class MpiTransport(PeerTransport):
    """Connects all processes of a communicator. Its constructor is collective; nothing is afterwards.

    Parameters
    ----------
    comm : mpi4py communicator, optional
        It is duplicated. Default: ``MPI.COMM_WORLD``.
    silence : float, optional
        Seconds after which a peer that says nothing is lost. Default: ``WARPWELL_POOL_TIMEOUT``, or 3.
    start : float
        Seconds that the others have to come.

    Raises
    ------
    PoolVersionError
        A peer runs other versions; raised on both sides.
    AgentError
        A peer did not come.
    PoolError
        This processor or MPI library lacks what the native loop calls; the message says what to do.
    """

    name = "mpi"

    def __init__(self, comm: Any = None, *, silence: float | None = None, start: float = 30.0) -> None:
        # When a peer dies in the middle of long messages over TCP, Open MPI 5.0 may go on with a "put" to it and crash.
        # This counts only where nobody has started MPI yet.
        os.environ.setdefault("OMPI_MCA_btl_tcp_flags", "send,inplace")
        from mpi4py import MPI

        compiled_loop()  # before anybody waits for this process
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        rank = int(self._comm.Get_rank())
        super().__init__(rank, [peer for peer in range(self._comm.Get_size()) if peer != rank])
        self.hellos = _exchange(self._comm, self.rank, self.peers, start)
        self._locks = {peer: threading.Lock() for peer in self.peers}
        self._posted = dict.fromkeys(self.peers, 0)
        silence = silence_from_environment() if silence is None else silence
        self._progress = Progress(self._comm, self.peers, silence, self._lose)
        self._at_exit = functools.partial(_close_forgotten, weakref.ref(self))
        atexit.register(self._at_exit)  # MPI ends later, and then nobody may call it any more

    @property
    def intact(self) -> bool:
        """Whether every peer is there or said goodbye. If not, ``MPI_Finalize`` may hang: leave with ``os._exit``."""
        return all(reason == GOODBYE_SAID for reason in self._losses.reasons().values())

    def send(self, peer: int, *parts: Bytes) -> None:
        """Send one message; see `Transport.send`."""
        message = b"".join(parts)
        counts = self._counts(peer)
        with self._locks[peer]:
            self._check(peer)
            if self._waiting(peer) >= WINDOW:
                counts["waits"] += 1
                self._wait_for_room(peer)
            self._progress.post(peer, message)
            self._posted[peer] += len(message) + OVERHEAD  # after it: Ctrl-C between them leaves more room, not less
            counts["messages_sent"] += 1
            counts["bytes_sent"] += len(message)

    def _waiting(self, peer: int) -> int:
        return self._posted[peer] - self._progress.received_by(peer)

    def _wait_for_room(self, peer: int) -> None:
        end = time.monotonic() + SEND_TIMEOUT
        while True:
            seen = self._progress.acknowledged.value
            self._check(peer)
            if self._waiting(peer) < WINDOW:
                return
            left = end - time.monotonic()
            if left <= 0:
                raise StallError(f"rank {peer} received nothing for {SEND_TIMEOUT:g} s", seconds=SEND_TIMEOUT)
            self._progress.acknowledged.sleep(seen, left)

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next message; see `Transport.receive`."""
        end = time.monotonic() + timeout
        while True:
            seen = self._progress.arrived.value
            if self._closed:
                raise ClosedError(CLOSED)
            self._progress.clear_up()
            if (got := self._progress.take()) is not None:
                break
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._progress.arrived.sleep(seen, left)
        peer, message = got
        self._count_received(peer, message)
        self._progress.consumed(peer, len(message) + OVERHEAD)
        return peer, message

    def put(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to send bulk data; see `Transport.put`."""
        return self._transfer(peer, tag, memory, True)

    def get(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to receive bulk data; see `Transport.get`."""
        return self._transfer(peer, tag, memory, False)

    def _transfer(self, peer: int, tag: int, memory: Region, outgoing: bool) -> Transfer:
        if not 0 <= tag < TAGS:
            raise ArgumentError(f"tags run from 0 to {TAGS - 1}, not to {tag}", name="tag")
        self._counts(peer)["transfers"] += 1
        self._check(peer)
        transfer = Transfer(peer, tag, memory, self._progress.wake)
        if transfer.chunks:
            self._progress.start(transfer, outgoing)
        return transfer

    def lose(self, peer: int, reason: str) -> None:
        """See `Transport.lose`."""
        if not self._closed and peer not in self._losses:
            self._progress.lose(peer, reason)

    def close(self, timeout: float = 5.0) -> None:
        """Stop; see `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._progress.stop(timeout)
        self._progress.arrived.raise_()
        self._progress.acknowledged.raise_()

    def _lose(self, peer: int, reason: str) -> None:
        if self._losses.add(peer, reason):
            self._losses.tell(peer)


def silence_from_environment() -> float:
    """Return the seconds in ``WARPWELL_POOL_TIMEOUT``, or the default.

    Raises
    ------
    ArgumentError
        It is no number, or not a positive one.
    """
    text = os.environ.get("WARPWELL_POOL_TIMEOUT", "")
    try:
        seconds = float(text) if text else SILENCE
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ArgumentError(
            f"WARPWELL_POOL_TIMEOUT is {text!r}: give seconds, more than 0", name="WARPWELL_POOL_TIMEOUT"
        )
    return seconds


def _close_forgotten(reference: weakref.ref[MpiTransport]) -> None:
    transport = reference()
    if transport is not None:
        transport.close(1.0)


def _exchange(comm: Any, rank: int, peers: Sequence[int], timeout: float) -> dict[int, Hello]:
    """Say hello to everybody and return what they said; refuse who cannot work with this process."""
    from mpi4py import MPI

    mine = Hello.mine()
    said = mine.encode()
    heard = {peer: bytearray(NBYTES) for peer in peers}
    waiting = {("from", peer): comm.Irecv([heard[peer], MPI.BYTE], peer, _HELLO) for peer in peers}
    waiting |= {("to", peer): comm.Isend([said, MPI.BYTE], peer, _HELLO) for peer in peers}
    end = time.monotonic() + timeout
    reasons: dict[int, str] = {}
    while waiting and time.monotonic() < end:
        for (way, peer), request in list(waiting.items()):
            try:
                if request.Test():
                    del waiting[way, peer]
            except MPI.Exception as error:
                reasons[peer] = error.Get_error_string()
                del waiting[way, peer]
        if reasons:
            break
        time.sleep(1e-3)
    wrong = []
    for peer in peers:
        if peer in reasons or ("from", peer) in waiting:
            continue
        try:
            mine.check(Hello.decode(bytes(heard[peer])), peer)
        except PoolVersionError as error:
            wrong.append(str(error))
    if wrong:
        raise PoolVersionError(several(wrong, "; "))
    missing = sorted({peer for _, peer in waiting} | set(reasons))
    if missing:
        raise AgentError(
            f"rank {rank}: no hello from rank {several([str(peer) for peer in missing])} within {timeout:g} s"
            + several([f"; rank {peer}: {reason}" for peer, reason in reasons.items()], ""),
            agent=f"rank {missing[0]}",
        )
    return {peer: Hello.decode(bytes(data)) for peer, data in heard.items()}
