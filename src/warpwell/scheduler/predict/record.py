"""`KernelRecord`: the measurements of a kernel at one size of its input; the predictor learns from records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ... import errors
from ..task import Kind, Profile

PROCESS_ONLY = "@~"
"""Separator in the keys of kernels whose code is not in a file: such keys are valid in this process only."""

FIRST_MEASURED_LAUNCHES = 4
"""Number of first solo launches of a kernel that are all measured. Chosen, not fitted."""

LAUNCHES_PER_MEASUREMENT = 16
"""Number of later solo launches of a kernel per measurement, so that times follow the clock and the driver. Chosen, not
fitted."""

RATIOS = ("miss_rate", "bandwidth", "compute")
MEASURED = ("instructions", "seconds", *RATIOS)
"""Measured quantities of a launch that runs solo, as in `Profile`."""


def is_persistent(kernel: str) -> bool:
    """Return True if the key of a kernel is valid in other processes."""
    return PROCESS_ONLY not in kernel


def kind_of(bandwidth: float | None, compute: float | None) -> Kind | None:
    """Return a kernel's class from its solo use of the memory's bandwidth and of the issue slots (0 to 1).

    A kernel is memory-intensive if it uses a larger part of the bandwidth than of the issue slots. A bound on one of
    them does not suffice: a kernel with 65 % of the bandwidth and 80 % of the slots leaves little to a co-runner that
    is compute-intensive.
    """
    if bandwidth is None or compute is None:
        return None
    return Kind.MEMORY if bandwidth >= compute else Kind.COMPUTE


@dataclass
class KernelRecord:
    """A kernel with its argument types and size, and its measurements; tasks have it as `Task.known`.

    Attributes
    ----------
    kernel : str
        The key of its code and argument types (`identity`).
    size : dict
        Features of the size of the input: numbers by name.
    warps : int
        Number of warps of the launch.
    moving : float
        Seconds in which the device's memory can move each of its arrays once; 0 if unknown.
    instructions, seconds, miss_rate, bandwidth, compute : float or None
        See `Profile`; None if unknown.
    times : int
        Number of averaged measurements.
    profile : Profile
        The profile that a learner derived from the record.
    launches : int
        Number of solo launches in this process.
    key : str
        Kernel and size: launches of one key do the same work.
    """

    kernel: str
    size: dict[str, float]
    warps: int
    moving: float = 0.0
    instructions: float | None = field(default=None, kw_only=True)
    seconds: float | None = field(default=None, kw_only=True)
    miss_rate: float | None = field(default=None, kw_only=True)
    bandwidth: float | None = field(default=None, kw_only=True)
    compute: float | None = field(default=None, kw_only=True)
    times: int = field(default=1, kw_only=True)
    profile: Profile = field(default_factory=Profile, kw_only=True, repr=False, compare=False)
    launches: int = field(default=0, kw_only=True, repr=False, compare=False)
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in MEASURED:
            value, is_ratio = getattr(self, name), name in RATIOS
            if value is not None and not (0 <= value <= 1 if is_ratio else math.isfinite(value) and value > 0):
                expected = "a ratio from 0 to 1" if is_ratio else "a positive number"
                raise errors.ArgumentError(f"{name} of kernel {self.kernel!r} must be {expected}, got {value}")
        if self.warps < 1:
            raise errors.ArgumentError(f"a launch of kernel {self.kernel!r} must have warps, got {self.warps}")
        if not (math.isfinite(self.moving) and self.moving >= 0):
            raise errors.ArgumentError(f"moving of kernel {self.kernel!r} must be seconds, got {self.moving}")
        self.key = f"{self.kernel} {json.dumps(self.size, sort_keys=True)}"

    @property
    def kind(self) -> Kind | None:
        """The kernel's class, or None if unknown."""
        return kind_of(self.bandwidth, self.compute)

    @property
    def should_measure(self) -> bool:
        """True if the next solo launch should be measured."""
        is_due = self.launches < FIRST_MEASURED_LAUNCHES or self.launches % LAUNCHES_PER_MEASUREMENT == 0
        return self.seconds is None or is_due

    def measurements(self) -> dict[str, float]:
        """Return the known measured quantities by name."""
        return {name: float(value) for name in MEASURED if (value := getattr(self, name)) is not None}

    def as_json(self) -> dict[str, Any]:
        """Return the stored fields as plain data."""
        return {name: value for name in _STORED if (value := getattr(self, name)) is not None}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> KernelRecord:
        """Return a record with the data of `as_json`; raise an exception if they are damaged."""
        stored = {name: entry[name] for name in _STORED if name in entry}
        record = cls(**{**stored, "size": {name: float(value) for name, value in entry["size"].items()}})
        has_types = isinstance(record.kernel, str) and type(record.times) is int
        if not (has_types and all(map(math.isfinite, record.size.values()))):
            raise ValueError("a record must have a kernel, whole numbers of times, and finite sizes")
        return record


_STORED = ("kernel", "size", "warps", "moving", *MEASURED, "times")


def sized(size: Mapping[str, Any]) -> dict[str, float]:
    """Return the features of a size that are numbers, as floats."""
    return {str(k): float(v) for k, v in size.items() if isinstance(v, Real) and math.isfinite(v)}
