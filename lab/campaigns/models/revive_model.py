"""Revive scenario: a drive is lost repeatedly, while its users detect the losses, recover it, flush, and close.

`Drive.recover`, `Transport.fail` and `DriveController` run unchanged on a scripted controller. A small scheduler
switches threads at each lock and each register access. No kernel runs: a launch is a `begin`, some time, and an `end`.
A thread that has read a failure sometimes sleeps, and reports the failure after other threads have recovered the drive.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent

from lab.drives.scripted_drive import ScriptedDrive
from warpwell import errors
from warpwell.drives import Drive, controller, drive, host_queue, transport
from warpwell.drives.controller import DriveController
from warpwell.nvme import FLUSH
from warpwell.nvme import controller as reg
from warpwell.queues import QueuePairs

from .adversary import Violation
from .service_model import Scheduler

MAX_PAUSES = 12
"""Largest number of pauses of a launch."""


class _Lock:
    """A reentrant lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._owner, self._depth = scheduler, None, 0

    def acquire(self, timeout: float = -1) -> bool:
        thread = getcurrent()
        self._scheduler.pause(lambda: self._owner in (None, thread))
        self._owner, self._depth = thread, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._scheduler.pause()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class _Local:
    """Thread-local storage."""

    def __init__(self) -> None:
        object.__setattr__(self, "_of", {})

    def __setattr__(self, name: str, value: object) -> None:
        self._of[getcurrent(), name] = value

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(KeyError):
            return self._of[getcurrent(), name]
        raise AttributeError(name)


class _Forwarder:
    def __init__(self, transport: Any, doorbells: Any, lost: Any) -> None:
        self.stopped = False

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def stop(self) -> bool:
        self.stopped = True
        return True


class _Wire(ScriptedDrive):
    """A controller that other threads interrupt, and that fails on command."""

    pause = nap = staticmethod(lambda: None)
    flushed = -1
    """Generation in which the last Flush was executed."""

    def read32(self, offset: int) -> int:
        self.pause()
        value = super().read32(offset)
        if offset == reg.CSTS and value & 2 and not self._is_recovering():
            self.nap()
        return value

    def write32(self, offset: int, value: int) -> None:
        self.pause()
        if offset >= reg.DOORBELLS and self.registers[reg.CSTS] & 2:
            return  # the controller has failed
        if offset == reg.CC:
            self.registers[reg.CSTS] &= ~2
        super().write32(offset, value)

    def _io(self, command: Any) -> int:
        if command["opc"] == FLUSH:
            self.flushed = self.generation
        return super()._io(command)


class ReviveModel:
    """One run of the scenario; see `QueueModel`."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        self.random = Random(seed * 2 + 1)
        self.scheduler = self.run = Scheduler(seed)
        self.kills = self.random.randint(1, 4)
        self.left = self.going = 0
        self._looks = itertools.count()
        self.wire: _Wire
        self.drive: Drive

    # -- threads

    def _pause_randomly(self, max_pauses: int = MAX_PAUSES) -> None:
        for _ in range(self.random.randint(0, max_pauses)):
            self.scheduler.pause()

    def _user(self, rings: DriveController, closes: bool) -> None:
        """Launch until all losses are over; after each loss recover the rings, or close them."""
        while True:
            over = not self.left
            try:
                rings.begin()
                self._pause_randomly()
                rings.end()
                if failure := rings.failure():
                    raise failure
                if over:
                    break
            except errors.DriveLostError:
                if closes:
                    self._pause_randomly(600)
                    rings.close()
                    break
                with contextlib.suppress(errors.DriveLostError):  # another loss
                    rings.silence()
                    rings.pairs.rewind()
                    rings.restart()
        self.going -= 1

    def _host(self) -> None:
        """Write and flush; a flush must acknowledge only writes to the same controller."""
        while True:
            over = not self.left
            try:
                space = self.drive.namespace(1)
                space.write(1, np.zeros(512, np.uint8))
                self._pause_randomly()
                space.flush()
                if self.wire.flushed != space.generation:
                    raise Violation("a flush acknowledged writes to the drive before the loss")
                if over:
                    break
            except errors.DriveLostError:
                self._pause_randomly()
                with contextlib.suppress(errors.DriveLostError):
                    self.drive.recover()
        self.going -= 1

    def _watch(self) -> None:
        while self.left:
            self._pause_randomly()
            with contextlib.suppress(errors.DriveLostError):
                self.wire.examine()
        self.going -= 1

    def _nap(self) -> None:
        until = self.scheduler.now + self.random.choice((0, 50, 500))
        self.scheduler.pause(lambda: self.scheduler.now > until)

    def _killer(self) -> None:
        while self.left:
            self._pause_randomly(self.random.choice((5, 60)))
            if self.drive.failure is None:
                self.wire.registers[reg.CSTS] |= 2
                with contextlib.suppress(errors.DriveLostError):
                    self.wire.examine()
                self.left -= 1
        self.going -= 1

    # -- the whole

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation`."""
        with self._replaced():
            self.wire = _Wire()
            self.drive = Drive(self.wire)
            users = [DriveController(self.drive, self._pairs(), timeout=1.0) for _ in range(2)]
            closes = [False, self.random.random() < 0.5]
            self.wire.pause, self.wire.nap = self.scheduler.pause, self._nap  # type: ignore[method-assign]
            self.left, self.going = self.kills, 5
            for rings, close in zip(users, closes, strict=True):
                self.scheduler.spawn(lambda rings=rings, close=close: self._user(rings, close))  # type: ignore[misc]
            self.scheduler.spawn(self._host)
            self.scheduler.spawn(self._killer)
            self.scheduler.spawn(self._watch)
            self.scheduler.run(lambda: not self.going, lambda: False)
            self._check_end([u for u, close in zip(users, closes, strict=True) if not (close and u._closed)])
        return self.scheduler.steps

    def _pairs(self) -> QueuePairs:
        return QueuePairs(self.wire.arena.memory("cpu"), count=1, depth=64, staging_bytes=512, lists=True)

    def _check_end(self, users: list[DriveController]) -> None:
        if self.wire.generation > self.kills or self.drive.failure is not None:
            raise Violation(
                f"lost {self.kills} times, started again {self.wire.generation} times: {self.drive.failure}"
            )
        queues = [qid for user in users for qid in user._queues]
        if len(set(queues)) < len(queues) or not set(queues) <= self.drive._pairs.keys() & self.wire._rings.keys():
            raise Violation(f"the users have queues {queues}, the drive {sorted(self.wire._rings)}")
        if any(user.forwarder.stopped for user in users):
            raise Violation("a forwarder was stopped, and its user continues")
        self.drive.close()

    @contextlib.contextmanager
    def _replaced(self) -> Iterator[None]:
        threads = SimpleNamespace(RLock=lambda: _Lock(self.scheduler), local=_Local)
        before = [
            (module, name, getattr(module, name))
            for module in (controller, drive, host_queue, transport)
            for name in ("threading", "interruptible", "DoorbellForwarder")
            if hasattr(module, name)
        ]
        clock = SimpleNamespace(monotonic=lambda: next(self._looks) * 0.06, sleep=lambda _: self.scheduler.pause())
        before.append((host_queue, "time", host_queue.time))
        new = {
            "threading": threads,
            "interruptible": lambda stop: contextlib.nullcontext(),
            "DoorbellForwarder": _Forwarder,
            "time": clock,
        }
        try:
            for module, name, _ in before:
                setattr(module, name, new[name])
            yield
        finally:
            for module, name, old in before:
                setattr(module, name, old)
