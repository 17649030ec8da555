"""`Call`: a function that enqueues work of other libraries, or a captured CUDA graph, in the place of a launch.

A scheduler cannot look into it. So it runs whole, is never preempted, and what is known of it is its time, measured as
that of kernels is. It enqueues in a stream of the scheduler's, behind which an event tells its end.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import errors
from ..libcuda import driver
from ..targets import Block, Launch, LaunchFlag, memory_for
from ..targets.blocks import CONTROL_WORDS, fresh

WHY = "it is a function or a graph, not a kernel of Warpwell"
_THREADS = 256
_ROOM = 1 << 20
"""Blocks that it counts as: a whole device."""


def as_launch(launch: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return a launch and its arguments; a function or a graph becomes a `Call`, with those arguments that are arrays.

    Raise ArgumentError if a graph has arguments.
    """
    if isinstance(launch, Launch | type) or hasattr(launch, "compiled"):  # a kernel without [n] is refused as before
        return launch, args
    enqueue = _graph(launch)
    if enqueue is not None and args:
        raise errors.ArgumentError("a graph with arguments: they were captured with it; pass the graph alone")
    if enqueue is None and not callable(launch):
        return launch, args
    call = Call(launch, enqueue, args)
    return call, call.arrays


def at_present(launch: Any) -> Any:
    """Return the launch of a kernel in Python with the present values of its variables; other launches unchanged."""
    return launch.current() if type(launch) is Launch else launch


class _Unknown:
    """Stands for code that cannot be looked at."""


class _Callee:
    """What a `Call` has for a kernel: something to know it by, when it is submitted again."""

    block = _THREADS
    max_registers = 32

    def __init__(self, what: Any) -> None:
        self.__name__ = str(getattr(what, "__name__", type(what).__name__))
        self._own = _Unknown()
        # not kept: `_known` would keep the function, and with it what it encloses
        self._function = weakref.ref(what) if isinstance(what, types.FunctionType) else None
        self.compiled: dict[Any, Any] = {("cuda-forms",): None}
        self.checked: set[Any] = set()

    @property
    def function(self) -> Any:
        """A function, known by its code as a kernel is; in place of all else something of this process."""
        found = None if self._function is None else self._function()
        return self._own if found is None else found


_known: weakref.WeakKeyDictionary[Any, dict[Any, _Callee]] = weakref.WeakKeyDictionary()
"""By what has them, for two objects' methods do different work, and by the function."""


def _callee(what: Any) -> _Callee:
    """Return the same for the same function, method or graph."""
    owner = getattr(what, "__self__", what)  # of a method, or the module of a function in C
    inside = getattr(what, "__func__", None) or getattr(what, "__name__", None)
    with contextlib.suppress(TypeError):  # some can be neither referred to nor hashed
        found = _known.setdefault(owner, {})
        return found.get(inside) or found.setdefault(inside, _Callee(what))
    return _Callee(what)


class Call(Launch):
    """A function or a graph with its arguments.

    Parameters
    ----------
    what : callable or graph
    enqueue : callable, optional
        ``enqueue(stream)`` launches the graph in a stream of the driver.
    args : tuple
        Of the function, after the stream.

    Attributes
    ----------
    arguments : tuple
        Of the function, after the stream.
    arrays : tuple
        Those of the arguments that are arrays of a device.
    """

    def __init__(self, what: Any, enqueue: Callable[[int], object] | None, args: tuple[Any, ...]) -> None:
        super().__init__(_callee(what), ())  # type: ignore[arg-type]
        self._what, self._enqueue, self.arguments = what, enqueue, args
        self.arrays = tuple(value for value in args if _is_array(value))

    def __call__(self, *_: Any, **options: Any) -> None:
        """Run it on the CPU."""
        self._what(None, *self.arguments)

    def check(self, args: Any) -> None:
        """Its arguments are its own affair."""

    def cut(self, args: Any, device: str | None = None) -> Any:
        """Return it in the form of a `BlockLaunch`; raise ArgumentError for a graph on a CPU."""
        if device != "cuda" and self._enqueue is not None:
            raise errors.ArgumentError("a CUDA graph needs a GPU: make a scheduler of device 'cuda'", name="device")
        return Enqueued(self, device or "cuda")

    def configuration(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return blocks and threads that fill any device: nothing is known of it."""
        return (_ROOM,), (_THREADS,)

    def enqueue(self, stream: int) -> None:
        """Enqueue it in a stream of the driver."""
        if self._enqueue is not None:
            self._enqueue(stream)
        else:
            self._what(stream, *self.arguments)


class Enqueued:
    """A `Call` as executors see it: a `BlockLaunch` of one block, which workers cannot run."""

    blocks = threads = 1
    preemptible = False
    ends_at_once = True
    participants: tuple[Any, ...] = ()

    def __init__(self, launch: Call, device: str) -> None:
        self.launch, self.device = launch, device
        self.args = launch.arrays
        self.name = launch.kernel.__name__  # type: ignore[attr-defined]
        self.reason = errors.TransformError(f"{self.name!r} runs whole: {WHY}", construct="function")
        self.flag = LaunchFlag(device)
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Nothing is copied."""

    def prepare(self) -> None:
        """Nothing is compiled."""

    def abort(self) -> None:
        """Nobody asks the flag."""
        self.flag.interrupt()

    def end(self) -> None:
        """Raise what enqueuing raised."""
        if self._error is not None:
            raise self._error

    def new_control(self) -> Block:
        """Return the control record that executors want."""
        control = memory_for(self.device).allocate(8 * CONTROL_WORDS)
        control.write(0, np.array(fresh(), np.int64))
        return control

    def forms(self) -> Enqueued:
        """Return its only form: itself."""
        return self

    def resources(self, form: str) -> dict[str, int]:
        """Return what is said of a whole device."""
        return {"registers": 32, "shared": 0, "local": 0, "threads": _THREADS, "resident": 1}

    def start_plain(self, stream: Any) -> None:
        """Enqueue it. What it raises is its task's failure, once what it enqueued before has ended."""
        try:
            self.launch.enqueue(int(stream.handle))
        except BaseException as error:  # of the user, in the scheduler's thread
            self._error = error


def _is_array(value: Any) -> bool:
    """Return whether something is an array of a device, that may be asked for its bytes."""
    try:
        return hasattr(value, "nbytes") and hasattr(value, "dtype") and hasattr(value, "__cuda_array_interface__")
    except Exception:  # PyTorch's tensors with gradients raise
        return False


def _graph(what: Any) -> Callable[[int], object] | None:
    """Return what launches a captured graph of PyTorch, CuPy or the driver; None where it is none."""
    kinds = {f"{one.__module__.partition('.')[0]}.{one.__name__}" for one in type(what).__mro__}
    for name, launch in _GRAPHS.items():
        if name in kinds:
            return lambda stream: launch(what, stream)
    return None


def _torch_graph(graph: Any, stream: int) -> None:
    cuda = sys.modules["torch"].cuda
    with cuda.stream(cuda.ExternalStream(stream)):
        graph.replay()  # which counts its random numbers on, too


class _DriverStream:
    """A stream of the driver, by the protocol that libraries share."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _cupy_graph(graph: Any, stream: int) -> None:
    cuda = sys.modules["cupy"].cuda
    takes = getattr(cuda.Stream, "from_external", None)  # newer versions warn of ExternalStream
    graph.launch(stream=cuda.ExternalStream(stream) if takes is None else takes(_DriverStream(stream)))


def _raw_graph(graph: Any, stream: int) -> None:
    status = driver().cuGraphLaunch(int(graph), stream)
    if status != 0:
        raise errors.SchedulerError(f"the driver does not launch this graph (status {status}): was it destroyed?")


_GRAPHS: Mapping[str, Callable[[Any, int], None]] = {
    "torch.CUDAGraph": _torch_graph,
    "cupy.Graph": _cupy_graph,
    "cuda.Graph": lambda graph, stream: _raw_graph(graph.handle, stream),
    "cuda.CUgraphExec": _raw_graph,
    "cuda.cudaGraphExec_t": _raw_graph,
}
"""By the first part of the module, and the class."""
