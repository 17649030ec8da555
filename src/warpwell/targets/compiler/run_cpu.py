"""Launches on the `cpu` target: many more OS threads than cores, running compiled code without the GIL."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numba import typeof
from numba.core.errors import NumbaError

from ... import errors
from ..._os import Interrupts, Threads
from ..._settings import settings
from .. import primitives
from ..fault import FLAG, LaunchFlag
from ..signature import argument, check_arguments
from .compiled import dispatcher
from .compiling import compiling, explained
from .hooks import intrinsics_for
from .numba_patches import bounded_ranges

_logger = logging.getLogger(__name__)

THREADS = settings.cpu_threads
"""OS threads of a launch. More than cores: a thread that waits for storage costs nothing."""

REPORT_SECONDS = 1.0
"""Time in seconds until an error is logged if Ctrl-C has not ended a launch."""

_DRIVER = """
def driver(context, counter, total, chunk, interrupted{parameters}):
    set_context(context)
    while True:
        start = fetch_add(counter, chunk, DEVICE)
        if start >= total:
            break
        for index in range(start, min(start + chunk, total)):
            if load_relaxed(interrupted, SYSTEM) != 0:
                set_context(0)
                return
            store_relaxed(context, index, BLOCK)
            function({arguments})
    set_context(0)
"""


_threads = Threads("warpwell-cpu")


def _after_fork() -> None:
    global _threads
    _threads = Threads("warpwell-cpu")  # the others are threads of the parent


os.register_at_fork(after_in_child=_after_fork)


def run(
    launch: Any, values: list[Any], total: int, flag: LaunchFlag, interrupts: Interrupts
) -> Callable[[], bool] | None:
    """Run a compiled launch and wait for it. After a second Ctrl-C return a function that reports if it is over."""
    driver = launch.kernel.compiled["cpu", len(values)]
    # small chunks balance the load; large chunks change the counter less often
    chunk = max(1, min(1024, total // (THREADS * 8)))
    threads = max(1, min(THREADS, -(-total // chunk)))
    counter = np.zeros(8, np.int64)
    contexts = np.zeros((threads, 8), np.int64)
    contexts[:, 1:4] = (*launch.shape, 1, 1)[:3]  # code divides by them
    contexts[:, FLAG] = flag.address
    arguments = host_arrays(launch.kernel, values)
    done = threading.Semaphore(0)
    failures: list[BaseException] = []
    ended: list[int] = []

    def job(context: int, held: Any = (contexts, flag)) -> None:  # alive, also if the caller stops waiting
        try:
            driver(context, counter.ctypes.data, total, chunk, flag.address + 8, *arguments)
        except BaseException as error:  # raised in the calling thread below
            from .symbols import forget_context  # imports LLVM

            forget_context()
            failures.append(error)
        finally:
            ended.append(context)
            done.release()

    first = contexts[0].ctypes.data
    calls = [functools.partial(job, first + 64 * k) for k in range(threads)]
    try:
        _threads.run(*calls)
    except RuntimeError:  # Python is shutting down.
        for call in calls:
            call()
    since, has_logged = 0.0, False
    while len(ended) < threads:
        try:
            done.acquire(timeout=0.2)
            if not interrupts.raised or not interrupts.may_leave:
                continue
            if len(interrupts.raised) > 1:
                _leak(driver, arguments, contexts, counter, flag)
                return lambda: len(ended) == threads
            since = since or time.monotonic()
            if not has_logged and time.monotonic() > since + REPORT_SECONDS:
                has_logged = _log_running(launch.kernel.__name__)
        except BaseException as error:
            # An exception of a signal handler: the threads are running, and use these objects.
            interrupts.catch(error)
    if failures:
        raise failures[0]
    return None


def _log_running(name: str) -> bool:
    _logger.error("warpwell: kernel %r still runs one index: press Ctrl-C again to abandon it", name)
    return True


def _leak(*held: Any) -> None:
    """Keep the objects that abandoned threads use, even while Python exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


_LEADING = 0, 0, 0, 0, 0
"""Values for a driver's own parameters."""
_LEADING_TYPES = tuple(map(typeof, _LEADING))  # once, because each call costs a microsecond


def host_arrays(kernel: Any, values: Sequence[Any]) -> list[Any]:
    """Return launch values with arrays of other libraries in host memory as NumPy's.

    Raises
    ------
    ArgumentError
        Its library cannot convert it, for example PyTorch a tensor with a gradient, or of bfloat16.
    """
    found = list(values)
    for k, value in enumerate(values):
        if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
            try:
                found[k] = np.asarray(value)
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                raise errors.ArgumentError(f"{argument(kernel, k)} is not an array for NumPy: {error}") from error
    return found


def load_cpu() -> None:
    """Import modules before launches in other threads need them: a child that is forked during an import deadlocks.

    Numba imports its own modules while it compiles, and a fork waits for compilations.
    """
    intrinsics_for("cpu")
    typeof(np.empty(0))


def is_compiled(kernel: Any, values: Sequence[Any]) -> bool:
    """Return True if a launch with these arguments needs no compiler."""
    driver = kernel.compiled.get(("cpu", len(values)))
    if driver is None:
        return False
    try:
        return (*_LEADING_TYPES, *map(typeof, host_arrays(kernel, values))) in driver.overloads
    except (ValueError, NotImplementedError, NumbaError):
        return False


def compile_launch(kernel: Any, values: Sequence[Any]) -> None:
    """Compile the driver of a launch with these arguments; raise if they are not valid.

    The workers do not compile: so there is one compilation, and a typing error is raised once.
    """
    compile_for(kernel, driver_of(kernel, "cpu", _DRIVER, len(values)), _LEADING, host_arrays(kernel, values))


def compile_for(kernel: Any, driver: Any, leading: tuple[int, ...], arguments: list[Any]) -> None:
    """Compile a driver for arguments unless it is compiled; raise if they are not valid."""
    try:
        signature = tuple(map(typeof, (*leading, *arguments)))
    except (ValueError, NotImplementedError, NumbaError) as error:
        check_arguments(kernel, arguments)
        raise errors.ArgumentError(f"kernel {kernel.__name__!r} cannot take its arguments: {error}") from error
    if signature not in driver.overloads:
        check_arguments(kernel, arguments)
        with compiling(f"kernel {kernel.__name__!r}"), explained(kernel, "cpu"), bounded_ranges():
            driver.compile(signature)


def driver_of(kernel: Any, kind: str, template: str, count: int, constants: Mapping[str, int] | None = None) -> Any:
    """Return the dispatcher of a loop over a kernel's indices. Its source takes `count` arguments after its own.

    `constants` are numbers that the source names.

    It is compiled once for a `kind`; see `compile_for`.
    """
    key = (kind, count)
    if key not in kernel.compiled:
        intrinsics_for("cpu")
        from .cpu_lowerings import set_context  # imports the compiler

        names = [f"argument{k}" for k in range(count)]
        source = template.format(parameters="".join(f", {n}" for n in names), arguments=", ".join(names))
        used = ("load_relaxed", "load_acquire", "store_relaxed", "store_release", "fetch_add", "clock_ns")
        scope = {"function": kernel.function, "set_context": set_context, **(constants or {}), "__name__": __name__}
        scope |= {n: getattr(primitives, n) for n in (*used, "BLOCK", "DEVICE", "SYSTEM")}
        exec(compile(source, "<warpwell driver>", "exec"), scope)
        made = dispatcher(scope["driver"], user=kernel.function, salt=source)
        return kernel.compiled.setdefault(key, made)  # another thread's first launch may have come before
    return kernel.compiled[key]
