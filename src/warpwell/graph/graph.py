"""A graph on disk: `Graph`."""

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._npy import read_header
from ..errors import ArgumentError, FormatError, MissingFileError
from ..json_file import read_json
from .names import open_names

FORMAT = "warpwell graph"
FORMAT_VERSION = 3
META = "graph.json"
OUT_PART = ("offsets.npy", "edges.npy", "weights.npy")
"""Files of the edges that leave the vertices: offsets, destinations, weights."""
IN_PART = ("in_offsets.npy", "in_edges.npy", "in_weights.npy")
"""Files of the edges that end in the vertices, of a directed graph."""
ORDER = "order.npy"
HEADS = "heads.npy"
HEAD = 4
"""Neighbors of each vertex in `HEADS`."""
WEIGHTS, DESTINATIONS, ORDERS = ("int32", "float32"), ("int32", "int64"), ("given", "degree")
"""Dtypes of weights and of destinations, and orders of the vertices."""
SMALL = 1 << 31
"""Graphs with more vertices than this have 8-byte destinations."""
_STEP = 1 << 24
Progress = Callable[[str, int, int], None]
"""Called with a stage, the amount that is done and the total (0 if unknown)."""
AGAIN = "Make the graph again with `warpwell graph convert`."


@dataclass(frozen=True)
class Graph:
    """A graph on disk in compressed sparse rows; it is not loaded into memory.

    The destinations of the vertex that is stored as number v are ``edges[offsets[v]:offsets[v + 1]]``, in ascending
    order, in ``edges.npy`` and ``offsets.npy``; ``weights.npy`` has the weights of the same edges. If `order` is
    "given", the stored number of a vertex is its number in the input. Otherwise they differ; results of algorithms use
    the numbers of the input, and `original` puts your own values in that order. docs/graph-format.md describes the
    folder. `convert`, `generate` and `build` make graphs, and `Graph.open` opens them.

    Attributes
    ----------
    path : Path
        The folder.
    vertices : int
        Vertices, numbered 0 to ``vertices - 1``.
    edges : int
        Stored edges; an undirected edge between two vertices is stored twice.
    undirected : bool
        Whether each edge is stored in both directions.
    source : str
        Origin of the edges.
    weights : {"int32", "float32"} or None
        Dtype of the weights, or None.
    in_edges : bool
        Whether the edges that end in a vertex can be read, too; always true for an undirected graph.
    destinations : {"int32", "int64"}
        Dtype of the destinations: int32 if all vertices fit.
    order : {"given", "degree"}
        Order in which the vertices are stored: ascending by their number in the input, or descending by number of
        edges.
    """

    path: Path
    vertices: int
    edges: int
    undirected: bool
    source: str = ""
    weights: str | None = None
    in_edges: bool = False
    destinations: str = "int64"
    order: str = "given"

    @property
    def offsets_path(self) -> Path:
        """The ``.npy`` file of offsets: int64, shape ``(vertices + 1,)``."""
        return self.path / OUT_PART[0]

    @property
    def edges_path(self) -> Path:
        """The ``.npy`` file of destinations: dtype `destinations`, shape ``(edges,)``."""
        return self.path / OUT_PART[1]

    @property
    def weights_path(self) -> Path:
        """The ``.npy`` file of weights: dtype `weights`, shape ``(edges,)``; it exists if the graph has weights."""
        return self.path / OUT_PART[2]

    @property
    def in_offsets_path(self) -> Path:
        """The ``.npy`` file of offsets of in-edges; `offsets_path` if the graph is undirected."""
        return self.path / self._in_part[0]

    @property
    def in_edges_path(self) -> Path:
        """The ``.npy`` file of the sources of in-edges, ascending for each vertex; `edges_path` if undirected."""
        return self.path / self._in_part[1]

    @property
    def in_weights_path(self) -> Path:
        """The ``.npy`` file of the weights of in-edges; `weights_path` if the graph is undirected."""
        return self.path / self._in_part[2]

    @property
    def heads_path(self) -> Path:
        """The ``.npy`` file of the first 4 sources of each vertex's in-edges, padded with -1; needs `in_edges`."""
        return self.path / HEADS

    @property
    def _in_part(self) -> tuple[str, str, str]:
        return OUT_PART if self.undirected else IN_PART

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the graph's arrays on disk."""
        return sum((self.path / name).stat().st_size for name in self._files())

    def _files(self) -> dict[str, tuple[str, int]]:
        """Return dtype and length of each file."""
        files: dict[str, tuple[str, int]] = {}
        for part in dict.fromkeys((OUT_PART, self._in_part) if self.in_edges else (OUT_PART,)):
            files |= {part[0]: ("int64", self.vertices + 1), part[1]: (self.destinations, self.edges)}
            if self.weights is not None:
                files[part[2]] = (self.weights, self.edges)
        if self.in_edges:
            files[HEADS] = (self.destinations, HEAD * self.vertices)
        if self.order == "degree":
            files[ORDER] = ("int64", self.vertices)
        return files

    @classmethod
    def open(cls, path: str | Path) -> "Graph":
        """Open a graph, and check quickly that its files are consistent.

        Parameters
        ----------
        path : path-like
            The folder of the graph.

        Returns
        -------
        Graph
            The graph.

        Raises
        ------
        MissingFileError
            No such folder, or one of its files is missing.
        FormatError
            The folder is not a graph, the graph has an unsupported version, or its files are inconsistent (types,
            lengths, first and last offset).
        """
        path = Path(path)
        if not path.exists():
            raise MissingFileError(f"{path}: no such graph; make one with `warpwell graph convert`", path=path)
        if not path.is_dir():
            advice = f"convert it: `warpwell graph convert {path} NAME.ww`"
            raise FormatError(f"{path} is a file, not the folder of a graph; {advice}", path=path)
        graph = cls(path, **_read_meta(path))
        for name, (dtype, length) in graph._files().items():
            _check_file(path / name, dtype, length)
            if name in (OUT_PART[0], IN_PART[0]):
                first, last = graph.map(path / name)[[0, -1]].tolist()
                if (first, last) != (0, graph.edges):
                    problem = f"first and last offset are {first} and {last}, not 0 and {graph.edges}"
                    raise damaged_graph(path / name, problem)
        return graph

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position at which each vertex is stored: int64, shape ``(vertices,)``, in memory."""
        if self.order == "given":
            return np.arange(self.vertices)
        order = self.stored_order()
        positions = np.full(self.vertices, -1)
        if self.vertices and 0 <= order.min() <= order.max() < self.vertices:
            positions[order] = np.arange(self.vertices)
        if (positions < 0).any():
            raise damaged_graph(self.path / ORDER, "it does not have each vertex once")
        return positions

    def stored_order(self) -> npt.NDArray[np.int64]:
        """Return the input's number of each stored vertex, the inverse of `positions`."""
        return np.arange(self.vertices) if self.order == "given" else self.map(self.path / ORDER)

    def original(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reorder an array with an item for each stored vertex, so that item v belongs to vertex v of the input."""
        return values if self.order == "given" else values[self.positions]

    def load(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return offsets and destinations by the numbers of the input, for host code and comparisons.

        If `order` is "given", these arrays are read-only NumPy memory maps. Otherwise they are computed in memory,
        which takes 32 bytes per edge during the call; `map` returns the arrays as they are stored.
        """
        offsets, edges = self.map(self.offsets_path), self.map(self.edges_path)
        if self.order == "given":
            return offsets, edges
        order, degrees = self.stored_order(), np.diff(offsets)
        destinations = order[edges]
        by_row = np.lexsort((destinations, np.repeat(order, degrees)))
        return np.concatenate(([0], np.cumsum(self.original(degrees)))), destinations[by_row].astype(edges.dtype)

    def degrees(self) -> npt.NDArray[np.int64]:
        """Return the number of edges that leave each vertex: int64, shape ``(vertices,)``."""
        return self.original(np.diff(self.map(self.offsets_path)))

    def in_degrees(self) -> npt.NDArray[np.int64]:
        """Return the number of edges that end in each vertex: int64, shape ``(vertices,)``.

        Without in-edges, all destinations are read.
        """
        if self.in_edges:
            return self.original(np.diff(self.map(self.in_offsets_path)))
        counts = np.zeros(self.vertices, np.int64)
        edges = self.map(self.edges_path)
        step = max(_STEP, self.vertices)
        for start in range(0, self.edges, step):
            part = edges[start : start + step]
            if part.min() < 0 or part.max() >= self.vertices:
                raise damaged_graph(self.edges_path, f"a destination is outside of 0 to {self.vertices - 1}")
            counts += np.bincount(part, minlength=self.vertices)
        return self.original(counts)

    def map(self, path: Path) -> npt.NDArray[Any]:
        """Return one of the graph's files, as it is stored, as a read-only NumPy memory map."""
        with open(path, "rb") as file:
            shape, _ = read_header(file, str(path))
        # An empty file cannot be mapped.
        items: npt.NDArray[Any] = np.load(path, mmap_mode="r" if 0 not in shape else None)
        return items

    @cached_property
    def names(self) -> Any:
        """Names of the vertices: a pyarrow column of strings or int64, item v of vertex v; None without names."""
        return open_names(self.path, self.vertices)

    def vertex(self, name: str | int) -> int:
        """Return the number of the vertex with a name. If vertices have no names, `name` is its number.

        Raises
        ------
        ArgumentError
            The graph has no such vertex.
        """
        names = self.names
        try:
            key: Any = name
            if names is None or names.type != "string":
                key = int(name) if isinstance(name, str) else operator.index(name)
            number = key if names is None else names.index(key).as_py()
        except (TypeError, ValueError, OverflowError):
            number = -1
        if not 0 <= number < self.vertices:
            expected = f"a number from 0 to {self.vertices - 1}" if names is None else "one of its names (Graph.names)"
            raise ArgumentError(f"{self.path} has no vertex {name!r}; expected {expected}", name="source")
        return int(number)

    def top(self, values: npt.NDArray[Any], count: int = 10) -> list[tuple[Any, Any]]:
        """Return the vertices with the largest values, by name if they have names, and their values.

        Parameters
        ----------
        values : ndarray, shape (vertices,)
            An item for each vertex, such as ranks.
        count : int, default 10
            Number of vertices to return, at least 0. Vertices with equal values are in ascending order.

        Raises
        ------
        ArgumentError
            `values` does not have an item for each vertex, or `count` is negative.
        """
        if np.shape(values) != (self.vertices,):
            expected = f"values must have an item for each of {self.vertices} vertices"
            raise ArgumentError(f"{expected}, got shape {np.shape(values)}", name="values")
        if count < 0:
            raise ArgumentError(f"count must be at least 0, got {count}", name="count")
        vertices = np.argsort(-values, kind="stable")[:count].tolist()
        labels = vertices if self.names is None else self.names.take(vertices).to_pylist()
        return list(zip(labels, values[vertices].tolist(), strict=True))


def damaged_graph(path: Path, problem: str) -> FormatError:
    """Return the error for a file or folder that cannot be used."""
    return FormatError(f"{path}: {problem}. {AGAIN}", path=path)


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / META
    if not file.is_file():
        raise damaged_graph(path, f"there is no {META}, so it is not a graph of Warpwell")
    meta = read_json(file, "a graph of `warpwell graph convert`")
    if meta.get("format") != FORMAT:
        raise damaged_graph(file, "it does not describe a graph of Warpwell")
    if meta.get("version") != FORMAT_VERSION:
        problem = f"it has format version {meta.get('version')!r}, but this Warpwell reads version {FORMAT_VERSION}"
        raise damaged_graph(file, problem)
    types: dict[str, type] = {"vertices": int, "edges": int, "undirected": bool, "source": str, "in_edges": bool}
    allowed: dict[str, tuple[Any, ...]] = {"weights": (None, *WEIGHTS), "destinations": DESTINATIONS, "order": ORDERS}
    values = {field.name: meta.get(field.name, "missing") for field in fields(Graph) if field.name != "path"}
    for key, value in values.items():
        is_valid = value in allowed[key] if key in allowed else type(value) is types[key]
        if not is_valid or (types.get(key) is int and value < 0):
            raise damaged_graph(file, f"{key!r} is {value!r}")
    return values


def _check_file(path: Path, dtype: str, length: int) -> None:
    """Raise unless a file has `length` items of a dtype."""
    expected_dtype = np.dtype(dtype).newbyteorder("<")
    if not path.is_file():
        raise MissingFileError(f"{path} is missing. {AGAIN}", path=path)
    with open(path, "rb") as file:
        shape, actual_dtype = read_header(file, str(path))
        if actual_dtype != expected_dtype or shape != (length,):
            raise damaged_graph(path, f"it holds {actual_dtype} of shape {shape}, not {dtype} of shape ({length},)")
        size, expected_size = os.fstat(file.fileno()).st_size, file.tell() + expected_dtype.itemsize * length
        if size != expected_size:
            problem = f"has {size} bytes, not {expected_size}: it was not copied whole; copy it again"
            raise FormatError(f"{path} {problem}", path=path)
