"""BaM: throughput by threads and drives, line sizes, replicated drives, graphs against a host-memory target."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.bench.micro.ceilings import _medium_rate, medium_rate
from lab.bench.micro.commands import _Raw, rate_of
from lab.bench.micro.setting import Setting as BenchSetting
from warpwell import graph as wg
from warpwell.graph.algorithms import components
from warpwell.graph.algorithms.run import Run, measure
from warpwell.nvme import READ, WRITE
from warpwell.storage import Medium, RamMedium

from . import shapes
from .drives import P5800X, STRIPE, items, opened, replicated, slowed, striped
from .experiment import Document, Experiment, Outcome, Setting, Unavailable

BLOCK = 512
"""Bytes of a block of BaM's micro-benchmark."""
SLOWER = {READ: 2048, WRITE: 1024}
"""Divisors of the drives' rates in the micro-benchmarks."""
STRIPE_BLOCKS = STRIPE // BLOCK
LEAST_COMMANDS = 1024
"""Minimum number of commands of a measurement of drives."""
IN_FLIGHT = 16
"""Commands in flight that saturate the drive of the thread sweep: rate times latency, by Little's law."""
GRAPH_SLOWER = 1024
"""Divisor of the drives' rates in the graph experiments."""

DEGREE = 32
"""Edges made per vertex, about as many as in the document's synthetic graphs."""


def _bench(drives: int, count: int, opcode: int) -> BenchSetting:
    return BenchSetting(
        device="cpu",
        tier="storage",
        page_size=BLOCK,
        cache=64 * BLOCK,
        nbytes=count * BLOCK,
        threads=64,
        service_threads=2,
        medium=f"{P5800X.name}/{SLOWER[opcode]}",
        drives=drives,
        runs=1,
    )


def threads(setting: Setting, document: Document) -> Outcome:
    """Read blocks at random with more and more threads, each of which waits for its block."""
    slower = SLOWER[READ]
    rate = P5800X.read_iops[0] / slower
    counts = [1, 2, 4, 8, 16, 32, 64]
    data = items(4096 * BLOCK // 8)
    order = np.random.default_rng(1).permutation(4096)
    medium = slowed(RamMedium(data), slower, latency_us=1e6 * IN_FLIGHT / rate)
    rates = []
    with opened(medium, data, 64 * BLOCK, BLOCK, depth=256) as array:
        for count in counts:
            commands = int(rate * min(1.0, count / IN_FLIGHT) * (0.25 if setting.quick else 1.0))
            raw = _Raw(_bench(1, 4096, READ), array, data, order[:commands], READ)
            raw.setting = replace(raw.setting, threads=count)
            rates.append(1e6 * raw.rate(f"{count} threads"))
    alone = _medium_rate(_bench(1, 4096, READ), medium, order[:LEAST_COMMANDS], False) / rate
    checks = [
        shapes.rises("rises with the threads", rates, 0.1),
        shapes.linear("linear below the saturation point", counts[:3], rates[:3], 0.75),
        shapes.saturates("saturates at rate times latency", counts, rates, at=IN_FLIGHT, factor=2),
        shapes.between("reaches the drive's rate", rates[-1] / rate, 0.85, 1.1),
    ]
    point = shapes.saturation(counts, rates)
    text = f"{rates[-1]:,.0f} reads/s of {rate:,.0f} (emulated), flat from {point:g} threads; {IN_FLIGHT} by Little"
    instrument = shapes.between("the drive alone reaches its rate", alone, 0.9)
    return Outcome(text, checks, {"threads": counts, "reads_per_second": rates}, instrument)


def drives(opcode: int) -> Callable[[Setting, Document], Outcome]:
    """Return the experiment that reads or writes blocks at random on more and more striped drives."""

    def run(setting: Setting, document: Document) -> Outcome:
        write, slower = opcode == WRITE, SLOWER[opcode]
        drive_rate = (P5800X.write_iops if write else P5800X.read_iops)[0] / slower
        counts = [1, 2, 4, 8] if setting.quick else [1, 2, 3, 4, 5, 6, 7, 8]
        rates, medium_rates = [], []
        for count in counts:
            commands = max(LEAST_COMMANDS, int(count * drive_rate * (0.2 if setting.quick else 1.0)))
            # Each drive gets the same number of commands.
            commands = -(-commands // (count * STRIPE_BLOCKS)) * count * STRIPE_BLOCKS
            bench = _bench(count, commands, opcode)
            row = rate_of(bench, f"{count} drives", items(bench.items), _shuffled(commands), opcode, depth=128)
            rates.append(1e6 * row.rate)
            medium_rates.append(medium_rate(bench, items(bench.items), _shuffled(commands), write=write))
        parts = [rate / (count * drive_rate) for count, rate in zip(counts, rates, strict=True)]
        checks = [
            shapes.rises("rises with every drive", rates),
            shapes.linear("near linear in the drives", counts, rates, 0.75),
            shapes.ratio("rate at 7 to 8 drives, of the drives' own", parts[-1], _document_part(document, write), 1.3),
        ]
        alone = [rate / (count * drive_rate) for count, rate in zip(counts, medium_rates, strict=True)]
        instrument = shapes.between("the drives alone reach their rates", min(alone), 0.9)
        bend = next((f"bends at {c}" for c, part in zip(counts, parts, strict=True) if part < 0.8), "no bend")
        text = f"{rates[0]:,.0f} to {rates[-1]:,.0f}/s for 1 to {counts[-1]} drives (emulated, 1/{slower}), {bend}"
        values = {"drives": counts, "commands_per_second": rates, "medium_alone": medium_rates}
        return Outcome(text, checks, values, instrument)

    return run


def _shuffled(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(4).permutation(count)


def _document_part(document: Document, write: bool) -> float:
    """Return the fraction of the rate of seven single drives that the document reaches."""
    numbers = document.numbers
    return float(numbers["rate"] / (numbers["drives"] * numbers["one_drive"]))


# -- graphs ---------------------------------------------------------------------------------------------------


def _edges(kind: str, scale: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the edges of a graph of 2**scale vertices by its shape."""
    rng = np.random.default_rng(7)
    count = 1 << scale
    if kind == "small-world":  # a ring whose vertices link to near vertices, and with one of ten links to any vertex
        first = np.repeat(np.arange(count), DEGREE)
        second = (first + np.tile(np.arange(1, 1 + DEGREE), count)) % count
        return first, np.where(rng.random(len(first)) < 0.1, rng.integers(0, count, len(first)), second)
    if kind == "communities":  # dense groups of 64 with few links between them, as an ego network
        first = rng.integers(0, count, DEGREE * count)
        inside = (first & ~63) | rng.integers(0, 64, len(first))
        return first, np.where(rng.random(len(first)) < 0.02, rng.integers(0, count, len(first)), inside)
    # a web crawl: most links go to near pages, all other links to popular pages
    first = rng.integers(0, count, DEGREE * count)
    near = np.clip(first + rng.geometric(0.02, len(first)) * rng.choice([-1, 1], len(first)), 0, count - 1)
    popular = (count * rng.random(len(first)) ** 6).astype(np.int64)
    return first, np.where(rng.random(len(first)) < 0.2, popular, near)


SHAPES = ("kron", "urand", "small-world", "communities", "web", "web-directed")
"""Shapes of graphs, as many as the document has data sets: synthetic, biomedical, social, web crawls. The last one is
directed and gets no components."""


def _graph(kind: str, scale: int, folder: Path) -> wg.Graph:
    path = folder / f"{kind}{scale}.ww"
    if path.exists():
        return wg.Graph.open(path)
    if kind in ("kron", "urand"):
        return wg.generate(kind, scale, path, degree=DEGREE, order="given")
    made = _edges(kind.split("-")[0], scale)
    return wg.build([made], path, vertices=1 << scale, undirected=not kind.endswith("directed"))


def _sources(graph: wg.Graph, count: int) -> list[int]:
    """Return vertices with more than two neighbors, as the document chooses its sources."""
    degrees = graph.degrees()
    return [int(v) for v in np.random.default_rng(27).choice(np.flatnonzero(degrees > 2), count)]


class EveryEdge(components._Components):
    """Connected components without a guess of the largest one, so that the edges of all vertices are read.

    This is the algorithm of the document.
    """

    def run(self, run: Run, report: Callable[[str, int, int], None]) -> None:
        """Link all vertices with all neighbors."""
        loaded, vertices = self.loaded, self.graph.vertices
        state = loaded.heads, loaded.offsets, self.parents, vertices, self.counters
        run.launch(components._link_heads, vertices, *state)
        self._link_outside(run, -1)


class Stored:
    """The edges of a graph on emulated drives, with a cache of a quarter of their bytes."""

    def __init__(self, graph: wg.Graph, medium: Medium, page_size: int = 4096) -> None:
        data = np.load(graph.edges_path, mmap_mode="r")
        self._context = opened(medium, data, data.nbytes // 4, page_size, threads=2)
        self.edges = self._context.__enter__()
        self._loaded = wg.LoadedGraph(graph, edges=self.edges)

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *details: Any) -> None:
        self._loaded.close()
        self._context.__exit__(*details)

    def seconds(self, algorithm: str, sources: list[int], expected: NDArray[Any] | None = None) -> float:
        """Return the mean seconds of an algorithm from an empty cache; compare its last result with the expected."""
        times = []
        for source in _starts(algorithm, sources):
            self.edges.evict()
            seconds, found = _run(self._loaded, algorithm, source)
            times.append(seconds)
        assert expected is None or np.array_equal(found, expected), f"{algorithm}: storage and host memory differ"
        return statistics.mean(times)


def _starts(algorithm: str, sources: list[int]) -> list[int]:
    """Return the source of each run: components do not have a source and are computed once."""
    return sources if algorithm == "bfs" else sources[:1]


def _run(loaded: wg.LoadedGraph, algorithm: str, source: int) -> tuple[float, NDArray[Any]]:
    """Return the seconds of an algorithm, and its result for every vertex."""
    if algorithm == "bfs":
        levels = wg.bfs(loaded, source)
        return levels.seconds, np.asarray(levels.values)
    labels = measure(EveryEdge(loaded), loaded, None)
    return labels.seconds, np.asarray(labels.values)


def _target(graph: wg.Graph, algorithm: str, sources: list[int]) -> tuple[float, NDArray[Any]]:
    """Return the mean seconds of an algorithm in host memory, and its last result."""
    with wg.LoadedGraph(graph, device="cpu", tier="host") as loaded:
        _run(loaded, algorithm, sources[0])  # compiles
        found = [_run(loaded, algorithm, source) for source in _starts(algorithm, sources)]
    return statistics.mean(seconds for seconds, _ in found), found[-1][1]


def _algorithms(kind: str) -> Iterator[str]:
    yield "bfs"
    if kind != "web-directed":
        yield "cc"


def graphs(setting: Setting, document: Document) -> Outcome:
    """Compare BFS and CC from one drive with a target that first loads the graph into host memory."""
    scale, count = (13, 2) if setting.quick else (16, 4)
    ratios: dict[str, list[float]] = {"bfs": [], "cc": []}
    values: dict[str, Any] = {}
    for kind in SHAPES:
        graph = _graph(kind, scale, setting.folder)
        sources = _sources(graph, count)
        data = np.load(graph.edges_path)
        drive = slowed(RamMedium(data), GRAPH_SLOWER)
        began = time.perf_counter()
        drive.read(0, data.nbytes)
        load = time.perf_counter() - began
        # Searches from storage read the first neighbors of all vertices, too, before their time starts.
        heads = load * graph.heads_path.stat().st_size / data.nbytes if graph.in_edges else 0.0
        with Stored(graph, drive) as stored:
            stored.seconds("bfs", sources[:1])  # compiles for the first shape, and warms up for all others
            for algorithm in _algorithms(kind):
                compute, expected = _target(graph, algorithm, sources)
                seconds = stored.seconds(algorithm, sources, expected) + heads
                ratios[algorithm].append((load + compute) / seconds)
                values[f"{kind}/{algorithm}"] = {"storage_s": seconds, "load_s": load, "host_s": compute}
    checks = [
        shapes.ratio(
            f"{name}: host memory with loading over storage, mean", statistics.mean(found), document.numbers[name], 4
        )
        for name, found in ratios.items()
    ]
    checks += [
        shapes.between(f"{name}: every shape", extreme, document.numbers[name] / 4, document.numbers[name] * 4)
        for name, found in ratios.items()
        for extreme in (min(found), max(found))
    ]
    text = "; ".join(f"{n.upper()} {statistics.mean(f):.2f}x ({min(f):.2f} to {max(f):.2f})" for n, f in ratios.items())
    return Outcome(f"{text}, {len(SHAPES)} shapes, drive emulated (1/{GRAPH_SLOWER})", checks, values)


LINE_SHAPES = ("urand", "communities", "kron")
"""Shapes of graphs on which line sizes are compared; the document's numbers are means over its graphs, too."""


def line_sizes(setting: Setting, document: Document) -> Outcome:
    """Compare line sizes of 512 B, 4 KiB and 8 KiB on one drive."""
    sizes = (512, 4096, 8192)
    ratios: dict[tuple[str, int], list[float]] = {(name, size): [] for name in ("bfs", "cc") for size in sizes}
    for kind in LINE_SHAPES:
        # # keep the sizes of neighbor lists and cache in lines of 4 KiB, because a larger graph would be another
        # experiment
        graph = _graph(kind, 14, setting.folder)
        data, sources = np.load(graph.edges_path), _sources(graph, 2 if setting.quick else 6)
        seconds: dict[tuple[str, int], float] = {}
        for size in sizes:
            with Stored(graph, slowed(RamMedium(data), GRAPH_SLOWER), size) as stored:
                seconds |= {(name, size): stored.seconds(name, sources) for name in ("bfs", "cc")}
        for name, size in seconds:
            ratios[name, size].append(seconds[name, size] / seconds[name, 4096])
    checks, texts = [], []
    for name in ("bfs", "cc"):
        small, large = statistics.mean(ratios[name, 512]), statistics.mean(ratios[name, 8192])
        checks.append(shapes.between(f"{name}: 512 B is slower than 4 KiB", small, 1.1))
        checks.append(shapes.ratio(f"{name}: time at 512 B over 4 KiB", small, document.numbers[name], 2))
        checks.append(shapes.ratio(f"{name}: time at 8 KiB over 4 KiB", large, 1.0, 1.25))
        texts.append(f"{name.upper()} {small:.2f}x at 512 B, {large:.2f}x at 8 KiB")
    values = {f"{name}/{size}": found for (name, size), found in ratios.items()}
    text = f"{'; '.join(texts)}, mean of {len(LINE_SHAPES)} shapes"
    return Outcome(f"{text} (emulated, 1/{GRAPH_SLOWER})", checks, values)


def replicas(setting: Setting, document: Document) -> Outcome:
    """Search a graph that is replicated on more and more drives; and striped, which the document does not show."""
    graph = _graph("urand", 13 if setting.quick else 16, setting.folder)
    data, sources = np.load(graph.edges_path), _sources(graph, 2)
    counts = [1, 2, 4] if setting.quick else [1, 2, 4, 8]
    checks, texts, values = [], [], {}
    for layout, make in (("replicated", replicated), ("striped", striped)):
        for name in ("bfs", "cc") if layout == "replicated" else ("bfs",):
            times = []
            for count in counts:
                with Stored(graph, make(data, count, 2 * GRAPH_SLOWER)) as stored:
                    times.append(stored.seconds(name, sources))
            gains = [times[0] / t for t in times]
            values[f"{layout}/{name}"] = times
            checks.append(shapes.between(f"{name}, {layout}: scales to two drives", gains[1], 1.5))
            checks.append(shapes.rises(f"{name}, {layout}: never slower with more drives", gains, 0.1))
            texts.append(f"{name.upper()} {layout} {' '.join(f'{g:.2f}x' for g in gains[1:])}")
    text = f"{'; '.join(texts)} on {', '.join(map(str, counts[1:]))} drives (emulated, 1/{2 * GRAPH_SLOWER})"
    text += "; only the gain of two is judged: slow drives do not outrun the requests of a graph"
    return Outcome(text, checks, values)


def page_faults(setting: Setting, document: Document) -> Outcome:
    """Report that BaM's measurement of unified memory cannot run."""
    raise Unavailable("needs a GPU with unified memory: its driver's page faults are what the figure measures")


EXPERIMENTS = [
    Experiment("bam/threads", threads),
    Experiment("bam/drives-read", drives(READ)),
    Experiment("bam/drives-write", drives(WRITE)),
    Experiment("bam/graphs", graphs),
    Experiment("bam/lines", line_sizes),
    Experiment("bam/replicas", replicas),
    Experiment("bam/page-faults", page_faults),
]
