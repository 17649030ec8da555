"""``warpwell table``: converts, shows, queries and checks tables."""

from __future__ import annotations

import argparse
import datetime
import decimal
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._check import checked_integer
from ..errors import ArgumentError
from ._common import (
    DAMAGED,
    Commands,
    Output,
    Parser,
    Run,
    add_command,
    add_group,
    device_option,
    json_option,
    new_file,
    output_of,
    print_problems,
    problem_values,
    split_names,
)

if TYPE_CHECKING:
    from ..table import ColumnBatch, Selection, Table

_SHOWN_ROWS = 20
"""Default number of rows of ``query``."""

_CELL_WIDTH = 40
_SUFFIXES = (".csv", ".arrow", ".feather", ".parquet")


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``table`` and its commands."""
    verbs = add_group(commands, "table", "convert, show, query and check tables")

    parser = add_command(verbs, "convert", convert, "convert files to a table, in bounded memory")
    text = "Parquet, Feather, CSV, TSV, ORC or JSON files, a folder of such files, an Arrow stream, or a table"
    parser.add_argument("source", metavar="SRC", nargs="+", help=text)
    parser.add_argument("table", metavar="TABLE", help="the table: a folder NAME.ww, or a file NAME.arrow")
    parser.add_argument("--columns", metavar="A,B", help="columns to convert (default: all)")
    parser.add_argument("--codes", metavar="A,B", default="", help="columns to store as dictionaries")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--append", action="store_true", help="add to an existing table")
    existing.add_argument("--overwrite", action="store_true", help="replace an existing table")
    json_option(parser)

    parser = _table_command(verbs, "head", head, "show the first rows and the type of each column")
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="number of rows (default: 5)")
    parser.add_argument("--columns", metavar="A,B", help="columns to show (default: all)")

    parser = _table_command(verbs, "query", query, "show or write the rows that match filters")
    parser.add_literal_option(
        "--where",
        3,
        action="append",
        metavar=("COLUMN", "OP", "VALUE"),
        help="a comparison: = != < > <= >=, in or 'not in' with a list (A,B or JSON), is or 'is not' with null; rows "
        "must match all comparisons",
    )
    text = """filters as in pyarrow: '[["a", ">", 3], ["b", "in", [1, 2]]]', or a list of such lists"""
    parser.add_argument("--filters", metavar="JSON", help=text)
    parser.add_argument("--columns", metavar="A,B", help="columns to show or write (default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N rows (default: 20, or all with --out)")
    parser.add_argument("--out", metavar="FILE", help="write the rows to a .csv, .arrow, .feather or .parquet file")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --out if it exists")
    parser.add_argument("--explain", action="store_true", help="print the bytes read of each column instead of rows")
    device_option(parser)

    text = "write the zone maps and checksums of an Arrow file to FILE.zones, so that queries skip rows"
    _table_command(verbs, "index", index, text)

    _table_command(verbs, "check", check, "read and check all data (exit code 1: some data is damaged)")


def _table_command(verbs: Commands[argparse.ArgumentParser], name: str, run: Run, text: str) -> Parser:
    parser = add_command(verbs, name, run, text)
    parser.add_argument("table", metavar="TABLE", help="folder of a table, or an Arrow file")
    json_option(parser)
    return parser


# -- convert, head, check ----------------------------------------------------------------------------------------------


def convert(arguments: argparse.Namespace) -> int:
    """Convert files to a table, or add them to a table."""
    import time

    from .. import table

    output = output_of(arguments)
    started = time.perf_counter()
    sources, codes = arguments.source, split_names(arguments.codes) or []
    if arguments.append and (arguments.columns or codes):
        raise ArgumentError("--append keeps the columns and codes of the table; omit --columns and --codes")
    added = None
    with output.progress() as report:
        if arguments.append:
            added = table.append(arguments.table, sources, progress=report)
        else:
            table.convert(
                sources,
                arguments.table,
                columns=split_names(arguments.columns),
                codes=codes,
                overwrite=arguments.overwrite,
                progress=report,
            ).close()
    path = Path(arguments.table)
    files = path.iterdir() if path.is_dir() else [path, path.with_name(f"{path.name}.zones")]
    with table.open(path) as opened:
        values = {
            "table": str(path),
            "rows": opened.rows,
            "rows_added": opened.rows if added is None else added,
            "columns": len(opened.names),
            "bytes_on_disk": sum(file.stat().st_size for file in files),
            "seconds": time.perf_counter() - started,
        }
    output.result(str(arguments.table), values)
    return 0


def index(arguments: argparse.Namespace) -> int:
    """Write the zone maps and checksums of an Arrow file."""
    from .. import table

    table.index(arguments.table)
    output_of(arguments).result("index written", {"table": arguments.table, "file": f"{arguments.table}.zones"})
    return 0


def head(arguments: argparse.Namespace) -> int:
    """Print the first rows, a line for each column."""
    from .. import table

    output = output_of(arguments)
    rows = checked_integer(arguments.rows, "--rows", minimum=0)
    with table.open(arguments.table) as opened:
        names: Any = split_names(arguments.columns) or range(len(opened.names))
        columns, rows = [opened[name] for name in names], min(rows, opened.rows)
        found: list[dict[str, Any]] = [
            {
                "name": column.name,
                "type": str(column.type),
                "nulls": column.nulls,
                "runs": len(column.runs),
                "values": _to_list(column.arrow(0, rows)),
            }
            for column in columns
        ]
        title = f"{arguments.table}: {opened.rows:,} rows, {len(opened.names):,} columns"
        as_json = [{**each, "values": list(map(_json_value, each["values"]))} for each in found]
        if output.print_json({"table": str(arguments.table), "rows": opened.rows, "columns": as_json}):
            return 0
    cells = [[each["name"], each["type"], f"{each['nulls']:,}", *map(_cell, each["values"])] for each in found]
    heads = ["column", "type", "nulls", *(f"row {k}" for k in range(rows))]
    output.table(title, heads, cells, left=("type",))
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Read and check all data; return 1 if any of it is damaged."""
    import time

    from .. import table

    output = output_of(arguments)
    started = time.perf_counter()
    with output.progress() as report:
        found = table.check(arguments.table, progress=report)
    values = {
        "table": str(arguments.table),
        "sound": found.sound,
        "rows": found.rows,
        "bytes_read": found.nbytes,
        "seconds": time.perf_counter() - started,
    }
    if not output.print_json({**values, "problems": list(map(problem_values, found.problems))}):
        output.result(str(arguments.table), values)
        print_problems(output, found.problems)
    return 0 if found.sound else DAMAGED


# -- query -------------------------------------------------------------------------------------------------------------


def query(arguments: argparse.Namespace) -> int:
    """Print the rows that match, or write them to a file."""
    from .. import table

    output = output_of(arguments)
    out = None if arguments.out is None else new_file(arguments.out, "--out", _SUFFIXES)
    if out is not None and out.exists() and not arguments.overwrite:
        raise ArgumentError(f"--out {out} exists; choose another name, or replace it with --overwrite")
    limit = None if arguments.limit is None else checked_integer(arguments.limit, "--limit", minimum=0)
    with table.open(arguments.table, device=arguments.device) as opened:
        rows = opened.where(_filters(opened, arguments))
        count = len(rows)
        if limit is None and out is None:
            limit = _SHOWN_ROWS
        selected = rows if limit is None else rows.head(limit)
        columns = split_names(arguments.columns) or opened.names
        values = {"table": str(arguments.table), "matches": count}
        if arguments.explain:
            _explain(output, values, rows, selected, columns)
            return 0
        taken = selected.take(columns)
        if out is not None:
            _write_rows(taken.arrow(), out)
            output.result("rows written", {**values, "rows": len(taken), "file": str(out)})
        else:
            _show(output, values, selected, taken)
    return 0


def _show(output: Output, values: dict[str, Any], rows: Selection, taken: ColumnBatch) -> None:
    numbers = rows.numpy().tolist()
    columns = {name: _to_list(taken[name]) for name in taken.names}
    as_json = {name: list(map(_json_value, column)) for name, column in columns.items()}
    if output.print_json({**values, "rows": numbers, "columns": as_json}):
        return
    cells = [[f"{number:,}", *map(_cell, row)] for number, *row in zip(numbers, *columns.values(), strict=True)]
    output.table(f"{values['matches']:,} rows match", ["row", *taken.names], cells)
    if more := values["matches"] - len(numbers):
        output.notes.print(f"{more:,} more: --limit N shows them, --out FILE writes all")


def _explain(
    output: Output, values: dict[str, Any], rows: Selection, selected: Selection, names: Sequence[str]
) -> None:
    """Print the bytes that filters have read, and the bytes that columns of the selected rows would read."""
    filters, columns = rows.explain(), selected.explain(names)
    if output.print_json({**values, "filters": list(map(vars, filters)), "columns": list(map(vars, columns))}):
        return
    heads = ["column", "for", "wanted", "read", "commands", "from storage"]
    cells = [
        [each.column, use, f"{each.wanted:,}", f"{each.read:,}", f"{each.commands:,}", f"{each.from_storage:,}"]
        for use, reads in (("filter", filters), ("rows", columns))
        for each in reads
    ]
    output.table(f"{values['matches']:,} rows match; bytes", heads, cells, left=("for",))


def _write_rows(rows: Any, path: Path) -> None:
    """Write rows to a file, completely or not at all."""
    import pyarrow as pa  # an extra

    from ..replacing import replacing, storage_full

    try:
        with storage_full(path), replacing(path) as part:
            if path.suffix == ".parquet":
                import pyarrow.parquet as parquet

                parquet.write_table(rows, part)
            elif path.suffix == ".csv":
                import pyarrow.csv as csv

                csv.write_csv(rows, part)
            else:
                with pa.ipc.new_file(part, rows.schema) as writer:
                    writer.write_table(rows.unify_dictionaries())
    except pa.ArrowException as error:
        raise ArgumentError(
            f"--out {path}: {path.suffix} files cannot store these values ({error}); choose columns with --columns, "
            "or write .arrow"
        ) from None


def _to_list(array: Any) -> list[Any]:
    """Return the values of an Arrow array; dates and times outside of Python's range as text."""
    try:
        return list(array.to_pylist())
    except (ArithmeticError, ValueError):  # years above 9999
        import pyarrow as pa  # an extra

        kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
        if pa.types.is_nested(kind):
            return ["(not shown)"] * len(array)
        return list(array.cast(kind).cast(pa.string()).to_pylist())


def _json_value(value: Any) -> Any:
    """Return a value as JSON can represent it: anything but numbers, text and lists as text."""
    if isinstance(value, list):
        return list(map(_json_value, value))
    if isinstance(value, dict):
        return {str(key): _json_value(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _cell(value: Any) -> str:
    text = "null" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= _CELL_WIDTH else text[: _CELL_WIDTH - 3] + "..."


def _filters(opened: Table, arguments: argparse.Namespace) -> list[Any]:
    """Return filters for `Table.where`, with values of the types of the columns."""
    import json

    if (arguments.where is None) == (arguments.filters is None):
        raise ArgumentError("give --where COLUMN OP VALUE, once or several times, or --filters JSON")
    if arguments.where is not None:
        return [_clause(opened, *clause) for clause in arguments.where]
    try:
        parsed = json.loads(arguments.filters, parse_float=decimal.Decimal)
    except ValueError as error:
        raise ArgumentError(f'--filters is not JSON ({error}); give \'[["a", ">", 3]]\'') from None

    def typed(part: Any) -> Any:
        if isinstance(part, list) and len(part) == 3 and isinstance(part[0], str) and isinstance(part[1], str):
            return _clause(opened, *part)
        return list(map(typed, part)) if isinstance(part, list) else part

    filters: list[Any] = typed(parsed)
    return filters


def _clause(opened: Table, name: str, op: str, value: Any) -> tuple[Any, ...]:
    """Return a clause of filters with values of the column's type; ``is`` and ``is not`` take null only."""
    import json

    if op.lower() in ("is", "is not") and (value is None or str(value).lower() == "null"):
        return name, f"{op} null"
    kind = opened[name].type
    if op not in ("in", "not in"):
        return name, op, _typed(kind, name, value)
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=decimal.Decimal) if value.startswith("[") else value.split(",")
        except ValueError as error:
            raise ArgumentError(f'{value!r} is not a JSON list ({error}): write A,B or \'["A", "B"]\'') from None
    return name, op, [_typed(kind, name, each) for each in value] if isinstance(value, list) else value


_PARSERS: dict[str, Callable[[str], Any]] = {
    "is_boolean": lambda text: {"true": True, "false": False}.get(text.lower(), text),
    "is_integer": int,
    "is_decimal": decimal.Decimal,
    "is_date": datetime.date.fromisoformat,
    "is_timestamp": datetime.datetime.fromisoformat,
    "is_time": datetime.time.fromisoformat,
    "is_duration": lambda text: datetime.timedelta(seconds=float(text)),
    "is_binary": bytes.fromhex,
    "is_large_binary": bytes.fromhex,
    "is_fixed_size_binary": bytes.fromhex,
}
"""Functions from text to values, by the test of `pyarrow.types` for the type."""


def _typed(kind: Any, name: str, value: Any) -> Any:
    """Convert a value of JSON, or text, to a type; `Table.where` rejects a value that does not fit."""
    import numpy as np
    import pyarrow.types as types  # an extra

    kind = kind.value_type if types.is_dictionary(kind) else kind
    try:
        if types.is_floating(kind) and isinstance(value, str | int | decimal.Decimal) and not isinstance(value, bool):
            return np.dtype(f"f{kind.bit_width // 8}").type(float(value))
        parse = next((parse for test, parse in _PARSERS.items() if getattr(types, test)(kind)), str)
        return parse(value) if isinstance(value, str) else value
    except (ValueError, ArithmeticError) as error:
        raise ArgumentError(f"cannot convert {value!r} to {kind}, the type of column {name!r} ({error})") from None
