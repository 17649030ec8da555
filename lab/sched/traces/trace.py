"""Trace: applications (chains of kernels) and their arrivals; it makes the requests of a run."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Capacity, Request, Task

MEDIAN_OF_ABSOLUTE = 0.6745
"""Median of the absolute value of a normal variable of deviation 1."""


@dataclass(frozen=True)
class TracedKernel:
    """A kernel of an application, with the fields of a `Task`.

    Attributes
    ----------
    profile : Profile
        The true profile.
    idempotent : bool
        Whether its blocks may run twice, so that a flush can drop their work.
    """

    name: str
    profile: Profile
    blocks: int = 1
    memory: int = 0
    idempotent: bool = False


@dataclass(frozen=True)
class TracedApplication:
    """Kernels in the order in which they run, for example one inference of a model."""

    name: str
    kernels: tuple[TracedKernel, ...]

    @cached_property
    def seconds(self) -> float:
        """Sum of the solo times of the kernels."""
        return math.fsum(kernel.profile.seconds or 0.0 for kernel in self.kernels)


@dataclass(frozen=True)
class Arrivals:
    """Times and priorities of requests.

    Attributes
    ----------
    name : str
    times : array
        Seconds, ascending, from 0; float64.
    priorities : array or None
        Priority of each, int64; None if the file has no priorities.
    """

    name: str
    times: NDArray[np.float64]
    priorities: NDArray[np.int64] | None = None


class Arrival(NamedTuple):
    """A future request: time in seconds, application, tenant and priority."""

    time: float
    application: TracedApplication
    tenant: str = "default"
    priority: int = 0


@dataclass(frozen=True)
class Trace:
    """Requests to be made.

    Attributes
    ----------
    name : str
    arrivals : sequence of Arrival
        In order of time.
    capacity : Capacity
        The device on which the kernels were measured.
    imputed : dict
        Fields that the files do not have, and their assumed values.
    details : dict
        Further description as plain data.
    """

    name: str
    arrivals: Sequence[Arrival]
    capacity: Capacity = field(default_factory=Capacity)
    imputed: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> int:
        """Number of kernels of all requests."""
        return sum(len(arrival.application.kernels) for arrival in self.arrivals)

    @cached_property
    def seconds(self) -> float:
        """Sum of the solo times of all kernels."""
        return math.fsum(arrival.application.seconds for arrival in self.arrivals)

    @cached_property
    def idempotent(self) -> frozenset[str]:
        """Names of kernels that are idempotent in every application."""
        kernels = [kernel for arrival in self.arrivals for kernel in arrival.application.kernels]
        return frozenset(k.name for k in kernels) - {k.name for k in kernels if not k.idempotent}

    @property
    def load(self) -> float:
        """`seconds` over the time between the first arrival and the last; inf if all arrive at once."""
        span = self.arrivals[-1].time - self.arrivals[0].time
        return self.seconds / span if span else math.inf

    def describe(self) -> dict[str, Any]:
        """Return a description as plain data."""
        counts = {"requests": len(self.arrivals), "kernels": self.kernels, "seconds_alone": self.seconds}
        return {"workload": self.name, **counts, **self.details, "imputed": self.imputed}

    def requests(self, error: float = 0.0, seed: int = 0) -> tuple[list[Request], dict[Task, Profile]]:
        """Make the requests of one run, and the true profiles of their tasks.

        Parameters
        ----------
        error : float
            Median relative error of predicted times (and instruction counts): each kernel of an application has a
            factor of its own, lognormal, the same in all requests.
        seed : int

        Returns
        -------
        requests : list of Request
            Their tasks have predicted profiles.
        truth : dict
            The true profile of each task; empty without errors.
        """
        random_ = random.Random(f"prediction {seed}")
        sigma = math.log1p(error) / MEDIAN_OF_ABSOLUTE
        predicted: dict[int, list[Profile]] = {}
        requests = []
        truth: dict[Task, Profile] = {}
        for time, application, tenant, priority in self.arrivals:
            kernels = application.kernels
            if id(application) not in predicted:
                predicted[id(application)] = [_guess(kernel.profile, sigma, random_) for kernel in kernels]
            tasks = [
                Task(k.name, k.blocks, profile, tenant=tenant, priority=priority, memory=k.memory)
                for k, profile in zip(kernels, predicted[id(application)], strict=True)
            ]
            if error:
                truth.update((task, kernel.profile) for task, kernel in zip(tasks, kernels, strict=True))
            requests.append(Request(application.name, tasks, time))
        return requests, truth


def compose(
    applications: Sequence[TracedApplication],
    arrivals: Arrivals,
    kernels: int,
    load: float,
    seed: int,
    urgent: float = 0.0,
) -> list[Arrival]:
    """Assign a random application to each arrival, with equal probabilities, and compress time to a load.

    Parameters
    ----------
    applications : sequence of TracedApplication
    arrivals : Arrivals
    kernels : int
        Minimum number of kernels, from 1; later arrivals are left out.
    load : float
        Sum of all solo times over the time in which the kernels arrive; inf: all arrive at once.
    seed : int
    urgent : float
        Share of requests that have priority 1 instead of 0, if the arrivals have no priorities.

    Raises
    ------
    ArgumentError
        There are too few arrivals.
    """
    random_ = random.Random(f"arrivals {seed}")
    chosen: list[tuple[TracedApplication, int]] = []
    count = 0
    for i in range(arrivals.times.size):
        application = applications[random_.randrange(len(applications))]
        priority = int(random_.random() < urgent)
        if arrivals.priorities is not None:
            priority = int(arrivals.priorities[i])
        chosen.append((application, priority))
        count += len(application.kernels)
        if count >= kernels:
            break
    if count < kernels:
        message = f"{arrivals.name} has {len(chosen)} arrivals with {count} kernels: request fewer"
        raise errors.ArgumentError(message, name="kernels")
    total = math.fsum(application.seconds for application, _ in chosen)
    times = arrivals.times[: len(chosen)] - arrivals.times[0]
    span = float(times[-1])
    scale = total / load / span if span > 0 and load < math.inf else 0.0
    return [
        Arrival(float(time) * scale, application, "default", priority)
        for time, (application, priority) in zip(times, chosen, strict=True)
    ]


def select(applications: Sequence[TracedApplication], pattern: str) -> list[TracedApplication]:
    """Return the applications whose names match a pattern such as ``*_fwd``, or one of several patterns (with commas).

    Raises
    ------
    ArgumentError
        No name matches.
    """
    patterns = [part.strip() for part in pattern.split(",")]
    found = [a for a in applications if any(fnmatchcase(a.name, part) for part in patterns)]
    if not found:
        names = ", ".join(a.name for a in applications)
        raise errors.ArgumentError(f"no application matches {pattern!r}; the applications are {names}", name="models")
    return found


def _guess(profile: Profile, sigma: float, random_: random.Random) -> Profile:
    if not sigma or profile.seconds is None:
        return profile
    factor = math.exp(random_.gauss(0.0, sigma))
    instructions = None if profile.instructions is None else profile.instructions * factor
    return dataclasses.replace(profile, seconds=profile.seconds * factor, instructions=instructions, source="predicted")
