"""`Result` of an algorithm; `execute`, which runs an algorithm; `Run`, its launches on arrays that begin once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...array import Array
from ...cache import Statistics
from ...errors import ArgumentError, FormatError
from ...targets import Kernel, LaunchFlag, begin, finish, to_host, zeros
from ..graph import AGAIN, Graph, Progress
from ..loaded import LoadedGraph
from .work_items import BAD, N_COUNTERS, up_to_warps


@dataclass(frozen=True)
class Result:
    """The result of an algorithm on a graph.

    Attributes
    ----------
    values : ndarray, shape (vertices,)
        A value for each vertex, by the vertex numbers of the input; each algorithm describes it. Empty for `triangles`.
    count : int
        Number of vertices with a path from the source (`bfs`, `sssp`), of components, of triangles, or of all vertices
        (`pagerank`).
    rounds : int
        Largest level (`bfs`), number of iterations (`pagerank`), or number of rounds (all other algorithms).
    seconds : float
        Time of the algorithm, without opening the graph and compiling kernels.
    stats : Statistics
        Counters of the cache during the algorithm.
    change : float
        Sum of the absolute changes of all ranks in the last iteration of `pagerank`, otherwise 0.
    """

    values: NDArray[Any]
    count: int
    rounds: int
    seconds: float
    stats: Statistics
    change: float = 0.0


class Work:
    """One call of an algorithm, with its arrays in device memory.

    Parameters
    ----------
    loaded : LoadedGraph
    *arrays : Array
        The arrays of the graph that its kernels index.

    Attributes
    ----------
    counters : device array
        See `work_items`.
    change : float
        See `Result`.
    """

    change = 0.0

    def __init__(self, loaded: LoadedGraph, *arrays: Array) -> None:
        self.loaded, self.graph, self.device, self.arrays = loaded, loaded.graph, loaded.device, arrays
        self.counters = zeros(loaded.device, N_COUNTERS)

    def run(self, run: Run, report: Progress) -> None:
        """Run the algorithm."""
        raise NotImplementedError

    def result(self) -> tuple[NDArray[Any], int, int]:
        """Return the values by stored vertex, the count and the rounds; see `Result`."""
        raise NotImplementedError


def execute(
    graph: Graph | LoadedGraph | str | Path,
    options: dict[str, Any],
    check: Callable[[Graph], None],
    start: Callable[[LoadedGraph], Work],
    progress: Progress | None,
) -> Result:
    """Run an algorithm on a loaded graph, which stays open, or on a graph that is opened with `options` for this run.

    `check` raises if the graph does not suit the algorithm, before anything is loaded.
    """
    if isinstance(graph, LoadedGraph):
        check(graph.graph)
        if options:
            raise ArgumentError(f"the graph is loaded already: pass {', '.join(options)} to LoadedGraph")
        return measure(start(graph), graph, progress)
    found = graph if isinstance(graph, Graph) else Graph.open(graph)
    check(found)
    with LoadedGraph(found, **options) as loaded:
        return measure(start(loaded), loaded, progress)


def measure(work: Work, loaded: LoadedGraph, progress: Progress | None) -> Result:
    """Run an algorithm, and return its result by the vertex numbers of the input."""
    report = progress or (lambda stage, done, total: None)
    before, started = loaded.edges.stats, time.perf_counter()
    with Run(loaded, report, *work.arrays) as run:
        work.run(run, report)
    seconds = time.perf_counter() - started - run.compile_seconds
    bad, graph = int(to_host(work.counters)[BAD]), loaded.graph
    if bad:
        message = f"{graph.path}: {bad} destinations are outside of 0 to {graph.vertices - 1}. {AGAIN}"
        raise FormatError(message, path=graph.path)
    values, count, rounds = work.result()
    values = graph.original(values) if values.size else values
    return Result(values, count, rounds, seconds, loaded.edges.stats - before, work.change)


class Run:
    """The launches of one algorithm (a context).

    Beginning and ending a launch with an array on storage takes half a millisecond (service threads wake up, errors are
    checked), and a traversal launches one or two kernels per level. So the arrays begin only one launch, with the first
    kernel that reads them. They end this launch when the context ends, and raise the error that device code latched.

    Parameters
    ----------
    loaded : LoadedGraph
    report : callable
        Called before and after a kernel is compiled, at its first launch.
    *arrays : Array
        The arrays of the graph that its kernels index.

    Attributes
    ----------
    compile_seconds : float
        Time for compiling kernels so far.
    """

    def __init__(self, loaded: LoadedGraph, report: Progress, *arrays: Array) -> None:
        self.loaded = loaded
        self.compile_seconds = 0.0
        self._report = report
        self._compiled: set[Kernel] = set()
        self._arrays = arrays
        self._flag = LaunchFlag(loaded.device)
        self._started: list[Any] = []
        self._views: dict[int, Any] = {}
        self._series: Any = None

    def __enter__(self) -> Run:
        if self.loaded.device == "cuda":
            from ...targets.compiler import Series

            self._series = Series(self._flag)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait()
        finally:
            self._end()

    def _begin(self) -> None:
        """Begin a launch with the arrays, unless it has begun."""
        if not self._views:
            views = begin(self._arrays, self._started, self._arrays, self._flag)
            self._views = {id(array): view for array, view in zip(self._arrays, views, strict=True)}

    def _end(self) -> None:
        """End the launch with the arrays, if it has begun."""
        ended, self._started[:], self._views = list(self._started), [], {}
        finish(ended, self._flag)

    def abort(self) -> None:
        """Abort all waits of device code (on Ctrl-C)."""
        self._flag.interrupt()
        for array in self._arrays:
            array.abort(self._flag)

    def _wait(self) -> None:
        if self._series is not None:
            from ...targets.compiler import synchronize

            synchronize([self])

    def launch(self, kernel: Kernel, threads: int, *args: Any) -> None:
        """Run a kernel over a number of threads, in whole warps (a block kernel: over that number of blocks).

        On a GPU, it returns at once unless the kernel reads storage: `read` waits.
        """
        shape = threads if kernel.block is not None else up_to_warps(threads, self.loaded.warp)
        if not shape:
            return
        reads = any(value is array for value in args for array in self._arrays)
        if reads:
            self._begin()
        if kernel not in self._compiled:
            self._compile(kernel, shape, [self._views.get(id(a), a) for a in args])
            if reads:
                self._begin()
        views = [self._views.get(id(a), a) for a in args]
        if self._series is not None:
            self._series.launch(kernel, (shape,), views)
            if reads and not self.loaded.in_memory:
                self._wait()  # The kernel may wait for storage; Ctrl-C ends the wait.
            return
        is_interpreted = self.loaded.device == "interp"
        services = [step for array in self._arrays for step in array.interp_services()] if is_interpreted else ()
        kernel[shape](*views, device=self.loaded.device, flag=self._flag, aborts=self._arrays, services=services)

    def _compile(self, kernel: Kernel, shape: int, views: list[Any]) -> None:
        """Compile a kernel for arguments of these types."""
        started = time.perf_counter()
        self._report("compile", 0, 1)
        if self._series is not None:
            self._series.compile(kernel, (shape,), views)
        elif self.loaded.device == "cpu":
            from ...targets.compiler import compile_launch

            self._end()  # During a launch the I/O threads poll, which takes a fifth of a core from the compiler.
            compile_launch(kernel, views)
        self._compiled.add(kernel)
        self.compile_seconds += time.perf_counter() - started
        self._report("compile", 1, 1)

    @property
    def failed(self) -> bool:
        """Whether device code latched an error: then the values that kernels wrote are invalid."""
        return self._flag.failed

    def read(self, counters: Any) -> NDArray[Any]:
        """Return counters as they are after the last launch, on the host."""
        if self._series is None:
            return np.array(to_host(counters))
        if not self.loaded.in_memory:
            self._wait()
        values: NDArray[Any] = self._series.read(counters)
        return values
