"""Analyzer: says of a launch, before it runs, what it will take alone and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...targets import Launch
from ...targets.compiler.run_cuda import MAX_REGISTERS
from ..events import Event
from ..executor import Capacity
from ..task import Profile, Task
from .counting import Counts, count
from .history import History
from .identity import default_size, footprint, identity
from .predictor import COLD, Prediction, Predictor
from .roofline import Estimate, Machine, estimate
from .sample import MEASURED, Sample, kind_of, sized

REMEMBERED = 1024
"""Launches whose counts are remembered."""

_REGISTER_UNIT = 8


class Analyzer:
    """Predicts instructions, time, class, footprint and miss rate of launches; ``analyzer(task)`` is its profile.

    What it says comes from, in this order: the same kernel and size measured before (``source`` of the profile is
    "measured"); the kernel at other sizes, or other kernels ("predicted"); the compiled code and the device's peaks
    alone ("static"); nothing ("cold"). A cold profile is the conservative one: no class, so that the kernel is probed
    first; no time, so that nothing is preempted for it or because of it; every access a miss; the whole device needed.

    Parameters
    ----------
    history : History, optional
        What was measured; an empty one, which is not saved, by default.
    predictor : Predictor, optional
        By default one that learns from the history.
    capacity : Capacity, optional
    machine : Machine, optional
    counter : callable, optional
        ``counter(launch, arguments) -> Counts``, `count` by default. An error of it makes the answer cold, and so does
        None, until the kernel was measured: then its class is told by how fast it went through its arrays.

    Attributes
    ----------
    failures : dict
        Kernels that could not be counted, and why; the last ones.
    """

    def __init__(
        self,
        history: History | None = None,
        predictor: Predictor | None = None,
        *,
        capacity: Capacity | None = None,
        machine: Machine | None = None,
        counter: Callable[[Launch, Sequence[Any]], Counts] | None = count,
    ) -> None:
        self.history = history if history is not None else History()
        self.predictor = predictor if predictor is not None else Predictor(self.history.samples)
        self.capacity = capacity or Capacity()
        self.machine = machine or Machine()
        self.failures: dict[str, str] = {}
        self._counter = counter
        self._estimates: dict[Any, Estimate | None] = {}

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
        found = self.estimate(launch, arguments)
        return self.profile(launch, found, _sample(launch, arguments, size, found))

    def profile(self, launch: Launch, found: Estimate | None, sample: Sample) -> Profile:
        """Return what is believed of a launch with this static estimate; `sample` is what it is measured as."""
        predicted, measured = self.predictor.predict(sample), self.history.find(sample)
        source, figures = ("static" if predicted.how == COLD else "predicted"), _figures(predicted)
        if measured is not None and measured.seconds is not None:
            source, figures = "measured", {**figures, **_figures(measured)}
        if found is not None:
            figures = {**{k: getattr(found, k) for k in ("miss_rate", "bandwidth", "compute")}, **figures}
        registers, threads, resident = self._room(launch)
        kind = kind_of(figures["bandwidth"], figures["compute"]) if {"bandwidth", "compute"} <= set(figures) else None
        return Profile(
            kind=kind, seconds=figures.get("seconds"), instructions=figures.get("instructions"), registers=registers,
            threads=threads, resident=resident, miss_rate=figures.get("miss_rate", 1.0),
            bandwidth=figures.get("bandwidth", 0.0), compute=figures.get("compute", 0.0),
            need=1.0 if found is None else found.need, source=source if figures else "cold",
        )  # fmt: skip

    def measured(self, believed: Profile, launch: Launch, sample: Sample) -> Profile:
        """Return what is believed of a launch after it was measured; what was not measured is as before."""
        figures: dict[str, Any] = dict(_figures(sample))
        kind = sample.kind or believed.kind
        registers, _, resident = self._room(launch)
        return replace(believed, kind=kind, registers=registers, resident=resident, source="measured", **figures)

    def predict(self, launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None) -> Prediction:
        """Return what the predictor says of a launch, whatever was measured of this very size."""
        return self.predictor.predict(self.sample(launch, arguments, size))

    def sample(self, launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None) -> Sample:
        """Return a launch as a sample in which nothing is measured."""
        return _sample(launch, arguments, size, self.estimate(launch, arguments))

    @staticmethod
    def key(launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """Return what tells launches apart that are not measured as one: the kernel's `identity`, then its size."""
        return identity(launch, arguments), *(sized(size) if size else default_size(launch, arguments)).items()

    @staticmethod
    def sample_of(key: tuple[Any, ...], launch: Launch, found: Estimate | None) -> Sample:
        """Return a launch with this key as a sample in which nothing is measured."""
        return _sample_of(key[0], dict(key[1:]), launch, found)

    def observe(
        self,
        launch: Launch,
        arguments: Sequence[Any],
        size: Mapping[str, Any] | None = None,
        *,
        seconds: float,
        instructions: float | None = None,
    ) -> Sample:
        """Learn what a launch took alone on the whole device, in seconds; return the average that it is part of."""
        return self.took(self.sample(launch, arguments, size), seconds, footprint(arguments), instructions)

    def took(self, sample: Sample, seconds: float, nbytes: int, instructions: float | None = None) -> Sample:
        """Learn what a launch took alone; return the average that it is part of.

        Parameters
        ----------
        sample : Sample
            What it is measured as.
        seconds : float
        nbytes : int
            Of its arrays. What was not counted is taken to have moved each of them once.
        instructions : float, optional
        """
        share: dict[str, Any] = {}
        if not sample.static and math.isfinite(seconds) and seconds > 0:
            moved = min(1.0, nbytes / seconds / self.machine.bandwidth)
            share = {"bandwidth": moved, "compute": 1.0 - moved}
        known = self.history.record(replace(sample, seconds=seconds, instructions=instructions, times=1, **share))
        self.predictor.add(known)
        return known

    def estimate(self, launch: Launch, arguments: Sequence[Any]) -> Estimate | None:
        """Return the static estimate of a launch; None where it cannot be counted (`failures` says why)."""
        key = launch.kernel.function, launch.shape, tuple(_outline(a) for a in arguments)
        if key not in self._estimates:
            found = self._count(launch, arguments)
            if len(self._estimates) >= REMEMBERED:
                self._estimates.pop(next(iter(self._estimates)), None)  # another thread may have been there
            self._estimates[key] = found
            return found
        return self._estimates.get(key)

    def _count(self, launch: Launch, arguments: Sequence[Any]) -> Estimate | None:
        if self._counter is None:
            return None
        try:
            counts = self._counter(launch, arguments)
        except Exception as error:  # whatever a compiler raises: without counts there is still an answer
            if len(self.failures) >= REMEMBERED:
                self.failures.pop(next(iter(self.failures)), None)
            self.failures[_name(launch)] = f"{type(error).__name__}: {error}"
            return None
        blocks, _ = launch.configuration()
        return estimate(
            counts, blocks=math.prod(blocks), resident=self._room(launch)[2], capacity=self.capacity,
            machine=self.machine,
        )  # fmt: skip

    def _room(self, launch: Launch) -> tuple[int, int, int]:
        """Return register bytes and threads of a block, and the blocks that the whole device holds."""
        threads = math.prod(launch.configuration()[1])
        registers = -(-registers_of(launch) // _REGISTER_UNIT) * _REGISTER_UNIT * 4 * threads
        capacity = self.capacity
        each = min(capacity.registers // registers, capacity.threads // threads, capacity.blocks)
        return registers, threads, max(1, each) * capacity.processors


def _figures(of: Sample | Prediction) -> dict[str, float]:
    return {name: float(value) for name in MEASURED if (value := getattr(of, name)) is not None}


def _name(launch: Launch) -> str:
    return str(launch.kernel.__name__)  # type: ignore[attr-defined]


def _sample(
    launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None, found: Estimate | None
) -> Sample:
    known = sized(size) if size else default_size(launch, arguments)
    return _sample_of(identity(launch, arguments), known, launch, found)


def _sample_of(kernel: str, size: dict[str, float], launch: Launch, found: Estimate | None) -> Sample:
    blocks, threads = launch.configuration()
    warps = max(1, math.prod(blocks) * -(-math.prod(threads) // 32))
    return Sample(kernel, size, warps, {} if found is None else dict(found.features))


def registers_of(launch: Launch) -> int:
    """Return the registers a thread: of the compiled kernel where it was compiled for a GPU, else its upper bound."""
    for key, dispatcher in launch.kernel.compiled.items():
        if isinstance(key, tuple) and key[:1] == ("cuda",):
            for overload in getattr(dispatcher, "overloads", {}).values():
                return int(overload.regs_per_thread)
    return launch.kernel.max_registers or MAX_REGISTERS


def alone_times(events: Iterable[Event]) -> list[tuple[int, float]]:
    """Return number and seconds of each task of a log that had the whole device for itself from its launch to its end.

    The seconds are the kernel's own, as the executor measured them: without compiling, and without copies.
    """
    return [(event.task, event.why["alone"]) for event in events if event.kind == "end" and "alone" in event.why]


def _outline(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    if shape:
        return str(getattr(value, "dtype", "")), tuple(shape)
    return value if isinstance(value, int | float | str) else str(type(value))
