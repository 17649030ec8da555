"""A graph that kernels can traverse: ``LoadedGraph``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..array import open_array
from ..cache import Cache
from ..errors import ArgumentError, FormatError
from ..targets import default_device
from ..targets.arrays import to_device, to_host
from .graph import AGAIN, Graph

_CHECKED = 1 << 20


class LoadedGraph:
    """A graph for kernels: destinations behind a cache, offsets in device memory.

    `bfs` and `connected_components` accept it, so that several runs share one cache. It is a context manager; `close`
    releases everything.

    Parameters
    ----------
    graph : Graph or path-like
        The graph on disk.
    device, tier, cache, page_size, stats
        As for `warpwell.open`, which opens the destinations with them.
    **options
        Further options of `warpwell.open` (``timeout``, ``threads``, ...).

    Attributes
    ----------
    graph : Graph
    device : {"cpu", "cuda", "interp"}
    edges : Array
        Destinations, int64, shape ``(graph.edges,)``.
    offsets : device array
        int64, shape ``(graph.vertices + 1,)``.
    warp : int
        Lanes of a warp: 32 on "cuda", otherwise 1.

    Raises
    ------
    FormatError
        The folder is not a graph, or its offsets do not ascend.
    WarpwellError
        As `Graph.open` and `warpwell.open`.
    """

    def __init__(
        self,
        graph: Graph | str | Path,
        *,
        device: str | None = None,
        tier: str = "storage",
        cache: int | str | Cache = "256MiB",
        page_size: int | str | None = None,
        stats: str | None = None,
        **options: Any,
    ) -> None:
        self.graph = graph if isinstance(graph, Graph) else Graph.open(graph)
        self.device = device or (cache.device if isinstance(cache, Cache) else default_device())
        self.warp = 32 if self.device == "cuda" else 1
        self.edges = open_array(
            self.graph.edges_path, device=self.device, tier=tier, cache=cache, page_size=page_size,
            stats=stats, name=str(self.graph.edges_path), **options,
        )  # fmt: skip
        try:
            offsets = np.load(self.graph.offsets_path, mmap_mode="r")
            _check(offsets, self.graph)
            self.offsets = to_device(self.device, offsets)
        except BaseException:
            self.edges.close()
            raise

    def require_destinations(self, counters: Any) -> None:
        """Raise FormatError if a kernel counted destinations that are not vertices (see `work_items.BAD`)."""
        bad = int(to_host(counters)[1])
        if bad:
            raise FormatError(
                f"{self.graph.edges_path}: {bad} destinations are outside of 0 to {self.graph.vertices - 1}. "
                f"{AGAIN}",
                path=self.graph.edges_path,
            )

    def close(self) -> None:
        """Close the destinations and drop the offsets (idempotent)."""
        self.edges.close()
        self.offsets = None

    def __enter__(self) -> LoadedGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def borrowed(
    graph: Graph | LoadedGraph | str | Path, options: dict[str, Any], check: Callable[[Graph], None]
) -> Iterator[LoadedGraph]:
    """Yield a `LoadedGraph`: the caller's, which stays open, or a new one, which is closed; `check` sees it first."""
    if isinstance(graph, LoadedGraph):
        check(graph.graph)
        if options:
            raise ArgumentError(f"the graph is loaded already: give {', '.join(options)} to LoadedGraph")
        yield graph
        return
    found = graph if isinstance(graph, Graph) else Graph.open(graph)
    check(found)
    with LoadedGraph(found, **options) as loaded:
        yield loaded


def _check(offsets: Any, graph: Graph) -> None:
    """Raise unless offsets ascend from 0 to the number of edges: kernels compute their work from them."""
    for first in range(0, graph.vertices, _CHECKED):
        part = offsets[first : first + _CHECKED + 1]
        falls = np.flatnonzero(part[1:] < part[:-1])
        if falls.size:
            raise FormatError(
                f"{graph.offsets_path}: offset {first + int(falls[0]) + 1} is smaller than the one before. {AGAIN}",
                path=graph.offsets_path,
            )
