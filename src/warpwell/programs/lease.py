"""`turn`: the lease of a GPU for a block of a program; `Lease`: the slot of a thread on the board of a device.

A lease is a program whose only call is the time from the beginning of a turn to its end or pause. The slot's fields
ISSUED and DONE differ while the thread is in a turn, and afterwards while the GPU may have work of it. The thread or
the lease's keeper thread stores DONE when the GPU has done that work, so a loop of turns without competition needs no
system call. ``driver/native/gate.h`` has the order of memory.

No two leases are inside at a time, with any arbiter or none: a lease stores ISSUED, then (fence) looks for another one
inside, and retreats if there is one that has not exceeded its hold time. Without a live arbiter, which a waiting lease
starts, it also enters through a closed gate: in no order then, and only if no program has work.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from types import TracebackType
from typing import Any

from .._check import checked_integer, checked_timeout
from .._os import clock
from .._settings import settings
from ..driver import Board
from ..errors import ArgumentError, SchedulerError, TurnTimeoutError
from ..libcuda import NO_GPU, current_context, device_name
from .gpu_work import Work, relax_captures, stream_handles

LOOK_SECONDS = 20e-3
"""Interval at which a waiting thread looks at its gate, and at which a keeper looks for work that is done."""

IDLE_LOOK_SECONDS = 0.25
"""Interval at which the keeper of an idle lease looks, in case that it has missed a wake-up."""

MIN_TIMEOUT_SECONDS = 50e-3
"""Minimum of timeouts: the arbiter needs some milliseconds to open the gate of a device that no program uses."""

MARK_SECONDS = 0.25e-3
"""Minimum time between two marks of pauses. A mark costs some microseconds."""

SILENT_SECONDS = 0.5
"""Time without a beat after which a lease enters as without an arbiter. Several times the interval of beats, because
the arbiter may wait for a processor."""

FAIL_OPEN_SECONDS = 10.0
"""Time without a beat after which a lease enters although the same turn or program has had the device for that time:
the arbiter is stopped."""

START_SECONDS = 120.0
"""Time that an arbiter has to start. Its import took 56 s on two cores with a load of 20."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_PRIORITY = 1 << 31
_MAX_TENANT_BYTES = 63

_TORCH = re.compile(r"(cpu|cuda)(?::(\d+))?")
"""A device of PyTorch as text."""

_names: dict[int, str] = {}
"""Names of GPUs, by context, and by number from -1 downwards."""


class Turn:
    """A block in which this thread alone uses a GPU, among the programs that share it. See `turn`."""

    __slots__ = ("_device", "_handles", "_lease", "_priority", "_stream", "_tenant", "_timeout")

    def __init__(self, tenant: str, priority: int, device: Any, stream: Any, timeout: float | None) -> None:
        self._tenant, self._priority, self._device, self._timeout = tenant, priority, device, timeout
        self._stream, self._handles = stream, stream_handles(stream)  # a stream lives as long as its turn
        self._lease: Lease | None = None

    def __enter__(self) -> Turn:
        # Ctrl-C may arrive at any point, and the parts that were done are undone.
        lease, before = None, 0
        try:
            name = _name_of(self._device)
            lease = _leases.found.get(name)
            if lease is None or not (lease.depth or lease.is_kept):
                if name.startswith("gpu-") and (settings.share or _has_gate(Board.of(name))):
                    self._lease = lease = None
                    return self  # its gates order its work, which would wait there for the end of its own lease
                lease = _lease_of(name)
            before, other = lease.depth, self._lease
            if other is not None and other is not lease and other.depth and other.owner == id(self):
                message = "this turn is open in another thread or on another device; make a turn for each"
                raise ArgumentError(message, name="turn")
            self._lease = lease
            if not before:
                lease.owner, lease.stream = id(self), self._stream
            lease.begin(self._tenant, self._priority, self._handles, self._timeout)
            return self
        except BaseException:
            if lease is not None:
                lease.cancel(before)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        depth = None
        try:
            if self._lease is not None:
                depth = self._lease.depth - 1
                self._lease.end()
        except BaseException:
            if self._lease is not None:
                depth = self._lease.depth - 1 if depth is None else depth
                if depth >= 0:
                    self._lease.cancel(depth)
            raise

    def __del__(self) -> None:
        # Ctrl-C before the first line of __exit__
        with contextlib.suppress(Exception):
            if self._lease is not None and self._lease.depth and self._lease.owner == id(self):
                self._lease.cancel(0)

    def pause(self) -> None:
        """Let another program have the GPU here, if it comes first; return when this thread has it again.

        Without competition it costs some microseconds. Put it between the parts of a long turn, such as the forward
        and the backward pass.

        Raises
        ------
        TurnTimeoutError
            The lease did not come back in the turn's `timeout`. The turn is over then.
        """
        if self._lease is not None:
            self._lease.pause(self._timeout)


def turn(
    tenant: str = "default",
    *,
    priority: int = 0,
    device: Any = None,
    stream: Any = None,
    timeout: float | None = None,
) -> Turn:
    """Lease a GPU from the other threads and processes of this host that share it, with any library.

    Put it around a training step, or a batch of inference. During a turn no other turn has the GPU, and no program
    that ``warpwell share`` runs. Other programs are not held back. At the end of a turn its work may still be on the
    GPU: the next program waits for it. At most 2 ms of work, or one turn, are queued behind the part that runs.

    One process for each device, the arbiter, decides which program is next. The first turn starts it.

    Parameters
    ----------
    tenant : str
        Name for fair shares, limits and status; at most 63 bytes.
    priority : int
        The waiting program of the largest priority is next, within the limits of the operator (8). One second of
        waiting counts as one priority. Programs of one priority share the time.
    device : int, str or device of a framework, optional
        Number of the GPU among those that this process sees (or as PyTorch writes it, ``"cuda:1"``), or a name of your
        own for another shared resource. By default, and for ``"cuda"``, the GPU of the thread, or the first one.
        Without a GPU, and for ``"cpu"``, a turn is only a lease.
    stream : stream or sequence of streams, optional
        Streams of PyTorch, CuPy or numba, or their handles, that have the turn's work. By default all work of the
        thread's context is waited for, and the default stream measures what is queued.
    timeout : float, optional
        Maximum time to wait in seconds; at least 0.05 s.

    Returns
    -------
    Turn
        A context manager that can be used again, and has `pause`.

    Raises
    ------
    ArgumentError
        An argument is invalid.
    DeviceNotFoundError
        This process sees no such GPU (when the turn begins).
    SchedulerError
        The folder of the boards cannot be used, or no arbiter starts (when the turn begins).
    TurnTimeoutError
        The turn did not begin in time (when it begins).

    Examples
    --------
    >>> import warpwell as ww
    >>> for step in range(3):
    ...     with ww.turn("training") as lease:
    ...         loss = step * 2                      # the forward pass
    ...         lease.pause()
    ...         loss = -loss                         # the backward pass
    """
    if type(tenant) is not str or not tenant or len(tenant.encode(errors="replace")) > _MAX_TENANT_BYTES:
        message = f"tenant must be a string of 1 to {_MAX_TENANT_BYTES} bytes, got {tenant!r:.70}"
        raise ArgumentError(message, name="tenant")
    if type(priority) is not int or not -_MAX_PRIORITY < priority < _MAX_PRIORITY:
        priority = checked_integer(priority, "priority", minimum=-_MAX_PRIORITY, maximum=_MAX_PRIORITY)
    if timeout is not None:
        timeout = checked_timeout(timeout)
    return Turn(tenant, priority, device, stream, timeout)


def _name_of(device: Any) -> str:
    """Return the name of a device, which all of its users have in common."""
    if device is not None and not isinstance(device, int):
        torch = _TORCH.fullmatch(str(device))
        if torch is not None:
            if torch[1] == "cpu":
                return NO_GPU
            device = None if torch[2] is None else int(torch[2])
    if device is None:
        key = current_context()
    elif isinstance(device, str):
        if not _NAME.fullmatch(device):
            message = f"device must be 1 to 64 letters, digits, dots, dashes and underscores, got {device!r:.70}"
            raise ArgumentError(message, name="device")
        return device
    else:
        number = getattr(device, "index", getattr(device, "id", device))
        key = -1 - checked_integer(0 if number is None else number, "device", minimum=0, maximum=1 << 16)
    found = _names.get(key)
    if found is None:
        found = _names[key] = device_name(None if key >= 0 else -1 - key)
    return found


class Lease:
    """The slot of a thread on the board of a device. Its methods are the thread's own, except `release` and `retire`.

    Attributes
    ----------
    depth : int
        Turns that are open, one inside the other.
    owner : int
        Identity of the outermost open `Turn`.
    stream : object
        Streams of the last turn. They live until the next turn begins, because a new stream may have the handle of a
        destroyed one.
    inside : bool
        Whether the thread is in a turn: no other thread may release the device.
    """

    def __init__(self, board: Board) -> None:
        self.board, self.work = board, Work()
        self.depth = self.owner = 0
        self.stream: object = None
        self.inside = False
        self._lock = threading.RLock()  # a handler of signals may begin a turn, too
        self._entries, self._marked = 0, 0.0
        self._handles: tuple[int, ...] = ()
        self._silent_beats: int | None = None
        self._users: dict[tuple[int, int, int], float] = {}  # when a waiting thread saw first that they had the device
        self._is_retired, self._process = False, os.getpid()
        self._tenant = ("default", 0)
        self._has_keeper = False  # the first turn starts it, after the thread's leases include this one
        self._take_slot()

    def begin(self, tenant: str, priority: int, handles: tuple[int, ...], timeout: float | None) -> None:
        """Begin a turn. A turn inside another one is a part of it, and so is one of a signal handler meanwhile."""
        if self.depth:
            self.depth += 1
            return
        self.depth = 1
        if self._tenant != (tenant, priority):
            self.release()
            self._tenant = tenant, priority
            self._fill_slot()
        if not self._has_keeper:
            self._start_keeper()
        self._handles = handles
        self._enter(timeout)

    def pause(self, timeout: float | None) -> None:
        """Leave the device inside a turn if the gate is closed, and enter again."""
        if not self.depth:
            return
        if self._is_open:
            now = clock.monotonic()
            if now - self._marked >= MARK_SECONDS:
                self._marked = now
                self.work.mark(self._handles)
                self.work.wait_ahead()
            return
        try:
            self._show_waiting()  # before DONE, so that the busy period does not end here
            self._leave()
            self._enter(timeout)
        except BaseException:
            self.cancel(0)  # the turn is over: later work of the block is without the lease
            raise

    def end(self) -> None:
        """End a turn."""
        if self.depth == 1:
            self._leave()
        if self.depth:
            self.depth -= 1

    def cancel(self, depth: int) -> None:
        """Undo an interrupted beginning or end, which may be half done; then `depth` turns are open."""
        self.depth = depth
        if not depth:
            self.work.forget_mark()
            self.inside = False
            self._store(Board.HELD, 0)
            self.board.wake_slot(self._index)  # the keeper releases the device

    def release(self) -> None:
        """Release the device when the GPU has done the work, unless the thread is in a turn. Any thread may call it."""
        with self._lock:
            if self.inside or not self._is_in_flight:
                return
            entries = self._entries
        self.work.drain()
        with self._lock:
            if self.inside or self._entries != entries:
                return
            self._store(Board.DONE, self.board.fields[self._at + Board.ISSUED])
        if not self._is_open:
            self.board.ring()

    def retire(self) -> None:
        """Free the slot, because its thread has ended. Any thread may call it."""
        if self._process == os.getpid():
            self.inside, self._is_retired = False, True
            self.board.wake_slot(self._index)

    # -- words of the slot -----------------------------------------------------------------------------------------

    @property
    def _is_own(self) -> bool:
        """Whether the slot is this lease's. A process loses its locks if it closes any descriptor of the file."""
        return self.board.fields[self._at + Board.SERIAL] == self._serial

    @property
    def _is_open(self) -> bool:
        return self.board.fields[self._at + Board.GATE] == 1 and self._is_own

    @property
    def is_kept(self) -> bool:
        """Whether the next turn can begin without a look at other programs."""
        return self._is_in_flight and self._is_open

    @property
    def _is_in_flight(self) -> bool:
        fields, at = self.board.fields, self._at
        return fields[at + Board.ISSUED] != fields[at + Board.DONE] and self._is_own

    def _store(self, word: int, value: int) -> None:
        if self._is_own:
            self.board.fields[self._at + word] = value

    def _take_slot(self) -> None:
        tenant, priority = self._tenant
        slot = self.board.take_slot(Board.TURN, self._process, priority, tenant)
        if slot is None:
            raise SchedulerError(f"all slots of {self.board.name} are in use; end some of its programs or threads")
        self._index, self._serial = slot
        self._at = self.board.slot(self._index)

    def _fill_slot(self) -> None:
        """Write process, priority and tenant to the slot. For the arbiter, this is a new program."""
        if self.board.keep_slot(self._index):
            tenant, priority = self._tenant
            self._serial = self.board.fill_slot(self._index, Board.TURN, self._process, priority, tenant)
        else:
            self._take_slot()

    # -- entering and leaving --------------------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter exits
            threading.Thread(target=self._keep, name="warpwell-lease", daemon=True).start()
            self._has_keeper = True

    def _keep(self) -> None:
        """Release the device if another program is active while the thread does something else."""
        relax_captures()
        entries = 0
        while not self._is_retired:
            index, opened, before, entries = self._index, self.board.opened(self._index), entries, self._entries
            with contextlib.suppress(Exception):  # of the driver: it looks again
                is_contended = self._is_contended or not self.work.has_context or self._is_awaited()
                if is_contended and not self.inside:
                    self.release()
            is_busy = self._is_in_flight or entries != before
            self.board.wait_for_gate(index, opened, LOOK_SECONDS if is_busy else IDLE_LOOK_SECONDS)
        with contextlib.suppress(Exception):
            self.release()
        if self.board.keep_slot(self._index):
            self.board.release_slot(self._index)

    @property
    def _is_contended(self) -> bool:
        """Whether another program was active recently, or comes first."""
        return not self._is_open or self.board.fields[self._at + Board.BUDGET_NS] != 0

    def _is_awaited(self) -> bool:
        """Return True if another program waits, also if the arbiter has been stopped and so reports no competition."""
        board = self.board
        return any(
            index != self._index and board.fields[board.slot(index) + Board.HELD] for index, _ in board.used_slots()
        )

    def _enter(self, timeout: float | None) -> None:
        with self._lock:
            self.inside = self.is_kept
            self._entries += self.inside
        self._marked = clock.monotonic()
        if self.inside:
            self._store(Board.HELD, 0)  # of a pause, if the gate has opened again
            self.work.wait_ahead()
            return
        self.release()
        self._wait(timeout)
        self._marked = clock.monotonic()
        self.work.resume()

    def _leave(self) -> None:
        try:
            self.work.mark(self._handles)
        finally:
            self.inside = False
        if not (self._is_open and self._has_keeper):
            self.release()
        elif self._is_contended:
            self.board.wake_slot(self._index)  # the keeper releases the device

    def _wait(self, timeout: float | None) -> None:
        """Wait until the gate is open, and enter."""
        board, began = self.board, clock.monotonic()
        until = None if timeout is None else began + max(timeout, MIN_TIMEOUT_SECONDS)
        beats, arbitrated, is_shown = board.beats, began, False
        beaten = began - SILENT_SECONDS if beats == self._silent_beats else began
        self._users = {}
        try:
            while True:
                index, opened, now = self._index, board.opened(self._index), clock.monotonic()
                if not self._is_own:
                    self._fill_slot()
                self._show_waiting()
                if board.beats != beats:
                    beats, beaten = board.beats, now
                problem = _start_arbiter(board)
                if problem is None:
                    arbitrated = now
                if self._try_to_enter(beats, now - beaten):
                    return
                if now - arbitrated > START_SECONDS:
                    raise SchedulerError(
                        f"the arbiter of {board.name} does not start ({problem}); "
                        f"`python -m warpwell share arbiter {board.path}` shows the error"
                    )
                if until is not None and now >= until:
                    raise TurnTimeoutError(
                        f"no turn at {board.name} in {timeout:g} s; `warpwell share status` shows which program has it",
                        device=board.name,
                    )
                if not is_shown:
                    is_shown = True
                    board.ring()
                board.wait_for_gate(index, opened, LOOK_SECONDS if until is None else min(LOOK_SECONDS, until - now))
        finally:
            self._store(Board.HELD, 0)

    def _show_waiting(self) -> None:
        self._store(Board.HELD, clock.monotonic_ns() | 1)

    def _try_to_enter(self, beats: int, silent_seconds: float) -> bool:
        """Enter if no other lease is inside, and the gate is open or no arbiter has been alive for a time."""
        board, fields, at = self.board, self.board.fields, self._at
        with self._lock:
            if silent_seconds >= SILENT_SECONDS:
                self._silent_beats = beats
            has_arbiter = silent_seconds < SILENT_SECONDS and board.arbiter is not None
            if has_arbiter and not self._is_open:
                return False
            if fields[at + Board.STATE] == Board.OVERDUE:
                self._store(Board.STATE, Board.IDLE)  # an arbiter that was killed cannot: its last turn has ended
            self._store(Board.ISSUED, (fields[at + Board.DONE] + 1) % (1 << 64))
            board.wake_slot(self._index)  # a full memory fence; and the keeper looks more often
            if self._is_open:
                may_enter = not self._is_device_used(only_leases=True)
            else:
                is_stopped = silent_seconds >= FAIL_OPEN_SECONDS and board.arbiter is not None
                is_without = board.beats == beats and (board.arbiter is None or silent_seconds >= SILENT_SECONDS)
                may_enter = not self._is_device_used(only_leases=False, fails_open=is_stopped) and is_without
            if may_enter and self._is_in_flight:
                self.inside = True
                self._entries += 1
                return True
            self._store(Board.ISSUED, fields[at + Board.DONE])
        return False

    def _is_device_used(self, only_leases: bool, fails_open: bool = False) -> bool:
        """Return True if another slot has work on the device and has not exceeded its time for that.

        With `fails_open`, the arbiter is stopped: this thread has seen for how long another program had the device.
        """
        board, fields, now = self.board, self.board.fields, clock.monotonic()
        users: dict[tuple[int, int, int], float] = {}
        for index, serial in board.used_slots():
            at = board.slot(index)
            is_lease, issued = fields[at + Board.KIND] == Board.TURN, fields[at + Board.ISSUED]
            if index == self._index or (only_leases and not is_lease) or issued == fields[at + Board.DONE]:
                continue
            if fields[at + Board.STATE] == Board.OVERDUE or not board.is_alive(index):
                continue
            user = index, serial, issued if is_lease else 0
            users[user] = self._users.get(user, now)  # a lease that retreats has the same number at its next attempt
        self._users = users
        return any(not fails_open or now - since < FAIL_OPEN_SECONDS for since in users.values())


def _has_gate(board: Board) -> bool:
    """Return True if this process has a gate of the driver layer or of the pass-through driver on a board."""
    for index, _ in board.used_slots():
        kind = board.fields[board.slot(index) + Board.KIND]
        if kind == Board.STREAMS and board.named_process(index) == os.getpid() and board.has_slot(index):
            return True
        if kind == Board.WORKER and board.named_process(index) == os.getpid() and board.owner(index):
            return True  # a program of another container may have the same number
    return False


def _start_arbiter(board: Board) -> object:
    """Start an arbiter if none is alive or starting; return None if one is alive, else the reason why none is."""
    if board.arbiter is not None:
        return None
    try:
        board.ensure_arbiter()
    except OSError as error:
        return error.strerror or error
    return "it exits, or is starting"


class _Ticket:
    """An object that lives as long as its thread."""


class _Leases(threading.local):
    """Leases of the calling thread, by device."""

    def __init__(self) -> None:
        self.found: dict[str, Lease] = {}
        self.tickets: list[_Ticket] = []


_all: weakref.WeakSet[Lease] = weakref.WeakSet()
_leases = _Leases()


def _after_fork() -> None:
    """Forget all leases in a forked child: locks are not inherited, and their threads do not exist there."""
    global _leases
    for lease in _all:
        lease.depth = 0  # a turn that was open at the fork is the parent's
    _leases = _Leases()
    Board.forget()


os.register_at_fork(after_in_child=_after_fork)


def _lease_of(name: str) -> Lease:
    """Return the calling thread's lease of a device."""
    found = _leases.found.get(name)
    if found is None:
        found = _leases.found[name] = Lease(Board.of(name))
        _all.add(found)
        ticket = _Ticket()
        _leases.tickets.append(ticket)
        weakref.finalize(ticket, found.retire).atexit = False
    return found
