"""``warpwell table convert``."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from ... import table
from ...errors import ArgumentError
from ...table.convert import AUTO
from ..output import Output
from .arguments import names


def run(arguments: argparse.Namespace) -> int:
    """Write a table's folder, or add to one."""
    output = Output(arguments.json)
    started = time.perf_counter()
    sources = arguments.source
    source = sources[0] if len(sources) == 1 else sources
    codes = AUTO if arguments.codes == AUTO else names(arguments.codes) or ()
    if arguments.append and (arguments.columns or codes):
        raise ArgumentError("--append takes the columns and codes that the table has: leave --columns and --codes out")
    with output.progress() as report:
        if arguments.append:
            added = table.append(arguments.table, source, progress=report)
        else:
            table.convert(
                source,
                arguments.table,
                columns=names(arguments.columns),
                codes=codes,
                overwrite=arguments.overwrite,
                progress=report,
            ).close()
    seconds = time.perf_counter() - started
    with table.open(arguments.table) as made:
        coded = [name for k, name in enumerate(made.names) if any(run.codes for run in made[k].runs)]
        values = {
            "command": "convert",
            "table": str(arguments.table),
            "source": ", ".join(sources),
            "rows": made.rows,
            "rows_added": added if arguments.append else made.rows,
            "columns": len(made.names),
            "coded": coded if arguments.json else ", ".join(coded) or "none",
            "bytes_on_disk": _size(arguments.table),
            "seconds": seconds,
        }
    output.result(str(arguments.table), values)
    return 0


def _size(folder: str) -> int:
    return sum(os.path.getsize(one) for one in Path(folder).rglob("*") if one.is_file())
