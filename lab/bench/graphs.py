"""Seconds of graph algorithms in every tier, on kron and urand graphs.

The cache has a quarter of the bytes of the edges. Tiers: ``device``, ``host``, ``host-cached``, ``storage`` (the file;
put ``-o folder=`` on a tmpfs to exclude drives), and striped emulated P5800X (``-o drives=4,8``). ``-o gap=FOLDER``
names the sources of the GAP benchmark (sbeamer/gapbs on GitHub; they need a C++ compiler with OpenMP): its converter
makes the graph, its kernels run on all cores as a peer, and levels, distances, components and scores are compared.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.runner import Record, Setting, benchmark
from lab.bench.timing import kernel_times, rates
from lab.media import DRIVES, Latency
from warpwell import gpu
from warpwell import graph as wg
from warpwell.array import open_array
from warpwell.storage import RamMedium, Striped
from warpwell.targets import kernel, memory_for
from warpwell.targets.primitives import grid, load_relaxed_as

DRIVE = DRIVES[0]
STRIPE = 1 << 16
I8 = np.dtype(np.int64)
DELTA = 16
"""Bucket width of delta-stepping: GAP's default for weights of 1 to 255 on kron and urand."""


# -- the graph, and GAP -----------------------------------------------------------------------------------------


class Gap:
    """GAP's programs, compiled from a folder of its sources.

    Parameters
    ----------
    sources : Path
        A checkout of gapbs.
    folder : Path
        Folder of the compiled programs.
    """

    def __init__(self, sources: Path, folder: Path) -> None:
        flags = ["g++", "-std=c++11", "-O3", "-fopenmp", "-I", str(sources / "src")]
        driver = str(Path(__file__).parent / "gap" / "driver.cc")
        self.folder = folder
        jobs = [
            subprocess.Popen([*flags, *more, "-o", str(folder / name)])
            for name, more in (
                ("converter", [str(sources / "src" / "converter.cc")]),
                ("driver", [driver]),
                ("sssp", ["-DWEIGHTED", driver]),
            )
        ]
        if any(job.wait() for job in jobs):
            raise SystemExit("GAP's sources did not compile")

    def make(self, kind: str, scale: int, degree: int) -> Path:
        """Return the path of a weighted graph from GAP's generator."""
        path = self.folder / "graph.wsg"
        option = {"kron": "-g", "urand": "-u"}[kind]
        self._run("converter", option, scale, "-k", degree, "-w", "-b", path)
        return path

    def run(self, name: str, *arguments: object) -> dict[str, list[float]]:
        """Run a driver; return the seconds of each trial, by kernel."""
        found: dict[str, list[float]] = {}
        for line in self._run(name, *arguments).splitlines():
            parts = line.split()
            if len(parts) == 3 and parts[0] in ("bfs", "cc", "pr", "sssp"):
                found.setdefault(parts[0], []).append(float(parts[2]))
        return found

    def _run(self, name: str, *arguments: object) -> str:
        return subprocess.run(
            [str(self.folder / name), *map(str, arguments)], check=True, capture_output=True, text=True
        ).stdout


def import_gap_graph(wsg: Path, out: Path, kind: str, scale: int) -> wg.Graph:
    """Convert a weighted graph of GAP to a graph of Warpwell, and write it next to `wsg` without weights for GAP."""
    with wsg.open("rb") as file:
        directed = file.read(1) != b"\0"
        edges, vertices = (int(n) for n in np.fromfile(file, np.int64, 2))
        offsets = np.fromfile(file, np.int64, vertices + 1)
        pairs = np.fromfile(file, np.int32, 2 * edges).reshape(edges, 2)
    if directed:
        raise SystemExit("GAP made a directed graph")
    destinations = np.ascontiguousarray(pairs[:, 0])

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for first in range(0, vertices, 1 << 16):
            bounds = offsets[first : first + (1 << 16) + 1]
            sources = np.repeat(np.arange(first, first + bounds.size - 1), np.diff(bounds))
            yield sources, pairs[bounds[0] : bounds[-1], 0], pairs[bounds[0] : bounds[-1], 1]

    source = f"GAP {kind} scale={scale}"
    wg.build(chunks(), out, vertices=vertices, symmetric=True, order="degree", source=source, weights="int32")
    with wsg.with_suffix(".sg").open("wb") as file:
        file.write(b"\0")
        np.array([edges, vertices]).tofile(file)
        offsets.tofile(file)
        destinations.tofile(file)
    return wg.Graph.open(out)


# -- Warpwell ---------------------------------------------------------------------------------------------------


class OnDrives(wg.LoadedGraph):
    """A graph whose destinations are striped over emulated drives."""

    drives = 1

    def _array(self, path: Path) -> Any:
        if path != self.graph.edges_path or path in self._opened:
            return super()._array(path)
        items = np.load(path, mmap_mode="r")
        share = -(-items.nbytes // (STRIPE * self.drives)) * STRIPE
        parts = [RamMedium(share) for _ in range(self.drives)]
        Striped(parts, STRIPE).write(0, items)
        slow = Striped([Latency(part, DRIVE.name) for part in parts], STRIPE)
        found = open_array(slow, dtype=items.dtype, shape=items.shape, name=str(path), **self._options)
        self._opened[path] = found
        return found


def algorithms(sources: list[int], repeat: int) -> dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]]:
    """Return each algorithm, and the arguments of its runs."""
    found: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
        "bfs": (wg.bfs, [(source,) for source in sources]),
        "cc": (wg.connected_components, [()] * repeat),
    }
    # The tolerance and the maximum number of iterations are GAP's.
    found["pr"] = (functools.partial(wg.pagerank, tolerance=1e-4, iterations=20), [()] * repeat)
    found["sssp"] = (wg.sssp, [(source,) for source in sources[: max(1, len(sources) // 4)]])
    return found


def require_same_result(name: str, found: np.ndarray, check: dict[str, Any]) -> None:
    """Raise unless a result equals the result of the first tier, and agrees with GAP's."""
    if name in check:
        first = check[name]
        equal = np.allclose(found, first, rtol=1e-3, atol=1e-9) if name == "pr" else np.array_equal(found, first)
        if not equal:
            raise SystemExit(f"{name}: the result differs from another tier's")
        return
    check[name] = found
    path = None if check["folder"] is None else check["folder"] / f"{name}.0"
    if path is None or not path.exists():
        return
    gap = np.fromfile(path, np.float32 if name == "pr" else np.int32)
    if name == "bfs":  # GAP returns parents, Warpwell levels.
        reached = found >= 0
        away = reached & (np.arange(len(found)) != check["source"])
        good = bool(np.array_equal(reached, gap >= 0) and np.all(found[gap[away]] + 1 == found[away]))
    elif name == "cc":
        good = bool(np.array_equal(found, gap))
    elif name == "sssp":
        infinite = gap >= np.iinfo(np.int32).max // 2
        distances = np.asarray(found, np.float64)
        reachable = np.isfinite(distances) & (distances >= 0) & (distances < 2**31 - 1)
        good = bool(np.array_equal(reachable, ~infinite) and np.array_equal(distances[reachable], gap[~infinite]))
    else:
        # GAP drops the rank of vertices without edges, Warpwell spreads it: the vectors are proportional.
        difference = float(np.abs(found / found.sum() - gap / gap.sum(dtype=np.float64)).sum())
        good = difference < 2e-3
    check.setdefault("agrees", {})[name] = good
    if not good:
        raise SystemExit(f"{name}: the result differs from GAP's")


@kernel
def _read(address, items, threads, total):
    """Add up items of host memory: adjacent threads read adjacent items, and bypass all caches except L2."""
    i = grid(1)
    found = 0
    while i < items:
        found += load_relaxed_as(address + 8 * i, I8)
        i += threads
    gpu.atomic_add(total, 0, found)


def bus_rates(device: str, nbytes: int) -> list[float]:
    """Return bytes per second of a kernel that reads pinned host memory: the ceiling of the host tier."""
    block = memory_for(device).allocate_shared(nbytes)
    block.words[:] = 1
    threads = 1 << 18 if device == "cuda" else 64
    total = np.zeros(1, np.int64)
    if device == "cuda":
        from numba import cuda

        total = cuda.to_device(total)
    return rates(nbytes, kernel_times(_read, threads, block.address, nbytes // 8, threads, total, device=device))


def measure_tier(
    graph: wg.Graph,
    name: str,
    tier: str,
    drives: int,
    sources: list[int],
    setting: Setting,
    check: dict[str, Any],
    record: Record,
    gap: dict[str, list[float]],
) -> None:
    """Record the seconds of each algorithm in a tier, and the loading time."""
    kind = type("OnDrives", (OnDrives,), {"drives": drives}) if drives else wg.LoadedGraph
    threads = setting.option("threads", 14 if setting.on_gpu else 2)
    options = {"threads": threads} if tier in ("storage", "host-cached") else {}
    started = time.perf_counter()
    cache = max(1 << 20, graph.edges)
    with kind(graph, device=setting.device, tier=tier, cache=cache, page_size=4096, **options) as loaded:
        record(f"{name}/loading", time.perf_counter() - started, "s", better="lower")
        for algorithm, (run, runs) in algorithms(sources, 3).items():
            if algorithm in ("sssp", "pr") and (drives or tier == "host-cached"):
                continue
            result = run(loaded, *runs[0])  # compiles
            require_same_result(algorithm, np.asarray(result.values), check)
            if loaded.edges.tier in ("storage", "host-cached"):
                loaded.edges.evict()
            results = [run(loaded, *arguments) for arguments in runs]
            peers = [("GAP", "all cores", statistics.mean(gap[algorithm]))] if algorithm in gap else []
            record(f"{name}/{algorithm}", [r.seconds for r in results], "s", better="lower", peers=peers)
            if tier == "storage":
                read = statistics.mean(r.stats.bytes_read for r in results)
                seconds = statistics.mean(r.seconds for r in results)
                limit = ("drives", drives * DRIVE.bandwidth) if drives else None
                record(f"{name}/{algorithm}/read", read / seconds, "B/s", ceiling=limit)
                if drives:
                    record.emulated.add("drive")


def measure_graph(kind: str, setting: Setting, record: Record) -> None:
    """Create a graph and measure its tiers."""
    scale, degree = setting.pick((14, 18), (20, 24), "scale"), setting.option("degree", 16)
    with tempfile.TemporaryDirectory(dir=setting.options.get("folder")) as name:
        folder, gap, times = Path(name), None, {}
        if "gap" in setting.options:
            gap = Gap(Path(setting.options["gap"]), folder)
            graph = import_gap_graph(gap.make(kind, scale, degree), folder / "graph.ww", kind, scale)
        else:
            graph = wg.generate(kind, scale, folder / "graph.ww", degree=degree, weights="int32")
        degrees = graph.degrees()
        count = setting.pick((4, 8), (8, 32), "sources")
        sources = [int(v) for v in np.random.default_rng(27).choice(np.flatnonzero(degrees > 2), count)]
        if gap is not None:
            times = gap.run("driver", folder / "graph.sg", folder, *sources)
            times |= gap.run("sssp", folder / "graph.wsg", folder, DELTA, *sources[: max(1, count // 4)])
        check: dict[str, Any] = {"folder": folder if gap else None, "source": sources[0]}
        for tier in setting.option("tiers", ["device", "host", "host-cached", "storage"]):
            measure_tier(graph, f"{kind}/{tier}", tier, 0, sources, setting, check, record, times)
        for drives in setting.option("drives", [0]):
            if drives:
                label = f"{kind}/drives{drives}"
                measure_tier(graph, label, "storage", drives, sources, setting, check, record, times)


@benchmark("graphs", figures=["bus", "kron", "urand"])
def run(setting: Setting, record: Record) -> None:
    """Measure both graphs."""
    record("bus", bus_rates(setting.device, 1 << 30 if setting.on_gpu else 1 << 25), "B/s")
    for kind in setting.option("kinds", ["kron"] if setting.quick else ["kron", "urand"]):
        measure_graph(kind, setting, record)
