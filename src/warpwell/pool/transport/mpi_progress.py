"""`Progress`: the thread that moves everything of an `MpiTransport`, in native code without the interpreter lock.

A main thread that is busy in Python does not slow it. It alone calls MPI after the start, and names the peer in each
call: after a failure MPI takes neither ANY_SOURCE nor collectives.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..._check import extra
from ..._os import clock
from ...errors import PoolError
from ...targets import native
from . import mpi_loop as loop
from .bulk import RUNNING, Transfer
from .signal import FUTEX, Signal, short_naps
from .table import TransferTable
from .transport import OVERHEAD, WINDOW

GOODBYE_SAID = "it closed its transport"
"""The reason for which a peer is lost that meant to go."""

_MESSAGES = 2 * (WINDOW // OVERHEAD)  # more than a window lets wait
_run_loop = native(loop.run)
_libc = ctypes.PyDLL(None)  # quick functions: they keep the interpreter lock
_libc.free.argtypes = [ctypes.c_void_p]


def compiled_loop() -> Any:
    """Return the loop, compiled or out of the on-disk cache: seconds the first time. Do it before peers wait.

    Raises
    ------
    PoolError
        The processor's number of the futex system call is not known.
    """
    if not FUTEX:
        raise PoolError(
            f"agents over MPI need the system call futex, whose number on {platform.machine()} is not known: use this "
            f"machine's devices (run the program with python), or add the number to warpwell/pool/transport/signal.py"
        )
    return _run_loop.load()


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

    Raises
    ------
    PoolError
        The MPI library lacks a function that the loop calls.
    """

    def __init__(self, comm: Any, peers: Iterable[int], silence: float, lost: Callable[[int, str], None]) -> None:
        from mpi4py import MPI

        compiled = compiled_loop()
        self._mpi = MPI
        self._lost = lost
        self._comm = comm
        self._ranks = tuple(peers)
        self._global = np.zeros(loop.GLOBAL_WORDS, np.int64)
        self._g = int(self._global.ctypes.data)
        self._peers = np.zeros((len(self._ranks), loop.PEER_BYTES // 8), np.int64)
        self._table = TransferTable(loop.ROW_BYTES, self._global[loop.G_ROWS // 8 :][:1])
        self._inbox = np.zeros((max(len(self._ranks), 1) * _MESSAGES, 3), np.int64)
        self._outboxes = np.zeros((len(self._ranks), _MESSAGES, 2), np.int64)
        self._buffers = np.zeros((len(self._ranks), 2, loop.SLOTS, loop.FRAGMENT), np.uint8)
        self._peer = dict(zip(self._ranks, self._peers, strict=True))
        self._outbox = dict(zip(self._ranks, self._outboxes, strict=True))
        self._kept: dict[int, deque[bytes]] = {peer: deque() for peer in self._ranks}
        self._freed = dict.fromkeys(self._ranks, 0)
        self._ended: dict[int, str] = {}
        self._doorbell = Signal(self._g + loop.G_DOORBELL)
        self.arrived = Signal(self._g + loop.G_ARRIVED)
        self.acknowledged = Signal(self._g + loop.G_ACKNOWLEDGED)
        upper = comm.Get_attr(MPI.TAG_UB) or 32767
        self._tags = min(int(upper) + 1, 1 << 30) - loop.FIRST_BULK
        self._cleared = 0  # how many had ended when somebody last cleared up
        self._set_up(silence)
        self._thread = threading.Thread(target=self._run, args=(compiled,), name="warpwell mpi transport", daemon=True)
        self._thread.start()

    def _set_up(self, silence: float) -> None:
        mpi, g = self._mpi, self._global
        functions = {
            loop.G_ISEND: _function(mpi, "MPI_Isend"),
            loop.G_ISSEND: _function(mpi, "MPI_Issend"),
            loop.G_IRECV: _function(mpi, "MPI_Irecv"),
            loop.G_TEST: _function(mpi, "MPI_Test"),
            loop.G_CANCEL: _function(mpi, "MPI_Cancel"),
            loop.G_IMPROBE: _function(mpi, "MPI_Improbe"),
            loop.G_IMRECV: _function(mpi, "MPI_Imrecv"),
            loop.G_MALLOC: _libc.malloc,
            loop.G_FREE: _libc.free,
            loop.G_SYSCALL: _libc.syscall,
        }
        for place, function in functions.items():
            g[place // 8] = ctypes.cast(function, ctypes.c_void_p).value or 0
        g[loop.G_FUTEX // 8] = FUTEX
        g[loop.G_COMM // 8] = _handle(mpi, self._comm)
        g[loop.G_BYTE // 8] = _handle(mpi, mpi.BYTE)
        g[loop.G_SILENCE // 8] = int(silence * 1e9)
        g[loop.G_PEERS // 8] = len(self._ranks)
        g[loop.G_PEER_TABLE // 8] = self._peers.ctypes.data
        g[loop.G_ROW_TABLE // 8] = self._table.address
        g[loop.G_INBOX // 8] = self._inbox.ctypes.data
        g[loop.G_INBOX_ROOM // 8] = len(self._inbox)
        now = clock.monotonic_ns()
        g[loop.G_WATCHED // 8] = now
        for k, rank in enumerate(self._ranks):
            p = self._peers[k]
            p[loop.P_RANK // 8] = rank
            p[[loop.P_HEARD // 8, loop.P_SAID // 8]] = now
            p[loop.P_OUT // 8] = self._outboxes[k].ctypes.data
            p[loop.P_OUT_ROOM // 8] = _MESSAGES
            p[[loop.P_OFFSET // 8, loop.P_FILLED // 8]] = -1
            p[loop.P_SEND_BUFFERS // 8] = self._buffers[k, 0].ctypes.data
            p[loop.P_RECEIVE_BUFFERS // 8] = self._buffers[k, 1].ctypes.data
            for slot in range(loop.SLOTS):
                request = self._comm.Irecv([self._buffers[k, 1, slot], mpi.BYTE], rank, loop.CONTROL)
                p[loop.P_RECEIVE_REQUESTS // 8 + slot] = _handle(mpi, request)

    # -- called by the transport's users ----------------------------------------------------------------------

    def wake(self) -> None:
        """Let the thread look now."""
        self._doorbell.raise_()

    def post(self, peer: int, message: bytes) -> None:
        """Send a message. (One thread at a time for each peer.)"""
        block, kept = self._peer[peer], self._kept[peer]
        head, tail = int(block[loop.P_OUT_HEAD // 8]), int(block[loop.P_OUT_TAIL // 8])
        while self._freed[peer] < head:  # those are in fragments
            self._freed[peer] += 1  # first: Ctrl-C after it keeps a message too long, not too short
            kept.popleft()
        kept.append(message)
        entry = self._outbox[peer][tail % _MESSAGES]
        entry[0] = ctypes.cast(ctypes.c_char_p(message), ctypes.c_void_p).value or 0
        entry[1] = len(message)
        block[loop.P_OUT_TAIL // 8] = tail + 1
        self.wake()

    def take(self) -> tuple[int, bytes] | None:
        """Return the next message that came, if there is one. (One thread.)"""
        g = self._global
        head = int(g[loop.G_INBOX_HEAD // 8])
        if head == int(g[loop.G_INBOX_TAIL // 8]):
            return None
        peer, address, nbytes = self._inbox[head % len(self._inbox)].tolist()
        message = ctypes.string_at(address, nbytes)
        _libc.free(address)
        g[loop.G_INBOX_HEAD // 8] = head + 1
        return peer, message

    def received_by(self, peer: int) -> int:
        """Return how many bytes of messages (and their overhead) `peer` has received of this process."""
        return int(self._peer[peer][loop.P_ACKNOWLEDGED // 8])

    def consumed(self, peer: int, nbytes: int) -> None:
        """Tell that so many more bytes of messages of `peer` were received here."""
        block = self._peer[peer]
        block[loop.P_CONSUMED // 8] += nbytes
        if block[loop.P_CONSUMED // 8] - block[loop.P_REPORTED // 8] >= WINDOW // 4:
            self.wake()

    def start(self, transfer: Transfer, outgoing: bool) -> None:
        """Take a transfer over."""
        region = transfer.region
        assert region is not None
        words = {
            loop.R_PEER: self._peer[transfer.peer].ctypes.data,
            loop.R_OUTGOING: outgoing,
            loop.R_TAG: loop.FIRST_BULK + transfer.tag % self._tags,
            loop.R_WORDS: transfer.address,
            loop.R_ADDRESS: region.address,
            loop.R_NBYTES: region.nbytes,
            loop.R_CHUNK: region.chunk,
            loop.R_SLOTS: region.slots or 0,
            loop.R_CHUNKS: region.chunks,
        }
        self._table.add(transfer, words)
        if not self._thread.is_alive():  # it ended just now
            transfer.fail("the transport was closed")
        self.wake()

    def clear_up(self) -> None:
        """Let go of transfers that are over, and of their memory."""
        if (ended := int(self._global[loop.G_ENDED // 8])) != self._cleared:
            self._cleared = ended
            self._table.clear_up()

    def lose(self, peer: int, reason: str) -> None:
        """Take a peer for lost as soon as nothing more comes of it."""
        self._ended.setdefault(peer, reason)
        self._peer[peer][loop.P_ENDED // 8] = clock.monotonic_ns()

    def stop(self, timeout: float) -> None:
        """Send what waits, let transfers end, say goodbye, all within `timeout` seconds, and end the thread."""
        self._global[loop.G_CLOSE_BY // 8] = clock.monotonic_ns() + int(timeout * 1e9)
        self.wake()
        self._thread.join(timeout + 5.0)

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self, compiled: Any) -> None:
        short_naps()
        while compiled(self._g) != loop.FINISHED:
            self._tell()
        self.clear_up()
        for row, transfer in self._table.transfers():
            under_way = self._table.rows[row, loop.R_POSTED // 8] > self._table.rows[row, loop.R_DONE // 8]
            if transfer.status == RUNNING or not transfer.done:
                transfer.fail("this transport was closed", keep=under_way or None)
        _forever.append(self)  # MPI may still touch its buffers

    def _tell(self) -> None:
        """Tell of the peers that the loop has lost."""
        for peer, block in self._peer.items():
            why = int(block[loop.P_GONE // 8])
            if not why or block[loop.P_TOLD // 8]:
                continue
            reason = self._reason(peer, why, int(block[loop.P_CODE // 8]))
            for _, transfer in self._table.transfers():
                if transfer.peer == peer:
                    transfer.reason = transfer.reason or reason
            self._lost(peer, reason)
            block[loop.P_TOLD // 8] = 1
            self._global[loop.G_LOSSES // 8] -= 1
        self.acknowledged.raise_()
        self.arrived.raise_()

    def _reason(self, peer: int, why: int, code: int) -> str:
        if why == loop.SAID_GOODBYE:
            return GOODBYE_SAID
        if why == loop.ENDED:
            return self._ended[peer]
        if why == loop.SILENT:
            return f"it has not answered for {code / 1e9:.1f} s"
        if why == loop.NO_MEMORY:
            return f"this process has no memory for a message of {code} bytes"
        return f"MPI says: {self._mpi.Get_error_string(code)}"


_forever: list[Progress] = []


def _handle(mpi: Any, thing: Any) -> int:
    """Return an MPI handle: a pointer, or a 32-bit number."""
    kind = ctypes.c_int64 if mpi._sizeof(thing) == 8 else ctypes.c_int32
    return int(kind.from_address(mpi._addressof(thing)).value)


def _function(mpi: Any, name: str) -> Any:
    """Return a function of the MPI library that mpi4py has loaded."""
    try:
        return getattr(ctypes.CDLL(mpi.__file__), name)
    except AttributeError:
        library = mpi.Get_library_version().partition("\n")[0]
        raise PoolError(f"{library} has no function {name}: install {extra('mpi')}, whose MPI has it") from None
