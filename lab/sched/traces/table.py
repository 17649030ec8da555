"""Table: Warpwell's own trace, a CSV file with a line for each kernel. `read` and `write` are inverse to each other."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from warpwell import errors
from warpwell.scheduler import Capacity, Kind, Profile

from . import rows
from .trace import Arrival, Trace, TracedApplication, TracedKernel

REQUIRED = ("request", "arrival", "kernel", "seconds")
COUNTS = ("registers", "shared", "threads", "resident")
RATIOS = ("miss_rate", "bandwidth", "compute", "need")
OPTIONAL = (
    *("application", "tenant", "priority", "deadline", "blocks", "memory", "kind", "instructions"),
    *(*COUNTS, *RATIOS, "idempotent"),
)
COLUMNS = REQUIRED + OPTIONAL
"""``request`` is any text; lines with the same one are a chain, in the order of the file. Its first line has the
``arrival`` (seconds), application, tenant and priority. The others are those of `Task` and `Profile`; an empty value is
their default."""


def read(path: str | os.PathLike[str], capacity: Capacity | None = None) -> Trace:
    """Read a trace.

    Raises
    ------
    MissingFileError
    FormatError
        An unknown column, or an invalid value (negative time or size, ratio over 1), with its line and column.
    """
    chains: dict[str, list[TracedKernel]] = {}
    heads: dict[str, tuple[float, str, str, int]] = {}
    with rows.opened(path) as text:
        for row in rows.read(text, path, REQUIRED, OPTIONAL):
            request, head = row["request"].strip(), _head(row)
            heads.setdefault(request, head)
            chains.setdefault(request, []).append(_kernel(row))
    if not chains:
        raise errors.FormatError(f"{path} has no kernels: give a trace with rows", path=path)
    shared: dict[str, TracedApplication] = {}
    arrivals = []
    for request, (time, name, tenant, priority) in heads.items():
        application = TracedApplication(name, tuple(chains[request]))
        arrivals.append(Arrival(time, shared.setdefault(repr(application), application), tenant, priority))
    arrivals.sort(key=lambda a: a.time)
    defaults = {field.name: str(field.default) for field in fields(Profile)}
    defaults |= {"kind": "unknown", "blocks": "those that are resident"}
    header = rows.header_of(path)
    imputed = {n: defaults[n] for n in ("kind", "blocks", *COUNTS, "miss_rate", "need") if n not in header}
    return Trace(Path(path).name, arrivals, capacity or Capacity(), imputed)


def write(workload: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace that `read` reads."""
    if not Path(path).parent.is_dir():
        message = f"{Path(path).parent} does not exist: create it, or write elsewhere"
        raise errors.MissingFileError(message, path=Path(path).parent)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for number, arrival in enumerate(workload.arrivals):
            head = {"request": number, "arrival": arrival.time, "application": arrival.application.name}
            head |= {"tenant": arrival.tenant, "priority": arrival.priority}
            for kernel in arrival.application.kernels:
                profile = kernel.profile
                values = {n: getattr(profile, n) for n in ("seconds", "instructions", *COUNTS, *RATIOS)}
                values |= {n: getattr(kernel, n) for n in ("deadline", "blocks", "memory")}
                values |= {"kernel": kernel.name, "kind": profile.kind and profile.kind.value}
                writer.writerow({**head, **values, "idempotent": int(kernel.idempotent)})


def _head(row: rows.Row) -> tuple[float, str, str, int]:
    """Return arrival, application, tenant and priority."""
    priority = row.integer("priority", minimum=-(2**63)) if row.has("priority") else 0
    return row.number("arrival"), row.get("application") or row["kernel"], row.get("tenant") or "default", priority


def _kernel(row: rows.Row) -> TracedKernel:
    values: dict[str, Any] = {name: row.integer(name) for name in COUNTS if row.has(name)}
    values |= {name: row.number(name, maximum=1.0) for name in RATIOS if row.has(name)}
    values |= {name: row.number(name) for name in ("instructions",) if row.has(name)}
    if row.has("kind"):
        if row["kind"].strip() not in ("memory", "compute"):
            raise row.error("kind", '"memory", "compute" or nothing')
        values["kind"] = Kind(row["kind"].strip())
    profile = Profile(seconds=row.number("seconds"), source="trace", **values)
    return TracedKernel(
        row["kernel"],
        profile,
        blocks=row.integer("blocks", minimum=1) if row.has("blocks") else profile.resident or 1,
        memory=row.integer("memory") if row.has("memory") else 0,
        deadline=row.number("deadline", minimum=math.ulp(0.0)) if row.has("deadline") else None,
        idempotent=bool(row.has("idempotent") and row.integer("idempotent")),
    )
