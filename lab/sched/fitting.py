"""Fits the source's cost and decay constants to measurements of preemptions, and measures how well they fit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from warpwell import errors
from warpwell.scheduler import Kind, Log, SourceModel
from warpwell.scheduler.decision import SOURCE

from .traces import rows


@dataclass(frozen=True)
class Preemption:
    """One measured preemption; fields that were not measured are None.

    Attributes
    ----------
    nbytes : float or None
        Registers and shared memory of the blocks that left one multiprocessor, in bytes.
    miss_rate : float or None
        Second-level cache misses of the kernel that stayed, 0 to 1.
    cycles : float or None
        How long it took.
    kind : Kind or None
        Class of the kernel that stayed.
    decay : float or None
        The part of its rate that this kernel kept meanwhile, 0 to 1.
    """

    nbytes: float | None = None
    miss_rate: float | None = None
    cycles: float | None = None
    kind: Kind | None = None
    decay: float | None = None


@dataclass(frozen=True)
class Fit:
    """The fitted constants, and how well they fit.

    Attributes
    ----------
    model : SourceModel
        With the source's constants for quantities without measurements; its `r2` describes the costs.
    costs, decays : int
        Measurements of each.
    r2_source : float or None
        Coefficient of determination of the source's own constants on the same costs.
    r2_decay : float or None
        How much of the spread of decays the class explains.
    fixed_cycles, r2_fixed : float or None
        A constant time in addition to the formula, and the coefficient of determination with it: where blocks drain and
        nothing is saved, the cost is mostly constant.
    notes : list of str
        Constants that the measurements do not determine.
    """

    model: SourceModel
    costs: int
    decays: int
    r2_source: float | None = None
    r2_decay: float | None = None
    fixed_cycles: float | None = None
    r2_fixed: float | None = None
    notes: list[str] = field(default_factory=list)


def fit(preemptions: Iterable[Preemption], origin: str = "measured") -> Fit:
    """Fit ``cycles = (slope * miss_rate + base) * bytes`` by least squares, and the mean decay of each class.

    Parameters
    ----------
    preemptions : iterable of Preemption
    origin : str
        Where they come from, for the model.

    Raises
    ------
    ArgumentError
        The measurements have no cost and no decay.
    """
    measured = list(preemptions)
    costs = [(p.nbytes, p.miss_rate, p.cycles) for p in measured if None not in (p.nbytes, p.miss_rate, p.cycles)]
    decays = [(p.kind, p.decay) for p in measured if p.kind is not None and p.decay is not None]
    if not costs and not decays:
        raise errors.ArgumentError(
            "no preemption with its cost (bytes, miss_rate, and cycles or seconds) or decay (kind and decay) was "
            "measured: give a CSV with these columns, or a log of a run that preempted"
        )
    notes: list[str] = []
    slope, base, r2 = SOURCE.slope, SOURCE.base, None
    found: dict[str, float] = {}
    if len(costs) >= 2:
        slope, base, r2, found = _fit_costs(np.array(costs, float), notes)
    elif costs:
        notes.append("a single cost gives no slope: the source's slope is kept")
    means, r2_decay = _fit_decays(decays, notes)
    model = SourceModel(slope, base, means[Kind.MEMORY], means[Kind.COMPUTE], r2, origin)
    return Fit(model, len(costs), len(decays), r2_decay=r2_decay, notes=notes, **found)


def _fit_costs(costs: np.ndarray[Any, Any], notes: list[str]) -> tuple[float, float, float | None, dict[str, float]]:
    nbytes, miss, cycles = costs.T
    design = np.stack([miss * nbytes, nbytes], axis=1)
    (slope, base), _ = _nonnegative(design, cycles)
    if np.ptp(miss) < 1e-3:
        # one miss rate alone gives the sum of both parts
        total = float((nbytes @ cycles) / (nbytes @ nbytes))
        share = SOURCE.slope * miss[0] / (SOURCE.slope * miss[0] + SOURCE.base)
        slope = total * share / miss[0] if miss[0] > 0 else SOURCE.slope
        base = total * (1 - share)
        notes.append("all had one miss rate: slope and base are in the source's ratio")
    r2 = _r2(cycles, design @ np.array([slope, base]))
    found = {}
    source = _r2(cycles, design @ np.array([SOURCE.slope, SOURCE.base]))
    weights, predicted = _nonnegative(np.column_stack([design, np.ones(len(cycles))]), cycles)
    better = _r2(cycles, predicted)
    if r2 is None:
        notes.append("all took the same time: no coefficient of determination")
    if source is not None:
        found["r2_source"] = source
    if better is not None:
        found |= {"fixed_cycles": float(weights[2]), "r2_fixed": better}
    return float(slope), float(base), r2, found


def _nonnegative(design: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Least squares with weights of 0 or more: the subset of columns that fits best."""
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    best: tuple[float, Any] = (math.inf, np.zeros(design.shape[1]))
    for subset in range(1, 1 << design.shape[1]):
        columns = [k for k in range(design.shape[1]) if subset >> k & 1]
        solved = np.linalg.lstsq(design[:, columns] / scale[columns], y, rcond=None)[0] / scale[columns]
        if (solved < 0).any():
            continue
        error = float(((design[:, columns] @ solved - y) ** 2).sum())
        if error < best[0] * (1 - 1e-12):
            weights = np.zeros(design.shape[1])
            weights[columns] = solved
            best = error, weights
    return best[1], design @ best[1]


def _r2(y: np.ndarray[Any, Any], predicted: np.ndarray[Any, Any]) -> float | None:
    total = float(((y - y.mean()) ** 2).sum())
    return None if total <= 0 else 1.0 - float(((y - predicted) ** 2).sum()) / total


def _fit_decays(decays: Sequence[tuple[Kind, float]], notes: list[str]) -> tuple[dict[Kind, float], float | None]:
    means = {Kind.MEMORY: SOURCE.memory_decay, Kind.COMPUTE: SOURCE.compute_decay}
    residual = 0.0
    for kind in means:
        values = [value for of, value in decays if of is kind]
        if not values:
            notes.append(f"no decay of a {kind.value}-intensive kernel was measured: {means[kind]:g} is the source's")
            continue
        means[kind] = min(1.0, max(0.0, float(np.mean(values))))
        residual += float(((np.array(values) - np.mean(values)) ** 2).sum())
    everything = np.array([value for _, value in decays])
    total = float(((everything - everything.mean()) ** 2).sum()) if decays else 0.0
    return means, 1.0 - residual / total if total > 0 else None


NUMBERS = ("bytes", "registers", "shared", "blocks", "miss_rate", "cycles", "seconds", "decay")
"""Columns of measured preemptions with numbers."""


def read_csv(path: str | os.PathLike[str], clock: float) -> list[Preemption]:
    """Read measured preemptions from a CSV with a header.

    Columns (others are ignored, cells may be empty): ``bytes``, or ``registers``, ``shared`` and ``blocks`` (bytes a
    block, and blocks); ``miss_rate``; ``cycles``, or ``seconds``; ``kind`` (memory or compute) and ``decay``.

    Parameters
    ----------
    path : str or os.PathLike
    clock : float
        Cycles a second, for ``seconds``.
    """
    names = rows.header_of(path)
    if not ({"cycles", "seconds"} & {*names} and "miss_rate" in names) and not {"kind", "decay"} <= {*names}:
        raise errors.FormatError(
            f"{path} has columns {', '.join(sorted(names)) or 'none'}: it needs miss_rate, bytes and cycles (or "
            "seconds), or kind and decay",
            path=path,
        )
    found = []
    with rows.opened(path) as text:
        for row in rows.read(text, path, (), ignored=names):
            limits = {"miss_rate": 1.0, "decay": 1.0}
            value = {n: row.number(n, maximum=limits.get(n, math.inf)) for n in NUMBERS if row.has(n)}
            if {"registers", "blocks"} <= value.keys():
                value.setdefault("bytes", (value["registers"] + value.get("shared", 0.0)) * value["blocks"])
            if "seconds" in value:
                value.setdefault("cycles", value["seconds"] * clock)
            kind = row.get("kind", "").strip().lower()
            if kind not in ("", *(k.value for k in Kind)):
                raise row.error("kind", "memory or compute")
            cost = (value.get("bytes"), value.get("miss_rate"), value.get("cycles"))
            found.append(Preemption(*cost, Kind(kind) if kind else None, value.get("decay")))
    return found


def read_log(path: str | os.PathLike[str], clock: float) -> list[Preemption]:
    """Read the costs of preemptions from a log: the time from each "preempt" to its "stop".

    The event has the bytes that a multiprocessor had to save, and the miss rate of the co-runners (``saved`` in its
    `why`).

    Parameters
    ----------
    path : str or os.PathLike
        A file of `Log.write`.
    clock : float
        Cycles a second.
    """
    pending: dict[int, tuple[float, Mapping[str, float]]] = {}
    found = []
    for event in Log.load(path):
        if event.kind == "preempt":
            pending[event.task] = event.time, event.why.get("saved", {})
        elif event.kind in ("stop", "end", "fail", "cancel", "lost"):
            preempted = pending.pop(event.task, None)
            if event.kind == "stop" and preempted is not None:
                start, saved = preempted
                cycles = (event.time - start) * clock
                found.append(Preemption(saved.get("bytes"), saved.get("miss_rate"), cycles))
    return found
