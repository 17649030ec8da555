"""Table: Warpwell's own trace, a CSV file with a line a kernel. `read` and `write` are each other's inverse."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from warpwell import errors
from warpwell.scheduler import Capacity, Kind, Profile

from . import rows
from .trace import Arrival, Trace, TracedApplication, TracedKernel

REQUIRED = ("request", "arrival", "kernel", "seconds")
OPTIONAL = (
    "application", "tenant", "priority", "deadline", "blocks", "memory", "kind", "instructions",
    "registers", "shared", "threads", "resident", "miss_rate", "bandwidth", "compute", "need", "idempotent",
)  # fmt: skip
COLUMNS = REQUIRED + OPTIONAL
"""``request`` is any text; lines with the same one are a chain, in the order of the file. Its first line tells the
``arrival`` (seconds), application, tenant and priority. The others are those of `Task` and `Profile`; an empty value is
their default."""

_COUNTS = ("registers", "shared", "threads", "resident")
_RATIOS = ("miss_rate", "bandwidth", "compute", "need")


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
        for row in rows.read(text, path, REQUIRED, OPTIONAL):
            request = row["request"].strip()
            head = _head(row)
            if request not in chains:
                heads[request] = head
                chains[request] = []
            chains[request].append(_kernel(row))
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
                writer.writerow(
                    [
                        number,
                        repr(arrival.time),
                        kernel.name,
                        repr(profile.seconds),
                        arrival.application.name,
                        arrival.tenant,
                        arrival.priority,
                        _text(kernel.deadline),
                        kernel.blocks,
                        kernel.memory,
                        "" if profile.kind is None else profile.kind.value,
                        _text(profile.instructions),
                        profile.registers,
                        profile.shared,
                        profile.threads,
                        profile.resident,
                        *(repr(getattr(profile, name)) for name in _RATIOS),
                        int(kernel.idempotent),
                    ]
                )


def _head(row: rows.Row) -> tuple[float, str, str, int]:
    """Return arrival, application, tenant and priority."""
    arrival = row.number("arrival")
    priority = row.number("priority", least=-math.inf) if row.has("priority") else 0.0
    if priority != int(priority):
        raise row.wrong("priority", "a whole number, larger is sooner")
    return arrival, row.get("application") or row["kernel"], row.get("tenant") or "default", int(priority)


def _kernel(row: rows.Row) -> TracedKernel:
    values: dict[str, Any] = {name: row.whole(name) for name in _COUNTS if row.has(name)}
    values |= {name: row.number(name, most=1.0) for name in _RATIOS if row.has(name)}
    if row.has("kind"):
        if row["kind"].strip() not in ("memory", "compute"):
            raise row.wrong("kind", '"memory", "compute" or nothing')
        values["kind"] = Kind(row["kind"].strip())
    if row.has("instructions"):
        values["instructions"] = row.number("instructions")
    profile = Profile(seconds=row.number("seconds"), source="trace", **values)
    deadline = row.number("deadline") if row.has("deadline") else None
    if deadline == 0:
        raise row.wrong("deadline", "a positive time, or nothing")
    blocks = row.whole("blocks", least=1) if row.has("blocks") else profile.resident or 1
    memory = row.whole("memory") if row.has("memory") else 0
    idempotent = bool(row.has("idempotent") and row.whole("idempotent"))
    return TracedKernel(row["kernel"], profile, blocks, memory, deadline, idempotent=idempotent)


def _identity(kernel: TracedKernel) -> tuple[Any, ...]:
    return (kernel.name, kernel.profile, kernel.blocks, kernel.memory, kernel.deadline, kernel.idempotent)


def _default(name: str) -> str:
    known: Mapping[str, Any] = {f.name: f.default for f in fields(Profile)}
    if name == "blocks":
        return "those that are resident"
    return "unknown" if name == "kind" else str(known[name])


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)
