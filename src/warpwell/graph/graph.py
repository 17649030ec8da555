"""A graph on disk: ``Graph``."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpwell.array.header import read_header
from warpwell.errors import FormatError, MissingFileError

FORMAT = "warpwell graph"
FORMAT_VERSION = 1
META, OFFSETS, EDGES = "graph.json", "offsets.npy", "edges.npy"
#: Called with a stage, how much of it is done and how much there is in all (0 where not known).
Progress = Callable[[str, int, int], None]
AGAIN = "Make the graph again with `warpwell graph convert`."


@dataclass(frozen=True)
class Graph:
    """A graph on disk in compressed sparse rows; it is not loaded into memory.

    The folder holds ``offsets.npy`` (int64, shape ``(vertices + 1,)``), ``edges.npy`` (int64 destinations,
    shape ``(edges,)``) and ``graph.json``. The destinations of vertex v are
    ``edges[offsets[v]:offsets[v + 1]]``, in ascending order. `convert`, `generate` and `build`
    make graphs, `Graph.open` opens them.

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
    """

    path: Path
    vertices: int
    edges: int
    undirected: bool
    source: str = ""

    @property
    def offsets_path(self) -> Path:
        """The ``.npy`` file of offsets: int64, shape ``(vertices + 1,)``."""
        return self.path / OFFSETS

    @property
    def edges_path(self) -> Path:
        """The ``.npy`` file of destinations: int64, shape ``(edges,)``."""
        return self.path / EDGES

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
                f"{path} is a file, not the folder of a graph. "
                f"Convert it: `warpwell graph convert {path} NAME.ww`.",
                path=path,
            )
        graph = cls(path, **_read_meta(path))
        offsets = _check_file(graph.offsets_path, graph.vertices + 1, (0, graph.vertices))
        if offsets != [0, graph.edges]:
            raise FormatError(
                f"{graph.offsets_path}: first and last offset are {offsets[0]} and {offsets[1]}, not 0 "
                f"and {graph.edges}. {AGAIN}",
                path=graph.offsets_path,
            )
        _check_file(graph.edges_path, graph.edges, ())
        return graph

    def load(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return offsets and destinations as read-only NumPy memory maps, for host code and comparisons."""
        # An empty file cannot be mapped.
        mode: Any = "r" if self.edges else None
        return np.load(self.offsets_path, mmap_mode="r"), np.load(self.edges_path, mmap_mode=mode)


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
    if meta.get("version") != FORMAT_VERSION:
        raise FormatError(
            f"{file}: version {meta.get('version')!r} of the format; {FORMAT_VERSION} is what this Warpwell "
            "reads. Update Warpwell or make the graph again.",
            path=file,
        )
    wanted = {"vertices": int, "edges": int, "undirected": bool, "source": str}
    for key, kind in wanted.items():
        if type(meta.get(key)) is not kind or (kind is int and meta[key] < 0):
            raise FormatError(f"{file}: {key!r} is {meta.get(key)!r}. {AGAIN}", path=file)
    return {key: meta[key] for key in wanted}


def _check_file(path: Path, length: int, indices: tuple[int, ...]) -> list[int]:
    """Check type and length of a file of int64, and return the items at `indices`."""
    if not path.is_file():
        raise MissingFileError(f"{path} is missing. {AGAIN}", path=path)
    with open(path, "rb") as file:
        shape, dtype = read_header(file, str(path))
        if dtype.hasobject:
            raise FormatError(f"{path} holds Python objects. {AGAIN}", path=path)
        start = file.tell()
        if dtype != np.dtype("<i8") or shape != (length,):
            raise FormatError(
                f"{path} holds {dtype} of shape {shape}, not int64 of shape ({length},). {AGAIN}", path=path
            )
        size = os.fstat(file.fileno()).st_size
        if size != start + 8 * length:
            raise FormatError(
                f"{path} has {size} bytes, not {start + 8 * length}: it was not copied whole. Copy it again.",
                path=path,
            )
        return [
            int.from_bytes(os.pread(file.fileno(), 8, start + 8 * i), "little", signed=True) for i in indices
        ]
