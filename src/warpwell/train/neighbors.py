"""`Neighbors`: sampled neighborhoods of batches of vertices, in a graph on storage.

A batch depends only on its number and the seed, in any process:

- vertices: positions ``batch * batch_size`` and following of the order of the epoch (`warpwell.kv.Permutation`);
- draws: 64-bit words of Philox, keyed by seed and number. NumPy keeps the raw words of Philox the same in each version,
  which it does not promise of its distributions. Word w draws ``(w >> 32) * n >> 32`` of n.

Neighbors are drawn without repetition, for all vertices of a hop at once (R. W. Floyd's algorithm): for j from d - k
to d - 1, draw t of 0 to j; use t, or j if t was drawn before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_flag, checked_integer
from ..graph import Graph
from ..kv import Permutation
from .dataset import Dataset
from .records import source_of
from .tensors import import_torch

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Neighborhood:
    """The sampled neighborhood of the vertices of a batch.

    Attributes
    ----------
    number : int
        The number of the batch.
    nodes : ndarray of int64
        Distinct vertices: first the vertices of the batch, then the vertices of each hop.
    sources, targets : ndarray of int64
        Sampled edges, hop by hop, as positions in `nodes`: a neighbor of a vertex, and the vertex.
    edges : ndarray of int64
        The same edges as positions in the graph's file of edges.
    node_counts : list of int
        The number of `nodes` in the batch and in each hop.
    edge_counts : list of int
        The number of edges in each hop.
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
        """The number of vertices of the batch."""
        return self.node_counts[0]


class Neighbors:
    """Sampled neighborhoods by batch number: ``neighbors[number]``.

    Epoch e has the batches ``e * len(neighbors)`` to ``(e + 1) * len(neighbors) - 1``; the number of epochs is not
    limited. Only the needed offsets and edges are read from storage.

    Parameters
    ----------
    graph : Graph or path
        The neighbors of a vertex are the vertices that have an edge to it, so a directed graph needs in-edges.
    fanouts : sequence of int
        Maximum number of neighbors to draw per vertex at each hop; -1 for all.
    batch_size : int
        Vertices per batch.
    vertices : array of int, optional
        The vertices whose neighborhoods are sampled, such as the vertices with a label. Default: all.
    seed : int
    shuffle : bool
        If False, each epoch takes the vertices in the order of `vertices`.
    drop_last : bool
        Skip an incomplete last batch of an epoch.

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
                f"{self.graph.path} is directed and has no in-edges, which neighborhoods need: convert it again with "
                "in_edges=True",
                path=self.graph.path,
            )
        self.fanouts = [checked_integer(k, "fanouts", minimum=-1) for k in fanouts]
        self.batch_size = checked_integer(batch_size, "batch_size")
        self.seed = checked_integer(seed, "seed", minimum=None)
        self.shuffle = checked_flag(shuffle, "shuffle")
        self.drop_last = checked_flag(drop_last, "drop_last")
        self._vertices = None if vertices is None else _checked_vertices(vertices, self.graph.vertices)
        self._count = self.graph.vertices if self._vertices is None else len(self._vertices)
        if not len(self):
            raise errors.ArgumentError(f"{self._count} vertices make no batch of {batch_size}", name="batch_size")
        self._offsets = source_of(self.graph.in_offsets_path, "offsets")
        self._edges = source_of(self.graph.in_edges_path, "edges")

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        full_batches, remainder = divmod(self._count, self.batch_size)
        return full_batches + (remainder > 0 and not self.drop_last)

    def __repr__(self) -> str:
        return (
            f"<Neighbors in {str(self.graph.path)!r}: {self._count:,} vertices in {len(self):,} batches of "
            f"{self.batch_size:,}, fanouts {self.fanouts}, seed {self.seed}>"
        )

    def __iter__(self) -> Iterator[Neighborhood]:
        """Return an iterator of the batches of the first epoch."""
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Neighborhood:
        """Return the neighborhood of a batch; numbers count from 0 over all epochs."""
        number = checked_integer(number, "the number of a batch", minimum=0)
        nodes = self.batch(number)
        if self.graph.order == "degree":
            nodes = self.graph.positions[nodes]
        draws = _Draws(self.seed, number)
        sources: list[Numbers] = []
        targets: list[Numbers] = []
        edges: list[Numbers] = []
        node_counts = [len(nodes)]
        hop_start = 0
        for fanout in self.fanouts:
            positions, targets_in_hop = self._sample(nodes[hop_start:], fanout, draws)
            neighbors = self._edges.start_read(positions)().astype(np.int64, copy=False)
            if len(neighbors) and not 0 <= int(neighbors.min()) <= int(neighbors.max()) < self.graph.vertices:
                path = self.graph.in_edges_path
                raise errors.FormatError(
                    f"{path}: an edge leads to a vertex that does not exist: make the graph again", path=path
                )
            targets.append(hop_start + targets_in_hop)
            edges.append(positions)
            hop_start = len(nodes)
            nodes, sources_in_nodes = _append_new(nodes, neighbors)
            sources.append(sources_in_nodes)
            node_counts.append(len(nodes) - hop_start)
        if self.graph.order == "degree":
            nodes = self.graph.stored_order()[nodes]
        edge_counts = [len(positions) for positions in edges]
        indices = [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in (sources, targets, edges)]
        return Neighborhood(number, nodes, indices[0], indices[1], indices[2], node_counts, edge_counts)

    def __getstate__(self) -> dict[str, Any]:
        # Without `Graph.positions`, which has 8 bytes a vertex: each process reads it again.
        return {**self.__dict__, "graph": replace(self.graph)}

    def loader(
        self, features: Dataset | Mapping[str, Any], batches: Iterable[int] | None = None, **options: Any
    ) -> Any:
        """Return a ``DataLoader`` of PyTorch over some batches, in the order of `batches`.

        An item is a ``Data`` of PyTorch Geometric with the features of its nodes, ``edge_index``, ``n_id`` (vertices),
        ``e_id`` (positions in the file of edges), ``input_id`` (the vertices of the batch), ``batch_size`` (their
        number), ``num_sampled_nodes`` and ``num_sampled_edges`` (by hop). A batch depends on its number alone, so
        batches are the same for any number of workers, and a run that was stopped resumes with the next number.

        Parameters
        ----------
        features : Dataset or dict
            A dataset whose row v belongs to vertex v, or a dict of the fields of such a dataset.
        batches : iterable of int, optional
            Numbers of batches. Default: the first epoch.
        **options
            Options of ``DataLoader``, such as ``num_workers`` and ``persistent_workers``, but not those that define a
            batch: ``batch_size``, ``shuffle``, ``sampler``, ``batch_sampler``, ``drop_last``.

        Raises
        ------
        ArgumentError
            PyTorch Geometric is not installed; or see `Dataset`.
        DTypeError, MissingFileError, FormatError
            See `Dataset`.
        """
        refused = sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & {*options})
        if refused:
            raise errors.ArgumentError(
                f"{refused[0]}= is decided by Neighbors: to choose batches, pass their indices as batches=",
                name=refused[0],
            )
        data = _Batches(self, features if isinstance(features, Dataset) else Dataset(features))
        numbers = range(len(self)) if batches is None else [*batches]
        loader = import_torch("torch.utils.data").DataLoader
        return loader(data, sampler=numbers, batch_size=None, collate_fn=_unchanged, **options)

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

    def _sample(self, nodes: Numbers, fanout: int, draws: _Draws) -> tuple[Numbers, Numbers]:
        """Return the positions of sampled edges in the file, and the positions of their vertices in `nodes`."""
        bounds = self._offsets.start_read(np.concatenate([nodes, nodes + 1]))().reshape(2, -1)
        degrees = bounds[1] - bounds[0]
        if len(degrees) and (int(degrees.min()) < 0 or int(bounds.min()) < 0 or int(bounds.max()) > self.graph.edges):
            path = self.graph.in_offsets_path
            raise errors.FormatError(f"{path}: an offset is wrong: make the graph again", path=path)
        counts = degrees if fanout < 0 else np.minimum(degrees, fanout)
        owners = np.repeat(np.arange(len(nodes)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        larger = degrees > counts
        if larger.any() and fanout:
            within[larger[owners]] = draws.distinct(degrees[larger], fanout).ravel()
        return bounds[0][owners] + within, owners


class _Batches:
    """Batches with their features, by number: the data set of a loader.

    Attributes
    ----------
    neighbors : Neighbors
    features : Dataset
    """

    def __init__(self, neighbors: Neighbors, features: Dataset) -> None:
        import_torch("torch_geometric")
        self.neighbors, self.features = neighbors, features

    def __getitem__(self, number: int) -> Any:
        torch, geometric = import_torch("torch"), import_torch("torch_geometric.data")
        batch = self.neighbors[number]
        arrays = batch.nodes, batch.sources, batch.targets, batch.edges
        nodes, sources, targets, edges = map(torch.from_numpy, arrays)
        return geometric.Data(
            **Dataset.collate(self.features.__getitems__(batch.nodes)),
            edge_index=torch.stack([sources, targets]),
            n_id=nodes,
            e_id=edges,
            input_id=nodes[: batch.batch_size],
            batch_size=batch.batch_size,
            num_nodes=len(nodes),
            num_sampled_nodes=batch.node_counts,
            num_sampled_edges=batch.edge_counts,
        )


def _unchanged(batch: Any) -> Any:
    """Return a batch: its parts are tensors already."""
    return batch


class _Draws:
    """Random numbers of a batch."""

    def __init__(self, seed: int, number: int) -> None:
        # The text is part of the definition of a batch: other text would draw other neighbors.
        digest = hashlib.shake_256(f"warpwell neighbours {seed} {number}".encode()).digest(16)
        self._philox = np.random.Philox(key=int.from_bytes(digest, "little"))

    def distinct(self, limits: Numbers, count: int) -> Numbers:
        """Return `count` distinct numbers below each of `limits`, as int64 of shape (len(limits), count).

        Each limit must be larger than `count`.
        """
        numbers = np.empty((len(limits), count), np.int64)
        for k in range(count):
            last = limits - count + k
            high_halves = self._philox.random_raw(len(limits)) >> np.uint64(32)
            drawn = (high_halves * (last + 1).astype(np.uint64) >> np.uint64(32)).astype(np.int64)
            is_repeated = (numbers[:, :k] == drawn[:, None]).any(axis=1)
            numbers[:, k] = np.where(is_repeated, last, drawn)
        return numbers


def _append_new(nodes: Numbers, neighbors: Numbers) -> tuple[Numbers, Numbers]:
    """Append the new vertices of `neighbors` to `nodes`, in order of first occurrence.

    Returns
    -------
    tuple of ndarray
        The nodes, and the position of each neighbor in them.
    """
    vertices = np.concatenate([nodes, neighbors])
    _, first, inverse = np.unique(vertices, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return vertices[first[order]], rank[inverse[len(nodes) :]]


def _checked_vertices(vertices: Any, count: int) -> Numbers:
    numbers = np.asarray(vertices)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
        raise errors.ArgumentError("vertices: pass a list or an array of vertices", name="vertices")
    minimum, maximum = int(numbers.min()), int(numbers.max())
    if minimum < 0 or maximum >= count:
        raise errors.ArgumentError(f"vertices {minimum} to {maximum} of a graph of {count}", name="vertices")
    numbers = numbers.astype(np.int64)
    if len(np.unique(numbers)) != len(numbers):
        raise errors.ArgumentError("vertices must be distinct: pass each once", name="vertices")
    return numbers
