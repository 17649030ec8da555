"""A program that enters no device: its launches and arrays are on the first one, in another process."""

import os
from pathlib import Path

import numpy as np

import warpwell as ww
from warpwell import gpu


@ww.kernel
def in_degree(edges, degree):
    i = gpu.grid(1)
    if i < edges.size:
        gpu.atomic_add(degree, edges[i], 1)


degree, path = np.zeros(10, np.int64), Path("placing.npy")
path.unlink(missing_ok=True)
with ww.create(path, 1000, np.int64) as edges:
    edges[:] = np.arange(1000) % 10
with ww.open(path, cache="64KiB", stats="full") as edges:
    in_degree[edges.size](edges, degree)
    print(degree.tolist(), edges.stats.bytes_wanted, edges[995:].tolist())
in_degree[10](np.arange(10), degree)
with ww.open(path, device="cpu") as edges:
    in_degree[edges.size](edges, degree)
print(degree.tolist(), ww.to_device(degree).copy_to_host().sum(), ww.current_device().index)
launches = ww.current_device().trace().get("LAUNCH", (0,))[0]
assert launches == (0 if ww.current_device().process == os.getpid() else 2), launches
