"""Predictor: predicts instructions, time and class of a launch from measured launches of the same kernel.

It uses a local regression of logarithms over sizes: the ratio of a kernel's time to the time in which its arrays are
moved once changes slowly with size. It does not predict kernels without measurements, which run solo once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from ..task import Profile
from .record import KernelRecord, kind_of

REGRESSION_WIDTH = 0.3
"""Width of the local regression, in standard deviations of the logarithms of a kernel's sizes. Chosen, not fitted."""

RIDGE_PENALTY = 1e-3
"""Weight of the squared slopes in the regression, which keeps it defined for few or equal sizes. Chosen, not fitted."""

EMPTY_LAUNCH_SECONDS = 2e-6
"""Time from the launch of an empty kernel to its end, to the order of magnitude."""

BUSY_ISSUE_FRACTION = 0.65
"""Fraction of the issue slots that busy kernels fill: from 312 launches of 26 kernels on an H200, 21 November."""


class Predictor:
    """Learns from records; `predict` answers for any launch.

    Parameters
    ----------
    records : iterable of KernelRecord
    max_sizes : int, optional
        Maximum number of measurements of a kernel; the oldest is deleted first. No limit by default.
    max_kernels : int, optional
        Maximum number of kernels; the least recently measured is deleted first. No limit by default.
    """

    def __init__(
        self, records: Iterable[KernelRecord] = (), *, max_sizes: int = sys.maxsize, max_kernels: int = sys.maxsize
    ) -> None:
        self._max_sizes, self._max_kernels = max_sizes, max_kernels
        self._by_kernel: dict[str, list[KernelRecord]] = {}
        self._regressions: dict[str, dict[str, _Local]] = {}  # by kernel and quantity, created on demand
        for record in records:
            self.add(record)

    def add(self, record: KernelRecord) -> None:
        """Learn from a measurement, which replaces one of the same kernel and size."""
        rows = [row for row in self._by_kernel.pop(record.kernel, []) if row.key != record.key]
        self._by_kernel[record.kernel] = [*rows, record][-self._max_sizes :]
        self._regressions.pop(record.kernel, None)
        if len(self._by_kernel) > self._max_kernels:
            oldest = next(iter(self._by_kernel))
            del self._by_kernel[oldest]
            self._regressions.pop(oldest, None)

    def predict(self, query: KernelRecord) -> Profile | None:
        """Return the predicted profile of a launch, or None if its kernel was never measured."""
        rows = self._by_kernel.get(query.kernel, [])
        local = self._regressions.get(query.kernel)
        if local is None:
            measured = {field: [row for row in rows if _measured(row, field) is not None] for field in _FIELDS}
            local = {field: _Local(samples, field) for field, samples in measured.items() if samples}
            if rows:  # `add` bounds the number of measured kernels, but not of queried ones
                self._regressions[query.kernel] = local
        lead = local.get("seconds") or local.get("instructions")
        if lead is None or not lead.fits(query):
            return None
        found = {f: m.predict(query) for f, m in local.items() if m.fits(query)}
        seconds = found.get("seconds")
        if seconds is not None:  # No kernel exceeds the peaks of the device.
            issued = max(BUSY_ISSUE_FRACTION, *[row.compute or 0.0 for row in rows])
            seconds = max(seconds, found.get("move", 0.0), found.get("issue", 0.0) / issued)
        shares = [min(1.0, found[f] / seconds) if f in found and seconds else None for f in ("move", "issue")]
        return Profile(
            kind_of(*shares),
            seconds,
            found.get("instructions"),
            miss_rate=found.get("miss_rate", 1.0),
            bandwidth=shares[0] or 0.0,
            compute=shares[1] or 0.0,
            source="predicted",
        )


_FIELDS = ("instructions", "seconds", "miss_rate", "move", "issue")
"""Predicted quantities. "move" and "issue" are the seconds of a kernel's bytes and instructions at the peaks.

They grow with size as bytes and instructions do. So the predictor extrapolates them better than bandwidth and compute,
which are fractions of the time.
"""
_POSITIVE = ("instructions", "seconds", "move", "issue")
_MIN_SECONDS = 1e-12


def _measured(record: KernelRecord, field: str) -> float | None:
    if field not in ("move", "issue"):
        value: float | None = getattr(record, field)
        return value
    share = record.bandwidth if field == "move" else record.compute
    return None if share is None or record.seconds is None else max(_MIN_SECONDS, share * record.seconds)


def _base(record: KernelRecord, field: str) -> float:
    """Return the divisor of a quantity: their ratio depends little on the size."""
    if field == "instructions":
        return float(record.warps)
    if field == "seconds":
        return EMPTY_LAUNCH_SECONDS + record.moving
    return record.moving if field == "move" and record.moving else 1.0


def _target(record: KernelRecord, field: str) -> float:
    value = _measured(record, field)
    assert value is not None  # `Predictor.predict` has removed rows without this quantity.
    return math.log(value / _base(record, field)) if field in _POSITIVE else value


def _restored(value: float, record: KernelRecord, field: str) -> float:
    if field in _POSITIVE:
        return math.exp(min(60.0, max(-60.0, value))) * _base(record, field)
    return min(1.0, max(0.0, value))


class _Local:
    """Local linear regression of one quantity of one kernel over logarithms of sizes."""

    def __init__(self, rows: Sequence[KernelRecord], field: str) -> None:
        self.field = field
        self.names = sorted({name for row in rows for name in row.size})
        self.based = bool(rows[-1].moving)  # Some measurements lack this quantity.
        rows = [r for r in rows if set(r.size) == set(self.names) and bool(r.moving) == self.based]
        self.x = np.array([self._logarithms(row) for row in rows]).reshape(len(rows), len(self.names))
        self.low, self.high = self.x.min(axis=0, initial=math.inf), self.x.max(axis=0, initial=-math.inf)
        scale = self.x.std(axis=0) if rows else np.ones(len(self.names))
        self.scale = np.where(scale > 1e-9, scale, 1.0)
        self.y = np.array([_target(row, field) for row in rows])

    def _logarithms(self, record: KernelRecord) -> list[float]:
        return [math.log(max(record.size[name], 1e-12)) for name in self.names]

    def fits(self, query: KernelRecord) -> bool:
        """Return True if the query has the same features as the samples, and there are samples."""
        same = set(query.size) == set(self.names) and bool(query.moving) == self.based
        return same and len(self.y) > 0

    def predict(self, query: KernelRecord) -> float:
        """Return the quantity by a regression near the query; far from all samples, the nearest ones count."""
        x, y = np.array(self._logarithms(query)), self.y
        if (self.field == "move" and self.based) or self.field not in _POSITIVE:
            x = np.clip(x, self.low, self.high)  # Ratios are constant beyond the measured sizes.
        if len(y) < 2:
            return _restored(float(y[0]), query, self.field)
        away = (self.x - x) / self.scale
        distance = np.sqrt((away**2).mean(axis=1)) if away.shape[1] else np.zeros(len(y))
        weight = np.exp(-0.5 * (distance / (REGRESSION_WIDTH + distance.min())) ** 2) + 1e-6
        design = np.hstack([np.ones((len(y), 1)), away])
        penalty = RIDGE_PENALTY * np.eye(design.shape[1])
        penalty[0, 0] = 0.0
        normal = design.T * weight
        return _restored(float(np.linalg.solve(normal @ design + penalty, normal @ y)[0]), query, self.field)
