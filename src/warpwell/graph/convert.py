"""Files of edges into graphs on disk: ``convert``."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

from warpwell.graph.build import Progress, build
from warpwell.graph.graph import Graph
from warpwell.graph.lines import Edges
from warpwell.graph.source import EdgeSource, open_source


def convert(
    source: str | Path,
    out: str | Path,
    *,
    undirected: bool = False,
    vertices: int | None = None,
    memory_bytes: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Convert a file of edges to a graph on disk.

    Reads SNAP edge lists, GAP ``.el`` and ``.wel``, MatrixMarket ``.mtx``, each also compressed with gzip,
    xz, bzip2 or zstd, and sparse matrices that SciPy saved as ``.npz``. A graph keeps no weights or values: a
    warning says so where a ``.wel`` or ``.mtx`` file has them; those of ``.npz`` are skipped. The
    graph may exceed the memory, and `out` appears whole or not at all. A graph that does not fit into
    `memory_bytes` needs about twice its own size on the disk of `out` meanwhile.

    Parameters
    ----------
    source : path-like
        The file of edges.
    out : path-like
        Folder of the graph, ``NAME.ww`` by custom.
    undirected : bool, default False
        Add the reverse of each edge, then keep each edge once; self-loops stay. Otherwise the edges are
        those of the file, repeated ones included.
    vertices : int, optional
        Vertices of the graph, 1 to 2**48. Unless given: the size of a matrix, or the largest vertex of an
        edge list and those below it.
    memory_bytes : int, optional
        Memory for sorting, in bytes, at least 64 KiB; half of the free memory unless given. Offsets, 8
        bytes a vertex, come on top.
    progress : callable, optional
        Called now and then as ``progress(stage, done, total)``: ``"read"`` with bytes of `source`, then
        ``"write"`` with edges. At the end of "write", done is less than total where equal edges were
        merged.
    overwrite : bool, default False
        Replace a graph that is at `out`.

    Returns
    -------
    Graph
        The new graph, opened.

    Raises
    ------
    MissingFileError
        No such file, or no folder to write into.
    ArgumentError
        `out` is there already, or an argument is out of range.
    EdgeListError
        A malformed line, or a vertex that is negative, no integer or too large; names file and line.
    FormatError
        The file is of no known format, damaged, or holds no graph.
    StorageFullError
        No space is left; nothing stays behind.

    Examples
    --------
    >>> graph = convert("cnr-2000.txt.gz", "cnr.ww")  # doctest: +SKIP
    >>> graph.vertices, graph.edges  # doctest: +SKIP
    (325557, 3216152)
    """

    def write_only(stage: str, done: int, total: int) -> None:
        if progress is not None and stage == "write":
            progress(stage, done, total)

    with contextlib.closing(open_source(source, vertices)) as reader:
        if reader.weighted:
            warnings.warn(
                f"{reader.path.name} has a weight beside each edge; the graph keeps the edges and drops the weights",
                UserWarning,
                stacklevel=2,
            )
        return build(
            _reported(reader, progress),
            out,
            vertices=reader.vertices,
            undirected=undirected,
            symmetric=reader.symmetric,
            source=reader.path.name,
            memory_bytes=memory_bytes,
            progress=write_only,
            overwrite=overwrite,
        )


def _reported(reader: EdgeSource, progress: Progress | None) -> Iterator[Edges]:
    for edges in reader:
        yield edges
        if progress is not None:
            progress("read", reader.position(), reader.size)
