"""The decision rule of the patent: the cost of a preemption, and whether to preempt."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from .._check import checked_number
from .task import Kind


@dataclass(frozen=True)
class SourceModel:
    """Constants of the cost formula of the patent (the source). The defaults are its own; fitted values replace them.

    ``preempt_cycle = (slope * miss_rate + base) * (reg + smem) * tb``, a linear fit over saved bytes with a
    slope that is linear in the cache misses of the remaining kernel.

    Attributes
    ----------
    slope : float
        Cycles per byte for a miss rate of 1: 0.09526.
    base : float
        Cycles per byte without misses: 0.01633.
    memory_decay : float
        Fraction of its rate that a remaining memory-intensive kernel keeps during a preemption: 0.90, the middle of the
        range 0.83 to 0.97 in the source.
    compute_decay : float
        The same fraction for a compute-intensive kernel: 1.
    r2 : float or None
        Coefficient of determination of the fit; None for the constants of the source, which states no value.
    origin : str
        Origin of the constants.
    """

    slope: float = 0.09526
    base: float = 0.01633
    memory_decay: float = 0.90
    compute_decay: float = 1.0
    r2: float | None = None
    origin: str = "source"

    def __post_init__(self) -> None:
        for name in ("slope", "base", "memory_decay", "compute_decay"):
            maximum = 1.0 if name.endswith("decay") else sys.float_info.max
            checked_number(getattr(self, name), name, maximum=maximum, of="the cost formula")

    def preempt_cycles(self, miss_rate: float, registers: float, shared: float, blocks: float) -> float:
        """Return the cycles for saving the resident blocks of a kernel.

        Parameters
        ----------
        miss_rate : float
            L2 miss rate of the remaining kernel, 0 to 1.
        registers, shared : float
            Bytes per block of the preempted kernel.
        blocks : float
            Resident blocks of the preempted kernel.
        """
        return (self.slope * miss_rate + self.base) * (registers + shared) * blocks

    def decay(self, kind: Kind | None) -> float:
        """Return the fraction of its rate that a remaining kernel keeps. An unknown kind counts as memory-intensive."""
        return self.compute_decay if kind is Kind.COMPUTE else self.memory_decay


SOURCE = SourceModel()
"""The constants that the source states."""


def together(remaining: list[float], rates: list[float]) -> float:
    """Return T: the time until the first of several concurrent kernels ends.

    Parameters
    ----------
    remaining : list of float
        Remaining solo time of each kernel.
    rates : list of float
        Normalized IPC of each kernel: it ends after ``remaining / rate``, and never at rate 0.
    """
    minimum = math.inf if remaining else 0.0
    for solo, rate in zip(remaining, rates, strict=True):
        if rate > 0 and solo / rate < minimum:
            minimum = solo / rate
    return minimum


def gain(s0: float, n: float, s1: float, t: float, c: float, d: float) -> float:
    """Return ``d * n * C + S1 * (T - C) - S0 * T``: the gain of a preemption in normalized IPC, summed over time.

    Parameters
    ----------
    s0, s1 : float
        Sums of normalized IPC before and after.
    n : float
        Normalized IPC of the remaining kernel.
    t : float
        Time until the first running kernel would end without the preemption.
    c : float
        Duration of the preemption, in the unit of `t`.
    d : float
        Decay rate of the remaining kernel.
    """
    return d * n * c + s1 * (t - c) - s0 * t


def worth(s0: float, n: float, s1: float, t: float, c: float, d: float) -> bool:
    """Return True if a preemption pays: ``C < T and d * n * C + S1 * (T - C) > S0 * T``. Parameters as in `gain`."""
    if math.isinf(t):
        return s1 > s0 and math.isfinite(c)
    return c < t and d * n * c + s1 * (t - c) > s0 * t
