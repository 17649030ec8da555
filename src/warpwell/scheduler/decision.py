"""The source's decision rule: the cost of a preemption, and when it pays."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .. import errors
from ..json_file import read_json
from .task import Kind


@dataclass(frozen=True)
class SourceModel:
    """Constants of the source's cost formula. The defaults are the source's own; fitted ones replace them.

    ``preempt_cycle = (slope * miss_rate + base) * (reg + smem) * tb``, a linear fit over bytes saved, whose slope is
    linear in the cache misses of the kernel that stays.

    Attributes
    ----------
    slope : float
        0.09526 cycles a byte for a miss rate of 1.
    base : float
        0.01633 cycles a byte without misses.
    memory_decay : float
        What a memory-intensive kernel that stays keeps of its rate during a preemption: 0.90, the middle of the
        source's 0.83 to 0.97.
    compute_decay : float
        The same of a compute-intensive kernel: 1.
    r2 : float or None
        How well the formula fits what the constants were fitted to (coefficient of determination); None for the
        source's constants: it states none.
    origin : str
        Where the constants come from.
    """

    slope: float = 0.09526
    base: float = 0.01633
    memory_decay: float = 0.90
    compute_decay: float = 1.0
    r2: float | None = None
    origin: str = "source"

    def __post_init__(self) -> None:
        for name in ("slope", "base"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise errors.ArgumentError(f"{name} of the cost formula is {value}: give 0 or more", name=name)
        for name in ("memory_decay", "compute_decay"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise errors.ArgumentError(f"{name} is {value}: it is a ratio, 0 to 1", name=name)

    def preempt_cycles(self, miss_rate: float, registers: float, shared: float, blocks: float) -> float:
        """Return the cycles that saving the blocks of a kernel takes.

        Parameters
        ----------
        miss_rate : float
            Misses of the second-level cache of the kernel that stays, 0 to 1.
        registers, shared : float
            Bytes a block of the kernel that goes.
        blocks : float
            Its blocks that are resident.
        """
        return (self.slope * miss_rate + self.base) * (registers + shared) * blocks

    def decay(self, kind: Kind | None) -> float:
        """Return the fraction of its rate that a kernel that stays keeps. Unknown kinds count as memory-intensive."""
        return self.compute_decay if kind is Kind.COMPUTE else self.memory_decay

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the constants as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SourceModel:
        """Read what `save` wrote.

        Raises
        ------
        MissingFileError
            There is no such file.
        FormatError
            It is not a JSON object with these names and numbers.
        """
        values = read_json(path, "a cost model")
        names = [f.name for f in fields(cls)]
        try:
            if not set(values) <= set(names):
                raise ValueError(f"it must be an object with some of {', '.join(names)}")
            for name in names[:4]:
                if not isinstance(values.get(name, 0.0), int | float):
                    raise ValueError(f"{name} is not a number")
            return cls(**values)
        except ValueError as error:
            raise errors.FormatError(f"{path} is not a cost model: {error}", path=path) from error


SOURCE = SourceModel()
"""The source's own constants."""


def together(rests: list[float], rates: list[float]) -> float:
    """Return T: how long kernels would still run together, until the first of them ends.

    Parameters
    ----------
    rests : list of float
        Time that each would still take alone.
    rates : list of float
        Normalized IPC of each. ``rest_inst / ipc = rest / rate``; a kernel at rate 0 never ends.
    """
    least = math.inf if rests else 0.0
    for rest, rate in zip(rests, rates, strict=True):
        if rate > 0 and rest / rate < least:
            least = rest / rate
    return least


def gain(s0: float, n: float, s1: float, t: float, c: float, d: float) -> float:
    """Return ``d * n * C + S1 * (T - C) - S0 * T``: what a preemption adds to the sum of normalized IPC over time.

    Parameters
    ----------
    s0, s1 : float
        Sums of normalized IPC before and after.
    n : float
        Normalized IPC of the kernel that stays.
    t : float
        Time that the running kernels would still have run together.
    c : float
        Time that the preemption takes, in the unit of `t`.
    d : float
        Decay rate of the kernel that stays.
    """
    return d * n * c + s1 * (t - c) - s0 * t


def worth(s0: float, n: float, s1: float, t: float, c: float, d: float) -> bool:
    """Return whether to preempt: iff ``C < T and d * n * C + S1 * (T - C) > S0 * T``. Parameters as in `gain`."""
    if math.isinf(t):
        return s1 > s0 and math.isfinite(c)
    return c < t and d * n * c + s1 * (t - c) > s0 * t
