"""Table: Warpwell's own trace, a CSV file with a line a kernel. `read` and `write` are each other's inverse."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ... import errors
from ...scheduler.executor import Capacity
from ...scheduler.task import Kind, Profile
from . import rows
from .trace import Arrival, Trace, TracedApplication, TracedKernel

REQUIRED = ("request", "arrival", "kernel", "seconds")
OPTIONAL = (
    "application", "tenant", "priority", "deadline", "blocks", "memory", "idempotent", "kind", "instructions",
    "registers", "shared", "threads", "resident", "miss_rate", "bandwidth", "compute", "need",
)  # fmt: skip
COLUMNS = REQUIRED + OPTIONAL
"""``request`` is any text; lines with the same one are a chain, in the order of the file. Its first line tells the
``arrival`` (seconds), application, tenant and priority. The others are those of `Task` and `Profile`; an empty value is
their default."""

_COUNTS = ("registers", "shared", "threads", "resident")
_RATIOS = ("miss_rate", "bandwidth", "compute", "need")
_DEFAULTS = Profile()
_TRUTH = {"": False, "0": False, "no": False, "false": False, "1": True, "yes": True, "true": True}


def read(path: str | os.PathLike[str], capacity: Capacity | None = None) -> Trace:
    """Read a trace.

    Raises
    ------
    MissingFileError
    FormatError
        An unknown column, or a value that cannot be (negative time or size, ratio over 1), with its line and column.
    """
    chains: dict[str, list[TracedKernel]] = {}
    heads: dict[str, tuple[float, str, str, int]] = {}
    with rows.opened(path) as text:
        for line, row in rows.read(text, path, REQUIRED, OPTIONAL):
            request = row["request"].strip()
            head = _head(row, line, path)
            if request not in chains:
                heads[request] = head
                chains[request] = []
            chains[request].append(_kernel(row, line, path))
    if not chains:
        raise errors.FormatError(f"{path} has no kernels: give a trace with rows", path=path)
    shared: dict[tuple[Any, ...], TracedApplication] = {}
    arrivals = []
    for request, (time, name, tenant, priority) in heads.items():
        key = (name, *(_identity(kernel) for kernel in chains[request]))
        application = shared.get(key)
        if application is None:
            application = shared[key] = TracedApplication(name, tuple(chains[request]))
        arrivals.append(Arrival(time, application, tenant, priority))
    arrivals.sort(key=lambda a: a.time)
    header = rows.header_of(path)
    missing = [name for name in ("kind", "blocks", *_COUNTS, "miss_rate", "need") if name not in header]
    imputed = {name: _default(name) for name in missing}
    return Trace(rows.name_of(path), arrivals, capacity or Capacity(), imputed)


def write(workload: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace that `read` reads."""
    place = Path(path)
    if not place.parent.is_dir():
        message = f"{place.parent} does not exist: create it, or write elsewhere"
        raise errors.MissingFileError(message, path=place.parent)
    with open(place, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for number, arrival in enumerate(workload.arrivals):
            for kernel in arrival.application.kernels:
                profile = kernel.profile
                writer.writerow([
                    number, repr(arrival.time), kernel.name, repr(profile.seconds), arrival.application.name,
                    arrival.tenant, arrival.priority, _text(kernel.deadline), kernel.blocks, kernel.memory,
                    int(kernel.idempotent), "" if profile.kind is None else profile.kind.value,
                    _text(profile.instructions), profile.registers, profile.shared, profile.threads, profile.resident,
                    *(repr(getattr(profile, name)) for name in _RATIOS),
                ])  # fmt: skip


def _head(row: rows.Row, line: int, path: str | os.PathLike[str]) -> tuple[float, str, str, int]:
    """Return arrival, application, tenant and priority."""
    arrival = rows.number(row, "arrival", line, path)
    priority = _optional(row, "priority", 0.0, lambda: rows.number(row, "priority", line, path, least=-math.inf))
    if priority != int(priority):
        message = f"{path}, line {line}: priority is {row['priority']!r}; give a whole number, larger is sooner"
        raise errors.FormatError(message, path=path)
    return arrival, row.get("application") or row["kernel"], row.get("tenant") or "default", int(priority)


def _kernel(row: rows.Row, line: int, path: str | os.PathLike[str]) -> TracedKernel:
    def ratio(name: str) -> Callable[[], float]:
        return lambda: rows.number(row, name, line, path, most=1.0)

    def count(name: str, least: int = 0) -> Callable[[], int]:
        return lambda: rows.whole(row, name, line, path, least=least)

    def amount(name: str) -> Callable[[], float]:
        return lambda: rows.number(row, name, line, path)

    values: dict[str, Any] = {name: _optional(row, name, getattr(_DEFAULTS, name), count(name)) for name in _COUNTS}
    values |= {name: _optional(row, name, getattr(_DEFAULTS, name), ratio(name)) for name in _RATIOS}
    kind = row.get("kind", "").strip()
    if kind not in ("", "memory", "compute"):
        message = f'{path}, line {line}: kind is {kind!r}; give "memory", "compute" or nothing'
        raise errors.FormatError(message, path=path)
    profile = Profile(
        kind=Kind(kind) if kind else None,
        seconds=rows.number(row, "seconds", line, path),
        instructions=_optional(row, "instructions", None, amount("instructions")),
        source="trace",
        **values,
    )
    deadline = _optional(row, "deadline", None, amount("deadline"))
    if deadline == 0:
        message = f"{path}, line {line}: deadline is 0 s; give a positive time, or nothing"
        raise errors.FormatError(message, path=path)
    idempotent = row.get("idempotent", "").strip().lower()
    if idempotent not in _TRUTH:
        message = f"{path}, line {line}: idempotent is {idempotent!r}; give 0 or 1"
        raise errors.FormatError(message, path=path)
    blocks = _optional(row, "blocks", profile.resident or 1, count("blocks", 1))
    memory = _optional(row, "memory", 0, count("memory"))
    return TracedKernel(row["kernel"], profile, blocks, memory, _TRUTH[idempotent], deadline)


def _optional(row: rows.Row, name: str, default: Any, value: Callable[[], Any]) -> Any:
    return value() if row.get(name, "").strip() else default


def _identity(kernel: TracedKernel) -> tuple[Any, ...]:
    return (kernel.name, kernel.profile, kernel.blocks, kernel.memory, kernel.idempotent, kernel.deadline)


def _default(name: str) -> str:
    known: Mapping[str, Any] = {f.name: f.default for f in fields(Profile)}
    if name == "blocks":
        return "those that are resident"
    return "unknown" if name == "kind" else str(known[name])


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)
