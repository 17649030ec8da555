"""`NativeProgress`: the thread that moves everything of an `MpiTransport`, in native code without the interpreter lock.

It takes the place of `mpi_progress.Progress`: a main thread that is busy in Python does not slow it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...errors import StallError
from ...targets.compiler.machine_code import machine_code
from . import mpi_loop
from . import mpi_words as w
from .bulk import RUNNING, Transfer
from .mpi_progress import FIRST_BULK, GOODBYE_SAID
from .signal import FUTEX, Signal, short_naps
from .stream_framing import FRAGMENT
from .transport import OVERHEAD, WINDOW

_MESSAGES = 2 * (WINDOW // OVERHEAD)  # more than a window lets wait
_ROWS = 4096
_PATIENCE = 60.0
_libc = ctypes.PyDLL(None)  # quick functions: they keep the interpreter lock
_libc.free.argtypes = [ctypes.c_void_p]


def compiled_loop() -> Any:
    """Return the loop, compiled or out of the on-disk cache: seconds the first time. Do it before peers wait."""
    return machine_code(mpi_loop.run)


class NativeProgress:
    """Owns the requests of all peers; parameters as of `Progress`."""

    def __init__(self, comm: Any, peers: Iterable[int], silence: float, lost: Callable[[int, str], None]) -> None:
        from mpi4py import MPI

        loop = compiled_loop()
        self._mpi = MPI
        self._lost = lost
        self._comm = comm
        self._ranks = tuple(peers)
        self._global = np.zeros(w.GLOBAL_WORDS, np.int64)
        self._g = int(self._global.ctypes.data)
        self._table = np.zeros((len(self._ranks), w.PEER_BYTES // 8), np.int64)
        self._rows = np.zeros((_ROWS, w.ROW_BYTES // 8), np.int64)
        self._inbox = np.zeros((max(len(self._ranks), 1) * _MESSAGES, 3), np.int64)
        self._outboxes = np.zeros((len(self._ranks), _MESSAGES, 2), np.int64)
        self._buffers = np.zeros((len(self._ranks), 2, w.SLOTS, FRAGMENT), np.uint8)
        self._peer = dict(zip(self._ranks, self._table, strict=True))
        self._outbox = dict(zip(self._ranks, self._outboxes, strict=True))
        self._kept: dict[int, deque[bytes]] = {peer: deque() for peer in self._ranks}
        self._freed = dict.fromkeys(self._ranks, 0)
        self._ended: dict[int, str] = {}
        self._doorbell = Signal(self._g + w.G_DOORBELL)
        self.arrived = Signal(self._g + w.G_ARRIVED)
        self.acknowledged = Signal(self._g + w.G_ACKNOWLEDGED)
        upper = comm.Get_attr(MPI.TAG_UB) or 32767
        self._tags = min(int(upper) + 1, 1 << 30) - FIRST_BULK
        self._transfers: dict[int, tuple[Transfer, Any]] = {}  # by row, with what they hold
        self._cleared = 0  # how many had ended when somebody last cleared up
        self._lock = threading.Lock()
        self._set_up(silence)
        self._thread = threading.Thread(target=self._run, args=(loop,), name="warpwell mpi transport", daemon=True)
        self._thread.start()

    def _set_up(self, silence: float) -> None:
        mpi, g = self._mpi, self._global
        library = ctypes.CDLL(mpi.__file__)
        functions = {
            w.G_ISEND: library.MPI_Isend,
            w.G_ISSEND: library.MPI_Issend,
            w.G_IRECV: library.MPI_Irecv,
            w.G_TEST: library.MPI_Test,
            w.G_CANCEL: library.MPI_Cancel,
            w.G_IMPROBE: library.MPI_Improbe,
            w.G_IMRECV: library.MPI_Imrecv,
            w.G_MALLOC: _libc.malloc,
            w.G_FREE: _libc.free,
            w.G_SYSCALL: _libc.syscall,
        }
        for place, function in functions.items():
            g[place // 8] = ctypes.cast(function, ctypes.c_void_p).value or 0
        g[w.G_FUTEX // 8] = FUTEX
        g[w.G_COMM // 8] = _handle(mpi, self._comm)
        g[w.G_BYTE // 8] = _handle(mpi, mpi.BYTE)
        g[w.G_SILENCE // 8] = int(silence * 1e9)
        g[w.G_PEERS // 8] = len(self._ranks)
        g[w.G_PEER_TABLE // 8] = self._table.ctypes.data
        g[w.G_ROW_TABLE // 8] = self._rows.ctypes.data
        g[w.G_INBOX // 8] = self._inbox.ctypes.data
        g[w.G_INBOX_ROOM // 8] = len(self._inbox)
        now = time.monotonic_ns()
        g[w.G_WATCHED // 8] = now
        for k, rank in enumerate(self._ranks):
            p = self._table[k]
            p[w.P_RANK // 8] = rank
            p[[w.P_HEARD // 8, w.P_SAID // 8]] = now
            p[w.P_OUT // 8] = self._outboxes[k].ctypes.data
            p[w.P_OUT_ROOM // 8] = _MESSAGES
            p[[w.P_OFFSET // 8, w.P_FILLED // 8]] = -1
            p[w.P_SEND_BUFFERS // 8] = self._buffers[k, 0].ctypes.data
            p[w.P_RECEIVE_BUFFERS // 8] = self._buffers[k, 1].ctypes.data
            for slot in range(w.SLOTS):
                request = self._comm.Irecv([self._buffers[k, 1, slot], mpi.BYTE], rank, mpi_loop.CONTROL)
                p[w.P_RECEIVE_REQUESTS // 8 + slot] = _handle(mpi, request)

    # -- called by the transport's users ----------------------------------------------------------------------

    def wake(self) -> None:
        """Let the thread look now."""
        self._doorbell.raise_()

    def post(self, peer: int, message: bytes) -> None:
        """Send a message. (One thread at a time for each peer.)"""
        block, kept = self._peer[peer], self._kept[peer]
        head, tail = int(block[w.P_OUT_HEAD // 8]), int(block[w.P_OUT_TAIL // 8])
        while self._freed[peer] < head:  # those are in fragments
            self._freed[peer] += 1  # first: Ctrl-C after it keeps a message too long, not too short
            kept.popleft()
        kept.append(message)
        entry = self._outbox[peer][tail % _MESSAGES]
        entry[0] = ctypes.cast(ctypes.c_char_p(message), ctypes.c_void_p).value or 0
        entry[1] = len(message)
        block[w.P_OUT_TAIL // 8] = tail + 1
        self.wake()

    def take(self) -> tuple[int, bytes] | None:
        """Return the next message that came, if there is one. (One thread.)"""
        g = self._global
        head = int(g[w.G_INBOX_HEAD // 8])
        if head == int(g[w.G_INBOX_TAIL // 8]):
            return None
        peer, address, nbytes = self._inbox[head % len(self._inbox)].tolist()
        message = ctypes.string_at(address, nbytes)
        _libc.free(address)
        g[w.G_INBOX_HEAD // 8] = head + 1
        return peer, message

    def received_by(self, peer: int) -> int:
        """Return how many bytes of messages (and their overhead) `peer` has received of this process."""
        return int(self._peer[peer][w.P_ACKNOWLEDGED // 8])

    def consumed(self, peer: int, nbytes: int) -> None:
        """Tell that so many more bytes of messages of `peer` were received here."""
        block = self._peer[peer]
        block[w.P_CONSUMED // 8] += nbytes
        if block[w.P_CONSUMED // 8] - block[w.P_REPORTED // 8] >= WINDOW // 4:
            self.wake()

    def start(self, transfer: Transfer, outgoing: bool) -> None:
        """Take a transfer over."""
        region = transfer.region
        assert region is not None
        end = time.monotonic() + _PATIENCE
        while (row := self._free_row(transfer)) is None:
            if time.monotonic() > end:
                raise StallError(f"{_ROWS} transfers are under way, and none ended for {_PATIENCE:g} s")
            time.sleep(1e-3)
        words = self._rows[row]
        words[:] = 0
        words[w.R_PEER // 8] = self._peer[transfer.peer].ctypes.data
        words[w.R_OUTGOING // 8] = outgoing
        words[w.R_TAG // 8] = FIRST_BULK + transfer.tag % self._tags
        words[w.R_WORDS // 8] = transfer.address
        words[w.R_ADDRESS // 8] = region.address
        words[w.R_NBYTES // 8] = region.nbytes
        words[w.R_CHUNK // 8] = region.chunk
        words[w.R_SLOTS // 8] = region.slots or 0
        words[w.R_CHUNKS // 8] = region.chunks
        words[w.R_STATE // 8] = w.READY
        if not self._thread.is_alive():  # it ended just now
            transfer.fail("the transport was closed")
        self.wake()

    def _free_row(self, transfer: Transfer) -> int | None:
        self.clear_up()
        with self._lock:
            row = next((k for k in range(_ROWS) if k not in self._transfers), None)
            if row is not None:
                self._transfers[row] = (transfer, transfer.region)
                self._global[w.G_ROWS // 8] = max(self._transfers) + 1
            return row

    def clear_up(self) -> None:
        """Let go of transfers that are over, and of their memory."""
        if (ended := int(self._global[w.G_ENDED // 8])) == self._cleared:
            return
        gone = []
        with self._lock:
            self._cleared = ended
            for row, held in list(self._transfers.items()):
                if self._rows[row, w.R_STATE // 8] == w.OVER:
                    held[0].region = None
                    self._rows[row, w.R_STATE // 8] = w.FREE
                    gone.append(self._transfers.pop(row))
        gone.clear()  # out of the lock: whatever has to do with this memory may run now

    def lose(self, peer: int, reason: str) -> None:
        """Take a peer for lost as soon as nothing more comes of it."""
        self._ended.setdefault(peer, reason)
        self._peer[peer][w.P_ENDED // 8] = time.monotonic_ns()

    def stop(self, timeout: float) -> None:
        """Send what waits, let transfers end, say goodbye, all within `timeout` seconds, and end the thread."""
        self._global[w.G_CLOSE_BY // 8] = time.monotonic_ns() + int(timeout * 1e9)
        self.wake()
        self._thread.join(timeout + 5.0)

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self, loop: Any) -> None:
        short_naps()
        while loop(self._g) != mpi_loop.FINISHED:
            self._tell()
        self.clear_up()
        with self._lock:
            for row, (transfer, _) in self._transfers.items():
                under_way = self._rows[row, w.R_POSTED // 8] > self._rows[row, w.R_DONE // 8]
                if transfer.status == RUNNING or not transfer.done:
                    transfer.fail("this transport was closed", keep=under_way or None)
        _forever.append(self)  # MPI may still touch its buffers

    def _tell(self) -> None:
        """Tell of the peers that the loop has lost."""
        for peer, block in self._peer.items():
            why = int(block[w.P_GONE // 8])
            if not why or block[w.P_TOLD // 8]:
                continue
            reason = self._reason(peer, why, int(block[w.P_CODE // 8]))
            with self._lock:
                concerned = [transfer for transfer, _ in self._transfers.values() if transfer.peer == peer]
            for transfer in concerned:
                transfer.reason = transfer.reason or reason
            self._lost(peer, reason)
            block[w.P_TOLD // 8] = 1
            self._global[w.G_LOSSES // 8] -= 1
        self.acknowledged.raise_()
        self.arrived.raise_()

    def _reason(self, peer: int, why: int, code: int) -> str:
        if why == w.SAID_GOODBYE:
            return GOODBYE_SAID
        if why == w.ENDED:
            return self._ended[peer]
        if why == w.SILENT:
            return f"it has not answered for {code / 1e9:.1f} s"
        return f"MPI says: {self._mpi.Get_error_string(code)}"


_forever: list[NativeProgress] = []


def _handle(mpi: Any, thing: Any) -> int:
    """Return an MPI handle: a pointer, or a 32-bit number."""
    kind = ctypes.c_int64 if mpi._sizeof(thing) == 8 else ctypes.c_int32
    return int(kind.from_address(mpi._addressof(thing)).value)
