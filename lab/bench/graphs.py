"""Graph algorithms in every tier, beside the GAP benchmark's own code on all cores, on the same graph, in one run.

Give the folder of GAP's sources with ``--gap`` (sbeamer/gapbs on GitHub; it needs a C++ compiler with OpenMP):
its converter makes the graph with its own generators and weights, its kernels run on it, and levels, distances,
components and scores are compared with ours. Without ``--gap``, `warpwell.graph.generate` makes the graph.

The cache has a quarter of the bytes of the edges. Tiers: ``device``, ``host`` (with the time of loading, and what it
reads of what the bus can give), ``host-cached``, ``storage`` (the file; put ``--folder`` on a tmpfs to leave drives out
of it), and emulated P5800X, striped (``--drives``).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.timing import kernel_seconds, machine, save, table
from warpwell import graph as wg
from warpwell.array import open_array
from warpwell.storage import DRIVES, Latency, RamMedium, Striped
from warpwell.targets import grid, kernel, load_relaxed_as, memory_for

DRIVE = DRIVES[0]
STRIPE = 1 << 16
I8 = np.dtype(np.int64)
DELTA = 16
"""Of delta-stepping, GAP's own for its weights of 1 to 255 on kron and urand."""

BEGUN = time.perf_counter()


def say(*parts: object) -> None:
    """Say what is done, and when."""
    print(f"[{time.perf_counter() - BEGUN:6.1f} s]", *parts, file=sys.stderr, flush=True)


# -- the graph, and GAP -----------------------------------------------------------------------------------------


class Gap:
    """GAP's programs, compiled from a folder of its sources.

    Parameters
    ----------
    sources : Path
        A checkout of gapbs.
    folder : Path
        Where the programs are put.
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
        """Return the path of a weighted graph that GAP's generator made."""
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


def taken(wsg: Path, out: Path, kind: str, scale: int) -> wg.Graph:
    """Make a graph of ours, and one of GAP's without weights beside it, from a weighted one of GAP's."""
    with wsg.open("rb") as file:
        directed = file.read(1) != b"\0"
        edges, vertices = (int(n) for n in np.fromfile(file, np.int64, 2))
        offsets = np.fromfile(file, np.int64, vertices + 1)
        pairs = np.fromfile(file, np.int32, 2 * edges).reshape(edges, 2)
    if directed:
        raise SystemExit("GAP made a directed graph")
    out.mkdir()
    destinations = np.ascontiguousarray(pairs[:, 0])
    np.save(out / "offsets.npy", offsets)
    np.save(out / "edges.npy", destinations)
    np.save(out / "weights.npy", np.ascontiguousarray(pairs[:, 1]))
    meta = {
        "format": "warpwell graph",
        "version": 2,
        "vertices": vertices,
        "edges": edges,
        "undirected": True,
        "source": f"GAP {kind} scale={scale}",
        "destinations": "int32",
        "weights": "int32",
        "in_edges": True,
    }
    (out / "graph.json").write_text(json.dumps(meta))
    with wsg.with_suffix(".sg").open("wb") as file:
        file.write(b"\0")
        np.array([edges, vertices]).tofile(file)
        offsets.tofile(file)
        destinations.tofile(file)
    return wg.Graph.open(out)


# -- ours -------------------------------------------------------------------------------------------------------


class OnDrives(wg.LoadedGraph):
    """A graph whose destinations lie on emulated drives, striped."""

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


def ways(drives: list[int]) -> dict[str, tuple[str, int]]:
    """Return the name, tier and number of emulated drives of what is measured."""
    plain = {tier: (tier, 0) for tier in ("device", "host", "host-cached", "storage")}
    return plain | {f"{n} x {DRIVE.name} (emulated)": ("storage", n) for n in drives}


def algorithms(sources: list[int], repeat: int) -> dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]]:
    """Return each algorithm, and the arguments of its runs."""
    found: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
        "bfs": (wg.bfs, [(source,) for source in sources]),
        "cc": (wg.connected_components, [()] * repeat),
    }
    if hasattr(wg, "pagerank"):  # GAP's tolerance and bound
        found["pr"] = (functools.partial(wg.pagerank, tolerance=1e-4, iterations=20), [()] * repeat)
    if hasattr(wg, "sssp"):
        found["sssp"] = (wg.sssp, [(source,) for source in sources[: max(1, len(sources) // 4)]])
    return found


def result_of(found: Any) -> np.ndarray:
    """Return what an algorithm found for each vertex."""
    for name in ("levels", "labels", "distances", "scores", "ranks"):
        if hasattr(found, name):
            return np.asarray(getattr(found, name))
    raise SystemExit(f"{type(found).__name__} has no result that is known here")


def measure_way(
    graph: wg.Graph, tier: str, drives: int, sources: list[int], options: argparse.Namespace, check: dict[str, Any]
) -> dict[str, Any]:
    """Return means of seconds, and of bytes read, of each algorithm in a tier."""
    kinds = {n: type("OnDrives", (OnDrives,), {"drives": n}) for n in (drives,)}
    maker = kinds[drives] if drives else wg.LoadedGraph
    given = {"threads": options.threads} if tier in ("storage", "host-cached") else {}
    cache = max(1 << 20, 4 * graph.edges // 4)
    begun = time.perf_counter()
    out: dict[str, Any] = {}
    with maker(graph, device=options.device, tier=tier, cache=cache, page_size=options.page_size, **given) as loaded:
        out["loading_s"] = time.perf_counter() - begun
        for name, (run, runs) in algorithms(sources, options.repeat).items():
            if name not in options.algorithms or (name in ("sssp", "pr") and tier not in options.all_in):
                continue
            try:
                result = run(loaded, *runs[0])  # compiles
                same(name, result_of(result), check)
                if loaded.edges.tier in ("storage", "host-cached"):
                    loaded.edges.evict()
                results = [run(loaded, *arguments) for arguments in runs]
            except Exception as error:
                if options.strict:
                    raise
                out[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
                say(tier, name, "FAILED:", out[f"{name}_failed"])
                continue
            times = [r.seconds for r in results]
            read = statistics.mean(r.stats.bytes_read for r in results)
            out[name] = {
                "ms": 1e3 * statistics.mean(times),
                "least_ms": 1e3 * min(times),
                "read_bytes": read,
                "GB_a_second": read / statistics.mean(times) / 1e9,
                "runs": len(times),
            }
            if drives:
                out[name]["of_the_drives"] = out[name]["GB_a_second"] / (drives * DRIVE.bandwidth / 1e9)
            say(tier, drives or "", name, f"{out[name]['ms']:.2f} ms, {read / 1e6:.0f} MB read")
    return out


def wanted_bytes(graph: wg.Graph, sources: list[int], options: argparse.Namespace) -> dict[str, float]:
    """Return the bytes that each algorithm asks for: what the host tier has to move over the bus, at least."""
    out = {}
    cache = max(1 << 20, 4 * graph.edges // 4)
    with wg.LoadedGraph(graph, device=options.device, tier="host-cached", cache=cache, stats="full") as loaded:
        for name, (run, runs) in algorithms(sources[:4], 1).items():
            if name in ("bfs", "cc"):
                found = [run(loaded, *arguments).stats.bytes_wanted or 0 for arguments in runs]
                out[name] = statistics.mean(found)
    return out


def same(name: str, found: np.ndarray, check: dict[str, Any]) -> None:
    """Raise unless a first result is that of the first tier, and agrees with GAP's."""
    if name in check:
        kept = check[name]
        equal = np.allclose(found, kept, rtol=1e-3, atol=1e-9) if name == "pr" else np.array_equal(found, kept)
        if not equal:
            raise SystemExit(f"{name}: the result differs from that of another tier")
        return
    check[name] = found
    path = None if check["folder"] is None else check["folder"] / f"{name}.0"
    if path is None or not path.exists():
        return
    gap = np.fromfile(path, np.float32 if name == "pr" else np.int32)
    if name == "bfs":  # their parents, our levels
        reached = found >= 0
        away = reached & (np.arange(len(found)) != check["source"])
        good = bool(np.array_equal(reached, gap >= 0) and np.all(found[gap[away]] + 1 == found[away]))
    elif name == "cc":
        good = bool(np.array_equal(found, gap))
    elif name == "sssp":
        infinite = gap >= np.iinfo(np.int32).max // 2
        ours = np.asarray(found, np.float64)
        reachable = np.isfinite(ours) & (ours >= 0) & (ours < 2**31 - 1)
        good = bool(np.array_equal(reachable, ~infinite) and np.array_equal(ours[reachable], gap[~infinite]))
    else:
        # GAP drops the rank of vertices without edges, ours goes to all: the vectors are proportional
        difference = float(np.abs(found / found.sum() - gap / gap.sum(dtype=np.float64)).sum())
        say(f"ranks differ from GAP's by {difference:.2g} in sum")
        good = difference < 2e-3
    check.setdefault("agrees", {})[name] = good
    if not good:
        raise SystemExit(f"{name}: the result differs from GAP's")


# -- the bus ----------------------------------------------------------------------------------------------------


@kernel
def _read(address, items, threads, total):
    """Add up items of host memory, neighbouring threads neighbouring items, past all caches but L2."""
    i = grid(1)
    found = 0
    while i < items:
        found += load_relaxed_as(address + 8 * i, I8)
        i += threads
    ww.atomic_add(total, 0, found)


def bus_rate(device: str, nbytes: int) -> float:
    """Return the GB a second of a kernel that reads pinned host memory: the ceiling of the host tier."""
    block = memory_for(device).allocate_shared(nbytes)
    block.words[:] = 1
    threads = 1 << 18 if device == "cuda" else 64
    total = np.zeros(1, np.int64)
    if device == "cuda":
        from numba import cuda

        total = cuda.to_device(total)
    seconds = kernel_seconds(_read, threads, block.address, nbytes // 8, threads, total, device=device)
    return nbytes / seconds / 1e9


# -- all of it --------------------------------------------------------------------------------------------------


def one_kind(
    kind: str, gap: Gap | None, folder: Path, options: argparse.Namespace, results: dict[str, Any]
) -> dict[str, Any]:
    """Measure a graph; the results so far are written after each tier."""
    begun = time.perf_counter()
    if gap is None:
        graph = wg.generate(kind, options.scale, folder / "graph.ww", degree=options.degree, weights="int32")
    else:
        graph = taken(gap.make(kind, options.scale, options.degree), folder / "graph.ww", kind, options.scale)
    degrees = np.diff(np.load(graph.offsets_path))
    picked = np.random.default_rng(27).choice(np.flatnonzero(degrees > 2), options.sources)
    sources = [int(v) for v in picked]
    out: dict[str, Any] = {"edges": graph.edges, "made_s": time.perf_counter() - begun, "tiers": {}}
    results[kind] = out
    say(f"{kind} {options.scale}: {graph.edges:,} edges, made in {out['made_s']:.0f} s")
    check: dict[str, Any] = {"folder": None, "source": sources[0]}
    if gap is not None:
        times = gap.run("driver", gap.folder / "graph.sg", gap.folder, *sources)
        times |= gap.run("sssp", gap.folder / "graph.wsg", gap.folder, DELTA, *sources[: max(1, len(sources) // 4)])
        out["GAP"] = {name: {"ms": 1e3 * statistics.mean(t), "least_ms": 1e3 * min(t)} for name, t in times.items()}
        check["folder"] = gap.folder
        say("GAP, ms:", {name: round(t["ms"], 2) for name, t in out["GAP"].items()})
    for name, (tier, drives) in ways(options.drives).items():
        if name.split()[0] in options.tiers or (drives and "drives" in options.tiers):
            try:
                out["tiers"][name] = measure_way(graph, tier, drives, sources, options, check)
            except Exception as error:
                if options.strict:
                    raise
                out["tiers"][name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                say(name, "FAILED:", out["tiers"][name]["failed"])
            save(options.json, results)
    out["agrees_with_GAP"] = check.get("agrees", {})
    host = out["tiers"].get("host", {})
    if "bfs" in host and options.bus:
        for name, nbytes in wanted_bytes(graph, sources, options).items():
            if name in host:
                host[name]["wanted_bytes"] = nbytes
                host[name]["of_the_bus"] = nbytes / host[name]["ms"] / 1e6 / results["bus_GB_a_second"]
    return out


def show(kind: str, found: dict[str, Any], scale: int) -> None:
    """Print the table of a graph."""
    names = ("bfs", "cc", "pr", "sssp")
    rows = []
    if "GAP" in found:
        rows.append(["GAP, all cores, in memory", "", *(_ms(found["GAP"], n) for n in names), "", ""])
    for way, figures in found["tiers"].items():
        rate = [f"{figures[n]['GB_a_second']:.3g}" if n in figures else "" for n in ("bfs", "cc")]
        rows.append([way, f"{figures.get('loading_s', 0):.2f}", *(_ms(figures, n) for n in names), *rate])
    head = ["where", "loading s", *(f"{n} ms" for n in names), "bfs GB/s", "cc GB/s"]
    table(f"{kind} {scale}, {found['edges']:,} edges, means", head, rows)
    tiers = found["tiers"]
    host, stored = tiers.get("host", {}), tiers.get("storage", {})
    for name in ("bfs", "cc"):
        if name in host and name in stored:
            ours, theirs = stored[name]["ms"], host[name]["ms"]
            loaded = (theirs + 1e3 * host["loading_s"]) / ours
            print(
                f"{name}: storage takes {ours / theirs:.2f} of host without its loading; host with its loading takes "
                f"{loaded:.2f} of storage; host moves {host[name].get('of_the_bus', 0.0):.2f} of the bus"
            )
        for way, figures in tiers.items():
            if "of_the_drives" in figures.get(name, {}):
                print(f"{name}, {way}: {figures[name]['of_the_drives']:.2f} of the drives' rate")
    device = tiers.get("device", {})
    for name in names:
        if name in device and name in found.get("GAP", {}):
            print(f"{name}: GAP takes {found['GAP'][name]['ms'] / device[name]['ms']:.2f} of device memory")
    print("equal to GAP's:", found["agrees_with_GAP"])


def _ms(figures: dict[str, Any], name: str) -> str:
    return f"{figures[name]['ms']:.4g}" if name in figures else "failed" if f"{name}_failed" in figures else ""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap", type=Path, default=None, metavar="FOLDER", help="sources of GAP")
    parser.add_argument("--folder", default=None, help="where the graphs are put (default: a temporary folder)")
    parser.add_argument("--scale", type=int, default=24)
    parser.add_argument("--degree", type=int, default=16)
    parser.add_argument("--kinds", nargs="+", default=["kron", "urand"])
    parser.add_argument("--tiers", nargs="+", default=["device", "host", "host-cached", "storage", "drives"])
    parser.add_argument("--algorithms", nargs="+", default=["bfs", "cc", "pr", "sssp"])
    parser.add_argument("--all-in", nargs="+", default=["device", "host", "storage"], help="tiers of pr and sssp")
    parser.add_argument("--drives", type=int, nargs="+", default=[4, 8], help="emulated drives")
    parser.add_argument("--sources", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5, help="runs of algorithms without a source")
    parser.add_argument("--threads", type=int, default=14, help="service threads")
    parser.add_argument("--page-size", type=int, default=4096)
    parser.add_argument("--device", default=ww.default_device())
    parser.add_argument("--no-bus", dest="bus", action="store_false", help="do not measure the bus")
    parser.add_argument("--strict", action="store_true", help="end with the first error")
    parser.add_argument("--quick", action="store_true", help="scale 18, 4 sources, 2 repeats")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.scale, options.sources, options.repeat = min(options.scale, 18), 4, 2
    results: dict[str, Any] = machine(options.device) | {"scale": options.scale, "sources": options.sources}
    results["bus_GB_a_second"] = bus = bus_rate(options.device, 1 << 30 if options.device == "cuda" else 1 << 25)
    say(f"a kernel reads pinned host memory at {bus:.1f} GB/s")
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            gap = None if options.gap is None else Gap(options.gap, Path(folder))
            one_kind(kind, gap, Path(folder), options, results)
        show(kind, results[kind], options.scale)
        save(options.json, results)


if __name__ == "__main__":
    main()
