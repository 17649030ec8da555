"""``warpwell table query``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import decimal
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import table
from ..._check import checked_integer
from ...errors import ArgumentError
from ...replacing import replacing, storage_full
from ...table import ColumnReads, Matches, Table, Taken
from ..arguments import new_file
from ..output import Output
from .arguments import names
from .head import cell, listed, plain

_SHOWN = 20
"""Rows that are printed if nobody says how many."""
_ENDINGS = (".csv", ".arrow", ".feather", ".parquet")


def run(arguments: argparse.Namespace) -> int:
    """Print the rows that match, or write them to a file."""
    output = Output(arguments.json)
    out = None if arguments.out is None else new_file(arguments.out, "--out")
    if out is not None and out.suffix not in _ENDINGS:
        raise ArgumentError(f"--out {out}: give a name that ends in one of {', '.join(_ENDINGS)}")
    limit = None if arguments.limit is None else checked_integer(arguments.limit, "--limit", least=0)
    with table.open(arguments.table, device=arguments.device) as opened:
        rows = opened.where(_filters(opened, arguments))
        found = len(rows)
        if limit is None and out is None:
            limit = _SHOWN
        some = rows if limit is None else rows.head(limit)
        wanted = names(arguments.columns)
        columns = opened.names if wanted is None else wanted
        if arguments.explain:
            _explain(output, arguments.table, found, rows.explain(), some.explain(columns))
            return 0
        taken = some.take(columns)
        if out is not None:
            _write(taken.arrow(), out)
            output.result(
                "rows written", {"table": str(arguments.table), "matches": found, "rows": len(taken), "file": str(out)}
            )
        else:
            _show(output, str(arguments.table), some, taken, found)
    return 0


def _show(output: Output, name: str, rows: Matches, taken: Taken, found: int) -> None:
    """Print rows."""
    numbers = rows.numpy().tolist()
    values = {one: listed(taken[one]) for one in taken.names}
    if output.as_json:
        output.result(
            "",
            {
                "command": "query",
                "table": name,
                "matches": found,
                "rows": numbers,
                "columns": {one: [plain(v) for v in column] for one, column in values.items()},
            },
        )
        return
    lines = [[f"{number:,}", *map(cell, line)] for number, *line in zip(numbers, *values.values(), strict=True)]
    output.table(f"{found:,} rows match", ["row", *taken.names], lines)
    if found > len(numbers):
        output.notes.print(f"{found - len(numbers):,} more: --limit N shows them, --out FILE writes all")


def _explain(
    output: Output, name: str, found: int, filters: Sequence[ColumnReads], others: Sequence[ColumnReads]
) -> None:
    """Print what the filters read, and what the columns of the rows would read."""
    if output.as_json:
        output.result(
            "",
            {
                "command": "query",
                "table": name,
                "matches": found,
                "filters": [vars(one) for one in filters],
                "columns": [vars(one) for one in others],
            },
        )
        return
    heads = ["column", "for", "wanted", "read", "commands", "from storage"]
    lines = [
        [one.column, what, f"{one.wanted:,}", f"{one.read:,}", f"{one.commands:,}", f"{one.from_storage:,}"]
        for what, part in (("filter", filters), ("rows", others))
        for one in part
    ]
    output.table(f"{found:,} rows match; bytes", heads, lines, left=("for",))


def _write(rows: Any, path: Path) -> None:
    """Write rows to a file, whole or not at all."""
    import pyarrow as pa  # an extra

    with storage_full(path), replacing(path) as part, _as_argument_errors(path):
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            parquet.write_table(rows, part)
        elif path.suffix == ".csv":
            import pyarrow.csv as csv

            plain_columns = [
                one.cast(one.type.value_type) if pa.types.is_dictionary(one.type) else one for one in rows.columns
            ]
            csv.write_csv(pa.table(plain_columns, names=rows.column_names), part)
        else:
            with pa.ipc.new_file(part, rows.schema) as writer:
                writer.write_table(rows.unify_dictionaries())


@contextlib.contextmanager
def _as_argument_errors(path: Path) -> Iterator[None]:
    """Turn pyarrow's complaints, of values that a format does not have, into ArgumentError."""
    import pyarrow as pa  # an extra

    try:
        yield
    except pa.ArrowException as error:
        raise ArgumentError(
            f"--out {path}: {path.suffix} files do not have such values ({error}): choose columns with "
            "--columns, or write .arrow"
        ) from None


# -- filters ----------------------------------------------------------------------------------------------------


def _filters(opened: Table, arguments: argparse.Namespace) -> list[Any]:
    """Return filters as `Table.where` takes them, their values as the columns' types have them."""
    if (arguments.where is None) == (arguments.filters is None):
        raise ArgumentError("give --where COLUMN OP VALUE, once or several times, or --filters JSON")
    if arguments.where is not None:
        return [(name, op, _value(opened, name, op, text)) for name, op, text in arguments.where]
    try:
        given = json.loads(arguments.filters, parse_float=decimal.Decimal)
    except ValueError as error:
        raise ArgumentError(f'--filters is no JSON ({error}): give \'[["a", ">", 3]]\'') from None

    def typed(part: Any) -> Any:
        if isinstance(part, list) and len(part) == 3 and isinstance(part[0], str) and isinstance(part[1], str):
            return part[0], part[1], _value(opened, *part)
        return [typed(one) for one in part] if isinstance(part, list) else part

    found: list[Any] = typed(given)
    return found


def _value(opened: Table, name: str, op: str, given: Any) -> Any:
    """Return a value, or for in and not in a list of values, of a column's type."""
    kind = opened[name].type
    if op in ("in", "not in"):
        values = given
        if isinstance(given, str):
            values = json.loads(given, parse_float=decimal.Decimal) if given.startswith("[") else given.split(",")
        return [_of_type(kind, name, one) for one in values] if isinstance(values, list) else values
    return _of_type(kind, name, given)


def _of_type(kind: Any, name: str, given: Any) -> Any:
    """Return a value of JSON, or a text, as one of a type; what does not fit is left for `Table.where` to refuse."""
    import pyarrow.types as types  # an extra

    kind = kind.value_type if types.is_dictionary(kind) else kind
    try:
        if types.is_floating(kind) and isinstance(given, str | int | decimal.Decimal) and not isinstance(given, bool):
            return np.dtype(f"f{kind.bit_width // 8}").type(float(given))
        if not isinstance(given, str):
            return given
        if types.is_boolean(kind):
            return {"true": True, "false": False}.get(given.lower(), given)
        if types.is_integer(kind):
            return int(given)
        if types.is_decimal(kind):
            return decimal.Decimal(given)
        if types.is_date(kind):
            return datetime.date.fromisoformat(given)
        if types.is_timestamp(kind):
            return datetime.datetime.fromisoformat(given)
        if types.is_time(kind):
            return datetime.time.fromisoformat(given)
        if types.is_duration(kind):
            return datetime.timedelta(seconds=float(given))
        if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
            return bytes.fromhex(given)
    except (ValueError, ArithmeticError, OverflowError) as error:
        raise ArgumentError(f"column {name!r} is {kind}, and {given!r} is no such value ({error})") from None
    return given
