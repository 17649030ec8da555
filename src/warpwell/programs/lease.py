"""`turn`: the lease of a GPU for a block of a program; `Lease`: the slot of a thread on the board of a device.

To the arbiter, a lease is a program with a single call, which lasts from the beginning of a turn to its end or pause.
The slot's fields ISSUED and DONE differ while the thread is in a turn, and after the turn for as long as the GPU may
have work of it. When the GPU has done that work, the thread or the lease's keeper thread stores DONE. So a loop of
turns without competition needs no system call. ``driver/native/gate.h`` defines the memory order.

At most one lease is inside at a time, with or without a live arbiter: a lease stores ISSUED, then (after a fence) looks
for another lease that is inside, and retreats if the other lease has not exceeded its hold time. If no arbiter is
alive, a waiting lease starts an arbiter. Until that arbiter runs, leases also enter through closed gates, in no defined
order, but only if no program has work on the device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
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
from ..libcuda import NO_GPU, current_context, device_name, orders_calls
from .gpu_work import Work, relax_captures, stream_handles

LOOK_SECONDS = 20e-3
"""Interval at which a waiting thread checks its gate, and a keeper thread checks whether the GPU has done the work."""

CLAIM_SECONDS = 2e-3
"""Time that a running lease of a lower level has to leave before the arbiter is woken. Chosen, not fitted."""

IDLE_LOOK_SECONDS = 0.25
"""Interval of the checks of an idle lease's keeper thread, in case it has missed a wake-up."""

MIN_TIMEOUT_SECONDS = 50e-3
"""Minimum timeout of a turn: the arbiter needs some milliseconds to open the gate of a device that no program uses."""

MARK_SECONDS = 0.25e-3
"""Minimum time between two pauses that each put a mark (see `Work`) behind the work. A mark costs some microseconds."""

SILENT_SECONDS = 0.5
"""Time without a beat of the arbiter after which a lease enters as if no arbiter were alive. This is several times the
interval of beats, because the arbiter may have to wait for a processor."""

FAIL_OPEN_SECONDS = 10.0
"""Time without a beat after which the arbiter counts as stopped. A lease then enters even while another turn or program
has the device, if the lease has seen the same turn or program there for this time, too."""

START_SECONDS = 120.0
"""Timeout for the start of an arbiter. Its import took 56 s on two cores with a load of 20."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_PRIORITY = 1 << 31
_MAX_TENANT_BYTES = 63

_TORCH = re.compile(r"(cpu|cuda)(?::(\d+))?")
"""A device of PyTorch as text."""

_names: dict[int, str] = {}
"""Names of GPUs, by CUDA context, or by -1 minus the number of the GPU."""


class Turn:
    """A ``with`` block in which this thread alone, of all programs that share a GPU, uses that GPU. See `turn`."""

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
                if name.startswith("gpu-"):
                    if orders_calls():
                        self._lease = lease = None
                        return self  # the gates order this program, and its work would wait for its own lease
                    if settings.share:
                        _report_unordered()
                lease = _lease_of(name)
            while lease.is_interrupted:  # the signal handler that calls this interrupted an entry
                lease.release()
                name += "'"
                lease = _lease_of(name)
            before, opened = lease.depth, self._lease
            if opened is not None and opened is not lease and opened.depth and opened.owner == id(self):
                message = "this turn is open in another thread or device, or in the interrupted code; make one for each"
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
        """Let another program have the GPU if that program is next, and return when this thread has the GPU again.

        If no other program waits, a pause costs some microseconds. Put pauses between the parts of a long turn, such as
        the forward and the backward pass.

        Raises
        ------
        TurnTimeoutError
            This thread did not get the GPU back within the turn's `timeout`. The turn is over.
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

    Put a turn around a training step, or around a batch of inference. During a turn, no other turn has the GPU, and
    neither does a program that ``warpwell share`` runs. Programs without turns are not held back unless ``warpwell
    share`` runs them. When a turn ends, the GPU may still have work of that turn; the next program waits until it is
    done. To keep this wait short, the beginning of a turn and a pause wait for the GPU while more than 2 ms of the
    thread's work, and more than one turn, are queued.

    One process for each device, the arbiter, decides which program is next. The first turn starts the arbiter.

    A turn in a signal handler is a part of the turn that the signal interrupts. While that turn is waiting or ending,
    the handler's turn waits, too.

    Parameters
    ----------
    tenant : str
        Name for fair shares, limits and status; at most 63 bytes.
    priority : int
        The waiting program with the highest priority is next. The operator limits priorities, by default to 8. Each
        second of waiting raises a program's priority by one. Programs of equal priority share the time.
    device : int, str or device of a framework, optional
        Number of the GPU among those that this process sees (or as PyTorch writes it, ``"cuda:1"``), or a name of your
        own for another shared resource. By default, and for ``"cuda"``, the GPU of the thread, or the first one.
        Without a GPU, and for ``"cpu"``, turns are ordered in the same way, but have no GPU work. A turn is not a lock:
        if it exceeds the hold time of its tenant while another turn waits, the waiting turn begins after one to two
        hold times, and the two overlap. The hold time is 10 s; ``warpwell share limit`` changes it.
    stream : stream or sequence of streams, optional
        Streams of PyTorch, CuPy or numba, or their handles, that contain the turn's work. By default, the next program
        waits for all work of the thread's CUDA context, and the queued work is measured in the default stream.
    timeout : float, optional
        Maximum time to wait in seconds; at least 0.05 s.

    Returns
    -------
    Turn
        A context manager, which can be entered again after its end and has the method `pause`. The call of `turn`
        itself raises only `ArgumentError`; entering the ``with`` block can raise all errors below.

    Raises
    ------
    ArgumentError
        An argument is invalid.
    DeviceNotFoundError
        This process sees no such GPU.
    SchedulerError
        The folder of the boards, the files in which leases are recorded, cannot be used, or no arbiter starts.
    TurnTimeoutError
        The turn could not begin within `timeout`.

    Examples
    --------
    >>> import warpwell as ww
    >>> for step in range(3):
    ...     with ww.turn("training") as lease:
    ...         loss = step * 2                      # the forward pass
    ...         lease.pause()
    ...         loss = -loss                         # the backward pass

    A resource that is not a GPU:

    >>> with ww.turn("training", device="scratch-disk"):
    ...     data = list(range(3))
    """
    if type(tenant) is not str or not tenant or len(tenant.encode(errors="replace")) > _MAX_TENANT_BYTES:
        message = f"tenant must be a string of 1 to {_MAX_TENANT_BYTES} bytes, got {tenant!r:.70}"
        raise ArgumentError(message, name="tenant")
    priority = checked_integer(priority, "priority", minimum=-_MAX_PRIORITY, maximum=_MAX_PRIORITY)
    return Turn(tenant, priority, device, stream, checked_timeout(timeout))


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
    """The slot of a thread on the board of a device. Only that thread calls methods other than `release` and `retire`.

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
        Whether the thread is in a turn. If so, no other thread may release the device.
    has_keeper : bool or None
        Whether the keeper thread runs. None: it must not, because a signal handler may not start a thread.
    """

    def __init__(self, board: Board) -> None:
        self.board, self.work = board, Work()
        self.depth = self.owner = 0
        self.stream: object = None
        self.inside = False
        self._lock = threading.RLock()  # a handler of signals may begin a turn, too
        self._entries = self._nested = 0
        self._marked = 0.0
        self._handles: tuple[int, ...] = ()
        self._silent_beats: int | None = None
        self._users: dict[tuple[int, int, int], float] = {}  # when a waiting thread first saw these users of the device
        self._is_retired, self._process = False, os.getpid()
        self._tenant = ("default", 0)
        self.has_keeper: bool | None = False
        self._take_slot()

    def begin(self, tenant: str, priority: int, handles: tuple[int, ...], timeout: float | None) -> None:
        """Begin a turn. A nested turn is a part of the outer one."""
        if self.depth:
            self.depth += 1
            self._nested += 1
            self.work.forget_mark()
            return
        self.depth = 1
        if self._tenant != (tenant, priority):
            self.release()
            self._tenant = tenant, priority
            self._fill_slot()
        if self.has_keeper is False:  # not in `__init__`: first, the thread's leases must contain this lease
            self._start_keeper()
        self._handles = handles
        self._enter(timeout)

    def pause(self, timeout: float | None) -> None:
        """Leave the device and enter it again, within a turn, if the gate is closed."""
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
            self.cancel(0)  # the turn is over: later work of the block runs without the lease
            raise

    def end(self) -> None:
        """End a turn."""
        if self.depth == 1:
            self._leave()
        if self.depth:
            self.depth -= 1

    def cancel(self, depth: int) -> None:
        """Undo a beginning or an end that was interrupted halfway. Afterwards, `depth` turns are open."""
        self.depth = depth
        if not depth:
            self.work.forget_mark()
            self.inside = False
            self._store(Board.HELD, 0)
            if self.has_keeper is None:
                self.release()
            else:
                self.board.wake_slot(self._index, Board.CLOSED)  # the keeper releases the device

    def release(self) -> None:
        """Wait for the GPU work and release the device, unless the thread is in a turn. Any thread may call it."""
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
            successor = self.board.fields[self._at + Board.SUCCESSOR]
            if successor:
                self.board.wake_slot(successor, Board.OPENED)  # a fence: the successor sees DONE, and wakes the arbiter
            else:
                self.board.ring()

    def retire(self) -> None:
        """Free the slot, because its thread has ended. Any thread may call it."""
        if self._process == os.getpid():
            self.inside, self._is_retired = False, True
            self.board.wake_slot(self._index, Board.CLOSED)

    # -- words of the slot -----------------------------------------------------------------------------------------

    @property
    def _is_own(self) -> bool:
        """Whether this lease still has its slot. A process that closes any descriptor of the board loses its slots."""
        return self.board.fields[self._at + Board.SERIAL] == self._serial

    @property
    def _is_open(self) -> bool:
        return self.board.fields[self._at + Board.GATE] == 1 and self._is_own

    @property
    def _is_next(self) -> bool:
        """Whether this lease is the successor of the running lease, and the running lease has left."""
        fields, running = self.board.fields, self.board.running
        if running is None:
            return False
        at = self.board.slot(running)
        key = self.board.owner_key(self._index, self._serial)
        is_successor = fields[at + Board.SUCCESSOR] == key and self._is_own
        has_left = fields[at + Board.GATE] == 0 and fields[at + Board.ISSUED] == fields[at + Board.DONE]
        return is_successor and has_left

    def _claim(self) -> bool:
        """Become the successor of the running lease and close its gate if its level is lower; return True if so.

        The arbiter learns of the claim when this lease has entered, or after `CLAIM_SECONDS`, and confirms or undoes
        it.
        """
        fields, running = self.board.fields, self.board.running
        if running is None:
            return False
        at = self.board.slot(running)
        is_open_lease = fields[at + Board.GATE] == 1 and fields[at + Board.KIND] == Board.TURN
        if not is_open_lease or fields[self._at + Board.BASE] <= fields[at + Board.LEVEL]:
            return False
        fields[at + Board.SUCCESSOR] = self.board.owner_key(self._index, self._serial)
        self.board.set_gate(running, False)
        return True

    @property
    def is_interrupted(self) -> bool:
        """Whether the thread is in a turn but does not have the device, because it is entering, waiting or leaving."""
        return self.depth > 0 and not (self.inside and self._is_in_flight)

    @property
    def is_kept(self) -> bool:
        """Whether the next turn can begin without a check of other programs."""
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
            raise SchedulerError(f"all slots of {self.board.name} are in use; end some programs or threads that use it")
        self._index, self._serial = slot
        self._at = self.board.slot(self._index)

    def _fill_slot(self) -> None:
        """Write process, priority and tenant to the slot. For the arbiter, this is a new program."""
        if self._process != os.getpid():  # a signal handler that forked returned in the child
            raise SchedulerError("a turn that began before a fork is the parent's; begin a new turn in the child")
        if self.board.keep_slot(self._index):
            tenant, priority = self._tenant
            self._serial = self.board.fill_slot(self._index, Board.TURN, self._process, priority, tenant)
        else:
            self._take_slot()

    # -- entering and leaving --------------------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter exits
            threading.Thread(target=self._run_keeper, name="warpwell-lease", daemon=True).start()
            self.has_keeper = True

    def _run_keeper(self) -> None:
        """Release the device when another program is active and the thread is not in a turn (keeper thread)."""
        relax_captures()
        entries = 0
        while not self._is_retired:
            index, before, entries = self._index, entries, self._entries
            closed = self.board.futex(index, Board.CLOSED)
            with contextlib.suppress(Exception):  # an error of the driver: the thread checks again
                is_contended = self._is_contended or not self.work.context or self._is_awaited()
                if is_contended and not self.inside:
                    self.release()
            is_busy = self._is_in_flight or entries != before
            self.board.wait_for_slot(index, Board.CLOSED, closed, LOOK_SECONDS if is_busy else IDLE_LOOK_SECONDS)
        with contextlib.suppress(Exception):
            self.release()
        if self.board.keep_slot(self._index):
            self.board.release_slot(self._index)

    @property
    def _is_contended(self) -> bool:
        """Whether another program was active recently, or is next."""
        return not self._is_open or self.board.fields[self._at + Board.BUDGET_NS] != 0

    def _is_awaited(self) -> bool:
        """Return True if another program waits, even if a stopped arbiter reports no competition."""
        board = self.board
        return any(
            index != self._index and board.fields[board.slot(index) + Board.HELD] for index, _ in board.used_slots()
        )

    def _enter(self, timeout: float | None) -> None:
        with self._lock:
            self.inside = self.is_kept
            self.inside = self.inside and self.is_kept  # unless a signal handler released it before the first store
            self._entries += self.inside
        self._marked = clock.monotonic()
        if self.inside:
            self._store(Board.HELD, 0)  # the job of a pause, if the gate has opened again
            self.work.wait_ahead()
            return
        self.release()
        self._wait(timeout)
        self._marked = clock.monotonic()
        self.work.resume()

    def _leave(self) -> None:
        nested = self._nested
        try:
            self.work.mark(self._handles)
        finally:
            if self._nested != nested:
                self.work.forget_mark()  # a signal handler had a part of the turn in the meantime
            self.inside = False
        if not (self._is_open and self.has_keeper):
            self.release()
        elif self._is_contended:
            self.board.wake_slot(self._index, Board.CLOSED)  # the keeper releases the device

    def _wait(self, timeout: float | None) -> None:
        """Wait until the gate is open, and enter."""
        board, began = self.board, clock.monotonic()
        until = None if timeout is None else began + max(timeout, MIN_TIMEOUT_SECONDS)
        beats, arbitrated = board.beats, began
        is_first, is_pause = True, board.fields[self._at + Board.HELD] != 0
        beaten = began - SILENT_SECONDS if beats == self._silent_beats else began
        self._users = {}
        try:
            while True:
                now = clock.monotonic()
                if not self._is_own:
                    self._fill_slot()
                opened = board.futex(self._index, Board.OPENED)
                self._show_waiting()
                has_claimed = False
                if not (self._is_open or self._is_next):
                    has_claimed = is_first and not is_pause and self._claim()
                    if not (has_claimed or (is_first and is_pause)):
                        board.ring()
                is_first = False
                if board.beats != beats:
                    beats, beaten = board.beats, now
                has_entered = self._try_to_enter(beats, now - beaten)
                if has_entered and self._is_open:
                    return  # an arbiter has opened the gate, so this thread need not start one
                problem = _start_arbiter(board)
                if has_entered:
                    return
                if problem is None:
                    arbitrated = now
                if now - arbitrated > START_SECONDS:
                    raise SchedulerError(
                        f"the arbiter of {board.name} did not start ({problem}); "
                        f"`python -m warpwell share arbiter {board.path}` shows the error"
                    )
                if until is not None and now >= until:
                    raise TurnTimeoutError(
                        f"no turn at {board.name} in {timeout:g} s; `warpwell share status` shows which program has it",
                        device=board.name,
                    )
                seconds = CLAIM_SECONDS if has_claimed else LOOK_SECONDS
                seconds = seconds if until is None else min(seconds, until - now)
                board.wait_for_slot(self._index, Board.OPENED, opened, seconds)
        finally:
            self._store(Board.HELD, 0)

    def _show_waiting(self) -> None:
        self._store(Board.HELD, clock.monotonic_ns() | 1)

    def _try_to_enter(self, beats: int, silent_seconds: float) -> bool:
        """Enter if no other lease is inside, and the gate is open or no arbiter is alive; return True if so."""
        board, fields, at = self.board, self.board.fields, self._at
        with self._lock:
            if silent_seconds >= SILENT_SECONDS:
                self._silent_beats = beats
            may_enter = self._is_open or self._is_next
            if not may_enter and silent_seconds < SILENT_SECONDS and board.arbiter is not None:
                return False
            self._store(Board.ISSUED, (fields[at + Board.DONE] + 1) % (1 << 64))
            board.fence()
            if self._is_open or self._is_next:
                may_enter = not self._is_device_used(only_leases=self._is_open)
            else:
                is_stopped = silent_seconds >= FAIL_OPEN_SECONDS and board.arbiter is not None
                is_without = board.beats == beats and (board.arbiter is None or silent_seconds >= SILENT_SECONDS)
                may_enter = not self._is_device_used(only_leases=False, fails_open=is_stopped) and is_without
            self.inside = may_enter
            self.inside = may_enter and self._is_in_flight  # unless a signal handler released it before the first store
            if self.inside:
                self._entries += 1
                if not self._is_open:
                    board.ring()
                return True
            self._store(Board.ISSUED, fields[at + Board.DONE])
        return False

    def _is_device_used(self, only_leases: bool, fails_open: bool = False) -> bool:
        """Return True if another slot has work on the device and has not exceeded its hold time.

        With `fails_open`, because the arbiter is stopped, a slot that this thread has seen there for
        `FAIL_OPEN_SECONDS` does not count.
        """
        board, fields, now = self.board, self.board.fields, clock.monotonic()
        users: dict[tuple[int, int, int], float] = {}
        for index, serial in board.used_slots():
            at = board.slot(index)
            is_lease, issued = fields[at + Board.KIND] == Board.TURN, fields[at + Board.ISSUED]
            done = fields[at + Board.DONE]
            if index == self._index or (only_leases and not is_lease) or issued == done:
                continue
            if fields[at + Board.UNDRAINED] == done + 1 or not board.is_alive(index):
                continue
            user = index, serial, issued if is_lease else 0
            users[user] = self._users.get(user, now)  # a lease that retreats uses the same number at its next attempt
        self._users = users
        return any(not fails_open or now - since < FAIL_OPEN_SECONDS for since in users.values())


@functools.cache
def _report_unordered() -> None:
    logging.getLogger(__package__).warning(
        "WARPWELL_SHARE is set, but this process does not use Warpwell's driver library: only turns are ordered; "
        "start the program with `warpwell share`, and keep LD_LIBRARY_PATH"
    )


def _start_arbiter(board: Board) -> object:
    """Start an arbiter if none is alive or starting. Return None if one is alive, else the reason why none is."""
    if board.arbiter is not None:
        return None
    try:
        board.ensure_arbiter()
    except OSError as error:
        return error.strerror or error
    return "the arbiter exits, or is starting"


class _Ticket:
    """An object that lives as long as its thread."""


class _Leases(threading.local):
    """Leases of the calling thread, by device."""

    def __init__(self) -> None:
        self.found: dict[str, Lease] = {}
        self.ticket = _Ticket()


_all: weakref.WeakSet[Lease] = weakref.WeakSet()
_leases = _Leases()


def _after_fork() -> None:
    """Forget all leases in a forked child: locks are not inherited, and their threads do not exist there."""
    global _leases
    for lease in _all:
        lease.depth = lease._serial = 0  # a turn that was open at the fork, and its slot, belong to the parent
    _leases = _Leases()
    Board.forget()


os.register_at_fork(after_in_child=_after_fork)


def _lease_of(name: str) -> Lease:
    """Return the calling thread's lease of a device; each interrupted lease adds an apostrophe to `name`."""
    found = _leases.found.get(name)
    if found is None:
        found = _leases.found[name] = Lease(Board.of(name.rstrip("'")))
        found.has_keeper = None if name.endswith("'") else False
        _all.add(found)
        weakref.finalize(_leases.ticket, found.retire).atexit = False
    return found
