"""`MpiTransport`: messages and bulk data between the processes of an MPI job.

One thread moves everything, in native code without the GIL (`mpi_loop`), so that a main thread that is busy in Python
does not delay it. After the start only this thread calls MPI. It names the peer in each call, because after a failure
MPI does not support ANY_SOURCE and collectives.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import threading
from collections import deque
from typing import Any

import numpy as np

from ..._check import extra
from ..._os import FUTEX, clock
from ..._settings import settings
from ...errors import PoolError
from ...targets import native
from . import mpi_loop as loop
from .bulk import RUNNING, Transfer
from .signal import Signal, short_naps
from .table import TransferTable
from .transport import CLOSED, OVERHEAD, WINDOW, Transport

_MESSAGES = 2 * (WINDOW // OVERHEAD)  # slots of a ring; more than the messages in a window
_run_loop = native(loop.run)
_libc = ctypes.PyDLL(None)  # these functions are quick, so calls keep the GIL
_libc.free.argtypes = [ctypes.c_void_p]


def compiled_loop() -> Any:
    """Return the native loop, compiled or read from the on-disk cache.

    The first compilation takes seconds, so call it before peers wait for this process.

    Raises
    ------
    PoolError
        The number of the futex system call is not known for this processor.
    """
    if not FUTEX:
        raise PoolError(
            f"agents over MPI need the system call futex, but its number on {platform.machine()} is not known: use "
            f"this machine's devices (run the program with python), or add the number to "
            f"warpwell/pool/transport/signal.py"
        )
    return _run_loop.load()


class MpiTransport(Transport):
    """Connects all processes of ``MPI.COMM_WORLD``. Only the constructor is collective.

    A peer is lost after ``WARPWELL_POOL_TIMEOUT`` seconds without a message.

    Raises
    ------
    PoolError
        This processor or the MPI library lacks a function that the native loop calls.
    """

    name = "mpi"

    def __init__(self) -> None:
        # If a peer exits during long messages over TCP, Open MPI 5.0 may continue a "put" to it and crash. The
        # variable has an effect only before MPI is initialized.
        os.environ.setdefault("OMPI_MCA_btl_tcp_flags", "send,inplace")
        from mpi4py import MPI

        compiled = compiled_loop()
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        rank = int(self._comm.Get_rank())
        super().__init__(rank, [peer for peer in range(self._comm.Get_size()) if peer != rank])
        self._global = np.zeros(loop.GLOBAL_WORDS, np.int64)
        self._global_address = int(self._global.ctypes.data)
        self._blocks = np.zeros((len(self.peers), loop.PEER_BYTES // 8), np.int64)
        self._table = TransferTable(loop.ROW_BYTES, self._global[loop.G_ROWS // 8 :][:1])
        self._inbox = np.zeros((max(len(self.peers), 1) * _MESSAGES, 3), np.int64)
        self._outboxes = np.zeros((len(self.peers), _MESSAGES, 2), np.int64)
        self._buffers = np.zeros((len(self.peers), 2, loop.SLOTS, loop.FRAGMENT), np.uint8)
        self._block = dict(zip(self.peers, self._blocks, strict=True))
        self._outbox = dict(zip(self.peers, self._outboxes, strict=True))
        self._unsent: dict[int, deque[bytes]] = {peer: deque() for peer in self.peers}
        self._freed = dict.fromkeys(self.peers, 0)
        self._exit_reasons: dict[int, str] = {}
        self._doorbell = Signal(self._global_address + loop.G_DOORBELL)
        self._arrived = Signal(self._global_address + loop.G_ARRIVED)
        self._acknowledged = Signal(self._global_address + loop.G_ACKNOWLEDGED)
        self._tags = min(int(self._comm.Get_attr(MPI.TAG_UB) or 32767) + 1, 1 << 30) - loop.FIRST_BULK
        self._released = 0  # transfers that had finished at the last `release_finished`
        self._fill_blocks()
        self._thread = threading.Thread(target=self._run, args=(compiled,), name="warpwell mpi transport", daemon=True)
        self._thread.start()
        atexit.register(self.close, 1.0)  # mpi4py finalizes MPI in a later exit handler

    def _fill_blocks(self) -> None:
        mpi, g = self._mpi, self._global
        names = ("MPI_Isend", "MPI_Issend", "MPI_Irecv", "MPI_Test", "MPI_Cancel", "MPI_Improbe", "MPI_Imrecv")
        functions = {getattr(loop, f"G_{name[4:].upper()}"): _mpi_function(mpi, name) for name in names}
        functions |= {loop.G_MALLOC: _libc.malloc, loop.G_FREE: _libc.free, loop.G_SYSCALL: _libc.syscall}
        now = clock.monotonic_ns()
        fields = {offset: ctypes.cast(function, ctypes.c_void_p).value or 0 for offset, function in functions.items()}
        fields |= {
            loop.G_FUTEX: FUTEX,
            loop.G_COMM: _mpi_handle(mpi, self._comm),
            loop.G_BYTE: _mpi_handle(mpi, mpi.BYTE),
            loop.G_SILENCE: int(settings.pool_silence_seconds * 1e9),
            loop.G_PEERS: len(self.peers),
            loop.G_PEER_TABLE: self._blocks.ctypes.data,
            loop.G_ROW_TABLE: self._table.address,
            loop.G_INBOX: self._inbox.ctypes.data,
            loop.G_INBOX_SLOTS: len(self._inbox),
            loop.G_CHECKED: now,
        }
        for offset, value in fields.items():
            g[offset // 8] = value
        for k, rank in enumerate(self.peers):
            p = self._blocks[k]
            p[loop.P_RANK // 8] = rank
            p[[loop.P_LAST_RECEIVE // 8, loop.P_LAST_SEND // 8]] = now
            p[loop.P_OUT // 8] = self._outboxes[k].ctypes.data
            p[loop.P_OUT_SLOTS // 8] = _MESSAGES
            p[[loop.P_OFFSET // 8, loop.P_FILLED // 8]] = -1
            p[loop.P_SEND_BUFFERS // 8] = self._buffers[k, 0].ctypes.data
            p[loop.P_RECEIVE_BUFFERS // 8] = self._buffers[k, 1].ctypes.data
            for slot in range(loop.SLOTS):
                request = self._comm.Irecv([self._buffers[k, 1, slot], mpi.BYTE], rank, loop.CONTROL)
                p[loop.P_RECEIVE_REQUESTS // 8 + slot] = _mpi_handle(mpi, request)

    def lose(self, peer: int, reason: str) -> None:
        if not self._closed and peer not in self._reasons:
            self._exit_reasons.setdefault(peer, reason)
            self._block[peer][loop.P_EXITED // 8] = clock.monotonic_ns()

    def close(self, timeout: float = 5.0) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._global[loop.G_CLOSE_BY // 8] = clock.monotonic_ns() + int(timeout * 1e9)
        self._wake()
        self._thread.join(timeout + 5.0)
        self._arrived.raise_()
        self._acknowledged.raise_()

    def _wake(self) -> None:
        self._doorbell.raise_()

    def _post(self, peer: int, message: bytes) -> None:
        block, unsent = self._block[peer], self._unsent[peer]
        head, tail = int(block[loop.P_OUT_HEAD // 8]), int(block[loop.P_OUT_TAIL // 8])
        while self._freed[peer] < head:  # the loop has copied these messages into fragments
            self._freed[peer] += 1  # first: Ctrl-C after this keeps a message too long, rather than too short
            unsent.popleft()
        unsent.append(message)
        entry = self._outbox[peer][tail % _MESSAGES]
        entry[0] = ctypes.cast(ctypes.c_char_p(message), ctypes.c_void_p).value or 0
        entry[1] = len(message)
        block[loop.P_OUT_TAIL // 8] = tail + 1
        self._wake()

    def _next_message(self) -> tuple[int, bytes] | None:
        self._release_finished()
        g = self._global
        head = int(g[loop.G_INBOX_HEAD // 8])
        if head == int(g[loop.G_INBOX_TAIL // 8]):
            return None
        peer, address, nbytes = self._inbox[head % len(self._inbox)].tolist()
        message = ctypes.string_at(address, nbytes)
        _libc.free(address)
        g[loop.G_INBOX_HEAD // 8] = head + 1
        return peer, message

    def _received_by(self, peer: int) -> int:
        return int(self._block[peer][loop.P_ACKNOWLEDGED // 8])

    def _acknowledge(self, peer: int, nbytes: int) -> None:
        block = self._block[peer]
        block[loop.P_CONSUMED // 8] += nbytes
        if block[loop.P_CONSUMED // 8] - block[loop.P_REPORTED // 8] >= WINDOW // 4:
            self._wake()

    def _start(self, transfer: Transfer, outgoing: bool) -> None:
        region = transfer.region
        assert region is not None
        peer, tag = self._block[transfer.peer].ctypes.data, loop.FIRST_BULK + transfer.tag % self._tags
        memory = region.address, region.nbytes, region.chunk, region.slots or 0, region.chunks
        values = peer, outgoing, tag, transfer.address, *memory
        fields = dict(zip(range(loop.R_PEER, loop.R_POSTED, 8), values, strict=True))
        transfer.wake = self._wake
        self._table.add(transfer, fields)
        if not self._thread.is_alive():  # the loop has exited concurrently
            transfer.fail(CLOSED)
        self._wake()

    def _release_finished(self) -> None:
        if (finished := int(self._global[loop.G_FINISHED // 8])) != self._released:
            self._released = finished
            self._table.release_finished()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self, compiled: Any) -> None:
        short_naps()
        while compiled(self._global_address) != loop.FINISHED:
            self._report_losses()
        self._release_finished()
        for row, transfer in self._table.transfers():
            in_flight = self._table.rows[row, loop.R_POSTED // 8] > self._table.rows[row, loop.R_DONE // 8]
            if transfer.status == RUNNING or not transfer.done:
                transfer.fail("this transport was closed", keep_memory=bool(in_flight))
        _forever.append(self)  # MPI may still access the buffers

    def _report_losses(self) -> None:
        for peer, block in self._block.items():
            cause = int(block[loop.P_LOST // 8])
            if not cause or block[loop.P_LOSS_REPORTED // 8]:
                continue
            reason = self._describe_loss(peer, cause, int(block[loop.P_CODE // 8]))
            for _, transfer in self._table.transfers():
                if transfer.peer == peer:
                    transfer.reason = transfer.reason or reason
            if self._record_loss(peer, reason):
                self._report_loss(peer)
            block[loop.P_LOSS_REPORTED // 8] = 1
            self._global[loop.G_LOSSES // 8] -= 1
        self._acknowledged.raise_()
        self._arrived.raise_()

    def _describe_loss(self, peer: int, cause: int, code: int) -> str:
        if cause == loop.PEER_CLOSED:
            return "it closed its transport"
        if cause == loop.EXITED:
            return self._exit_reasons[peer]
        if cause == loop.SILENT:
            return f"it has not answered for {code / 1e9:.1f} s"
        if cause == loop.NO_MEMORY:
            return f"this process has no memory for a message of {code} bytes"
        return f"MPI error: {self._mpi.Get_error_string(code)}"


_forever: list[MpiTransport] = []


def _mpi_handle(mpi: Any, wrapper: Any) -> int:
    """Return the MPI handle of an mpi4py object: a pointer or a 32-bit number."""
    kind = ctypes.c_int64 if mpi._sizeof(wrapper) == 8 else ctypes.c_int32
    return int(kind.from_address(mpi._addressof(wrapper)).value)


def _mpi_function(mpi: Any, name: str) -> Any:
    """Return a function of the MPI library that mpi4py has loaded."""
    try:
        return getattr(ctypes.CDLL(mpi.__file__), name)
    except AttributeError:
        library = mpi.Get_library_version().partition("\n")[0]
        raise PoolError(f"{library} lacks the function {name}: use the MPI library of {extra('mpi')}") from None
