"""A graph on disk: ``Graph``."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpwell._npy import read_header
from warpwell.errors import FormatError, MissingFileError

FORMAT = "warpwell graph"
FORMAT_VERSION = 2
META = "graph.json"
#: Files of the edges that leave the vertices, and of those that arrive: offsets, other ends, weights.
OUT_PART = ("offsets.npy", "edges.npy", "weights.npy")
IN_PART = ("in_offsets.npy", "in_edges.npy", "in_weights.npy")
#: Dtypes of weights, and of destinations.
WEIGHTS, DESTINATIONS = ("int32", "float32"), ("int32", "int64")
#: Graphs with more vertices than this have 8-byte destinations.
SMALL = 1 << 31
_STEP = 1 << 24
#: Called with a stage, how much of it is done and how much there is in all (0 where not known).
Progress = Callable[[str, int, int], None]
AGAIN = "Make the graph again with `warpwell graph convert`."


@dataclass(frozen=True)
class Graph:
    """A graph on disk in compressed sparse rows; it is not loaded into memory.

    The destinations of vertex v are ``edges[offsets[v]:offsets[v + 1]]``, in ascending order, in ``edges.npy`` and
    ``offsets.npy``; ``weights.npy`` has the weights of the same edges. docs/graph-format.md describes the folder.
    `convert`, `generate` and `build` make graphs, `Graph.open` opens them.

    Attributes
    ----------
    path : Path
        The folder.
    vertices : int
        Vertices, numbered 0 to ``vertices - 1``.
    edges : int
        Stored edges; an undirected edge between two vertices is stored twice.
    undirected : bool
        Each edge is stored in both directions.
    source : str
        Origin of the edges.
    weights : {"int32", "float32"} or None
        Dtype of the weights, None if there are none.
    in_edges : bool
        The edges that end in a vertex can be read, too; always so if the graph is undirected.
    destinations : {"int32", "int64"}
        Dtype of the destinations. New graphs have int32 where all vertices fit, those of version 1 int64.
    """

    path: Path
    vertices: int
    edges: int
    undirected: bool
    source: str = ""
    weights: str | None = None
    in_edges: bool = False
    destinations: str = "int64"

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
        """The ``.npy`` file of offsets of in-edges; that of the offsets, if the graph is undirected."""
        return self.path / self._in_part[0]

    @property
    def in_edges_path(self) -> Path:
        """The ``.npy`` file of the sources of in-edges, ascending for each vertex; like `in_offsets_path`."""
        return self.path / self._in_part[1]

    @property
    def in_weights_path(self) -> Path:
        """The ``.npy`` file of the weights of in-edges; like `in_offsets_path`."""
        return self.path / self._in_part[2]

    @property
    def _in_part(self) -> tuple[str, str, str]:
        return OUT_PART if self.undirected else IN_PART

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the graph's arrays on disk."""
        return sum(path.stat().st_size for path in self._files())

    def _files(self) -> list[Path]:
        parts = [OUT_PART, IN_PART] if self.in_edges and not self.undirected else [OUT_PART]
        return [self.path / name for part in parts for name in part[: 2 if self.weights is None else 3]]

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
            The folder is not a graph, its version is newer, or its files are inconsistent (types, lengths, first and
            last offset).
        """
        path = Path(path)
        if not path.exists():
            raise MissingFileError(
                f"{path}: no such graph. Make one with `warpwell graph convert` or `... generate`.",
                path=path,
            )
        if not path.is_dir():
            raise FormatError(
                f"{path} is a file, not the folder of a graph. Convert it: `warpwell graph convert {path} NAME.ww`.",
                path=path,
            )
        graph = cls(path, **_read_meta(path))
        for file in graph._files():
            if file.name in (OUT_PART[0], IN_PART[0]):
                offsets = _check_file(file, "int64", graph.vertices + 1, (0, graph.vertices))
                if offsets != [0, graph.edges]:
                    raise FormatError(
                        f"{file}: first and last offset are {offsets[0]} and {offsets[1]}, not 0 "
                        f"and {graph.edges}. {AGAIN}",
                        path=file,
                    )
            else:
                weighted = file.name in (OUT_PART[2], IN_PART[2])
                _check_file(file, graph.weights or "" if weighted else graph.destinations, graph.edges, ())
        return graph

    def load(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return offsets and destinations as read-only NumPy memory maps, for host code and comparisons."""
        return self.map(self.offsets_path), self.map(self.edges_path)

    def degrees(self) -> npt.NDArray[np.int64]:
        """Return the number of edges that leave each vertex: int64, shape ``(vertices,)``."""
        return np.diff(self.map(self.offsets_path))

    def in_degrees(self) -> npt.NDArray[np.int64]:
        """Return the number of edges that end in each vertex: int64, shape ``(vertices,)``.

        They are counted from the destinations if the graph has no in-edges.

        Raises
        ------
        FormatError
            A destination is no vertex.
        """
        if self.in_edges:
            return np.diff(self.map(self.in_offsets_path))
        counts = np.zeros(self.vertices, np.int64)
        edges = self.map(self.edges_path)
        step = max(_STEP, self.vertices)
        for start in range(0, self.edges, step):
            part = edges[start : start + step]
            if part.min() < 0 or part.max() >= self.vertices:
                raise FormatError(
                    f"{self.edges_path}: a destination is outside of 0 to {self.vertices - 1}. {AGAIN}",
                    path=self.edges_path,
                )
            counts += np.bincount(part, minlength=self.vertices)
        return counts

    def map(self, path: Path) -> npt.NDArray[Any]:
        """Return one of the graph's files as a read-only NumPy memory map."""
        # An empty file cannot be mapped.
        mode: Any = "r" if self.edges or path in (self.offsets_path, self.in_offsets_path) else None
        items: npt.NDArray[Any] = np.load(path, mmap_mode=mode)
        return items


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / META
    if not file.is_file():
        raise FormatError(f"{path} has no {META}, so it is not a graph of Warpwell. {AGAIN}", path=path)
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise FormatError(f"{file} is not valid JSON ({error}). {AGAIN}", path=file) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise FormatError(f"{file} does not describe a graph of Warpwell. {AGAIN}", path=file)
    version = meta.get("version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise FormatError(
            f"{file}: version {version!r} of the format; 1 to {FORMAT_VERSION} is what this Warpwell "
            "reads. Update Warpwell or make the graph again.",
            path=file,
        )
    wanted: dict[str, type] = {"vertices": int, "edges": int, "undirected": bool, "source": str}
    if version > 1:
        wanted |= {"in_edges": bool, "destinations": str}
        wanted["weights"] = type(None) if meta.get("weights", "") is None else str
    for key, kind in wanted.items():
        if type(meta.get(key)) is not kind or (kind is int and meta[key] < 0):
            raise FormatError(f"{file}: {key!r} is {meta.get(key)!r}. {AGAIN}", path=file)
    found = {"in_edges": meta["undirected"]} | {key: meta[key] for key in wanted}
    for key, known in (("weights", (None, *WEIGHTS)), ("destinations", DESTINATIONS)):
        if found.get(key, known[0]) not in known:
            raise FormatError(f"{file}: {key!r} is {found[key]!r}, not {' or '.join(known[-2:])}. {AGAIN}", path=file)
    return found


def _check_file(path: Path, name: str, length: int, indices: tuple[int, ...]) -> list[int]:
    """Check type and length of a file of items of the dtype `name`, and return the integers at `indices`."""
    wanted = np.dtype(name).newbyteorder("<")
    if not path.is_file():
        raise MissingFileError(f"{path} is missing. {AGAIN}", path=path)
    with open(path, "rb") as file:
        shape, dtype = read_header(file, str(path))
        if dtype.hasobject:
            raise FormatError(f"{path} holds Python objects. {AGAIN}", path=path)
        start = file.tell()
        if dtype != wanted or shape != (length,):
            raise FormatError(
                f"{path} holds {dtype} of shape {shape}, not {name} of shape ({length},). {AGAIN}", path=path
            )
        size = os.fstat(file.fileno()).st_size
        if size != start + wanted.itemsize * length:
            raise FormatError(
                f"{path} has {size} bytes, not {start + wanted.itemsize * length}: it was not copied whole. "
                "Copy it again.",
                path=path,
            )
        return [int.from_bytes(os.pread(file.fileno(), 8, start + 8 * i), "little", signed=True) for i in indices]
