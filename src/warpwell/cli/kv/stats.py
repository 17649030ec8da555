"""``warpwell kv stats``."""

from __future__ import annotations

import argparse
import dataclasses

from ... import kv
from ..output import Output

_SINCE_OPENED = {"gets", "hits", "read_bytes", "read_errors", "puts", "deletes", "commits", "python_served"}


def run(arguments: argparse.Namespace) -> int:
    """Show what a store holds."""
    output = Output(arguments.json)
    with kv.open(arguments.store) as store:
        figures = {k: v for k, v in dataclasses.asdict(store.stats).items() if k not in _SINCE_OPENED}
        schema = store.schema
    fields = None if schema is None else {f.name: [f.dtype.name, list(f.shape)] for f in schema.fields}
    if not arguments.json:
        described = ", ".join(f"{name}: {dtype} {tuple(shape)}" for name, (dtype, shape) in (fields or {}).items())
        output.result(str(arguments.store), {**figures, "schema": described or "none: values are bytes"})
        return 0
    output.result("", {"command": "stats", "store": str(arguments.store), **figures, "schema": fields})
    return 0
