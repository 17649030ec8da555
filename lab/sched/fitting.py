"""Fits the source's cost and decay constants to measurements of preemptions, and measures how well they fit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from warpwell import errors
from warpwell.json_file import read_json
from warpwell.scheduler.decision import SOURCE
from warpwell.scheduler.extend import Kind, SourceModel

from .traces import rows


@dataclass(frozen=True)
class Preemption:
    """One measured preemption; fields that were not measured are None.

    Attributes
    ----------
    nbytes : float or None
        Registers and shared memory of the preempted blocks of one multiprocessor, in bytes.
    miss_rate : float or None
        Second-level cache misses of the co-runner, 0 to 1.
    cycles : float or None
        Duration.
    kind : Kind or None
        Class of the co-runner.
    decay : float or None
        Rate of the co-runner during the preemption, relative to its rate before, 0 to 1.
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
        Number of measurements of each.
    r2_source : float or None
        Coefficient of determination of the source's own constants on the same costs.
    r2_decay : float or None
        Fraction of the variance of decays that the class explains.
    notes : list of str
        Constants that the measurements do not determine.
    """

    model: SourceModel
    costs: int
    decays: int
    r2_source: float | None = None
    r2_decay: float | None = None
    notes: list[str] = field(default_factory=list)


def fit(preemptions: Iterable[Preemption], origin: str = "measured") -> Fit:
    """Fit ``cycles = (slope * miss_rate + base) * bytes`` by least squares, and the mean decay of each class.

    Parameters
    ----------
    preemptions : iterable of Preemption
    origin : str
        Source of the measurements, for the model.

    Raises
    ------
    ArgumentError
        The measurements have no cost and no decay.
    """
    measured = list(preemptions)
    costs = [(p.nbytes, p.miss_rate, p.cycles) for p in measured if None not in (p.nbytes, p.miss_rate, p.cycles)]
    decays = [(p.kind, p.decay) for p in measured if p.kind is not None and p.decay is not None]
    if not costs and not decays:
        message = "no preemption has a cost (bytes, miss_rate, and cycles or seconds) or a decay (kind and decay)"
        raise errors.ArgumentError(f"{message}: pass a CSV with these columns")
    notes: list[str] = []
    slope, base, r2, r2_source = SOURCE.slope, SOURCE.base, None, None
    if len(costs) >= 2:
        nbytes, miss, cycles = np.array(costs, float).T
        design = np.stack([miss * nbytes, nbytes], axis=1)
        slope, base = _fit_costs(design, cycles, notes)
        r2, r2_source = (_r2(cycles, design @ np.array(pair)) for pair in ((slope, base), (SOURCE.slope, SOURCE.base)))
        if r2 is None:
            notes.append("all took the same time: no coefficient of determination")
    elif costs:
        notes.append("a single cost gives no slope: the source's slope is kept")
    means, r2_decay = _fit_decays(decays, notes)
    model = SourceModel(slope, base, means[Kind.MEMORY], means[Kind.COMPUTE], r2, origin)
    return Fit(model, len(costs), len(decays), r2_source, r2_decay, notes)


def _fit_costs(design: np.ndarray[Any, Any], cycles: np.ndarray[Any, Any], notes: list[str]) -> tuple[float, float]:
    """Return the slope and base that fit best among the values of 0 or more."""
    nbytes, miss = design[:, 1], design[:, 0] / np.maximum(design[:, 1], 1e-300)
    if np.ptp(miss) < 1e-3:  # a single miss rate gives only the sum of both parts
        notes.append("all had one miss rate: slope and base are in the source's ratio")
        total = float((nbytes @ cycles) / (nbytes @ nbytes))
        share = SOURCE.slope * miss[0] / (SOURCE.slope * miss[0] + SOURCE.base)
        return float(total * share / miss[0]) if miss[0] > 0 else SOURCE.slope, float(total * (1 - share))
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    best, lowest = np.zeros(2), math.inf
    for columns in ([0], [1], [0, 1]):
        weights = np.zeros(2)
        weights[columns] = np.linalg.lstsq(design[:, columns] / scale[columns], cycles, rcond=None)[0] / scale[columns]
        error = float(((design @ weights - cycles) ** 2).sum())
        if (weights >= 0).all() and error < lowest * (1 - 1e-12):
            best, lowest = weights, error
    return float(best[0]), float(best[1])


def _r2(y: np.ndarray[Any, Any], predicted: np.ndarray[Any, Any]) -> float | None:
    total = float(((y - y.mean()) ** 2).sum())
    return None if total <= 0 else 1.0 - float(((y - predicted) ** 2).sum()) / total


def _fit_decays(decays: Sequence[tuple[Kind, float]], notes: list[str]) -> tuple[dict[Kind, float], float | None]:
    means = {Kind.MEMORY: SOURCE.memory_decay, Kind.COMPUTE: SOURCE.compute_decay}
    predicted = dict(means)
    for kind in means:
        values = [value for of, value in decays if of is kind]
        if values:
            predicted[kind] = float(np.mean(values))
            means[kind] = min(1.0, max(0.0, predicted[kind]))
        else:
            notes.append(f"no decay of a {kind.value}-intensive kernel was measured: {means[kind]:g} is the source's")
    if not decays:
        return means, None
    return means, _r2(np.array([value for _, value in decays]), np.array([predicted[kind] for kind, _ in decays]))


NUMBERS = {"bytes": math.inf, "miss_rate": 1.0, "cycles": math.inf, "seconds": math.inf, "decay": 1.0}
"""Columns of measured preemptions with numbers, and their maximums."""


def read_csv(path: str | os.PathLike[str], clock: float) -> list[Preemption]:
    """Read measured preemptions from a CSV with a header.

    Columns (others are ignored, cells may be empty): ``bytes``; ``miss_rate``; ``cycles``, or ``seconds``; ``kind``
    (memory or compute) and ``decay``.

    Parameters
    ----------
    path : str or os.PathLike
    clock : float
        Cycles a second, for ``seconds``.
    """
    names = rows.header_of(path)
    if not ({"cycles", "seconds"} & {*names} and "miss_rate" in names) and not {"kind", "decay"} <= {*names}:
        message = f"{path} has columns {', '.join(sorted(names)) or 'none'}: it needs miss_rate, bytes and cycles"
        raise errors.FormatError(f"{message} (or seconds), or kind and decay", path=path)
    found = []
    for row in rows.read_file(path, (), (), names):
        value = {n: row.number(n, maximum=maximum) for n, maximum in NUMBERS.items() if row.has_value(n)}
        if "seconds" in value:
            value.setdefault("cycles", value["seconds"] * clock)
        kind = row.get("kind", "").strip().lower()
        if kind not in ("", *(k.value for k in Kind)):
            raise row.error("kind", "memory or compute")
        cost = (value.get("bytes"), value.get("miss_rate"), value.get("cycles"))
        found.append(Preemption(*cost, Kind(kind) if kind else None, value.get("decay")))
    return found


def write_model(model: SourceModel, path: str | os.PathLike[str]) -> None:
    """Write the constants of the cost formula as JSON."""
    Path(path).write_text(json.dumps(asdict(model), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_model(path: str | os.PathLike[str]) -> SourceModel:
    """Read a file that `write_model` wrote.

    Raises
    ------
    MissingFileError
        The file does not exist.
    FormatError
        The file is not a JSON object with these names and numbers.
    """
    values = read_json(path, "a cost model")
    names = [f.name for f in fields(SourceModel)]
    try:
        if not set(values) <= set(names):
            raise ValueError(f"it must be an object with some of {', '.join(names)}")
        for name in names[:4]:
            if not isinstance(values.get(name, 0.0), int | float):
                raise ValueError(f"{name} is not a number")
        return SourceModel(**values)
    except ValueError as error:
        raise errors.FormatError(f"{path} is not a cost model: {error}", path=path) from error
