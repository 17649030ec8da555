"""Search a graph whose edges stay on storage: with the library, and with a kernel of your own.

Run it with ``python graph_search.py``; it needs no input and no GPU.
"""

import tempfile
from pathlib import Path

import numpy as np

import warpwell as ww
from warpwell import gpu
from warpwell.graph import LoadedGraph, bfs, connected_components, generate


@ww.kernel
def advance(edges, offsets, levels, level, changed):
    """Visit the neighbors of the vertices on one level, with one thread per vertex."""
    v = gpu.grid(1)
    if levels[v] != level:
        return
    for at in range(offsets[v], offsets[v + 1]):
        neighbor = edges[at]  # from the cache, or from storage
        if levels[neighbor] == -1:
            levels[neighbor] = level + 1  # concurrent threads write the same value
            changed[0] = 1


def search(loaded, source):
    """Return the level of each vertex, -1 if it is not reached."""
    levels = np.full(loaded.graph.vertices, -1)
    levels[source] = 0
    changed = np.ones(1, np.int64)
    level = 0
    while changed[0]:
        changed[0] = 0
        advance[levels.size](loaded.edges, loaded.offsets, levels, level, changed)
        level += 1
    return levels


def main():
    with tempfile.TemporaryDirectory() as folder:
        # A Kronecker graph of the GAP benchmark. `convert` makes one from an edge list instead. The kernel above uses
        # the numbers of stored vertices, which results also use with order="given".
        graph = generate("kron", 13, Path(folder) / "kron.ww", degree=8, order="given")
        source = int(np.argmax(np.diff(graph.load()[0])))

        with LoadedGraph(graph, cache="64KiB", stats="full") as loaded:
            found = bfs(loaded, source)
            components = connected_components(loaded)
            levels = search(loaded, source)

    print(f"{graph.edges:,} edges, {8 * graph.edges:,} bytes, behind a cache of 65,536 bytes")
    print(f"from {source}: {found.count:,} of {graph.vertices:,} vertices, depth {found.rounds}")
    print(f"{components.count:,} components")
    stats = found.stats
    print(f"wanted {stats.bytes_wanted:,} bytes, read {stats.bytes_read:,}: {stats.io_amplification:.1f} times")

    assert np.array_equal(found.values, levels)
    # the vertices that a search reaches are the component of the source
    assert np.array_equal(found.values >= 0, components.values == components.values[source])
    assert stats.misses > 0
    assert stats.evictions > 0


if __name__ == "__main__":
    main()
