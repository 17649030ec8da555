"""Learner: predicts the time and the class of tasks, and learns from tasks that ran alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ... import errors
from ...targets import Launch
from ..executor import Capacity, Machine
from ..task import Profile, Task
from .history import History
from .identity import default_size, footprint, identity
from .predictor import Predictor
from .record import MEASURED, KernelRecord, sized

KERNELS = 1024
"""Kernels and sizes that are kept; the oldest are forgotten first."""

_SIZES, _KERNELS = 8, 256
"""Sizes of a kernel, and kernels, that the predictor keeps: with more, a submission would take too long."""
_SAME = 0.1
"""Relative change of a time from which the profile changes: policies cache what they derive from a profile."""

_REGISTER_UNIT = 8


class Learner:
    """Makes profiles for tasks that come without one, and improves them by the times of tasks that ran alone.

    The ``source`` of a profile is "measured" if this kernel was measured at this size, "predicted" if it was measured
    at other sizes, and else "cold". A cold profile is conservative: it has no class, so the kernel runs alone first and
    is measured; no time, so nothing is preempted for it or because of it; every access misses the cache; and it needs
    the whole device.

    Any thread may call the learner; the scheduler's thread calls `learn`.

    Parameters
    ----------
    saves : bool
        Whether it begins with earlier measurements of this device, by other processes, too, and `save` writes its own
        (`warpwell.scheduler.predict.history`). A file that is damaged, or cannot be read, is ignored.

    Attributes
    ----------
    history : History
        What was measured.
    predictor : Predictor
    forgotten : int
        How often it has forgotten what it knew of some kernel: it may say something else of it now.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.history = History()
        self.predictor = Predictor(sizes=_SIZES, kernels=_KERNELS)
        self._capacity = Capacity()
        self._machine: Machine | None = None
        self._find_machine: Callable[[], Machine | None] | None = None
        self._saves = saves
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], KernelRecord] = {}
        self.forgotten = 0
        self._learnt = 0
        self._saved = 0

    def meets(self, capacity: Capacity, machine: Callable[[], Machine | None]) -> None:
        """Take the device of a scheduler, which calls this before it asks for a profile; the first one counts.

        `machine` returns the peaks (`Executor.machine`), which determine a kernel's class; it is called when a profile
        is first asked for.
        """
        if self._find_machine is None:
            self._capacity, self._find_machine = capacity, machine

    def _require_machine(self) -> Machine:
        """Return the device's peaks; the first time, find them and load the device's history."""
        if self._machine is None:
            with self._lock:
                if self._machine is None:
                    if self._find_machine is None:
                        raise errors.ArgumentError("this learner has no device: give it to a scheduler first")
                    found = self._find_machine()
                    if self._saves and found is not None:
                        self.history = History.usable(found.name)
                        for record in self.history.records:
                            self.predictor.add(record)
                    self._machine = found or Machine()
        return self._machine

    def __call__(self, task: Task) -> Profile:
        """Return the profile of a task; a task without a launch keeps its own."""
        launch = task.launch
        if launch is None:
            return task.profile
        machine = self._require_machine()
        size = sized(task.size) if task.size else default_size(launch, task.arguments)
        key = identity(launch, task.arguments), *size.items()
        known = self._known.get(key)
        if known is None:
            known = self._meet(task, key, size, footprint(task.arguments) / machine.bandwidth)
        task.known = known
        return known.profile

    def _meet(self, task: Task, key: tuple[Any, ...], size: dict[str, float], moving: float) -> KernelRecord:
        blocks, threads = task.launch.configuration()
        warps = max(1, math.prod(blocks) * -(-math.prod(threads) // 32))
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = KernelRecord(key[0], size, warps, moving)
                found = self._known[key] = replace(self.history.find(found) or found)
                found.profile = self._profile(task.launch, found)
                if len(self._known) > KERNELS:
                    del self._known[next(iter(self._known))]
                    self.forgotten += 1
        return found

    def _profile(self, launch: Launch, record: KernelRecord) -> Profile:
        """Return the profile of a launch; `record` has its measurements, if any."""
        room = self._room(launch)
        if record.seconds is not None:
            return Profile(kind=record.kind, source="measured", **{**room, "miss_rate": 1.0, **record.figures()})
        predicted = self.predictor.predict(record)
        if predicted is not None:
            return replace(predicted, **room)
        return Profile(source="cold", miss_rate=1.0, **{**room, "need": 1.0})

    def learn(self, task: Task, seconds: float) -> bool:
        """Learn from the seconds that a task took solo; return whether the profile of its kernel has changed."""
        known = task.known
        if known is None or not (math.isfinite(seconds) and seconds > 0):
            return False
        should_measure = known.wants
        known.launches += 1
        if not should_measure:
            return False
        with self._lock:
            is_first = known.seconds is None
            # it is assumed to have moved each of its arrays once, and to have computed for the rest of its time
            moved = min(1.0, known.moving / seconds)
            solo = replace(known, seconds=seconds, times=1, bandwidth=moved, compute=1.0 - moved)
            average = self.history.record(solo)
            for name in ("times", *MEASURED):
                setattr(known, name, getattr(average, name))
            self.predictor.add(average)
            self._learnt += 1
            if is_first:
                # Other sizes of this kernel without a measurement can be predicted from it.
                for key in [k for k, k_ in self._known.items() if k[0] == known.kernel and k_.seconds is None]:
                    del self._known[key]
                self.forgotten += 1
            old, new = known.profile, self._profile(task.launch, known)
            is_same_time = old.seconds is not None and abs((new.seconds or 0.0) / old.seconds - 1) <= _SAME
            if is_same_time and (old.kind, old.source, old.registers) == (new.kind, new.source, new.registers):
                return False
            known.profile = new
            return True

    def _room(self, launch: Launch) -> dict[str, Any]:
        """Return the fields of a profile that follow from the launch: the room that its blocks take."""
        blocks, shape = launch.configuration()
        threads = math.prod(shape)
        registers = -(-registers_of(launch) // _REGISTER_UNIT) * _REGISTER_UNIT * 4 * threads
        capacity = self._capacity
        each = min(capacity.registers // registers, capacity.threads // threads, capacity.blocks)
        need = min(1.0, math.prod(blocks) / capacity.processors)
        resident = max(1, each) * capacity.processors
        return {"registers": registers, "threads": threads, "resident": resident, "need": need}

    def save(self) -> None:
        """Save the history, if something was learnt since the last time; raise OSError if it cannot be written."""
        with self._lock:
            learnt = self._learnt + self.history.pairs.learnt
        if self._saves and learnt != self._saved:
            self.history.save()
            self._saved = learnt


def registers_of(launch: Launch) -> int:
    """Return the registers a thread: of the compiled kernel where it was compiled for a GPU, else its upper bound."""
    from ...targets.compiler import max_registers

    for key, dispatcher in launch.kernel.compiled.items():
        if isinstance(key, tuple) and key[:1] == ("cuda",):
            for overload in getattr(dispatcher, "overloads", {}).values():
                return int(overload.regs_per_thread)
    return max_registers(launch.kernel)
