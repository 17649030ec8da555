"""`AheadSeat`: a thread whose host goes on while others have the GPU; its work waits there, at gates in its stream.

A gate is three operations of the driver in a stream: write that the stream is there; wait until the word `OPEN` of the
slot is 1; write that it is through. So whoever asks for the lease waits for the part between two gates at most, however
much the host has enqueued, and when the lease comes back the GPU finds a full queue. A thread of the process, the
keeper, takes the lease when there is work behind a gate, and hands it over::

    a turn begins: BEGUN + 1, a gate ──► the keeper waits for the lease ──► OPEN = 1
    another comes first: OPEN = 0 ──► the GPU stands at a gate, or ENDED is BEGUN ──► the lease is freed
    a turn ends: the GPU writes ENDED

The keeper needs Python, for which a busy program may let it wait for milliseconds. So who comes first may shut the gate
himself, and counts the number of the lease up once the GPU stands there; and who hands over to a slot with gates opens
them.

No gate stays shut for ever: the keeper waits as all do, opens all when it fails or the program ends, and calls nothing
of the driver, which may have the host wait in a launch for the very gate.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import os
import threading
import time
import warnings
import weakref

from .. import errors
from ..libcuda import driver
from .board import (
    AHEAD,
    AT,
    BEGUN,
    CAPTURED,
    ENDED,
    EPOCH,
    GRANT,
    HOME,
    IDLE,
    OPEN,
    SINCE,
    STATE,
    TURNS,
    USE,
    YIELDED,
    Board,
)
from .choice import HOLD
from .gpu_work import current_context
from .seat import LATE, LINGER, QUIET, Seat, Station

HOST = 4e-3
"""Seconds of the host's work that may be enqueued before a gate which the GPU has not passed: less than the driver's
queue of some thousand launches, in which the host would be held up."""

CLOSE = 1e-4
"""Seconds after which a pause makes another gate."""

_LOOK = 2e-5
"""Seconds between two looks how far the GPU is."""

_WAIT, _WRITE = 4, 5
_DEVICE_AND_PORTABLE = 3
_NOT_READY, _CAPTURED_ELSEWHERE = 600, 906


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams; the fields of waiting and writing are at the same places."""

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("more", ctypes.c_uint64 * 2),
    )


_addresses: dict[Board, int] = {}
_mapping = threading.Lock()


def gates(board: Board) -> bool:
    """Return whether the calling thread's GPU can wait at words of a board; warn once if it has a GPU that cannot.

    A driver registers no memory of files on a disk: Linux does not let a device hold their pages.
    """
    if not current_context():
        return False
    with _mapping:
        if board not in _addresses:
            library, at = driver(), ctypes.c_uint64()
            begin, length = board.extent
            status = 1
            if hasattr(library, "cuStreamBatchMemOp_v2"):  # since CUDA 11.7
                status = library.cuMemHostRegister_v2(begin, length, _DEVICE_AND_PORTABLE)
                status = status or library.cuMemHostGetDevicePointer_v2(ctypes.byref(at), begin, 0)
            _addresses[board] = 0 if status else at.value
            if status:
                warnings.warn(
                    f"turns do not run ahead: the GPU cannot wait at words of {board.path} (the driver says {status}). "
                    "Name a folder in /dev/shm or of a tmpfs in WARPWELL_TURNS, or update a driver before CUDA 11.7; "
                    "until then the host waits for each turn",
                    RuntimeWarning,
                    stacklevel=3,
                )
    return _addresses[board] != 0


class _Gate:
    """The gates of one slot. The host of its thread enqueues; the keeper shuts and opens."""

    def __init__(self, board: Board, slot: int) -> None:
        self._library = driver()
        self._board, self._slot = board, slot
        self._words, self._at = board.words, board.at(slot)
        first = _addresses[board] + 8 * self._at
        at, captured, opened = (first + 8 * word for word in (AT, CAPTURED, OPEN))
        self._gate = (_Operation * 3)(
            _Operation(_WRITE, at, 0), _Operation(_WAIT, opened, 1), _Operation(_WRITE, at, 0)
        )
        self._in_graph = (_Operation * 3)(
            _Operation(_WRITE, captured, 1), _Operation(_WAIT, opened, 1), _Operation(_WRITE, captured, 0)
        )
        self._end = (_Operation * 1)(_Operation(_WRITE, first + 8 * ENDED, 0))
        self._status = ctypes.c_int()
        self.gates = 0
        self.broken = False
        self.in_graphs = False

    def enqueue(self, stream: int) -> None:
        """Put a gate into a stream."""
        if self.capturing(stream):
            self.in_graphs = True
            self._call(stream, self._in_graph)
            return
        self.gates += 1
        self._gate[0].value, self._gate[2].value = 2 * self.gates - 1, 2 * self.gates
        self._call(stream, self._gate)

    def end(self, stream: int) -> None:
        """Have the GPU write that all turns begun until now have ended."""
        self._end[0].value = self._words[self._at + BEGUN]
        self._call(stream, self._end)

    def _call(self, stream: int, operations: ctypes.Array[_Operation]) -> None:
        count = len(operations)
        status = self._library.cuStreamBatchMemOp_v2(stream, count, ctypes.addressof(operations), 0)
        if status and not self.broken:
            self.fail()
            warnings.warn(
                f"turns of this thread at {self._board.name} run ahead no more: the driver refused a gate in stream "
                f"{stream:#x} (it says {status}). From its next turn on the host waits for each",
                RuntimeWarning,
                stacklevel=2,
            )

    def fail(self) -> None:
        """Hold up nothing from now on."""
        self.broken = True
        self._words[self._at + STATE] = IDLE  # nobody shuts the gate of an idle slot
        self._words[self._at + OPEN] = 1

    def capturing(self, stream: int) -> bool:
        """Return whether a stream is captured into a graph."""
        return self._library.cuStreamIsCapturing(stream, ctypes.byref(self._status)) == 0 and self._status.value == 1

    def passed(self) -> int:
        """Return how many gates the GPU has passed."""
        return int(self._words[self._at + AT]) // 2

    def dead(self, stream: int) -> bool:
        """Return whether the GPU will not go on."""
        status = self._library.cuStreamIsCapturing(stream, ctypes.byref(self._status))
        if status == _CAPTURED_ELSEWHERE or (status == 0 and self._status.value):
            return self.broken  # the question would end the capture
        if self._library.cuStreamQuery(stream) not in (0, _NOT_READY):
            self.fail()
        return self.broken

    def pending(self) -> bool:
        """Return whether there are turns that have begun, and not ended on the GPU."""
        return not self.broken and self._board.pending(self._slot)

    def progress(self) -> tuple[int, ...]:
        """Return how far host and GPU are."""
        return tuple(self._words[self._at + word] for word in (BEGUN, ENDED, AT, CAPTURED))

    def open(self, opened: bool = True) -> None:
        """Let the GPU pass, or not."""
        self._words[self._at + OPEN] = opened or self.broken

    def drain(self) -> None:
        """Shut the gate, and wait until the GPU stands there, has done all, or the lease is lost."""
        epoch = self._words[EPOCH]
        while not self.broken and not self._board.shut(self._slot, epoch, 1.0) and self._words[EPOCH] == epoch:
            pass


class AheadSeat(Seat):
    """A thread at one device, with gates. Its keeper waits, takes and hands over; the thread only enqueues."""

    gated = True

    @property
    def broken(self) -> bool:  # type: ignore[override]
        return self._gate.broken

    def __init__(self, station: Station) -> None:
        super().__init__(station)
        self._gate = _Gate(station.board, self.slot)
        station.gates = True
        self._stream = 0
        self._over = False
        self._parts: collections.deque[tuple[int, float]] = collections.deque()
        self._host = 0.0
        self._since = self._last = time.monotonic()
        self._stuck: tuple[int, ...] | None = None
        station.board.words[self._at + HOME] = self.slot
        _gated.add(self)
        self._keeper = threading.Thread(target=self._keep, name="warpwell-ahead", daemon=True)
        self._keeper.start()

    # -- the thread ----------------------------------------------------------------------------------------------

    def begin(self, tenant: str, priority: int, streams: tuple[int, ...], timeout: float | None) -> None:
        """Begin a turn: enqueue its gate."""
        if self.depth:
            self.depth += 1
            return
        stream = streams[0] if streams else 0
        if self._gate.capturing(stream):
            raise errors.ArgumentError(
                "a turn began while its stream is captured: begin it before, and pause in the capture", name="stream"
            )
        self._introduce(tenant, priority)
        if stream != self._stream:
            self.settle()  # of two streams that write where they are, neither would be known
        self._stream = stream
        self.depth = 1
        self.station.board.words[self._at + BEGUN] += 1
        self._last = time.monotonic()
        self._enqueue()
        if self.station.seat is not self or self.station.epoch != self.station.board.words[EPOCH]:
            self.station.board.ring(self.slot)

    def pause(self, timeout: float | None) -> None:
        """Make a gate."""
        if self.depth and time.monotonic() - self._last > CLOSE:
            self._enqueue()

    def end(self) -> None:
        """End a turn, as soon as the GPU gets there."""
        if self.depth == 1:
            self.depth = 0
            self._gate.end(self._stream)
            words = self.station.board.words
            self.turns = words[self._at + TURNS] = self.turns + 1
            self._count()
        elif self.depth:
            self.depth -= 1

    def drain(self) -> None:
        """Have the GPU stand at a gate."""
        self._gate.drain()

    def cancel(self, depth: int) -> None:
        """Undo what began or ended and was interrupted: no turn is left that the GPU would not end."""
        self.depth = depth
        if not depth:
            self._gate.end(self._stream)
            self.station.board.ring(self.slot)

    def retire(self) -> None:
        """Have the keeper give the slot back, for the thread has ended."""
        if self.station.process == os.getpid():
            self._over = True
            self.station.board.ring(self.slot)

    def _enqueue(self) -> None:
        """Enqueue a gate, and wait if the host is too far ahead."""
        gate = self._gate
        gate.enqueue(self._stream)
        now = time.monotonic()
        self._parts.append((gate.gates, now - self._last))
        self._host += now - self._last
        looked = now
        while self._host > HOST and len(self._parts) > 1:
            if self._parts[0][0] <= gate.passed() or gate.broken:
                self._host -= self._parts.popleft()[1]
                continue
            time.sleep(_LOOK)
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                gate.dead(self._stream)
        self._last = time.monotonic()
        if self.station.seat is self:
            self.station.board.words[YIELDED] = time.monotonic_ns()

    def _count(self) -> None:
        """Add what was used of the lease since the last count."""
        now = time.monotonic()
        if self.station.seat is self:
            self.station.board.words[self._at + USE] += int((now - self._since) * 1e9)
        self._since = now

    # -- the keeper ----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        station, board, gate = self.station, self.station.board, self._gate
        try:
            while not self._over or gate.pending():
                heard, shut = board.heard(self.slot), not board.words[self._at + OPEN]
                if station.seat is self and not station.lost():
                    if not board.anyone():
                        if shut:
                            self._open()  # whoever did that is gone
                    elif self._offer():
                        continue
                else:
                    gate.open(False)
                    self._note_stuck()
                    if gate.pending() and gate.progress() != self._stuck:
                        self._acquire()
                        continue
                    self._clear()
                busy = gate.pending() or self.depth
                board.listen(self.slot, heard, LATE if busy else 1.0 if gate.in_graphs else QUIET)
            with station.lock:
                if station.seat is self and not station.lost():
                    station.release(0)
        finally:
            gate.fail()
            if self._over and not gate.in_graphs:  # a graph writes there for as long as it is
                board.rise(self.slot)

    def _note_stuck(self) -> None:
        """Note how far the GPU is, if the lease was taken away because it came to no gate for too long.

        It may never go on, and would keep the others waiting as long with each lease.
        """
        words = self.station.board.words
        lost = self.station.epoch != words[EPOCH] and words[self._at + STATE] == AHEAD
        if lost and not self.station.board.stands(self.slot):
            self._stuck = self._gate.progress()

    def _acquire(self) -> None:
        """Wait for the lease, and open the gate."""
        self._stuck = None
        self._wait(None)
        words = self.station.board.words
        words[self._at + SINCE], words[self._at + STATE] = time.monotonic_ns(), IDLE if self._gate.broken else AHEAD
        self._since = time.monotonic()
        self.inside = False
        self._open()

    def _open(self) -> None:
        """Open the gate, unless the lease was taken away: that is done under the same lock, and where it is shut."""
        board = self.station.board
        while not self.station.lost():
            try:
                if board.seize():
                    if not self.station.lost():
                        self._gate.open()
                    return
            finally:
                board.let_go()
            time.sleep(_LOOK)

    def _clear(self) -> None:
        """Note that it does not wait, whatever was noted in its place."""
        board = self.station.board
        board.flag(self.slot, False)
        board.words[self._at + STATE] = IDLE
        if board.words[GRANT] == self.slot:
            board.words[GRANT] = 0

    def _offer(self) -> bool:
        """Hand over to whoever comes first; return whether the lease is gone."""
        stays = self._gate.pending()
        if not stays:
            time.sleep(LINGER)
            stays = self._gate.pending()
        if stays:
            self._count()
        if not self.station.hand_over(self, stays) and self.station.seat is self:
            self._open()
            return False
        return True

    def settle(self) -> None:
        """Wait until the GPU has done all turns."""
        looked = time.monotonic()
        while self._gate.pending() and self._keeper.is_alive():
            time.sleep(_LOOK)
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                self._gate.dead(0)  # the turns' own stream may be no more

    def finish(self) -> None:
        """Wait until the GPU has done all turns, for as long as a lease may take, and hold up nothing after that."""
        until = time.monotonic() + HOLD
        while self._gate.pending() and self._keeper.is_alive() and time.monotonic() < until:
            time.sleep(1e-3)
        if self._keeper.is_alive():  # else its slot may be somebody else's
            self._gate.fail()


_gated: weakref.WeakSet[AheadSeat] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Open all gates when the program ends, for its keepers end before its GPU work is waited for."""
    for one in list(_gated):
        if one.station.process == os.getpid():
            with contextlib.suppress(Exception):
                one.finish()
