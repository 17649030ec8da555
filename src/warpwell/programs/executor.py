"""`ProgramExecutor`: runs programs by opening and closing their gates; `Program`: a slot as the arbiter sees it.

A job is a busy period of a program: from a held call until the device has no call of the program. ``launch`` opens the
gate, ``preempt`` closes it; `Stopped` means that the device has passed all calls, `Ended` that the program is idle.
Other processes may write any value to the fields of slots. A wrong value delays programs, but raises no error here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .._os import clock
from ..driver import Board
from ..errors import TaskLostError
from ..scheduler.extend import Capacity, Ended, Executor, Job, Placement, Stopped

IDLE_SECONDS = 0.5e-3
"""Time without calls after which a busy period is over: several times the gap between launches in Python. With 1 ms,
training beside inference at a load of 0.2 made 5 % fewer steps on an H200, with the same latency."""

START_SECONDS = 20e-3
"""Time that a program has to pass its opened gate. A worker checks the gate at least every 50 us. If a worker needs
more than this time, it is stopped, or the machine is overloaded."""

DRAIN_SECONDS = 50e-3
"""Minimum time that the device has to pass the calls of a closed gate. After that, the driver's time slicing divides
the device between the program and the next program: the kernels may wait for another GPU whose gate is closed."""

MAX_DRAIN_SECONDS = 1.0
"""Maximum of that time, because programs themselves report the expected time of their calls."""

HOLD_SECONDS = 10.0
"""That time for a lease, because a program ends its turns itself. An operator can change this time. Chosen with the
H200 turns of 23 November."""

LEASE_START_SECONDS = 50e-3
"""Time that a lease has to pass its opened gate: its thread may wait for the interpreter's lock."""

_WRAP = 1 << 64


class Program:
    """A slot of a board, from its allocation to its release.

    Attributes
    ----------
    held : int
        0 if no call is held; else a value that changes as long as the program's process runs.
    issued, done : int
        Calls sent to the device, and calls that the device has passed. A program that no other program delays counts
        its calls late: until then `issued` has the highest bit and differs from `done`.
    changed : float
        When one of the three fields last differed from the previous reading.
    job : Job or None
        The program's unfinished busy period.
    is_open : bool
        Whether the arbiter has opened the program's gate.
    is_lease : bool
        Whether the program is a thread with `ww.turn`.
    has_gpu_gate : bool
        Whether the GPU waits at the gate, so that it can pass the opened gate before the program knows it.
    hold : float
        Minimum time that the device has to pass the program's calls, in seconds.
    used : float
        Time of the program on the device in seconds. A program that begins to compete gets at least the time of a busy
        competitor.
    """

    def __init__(self, own_board: Board, index: int, serial: int, now: float) -> None:
        self.board, self.index, self.serial = own_board, index, serial
        self._at = own_board.slot(index)
        self.pid, self.priority = own_board.named_process(index), own_board.priority(index)
        self.tenant = own_board.tenant(index)
        self.job: Job | None = None
        self.is_open = own_board.fields[self._at + Board.GATE] == 1
        self.is_lease = own_board.fields[self._at + Board.KIND] == Board.TURN
        self.has_gpu_gate = own_board.fields[self._at + Board.KIND] == Board.STREAMS
        self.hold = HOLD_SECONDS if self.is_lease else DRAIN_SECONDS
        self.start_seconds = LEASE_START_SECONDS if self.is_lease else START_SECONDS
        self.used = 0.0
        self.held = self.issued = self.done = 0
        self.changed, self.active = now, -1.0
        self._stuck: tuple[int, int, int] | None = None
        self._undrained: int | None = None
        self.read(now)
        self._idle_issued = self.issued

    @property
    def name(self) -> str:
        """The program's name in logs: tenant and process."""
        return f"{self.tenant}-{self.pid}"

    @property
    def in_flight(self) -> bool:
        """Whether the device has calls of the program."""
        return self.issued != self.done

    @property
    def is_attached(self) -> bool:
        """Whether the program still has the slot, and its process has not exited."""
        return self._has_slot and self.board.is_alive(self.index)

    @property
    def _has_slot(self) -> bool:
        """Whether the slot still belongs to this program: another one may have allocated it since the last step."""
        return self.board.fields[self._at + Board.SERIAL] == self.serial

    @property
    def is_overdue(self) -> bool:
        """Whether the device did not pass the program's calls in time, and has passed no call since then."""
        return self._undrained is not None

    def read(self, now: float) -> None:
        """Read the program's fields."""
        if not self._has_slot:
            return
        fields, at = self.board.fields, self._at
        found = fields[at + Board.HELD], fields[at + Board.DONE], fields[at + Board.ISSUED]  # `done` before `issued`
        if found != (self.held, self.done, self.issued):
            self.held, self.done, self.issued = found
            self.changed = now
            if self.is_overdue and self.done != self._undrained:
                self._undrained = None
                self.report(Board.IDLE)
        if self.job is not None:
            self.active = now

    def needs_job(self) -> bool:
        """Return True if a busy period begins: a call is held, or calls pass the gate that is still open."""
        if self.held:
            return self._stuck != (self.held, self.done, self.issued)
        if self.is_lease and not self.is_open:
            return self.is_inside  # the lease has entered as a successor, or without an arbiter
        return self.is_open and (self.in_flight or self.issued != self._idle_issued)

    @property
    def is_inside(self) -> bool:
        """Whether the program is a lease in a turn that is not overdue."""
        return self.is_lease and self.in_flight and not self.is_overdue

    @property
    def gave_up(self) -> bool:
        """Whether the program is a lease that has stopped waiting, because of its timeout or Ctrl-C."""
        return self.is_lease and not (self.held or self.in_flight) and self.job is not None and self.job.is_waiting

    def set_gate(self, is_open: bool) -> None:
        """Open or close the gate."""
        self.is_open = is_open
        if is_open:
            self.write(Board.SUCCESSOR, 0)
        if self._has_slot:
            self.board.set_gate(self.index, is_open)

    def assert_gate(self) -> None:
        """Undo a change of the gate by another process, such as the claim of a lease that does not come first."""
        if self._has_slot and self.board.fields[self._at + Board.GATE] != self.is_open:
            self.set_gate(self.is_open)

    def write(self, word: int, value: int) -> None:
        """Write a word of the program's slot that belongs to the arbiter."""
        if self._has_slot:
            self.board.fields[self._at + word] = value

    def write_levels(self, level: int, base: int) -> None:
        """Write the level at which a lease is launched, and its level without aging, for claims of leases."""
        self.write(Board.LEVEL, max(0, Board.LEVEL_ZERO + level))  # an operator may have named any priority
        self.write(Board.BASE, max(0, Board.LEVEL_ZERO + base))

    def precede(self, successor: Program) -> None:
        """Record the program that is next. If that program is a lease, it enters when this program has left."""
        key = self.board.owner_key(successor.index, successor.serial)
        self.write(Board.SUCCESSOR, key if successor.is_lease else 0)

    def drain_seconds(self) -> float:
        """Return the time that the device has to pass the program's calls; 0 if it passed none in the previous time."""
        if self.is_overdue:
            return 0.0
        expected = self.board.fields[self._at + Board.EXPECTED_NS]
        return max(self.hold, min(4e-9 * expected, MAX_DRAIN_SECONDS))

    def mark_undrained(self) -> None:
        """Record that the device did not pass its calls in time. A new lease then does not wait for this program."""
        self._undrained = self.done
        self.write(Board.UNDRAINED, (self.done + 1) % _WRAP)  # a late write does not count for the next turn
        self.report(Board.OVERDUE)

    def mark_idle(self, is_stuck: bool) -> None:
        """Record that a busy period is over; with `is_stuck`, ignore its held call until the program's process runs."""
        self._idle_issued = self.issued
        self._stuck = (self.held, self.done, self.issued) if is_stuck else None

    def report(self, state: int, used_seconds: float | None = None) -> None:
        """Write the state of the program for `program_status`, and the time of a residency that is over."""
        if not self._has_slot:
            return
        self.used += used_seconds or 0.0
        if self.is_overdue and state != Board.RUNNING:
            state = Board.OVERDUE
        fields, at = self.board.fields, self._at
        fields[at + Board.STATE], fields[at + Board.SINCE_NS] = state, clock.monotonic_ns()
        if used_seconds is not None:
            fields[at + Board.USED_NS] = (fields[at + Board.USED_NS] + int(used_seconds * 1e9)) % _WRAP
        if state == Board.RUNNING:
            fields[at + Board.LAUNCHES] = (fields[at + Board.LAUNCHES] + 1) % _WRAP

    def bound_work(self, nanoseconds: int) -> None:
        """Set the expected work that the program may have on the device; 0: no bound."""
        if self.board.fields[self._at + Board.BUDGET_NS] != nanoseconds:
            self.write(Board.BUDGET_NS, nanoseconds)
            if self.is_lease:
                self.board.wake_slot(self.index, Board.CLOSED)  # its keeper thread releases the device after the turn


class ProgramExecutor(Executor):
    """Opens and closes the gates of programs. The `launch` of a task is its `Program`.

    Parameters
    ----------
    own_board : Board
    now : callable
        Returns the monotonic time in seconds.
    """

    capacity = Capacity()

    def __init__(self, own_board: Board, now: Callable[[], float] = clock.monotonic) -> None:
        self.board, self._now, self._start = own_board, now, now()
        self._running: dict[Job, float] = {}
        self._opening: set[Job] = set()
        self._closed: dict[Job, float] = {}
        self._lingering: set[Program] = set()
        self._draining: dict[Program, float] = {}
        self.programs: Collection[Program] = ()
        own_board.running = None  # the value is of an arbiter that was killed
        own_board.fence()

    @property
    def poll_seconds(self) -> float | None:
        """Interval at which the arbiter reads programs with calls behind a closed gate, or None without such calls.

        A lease wakes the arbiter when its turn ends, so the arbiter reads leases less often.
        """
        programs = [_program(job) for job in self._closed] + list(self._draining)
        if not (programs or self._opening):
            return None
        now = self.now()
        if any(not (program.in_flight or self._may_have_passed(program, now)) for program in programs):
            return 0.0
        return 2e-3 if programs and all(program.is_lease for program in programs) else 0.2e-3

    def welcome(self, program: Program) -> None:
        """Close the gate of a new program if another gate is open."""
        if program.is_open and (self._running or self._lingering):
            program.set_gate(False)
        elif program.is_open:
            self._lingering.add(program)

    def wait_for(self, program: Program, now: float) -> None:
        """Open no gate while a lease is inside behind a closed gate, unless it is overdue.

        The lease entered without an arbiter, or an arbiter closed the gate of the lease and was killed.
        """
        if program.is_lease and program.in_flight and not (program.is_open or program.is_overdue):
            if program.job is None or program.job.is_waiting:
                self._draining.setdefault(program, now)

    def forget(self, program: Program) -> None:
        """Forget a program whose slot is free."""
        self._lingering.discard(program)
        self._draining.pop(program, None)
        if program.index == self.board.running:
            self.board.running = None
            self.board.fence()  # the next `read` finds a lease that has entered as the program's successor

    def launch(self, job: Job, placement: Placement) -> None:
        program, now = _program(job), self.now()
        self._running[job] = now
        program.report(Board.RUNNING)
        self._lingering.discard(program)
        self._draining.pop(program, None)
        self._revoke(program, now)
        for idle in self._lingering:
            idle.set_gate(False)
            self._draining[idle] = now
        self._lingering.clear()
        self._opening.add(job)
        self._open_gates(now)

    def _revoke(self, program: Program, now: float) -> None:
        """Let no lease enter as the successor of the running lease, and open no gate before an entered lease leaves.

        A lease stores ISSUED, then (fence) loads `running`. So either the lease finds no `running`, or this method
        finds the lease.
        """
        if self.board.running is None:
            return
        self.board.running = None
        self.board.fence()
        for rival in self.programs:
            if rival is not program:
                rival.read(now)
                self.wait_for(rival, now)

    def preempt(self, job: Job, mode: str = "drain") -> None:
        program, now = _program(job), self.now()
        self._opening.discard(job)
        self._closed[job] = now
        program.read(now)  # a change that `poll` finds is then later than `closed`
        program.set_gate(False)
        program.report(Board.LEAVING)

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """Do nothing: a program has the whole device."""

    def progress(self, job: Job) -> int:
        return 0

    def cost(self, victim: Job, residents: Sequence[Job]) -> float:
        fields, at = self.board.fields, self.board.slot(_program(victim).index)
        return 1e-9 * min(fields[at + Board.EXPECTED_NS] + fields[at + Board.LONGEST_NS], 1 << 40) + 0.3e-3

    def poll(self) -> list[Ended | Stopped]:
        now = self.now()
        found: list[Ended | Stopped] = []
        for job in list(self._running):
            program = _program(job)
            program.read(now)
            event = self._event_of(job, program, now)
            if event is not None:
                found.append(event)
                self._leave(job, program, event, now)
        self._open_gates(now)
        return found

    def now(self) -> float:
        return self._now() - self._start

    def wait(self, until: float | None) -> None:
        seconds = 1.0 if until is None else min(1.0, max(0.0, until - self.now()))
        self.board.wait(self.board.bell, seconds)

    def wake(self) -> None:
        self.board.ring()

    def discard(self, job: Job) -> None:
        program = _program(job)
        program.report(Board.IDLE)
        program.job = None

    def _event_of(self, job: Job, program: Program, now: float) -> Ended | Stopped | None:
        if not program.is_attached:
            error = TaskLostError(f"program {program.name!r} has exited", task=program.name)
            return Ended(job, now, error)
        closed, quiet = self._closed.get(job), now - max(program.changed, self._running[job])
        if closed is not None:
            if self._may_have_passed(program, now) or (program.in_flight and now < closed + program.drain_seconds()):
                return None
            if program.in_flight:
                program.mark_undrained()
            is_frozen = program.in_flight and now - program.changed >= program.hold
            return Stopped(job, now, 0) if program.held and not is_frozen else Ended(job, now)
        if job in self._opening or program.in_flight:
            return None
        return Ended(job, now) if quiet >= (program.start_seconds if program.held else IDLE_SECONDS) else None

    def _may_have_passed(self, program: Program, now: float) -> bool:
        """Return True if the GPU may have passed the gate before it was closed, and the program may not know it yet."""
        closed = self._closed.get(program.job) if program.job is not None else None
        is_unknown = closed is not None and program.changed <= closed and now < closed + program.start_seconds
        return is_unknown and program.has_gpu_gate and bool(program.held) and not program.in_flight

    def _leave(self, job: Job, program: Program, event: Ended | Stopped, now: float) -> None:
        used = now - self._running.pop(job)
        self._opening.discard(job)
        if isinstance(event, Stopped):
            program.report(Board.WAITING, used)
        else:
            program.mark_idle(bool(program.held))
            program.job = None
            if event.error is None:
                program.report(Board.IDLE, used)
            if program.is_open and event.error is None:
                self._lingering.add(program)
        self._closed.pop(job, None)

    def _open_gates(self, now: float) -> None:
        """Open the gates of launched programs if the device has passed the calls of the programs before them."""
        for program, closed in list(self._draining.items()):
            program.read(now)
            is_late = now >= closed + program.drain_seconds()
            if not program.in_flight or is_late or not program.is_attached:
                del self._draining[program]
                if is_late and program.in_flight:
                    program.mark_undrained()
        if not self._draining:
            for job in self._opening:
                program = _program(job)
                program.set_gate(True)
                program.changed = now
                self.board.running = program.index if program.is_lease else None
            self._opening.clear()


def _program(job: Job) -> Program:
    program: Program = job.task.launch
    return program
