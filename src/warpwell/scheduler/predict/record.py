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
"""Part of the keys of kernels whose code is in no file: they are valid in this process only."""

ALWAYS = 4
"""The first launches of a kernel, all of which are measured; then one of `RARELY` is, to follow clock and driver."""
RARELY = 16

RATIOS = ("miss_rate", "bandwidth", "compute")
MEASURED = ("instructions", "seconds", *RATIOS)
"""Figures of a launch that runs solo, as in `Profile`."""


def lasts(kernel: str) -> bool:
    """Return whether the key of a kernel is valid in other processes."""
    return PROCESS_ONLY not in kernel


def kind_of(bandwidth: float | None, compute: float | None) -> Kind | None:
    """Return a kernel's class from its solo use of the memory's bandwidth and of the issue slots (0 to 1).

    A kernel is memory-intensive if it uses more of the bandwidth than of the issue slots. A bound on one of them would
    not do: a kernel with 65 % of the bandwidth and 80 % of the slots leaves little to a compute-intensive one.
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
        Names and numbers that describe the size of the input.
    warps : int
        Warps launched.
    moving : float
        Seconds in which the device's memory can move each of its arrays once; 0 if unknown.
    instructions, seconds, miss_rate, bandwidth, compute : float or None
        As in `Profile`; None if unknown.
    times : int
        Measurements that were averaged.
    profile : Profile
        The profile that a learner derived from it.
    launches : int
        Solo launches since the learner met it.
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
        """Its class, or None if unknown."""
        return kind_of(self.bandwidth, self.compute)

    @property
    def wants(self) -> bool:
        """Whether the next launch that runs solo is to be measured."""
        return self.seconds is None or self.launches < ALWAYS or self.launches % RARELY == 0

    def figures(self) -> dict[str, float]:
        """Return the measured figures by name."""
        return {name: float(value) for name in MEASURED if (value := getattr(self, name)) is not None}

    def as_json(self) -> dict[str, Any]:
        """Return what is stored of it, as plain data."""
        return {name: value for name in _STORED if (value := getattr(self, name)) is not None}

    @classmethod
    def from_json(cls, entry: Any, place: str) -> KernelRecord:
        """Create a record from the data of `as_json`; `place` is for the message of the FormatError."""
        if not isinstance(entry, dict) or not {"kernel", "size", "warps"} <= set(entry) <= set(_STORED):
            raise errors.FormatError(f"{place} must have kernel, size and warps, and only {', '.join(_STORED)}")
        try:
            if not isinstance(entry["kernel"], str) or type(entry.get("times", 1)) is not int:
                raise TypeError("kernel must be a text, and times a whole number")
            size = {name: float(value) for name, value in entry["size"].items()}
            if not all(map(math.isfinite, size.values())):
                raise ValueError("a size is not finite")
            return cls(**{**entry, "size": size})
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise errors.FormatError(f"{place} is damaged: {error}") from error


_STORED = ("kernel", "size", "warps", "moving", *MEASURED, "times")


def sized(size: Mapping[str, Any]) -> dict[str, float]:
    """Return the features of a size that are numbers, as floats."""
    return {str(k): float(v) for k, v in size.items() if isinstance(v, Real) and math.isfinite(v)}
