"""Search a graph on all devices, each of which reads the edges from storage itself.

The first search distributes its vertices, and the devices exchange found vertices after each level. Then each device
searches from other vertices by itself. ``python pool_graph.py`` uses the devices of this machine, ``warpwell run
--agents 4 pool_graph.py`` four agents; it prints the same.
"""

import tempfile
from pathlib import Path

import numpy as np

import warpwell as ww
from warpwell import gpu

VERTICES, DEGREE, SOURCES = 3000, 6, 4


@ww.kernel
def expand(offsets, edges, depth, found, first, level):
    v = first + gpu.grid(1)
    if depth[v] == level:
        for e in range(offsets[v], offsets[v + 1]):
            found[edges[e]] = 1  # edges[e] comes from the device's cache, or from storage


@ww.kernel
def merge(found, remote):
    v = gpu.grid(1)
    found[v] |= remote[v]


@ww.kernel
def settle(depth, found, level, changed):
    v = gpu.grid(1)
    if found[v] and depth[v] < 0:
        depth[v] = level + 1
        gpu.atomic_add(changed, 0, 1)


def search(devices, parts, graphs, source):
    """Return the distance of each vertex from the source; device k expands part k of the vertices."""
    start = np.full(VERTICES, -1)
    start[source] = 0
    depths = [device.to_device(start) for device in devices]
    for level in range(VERTICES):
        found = [device.zeros(VERTICES, np.uint8) for device in devices]
        for k, part in enumerate(parts):
            offsets, edges = graphs[k]
            expand[len(part)](offsets, edges, depths[k], found[k], int(part[0]), level)
        merged, changed = [], []
        for k, device in enumerate(devices):
            merged.append(device.to_device(found[k]))
            for remote in found[:k] + found[k + 1 :]:
                merge[VERTICES](merged[k], device.to_device(remote))  # straight from the other device
            changed.append(device.zeros(1, np.int64))
            settle[VERTICES](depths[k], merged[k], level, changed[k])
        if changed[0].copy_to_host()[0] == 0:  # all devices know the same
            return depths[0].copy_to_host()
    raise AssertionError("a search ends")


def expected(offsets, edges, source):
    depth = np.full(VERTICES, -1)
    depth[source] = level = 0
    while (depth == level).any():
        near = np.concatenate([edges[offsets[v] : offsets[v + 1]] for v in np.flatnonzero(depth == level)])
        depth[near[depth[near] < 0]] = level = level + 1
    return depth


def main():
    devices = ww.devices()
    random = np.random.default_rng(0)
    degrees = random.integers(0, DEGREE, VERTICES)
    offsets = np.concatenate([[0], np.cumsum(degrees)])
    edges = random.integers(0, VERTICES, offsets[-1])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "edges.npy"
        np.save(path, edges)
        graphs = [(device.to_device(offsets), device.open(path, cache="64KiB")) for device in devices]
        depth = search(devices, np.array_split(np.arange(VERTICES), len(devices)), graphs, 0)
        print("vertices by distance from 0:", *np.bincount(depth + 1)[1:])
        assert np.array_equal(depth, expected(offsets, edges, 0))

        for source in range(1, SOURCES):
            k = source % len(devices)
            depth = search([devices[k]], [np.arange(VERTICES)], [graphs[k]], source)
            print(f"from {source}: {(depth >= 0).sum()} vertices within {depth.max()} steps")
            assert np.array_equal(depth, expected(offsets, edges, source))
        for _, array in graphs:
            array.close()


if __name__ == "__main__":
    main()
