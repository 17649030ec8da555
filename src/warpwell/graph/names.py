"""Names of vertices: `VertexNumbers`, `write_names` and `open_names`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from .._check import imported
from ..errors import ArgumentError, FormatError
from ..replacing import durable_file
from .external import Vertices

Names = Collection[str] | Collection[int]
NAMES = "names.arrow"
"""The file in the folder of a graph with a column `name`: row v is the name of vertex v."""
_BATCH = 1 << 20


def library(name: str) -> Any:
    """Return a module of a package that the extra `graph` installs."""
    return imported(name, "graph")


class VertexNumbers:
    """Numbers vertices from 0 in the order in which their names first appear. All names are in memory.

    Parameters
    ----------
    kind : {"string", "int64"}
        Type of the names.

    Attributes
    ----------
    names : dict
        The number of each name, in ascending order.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.names: dict[Any, int] = {}

    def number(self, sources: Any, targets: Any) -> tuple[Vertices, Vertices]:
        """Return the numbers of the ends of edges, given as two pyarrow arrays of names."""
        in_file_order = np.arange(2 * len(sources)).reshape(2, -1).T.ravel()
        ends = library("pyarrow").concat_arrays([sources, targets]).take(in_file_order).dictionary_encode()
        names = self.names
        numbers = np.array([names.setdefault(name, len(names)) for name in ends.dictionary.to_pylist()], np.int64)
        found = numbers[ends.indices.to_numpy()]
        return found[0::2], found[1::2]


def write_names(folder: Path, names: Names, vertices: int) -> None:
    """Write the names of all vertices to the folder of a graph.

    Raises
    ------
    ArgumentError
        The names are not all strings or all integers, some are equal, or there are more or fewer than vertices.
    """
    arrow = library("pyarrow.ipc") and library("pyarrow")
    try:
        column = arrow.array(list(names), arrow.int64() if isinstance(next(iter(names), ""), int) else arrow.string())
    except (ValueError, arrow.ArrowTypeError, OverflowError) as error:  # ArrowInvalid and UnicodeEncodeError too
        raise ArgumentError(f"names are all strings or all integers of 64 bits ({error})", name="names") from error
    table = arrow.table({"name": column})
    distinct = library("pyarrow.compute").count_distinct(column, mode="only_valid").as_py()
    if not distinct == len(names) == vertices:
        raise ArgumentError(f"{vertices} vertices need as many different names, got {distinct}", name="names")
    with durable_file(folder / NAMES) as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=_BATCH)


def open_names(folder: Path, vertices: int) -> Any:
    """Return the names of a graph's vertices as a pyarrow column, in mapped memory, or None without names.

    Raises
    ------
    FormatError
        The file is damaged, or does not have one name per vertex.
    """
    path = folder / NAMES
    if not path.is_file():
        return None
    arrow = library("pyarrow.ipc") and library("pyarrow")
    try:
        with arrow.memory_map(str(path)) as file:
            column = arrow.ipc.open_file(file).read_all().column("name")
    except (arrow.ArrowException, OSError, KeyError) as error:
        raise FormatError(f"{path} is damaged ({error}); copy or convert the graph again", path=path) from error
    if column.type not in (arrow.string(), arrow.int64()) or len(column) != vertices or column.null_count:
        problem = f"{path} has {len(column)} names of type {column.type} for {vertices} vertices"
        raise FormatError(f"{problem}; convert the graph again", path=path)
    return column
