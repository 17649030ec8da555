"""The six questions of the paper about taxi trips, beside DuckDB, Polars and pyarrow: warm, cold, and for more rows.

Q0 is the mean distance of the trips of at least 30 miles, and each next question adds the mean of one column. Rows are
bootstrapped from months of green taxis (``../shared/data/green*.parquet``, or the glob in ``TAXI_MONTHS``), or made up;
nobody paid a hail fee in these, so that this column has no bytes.
Medians of alternated runs; cold is a new process after fsync and DONTNEED. Prints JSON lines, and with ``--picture``
draws the sweep.

    python benchmarks/taxi.py --quick
    python benchmarks/taxi.py --rows 100000000 --folder /drive/taxi --picture sweep.png
    python benchmarks/taxi.py --only sweep --shares 1e-5,3e-4 --repeats 3 --systems "ours coded scan direct,duckdb"

Of our own, "direct" takes rows past the page cache, and "whole" reads whole columns.

With ``--device cuda`` (needs PyTorch; columns are made up): the kernel of filters beside a span scan of a column in the
cache; and Q5 on demand, with 4 KiB and 512-byte pages, beside a bulk load of the five columns and, where it is
installed, beside reads of as much by KvikIO.

    python benchmarks/taxi.py --device cuda --rows 134217728 --folder /dev/shm/taxi
"""

from __future__ import annotations

import argparse
import gc
import glob
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

COLUMNS = ["trip_distance", "total_amount", "extra", "ehail_fee", "tolls_amount", "mta_tax"]
BATCH = 1 << 20


def make(folder: Path, rows: int) -> None:
    """Write the same rows as an Arrow file, zstd Parquet, two folders of ours, and a file of DuckDB's."""
    import duckdb
    import pyarrow.parquet as parquet

    import warpwell as ww

    months_of = os.environ.get("TAXI_MONTHS", str(Path(__file__).parents[3] / "shared/data/green*.parquet"))
    files = sorted(glob.glob(months_of))
    random = np.random.default_rng(1)
    if files:
        months = [parquet.read_table(one, columns=COLUMNS) for one in files]
        source = pa.concat_tables(months, promote_options="permissive")
    else:
        miles = np.round(random.lognormal(0.6, 0.9, 100_000), 2)
        drawn = [random.choice([0, 0.5, 2.5], 100_000) for _ in range(4)]
        source = pa.table([miles, 4 * miles, *drawn], names=COLUMNS).set_column(3, COLUMNS[3], pa.nulls(100_000))
    values = [None if one.null_count == len(one) else one.fill_null(0).to_numpy() for one in source.columns]
    schema = pa.schema(
        [(name, pa.null() if one is None else pa.float64()) for name, one in zip(COLUMNS, values, strict=True)]
    )
    arrow = folder / "trips.arrow"
    with (
        pa.ipc.new_file(arrow, schema) as writer,
        parquet.ParquetWriter(folder / "trips.parquet", schema, compression="zstd") as other,
    ):
        for start in range(0, rows, BATCH):
            chosen = random.integers(0, len(source), min(BATCH, rows - start))
            taken = [pa.nulls(len(chosen)) if one is None else one[chosen] for one in values]
            batch = pa.record_batch(taken, schema=schema)
            writer.write_batch(batch)
            other.write_batch(batch)
    ww.table.convert(str(arrow), folder / "trips.ww").close()
    ww.table.convert(str(arrow), folder / "coded.ww", codes="auto").close()
    with duckdb.connect(str(folder / "trips.duckdb")) as base:
        base.execute(f"create table trips as select * from read_parquet('{folder / 'trips.parquet'}')")


def question(folder: Path, system: str, count: int, least: float) -> list[float]:
    """Return the means of the first `count` columns over trips of at least so many miles; NaN of none."""
    return [math.nan if one is None else float(one) for one in _asked(folder, system, COLUMNS[:count], least)]


def _asked(folder: Path, system: str, names: list[str], least: float) -> list[float | None]:
    if system.startswith("ours"):
        import warpwell as ww

        direct = True if "direct" in system else None
        name = {"file": "trips.arrow", "folder": "trips.ww", "coded": "coded.ww"}[system.split()[1]]
        if "where" in system:
            with ww.table.open(folder / name, device="cpu", direct=direct) as table:
                taken = table.where([(COLUMNS[0], ">=", least)]).take(names).arrow()
                return [None if one.null_count == len(one) else one.to_numpy().mean() for one in taken.columns]
        return _polars(ww.table.scan(folder / name, direct=direct), names, least)
    if system.startswith("polars"):
        import polars as pl

        lazy = pl.scan_ipc(folder / "trips.arrow") if "ipc" in system else pl.scan_parquet(folder / "trips.parquet")
        return _polars(lazy, names, least)
    if system == "pyarrow":
        import pyarrow.compute as pc
        import pyarrow.dataset as ds

        found = ds.dataset(folder / "trips.arrow", format="ipc").to_table(names, filter=ds.field(COLUMNS[0]) >= least)
        return [pc.mean(found[one]).as_py() for one in names]
    import duckdb

    means = ", ".join(f"avg({one})" for one in names)
    file = str(folder / "trips.duckdb")
    with duckdb.connect(file if system == "duckdb" else ":memory:", read_only=system == "duckdb") as base:
        what = "trips" if system == "duckdb" else f"read_parquet('{folder / 'trips.parquet'}')"
        return list(base.execute(f"select {means} from {what} where {COLUMNS[0]} >= {least}").fetchone())


def _polars(lazy, names, least):
    import polars as pl

    return list(lazy.filter(pl.col(COLUMNS[0]) >= least).select(pl.col(names).mean()).collect().row(0))


SYSTEMS = [
    "ours file scan",
    "ours folder scan",
    "ours coded scan",
    "ours file where",
    "ours coded where",
    "duckdb",
    "duckdb parquet",
    "polars parquet",
    "polars ipc",
    "pyarrow",
]


def measured(folder: Path, system: str, count: int, least: float) -> tuple[float, list[float]]:
    start = time.perf_counter()
    found = question(folder, system, count, least)
    return time.perf_counter() - start, found


def drop(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def cold(folder: Path, system: str, count: int, least: float) -> tuple[float, int]:
    """Return the time of a question in a new process that has asked a small table before, and the bytes that it read.

    A system with "whole" in its name reads whole columns: holes of any size are read with what is around them.
    """
    small = folder.parent / "20000"
    if not (small / "trips.duckdb").exists():
        small.mkdir(exist_ok=True)
        make(small, 20_000)
    drop(folder)
    code = (
        "import sys, json; from lab.bench import taxi; from pathlib import Path\n"
        "import polars, pyarrow.dataset, duckdb, warpwell.table\n"
        "folder, small, system, count, least = sys.argv[1:]\n"
        "taxi.measured(Path(small), system, int(count), 1.0)\n"
        "read = lambda: int([l for l in open('/proc/self/io') if l.startswith('read_bytes')][0].split()[1])\n"
        "before = read()\n"
        "took, _ = taxi.measured(Path(folder), system, int(count), float(least))\n"
        "print(json.dumps([took, read() - before]))"
    )
    given = [str(folder), str(small), system, str(count), str(least)]
    environment = dict(os.environ, WARPWELL_HOLE_BYTES="1GiB") if "whole" in system else None
    done = subprocess.run(
        [sys.executable, "-c", code, *given], capture_output=True, text=True, check=True, env=environment
    )
    took, read = json.loads(done.stdout.splitlines()[-1])
    return took, read


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


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
        for k in range(ww.grid(1) // ww.warp_size(), runs, warps):
            total = ww.fold_warp(ww.add, total, a, k * RUN, (k + 1) * RUN)
        out[ww.grid(1)] = total

    return span


def selection(path: Path, rows: int, options: dict) -> None:
    """Time the kernel of filters beside a span scan of the same column, whose pages are in the cache."""
    import torch

    import warpwell as ww
    from lab.bench.timing import kernel_seconds
    from warpwell.table import key_sets, selecting, where

    with ww.table.open(path, device="cuda", **options) as table:
        column = table[NUMBERS[0]]
        run = column.runs[0]
        for _ in range(2):
            start = time.perf_counter()
            table.where([(NUMBERS[0], ">=", 0.9997)])
            whole = time.perf_counter() - start
        arrays, tails = where._arrays(table, run)
        mask = torch.zeros(-(-rows // 64), dtype=torch.int64, device="cuda")
        nothing = torch.zeros(1, dtype=torch.int64, device="cuda")
        items, runs = where._rows_of(table, run), rows // RUN
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
            flips = key_sets.set_of(NUMBERS[0], column.type, ">=", 1 - share)
            units, *tables = where._tables(column, [(run, 0)], flips, {})
            near = [torch.as_tensor(one, device="cuda") for one in (*tables[:2], np.array(tails, np.int64))]
            given = (*arrays[:2], *near[:2], *where._form(column, run)[1:], 0, near[2], nothing, mask, 0)
            took = kernel_seconds(selecting.select_whole, units * 32, *given, device="cuda", arrays=[arrays[0]])
            say(
                what="selection, resident",
                **options,
                share=share,
                gb_s=round(8 * rows / took / 1e9),
                span_gb_s=round(8 * rows / seconds / 1e9),
                of_a_span=round(seconds / took, 2),
                where_ms=round(whole * 1e3, 1),
            )


def on_demand(path: Path, columns: list[np.ndarray], share: float, options: dict, repeats: int) -> None:
    """Ask Q5 on demand, and of columns that are loaded whole, in turns; all caches are empty before each."""
    import torch

    import warpwell as ww
    from warpwell.array import bulk
    from warpwell.table import where

    least, times = 1 - share, []
    chosen = np.flatnonzero(columns[0] >= least)
    expected = [one[chosen].mean() for one in columns[1:]]
    with ww.table.open(path, device="cuda", **options) as table:
        arrays = [where._rows_of(table, table[name].runs[0]) for name in NUMBERS]

        def demanded():
            rows = table.where([(NUMBERS[0], ">=", least)])
            found = rows.gather(NUMBERS[1:])
            return [float(torch.from_dlpack(one).mean()) for one in found.values()], rows

        def loaded():
            there = [torch.from_dlpack(bulk.get(one, slice(None))) for one in arrays]
            keep = there[0] >= least
            return [float(one[keep].mean()) for one in there[1:]], None

        for _ in range(repeats + 1):
            took = []
            for way in (demanded, loaded):
                for one in arrays:
                    one.evict()
                torch.cuda.synchronize()
                start = time.perf_counter()
                means, rows = way()
                took.append(time.perf_counter() - start)
                assert np.allclose(means, expected, rtol=1e-9), (way, means, expected)
                if rows is not None:
                    read = sum(one.read for one in rows.explain())
            times.append(took)
    ours, bulk_load = (statistics.median(one[k] for one in times[1:]) for k in (0, 1))
    ratio = sum(one.nbytes for one in columns) / read
    say(
        what="Q5",
        **options,
        share=share,
        ms=round(ours * 1e3, 1),
        bulk_ms=round(bulk_load * 1e3, 1),
        faster=round(bulk_load / ours, 2),
        bytes_ratio=round(ratio, 2),
        of_it=round(bulk_load / ours / ratio, 2),
        kvikio_ms=kvikio_ms(path, columns),
    )


def kvikio_ms(path: Path, columns: list[np.ndarray]) -> float | None:
    """Return the milliseconds in which KvikIO reads as many bytes of the file to the GPU; None without it."""
    try:
        import cupy
        import kvikio
    except ImportError:
        return None
    there = [cupy.empty(one.nbytes, cupy.uint8) for one in columns]
    best = math.inf
    with kvikio.CuFile(str(path), "r") as file:
        for _ in range(3):
            start, at = time.perf_counter(), 0
            for one in there:
                file.read(one, file_offset=at)
                at += one.nbytes
            cupy.cuda.Device().synchronize()
            best = min(best, time.perf_counter() - start)
    return round(best * 1e3, 1)


def on_gpu(folder: Path, rows: int, repeats: int) -> None:
    """Measure on a GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "random.arrow"
    columns = made_up(path, rows)
    size = 2 * columns[0].nbytes
    for page_size in (4096, 512):
        options = {"cache": size, "page_size": page_size}
        selection(path, rows, options)
        for share in (3e-4, 1e-5):
            on_demand(path, columns, share, options, repeats)
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, default=Path("taxi-benchmark"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a million rows, one repeat")
    parser.add_argument("--only", default="warm,cold,sweep", help="which of warm, cold and sweep, by commas")
    parser.add_argument("--shares", default="1e-6,1e-5,1e-4,3e-4,1e-3,1e-2", help="selectivities of the sweep")
    parser.add_argument("--systems", help="those of the sweep, by commas")
    parser.add_argument("--picture", type=Path, help="draw the sweep over selectivities")
    options = parser.parse_args()
    rows, repeats = (1_000_000, 1) if options.quick else (options.rows, options.repeats)
    folder = options.folder / str(rows)
    if options.device == "cuda":
        on_gpu(folder, rows, repeats)
        return
    if not (folder / "trips.duckdb").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, rows)
    only = options.only.split(",")
    if "warm" in only:
        warm(folder, rows, repeats)
    if "cold" in only:
        all_cold(folder, rows, repeats)
    if "sweep" in only:
        systems = tuple(options.systems.split(",")) if options.systems else SWEPT
        sweep(folder, rows, repeats, options.picture, [float(one) for one in options.shares.split(",")], systems)


def warm(folder: Path, rows: int, repeats: int) -> None:
    """Ask Q0 and Q5 of all systems in turns, in this process, and compare the answers."""
    for count in (1, 6):
        times: dict[str, list[float]] = {one: [] for one in SYSTEMS}
        expected = question(folder, "pyarrow", count, 30.0)
        for _ in range(repeats + 1):
            for system, taken in times.items():
                took, found = measured(folder, system, count, 30.0)
                assert np.allclose(found, expected, rtol=1e-9, equal_nan=True), (system, found, expected)
                taken.append(took)
        for system, taken in times.items():
            say(question=f"Q{count - 1}", state="warm", system=system, rows=rows, seconds=statistics.median(taken[1:]))


def all_cold(folder: Path, rows: int, repeats: int) -> None:
    """Ask Q0 and Q5 of all systems in turns, each in a process of its own."""
    for count in (1, 6):
        runs: dict[str, list[tuple[float, int]]] = {one: [] for one in SYSTEMS}
        for _ in range(repeats):
            for system, done in runs.items():
                done.append(cold(folder, system, count, 30.0))
        for system, done in runs.items():
            say(
                question=f"Q{count - 1}",
                state="cold",
                system=system,
                rows=rows,
                seconds=statistics.median(one[0] for one in done),
                read_mb=round(done[0][1] / 1e6, 1),
            )


SWEPT = (
    "ours folder scan",
    "ours folder scan direct",
    "ours folder scan whole",
    "ours coded scan",
    "ours coded scan direct",
    "ours coded scan whole",
    "ours file scan",
    "duckdb",
    "duckdb parquet",
    "polars parquet",
    "polars ipc",
    "pyarrow",
)


def sweep(
    folder: Path, rows: int, repeats: int, picture: Path | None, shares: list[float], systems: tuple[str, ...]
) -> None:
    """Ask Q5, cold, of more and more rows, in turns, and draw where reading rows meets reading columns."""
    import warpwell as ww

    with ww.table.open(folder / "trips.ww", device="cpu") as table:
        miles = np.sort(table[COLUMNS[0]].arrow().to_numpy(zero_copy_only=False))
    del table
    gc.collect()  # pages that somebody has mapped cannot be dropped
    lines: dict[str, list[tuple[float, float]]] = {one: [] for one in systems}
    for share in shares:
        least = float(miles[-max(1, int(rows * share))])
        real = 1 - float(np.searchsorted(miles, least)) / rows
        runs: dict[str, list[tuple[float, int]]] = {one: [] for one in systems}
        for _ in range(repeats):
            for system, done in runs.items():
                done.append(cold(folder, system, 6, least))
        for system, done in runs.items():
            seconds = statistics.median(one[0] for one in done)
            lines[system].append((real, seconds))
            say(
                question="Q5",
                state="cold",
                system=system,
                rows=rows,
                selectivity=real,
                seconds=round(seconds, 4),
                least=round(min(one[0] for one in done), 4),
                read_mb=round(done[0][1] / 1e6, 1),
            )
    if picture is not None:
        draw(picture, lines, rows)


def draw(picture: Path, lines: dict[str, list[tuple[float, float]]], rows: int) -> None:
    """Draw the sweep."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for system, line in lines.items():
        ours = system.startswith("ours")
        style = ":" if "whole" in system else "-" if ours else "--"
        axes.loglog(*zip(*line, strict=True), style, marker="o" if ours else "x", label=system)
    axes.set_xlabel(f"share of {rows:,} rows that match")
    axes.set_ylabel("seconds, Q5, cold")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
