"""Analyzer: says of a launch, before it runs, what it will take alone and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...targets import Launch
from ...targets.compiler.run_cuda import MAX_REGISTERS
from ..executor import Capacity, Machine
from ..task import Profile, Task
from .history import History
from .identity import default_size, footprint, identity
from .predictor import Prediction, Predictor
from .sample import MEASURED, Sample, kind_of, sized

_REGISTER_UNIT = 8


class Analyzer:
    """Predicts time, class, footprint and miss rate of launches; ``analyzer(task)`` is its profile.

    What it says comes from, in this order: the same kernel and size measured before (``source`` of the profile is
    "measured"); the kernel at other sizes ("predicted"); nothing ("cold"). A cold profile is the conservative one: no
    class, so that the kernel runs alone first and is measured; no time, so that nothing is preempted for it or because
    of it; every access a miss; the whole device needed.

    Parameters
    ----------
    history : History, optional
        What was measured; an empty one, which is not saved, by default.
    predictor : Predictor, optional
        By default one that learns from the history.
    capacity : Capacity, optional
    machine : Machine, optional
        The device's peaks. A kernel's class is told by how near to them it went through its arrays.
    """

    def __init__(
        self,
        history: History | None = None,
        predictor: Predictor | None = None,
        *,
        capacity: Capacity | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.history = history if history is not None else History()
        self.predictor = predictor if predictor is not None else Predictor(self.history.samples)
        self.capacity = capacity or Capacity()
        self.machine = machine or Machine()

    def __call__(self, task: Task) -> Profile:
        """Return what is believed of a task; of one without a launch, what its profile says."""
        if task.launch is None:
            return task.profile
        return self.analyze(task.launch, task.arguments, task.size or None)

    def analyze(self, launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None) -> Profile:
        """Return what is believed of a launch.

        Parameters
        ----------
        launch : Launch
            ``kernel[shape]``.
        arguments : sequence
        size : mapping, optional
            Features of the input's size, `default_size` by default.
        """
        return self.profile(launch, self.sample(launch, arguments, size))

    def profile(self, launch: Launch, sample: Sample) -> Profile:
        """Return what is believed of a launch; `sample` is what it is measured as."""
        measured = self.history.find(sample)
        source, figures = "predicted", _figures(self.predictor.predict(sample))
        if measured is not None and measured.seconds is not None:
            source, figures = "measured", {**figures, **_figures(measured)}
        room = self._room(launch)
        if not figures:
            return Profile(kind=None, source="cold", **{**room, "miss_rate": 1.0, "need": 1.0})
        bandwidth, compute = figures.get("bandwidth"), figures.get("compute")
        kind = None if bandwidth is None or compute is None else kind_of(bandwidth, compute)
        return Profile(kind=kind, source=source, **{**room, "miss_rate": 1.0, **figures})

    def measured(self, believed: Profile, launch: Launch, sample: Sample) -> Profile:
        """Return what is believed of a launch after it was measured; what was not measured is as before."""
        kind = sample.kind or believed.kind
        return replace(believed, kind=kind, source="measured", **{**self._room(launch), **_figures(sample)})

    def sample(self, launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None) -> Sample:
        """Return a launch as a sample in which nothing is measured."""
        return self.sample_of(self.key(launch, arguments, size), launch, footprint(arguments))

    @staticmethod
    def key(launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """Return what tells launches apart that are not measured as one: the kernel's `identity`, then its size."""
        return identity(launch, arguments), *(sized(size) if size else default_size(launch, arguments)).items()

    def sample_of(self, key: tuple[Any, ...], launch: Launch, nbytes: int) -> Sample:
        """Return a launch with this key, whose arrays have `nbytes`, as a sample in which nothing is measured."""
        blocks, threads = launch.configuration()
        warps = max(1, math.prod(blocks) * -(-math.prod(threads) // 32))
        return Sample(key[0], dict(key[1:]), warps, nbytes / self.machine.bandwidth)

    def observe(
        self, launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None, *, seconds: float
    ) -> Sample:
        """Learn what a launch took alone on the whole device, in seconds; return the average that it is part of."""
        return self.took(self.sample(launch, arguments, size), seconds)

    def took(self, sample: Sample, seconds: float) -> Sample:
        """Learn what a launch took alone; return the average that it is part of.

        It is taken to have moved each of its arrays once: what that leaves of its time is computing.
        """
        share: dict[str, Any] = {}
        if math.isfinite(seconds) and seconds > 0:
            moved = min(1.0, sample.moving / seconds)
            share = {"bandwidth": moved, "compute": 1.0 - moved}
        known = self.history.record(replace(sample, seconds=seconds, times=1, **share))
        self.predictor.add(known)
        return known

    def _room(self, launch: Launch) -> dict[str, Any]:
        """Return what the launch itself tells of its profile: the room that its blocks take."""
        blocks, shape = launch.configuration()
        threads = math.prod(shape)
        registers = -(-registers_of(launch) // _REGISTER_UNIT) * _REGISTER_UNIT * 4 * threads
        capacity = self.capacity
        each = min(capacity.registers // registers, capacity.threads // threads, capacity.blocks)
        need = min(1.0, math.prod(blocks) / capacity.processors)
        resident = max(1, each) * capacity.processors
        return {"registers": registers, "threads": threads, "resident": resident, "need": need}


def _figures(of: Sample | Prediction) -> dict[str, float]:
    return {name: float(value) for name in MEASURED if (value := getattr(of, name)) is not None}


def registers_of(launch: Launch) -> int:
    """Return the registers a thread: of the compiled kernel where it was compiled for a GPU, else its upper bound."""
    for key, dispatcher in launch.kernel.compiled.items():
        if isinstance(key, tuple) and key[:1] == ("cuda",):
            for overload in getattr(dispatcher, "overloads", {}).values():
                return int(overload.regs_per_thread)
    return launch.kernel.max_registers or MAX_REGISTERS
