"""`Run`: many launches of kernels on the same arrays, which are opened to kernels once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import Array, PageSet
from ...targets import Kernel, LaunchFlag, begin, finish, kernel, to_host
from ...targets.primitives import grid
from ..loaded import LoadedGraph
from .work_items import up_to_warps

MARKED = 1 << 14
"""Edges whose pages a thread marks."""


class Run:
    """The launches of one traversal (a context).

    To begin and end a launch with an array on storage takes half a millisecond (service threads wake, errors are looked
    at), and a traversal launches a kernel or two a level: so its arrays begin here, and end with the context, which
    raises the error that device code latched.

    Parameters
    ----------
    loaded : LoadedGraph
    *arrays : Array
        Those of the graph that its kernels subscript.
    """

    def __init__(self, loaded: LoadedGraph, *arrays: Array) -> None:
        self.loaded = loaded
        self._arrays = arrays
        self._flag = LaunchFlag(loaded.device)
        self._begun: list[Any] = []
        self._views: dict[int, Any] = {}
        self._series: Any = None

    def __enter__(self) -> Run:
        try:
            views = begin(self._arrays, self._begun, self._arrays, self._flag)
        except BaseException:
            finish(self._begun, self._flag)
            raise
        self._views = {id(array): view for array, view in zip(self._arrays, views, strict=True)}
        if self.loaded.device == "cuda":
            from ...targets.compiler import Series

            self._series = Series(self._flag)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait()
        finally:
            finish(self._begun, self._flag)

    def abort(self) -> None:
        """Abort all waits of device code (on Ctrl-C)."""
        self._flag.interrupt()
        for array in self._arrays:
            array.abort(self._flag)

    def _wait(self) -> None:
        if self._series is not None:
            from ...targets.compiler import synchronize

            synchronize([self])

    def launch(self, kernel: Kernel, threads: int, *args: Any, reads: bool = True) -> None:
        """Run a kernel over a number of threads, in whole warps (a block kernel: over that number of blocks).

        On a GPU, with edges in memory or if it `reads` none, it returns at once: `read` waits.
        """
        shape = threads if kernel.block is not None else up_to_warps(threads, self.loaded.warp)
        if not shape:
            return
        if self._series is not None:
            self._series.launch(kernel, (shape,), [self._views.get(id(a), a) for a in args])
            if reads and not self.loaded.in_memory:
                self._wait()  # it may wait for storage, which Ctrl-C ends; and what it marks is read next
            return
        services = (
            [step for array in self._arrays for step in array.interp_services()]
            if self.loaded.device == "interp"
            else ()
        )
        kernel[shape](
            *(self._views.get(id(a), a) for a in args),
            device=self.loaded.device,
            flag=self._flag,
            aborts=self._arrays,
            services=services,
        )

    @property
    def failed(self) -> bool:
        """Whether device code latched an error: then what kernels wrote means nothing."""
        return self._flag.failed

    def all_edges(self, pages: PageSet | None) -> Iterator[tuple[int, int]]:
        """Yield windows that cover all edges, which are read ahead where there is a page set of them."""
        edges = self.loaded.graph.edges
        if pages is None:
            yield 0, edges
            return
        pieces = -(-edges // MARKED)
        self.launch(mark_all, pieces, pages, pieces, edges)
        yield from self.loaded.waves(pages, pages.count())

    def read(self, counters: Any) -> NDArray[Any]:
        """Return counters as they are after the last launch, on the host."""
        if self._series is None:
            return np.array(to_host(counters))
        if not self.loaded.in_memory:
            self._wait()
        found: NDArray[Any] = self._series.read(counters)
        return found


@kernel
def mark_all(pages, pieces, edges):  # type: ignore[no-untyped-def]
    """Mark the pages of all edges (thread a piece)."""
    index = grid(1)
    if index < pieces:
        pages.add_range(index * MARKED, min((index + 1) * MARKED, edges))


def try_waves(pages: PageSet, edges: Array) -> None:
    """Drop the marks of a set, and compile what reads ahead by reading a page of `edges`."""
    mark_all[1](pages, 0, 0)
    pages.clear()
    if edges.size:
        pages.add(0)
        for _ in pages.waves():
            pass
