"""Sample: the figures of one launch, measured or asked for; the predictor learns from samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

from ... import errors
from ..task import Kind

HERE = "@~"
"""What the key of a kernel has that is valid in this process only: its code is in no file."""


def lasts(kernel: str) -> bool:
    """Return whether the key of a kernel is valid in other processes."""
    return HERE not in kernel


def kind_of(bandwidth: float, compute: float) -> Kind:
    """Return a kernel's class from what it takes alone of the memory's bandwidth and of the issue slots (0 to 1).

    A kernel is memory-intensive if it uses more of the bandwidth than of the issue slots. A bound on one of them would
    not do: a kernel with 65 % of the bandwidth and 80 % of the slots leaves little to a compute-intensive one.
    """
    return Kind.MEMORY if bandwidth >= compute else Kind.COMPUTE


@dataclass(kw_only=True)
class Figures:
    """What is measured and predicted of a launch that runs alone.

    Attributes
    ----------
    instructions, seconds, miss_rate, bandwidth, compute : float or None
        As in `Profile`; None where it is not known.
    """

    instructions: float | None = None
    seconds: float | None = None
    miss_rate: float | None = None
    bandwidth: float | None = None
    compute: float | None = None

    @property
    def kind(self) -> Kind | None:
        """Its class, where it is known."""
        if self.bandwidth is None or self.compute is None:
            return None
        return kind_of(self.bandwidth, self.compute)

    def known(self) -> dict[str, float]:
        """Return the figures that are known, by name."""
        return {name: float(value) for name in MEASURED if (value := getattr(self, name)) is not None}


MEASURED = tuple(field.name for field in fields(Figures))


@dataclass
class Sample(Figures):
    """One launch, and what was measured of it (`Figures`).

    Attributes
    ----------
    kernel : str
    size : dict
        Names and numbers that say how large the input is.
    warps : int
        Warps launched.
    moving : float
        Seconds in which the device's memory can move each of its arrays once; 0 where that is not known.
    app : str
        The application ("" where not known).
    times : int
        Measurements that were averaged.
    """

    kernel: str
    size: dict[str, float]
    warps: int
    moving: float = 0.0
    app: str = ""
    times: int = 1

    def __post_init__(self) -> None:
        for name in ("instructions", "seconds"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise errors.ArgumentError(f"{name} of a launch of {self.kernel!r} is {value}: give a positive number")
        for name in ("miss_rate", "bandwidth", "compute"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise errors.ArgumentError(f"{name} of a launch of {self.kernel!r} is {value}: give a ratio, 0 to 1")
        if self.warps < 1:
            raise errors.ArgumentError(f"a launch of {self.kernel!r} has {self.warps} warps: it needs at least one")
        if not (math.isfinite(self.moving) and self.moving >= 0):
            raise errors.ArgumentError(f"moving of a launch of {self.kernel!r} is {self.moving}: give seconds")

    @property
    def key(self) -> tuple[str, str]:
        """Kernel and size: launches of one key do the same work."""
        return self.kernel, json.dumps(self.size, sort_keys=True)

    def as_json(self) -> dict[str, Any]:
        """Return the known fields as plain data."""
        return {k: v for k, v in asdict(self).items() if v not in (None, "", {})}

    @classmethod
    def from_json(cls, entry: Any, place: str) -> Sample:
        """Make a sample from the data of `as_json`; `place` is for the message of the FormatError."""
        names = {f.name for f in fields(cls)}
        if not isinstance(entry, dict) or not {"kernel", "size", "warps"} <= set(entry) <= names:
            raise errors.FormatError(f"{place} must have kernel, size and warps, and only {', '.join(sorted(names))}")
        try:
            if not isinstance(entry["kernel"], str) or type(entry.get("times", 1)) is not int:
                raise TypeError("kernel must be a text, and times a whole number")
            size = {name: float(value) for name, value in entry["size"].items()}
            if not all(map(math.isfinite, size.values())):
                raise ValueError("a size is not finite")
            return cls(**{**entry, "size": size})
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise errors.FormatError(f"{place} is damaged: {error}") from error


def sized(size: Mapping[str, Any]) -> dict[str, float]:
    """Return the features of a size that are numbers, as floats."""
    return {str(k): float(v) for k, v in size.items() if isinstance(v, Real) and math.isfinite(v)}
