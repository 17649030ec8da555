"""Compare tables with pyarrow's own reading of every Parquet, Arrow, ORC and CSV file of a folder.

Made for checkouts of apache/parquet-testing and apache/arrow-testing::

    python -m lab campaign table_corpus FOLDER

Each file is converted, and an Arrow file is opened as well. Exit code 1: a value is wrong, an error of another library
reached the caller, a failed conversion left files, or a process crashed.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.orc
import pyarrow.parquet

import warpwell as ww

SUFFIXES = (".parquet", ".arrow", ".arrow_file", ".stream", ".feather", ".orc", ".csv")
FAILURES = ("wrong", "bare error", "leftover", "crash", "refused, and pyarrow reads it")


def is_data(path: Path) -> bool:
    """Return True if a file is a data file, by its name or its first bytes."""
    with open(path, "rb") as file:
        return path.suffix in SUFFIXES or file.read(8).startswith((b"PAR1", b"PARE", b"ARROW1", b"\xff\xff\xff\xff"))


def reference(path: Path) -> Any:
    """Return the rows of a file as pyarrow reads them."""
    magic = path.read_bytes()[:8]
    if magic.startswith((b"PAR1", b"PARE")) or path.suffix == ".parquet":
        return pyarrow.parquet.ParquetFile(path).read()
    if path.suffix in (".orc", ".csv"):
        return (pyarrow.orc.read_table if path.suffix == ".orc" else pyarrow.csv.read_csv)(path)
    with pa.OSFile(str(path)) as file:
        table = (pa.ipc.open_file if magic.startswith(b"ARROW1") else pa.ipc.open_stream)(file).read_all()
    table.validate(full=True)
    numbers = [number for number in range(len(table.schema)) if has_type(table.schema, number)]
    return table.select(numbers)


def has_type(schema: Any, number: int) -> bool:
    """Return whether pyarrow has the arrays of a type: it has no arrays of two types of intervals."""
    return re.search(r"\b(month|day_time)_interval", str(schema.field(number).type)) is None


def values(column: Any) -> list[Any]:
    """Return the values of a column in Python; of dates and times as integers, NaN as text."""
    if pa.types.is_dictionary(column.type):
        column = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], column.type.value_type)
    if pa.types.is_temporal(column.type) and not pa.types.is_interval(column.type):
        column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
    try:
        return list(map(str, column.to_pylist()))
    except (ValueError, OverflowError):  # two fields of a struct have one name, or years above 9999
        return [str(column.combine_chunks())]


def difference(table: Any, expected: Any) -> str:
    """Return the first difference of a table from pyarrow's, or an empty string. A column may be left out."""
    if table.rows != len(expected):
        return f"{table.rows} rows, not {len(expected)}"
    for number, name in enumerate(expected.column_names):
        if name not in table.names:
            continue
        position = number if len(table.names) == len(expected.column_names) else table.names.index(name)
        found = pa.chunked_array([table[position].arrow()]) if table.rows else expected.column(number)
        if pa.types.is_uint64(found.type) and pa.types.is_floating(expected.column(number).type):
            found = found.cast(pa.float64(), safe=False)  # CSV: pyarrow has rounded them
        if values(found) != values(expected.column(number)):
            return f"column {name!r}: {found.type}, and pyarrow says {expected.column(number).type}"
    return ""


def compare(path: Path) -> list[tuple[str, str]]:
    """Return the outcome of each reader of a file, and an explanation."""
    expected, found = None, []
    try:
        expected = reference(path)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".replace("\n", " ")[:100]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "table.ww"
        readers = {"convert": lambda: ww.table.convert(path, target)}
        if path.read_bytes()[:6] in (b"ARROW1", b"\xff\xff\xff\xff"[:6]) or path.suffix in (".arrow_file", ".stream"):
            readers["open"] = lambda: ww.table.open(path)
        for reader, make in readers.items():
            try:
                with make() as table:
                    text = difference(table, expected) if expected is not None else ""
                    outcome = "wrong" if text else "equal" if expected is not None else "read, and pyarrow does not"
            except ww.errors.WarpwellError as error:
                text = str(error).replace("\n", " ")[:200]
                outcome = "refused" if expected is None else "refused, and pyarrow reads it"
                if reader == "open" and "cannot be read in place" in text:
                    outcome = "refused: compressed or big-endian"
                if reader == "convert" and list(Path(folder).iterdir()):
                    outcome = "leftover"
            except Exception as error:
                outcome, text = "bare error", f"{type(error).__name__}: {error}"
            found.append((f"{reader}: {outcome}", text if expected is not None else f"{text} ({problem})"))
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the counts of each outcome and the failures; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign table_corpus", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    counts: collections.Counter[str] = collections.Counter()
    executor = None
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and is_data(path)):
        executor = executor or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            outcomes = executor.submit(compare, path).result(600)
        except (BrokenProcessPool, TimeoutError) as error:
            outcomes, executor = [("convert: crash", repr(error))], None
        for outcome, text in outcomes:
            counts[outcome] += 1
            if any(outcome.endswith(failure) for failure in FAILURES):
                print(f"{path.relative_to(folder)}: {outcome}: {text}", flush=True)
    for outcome, count in sorted(counts.items()):
        print(f"{count:6}  {outcome}")
    return int(any(outcome.endswith(failure) for outcome in counts for failure in FAILURES[:4]))
