"""Predictor: instructions, time and class of a launch, learnt from launches that were measured.

A kernel that was measured at other sizes is predicted by a local regression of logarithms: the ratio of its time to the
time in which its arrays are moved once changes slowly with size. Nothing is predicted of a kernel that was never
measured: it runs alone once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ..task import Profile
from .record import KernelRecord, kind_of

WIDTH = 0.3
"""Width of the local regression, in standard deviations of the logarithms of a kernel's sizes."""
RIDGE = 1e-3

START = 2e-6
"""Seconds from the launch of an empty kernel to its end."""

ISSUED = 0.65
"""Part of the issue slots that busy kernels fill."""


class Predictor:
    """Learns from records; `predict` answers for any launch.

    Parameters
    ----------
    records : iterable of KernelRecord
    sizes : int, optional
        Measurements that are kept of a kernel, the last ones; all by default.
    kernels : int, optional
        Kernels that are kept, those measured last; all by default.
    """

    def __init__(
        self, records: Iterable[KernelRecord] = (), *, sizes: int | None = None, kernels: int | None = None
    ) -> None:
        self._sizes, self._most = sizes, kernels
        self._by_kernel: dict[str, list[KernelRecord]] = {}
        self._regressions: dict[str, dict[str, _Local]] = {}  # of what was asked for, by kernel and figure
        for record in records:
            self.add(record)

    def add(self, record: KernelRecord) -> None:
        """Learn from a measurement; one of the same kernel and size is replaced."""
        rows = self._by_kernel.setdefault(record.kernel, [])
        rows[:] = [row for row in rows if row.key != record.key] + [record]
        self._regressions.pop(record.kernel, None)
        if self._sizes is not None:
            del rows[: -self._sizes]
        if self._most is not None:
            self._by_kernel[record.kernel] = self._by_kernel.pop(record.kernel)  # the last one now
            if len(self._by_kernel) > self._most:
                oldest = next(iter(self._by_kernel))
                del self._by_kernel[oldest]
                self._regressions.pop(oldest, None)

    def predict(self, query: KernelRecord) -> Profile | None:
        """Predict a launch from its kernel, size, warps and bytes; None if its kernel was never measured."""
        rows = self._by_kernel.get(query.kernel, [])
        local = self._regressions.get(query.kernel)
        if local is None:
            known = {field: [row for row in rows if _measured(row, field) is not None] for field in _FIELDS}
            local = {field: _Local(its, field) for field, its in known.items() if its}
            if rows:  # nothing is kept of a kernel that was only asked for
                self._regressions[query.kernel] = local
        lead = local.get("seconds") or local.get("instructions")
        if lead is None or not lead.fits(query):
            return None
        found = {f: m.predict(query) for f, m in local.items() if m.fits(query)}
        seconds = found.get("seconds")
        if seconds is not None:  # nothing is faster than the peaks
            issued = max(ISSUED, *[row.compute or 0.0 for row in rows])
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
"""Figures that are learnt. "move" and "issue" are the seconds that its bytes and its instructions take at the peaks.

They grow with size as bytes and instructions do, so they are predicted more surely than their parts of the time, which
are bandwidth and compute.
"""
_POSITIVE = ("instructions", "seconds", "move", "issue")
_LEAST = 1e-12


def _measured(record: KernelRecord, field: str) -> float | None:
    if field not in ("move", "issue"):
        value: float | None = getattr(record, field)
        return value
    share = record.bandwidth if field == "move" else record.compute
    return None if share is None or record.seconds is None else max(_LEAST, share * record.seconds)


def _base(record: KernelRecord, field: str) -> float:
    """Return the divisor of a figure: their ratio depends little on the size."""
    if field == "instructions":
        return float(record.warps)
    if field == "seconds":
        return START + record.moving
    return record.moving if field == "move" and record.moving else 1.0


def _target(record: KernelRecord, field: str) -> float:
    value = _measured(record, field)
    assert value is not None  # rows without it were left out
    return math.log(value / _base(record, field)) if field in _POSITIVE else value


def _restored(value: float, record: KernelRecord, field: str) -> float:
    if field in _POSITIVE:
        return math.exp(min(60.0, max(-60.0, value))) * _base(record, field)
    return min(1.0, max(0.0, value))


class _Local:
    """One figure of one kernel, by local linear regression over logarithms of sizes."""

    def __init__(self, rows: Sequence[KernelRecord], field: str) -> None:
        self.field = field
        self.names = sorted({name for row in rows for name in row.size})
        self.based = bool(rows[-1].moving)  # some measurements lack it
        rows = [r for r in rows if set(r.size) == set(self.names) and bool(r.moving) == self.based]
        self.x = np.array([self._logarithms(row) for row in rows]).reshape(len(rows), len(self.names))
        self.low, self.high = self.x.min(axis=0, initial=math.inf), self.x.max(axis=0, initial=-math.inf)
        scale = self.x.std(axis=0) if rows else np.ones(len(self.names))
        self.scale = np.where(scale > 1e-9, scale, 1.0)
        self.y = np.array([_target(row, field) for row in rows])

    def _logarithms(self, record: KernelRecord) -> list[float]:
        return [math.log(max(record.size[name], 1e-12)) for name in self.names]

    def fits(self, query: KernelRecord) -> bool:
        """Whether the query has the same features, and there is something to go by."""
        same = set(query.size) == set(self.names) and bool(query.moving) == self.based
        return same and len(self.y) > 0

    def predict(self, query: KernelRecord) -> float:
        """Return the figure, by a regression near the query; far from all samples, the nearest count."""
        x, y = np.array(self._logarithms(query)), self.y
        if (self.field == "move" and self.based) or self.field not in _POSITIVE:
            x = np.clip(x, self.low, self.high)  # ratios beyond the sizes measured are those at the ends
        if len(y) < 2:
            return _restored(float(y[0]), query, self.field)
        away = (self.x - x) / self.scale
        distance = np.sqrt((away**2).mean(axis=1)) if away.shape[1] else np.zeros(len(y))
        weight = np.exp(-0.5 * (distance / (WIDTH + distance.min())) ** 2) + 1e-6
        design = np.hstack([np.ones((len(y), 1)), away])
        penalty = RIDGE * np.eye(design.shape[1])
        penalty[0, 0] = 0.0
        normal = design.T * weight
        return _restored(float(np.linalg.solve(normal @ design + penalty, normal @ y)[0]), query, self.field)
