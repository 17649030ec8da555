"""``warpwell table head``."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ... import table
from ..._check import checked_integer
from ...errors import DTypeError
from ..output import Output
from .arguments import names

_WIDTH = 40


def run(arguments: argparse.Namespace) -> int:
    """Print the first rows, a line for each column."""
    output = Output(arguments.json)
    rows = checked_integer(arguments.rows, "--rows", least=0)
    with table.open(arguments.table) as opened:
        wanted: Any = names(arguments.columns)
        columns = [opened[name] for name in (range(len(opened.names)) if wanted is None else wanted)]
        rows = min(rows, opened.rows)
        shown: list[dict[str, Any]] = []
        for column in columns:
            try:
                values: Any = listed(column.arrow(0, rows))
                about: dict[str, int | None] = {"nulls": column.nulls, "runs": len(column.runs)}
            except DTypeError:
                values, about = None, {"nulls": None, "runs": None}
            shown.append({"name": column.name, "type": str(column.type), **about, "values": values})
        title = f"{arguments.table}: {opened.rows:,} rows, {len(opened.names):,} columns"
        if arguments.json:
            for one in shown:
                one["values"] = None if one["values"] is None else [plain(value) for value in one["values"]]
            output.result("", {"command": "head", "table": str(arguments.table), "rows": opened.rows, "columns": shown})
            return 0
    heads = ["column", "type", "nulls", *(f"row {k}" for k in range(rows))]
    lines = []
    for one in shown:
        cells = ["(nested: not shown)"] * bool(rows) if one["values"] is None else [cell(v) for v in one["values"]]
        nulls = "" if one["nulls"] is None else f"{one['nulls']:,}"
        lines.append([one["name"], one["type"], nulls, *cells])
    output.table(title, heads, lines, left=("type",))
    return 0


def listed(array: Any) -> list[Any]:
    """Return the values of an Arrow array; dates and times that Python does not have as text."""
    try:
        return list(array.to_pylist())
    except (ArithmeticError, ValueError):  # years above 9999
        import pyarrow as pa  # an extra

        kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
        return list(array.cast(kind).cast(pa.string()).to_pylist())


def plain(value: Any) -> Any:
    """Return a value as JSON has it: others than numbers and text as text."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def cell(value: Any) -> str:
    """Return a value as a cell of a table."""
    text = "null" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
