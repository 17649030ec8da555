"""Relay scenario: launches store doorbell words, and I/O threads forward them, leave and wake, in one interleaving.

The code of the forwarder and of the I/O threads runs unchanged on the locks and threads of the service scenario, which
also switch at every access of the forwarder's native loop. Launches end at once, or wait until their words are
forwarded; some launches begin while the thread is leaving.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from warpwell.drives import doorbell_forwarder as module
from warpwell.targets import private_block
from warpwell.targets.memory import view_of

from .adversary import Violation
from .service_model import Lock, Scheduler, pool_of

DOORBELLS = 3


class _Loop:
    """A native function whose calls run its Python code."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def load(self) -> None:
        """Compile nothing."""

    def __call__(self, *values: int) -> int:
        return int(self._function(*values))


class RelayModel:
    """One run of the relay scenario; see `QueueModel`."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        self.random = Random(seed * 2 + 1)
        self.scheduler = self.run = Scheduler(seed)
        self.registers: dict[int, int] = dict.fromkeys(range(DOORBELLS), 0)
        self.block = private_block(8 * DOORBELLS)
        self.users = self.random.randint(1, 3)
        self.wait_share = self.random.random()

    def _user(self, relay: Any, doorbells: np.ndarray, number: int) -> None:
        pause, random = self.scheduler.pause, self.scheduler.random
        for _ in range(random.randint(1, 4)):
            for _ in range(random.choice((0, 3, 30, 100))):
                pause()
            relay.begin()
            value = 0
            for _ in range(random.randint(0, 3)):
                pause()
                doorbells[number] = value = random.randint(1, 1 << 30)
            if value and random.random() < self.wait_share:
                pause(lambda value=value: self.registers[number] == value)  # type: ignore[misc]
            relay.end()
        self.users -= 1

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation`."""
        doorbells = self.block.words[:DOORBELLS]
        transport = SimpleNamespace(
            native_store=lambda: (1, 1),
            examine=lambda: None,
            failure=None,
            generation=0,
            fail=self._lost,
        )
        with pool_of(self.scheduler, 2), self._replaced():
            bells = [(self.block.address + 8 * k, k) for k in range(DOORBELLS)]
            relay = module.DoorbellForwarder(transport, bells, self._lost)  # type: ignore[arg-type]
            for k in range(self.users):
                self.scheduler.spawn(lambda k=k: self._user(relay, doorbells, k))  # type: ignore[misc]
            self.scheduler.run(lambda: not self.users, lambda: True)
            self.scheduler.now = 0
            self.scheduler.run(lambda: relay.parked, lambda: True)
            if list(self.registers.values()) != doorbells.tolist():
                raise Violation(f"the relay parks with registers {self.registers} and words {doorbells.tolist()}")
            stopped: list[bool] = []
            relay.begin()
            self.scheduler.now = 0
            self.scheduler.spawn(lambda: stopped.append(relay.stop()))
            self.scheduler.run(lambda: bool(stopped), lambda: False)
            if stopped != [True] or relay._slots.occupied:
                raise Violation("the relay continues after it was stopped")
        return self.scheduler.steps

    def _lost(self, *_: object) -> None:
        raise Violation("the relay lost the drive")

    @contextlib.contextmanager
    def _replaced(self) -> Iterator[None]:
        scheduler = self.scheduler

        def word(address: int) -> Any:
            scheduler.pause()
            return view_of(address, 8, np.int64)

        def store(address: int, value: int, _: int) -> None:
            word(address)[0] = value

        def forward(_f: int, _s: int, register: int, value: int, *_: int) -> int:
            scheduler.pause()
            self.registers[register] = value
            return 0

        load = lambda address, _: int(word(address)[0])  # noqa: E731
        fakes: dict[str, Any] = {
            "threading": SimpleNamespace(Lock=lambda: Lock(scheduler)),
            "SPIN_ROUNDS": self.random.choice((0, 1, 3)),
            "load_acquire": load,
            "load_relaxed": load,
            "store_relaxed": store,
            "call_native": forward,
            "backoff": lambda _: scheduler.pause(),
            "clock_ns": lambda: scheduler.now,
            "watch_time_ns": lambda: scheduler.now + scheduler.random.choice((5, 50, 500)),
            "_serve_loop": _Loop(module.serve),
        }
        originals = {name: getattr(module, name) for name in fakes}
        try:
            for name, fake in fakes.items():
                setattr(module, name, fake)
            yield
        finally:
            for name, original in originals.items():
                setattr(module, name, original)
