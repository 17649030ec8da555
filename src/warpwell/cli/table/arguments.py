"""The arguments of ``warpwell table``."""

from __future__ import annotations

import argparse

from ..arguments import Commands, command, json_option


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``table`` and its commands."""
    table = commands.add_parser("table", help="convert, show, query and check tables")
    verbs = table.add_subparsers(metavar="COMMAND", required=True)

    convert = command(verbs, "convert", "table.convert", "write a table's folder, in bounded memory")
    convert.add_argument(
        "source",
        metavar="SRC",
        nargs="+",
        help="Parquet, Feather, CSV, TSV, ORC or JSON files, a folder of such, an Arrow stream, or a table",
    )
    convert.add_argument("table", metavar="TABLE", help="folder of the table, usually NAME.ww")
    convert.add_argument("--columns", metavar="A,B", help="columns to take (default: all)")
    convert.add_argument(
        "--codes", metavar="A,B", default="", help="columns whose values become codes of 1 or 2 bytes, or auto"
    )
    there = convert.add_mutually_exclusive_group()
    there.add_argument("--append", action="store_true", help="add to an existing table")
    there.add_argument("--overwrite", action="store_true", help="replace an existing table")
    json_option(convert)

    head = command(verbs, "head", "table.head", "show the first rows, and what each column is")
    _table(head)
    head.add_argument("--rows", type=int, default=5, metavar="N", help="default 5")
    head.add_argument("--columns", metavar="A,B", help="columns to show (default: all)")
    json_option(head)

    query = command(verbs, "query", "table.query", "show or write the rows that match")
    _table(query)
    query.add_argument(
        "--where",
        nargs=3,
        action="append",
        metavar=("COLUMN", "OP", "VALUE"),
        help="a comparison: = != < > <= >= in, not in; several have to match all. Lists: A,B or JSON",
    )
    query.add_argument(
        "--filters",
        metavar="JSON",
        help="""lists as of pyarrow: '[["a", ">", 3], ["b", "in", [1, 2]]]', or a list of such lists""",
    )
    query.add_argument("--columns", metavar="A,B", help="columns to show or write (default: all)")
    query.add_argument("--limit", type=int, metavar="N", help="first rows that match (default 20; of a file, all)")
    query.add_argument("--out", metavar="FILE", help="write them: .csv, .arrow, .feather or .parquet")
    query.add_argument("--explain", action="store_true", help="print which bytes are read of each column, and no rows")
    query.add_argument("--device", choices=("cpu", "cuda", "interp"), help="default: cuda if there is a GPU")
    json_option(query)

    check = command(verbs, "check", "table.check", "read and check all data (exit code 1: some is damaged)")
    _table(check)
    json_option(check)


def _table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", help="folder of a table, or an Arrow file")


def names(text: str | None) -> list[str] | None:
    """Return the names in an option, or None."""
    return None if text is None else [name for name in text.split(",") if name]
