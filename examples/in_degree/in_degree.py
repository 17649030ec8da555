"""Count how often each vertex is named in a file of edges, through a cache that is much smaller than the file.

Run it with ``python in_degree.py``; it needs no input and no GPU.
"""

import tempfile
from pathlib import Path

import numpy as np

import warpwell as ww
from warpwell import gpu


@ww.kernel
def in_degree(edges, degree):
    i = gpu.grid(1)
    if i < edges.size:
        gpu.atomic_add(degree, edges[i], 1)  # edges[i] comes from the cache, or from storage


def main():
    vertices = 1000
    destinations = np.random.default_rng(0).integers(0, vertices, 2_000_000)
    degree = np.zeros(vertices, np.int64)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "edges.npy"
        np.save(path, destinations)
        with ww.open(path, cache="1MiB", stats="full") as edges:  # nothing is loaded
            in_degree[edges.size](edges, degree)
            stats = edges.stats

    print(f"{destinations.nbytes:,} bytes of edges behind a cache of 1 MiB")
    print(f"{stats.hits:,} hits, {stats.misses:,} misses, {stats.evictions:,} evictions")
    print(f"read {stats.bytes_read:,} bytes for {stats.bytes_wanted:,} wanted: {stats.io_amplification:.2f} times")

    assert np.array_equal(degree, np.bincount(destinations, minlength=vertices))
    assert stats.bytes_wanted == destinations.nbytes
    assert stats.evictions > 0


if __name__ == "__main__":
    main()
