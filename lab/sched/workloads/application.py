"""Workload: a program for measurements of schedulers; `Application`: one run of it, as launches in order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpwell._check import checked_integer
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Kind, Request, Task
from warpwell.targets import Launch, to_device, to_host, zeros

TOLERANCE = 1e-4
"""Largest accepted difference from NumPy, relative to the largest number of the result."""


class Step(NamedTuple):
    """One launch of an application.

    Attributes
    ----------
    launch : Launch
        ``kernel[shape]``.
    arguments : tuple
        Arguments of the launch. Arrays are in the memory of the application's device.
    size : dict
        Dimensions of the input by name: features of the predictor.
    """

    launch: Launch
    arguments: tuple[Any, ...]
    size: dict[str, float]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.launch.kernel.__name__)  # type: ignore[attr-defined]

    def blocks(self, device: str = "cuda") -> int:
        """Return the thread blocks of the launch (`BlockLaunch.blocks` of a kernel without barriers)."""
        if device != "cuda":
            return -(-math.prod(self.launch.shape) // 256)
        return math.prod(self.launch.configuration()[0])


class Inputs:
    """Creates the arrays of an application in device memory, with random numbers from a seed.

    Parameters
    ----------
    device : {"cpu", "cuda", "interp"}
    seed : int
    """

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.random = np.random.default_rng(seed)
        self.nbytes = 0

    def put(self, values: NDArray[Any]) -> Any:
        """Copy an array to the device."""
        self.nbytes += values.nbytes
        return to_device(self.device, values)

    def zeros(self, *shape: int) -> Any:
        """Return float32 zeros on the device."""
        self.nbytes += 4 * math.prod(shape)
        return zeros(self.device, shape, np.float32)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> NDArray[np.float32]:
        """Return random float32 numbers on the host."""
        values = self.random.random(shape, dtype=np.float32)
        return np.asarray(np.float32(low) + np.float32(high - low) * values, np.float32)


@dataclass
class Built:
    """The launches and results that a workload's builder returns.

    Attributes
    ----------
    steps : list of Step
    outputs : dict
        Name and device array of each result.
    reference : callable
        Returns the results of NumPy for the same input, by the names of `outputs`.
    """

    steps: list[Step]
    outputs: dict[str, Any]
    reference: Callable[[], dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class Workload:
    """A program of one or more kernels whose size is one number.

    Attributes
    ----------
    name : str
    kinds : mapping
        Class of each of its kernels, by the kernel's name, when its arrays are larger than the second-level cache.
    build : callable
        ``build(size, inputs) -> Built``.
    small : int
        A size that a CPU runs at once.
    large : int
        A size whose kernels occupy a whole H100 for about a millisecond or more.
    """

    name: str
    kinds: Mapping[str, Kind]
    build: Callable[[int, Inputs], Built]
    small: int
    large: int


class Application(list[Step]):
    """One run of a workload: launches that must run in order.

    Attributes
    ----------
    workload : Workload
    device : str
    built : Built
    memory : int
        Device memory of its arrays in bytes.
    """

    def __init__(self, workload: Workload, size: int, device: str, seed: int) -> None:
        inputs = Inputs(device, seed)
        self.workload, self.device = workload, device
        self.built = workload.build(checked_integer(size, "size", of=f"workload {workload.name!r}"), inputs)
        self.memory = inputs.nbytes
        super().__init__(self.built.steps)

    def run(self) -> None:
        """Run every launch, untransformed."""
        for step in self:
            step.launch(*step.arguments, device=self.device)

    def results(self) -> dict[str, NDArray[Any]]:
        """Return the results as NumPy arrays."""
        return {name: to_host(array) for name, array in self.built.outputs.items()}

    def check(self) -> None:
        """Compare the results with NumPy's.

        Raises
        ------
        AssertionError
            An error is above `TOLERANCE`, or a result is not a number.
        """
        values = self.results()
        for name, expected in self.built.reference().items():
            scale = float(np.abs(expected).max(initial=0.0)) or 1.0
            error = float(np.abs(values[name].astype(np.float64) - expected).max(initial=0.0)) / scale
            assert error <= TOLERANCE, f"{self.workload.name}: {name} differs from NumPy's by {error:.2g}"

    def request(self, seconds: Sequence[float] | None = None, arrival: float = 0.0) -> Request:
        """Return the launches as a request for a scheduler.

        Parameters
        ----------
        seconds : sequence of float, optional
            Measured solo time of each launch. By default, the profiles have only the classes.
        arrival : float
            Seconds.
        """
        kinds, source = self.workload.kinds, "given" if seconds is None else "measured"
        tasks = []
        for step, solo in zip(self, seconds or itertools.repeat(None, len(self)), strict=True):
            profile = Profile(kinds[step.name], solo, source=source)
            options: dict[str, Any] = {"memory": self.memory, "size": step.size}
            tasks.append(Task(step.name, step.blocks(self.device), profile, step.launch, step.arguments, **options))
        return Request(self.workload.name, tasks, arrival)
