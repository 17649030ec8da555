"""Convert files of edges to graphs on disk: `convert`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import ArgumentError
from .build import build
from .graph import Graph, Progress
from .names import VertexNumbers
from .read import EdgeReader


def convert(
    source: str | Path,
    out: str | Path,
    *,
    undirected: bool = False,
    vertices: int | None = None,
    order: str = "degree",
    weights: str | bool | None = None,
    in_edges: bool = False,
    columns: Sequence[str] | None = None,
    names: bool = False,
    renumber: bool = False,
    memory_bytes: int | str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Convert a file of edges to a graph on disk.

    Reads SNAP edge lists, GAP ``.el`` and ``.wel``, ``.csv`` and ``.tsv`` files with a header, MatrixMarket ``.mtx``,
    each also compressed with gzip, bzip2, zstd or lz4, and sparse matrices that SciPy saved as ``.npz``. Except for
    ``.npz``, the graph may exceed the memory; the conversion then needs about three times the graph's size on the disk
    of `out`. It needs pyarrow and SciPy: ``pip install "warpwell[graph]"``.

    Parameters
    ----------
    source : path-like
    out, undirected, order, in_edges, memory_bytes, progress, overwrite
        As for `build`; the default of `order` is "degree", and the progress of ``"read"`` counts bytes of `source`.
    vertices : int, optional
        Number of vertices. Default: the size of a matrix, or the largest vertex of an edge list plus one.
    weights : {"int32", "float32"} or False, optional
        The dtype of the weights, or False to drop them. Default: weights in the file are stored as int32 if all are
        integers that fit, otherwise as float32. By default, values in an ``.npz`` file do not count as weights if all
        are 1. The third field of an edge list is a weight if the name ends in ``.wel`` or a dtype is given.
    columns : sequence of str, optional
        Names of the columns of source, target and weight in the header of a ``.csv`` or ``.tsv`` file. Default: usual
        names, such as ``src``, ``from``, ``u``; ``dst``, ``to``, ``v``; ``weight``, ``w``, in upper or lower case.
    names : bool, default False
        State that the vertices in the file are names, such as "alice". They get numbers from 0 in the order in which
        they first appear, and the graph stores the names (`Graph.names`). All names must fit into memory. Names in an
        edge list have no spaces, commas or semicolons.
    renumber : bool, default False
        Like `names`, for names that are integers without leading zeros, such as large or negative ids.

    Raises
    ------
    MissingFileError
        No such file, or no folder to write into.
    ArgumentError
        `out` already exists, or an argument is out of range.
    FormatError
        The file is damaged, holds no graph or has a malformed row, or is an ``.npz`` file that exceeds the memory.
    StorageFullError
        No space is left; no file remains.
    """
    if (vertices is not None) + names + renumber > 1:
        raise ArgumentError("pass only one of vertices, names and renumber", name="names")
    numbers = VertexNumbers("string" if names else "int64") if names or renumber else None
    reader = EdgeReader(source, vertices=vertices, weights=weights, columns=columns, numbers=numbers)

    def report(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(stage, *((reader.position(), reader.size) if stage == "read" else (done, total)))

    with contextlib.closing(reader):
        return build(
            reader.batches,
            out,
            vertices=reader.vertices,
            undirected=undirected,
            symmetric=reader.symmetric,
            order=order,
            source=reader.path.name,
            weights=weights,
            in_edges=in_edges,
            names=None if numbers is None else numbers.names,
            memory_bytes=memory_bytes,
            progress=report,
            overwrite=overwrite,
        )
