"""`Run`: many launches of kernels on the same arrays, which are opened to kernels once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import Array, PageSet
from ...targets import Kernel
from ...targets.arguments import begin, finish
from ...targets.arrays import to_host
from ...targets.fault import LaunchFlag
from ..loaded import LoadedGraph
from .work_items import up_to_warps


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

    def __enter__(self) -> Run:
        try:
            views = begin(self._arrays, self._begun, self._arrays, self._flag)
        except BaseException:
            finish(self._begun, self._flag)
            raise
        self._views = {id(array): view for array, view in zip(self._arrays, views, strict=True)}
        return self

    def __exit__(self, *_: object) -> None:
        finish(self._begun, self._flag)

    def launch(self, kernel: Kernel, threads: int, *args: Any) -> None:
        """Run a kernel over a number of threads, in whole warps (a block kernel: over that number of blocks)."""
        shape = threads if kernel.block is not None else up_to_warps(threads, self.loaded.warp)
        services = [step for array in self._arrays for step in array.interp_services()] \
            if self.loaded.device == "interp" else ()  # fmt: skip
        kernel[shape](
            *(self._views.get(id(a), a) for a in args), device=self.loaded.device, flag=self._flag,
            aborts=self._arrays, services=services,
        )  # fmt: skip

    @property
    def failed(self) -> bool:
        """Whether device code latched an error: then what kernels wrote means nothing."""
        return self._flag.failed

    def read(self, counters: Any) -> NDArray[np.int64]:
        """Return counters as they are after the last launch, on the host."""
        return np.array(to_host(counters))


def try_waves(pages: PageSet, edges: Array) -> None:
    """Drop the marks of a set, and compile what reads ahead by reading a page of `edges`."""
    pages.clear()
    if edges.size:
        pages.add(0)
        for _ in pages.waves():
            pass
