"""Analyzer: says of a launch, before it runs, what it will take alone and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..targets import KernelArgument, Launch
from ..targets.run_cuda import MAX_REGISTERS
from .counting import Counts, count
from .events import Event
from .executor import Capacity
from .history import History
from .predictor import COLD, Prediction, Predictor
from .roofline import Estimate, Machine, estimate
from .sample import MEASURED, Sample, kind_of, sized
from .task import Profile, Task

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
        ``counter(launch, arguments) -> Counts``, `count` by default. An error of it makes the answer cold.

    Attributes
    ----------
    failures : dict
        Kernels that could not be counted, and why.
    """

    def __init__(
        self,
        history: History | None = None,
        predictor: Predictor | None = None,
        *,
        capacity: Capacity | None = None,
        machine: Machine | None = None,
        counter: Callable[[Launch, Sequence[Any]], Counts] = count,
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
            Features of the input's size; by default the launch's shape and the integers among the arguments.
        """
        found = self.estimate(launch, arguments)
        sample = _sample(launch, arguments, size, found)
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

    def predict(self, launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None) -> Prediction:
        """Return what the predictor says of a launch, whatever was measured of this very size."""
        return self.predictor.predict(self.sample(launch, arguments, size))

    def sample(self, launch: Launch, arguments: Sequence[Any], size: Mapping[str, Any] | None = None) -> Sample:
        """Return a launch as a sample in which nothing is measured."""
        return _sample(launch, arguments, size, self.estimate(launch, arguments))

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
        sample = self.sample(launch, arguments, size)
        sample.seconds, sample.instructions = seconds, instructions
        sample.__post_init__()  # which refuses times that cannot be
        known = self.history.record(sample)
        self.predictor.add(known)
        return known

    def learn(self, events: Iterable[Event], tasks: Mapping[int, Task]) -> int:
        """Learn the times of tasks that a log shows to have run from launch to end with nothing beside them.

        Parameters
        ----------
        events : iterable of Event
            A log.
        tasks : mapping
            Tasks by number.

        Returns
        -------
        int
            Times learnt.
        """
        learnt = 0
        for number, seconds in alone_times(events):
            task = tasks.get(number)
            if task is not None and task.launch is not None and seconds > 0:
                self.observe(task.launch, task.arguments, task.size or None, seconds=seconds)
                learnt += 1
        return learnt

    def estimate(self, launch: Launch, arguments: Sequence[Any]) -> Estimate | None:
        """Return the static estimate of a launch; None where it cannot be counted (`failures` says why)."""
        key = launch.kernel.function, launch.shape, tuple(_outline(a) for a in arguments)
        if key not in self._estimates:
            self._estimates[key] = self._count(launch, arguments)
        return self._estimates[key]

    def _count(self, launch: Launch, arguments: Sequence[Any]) -> Estimate | None:
        try:
            counts = self._counter(launch, arguments)
        except Exception as error:  # whatever a compiler raises: without counts there is still an answer
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
    blocks, threads = launch.configuration()
    warps = max(1, math.prod(blocks) * -(-math.prod(threads) // 32))
    known = sized(size) if size else default_size(launch, arguments)
    return Sample(_name(launch), known, warps, {} if found is None else dict(found.features))


def default_size(launch: Launch, arguments: Sequence[Any]) -> dict[str, float]:
    """Return features of a launch's size for which none were given: its shape, and the integers it is called with."""
    size = {f"extent{k}": float(n) for k, n in enumerate(launch.shape)}
    for k, value in enumerate(arguments):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            size[f"argument{k}"] = float(value)
    return size


def footprint(arguments: Sequence[Any]) -> int:
    """Return the bytes of device memory that the arrays among a launch's arguments hold.

    An array on storage holds what its cache holds. An array that is passed twice counts once.
    """
    found: dict[int, int] = {}
    for value in arguments:
        cache = getattr(value, "cache", None)
        if isinstance(value, KernelArgument) and cache is not None:
            found[id(cache)] = int(getattr(cache, "cache_bytes", 0))
        elif hasattr(value, "nbytes") and getattr(value, "ndim", False):
            found[id(value)] = int(value.nbytes)
    return sum(found.values())


def registers_of(launch: Launch) -> int:
    """Return the registers a thread: of the compiled kernel where it was compiled for a GPU, else its upper bound."""
    for key, dispatcher in launch.kernel.compiled.items():
        if isinstance(key, tuple) and key[:1] == ("cuda",):
            for overload in getattr(dispatcher, "overloads", {}).values():
                return int(overload.regs_per_thread)
    return launch.kernel.max_registers or MAX_REGISTERS


def alone_times(events: Iterable[Event]) -> list[tuple[int, float]]:
    """Return number and seconds of each task of a log that nothing ran beside, from its launch to its end."""
    running: dict[int, float] = {}
    shared: set[int] = set()
    found = []
    for event in events:
        if event.kind == "launch":
            running[event.task] = event.time
            if len(running) > 1:
                shared |= set(running)
        elif event.kind in ("preempt", "resize"):
            shared.add(event.task)
        elif event.kind in ("stop", "end", "fail", "cancel", "lost") and event.task in running:
            seconds = event.time - running.pop(event.task)
            if event.kind == "end" and event.task not in shared:
                found.append((event.task, seconds))
    return found


def _outline(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    if shape:
        return str(getattr(value, "dtype", "")), tuple(shape)
    return value if isinstance(value, int | float | str) else str(type(value))
