"""Kernels shared by the array tests, so that each is compiled once."""

from __future__ import annotations

from typing import Any

import numpy as np

from warpwell.array import atomic_add
from warpwell.targets import kernel
from warpwell.targets.primitives import clock_ns, failed, grid

PAGE = 512
DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "c8", "c16", "M8[us]")
RECORD = np.dtype([("id", "u1"), ("x", "f4"), ("v", "f8", (3,)), ("in", [("a", "i2"), ("h", "f2")])])
"""Packed: its fields are not aligned."""
ADDABLE = ("i4", "u4", "i8", "u8", "f4", "f8")


@kernel
def read(a, index, out):
    i = grid(1)
    out[i] = a[index[i]]


@kernel
def fields_of_records(a, out):
    i = grid(1)
    inner = a["in"]
    v = a["v"]
    out[i, 0], out[i, 1], out[i, 2], out[i, 3] = a["x"][i], v[i, 2], inner["a"][i], inner["h"][i]
    out[i, 4] = len(inner) + v.size
    a["x"][i] = -1.5
    inner["h"][i] = v[i, 0]


@kernel
def unknown_field(a, out):
    out[0, 0] = a["y"][0]


@kernel
def write(a, index, values):
    i = grid(1)
    a[index[i]] = values[i]


@kernel
def add(a, index, values):
    i = grid(1)
    atomic_add(a, index[i], values[i])


@kernel
def old_values(a, out):
    i = grid(1)
    out[i] = atomic_add(a, 0, 1)


@kernel
def transfer2(a, b, extents):
    i, j = grid(2)
    extents[0], extents[1], extents[2] = len(a), a.shape[1], a.size
    b[i, j] = a[i, j]


@kernel
def transfer3(a, b, extents):
    i, j, k = grid(3)
    extents[0], extents[1], extents[2] = len(a), a.shape[2], a.size
    b[i, j, k] = a[i, j, k]


@kernel
def transfer4(a, b, extents):
    t = grid(1)
    n = a.shape[3]
    m = a.shape[2] * n
    i = t // (a.shape[1] * m)
    j = t // m % a.shape[1]
    extents[0], extents[1], extents[2] = len(a), a.shape[3], a.size
    b[i, j, t // n % a.shape[2], t % n] = a[i, j, t // n % a.shape[2], t % n]


@kernel
def read2(a, i, j, out):
    out[0] = a[i, j]


@kernel
def mark3(out):
    i, j, k = grid(3)
    atomic_add(out, (i, j, k), 1 + i + 10 * j + 100 * k)


@kernel
def total(a, step, rounds, out):
    """One thread reads every `step`-th item, several times."""
    for _ in range(rounds):
        for i in range(0, a.size, step):
            out[0] += a[i]


@kernel
def scan_beside(hot, scanned, step, out):
    """One thread reads pages of one array twice each, and between them always the same item of another."""
    for i in range(0, scanned.size, step):
        out[0] += scanned[i] + scanned[i + 1]
        out[1] += hot[0]


@kernel
def ask_for(a, index, out):
    i = grid(1)
    out[i] = 0
    if a.prefetch(index[i]):
        out[i] = 1


@kernel
def hold(a, index, out):
    """One thread pins pages, as many as it gets."""
    for k in range(index.size):
        out[k] = 0
        if a.pin(index[k]):
            out[k] = 1


@kernel
def release(a, index, held):
    for k in range(index.size):
        if held[k] == 1:
            a.unpin(index[k])


@kernel
def stop_when_failed(a, out):
    i = grid(1)
    if i == 0:
        out[0] = a[a.size]
    if i == 255:
        since = clock_ns()
        while not failed():
            if clock_ns() - since > 20_000_000_000:
                return
        out[1] = 1


@kernel
def occupy(nanoseconds):
    """Occupy a stream for so long.

    `torch.cuda._sleep` counts cycles of the GPU, which restart at zero if a kernel of any process faults: it then
    lasts as long as the GPU has been up.
    """
    since = clock_ns()
    while clock_ns() - since < nanoseconds:
        pass


def values_of(dtype: str, n: int, seed: int = 1) -> Any:
    """Return `n` random values of a dtype, extremes included."""
    dt = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dt.kind == "b":
        return rng.integers(0, 2, n).astype(dt)
    if dt.kind in "iu":
        info = np.iinfo(dt)
        out = rng.integers(info.min, info.max, n, dt, endpoint=True)
        out[:2] = info.min, info.max
        return out
    if dt.kind == "M":
        return rng.integers(-(10**15), 10**15, n).astype(dt)
    if dt.kind == "c":
        return (rng.normal(size=n) + 1j * rng.normal(size=n)).astype(dt)
    out = rng.normal(size=n).astype(dt)
    out[:3] = np.inf, -0.0, np.finfo(dt).tiny
    return out
