"""`MpiTransport`: the processes of an MPI job."""

from __future__ import annotations

import atexit
import functools
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

from ..._settings import settings
from ...errors import AgentError, PoolVersionError
from ..several import several
from .bulk import Transfer
from .handshake import NBYTES, Hello
from .mpi_progress import GOODBYE_SAID, Progress, compiled_loop
from .peers import PeerTransport

_HELLO = 2


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
        silence = settings.pool_silence_seconds if silence is None else silence
        self._progress = Progress(self._comm, self.peers, silence, self._lose)
        self._arrived, self._acknowledged = self._progress.arrived, self._progress.acknowledged
        self._at_exit = functools.partial(_close_forgotten, weakref.ref(self))
        atexit.register(self._at_exit)  # MPI ends later, and then nobody may call it any more

    @property
    def intact(self) -> bool:
        """Whether every peer is there or said goodbye. If not, ``MPI_Finalize`` may hang: leave with ``os._exit``."""
        return all(reason == GOODBYE_SAID for reason in self.lost().values())

    def _post(self, peer: int, message: bytes) -> None:
        self._progress.post(peer, message)

    def _take(self) -> tuple[int, bytes] | None:
        self._progress.clear_up()
        return self._progress.take()

    def _received_by(self, peer: int) -> int:
        return self._progress.received_by(peer)

    def _consumed(self, peer: int, nbytes: int) -> None:
        self._progress.consumed(peer, nbytes)

    def _wake(self) -> None:
        self._progress.wake()

    def _start(self, transfer: Transfer, outgoing: bool) -> None:
        self._progress.start(transfer, outgoing)

    def lose(self, peer: int, reason: str) -> None:
        if not self._closed and peer not in self._reasons:
            self._progress.lose(peer, reason)

    def close(self, timeout: float = 5.0) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._progress.stop(timeout)
        self._arrived.raise_()
        self._acknowledged.raise_()

    def _lose(self, peer: int, reason: str) -> None:
        if self._record_loss(peer, reason):
            self._report_loss(peer)


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
