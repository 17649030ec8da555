"""Learner: predicts the time and the class of tasks, and learns from tasks that ran solo."""

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

MAX_RECORDS = 1024
"""Maximum number of records, one for each kernel and size; the oldest is deleted first. Chosen, not fitted."""

MAX_SIZES_PER_KERNEL, MAX_PREDICTED_KERNELS = 8, 256
"""Maximum numbers of sizes of a kernel, and of kernels, in the predictor: with more, a submission takes too long.
Chosen, not fitted."""

TIME_TOLERANCE = 0.1
"""Relative change of a kernel's time above which its profile changes: policies cache results that they derive from a
profile. Chosen, not fitted."""

_REGISTER_UNIT = 8
"""Granularity of the registers of a thread, in registers: a warp of 32 threads gets units of 256 (CUDA occupancy)."""


class Learner:
    """Makes profiles for tasks without a profile, and improves them by the times of tasks that ran solo.

    The ``source`` of a profile is "measured" if this kernel was measured at this size, "predicted" if it was measured
    at other sizes, and otherwise "cold". A cold profile is conservative. It has no class, so the scheduler runs the
    kernel solo and measures it. It has no time, so the scheduler preempts no kernel for it or because of it. Every
    access misses the cache, and the kernel needs the whole device.

    Any thread may call the learner; the scheduler's thread calls `learn`.

    Parameters
    ----------
    saves : bool
        True if the learner loads earlier measurements of this device by any process, and `save` writes new measurements
        (`warpwell.scheduler.predict.history`). The learner ignores a file that is damaged or cannot be read.

    Attributes
    ----------
    history : History
        Measurements of this device.
    predictor : Predictor
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.history = History()
        self.predictor = Predictor(max_sizes=MAX_SIZES_PER_KERNEL, max_kernels=MAX_PREDICTED_KERNELS)
        self._capacity = Capacity()
        self._machine: Machine | None = None
        self._find_machine: Callable[[], Machine | None] | None = None
        self._saves = saves
        self._lock = threading.Lock()
        self._records: dict[tuple[Any, ...], KernelRecord] = {}
        self._recorded = 0
        self._saved = 0

    def use_device(self, capacity: Capacity, machine: Callable[[], Machine | None]) -> None:
        """Set the device. A scheduler calls this before it needs a profile; later calls have no effect.

        `machine` returns the peaks (`Executor.machine`), which determine a kernel's class. The learner calls it when it
        makes the first profile.
        """
        if self._find_machine is None:
            self._capacity, self._find_machine = capacity, machine

    def _require_machine(self) -> Machine:
        """Return the device's peaks; the first time, find them and load the device's history."""
        if self._machine is None:
            with self._lock:
                if self._machine is None:
                    if self._find_machine is None:
                        raise errors.ArgumentError("this learner has no device: pass it to a scheduler first")
                    found = self._find_machine()
                    if self._saves and found is not None:
                        self.history = History.load(found.name)
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
        record = self._records.get(key)
        if record is None:
            record = self._add_record(task, key, size, footprint(task.arguments) / machine.bandwidth)
        task.known = record
        return record.profile

    def _add_record(self, task: Task, key: tuple[Any, ...], size: dict[str, float], moving: float) -> KernelRecord:
        blocks, threads = task.launch.configuration()
        warps = max(1, math.prod(blocks) * -(-math.prod(threads) // 32))
        with self._lock:
            found = self._records.get(key)
            if found is None:
                found = KernelRecord(key[0], size, warps, moving)
                found = self._records[key] = replace(self.history.find(found) or found)
                found.profile = self._profile(task.launch, found)
                if len(self._records) > MAX_RECORDS:
                    del self._records[next(iter(self._records))]
        return found

    def _profile(self, launch: Launch, record: KernelRecord) -> Profile:
        """Return the profile of a launch; `record` has its measurements, if any."""
        room = self._room(launch)
        if record.seconds is not None:
            return Profile(kind=record.kind, source="measured", **{**room, "miss_rate": 1.0, **record.measurements()})
        predicted = self.predictor.predict(record)
        if predicted is not None:
            return replace(predicted, **room)
        return Profile(source="cold", miss_rate=1.0, **{**room, "need": 1.0})

    def learn(self, task: Task, seconds: float) -> bool:
        """Learn from the seconds that a task took solo; return True if the profile of its kernel has changed."""
        record = task.known
        if record is None or not (math.isfinite(seconds) and seconds > 0):
            return False
        should_measure = record.should_measure
        record.launches += 1
        if not should_measure:
            return False
        with self._lock:
            is_first = record.seconds is None
            # Assume that the kernel moved each of its arrays once, and computed for the remaining time.
            moved = min(1.0, record.moving / seconds)
            solo = replace(record, seconds=seconds, times=1, bandwidth=moved, compute=1.0 - moved)
            average = self.history.record(solo)
            for name in ("times", *MEASURED):
                setattr(record, name, getattr(average, name))
            self.predictor.add(average)
            self._recorded += 1
            if is_first:
                # The measurement also predicts unmeasured sizes of this kernel.
                for key in [k for k, k_ in self._records.items() if k[0] == record.kernel and k_.seconds is None]:
                    del self._records[key]
            old, new = record.profile, self._profile(task.launch, record)
            is_same_time = old.seconds is not None and abs((new.seconds or 0.0) / old.seconds - 1) <= TIME_TOLERANCE
            if is_same_time and (old.kind, old.source, old.registers) == (new.kind, new.source, new.registers):
                return False
            record.profile = new
            return True

    def _room(self, launch: Launch) -> dict[str, Any]:
        """Return the fields of a profile that the launch determines: the resources of its blocks."""
        blocks, shape = launch.configuration()
        threads = math.prod(shape)
        registers = -(-registers_of(launch) // _REGISTER_UNIT) * _REGISTER_UNIT * 4 * threads
        capacity = self._capacity
        each = min(capacity.registers // registers, capacity.threads // threads, capacity.blocks)
        need = min(1.0, math.prod(blocks) / capacity.processors)
        resident = max(1, each) * capacity.processors
        return {"registers": registers, "threads": threads, "resident": resident, "need": need}

    def save(self) -> None:
        """Save the history if it has new measurements; raise OSError if the file cannot be written."""
        with self._lock:
            recorded = self._recorded + self.history.pairs.learnt
        if self._saves and recorded != self._saved:
            self.history.save()
            self._saved = recorded


def registers_of(launch: Launch) -> int:
    """Return the registers of a thread in the compiled GPU kernel, or their upper bound before compilation."""
    from ...targets.compiler import max_registers

    for key, dispatcher in launch.kernel.compiled.items():
        if isinstance(key, tuple) and key[:1] == ("cuda",):
            for overload in getattr(dispatcher, "overloads", {}).values():
                return int(overload.regs_per_thread)
    return max_registers(launch.kernel)
