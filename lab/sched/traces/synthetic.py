"""Synthetic: mixes of kernels and arrivals that need no file."""

from __future__ import annotations

import math
import random

import numpy as np

from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Capacity, Kind

from .trace import Arrivals, TracedApplication, TracedKernel

CAPACITY = Capacity()
MIXES = ("half", "pure")
"""8 applications each. In "half", each kernel is memory- or compute-intensive with equal chances; in "pure", all
kernels of an application have the same class."""
CHAIN = 24
"""Kernels of an application."""
TYPICAL = 200e-6
"""Median time of a kernel, in seconds."""


def poisson(count: int, seed: int) -> Arrivals:
    """Return arrivals at random times, one a second on average."""
    times = np.cumsum(np.random.default_rng([seed, 0xA221]).exponential(1.0, count))
    return Arrivals("Poisson arrivals", times - times[0])


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
        raise errors.ArgumentError(f"unknown mix {name!r}; expected one of {', '.join(MIXES)}", name="mix")
    random_ = random.Random(f"mix {name} {seed}")
    classes = (Kind.MEMORY, Kind.COMPUTE)
    applications = []
    for number in range(8):
        kinds, title = [classes[number % 2]] * CHAIN, f"{classes[number % 2].value}{number // 2}"
        if name == "half":
            kinds = [classes[random_.random() >= 0.5] for _ in range(CHAIN)]
            title = f"app{number}"
        kernels = [
            _kernel(f"{title}.{kind.value if name == 'half' else ''}{i}", kind, random_) for i, kind in enumerate(kinds)
        ]
        applications.append(TracedApplication(title, tuple(kernels)))
    return applications


def _kernel(name: str, kind: Kind, random_: random.Random) -> TracedKernel:
    """Return a kernel of a class; three of four fill the device, and half are idempotent."""
    seconds = TYPICAL * math.exp(random_.gauss(0.0, 0.8))
    waves = max(1, round(seconds / 20e-6))
    need = 1.0 if random_.random() < 0.75 else random_.choice((0.125, 0.25, 0.5))
    resident = max(1, round(8 * CAPACITY.processors * need))
    instructions = seconds * CAPACITY.clock * 2.0 * CAPACITY.processors * need
    miss_rate = 0.8 if kind is Kind.MEMORY else 0.2
    profile = Profile(kind, seconds, instructions, resident=resident, miss_rate=miss_rate, need=need)
    return TracedKernel(name, profile, waves * resident, idempotent=random_.random() < 0.5)
