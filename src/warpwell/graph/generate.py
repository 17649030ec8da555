"""The graphs of the GAP benchmark, generated at any scale: ``generate``."""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpwell._check import checked_integer
from warpwell.array.gather import WorkerGroup, in_order
from warpwell.errors import ArgumentError
from warpwell.graph.build import build, checked_weights
from warpwell.graph.external import Edges, Vertices
from warpwell.graph.graph import Graph, Progress

KINDS = ("kron", "urand")
"""Kinds of graphs: Kronecker (R-MAT) and uniformly random."""

# GAP's constants (src/util.h, src/generator.h): each block of edges has a random stream of its own.
_GAP_SEED = 27491095
_GAP_BLOCK = 1 << 18
_A, _B, _C = np.float32(0.57), np.float32(0.19), np.float32(0.19)
# Number of edges drawn at a time: the draws fit into the processor's cache.
_PART = 1 << 14
# Factor that spreads seeds (2**32 divided by the golden ratio, odd): close seeds would share most of their blocks.
_SPREAD = 0x9E3779B1


def generate(
    kind: str,
    scale: int,
    out: str | Path,
    *,
    degree: int = 16,
    seed: int = 0,
    undirected: bool = True,
    self_loops: bool = False,
    order: str = "degree",
    weights: str | None = None,
    in_edges: bool = False,
    memory_bytes: int | str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Generate a graph of the GAP benchmark on disk.

    The graph has ``2**scale`` vertices and is made from ``degree * 2**scale`` edges as in "The GAP
    Benchmark Suite" (Beamer, Asanovic, Patterson, 2015; generator.h and builder.h of its code): GAP adds
    the reverse of each edge and removes repeated edges and self-loops, and so do the defaults here. The
    graph depends on kind, scale, degree and seed only, not on the memory or the number of processors.

    With seed 0, GAP 0.7 to 1.4 draws the same random numbers if it is built with GCC's standard library of versions 11
    to 15 (``std::mt19937``, a stream for each block of 2**18 edges; GAP 1.5 maps the same draws to other values). So
    ``urand`` and weights of int32 are equal to GAP's. ``kron`` is GAP's graph with other vertex numbers: GAP shuffles
    them with ``std::shuffle``, Warpwell with NumPy's ``RandomState.permutation``.

    Parameters
    ----------
    kind : {"kron", "urand"}
        Kronecker graph (R-MAT with A = 0.57, B = C = 0.19, vertices renamed at random), or edges between
        uniformly random vertices.
    scale : int
        Binary logarithm of the number of vertices, 1 to 31.
    out : path-like
        Folder of the graph, usually ``NAME.ww``.
    degree : int, default 16
        Number of edges that are generated per vertex.
    seed : int, default 0
        Another seed gives another graph; 0 to 2**32 - 1.
    undirected : bool, default True
        Add the reverse of each edge, then keep each edge once. Otherwise all generated edges are kept, including
        repeated ones.
    weights : {"int32", "float32"}, optional
        Give each edge a random weight: an integer from 1 to 255, or a multiple of 2**-24 above 0, up to 1.
    self_loops, order, in_edges, memory_bytes, progress, overwrite
        See `build`. The shuffling of the vertices of ``kron`` needs 8 more bytes per vertex.

    Raises
    ------
    ArgumentError
        `out` already exists, or an argument is out of range.
    StorageFullError
        No space is left; no file remains.
    """
    if kind not in KINDS:
        raise ArgumentError(f"kind is {kind!r}. Known are {' and '.join(KINDS)}.", name="kind")
    checked_integer(scale, "scale", maximum=31)
    checked_integer(degree, "degree", maximum=1 << 20)
    checked_integer(seed, "seed", minimum=0, maximum=2**32 - 1)

    def report(stage: str, done: int, entries: int) -> None:
        if progress is not None:
            progress("generate" if stage == "read" else stage, done, entries or degree << scale + undirected)

    return build(
        random_edges(kind, scale, degree=degree, seed=seed, weights=checked_weights(weights)),
        out,
        vertices=1 << scale,
        undirected=undirected,
        self_loops=self_loops,
        order=order,
        source=f"{kind} scale={scale} degree={degree} seed={seed}",
        weights=weights,
        in_edges=in_edges,
        memory_bytes=memory_bytes,
        progress=report,
        overwrite=overwrite,
    )


Maker = Callable[[np.random.RandomState, int], Edges]
Weigher = Callable[[np.random.RandomState, int], npt.NDArray[Any]]


def random_edges(
    kind: str, scale: int, *, degree: int = 16, seed: int = 0, weights: str | None = None
) -> Iterator[Edges]:
    """Yield the generated edges of a GAP graph, including repeated ones and self-loops, in a fixed order.

    Several threads generate chunks of at most 2**18 edges: NumPy releases the global interpreter lock. Parameters are
    those of `generate`.
    """
    make = _kron(scale, seed) if kind == "kron" else _urand(scale)
    edges, first = degree << scale, _GAP_SEED + seed * _SPREAD

    def block(index: int) -> Edges:
        # RandomState seeds as std::mt19937 does, and its streams are the same in all versions of NumPy.
        number, count = (first + index) % 2**32, min(_GAP_BLOCK, edges - index * _GAP_BLOCK)
        made = make(np.random.RandomState(number), count)
        # GAP begins the block's stream again for its weights.
        return made if weights is None else (*made, _WEIGHERS[weights](np.random.RandomState(number), count))

    threads = min(len(os.sched_getaffinity(0)), 16)
    calls = (partial(block, index) for index in range(-(-edges // _GAP_BLOCK)))
    yield from in_order(calls, WorkerGroup(threads), 2 * threads)


def _urand(scale: int) -> Maker:
    def make(stream: np.random.RandomState, count: int) -> Edges:
        # For a power of two, std::uniform_int_distribution gives the upper bits of a draw.
        draws = _draws(stream, 2 * count) >> np.uint32(32 - scale)
        return draws[0::2].astype(np.int64), draws[1::2].astype(np.int64)

    return make


def _kron(scale: int, seed: int) -> Maker:
    # `std::uniform_real_distribution<float>` is a draw divided by 2**32 and kept below 1; it only grows
    # with the draw, so the comparisons of floats that choose a quadrant are comparisons of draws.
    right_above = _first_draw(lambda point: point > _A)
    below = _first_draw(lambda point: not point < _A + _B)
    right_below = _first_draw(lambda point: point > _A + _B + _C)
    # The seed before the first block's, so that no block draws from this stream.
    stream = np.random.RandomState((_GAP_SEED - 1 + seed * _SPREAD) % 2**32)
    names: Vertices = stream.permutation(1 << scale)

    def part(stream: np.random.RandomState, count: int) -> Any:
        draws = _draws(stream, count * scale).reshape(count, scale)
        # A draw for each edge and level, the highest bit first; 32 flags in a row pack into a vertex.
        bits = np.zeros((2, count, 32), bool)
        bits[0, :, 32 - scale :] = draws >= below
        bits[1, :, 32 - scale :] = (draws >= below) ^ (draws >= right_above) ^ (draws >= right_below)
        return names[np.packbits(bits).view(">u4").reshape(2, count)]

    def make(stream: np.random.RandomState, count: int) -> Edges:
        parts = [part(stream, min(_PART, count - start)) for start in range(0, count, _PART)]
        sources, destinations = np.concatenate(parts, axis=1)
        return sources, destinations

    return make


def _integer_weights(stream: np.random.RandomState, count: int) -> npt.NDArray[Any]:
    draws = _draws(stream, count)
    while not draws.all():
        # GCC's std::uniform_int_distribution(1, 255) rejects the draw 0.
        draws = draws[draws != 0]
        draws = np.concatenate([draws, _draws(stream, count - draws.size)])
    return (1 + (draws.astype(np.uint64) * np.uint64(255) >> np.uint64(32))).astype(np.int32)


def _float_weights(stream: np.random.RandomState, count: int) -> npt.NDArray[Any]:
    return ((_draws(stream, count) >> np.uint32(8)) + np.uint32(1)).astype(np.float32) * np.float32(2**-24)


_WEIGHERS: dict[str, Weigher] = {"int32": _integer_weights, "float32": _float_weights}


def _draws(stream: np.random.RandomState, count: int) -> npt.NDArray[np.uint32]:
    return stream.randint(0, 2**32, size=count, dtype=np.uint32)


def _first_draw(test: Callable[[np.float32], object]) -> np.uint32:
    """Return the smallest draw whose point in [0, 1) passes a test that all later ones pass too."""
    below_one = np.nextafter(np.float32(1), np.float32(0))

    def passes(draw: int) -> bool:
        return bool(test(min(np.float32(draw) / np.float32(2**32), below_one)))

    return np.uint32(bisect_left(range(2**32), True, key=passes))
