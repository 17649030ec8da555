"""`AgentScheduler`: the scheduler of one device of a pool, in the process of its agent."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from .. import closing
from ..scheduler import Scheduler
from ..scheduler.extend import Core, Executor, Request, State


class AgentScheduler:
    """The `Scheduler` of one device, which a `PoolScheduler` calls. The caller numbers the tasks.

    It runs tasks in its own threads. Tasks and calls of streams, which run in the agent's lanes, do not wait for each
    other.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".
    ordinal : int
        Number of the GPU in this process.
    **options
        Options of `Scheduler`.
    """

    def __init__(self, device: str, ordinal: int = 0, **options: Any) -> None:
        def make() -> Executor:
            from ..scheduler.executors.cuda_executor import CudaExecutor

            return CudaExecutor(ordinal)

        closing.ready()
        self._scheduler = Scheduler(device, executor=make if device == "cuda" else None, **options)
        self._handles: dict[int, Future[None]] = {}

    def submit(self, name: str, tasks: Sequence[tuple[Any, ...]]) -> Future[tuple[str, float]]:
        """Submit a request and return a future of its first task; see `ended`. An invalid request fails its tasks.

        Parameters
        ----------
        name : str
        tasks : sequence of tuple
            Of each task: number, `LoadedCode` of the kernel, subscript, arguments, options.
        """
        _finish_stream()
        numbers = [number for number, *_ in tasks]
        try:
            created = [
                self._scheduler.task(code.launch(subscript), *arguments, **options)
                for _, code, subscript, arguments, options in tasks
            ]
            handles: Sequence[Future[None]] = self._scheduler.submit_request(Request(name or created[0].name, created))
        except BaseException as error:
            handles = [Future() for _ in tasks]
            for handle in handles:
                handle.set_exception(error)
        self._handles.update(zip(numbers, handles, strict=True))
        return self.ended(numbers[0])

    def ended(self, number: int) -> Future[tuple[str, float]]:
        """Return a future of a task: "done" or "cancelled" and the run time in seconds, or the error of the task."""
        end: Future[tuple[str, float]] = Future()

        def complete(handle: Future[None]) -> None:
            self._handles.pop(number, None)
            if handle.cancelled():
                end.set_result(("cancelled", 0.0))
            elif (error := handle.exception()) is not None:
                end.set_exception(error)
            else:
                job = getattr(handle, "job", None)
                end.set_result(("done", 0.0 if job is None else job.ran))

        self._handles[number].add_done_callback(complete)
        return end

    def cancel(self, number: int) -> tuple[bool, bool]:
        """Cancel a task. Return whether it will be cancelled (see `Handle.cancel`), and whether it already is."""
        handle = self._handles.get(number)
        return (False, False) if handle is None else (handle.cancel(), handle.cancelled())

    def state(self, number: int) -> str | None:
        """Return the state of a task, or None if it has ended."""
        handle = self._handles.get(number)
        state = getattr(handle, "state", None)
        return state.value if isinstance(state, State) else None

    def inspect(self, function: Callable[[Core], Any]) -> Any:
        """Call a function with the scheduler's core; see `Scheduler.inspect`."""
        return self._scheduler.inspect(function)

    def log(self) -> str:
        """Return the decisions, as `Log.write` writes them."""
        out = io.StringIO()
        self._scheduler.inspect(lambda core: self._scheduler.log.write(out))
        return out.getvalue()

    def close(self, cancel: bool = False) -> None:
        """Close the scheduler; see `Scheduler.close`."""
        self._scheduler.close(cancel=cancel)

    def __del__(self) -> None:
        # the program has exited or released the scheduler, so no thread waits for the tasks
        if hasattr(self, "_scheduler"):
            close = functools.partial(self._scheduler.close, cancel=True)
            closing.hand_over_to_thread(close, "warpwell-pool-retired")


def _finish_stream() -> None:
    """Wait for the stream of the call, because tasks run in other streams."""
    cupy = sys.modules.get("cupy")  # without CuPy, a call starts after the previous work of its stream
    if cupy is not None and cupy.cuda.is_available():
        cupy.cuda.get_current_stream().synchronize()
