"""`Call`: a function that enqueues work of other libraries, or a captured CUDA graph, submitted like a launch.

A scheduler cannot inspect the enqueued work. Therefore a call is non-preemptible, and its profile consists of its
measured runtime. It enqueues in a stream of the scheduler, and an event after its work marks the end of the task.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from .. import errors
from ..libcuda import driver
from ..targets import Launch, LaunchFlag

WHY = "it is a function or a graph, not a kernel of Warpwell"
_THREADS = 256
_GRID_BLOCKS = 1 << 20
"""Blocks for which a call is charged: more than any device can hold, because its demand is unknown."""


def as_launch(launch: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return a launch and its arguments. A function or a graph becomes a `Call` with its device arrays as arguments.

    Raise ArgumentError if a graph has arguments.
    """
    if isinstance(launch, Launch | type) or hasattr(launch, "compiled"):  # a kernel without [n] is rejected later
        return launch, args
    enqueue = _graph(launch)
    if enqueue is not None and args:
        raise errors.ArgumentError("a graph cannot have arguments, because they were captured: pass the graph alone")
    if enqueue is None and not callable(launch):
        return launch, args
    call = Call(launch, enqueue, args)
    return call, call.arrays


def at_present(launch: Any) -> Any:
    """Return the launch of a kernel in Python with the present values of its variables; other launches unchanged."""
    return launch.current() if type(launch) is Launch else launch


class _Unknown:
    """Identity of code that cannot be inspected."""


class _Callee:
    """The stand-in for the kernel of a `Call`, so that the learner recognizes a function that is submitted again."""

    block = _THREADS
    max_registers = 32

    def __init__(self, target: Any) -> None:
        self.__name__ = str(getattr(target, "__name__", type(target).__name__))
        self._own = _Unknown()
        # A weak reference: `_callees` must not keep the function and its closure alive.
        self._function = weakref.ref(target) if isinstance(target, types.FunctionType) else None
        self.compiled: dict[Any, Any] = {("cuda-forms",): None}
        self.checked: set[Any] = set()

    @property
    def function(self) -> Any:
        """The function, which the learner identifies by its code; for other callables, an object of this process."""
        found = None if self._function is None else self._function()
        return self._own if found is None else found


_callees: weakref.WeakKeyDictionary[Any, dict[Any, _Callee]] = weakref.WeakKeyDictionary()
"""Stand-ins by owner and by function. Methods of two objects do different work, so each object has its own."""


def _callee(target: Any) -> _Callee:
    """Return the stand-in of a function, method or graph; the same object on each call."""
    owner = getattr(target, "__self__", target)  # the object of a method, or the module of a C function
    function = getattr(target, "__func__", None) or getattr(target, "__name__", None)
    with contextlib.suppress(TypeError):  # some objects are not hashable or allow no weak reference
        found = _callees.setdefault(owner, {})
        return found.get(function) or found.setdefault(function, _Callee(target))
    return _Callee(target)


class Call(Launch):
    """A function or a graph with its arguments.

    Parameters
    ----------
    target : callable or graph
    enqueue : callable, optional
        ``enqueue(stream)`` launches the graph in a stream of the driver.
    args : tuple
        Arguments of the function after the stream.

    Attributes
    ----------
    arguments : tuple
        Arguments of the function after the stream.
    arrays : tuple
        The device arrays among the arguments.
    """

    def __init__(self, target: Any, enqueue: Callable[[int], object] | None, args: tuple[Any, ...]) -> None:
        super().__init__(_callee(target), ())  # type: ignore[arg-type]
        self._target, self._enqueue, self.arguments = target, enqueue, args
        self.arrays = tuple(value for value in args if _is_array(value))

    def __call__(self, *_: Any, **options: Any) -> None:
        """Run the function on the CPU."""
        self._target(None, *self.arguments)

    def cut(self, args: Any, device: str | None = None) -> Any:
        """Return the call with the interface of a `BlockLaunch`. Raise ArgumentError for a graph on a CPU."""
        if device != "cuda" and self._enqueue is not None:
            raise errors.ArgumentError("a CUDA graph needs a GPU: make a scheduler of device 'cuda'", name="device")
        return Enqueued(self, device or "cuda")

    def configuration(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return blocks and threads that fill any device, because the demand of a call is unknown."""
        return (_GRID_BLOCKS,), (_THREADS,)

    def enqueue(self, stream: int) -> None:
        """Enqueue the work in a stream of the driver."""
        if self._enqueue is not None:
            self._enqueue(stream)
        else:
            self._target(stream, *self.arguments)


class Enqueued:
    """The interface of a `BlockLaunch` for a `Call`: one block, which persistent blocks cannot run."""

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
        """Do nothing: the arguments need no copies."""

    def prepare(self) -> None:
        """Do nothing: a call needs no compilation."""

    def abort(self) -> None:
        """Set the interrupt flag. Enqueued work does not read it."""
        self.flag.interrupt()

    def end(self) -> None:
        """Raise the error of `start_plain`, if it failed."""
        if self._error is not None:
            raise self._error

    def forms(self) -> Enqueued:
        """Return this object, the only form of a call."""
        return self

    def resources(self, form: str) -> dict[str, int]:
        """Return resources of a kernel whose one block occupies the device."""
        return {"registers": 32, "shared": 0, "local": 0, "threads": _THREADS, "resident": 1}

    def start_plain(self, stream: Any) -> None:
        """Enqueue the work. An error fails the task after the work that was enqueued before the error has ended."""
        try:
            self.launch.enqueue(int(stream.handle))
        except BaseException as error:  # user code runs in the scheduler's thread
            self._error = error


def _is_array(value: Any) -> bool:
    """Return True if a value is a device array whose size can be read."""
    try:
        return hasattr(value, "nbytes") and hasattr(value, "dtype") and hasattr(value, "__cuda_array_interface__")
    except Exception:  # PyTorch's tensors with gradients raise
        return False


def _graph(target: Any) -> Callable[[int], object] | None:
    """Return a function that launches a captured graph of PyTorch, CuPy or the driver; None for other objects."""
    class_names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(target).__mro__}
    for name, launch in _GRAPHS.items():
        if name in class_names:
            return lambda stream: launch(target, stream)
    return None


def _torch_graph(graph: Any, stream: int) -> None:
    cuda = sys.modules["torch"].cuda
    with cuda.stream(cuda.ExternalStream(stream)):
        graph.replay()  # replay() also advances the graph's random number generators


class _DriverStream:
    """A stream of the driver with the `__cuda_stream__` protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _cupy_graph(graph: Any, stream: int) -> None:
    cuda = sys.modules["cupy"].cuda
    from_external = getattr(cuda.Stream, "from_external", None)  # newer versions deprecate ExternalStream
    graph.launch(stream=cuda.ExternalStream(stream) if from_external is None else from_external(_DriverStream(stream)))


def _raw_graph(graph: Any, stream: int) -> None:
    status = driver().cuGraphLaunch(int(graph), stream)
    if status != 0:
        raise errors.SchedulerError(
            f"the driver does not launch this graph (status {status}); it may have been destroyed"
        )


_GRAPHS: Mapping[str, Callable[[Any, int], None]] = {
    "torch.CUDAGraph": _torch_graph,
    "cupy.Graph": _cupy_graph,
    "cuda.Graph": lambda graph, stream: _raw_graph(graph.handle, stream),
    "cuda.CUgraphExec": _raw_graph,
    "cuda.cudaGraphExec_t": _raw_graph,
}
"""Functions that launch a graph, by top-level module and class name."""
