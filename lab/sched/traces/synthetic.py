"""Synthetic: mixes of kernels and arrivals that need no file."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np

from warpwell import errors
from warpwell.scheduler import Capacity, Kind, Profile

from .trace import Arrivals, TracedApplication, TracedKernel

CAPACITY = Capacity()
CHAIN = 24
"""Kernels of an application, as a rule."""
TYPICAL = 200e-6
"""Median time of a kernel, in seconds."""


def poisson(count: int, seed: int) -> Arrivals:
    """Return arrivals at random times, one a second on average."""
    generator = np.random.default_rng([seed, 0xA221])
    times = np.cumsum(generator.exponential(1.0, count))
    return Arrivals("Poisson arrivals", times - times[0] if count else times)


def bursts(count: int, seed: int) -> Arrivals:
    """Return arrivals in bursts: a Poisson process whose rate changes between 0.2 and 3 (Markov-modulated)."""
    generator = np.random.default_rng([seed, 0xB025])
    times = np.empty(count)
    now, fast, left = 0.0, False, 0
    for i in range(count):
        if not left:
            fast, left = not fast, 1 + int(generator.geometric(1 / 24))
        now += generator.exponential(1 / 3.0 if fast else 5.0)
        left -= 1
        times[i] = now
    return Arrivals("bursts of arrivals", times - times[0] if count else times)


def mix(name: str, seed: int) -> list[TracedApplication]:
    """Return the applications of a built-in mix.

    Parameters
    ----------
    name : str
        One of `MIXES`.
    seed : int

    Raises
    ------
    ArgumentError
        The name is unknown.
    """
    if name not in MIXES:
        raise errors.ArgumentError(f"no mix {name!r}: take one of {', '.join(MIXES)}", name="mix")
    return MIXES[name][0](random.Random(f"mix {name} {seed}"))


def _share(memory: float) -> Callable[[random.Random], list[TracedApplication]]:
    """Return a maker of 8 applications whose kernels are memory-intensive with a chance."""

    def make(random_: random.Random) -> list[TracedApplication]:
        applications = []
        for number in range(8):
            kinds = [Kind.MEMORY if random_.random() < memory else Kind.COMPUTE for _ in range(CHAIN)]
            kernels = tuple(
                kernel(f"app{number}.{kind.value}{i}", kind, _seconds(random_), random_) for i, kind in enumerate(kinds)
            )
            applications.append(TracedApplication(f"app{number}", kernels))
        return applications

    return make


def _pure(random_: random.Random) -> list[TracedApplication]:
    """Return applications of one class each: half of them memory-, half compute-intensive."""
    names = [(f"{kind.value}{number}", kind) for number in range(4) for kind in (Kind.MEMORY, Kind.COMPUTE)]
    return [
        TracedApplication(name, tuple(kernel(f"{name}.{i}", kind, _seconds(random_), random_) for i in range(CHAIN)))
        for name, kind in names
    ]


def _heavy(random_: random.Random) -> list[TracedApplication]:
    """Return applications whose sizes have a heavy tail: most are short, a few a hundred times as long."""
    applications = []
    for name in (f"app{number}" for number in range(8)):
        scale = min(100.0, (1 - random_.random()) ** (-1 / 1.1))
        kernels = tuple(
            kernel(f"{name}.{i}", random_.choice((Kind.MEMORY, Kind.COMPUTE)), _seconds(random_) * scale, random_)
            for i in range(CHAIN)
        )
        applications.append(TracedApplication(name, kernels))
    return applications


def _long(random_: random.Random) -> list[TracedApplication]:
    """Return the applications of `_pure` and a kernel of 50 ms of each class, which is the case for preemption."""
    applications = [
        TracedApplication(f"long-{kind.value}", (kernel(f"long-{kind.value}", kind, 50e-3, random_, full=True),))
        for kind in (Kind.MEMORY, Kind.COMPUTE)
    ]
    return applications + _pure(random_)


def kernel(name: str, kind: Kind, seconds: float, random_: random.Random, *, full: bool = False) -> TracedKernel:
    """Return a kernel of a class; three of four fill the device, and half are idempotent."""
    waves = max(1, round(seconds / 20e-6))
    need = 1.0 if full or random_.random() < 0.75 else random_.choice((0.125, 0.25, 0.5))
    resident = max(1, round(8 * CAPACITY.processors * need))
    profile = Profile(
        kind=kind,
        seconds=seconds,
        instructions=seconds * CAPACITY.clock * 2.0 * CAPACITY.processors * need,
        resident=resident,
        miss_rate=0.8 if kind is Kind.MEMORY else 0.2,
        need=need,
        source="given",
    )
    return TracedKernel(name, profile, waves * resident, idempotent=random_.random() < 0.5)


def _seconds(random_: random.Random) -> float:
    return TYPICAL * math.exp(random_.gauss(0.0, 0.8))


MIXES: dict[str, tuple[Callable[[random.Random], list[TracedApplication]], str]] = {
    "half": (_share(0.5), "8 applications of 24 kernels, each kernel memory- or compute-intensive with equal chances"),
    "pure": (_pure, "4 memory- and 4 compute-intensive applications of 24 kernels"),
    "memory": (_share(1.0), "8 applications of 24 memory-intensive kernels"),
    "quarter": (_share(0.25), "as half, a quarter of the kernels memory-intensive"),
    "compute": (_share(0.0), "8 applications of 24 compute-intensive kernels"),
    "heavy": (_heavy, "8 applications whose sizes have a heavy tail"),
    "long": (_long, "the applications of pure, and two of one kernel of 50 ms"),
}
"""Built-in mixes and their descriptions."""
