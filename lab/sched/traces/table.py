"""Table: Warpwell's own trace, a CSV file with a line for each kernel. `read` and `write` are inverse to each other."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Kind

from . import rows
from .trace import Arrival, Trace, TracedApplication, TracedKernel


def _kind(row: rows.Row, column: str) -> Kind:
    if row[column].strip() not in ("memory", "compute"):
        raise row.error(column, '"memory", "compute" or nothing')
    return Kind(row[column].strip())


PROFILE: dict[str, Callable[[rows.Row, str], Any]] = {
    "kind": _kind,
    "instructions": rows.Row.number,
    **dict.fromkeys(("registers", "shared", "threads", "resident"), rows.Row.integer),
    **dict.fromkeys(("miss_rate", "bandwidth", "compute", "need"), partial(rows.Row.number, maximum=1.0)),
}
"""Optional columns of a kernel's `Profile`, each with the function that reads a cell."""
KERNEL: dict[str, Callable[[rows.Row, str], Any]] = {
    "blocks": partial(rows.Row.integer, minimum=1),
    "memory": rows.Row.integer,
    "idempotent": lambda row, column: bool(row.integer(column)),
}
"""Optional columns of a kernel, in the same way."""
REQUIRED = ("request", "arrival", "kernel", "seconds")
OPTIONAL = ("application", "tenant", "priority", *PROFILE, *KERNEL)
"""``request`` is any text; lines with the same request are a chain, in the order of the file. The first line of a chain
has the ``arrival`` (seconds), application, tenant and priority. An empty value stands for the default."""


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace.

    Raises
    ------
    MissingFileError
    FormatError
        An unknown column, or an invalid value (negative time or size, ratio over 1), with its line and column.
    """
    chains: dict[str, list[TracedKernel]] = {}
    heads: dict[str, tuple[float, str, str, int]] = {}
    for row in rows.read_file(path, REQUIRED, OPTIONAL):
        request, priority = row["request"].strip(), 0
        if row.has_value("priority"):
            priority = row.integer("priority", minimum=-(2**63))
        names = row.get("application") or row["kernel"], row.get("tenant") or "default"
        heads.setdefault(request, (row.number("arrival"), *names, priority))
        chains.setdefault(request, []).append(_kernel(row))
    if not chains:
        raise errors.FormatError(f"{path} has no kernels: pass a trace with rows", path=path)
    shared: dict[str, TracedApplication] = {}
    arrivals = []
    for request, (time, name, tenant, priority) in heads.items():
        application = TracedApplication(name, tuple(chains[request]))
        arrivals.append(Arrival(time, shared.setdefault(repr(application), application), tenant, priority))
    arrivals.sort(key=lambda a: a.time)
    header = rows.header_of(path)
    imputed = {field.name: str(field.default) for field in fields(Profile) if field.name not in header}
    return Trace(Path(path).name, arrivals, imputed=imputed)


def write(workload: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace that `read` reads."""
    if not Path(path).parent.is_dir():
        message = f"{Path(path).parent} does not exist: create the folder, or pass another path"
        raise errors.MissingFileError(message, path=Path(path).parent)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, REQUIRED + OPTIONAL, lineterminator="\n")
        writer.writeheader()
        for number, (time, application, tenant, priority) in enumerate(workload.arrivals):
            head = {"request": number, "arrival": time, "application": application.name, "tenant": tenant}
            for kernel in application.kernels:
                profile = kernel.profile
                values = {n: getattr(profile, n) for n in ("seconds", *PROFILE)}
                values |= {"kernel": kernel.name, "kind": profile.kind and profile.kind.value, "priority": priority}
                values |= {"blocks": kernel.blocks, "memory": kernel.memory, "idempotent": int(kernel.idempotent)}
                writer.writerow({**head, **values})


def _kernel(row: rows.Row) -> TracedKernel:
    figures = {name: parse(row, name) for name, parse in PROFILE.items() if row.has_value(name)}
    profile = Profile(seconds=row.number("seconds"), source="trace", **figures)
    values = {name: parse(row, name) for name, parse in KERNEL.items() if row.has_value(name)}
    return TracedKernel(row["kernel"], profile, **{"blocks": profile.resident or 1, **values})
