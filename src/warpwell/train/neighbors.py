"""`Neighbors`: sampled neighbourhoods of batches of vertices, in a graph on storage.

Batch `number` is a function of the seed and of `number`, whoever computes it:

- vertices: positions ``batch * batch_size`` and on of the order of its epoch (`warpwell.kv.Permutation`);
- draws: 64-bit words of Philox, keyed by seed and number. NumPy keeps its raw words the same from version to version,
  which it does not promise of its distributions. Word w draws ``(w >> 32) * n >> 32`` of n.

Neighbours are drawn without repetition, for all vertices of a hop at once (R. W. Floyd's algorithm): for j from d - k
to d - 1, draw t of 0 to j; take t, or j where t was taken before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_flag, checked_integer
from ..graph import Graph
from ..kv import Permutation
from .source import FileSource

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Neighborhood:
    """The sampled neighbourhood of the vertices of a batch.

    Attributes
    ----------
    number : int
        Of the batch.
    nodes : ndarray of int64
        Vertices, each once: those of the batch first, then those of each hop.
    sources, targets : ndarray of int64
        Sampled edges, hop by hop, as positions in `nodes`: a vertex's neighbour, and the vertex.
    edges : ndarray of int64
        The same edges as places in the graph's file of edges.
    node_counts : list of int
        How many of `nodes` are of the batch, and of each hop.
    edge_counts : list of int
        How many edges are of each hop.
    """

    number: int
    nodes: Numbers
    sources: Numbers
    targets: Numbers
    edges: Numbers
    node_counts: list[int]
    edge_counts: list[int]

    @property
    def batch_size(self) -> int:
        """How many vertices the batch has."""
        return self.node_counts[0]


class Neighbors:
    """Neighbourhoods by the number of the batch: ``neighbors[number]``.

    Epoch e has the batches ``e * len(neighbors)`` to ``(e + 1) * len(neighbors) - 1``; there is no last epoch. Offsets
    and edges are read from storage as they are needed.

    Parameters
    ----------
    graph : Graph or path
        The neighbours of a vertex are those with an edge to it: a directed graph needs its in-edges.
    fanouts : sequence of int
        How many neighbours of a vertex are drawn at each hop, at most; -1 for all.
    batch_size : int
        Vertices of a batch.
    vertices : array of int, optional
        The vertices whose neighbourhoods are wanted, such as those with a label. Default: all.
    seed : int
    shuffle : bool
        If False, the vertices come in their order in each epoch.
    drop_last : bool
        Leave out an incomplete last batch of an epoch.

    Raises
    ------
    ArgumentError
    MissingFileError, FormatError
        The graph cannot be read, or has no in-edges.
    """

    def __init__(
        self,
        graph: Graph | str | Path,
        fanouts: Sequence[int],
        batch_size: int,
        *,
        vertices: Any = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.graph = graph if isinstance(graph, Graph) else Graph.open(graph)
        if not (self.graph.in_edges or self.graph.undirected):
            raise errors.FormatError(
                f"{self.graph.path} is directed and has no in-edges, which neighbourhoods follow: convert it again, "
                "with in_edges=True",
                path=self.graph.path,
            )
        self.fanouts = [checked_integer(k, "fanouts", minimum=-1) for k in fanouts]
        self.batch_size = checked_integer(batch_size, "batch_size")
        self.seed = checked_integer(seed, "seed", minimum=None)
        self.shuffle = checked_flag(shuffle, "shuffle")
        self.drop_last = checked_flag(drop_last, "drop_last")
        self._vertices = None if vertices is None else _vertices(vertices, self.graph.vertices)
        self._count = self.graph.vertices if self._vertices is None else len(self._vertices)
        if not len(self):
            raise errors.ArgumentError(f"{self._count} vertices make no batch of {batch_size}", name="batch_size")
        self._offsets = FileSource(self.graph.in_offsets_path, {})
        self._edges = FileSource(self.graph.in_edges_path, {})

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        whole, rest = divmod(self._count, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __repr__(self) -> str:
        return (
            f"<Neighbors in {str(self.graph.path)!r}: {self._count:,} vertices in {len(self):,} batches of "
            f"{self.batch_size:,}, fanouts {self.fanouts}, seed {self.seed}>"
        )

    def __iter__(self) -> Iterator[Neighborhood]:
        """Return an iterator of the batches of the first epoch."""
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Neighborhood:
        """Return the neighbourhood of a batch; numbers count from 0 over all epochs."""
        number = checked_integer(number, "the number of a batch", minimum=0)
        nodes = self.batch(number)
        draws = _Draws(self.seed, number)
        new = nodes
        sources: list[Numbers] = []
        targets: list[Numbers] = []
        places: list[Numbers] = []
        node_counts = [len(nodes)]
        first = 0
        for fanout in self.fanouts:
            edges, of = self._hop(new, fanout, draws)
            found = self._edges.begin(edges)().astype(np.int64, copy=False)
            if len(found) and not 0 <= int(found.min()) <= int(found.max()) < self.graph.vertices:
                raise errors.FormatError(
                    f"{self._edges.path}: an edge leads to no vertex: make the graph again", path=self._edges.path
                )
            nodes, local = _joined(nodes, found)
            sources.append(local)
            targets.append(first + of)
            places.append(edges)
            first = sum(node_counts)
            node_counts.append(len(nodes) - first)
            new = nodes[first:]
        return Neighborhood(number, nodes, _one(sources), _one(targets), _one(places), node_counts, [*map(len, places)])

    def close(self) -> None:
        """Close the graph's files in this process (idempotent). A read opens them again."""
        self._offsets.close()
        self._edges.close()

    def batch(self, number: int) -> Numbers:
        """Return the vertices of a batch."""
        epoch, batch = divmod(number, len(self))
        first = batch * self.batch_size
        end = min(first + self.batch_size, self._count)
        if self.shuffle:
            rows: Numbers = Permutation(self._count, self.seed, epoch).slice(first, end)
        else:
            rows = np.arange(first, end)
        return rows if self._vertices is None else self._vertices[rows]

    def _hop(self, nodes: Numbers, fanout: int, draws: _Draws) -> tuple[Numbers, Numbers]:
        """Return places of drawn edges, and the position in `nodes` of each's vertex."""
        bounds = self._offsets.begin(np.concatenate([nodes, nodes + 1]))().reshape(2, -1)
        degrees = bounds[1] - bounds[0]
        if len(degrees) and (int(degrees.min()) < 0 or int(bounds.min()) < 0 or int(bounds.max()) > self.graph.edges):
            raise errors.FormatError(
                f"{self._offsets.path}: an offset is wrong: make the graph again", path=self._offsets.path
            )
        counts = degrees if fanout < 0 else np.minimum(degrees, fanout)
        of = np.repeat(np.arange(len(nodes)), counts)
        within = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        many = np.flatnonzero(degrees > counts)
        if len(many) and fanout:
            drawn = draws.distinct(degrees[many], fanout)
            mine = np.isin(of, many)
            within[mine] = drawn.ravel()
        return bounds[0][of] + within, of


class _Draws:
    """Random numbers of a batch."""

    def __init__(self, seed: int, number: int) -> None:
        digest = hashlib.shake_256(f"warpwell neighbours {seed} {number}".encode()).digest(16)
        self._words = np.random.Philox(key=int.from_bytes(digest, "little"))

    def distinct(self, below: Numbers, count: int) -> Numbers:
        """Return `count` distinct numbers for each of `below`, which are larger: int64, shape (len(below), count)."""
        taken = np.empty((len(below), count), np.int64)
        for k in range(count):
            last = below - count + k
            words = self._words.random_raw(len(below)) >> np.uint64(32)
            drawn = (words * (last + 1).astype(np.uint64) >> np.uint64(32)).astype(np.int64)
            before = (taken[:, :k] == drawn[:, None]).any(axis=1)
            taken[:, k] = np.where(before, last, drawn)
        return taken


def _joined(nodes: Numbers, found: Numbers) -> tuple[Numbers, Numbers]:
    """Return `nodes` with those of `found` that are new, in the order of their first mention, and where `found` are."""
    every = np.concatenate([nodes, found])
    _, first, inverse = np.unique(every, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return every[first[order]], rank[inverse[len(nodes) :]]


def _one(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _vertices(given: Any, count: int) -> Numbers:
    found = np.asarray(given)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
        raise errors.ArgumentError("vertices: give a list or an array of vertices", name="vertices")
    found = found.astype(np.int64)
    if int(found.min()) < 0 or int(found.max()) >= count:
        raise errors.ArgumentError(f"vertices {found.min()} to {found.max()} of a graph of {count}", name="vertices")
    if len(np.unique(found)) != len(found):
        raise errors.ArgumentError("vertices has some twice: give each once", name="vertices")
    return found
