"""A graph that kernels can traverse: ``LoadedGraph``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._check import checked_device
from ..array import Array, open_array
from ..cache import Cache
from ..errors import ArgumentError, ClosedError, FormatError
from ..targets import default_device, to_device
from .graph import AGAIN, Graph

_CHECKED = 1 << 20
MAX_WINDOWS = 32
"""Maximum number of windows in which all edges are read ahead."""


class LoadedGraph:
    """A graph for kernels, with its destinations behind a cache and its offsets in device memory.

    Weights and in-edges are opened on first use, with the same options and in the same cache. Algorithms such as `bfs`
    and `connected_components` accept a loaded graph, so that several runs share one cache. It is a context manager;
    `close` releases everything.

    Parameters
    ----------
    graph : Graph or path-like
        The graph on disk.
    edges : Array, optional
        An open array with the destinations of `graph`, if they are stored outside of its folder, for example on a
        drive. The caller closes the array. No further option is needed then.
    device : str, optional
        As for `warpwell.open`.
    **options
        Options with which `warpwell.open` opens the destinations: ``tier``, ``cache``, ``page_size``, ``stats``,
        ``timeout``, ``threads`` and more.

    Attributes
    ----------
    graph : Graph
    device : {"cpu", "cuda", "interp"}
    edges : Array
        Destinations, dtype `Graph.destinations`, shape ``(graph.edges,)``. On "interp" an item is a NumPy
        scalar: take ``i64(edges[i])`` before arithmetic.
    offsets : device array
        int64, shape ``(graph.vertices + 1,)``.
    warp : int
        Lanes of a warp: 32 on "cuda", otherwise 1.

    Raises
    ------
    FormatError
        The folder is not a graph, or its offsets do not ascend.
    WarpwellError
        See `Graph.open` and `warpwell.open`.
    """

    def __init__(
        self,
        graph: Graph | str | Path,
        *,
        edges: Array | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        self.graph = graph if isinstance(graph, Graph) else Graph.open(graph)
        if edges is not None:
            device = self._require_edges(edges, device)
        cache = options.get("cache")
        self.device = checked_device(device or (cache.device if isinstance(cache, Cache) else default_device()))
        self.warp = 32 if self.device == "cuda" else 1
        self._options = {"device": self.device, **options}
        self._opened: dict[Path, Any] = {} if edges is None else {self.graph.edges_path: edges}
        self._caller_edges = edges
        self._closed = False
        try:
            self.edges = self._array(self.graph.edges_path)
            self.offsets = self._offsets(self.graph.offsets_path)
        except BaseException:
            self.close()
            raise

    def _require_edges(self, edges: Array, device: str | None) -> str:
        """Return the device of destinations that the caller has opened; raise if they do not fit the graph."""
        graph = self.graph
        if edges.dtype != graph.destinations or edges.shape != (graph.edges,):
            raise ArgumentError(
                f"edges holds {edges.dtype} of shape {edges.shape}, but the destinations of {graph.path} are "
                f"{graph.destinations} of shape ({graph.edges},): copy {graph.edges_path.name} to it",
                name="edges",
            )
        if device is not None and checked_device(device) != edges.device:
            raise ArgumentError(f"edges is open for {edges.device!r}, but device is {device!r}: omit it", name="device")
        return edges.device

    @property
    def in_memory(self) -> bool:
        """Whether the edges are in memory, so that kernels read no storage."""
        return self.edges.tier not in ("storage", "host-cached")

    @property
    def on_device(self) -> bool:
        """Whether the edges are in device memory, like the first neighbors."""
        return self.edges.tier == "device"

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that kernels of a traversal index: destinations, sources of in-edges, first neighbors."""
        parts = [self.edges]
        if self.graph.in_edges:
            parts += [self.in_edges] if self.on_device else [self.in_edges, self.heads]
        return tuple(dict.fromkeys(part for part in parts if isinstance(part, Array)))

    @property
    def vertex_bytes(self) -> int:
        """Bytes of offsets and first neighbors that have been read into device memory."""
        return sum(part.nbytes for part in self._opened.values() if not isinstance(part, Array))

    @property
    def page_items(self) -> int:
        """Number of destinations in a page."""
        return max(1, self.edges.cache.page_size // self.edges.dtype.itemsize)

    def windows(self, edges: Array) -> Iterator[tuple[int, int]]:
        """Yield windows [first, end) that cover all edges, while their pages are read ahead.

        There is only one window if the edges are in memory, or are many times larger than the cache, because each
        window costs a launch or two.
        """
        if self.in_memory or edges.nbytes > MAX_WINDOWS // 2 * edges.cache.cache_bytes:
            yield 0, edges.size
            return
        pages = edges.page_set()
        pages.add_range(0, edges.size)
        yield from pages.waves()

    @property
    def weights(self) -> Array | None:
        """The weights of `edges`, int32 or float32, or None."""
        return None if self.graph.weights is None else self._array(self.graph.weights_path)

    @property
    def heads(self) -> Any:
        """The first neighbors of each vertex (`graph.HEAD` of them, the sources of in-edges), padded with -1.

        Searches read all of them in order, several times. So they are in device memory, like the offsets, unless they
        are larger than the cache: then they are an array in the same cache. If the caller has opened the edges, first
        neighbors are always in device memory: the cache of a drive cannot read their file.
        """
        path = self._of_in_edges(self.graph.heads_path)
        shares_cache = self._caller_edges is None and not self.in_memory
        if shares_cache and path.stat().st_size > self.edges.cache.cache_bytes:
            return self._array(path)
        return self._once(path, lambda: to_device(self.device, np.load(path)))

    @property
    def in_offsets(self) -> Any:
        """Like `offsets`, for the edges that end in a vertex; the same object if the graph is undirected.

        Raises
        ------
        ArgumentError
            The graph was made without in-edges. `in_edges` raises this, too.
        """
        return self._offsets(self._of_in_edges(self.graph.in_offsets_path))

    @property
    def in_edges(self) -> Array:
        """Sources of the edges that end in a vertex, like `edges`."""
        return self._array(self._of_in_edges(self.graph.in_edges_path))

    def _of_in_edges(self, path: Path) -> Path:
        require_in_edges(self.graph)
        return path

    def _once(self, path: Path, read: Callable[[], Any]) -> Any:
        """Return the result of `read` for a file; call `read` on first use."""
        if path not in self._opened:
            if self._closed:
                raise ClosedError(f"the graph {self.graph.path} is closed: make another LoadedGraph")
            self._opened[path] = read()
        return self._opened[path]

    def _array(self, path: Path) -> Array:
        options, first = self._options, self._opened.get(self.graph.edges_path)
        if first is not None and first.tier in ("storage", "host-cached"):
            options = {"device": self.device, "tier": first.tier, "cache": first.cache}
        array: Array = self._once(path, lambda: open_array(path, name=str(path), **options))
        return array

    def _offsets(self, path: Path) -> Any:
        return self._once(path, lambda: to_device(self.device, _checked_offsets(path, self.graph.vertices)))

    def close(self) -> None:
        """Close the arrays and drop the offsets (idempotent)."""
        self._closed = True
        # In reverse order, because the destinations own the cache.
        for path in reversed(list(self._opened)):
            if isinstance(self._opened[path], Array) and self._opened[path] is not self._caller_edges:
                self._opened[path].close()
            del self._opened[path]
        self.offsets = None

    def __enter__(self) -> LoadedGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def require_in_edges(graph: Graph) -> None:
    """Raise ArgumentError if the edges that end in a vertex cannot be read."""
    if not graph.in_edges:
        raise ArgumentError(
            f"{graph.path} is directed and has no in-edges: convert its edges again with in_edges=True "
            "(`warpwell graph convert EDGES OUT --in-edges`)"
        )


def _checked_offsets(path: Path, vertices: int) -> Any:
    """Return offsets; raise unless they ascend from 0 to the number of edges: kernels compute their work from them."""
    offsets = np.load(path, mmap_mode="r")
    for first in range(0, vertices, _CHECKED):
        part = offsets[first : first + _CHECKED + 1]
        falls = np.flatnonzero(part[1:] < part[:-1])
        if falls.size:
            raise FormatError(
                f"{path}: offset {first + int(falls[0]) + 1} is smaller than the previous offset. {AGAIN}",
                path=path,
            )
    return offsets
