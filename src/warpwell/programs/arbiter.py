"""`Arbiter`: the process that opens and closes the gates of a GPU's programs, by the scheduler's `Core`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._os import clock
from ..driver import Board
from ..errors import WarpwellError
from ..replacing import replacing
from ..scheduler import Core, Log, Profile, Request, Task, Tenant
from .executor import HOLD_SECONDS, Program, ProgramExecutor
from .policy import Programs

CONTENDED_BUDGET_NS = 500_000
"""Expected work that a program may have on the device while another one was active recently. To be fitted on a GPU."""

ACTIVE_SECONDS = 1.0
"""Time after which a program without a busy period counts as idle. Chosen: longer than a step of most programs."""

EXIT_SECONDS = 10.0
"""Time without programs after which an arbiter exits."""

LOG_SECONDS, LOG_EVENTS = 2.0, 1000
"""Interval at which the log's file is written, and the events in it."""

_ALIVE_SECONDS = 5e-3
"""Interval at which the processes of programs are looked at: a call of Linux for each."""

MAX_PRIORITY = 1 << 31
"""Largest priority that a program may name; the ceiling of its tenant is lower."""

_LIMITS = "limits.json"


class Arbiter:
    """Schedules the programs of one board.

    Parameters
    ----------
    own_board : Board
    limit : int
        Programs that may have the device at the same time: 1, because processes have separate contexts.
    now : callable
        Returns the monotonic time in seconds.
    """

    def __init__(self, own_board: Board, *, limit: int = 1, now: Callable[[], float] = clock.monotonic) -> None:
        self.board, self._now = own_board, now
        self.executor = ProgramExecutor(own_board, now)
        self.core = Core(
            self.executor, Programs(), limit=limit, log=Log(max_events=LOG_EVENTS), keep=False, trusts=False
        )
        self.core.log.about = {"policy": "programs", "device": own_board.name}
        self.programs: dict[tuple[int, int], Program] = {}
        self._looked = self._logged = float("-inf")
        self._log_count = 0
        self._limits: dict[str, dict[str, Any]] = {}
        self._limits_time: int | None = None

    def step(self) -> float:
        """Read the board, decide, and return the time in seconds until the next step if no program rings."""
        now = self.executor.now()
        self._attach(now)
        if now - self._looked >= _ALIVE_SECONDS:
            self._looked = now
            self._read_limits()
            self._detach()
        for program in self.programs.values():
            program.read(now)
            self.executor.wait_for(program, now)
            if program.job is None and program.needs_job():
                self._submit(program, now)
            elif program.job is not None and program.gave_up:
                self.core.cancel(program.job)
        until = self.core.step()
        self._bound_work(now)
        self.board.beat(len(self.programs))
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
                self.executor.welcome(program, self.core.limit)
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
            self.core.cancel(program.job)  # a running one ends by the executor's poll

    def _submit(self, program: Program, now: float) -> None:
        priority = max(-MAX_PRIORITY, min(program.priority, MAX_PRIORITY))
        competitors = [other.used for other in self.programs.values() if other.job is not None]
        program.used = max(program.used, min(competitors, default=0.0))
        task = Task(program.name, 1, Profile(), program, tenant=program.tenant, priority=priority)
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
            changed = path.stat().st_mtime_ns
        except OSError:
            changed = 0
        if changed == self._limits_time:
            return
        self._limits, self._limits_time = read_limits(path.parent), changed
        for name in list(self.core.tenants):
            self._apply_limits(name)
        for program in self.programs.values():
            self._apply_hold(program)

    def _apply_limits(self, name: str) -> None:
        account = self.core.tenants.account(name)
        with contextlib.suppress(WarpwellError, TypeError):  # an unknown setting
            limits = {key: value for key, value in self._limits.get(name, {}).items() if key != "hold"}
            account.tenant = Tenant(name, **limits)
            account.weight = account.tenant.weight

    def _apply_hold(self, program: Program) -> None:
        hold = self._limits.get(program.tenant, {}).get("hold", HOLD_SECONDS)
        if program.is_lease and isinstance(hold, int | float) and hold > 0:
            program.hold = float(hold)

    def _write_log(self) -> None:
        """Write the log next to the board, for `warpwell sched explain`, while no program waits."""
        now, log = self._now(), self.core.log
        count = log.dropped + len(log)
        if count == self._log_count or now - self._logged < LOG_SECONDS or self.core.first_waiting is not None:
            return
        self._logged, self._log_count = now, count
        with (
            contextlib.suppress(OSError),
            replacing(self.board.path.with_suffix(".log")) as path,
            path.open("w") as file,
        ):
            log.write(file)


def read_limits(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the operator's settings of tenants in a folder of boards; nothing if the file is missing or damaged."""
    try:
        found = json.loads((folder / _LIMITS).read_bytes())
        return {str(name): dict(values) for name, values in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def write_limits(folder: Path, tenants: dict[str, dict[str, Any]]) -> None:
    """Replace the operator's settings of tenants in a folder of boards."""
    with replacing(folder / _LIMITS) as path:
        path.write_text(json.dumps(tenants))


def run_arbiter(own_board: Board) -> None:
    """Schedule the programs of a board until all have exited, unless another process does."""
    while own_board.become_arbiter():
        Arbiter(own_board).run()
        own_board.resign()
        if not any(own_board.is_alive(index) for index, _ in own_board.used_slots()):
            return  # else a program came while this process had the lock, and so started no arbiter
