"""Workload: a program that schedulers are measured with; `Application`: one run of it, as launches in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpwell import errors
from warpwell.scheduler import Kind, Profile, Request, Task
from warpwell.targets import Launch, to_device, to_host, zeros


class Step(NamedTuple):
    """One launch of an application.

    Attributes
    ----------
    launch : Launch
        ``kernel[shape]``.
    arguments : tuple
        What it is called with: ``step.launch(*step.arguments)``. Arrays are in the memory of the application's device.
    size : dict
        Names and numbers of the input size: features of the predictor.
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
    """Makes an application's arrays: random ones from a seed, in device memory.

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

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Any:
        """Make zeros on the device."""
        array = zeros(self.device, shape, dtype)
        self.nbytes += int(np.prod(shape)) * np.dtype(dtype).itemsize
        return array

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
        Returns what NumPy makes of the same input, by the names of `outputs`.
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
    tolerance : float
        How far a result may be from NumPy's, relative to the largest one.
    """

    name: str
    kinds: Mapping[str, Kind]
    build: Callable[[int, Inputs], Built]
    small: int
    large: int
    tolerance: float = 1e-4


@dataclass
class Application(Sequence[Step]):
    """One run of a workload: a sequence of launches that must run in order.

    Attributes
    ----------
    workload : Workload
    size : int
    device : str
    memory : int
        Bytes of device memory that it holds.
    """

    workload: Workload
    size: int
    device: str
    memory: int
    built: Built = field(repr=False)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        return self.built.steps[index]

    def __len__(self) -> int:
        return len(self.built.steps)

    def run(self) -> None:
        """Run every launch, untransformed."""
        for step in self:
            step.launch(*step.arguments, device=self.device)

    def results(self) -> dict[str, NDArray[Any]]:
        """Return the results as NumPy arrays."""
        return {name: to_host(array) for name, array in self.built.outputs.items()}

    def check(self) -> float:
        """Compare the results with NumPy's; return the worst error, relative to the largest number of its array.

        Raises
        ------
        AssertionError
            An error is above the workload's tolerance, or a result is not a number.
        """
        worst = 0.0
        expected_arrays = self.built.reference()
        for name, values in self.results().items():
            expected = expected_arrays[name]
            if values.dtype.kind in "iu":
                wrong = int(np.count_nonzero(values != expected))
                assert not wrong, f"{self.workload.name}: {wrong} items of {name} are not what NumPy computes"
                continue
            scale = float(np.abs(expected).max(initial=0.0)) or 1.0
            error = float(np.abs(values.astype(np.float64) - expected).max(initial=0.0)) / scale
            allowed = self.workload.tolerance
            assert error <= allowed, f"{self.workload.name}: {name} is {error:.2g} from NumPy's, over {allowed:.2g}"
            worst = max(worst, error)
        return worst

    def request(
        self,
        profile: Callable[[Step], Profile] | None = None,
        *,
        arrival: float = 0.0,
        tenant: str = "default",
        priority: int = 0,
    ) -> Request:
        """Return the launches as a request for a scheduler.

        Parameters
        ----------
        profile : callable, optional
            Returns the profile of a step; by default its class alone.
        arrival : float
            Seconds.
        tenant : str
        priority : int
        """
        tasks = []
        for step in self:
            kernel_profile = Profile(kind=self.workload.kinds[step.name]) if profile is None else profile(step)
            tasks.append(
                Task(
                    step.name,
                    step.blocks(self.device),
                    kernel_profile,
                    step.launch,
                    step.arguments,
                    tenant=tenant,
                    priority=priority,
                    memory=self.memory,
                    size=dict(step.size),
                )
            )
        return Request(self.workload.name, tasks, arrival)


def application(workload: Workload, size: int, device: str, seed: int) -> Application:
    """Build a workload's arrays and launches (`make` looks the workload up by name)."""
    if size < 1:
        raise errors.ArgumentError(f"size {size} of workload {workload.name!r}: take 1 or more", name="size")
    inputs = Inputs(device, seed)
    built = workload.build(int(size), inputs)
    return Application(workload, int(size), device, inputs.nbytes, built)
