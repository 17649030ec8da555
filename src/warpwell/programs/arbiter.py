"""`Arbiter`: the process that opens and closes the gates of a GPU's programs, by the scheduler's `Core`."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .._check import checked_seconds
from .._os import clock
from ..driver import Board
from ..errors import SchedulerError, WarpwellError
from ..replacing import replacing
from ..scheduler import Profile, Tenant
from ..scheduler.extend import Core, Event, Log, Request, Task
from .executor import HOLD_SECONDS, Program, ProgramExecutor
from .policy import Programs

CONTENDED_BUDGET_NS = 500_000
"""Expected work that a program may have on the device if another program was active recently. To be fitted on a GPU."""

ACTIVE_SECONDS = 1.0
"""Time after which a program without a busy period counts as idle. Chosen: longer than a step of most programs."""

EXIT_SECONDS = 10.0
"""Time without programs after which an arbiter exits."""

LOG_SECONDS, LOG_EVENTS = 2.0, 1000
"""Interval at which the log's file is written, and the events in it."""

CONTENDED_LOG_SECONDS = 10.0
"""That interval while a program waits. A write took 0.5 ms on an H200's host, during which no gate opens or closes."""

_ALIVE_SECONDS = 5e-3
"""Interval at which the arbiter checks that the processes of programs are alive, with a system call for each."""

MAX_PRIORITY = 1 << 31
"""Largest priority that a program may name; the ceiling of its tenant is lower."""

_LIMITS = "limits.json"
_MAX_LIMITS_BYTES = 1 << 20
_PROFILE = Profile()


class _LineLog(Log):
    """A log that stores events as lines. Programs wait while the log is written: formatting 1,000 events took 18 ms."""

    def __init__(self) -> None:
        super().__init__(max_events=LOG_EVENTS)
        self._text: deque[str] = deque(maxlen=LOG_EVENTS)

    def add(self, event: Event) -> None:
        super().add(event)
        self._text.append(event.line())

    def _file_lines(self) -> Iterable[str]:
        return self._text


class Arbiter:
    """Schedules the programs of one board.

    Parameters
    ----------
    own_board : Board
    now : callable
        Returns the monotonic time in seconds.
    """

    def __init__(self, own_board: Board, *, now: Callable[[], float] = clock.monotonic) -> None:
        self.board, self._now = own_board, now
        self.executor = ProgramExecutor(own_board, now)
        # One program at a time has the device, because processes have separate contexts.
        self.core = Core(self.executor, Programs(), limit=1, log=_LineLog(), keep=False, trusts=False)
        self.core.log.about = {"policy": "programs", "device": own_board.name}
        self.programs: dict[tuple[int, int], Program] = {}
        self.executor.programs = self.programs.values()
        self._looked = self._logged = float("-inf")
        self._log_count = 0
        self._limits: dict[str, dict[str, Any]] = {}
        self._limits_time: int | None = None

    def step(self) -> float:
        """Read the board, decide, and return the seconds until the next step if no program wakes the arbiter."""
        now = self.executor.now()
        self._attach(now)
        for program in self.programs.values():
            program.read(now)
            self.executor.wait_for(program, now)
            if program.job is None and program.needs_job():
                self._submit(program, now)
            elif program.job is not None and program.gave_up:
                self.core.cancel(program.job)
        until = self.core.step()
        for program in self.programs.values():
            program.assert_gate()
        self._bound_work(now)
        self.board.beat(len(self.programs))
        if now - self._looked >= _ALIVE_SECONDS:
            self._looked = now
            self._read_limits()
            self._detach()
        is_contended = self.core.first_waiting is not None
        if self.executor.poll_seconds is not None:
            return self.executor.poll_seconds
        if is_contended:
            return min(1e-3, max(0.0, (until or now + 1.0) - self.executor.now()))
        if all(job.task.launch.is_lease for job in self.core.running):
            return 0.1 if self.core.running else 0.5
        return 20e-3

    def run(self) -> None:
        """Schedule until the board has had no program for `EXIT_SECONDS`."""
        used = self._now()
        while self.programs or self._now() - used < EXIT_SECONDS:
            bell = self.board.bell
            seconds = self.step()
            if self.programs:
                used = self._now()
            self._write_log()
            self.board.wait(bell, seconds)

    def _attach(self, now: float) -> None:
        slots = list(self.board.used_slots())
        for key in slots:
            if key not in self.programs:
                self.programs[key] = program = Program(self.board, *key, now)
                self._apply_hold(program)
                self.executor.welcome(program)
        for key in self.programs.keys() - set(slots):
            self._forget(key)

    def _detach(self) -> None:
        """Free the slots of exited processes."""
        for key, program in list(self.programs.items()):
            if not program.is_attached:
                self.board.free_slot(*key)
                self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        program = self.programs.pop(key)
        self.executor.forget(program)
        if program.job is not None and program.job.is_waiting:
            self.core.cancel(program.job)  # the executor's poll ends a running job

    def _submit(self, program: Program, now: float) -> None:
        priority = max(-MAX_PRIORITY, min(program.priority, MAX_PRIORITY))
        competitors = [rival.used for rival in self.programs.values() if rival.job is not None]
        program.used = max(program.used, min(competitors, default=0.0))
        task = Task(program.name, 1, _PROFILE, program, tenant=program.tenant, priority=priority)
        if program.tenant in self._limits:
            self._apply_limits(program.tenant)
        program.job = self.core.submit(Request(program.name, [task], now))[0]
        program.report(Board.WAITING)

    def _bound_work(self, now: float) -> None:
        active = [program for program in self.programs.values() if now - program.active < ACTIVE_SECONDS]
        for program in self.programs.values():
            alone = not active or active == [program]
            program.bound_work(0 if alone else CONTENDED_BUDGET_NS)

    # -- limits and log --------------------------------------------------------------------------------------------

    def _read_limits(self) -> None:
        """Read the operator's settings of tenants if their file has changed."""
        path = self.board.path.parent / _LIMITS
        try:
            changed = path.lstat().st_mtime_ns
        except OSError:
            changed = 0
        if changed == self._limits_time:
            return
        self._limits, self._limits_time = {}, changed
        with contextlib.suppress(SchedulerError):  # `share status` reports it
            self._limits = read_limits(path.parent)
        for name in list(self.core.tenants):
            self._apply_limits(name)
        for program in self.programs.values():
            self._apply_hold(program)

    def _apply_limits(self, name: str) -> None:
        self.core.tenants.account(name).tenant = tenant_of(name, self._limits)

    def _apply_hold(self, program: Program) -> None:
        if program.is_lease:
            program.hold = self._limits.get(program.tenant, {}).get("hold", HOLD_SECONDS)

    def _write_log(self) -> None:
        """Write the log next to the board, for `warpwell sched explain`; more rarely while a program waits."""
        now, log = self._now(), self.core.log
        count = log.dropped + len(log)
        interval = LOG_SECONDS if self.core.first_waiting is None else CONTENDED_LOG_SECONDS
        if count == self._log_count or now - self._logged < interval:
            return
        self._logged, self._log_count = now, count
        with (
            contextlib.suppress(OSError),
            replacing(self.board.path.with_suffix(".log")) as path,
            path.open("w") as file,
        ):
            log.write(file)


def tenant_of(name: str, limits: Mapping[str, Mapping[str, Any]]) -> Tenant:
    """Return a tenant with the operator's settings; raise an error if one of them is invalid."""
    values = dict(limits.get(name, {}))
    checked_seconds(values.pop("hold", HOLD_SECONDS), f"hold of tenant {name!r}")
    return Tenant(name, **values)


def read_limits(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the operator's settings of tenants in a folder of boards.

    Raises
    ------
    SchedulerError
        The file is not settings of tenants, or another user than this one, root or the folder's owner wrote it.
    """
    path = folder / _LIMITS
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)  # the path may be a FIFO
        with open(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            is_trusted = info.st_uid in (0, os.getuid(), folder.stat().st_uid)
            if stat.S_ISREG(info.st_mode) and is_trusted and info.st_size <= _MAX_LIMITS_BYTES:
                found = json.loads(file.read(_MAX_LIMITS_BYTES))
                if isinstance(found, dict) and all(isinstance(values, dict) for values in found.values()):
                    for name in found:
                        tenant_of(name, found)
                    return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError, WarpwellError):
        pass
    raise SchedulerError(
        f"{path} is damaged, from an earlier version, or owned by another user; expected settings of tenants by name; "
        f"remove it, and set the limits again with `warpwell share limit`"
    )


def write_limits(folder: Path, tenants: dict[str, dict[str, Any]]) -> None:
    """Replace the operator's settings of tenants in a folder of boards."""
    with replacing(folder / _LIMITS) as path:
        path.write_text(json.dumps(tenants))


def run_arbiter(own_board: Board) -> None:
    """Schedule the programs of a board until all have exited, unless another process is the arbiter."""
    gc.freeze()  # a garbage collection that visits all imported modules takes milliseconds
    while own_board.become_arbiter():
        Arbiter(own_board).run()
        own_board.resign()
        if not any(own_board.is_alive(index) for index, _ in own_board.used_slots()):
            return  # else a program attached while this process had the lock, and so did not start an arbiter
