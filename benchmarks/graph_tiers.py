"""Traversals of GAP's graphs in each tier: where the time goes between device memory and storage.

``python benchmarks/graph_tiers.py --folder /dev/shm --scale 23`` on a machine with a GPU and CuPy. Edges of the storage
tiers lie in the folder; the cache has a quarter of their bytes. Graphs of GAP's kinds, of other draws, are made
on the GPU, which takes seconds; with ``--exact``, `warpwell.graph.generate` makes GAP's own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import machine, save, table

from warpwell import default_device
from warpwell import graph as wg

TIERS = ("device", "host", "host-cached", "storage")


def generate_on_gpu(kind: str, scale: int, out: Path, degree: int = 16) -> wg.Graph:
    """Make a graph like GAP's with weights from 1 to 255, on the GPU."""
    import cupy as cp

    n, m = 1 << scale, degree << scale
    random = cp.random.default_rng(1)
    if kind == "urand":
        u, v = (random.integers(0, n, m, dtype=cp.int64) for _ in range(2))
    else:
        u, v = cp.zeros(m, cp.int64), cp.zeros(m, cp.int64)
        for _ in range(scale):
            draw = random.random(m, dtype=cp.float32)
            u = 2 * u + (draw >= 0.76)
            v = 2 * v + (((draw >= 0.57) & (draw < 0.76)) | (draw >= 0.95))
        names = cp.argsort(random.random(n, dtype=cp.float32))
        u, v = names[u], names[v]
    keep = u != v
    u, v = u[keep], v[keep]
    keys = cp.concatenate([(u << scale) | v, (v << scale) | u])
    del u, v, keep
    keys.sort()
    keys = keys[cp.concatenate([cp.ones(1, bool), keys[1:] != keys[:-1]])]
    sources, destinations = keys >> scale, keys & (n - 1)
    low, high = cp.minimum(sources, destinations), cp.maximum(sources, destinations)
    weights = 1 + ((low * 0x9E3779B1 + high * 0x85EBCA77) >> 7) % 255
    out.mkdir()
    np.save(out / "offsets.npy", cp.searchsorted(sources, cp.arange(n + 1)).astype(cp.int64).get())
    np.save(out / "edges.npy", destinations.astype(cp.int32).get())
    np.save(out / "weights.npy", weights.astype(cp.int32).get())
    meta = {
        "format": "warpwell graph", "version": 2, "vertices": n, "edges": int(keys.size), "undirected": True,
        "source": f"{kind} scale={scale} degree={degree} (CuPy)", "destinations": "int32", "weights": "int32",
        "in_edges": True,
    }  # fmt: skip
    (out / "graph.json").write_text(json.dumps(meta))
    del keys, sources, destinations, low, high, weights
    cp.get_default_memory_pool().free_all_blocks()
    return wg.Graph.open(out)


def sources_of(graph: wg.Graph, count: int) -> list[int]:
    """Return vertices with more than two neighbours, from a seed."""
    degrees = np.diff(graph.load()[0])
    return [int(v) for v in np.random.default_rng(27).choice(np.flatnonzero(degrees > 2), count)]


def measure_tier(graph: wg.Graph, tier: str, sources: list[int], **options: Any) -> dict[str, Any]:
    """Return mean milliseconds of each algorithm in a tier."""
    cache = max(1 << 20, 4 * graph.edges // 4)
    begun = time.perf_counter()
    with wg.LoadedGraph(graph, tier=tier, cache=cache, **options) as loaded:
        found: dict[str, Any] = {"loading_s": time.perf_counter() - begun}
        for name, run in algorithms(loaded):
            run(sources[0])
            results = [run(source) for source in (sources if name in ("bfs", "sssp") else sources[:3])]
            found[name] = 1e3 * float(np.mean([r.seconds for r in results]))
            found[f"{name}_read_MB"] = float(np.mean([r.stats.bytes_read for r in results])) / 1e6
    return found


def algorithms(loaded: wg.LoadedGraph) -> list[tuple[str, Any]]:
    """Return what is measured, by name."""
    return [
        ("bfs", lambda source: wg.bfs(loaded, source)),
        ("components", lambda source: wg.connected_components(loaded)),
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None, help="where the graphs are put (default: a temporary folder)")
    parser.add_argument("--scale", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=["kron", "urand"])
    parser.add_argument("--tiers", nargs="+", default=list(TIERS))
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--threads", type=int, default=14, help="service threads of the cache")
    parser.add_argument("--device", default=None)
    parser.add_argument("--exact", action="store_true", help="GAP's own graphs, by warpwell.graph.generate")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(options.device or default_device())}
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            begun = time.perf_counter()
            path = Path(folder) / f"{kind}.ww"
            graph = (
                wg.generate(kind, options.scale, path, weights="int32")
                if options.exact
                else generate_on_gpu(kind, options.scale, path)
            )
            print(f"{kind} {options.scale}: {graph.edges:,} edges, made in {time.perf_counter() - begun:.1f} s")
            rows = []
            for tier in options.tiers:
                picked = sources_of(graph, options.sources)
                found = measure_tier(graph, tier, picked, device=options.device, threads=options.threads)
                results[f"{kind} {tier}"] = found
                rows.append([tier, *(f"{value:.4g}" for value in found.values())])
            table(f"{kind} {options.scale}, ms", ["tier", *found], rows)
    if options.json:
        save(options.json, results)


if __name__ == "__main__":
    main()
