"""Time the BaM paper's queries of taxi trips here, and in DuckDB, Polars and pyarrow if they are installed.

Q0 is the mean distance of the trips of at least 30 miles; each next question adds the mean of one column. Rows are
bootstrapped from months of green taxis (the glob in ``TAXI_MONTHS``), or random; no trip has a hail fee, so that column
has no bytes. Systems alternate. ``-o cold=1`` also asks in new processes after fsync and DONTNEED.

On a GPU (needs PyTorch; columns are random): the kernel of filters, compared with a span scan of a cached column, and
Q5 on demand with pages of 4 KiB and 512 B, compared with loading the columns whole, and KvikIO if it is installed.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import math
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from lab.bench.runner import CannotRunError, Record, Setting, benchmark
from lab.bench.timing import drop_files, kernel_seconds, kernel_times, rates

COLUMNS = ["trip_distance", "total_amount", "extra", "ehail_fee", "tolls_amount", "mta_tax"]
BATCH = 1 << 20


def make(folder: Path, rows: int) -> None:
    """Write the same rows as an Arrow file, zstd Parquet, two Warpwell tables, and a DuckDB file if it is installed."""
    import pyarrow.parquet as parquet

    import warpwell as ww

    files = sorted(glob.glob(os.environ.get("TAXI_MONTHS", "")))
    random = np.random.default_rng(1)
    if files:
        months = [parquet.read_table(file, columns=COLUMNS) for file in files]
        source = pa.concat_tables(months, promote_options="permissive")
    else:
        miles = np.round(random.lognormal(0.6, 0.9, 100_000), 2)
        drawn = [random.choice([0, 0.5, 2.5], 100_000) for _ in range(4)]
        source = pa.table([miles, 4 * miles, *drawn], names=COLUMNS).set_column(3, COLUMNS[3], pa.nulls(100_000))
    values = [None if column.null_count == len(column) else column.fill_null(0).to_numpy() for column in source.columns]
    schema = pa.schema(
        [(name, pa.null() if column is None else pa.float64()) for name, column in zip(COLUMNS, values, strict=True)]
    )
    arrow = folder / "trips.arrow"
    with (
        pa.ipc.new_file(arrow, schema) as writer,
        parquet.ParquetWriter(folder / "trips.parquet", schema, compression="zstd") as parquet_writer,
    ):
        for start in range(0, rows, BATCH):
            chosen = random.integers(0, len(source), min(BATCH, rows - start))
            arrays = [pa.nulls(len(chosen)) if column is None else column[chosen] for column in values]
            batch = pa.record_batch(arrays, schema=schema)
            writer.write_batch(batch)
            parquet_writer.write_batch(batch)
    ww.table.convert(str(arrow), folder / "trips.ww").close()
    ww.table.convert(
        str(arrow), folder / "coded.ww", codes=[name for name in COLUMNS[2:] if name != "ehail_fee"]
    ).close()
    if importlib.util.find_spec("duckdb"):
        import duckdb

        with duckdb.connect(str(folder / "trips.duckdb")) as base:
            base.execute(f"create table trips as select * from read_parquet('{folder / 'trips.parquet'}')")


def question(folder: Path, system: str, count: int, min_miles: float) -> list[float]:
    """Return the means of the first `count` columns over trips of at least `min_miles`; NaN for missing values."""
    return [math.nan if mean is None else float(mean) for mean in _means(folder, system, COLUMNS[:count], min_miles)]


def _means(folder: Path, system: str, names: list[str], min_miles: float) -> list[float | None]:
    if system.startswith("warpwell"):
        import warpwell as ww

        direct = True if "direct" in system else None
        name = {"file": "trips.arrow", "folder": "trips.ww", "coded": "coded.ww"}[system.split()[1]]
        if "where" in system:
            with ww.table.open(folder / name, device="cpu", direct=direct) as table:
                rows = table.where([(COLUMNS[0], ">=", min_miles)]).take(names).arrow()
                return [
                    None if column.null_count == len(column) else column.to_numpy().mean() for column in rows.columns
                ]
        return _polars(ww.table.scan(folder / name, direct=direct), names, min_miles)
    if system.startswith("polars"):
        import polars as pl

        lazy = pl.scan_ipc(folder / "trips.arrow") if "ipc" in system else pl.scan_parquet(folder / "trips.parquet")
        return _polars(lazy, names, min_miles)
    if system == "pyarrow":
        import pyarrow.compute as pc
        import pyarrow.dataset as ds

        found = ds.dataset(folder / "trips.arrow", format="ipc").to_table(
            names, filter=ds.field(COLUMNS[0]) >= min_miles
        )
        return [pc.mean(found[name]).as_py() for name in names]
    import duckdb

    means = ", ".join(f"avg({name})" for name in names)
    file = str(folder / "trips.duckdb")
    with duckdb.connect(file if system == "duckdb" else ":memory:", read_only=system == "duckdb") as base:
        relation = "trips" if system == "duckdb" else f"read_parquet('{folder / 'trips.parquet'}')"
        return list(base.execute(f"select {means} from {relation} where {COLUMNS[0]} >= {min_miles}").fetchone())


def _polars(lazy, names, min_miles):
    import polars as pl

    return list(lazy.filter(pl.col(COLUMNS[0]) >= min_miles).select(pl.col(names).mean()).collect().row(0))


SYSTEMS = [
    "warpwell file scan",
    "warpwell folder scan",
    "warpwell coded scan",
    "warpwell file where",
    "warpwell coded where",
    "duckdb",
    "duckdb parquet",
    "polars parquet",
    "polars ipc",
    "pyarrow",
]


def measured(folder: Path, system: str, count: int, min_miles: float) -> tuple[float, list[float]]:
    start = time.perf_counter()
    found = question(folder, system, count, min_miles)
    return time.perf_counter() - start, found


def cold(folder: Path, system: str, count: int, min_miles: float) -> tuple[float, int]:
    """Return the time of a question in a new process that has asked a small table before, and the bytes that it read.

    A system with "whole" in its name reads whole columns, with gaps of any size.
    """
    small = folder.parent / "20000"
    if not (small / "coded.ww").exists():
        small.mkdir(exist_ok=True)
        make(small, 20_000)
    drop_files(folder)
    code = (
        "import sys, json; from lab.bench import taxi; from pathlib import Path\n"
        "import polars, pyarrow.dataset, warpwell.table\n"
        "folder, small, system, count, min_miles = sys.argv[1:]\n"
        "taxi.measured(Path(small), system, int(count), 1.0)\n"
        "read = lambda: int([l for l in open('/proc/self/io') if l.startswith('read_bytes')][0].split()[1])\n"
        "before = read()\n"
        "took, _ = taxi.measured(Path(folder), system, int(count), float(min_miles))\n"
        "print(json.dumps([took, read() - before]))"
    )
    arguments = [str(folder), str(small), system, str(count), str(min_miles)]
    environment = dict(os.environ, WARPWELL_READ_GAP_BYTES="1GiB") if "whole" in system else None
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    took, read = json.loads(done.stdout.splitlines()[-1])
    return took, read


# -- on a GPU -------------------------------------------------------------------------------------------------------

NUMBERS = [name for name in COLUMNS if name != "ehail_fee"]
"""The columns that have bytes."""
RUN = 2048
"""Rows of a run of the span scan."""


def made_up(path: Path, rows: int) -> list[np.ndarray]:
    """Write an Arrow file of random columns, and return these."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(NUMBERS)) as pool:
        columns = list(pool.map(lambda k: np.random.default_rng(k).random(rows), range(len(NUMBERS))))
    batch = pa.record_batch(columns, names=NUMBERS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return columns


def span_kernel():
    import warpwell as ww

    @ww.kernel
    def span(a, runs, warps, out):
        total = 0.0
        for k in range(ww.gpu.grid(1) // ww.gpu.warp_size(), runs, warps):
            total = ww.gpu.fold_warp(operator.add, total, a, k * RUN, (k + 1) * RUN)
        out[ww.gpu.grid(1)] = total

    return span


def selection(path: Path, rows: int, options: dict, record: Record) -> None:
    """Compare the kernel of filters with a span scan of the same column; its pages are in the cache."""
    import torch

    import warpwell as ww
    from warpwell.table import predicate, selecting, where

    with ww.table.open(path, device="cuda", **options) as table:
        column = table[NUMBERS[0]]
        run = column.runs[0]
        table.where([(NUMBERS[0], ">=", 0.9997)])  # loads the column
        extent = where._numbers_of(run)
        (array, tail), form = where._words_of(table, extent), where._form(extent.dtype)
        mask = torch.zeros(-(-rows // 64), dtype=torch.int64, device="cuda")
        units = where._units(run, 0, 0, rows, form[0])
        items, runs = where.rows_of(table, run), rows // RUN
        seconds = kernel_seconds(
            span_kernel(),
            runs * 32,
            items,
            runs,
            runs,
            torch.zeros(runs * 32, device="cuda"),
            device="cuda",
            arrays=[items],
        )
        for share in (3e-4, 0.5):
            values = predicate.compare(NUMBERS[0], column.type, ">=", 1 - share)
            near = [
                torch.as_tensor(each, device="cuda") for each in (units.reshape(-1), where._edges(values, None, form))
            ]
            args = (array, *near, *form, tail, mask)
            times = kernel_times(selecting.select, len(units) * 32, *args, device="cuda", arrays=[array])
            limit = ("span", 8 * rows / seconds)
            record(f"select/{options['page_size']}B/{share:g}", rates(8 * rows, times), "B/s", ceiling=limit)


def on_demand(path: Path, columns: list[np.ndarray], share: float, options: dict, repeats: int, record: Record) -> None:
    """Ask Q5 on demand, and with whole columns loaded first, in turns; all caches are empty before each query."""
    import torch

    import warpwell as ww
    from warpwell.table import where

    threshold, times = 1 - share, []
    chosen = np.flatnonzero(columns[0] >= threshold)
    expected = [column[chosen].mean() for column in columns[1:]]
    with ww.table.open(path, device="cuda", **options) as table:
        arrays = [where.rows_of(table, table[name].runs[0]) for name in NUMBERS]

        def demanded():
            rows = table.where([(NUMBERS[0], ">=", threshold)])
            found = rows.gather(NUMBERS[1:])
            return [float(torch.from_dlpack(values).mean()) for values in found.values()], rows

        def loaded():
            tensors = [torch.from_dlpack(array[:].read()) for array in arrays]
            keep = tensors[0] >= threshold
            return [float(tensor[keep].mean()) for tensor in tensors[1:]], None

        for _ in range(repeats + 1):
            took = []
            for compute in (demanded, loaded):
                for array in arrays:
                    array.evict()
                torch.cuda.synchronize()
                start = time.perf_counter()
                means, rows = compute()
                took.append(time.perf_counter() - start)
                assert np.allclose(means, expected, rtol=1e-9), (compute, means, expected)
                if rows is not None:
                    read = sum(reads.read for reads in rows.explain())
            times.append(took)
    name = f"q5/{options['page_size']}B/{share:g}"
    peers = [("columns loaded whole", ww.__version__, statistics.median(loading for _, loading in times[1:]))]
    if (seconds := kvikio_seconds(path, columns)) is not None:
        peers.append(("KvikIO, columns", "installed", seconds))
    record(name, [demand for demand, _ in times[1:]], "s", better="lower", peers=peers)
    needed = columns[0].nbytes + 8 * (len(NUMBERS) - 1) * len(chosen)
    record(f"{name}/amplification", read / needed, "bytes read per byte", better="lower")


def kvikio_seconds(path: Path, columns: list[np.ndarray]) -> float | None:
    """Return the seconds in which KvikIO reads the size of the columns from the file to the GPU; None without it."""
    try:
        import cupy
        import kvikio
    except ImportError:
        return None
    buffers = [cupy.empty(column.nbytes, cupy.uint8) for column in columns]
    best = math.inf
    with kvikio.CuFile(str(path), "r") as file:
        for _ in range(3):
            start, at = time.perf_counter(), 0
            for buffer in buffers:
                file.read(buffer, file_offset=at)
                at += buffer.nbytes
            cupy.cuda.Device().synchronize()
            best = min(best, time.perf_counter() - start)
    return best


def systems() -> list[str]:
    """Return the systems that are installed."""
    return [name for name in SYSTEMS if importlib.util.find_spec(name.split()[0])]


def on_gpu(folder: Path, setting: Setting, record: Record) -> None:
    """Measure on a GPU."""
    if not importlib.util.find_spec("torch"):
        raise CannotRunError("needs the package torch")
    rows = setting.pick((0, 0), (1 << 24, 1 << 27), "rows")
    path = folder / "random.arrow"
    columns = made_up(path, rows)
    for page_size in (4096, 512):
        options = {"cache": 2 * columns[0].nbytes, "page_size": page_size}
        selection(path, rows, options, record)
        for share in (3e-4, 1e-5):
            on_demand(path, columns, share, options, 3, record)


def compare_systems(folder: Path, count: int, runs: int, min_miles: float, is_cold: bool, record: Record) -> None:
    """Ask a question of all systems in turns, and compare the answers."""
    names = systems()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    expected = question(folder, "pyarrow", count, min_miles)
    for k in range(runs + (not is_cold)):
        for name in names:
            if is_cold:
                seconds[name].append(cold(folder, name, count, min_miles)[0])
                continue
            took, found = measured(folder, name, count, min_miles)
            if not np.allclose(found, expected, rtol=1e-9, equal_nan=True):
                raise SystemExit(f"{name} returned {found}, expected {expected}")
            if k:
                seconds[name].append(took)
    peer_names = [name for name in names if not name.startswith("warpwell")]
    peers = [(name, "installed", statistics.median(seconds[name])) for name in peer_names]
    for name in [name for name in names if name not in peer_names]:
        short_name = name.removeprefix("warpwell ")
        record(
            f"q{count - 1}/{'cold' if is_cold else 'warm'}/{short_name}",
            seconds[name],
            "s",
            better="lower",
            peers=peers,
        )


@benchmark("taxi", needs={"pyarrow"}, figures=["q0", "q5", "select"])
def run(setting: Setting, record: Record) -> None:
    """Ask Q0 and Q5."""
    with tempfile.TemporaryDirectory(dir=setting.options.get("folder")) as name:
        if setting.on_gpu:
            on_gpu(Path(name), setting, record)
            return
        if not importlib.util.find_spec("polars"):
            raise CannotRunError("needs the package polars")
        rows = setting.pick((1_000_000, 10_000_000), (1, 1), "rows")
        folder = Path(name) / str(rows)
        folder.mkdir()
        make(folder, rows)
        for count in (1, 6):
            compare_systems(folder, count, 5, 30.0, False, record)
            if setting.options.get("cold"):
                compare_systems(folder, count, 3, 30.0, True, record)
