"""BaM's six questions about taxi trips: bytes read over bytes needed, and time on one drive.

Question k is the mean of the first k columns behind `PICKUP` over the trips that begin in one quarter, about 0.05 % of
all. A system that reads whole columns reads k + 1 of them; on demand, all other columns are read only for rows that
match in the first column.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import warpwell as ww
from warpwell import gpu
from warpwell.storage import RamMedium

from . import shapes
from .drives import opened, slowed
from .experiment import Document, Experiment, Outcome, Setting, Unavailable

PICKUP = "PULocationID"
COLUMNS = ("trip_distance", "total_amount", "extra", "improvement_surcharge", "tolls_amount", "mta_tax")
"""The columns that questions 1 to 6 add. The public months have no hail fee, so another surcharge replaces it."""
SHARE = 5e-4
"""Share of trips that begin in the quarter: 0.05 % of the second column are used in the document."""
SLOWER = 512
RUNS = 3
"""Runs of a question. The least time counts, because other programs only add to it."""
SCAN_PAGE, ROW_PAGE = 4096, 512
"""Bytes of a cache line of the scanned column, and of all other columns."""


@dataclass(frozen=True)
class Trips:
    """Columns of trips, the quarter in question, and the origin of the data."""

    columns: dict[str, NDArray[Any]]
    quarter: int
    origin: str

    @property
    def rows(self) -> int:
        """Number of trips."""
        return len(self.columns[PICKUP])

    def answers(self) -> list[float]:
        """Return the means that answer the questions."""
        chosen = self.columns[PICKUP] == self.quarter
        return [float(self.columns[name][chosen].mean()) for name in COLUMNS]

    def needed(self, question: int) -> int:
        """Return the bytes that a question needs: a column, and the matching items of others."""
        matching = int((self.columns[PICKUP] == self.quarter).sum())
        return 8 * self.rows + 8 * question * matching

    def whole_columns(self, question: int) -> int:
        """Return the bytes of all columns of a question."""
        return 8 * self.rows * (question + 1)


def trips(rows: int) -> Trips:
    """Return trips drawn from published months if they exist, else from random months with the same columns.

    The months are ``green_tripdata*.parquet`` in the folder that ``TAXI_DATA`` names, or next to the checkout in
    ``shared/data``.
    """
    rng = np.random.default_rng(1)
    folder = Path(os.environ.get("TAXI_DATA") or Path(__file__).parents[3] / "shared" / "data")
    source, origin = _published(sorted(folder.glob("green_tripdata*.parquet"))), "published months"
    if source is None:
        source, origin = _made_up(rng, 100_000), "made-up trips"
    drawn = rng.integers(0, len(source[PICKUP]), rows)
    columns = {name: np.ascontiguousarray(column[drawn]) for name, column in source.items()}
    quarters, counts = np.unique(columns[PICKUP], return_counts=True)
    return Trips(columns, int(quarters[np.abs(counts / rows - SHARE).argmin()]), origin)


def _published(files: list[Path]) -> dict[str, NDArray[Any]] | None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        return None
    if not files:
        return None
    months = [parquet.read_table(file, columns=[PICKUP, *COLUMNS]) for file in files]
    table = pa.concat_tables(months, promote_options="permissive")
    found = {name: table[name].fill_null(0).to_numpy() for name in (PICKUP, *COLUMNS)}
    return {name: column.astype(np.int64 if name == PICKUP else np.float64) for name, column in found.items()}


def _made_up(rng: np.random.Generator, rows: int) -> dict[str, NDArray[Any]]:
    popularity = 1.0 / np.arange(1, 264)
    found: dict[str, NDArray[Any]] = {PICKUP: 1 + rng.choice(263, rows, p=popularity / popularity.sum())}
    # a rare quarter, as in the document
    found[PICKUP][rng.random(rows) < SHARE] = 264
    miles = np.round(rng.lognormal(0.6, 0.9, rows), 2)
    found |= {COLUMNS[0]: miles, COLUMNS[1]: 3.0 + 4 * miles}
    return found | {name: rng.choice([0.0, 0.5, 2.5], rows) for name in COLUMNS[2:]}


# -- bytes ----------------------------------------------------------------------------------------------------


def amplification(setting: Setting, document: Document) -> Outcome:
    """Count the bytes that a table reads for each question, over what the question needs."""
    try:
        import pyarrow as pa
    except ImportError:
        raise Unavailable("needs pyarrow (the extra `table`)") from None
    data = trips(1 << 20 if setting.quick else 1 << 23)
    path = setting.folder / "trips.arrow"
    with pa.ipc.new_file(path, (table := pa.table(data.columns)).schema) as writer:
        writer.write_table(table)
    answers = data.answers()
    on_demand, whole_columns, units = [], [], {4096}
    with _environment("WARPWELL_READ_GAP_BYTES", "0"), ww.table.open(path, device="cpu", direct=True) as stored:
        for question in range(1, len(COLUMNS) + 1):
            matches = stored.where([(PICKUP, "==", data.quarter)])
            rows = matches.take(list(COLUMNS[:question])).numpy()
            np.testing.assert_allclose([rows[name].mean() for name in COLUMNS[:question]], answers[:question])
            needed = data.needed(question)
            reads = matches.explain()
            on_demand.append(sum(column.read for column in reads) / needed)
            units |= {512 for column in reads if column.column != PICKUP and column.read % 4096}
            whole_columns.append(data.whole_columns(question) / needed)
    path.unlink()
    first, second = document.numbers["amplification"]
    checks = [
        shapes.rises("whole columns: more with every question", whole_columns, 0.0),
        shapes.ratio(
            "whole columns: question 2 over question 1", whole_columns[1] / whole_columns[0], second / first, 1.5
        ),
        shapes.between("whole columns: question 6", whole_columns[-1], 5),
        # a file system without direct reads of 512 bytes reads whole pages
        shapes.between(f"on demand, by {min(units)} B: every question", max(on_demand), 1, 2 if 512 in units else 3),
    ]
    text = f"on demand {on_demand[0]:.2f}x to {on_demand[-1]:.2f}x"
    text += f", whole columns {whole_columns[0]:.2f}x to {whole_columns[-1]:.2f}x"
    return Outcome(
        f"{text} ({data.origin})", checks, {"on_demand": on_demand, "whole_columns": whole_columns, "rows": data.rows}
    )


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


# -- time -----------------------------------------------------------------------------------------------------


@ww.kernel
def add_matching(pickup, a, b, c, d, e, f, quarter, question, total):  # type: ignore[no-untyped-def]
    """Add the items of the first `question` columns of a trip that begins in the quarter; a thread per trip."""
    i = gpu.grid(1)
    if i < pickup.size and pickup[i] == quarter:
        gpu.atomic_add(total, 0, a[i])
        if question > 1:
            gpu.atomic_add(total, 1, b[i])
        if question > 2:
            gpu.atomic_add(total, 2, c[i])
        if question > 3:
            gpu.atomic_add(total, 3, d[i])
        if question > 4:
            gpu.atomic_add(total, 4, e[i])
        if question > 5:
            gpu.atomic_add(total, 5, f[i])


def times(setting: Setting, document: Document) -> Outcome:
    """Ask each question on one drive: by a kernel that reads on demand, and of columns that are read whole."""
    data = trips(1 << 18 if setting.quick else 1 << 20)
    answers = data.answers()
    matching = int((data.columns[PICKUP] == data.quarter).sum())
    on_demand, whole_columns, read = [], [], []
    with contextlib.ExitStack() as stack:
        media = {name: slowed(RamMedium(column), SLOWER) for name, column in data.columns.items()}
        arrays = {}
        for name, column in data.columns.items():
            page = SCAN_PAGE if name == PICKUP else ROW_PAGE
            arrays[name] = stack.enter_context(opened(media[name], column, 1 << 18, page))

        def bytes_read() -> int:
            return sum(array.stats.bytes_read for array in arrays.values())

        for question in (0, *range(1, len(COLUMNS) + 1)):  # the first run compiles
            seconds = []
            for _ in range(RUNS if question else 1):
                for array in arrays.values():
                    array.evict()
                before, total = bytes_read(), np.zeros(len(COLUMNS))
                began = time.perf_counter()
                add_matching[data.rows](*arrays.values(), data.quarter, question or 6, total, device="cpu")
                seconds.append(time.perf_counter() - began)
            if question:
                np.testing.assert_allclose(total[:question] / matching, answers[:question])
                on_demand.append(min(seconds))
                read.append((bytes_read() - before) / data.needed(question))
                whole_columns.append(min(_read_whole(media, data, question, answers) for _ in range(RUNS)))
    gains = [w / o for w, o in zip(whole_columns, on_demand, strict=True)]
    checks = [
        shapes.rises("the gain grows with every question", gains, 0.1),
        shapes.between("question 1 is about as fast", gains[0], 0.7, document.numbers["gain"]),
        shapes.ratio("gain of question 6", gains[-1], document.numbers["gain"], 2),
    ]
    text = f"{gains[0]:.2f}x (question 1) to {gains[-1]:.2f}x (question 6) faster than whole columns, one drive"
    values = {"on_demand_s": on_demand, "whole_s": whole_columns, "amplification": read}
    return Outcome(f"{text} (emulated, 1/{SLOWER}; {data.origin})", checks, values)


def _read_whole(media: dict[str, Any], data: Trips, question: int, answers: list[float]) -> float:
    """Return the seconds of a question whose columns are all read first, as by a program that the CPU controls."""
    began = time.perf_counter()
    names = (PICKUP, *COLUMNS[:question])
    columns = {n: media[n].read(0, data.columns[n].nbytes).view(data.columns[n].dtype) for n in names}
    chosen = columns[PICKUP] == data.quarter
    found = [columns[name][chosen].mean() for name in names[1:]]
    seconds = time.perf_counter() - began
    np.testing.assert_allclose(found, answers[:question])
    return seconds


def duckdb(setting: Setting, document: Document) -> Outcome:
    """Ask DuckDB the same questions: a current query engine that replaces the document's RAPIDS."""
    try:
        engine = importlib.import_module("duckdb")
    except ImportError:
        raise Unavailable("DuckDB is not installed (pip install duckdb)") from None
    data = trips(1 << 20)
    with engine.connect() as base:
        base.register("source", {name: column for name, column in data.columns.items()})
        base.execute("create table trips as select * from source")
        seconds = []
        for question in range(1, len(COLUMNS) + 1):
            means = ", ".join(f"avg({name})" for name in COLUMNS[:question])
            began = time.perf_counter()
            found = base.execute(f"select {means} from trips where {PICKUP} = {data.quarter}").fetchone()
            seconds.append(time.perf_counter() - began)
    same = bool(np.allclose(found, data.answers()))
    return Outcome(f"{1e3 * seconds[0]:.1f} to {1e3 * seconds[-1]:.1f} ms in memory", [
        shapes.equal("the same answers", same, True)], {"seconds": seconds})  # fmt: skip


def rapids(setting: Setting, document: Document) -> Outcome:
    """Report that BaM's baseline cannot run."""
    raise Unavailable("RAPIDS needs a GPU; whole columns from the same drive replace it in the other two experiments")


EXPERIMENTS = [
    Experiment("taxi/amplification", amplification, timed=False),
    Experiment("taxi/times", times),
    Experiment("taxi/duckdb", duckdb, timed=False),
    Experiment("taxi/rapids", rapids),
]
