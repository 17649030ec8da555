"""`Device`: one device of the pool, on this machine or another."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .. import errors, registry
from ..errors.options import checked_dtype, checked_integer, checked_shape, checked_timeout
from ..targets.kernel import Launch, is_argument
from ..targets.source.cuda_source import CudaSource
from .agent.caller import Caller, Connection
from .agent.code import Code, dumps
from .agent.parts import Arguments
from .agent.protocol import Op, pack_arguments, pack_dtype
from .agent.reply import Reply
from .buffer import Buffer
from .copy import copying
from .copy.plan import Tuning
from .event import Event
from .host_arrays import HostArrays
from .ids import new_id
from .result import Result
from .stream import Stream

T = TypeVar("T")
Shape: TypeAlias = int | tuple[int, ...]

_thread = threading.local()


class Device:
    """A device of the pool.

    Calls return at once where they can, and run in the order of their stream; what fails is raised by the next
    synchronization, with the call's name. ``with device:`` makes it the thread's current one: launches of the block
    run there, and ``ww.to_device``, ``ww.empty`` and the like allocate there.

    Attributes
    ----------
    index : int
        Its place among the application's devices.
    name, host, uuid : str
    target : {"cpu", "cuda"}
    memory : int
        Bytes; `memory_info` tells how many are free.
    process : int
        Of its agent, on that host.
    compute_capability : (int, int) or None
    link : str
        What carries its calls.
    info : dict
        Everything that its agent told at the start.
    transfers : Tuning
        How copies to it and from it are cut; another one may be set at any time.
    """

    def __init__(self, caller: Caller, connection: Connection, index: int, info: dict[str, Any]) -> None:
        self.caller = caller
        self.connection = connection
        self.index = index
        self.info = info
        self.name = str(info["name"])
        self.host = str(info["host"])
        self.uuid = str(info["uuid"])
        self.target = str(info["target"])
        self.memory = int(info["memory"])
        self.process = int(info["pid"])
        capability = info["compute_capability"]
        self.compute_capability: tuple[int, int] | None = None if capability is None else (capability[0], capability[1])
        self.link = caller.transport.name
        self.peers: tuple[Device, ...] = ()
        self.transfers = Tuning.from_environment()
        connection.index = index
        connection.label = f"device {index} ({self.target} on {self.host})"
        self.default_stream = Stream(self, channel=connection.channels[0])

    # -- memory ------------------------------------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: DTypeLike = np.float64, stream: Stream | None = None) -> Buffer:
        """Return a buffer whose items are not set. Having no room is raised by the next synchronization."""
        kind, dimensions = checked_dtype(dtype), checked_shape(shape)
        handle, channel = new_id(), self.channel(stream)
        nbytes = int(np.prod(dimensions, dtype=object)) * kind.itemsize
        if nbytes >= 1 << 62:
            raise MemoryError(f"a buffer of {nbytes} bytes is more than any device has room for")
        buffer = Buffer(self, handle, dimensions, kind)  # first: what Ctrl-C leaves of it is freed
        self.connection.post(channel, Op.ALLOCATE, handle, nbytes, pack_dtype(kind), dimensions)
        return buffer

    def zeros(self, shape: Shape, dtype: DTypeLike = np.float64, stream: Stream | None = None) -> Buffer:
        """Return a buffer of zeros."""
        return self.full(shape, np.zeros((), dtype)[()], dtype, stream)

    def full(self, shape: Shape, value: Any, dtype: DTypeLike | None = None,
             stream: Stream | None = None) -> Buffer:  # fmt: skip
        """Return a buffer filled with a value, of its dtype unless one is given."""
        buffer = self.empty(shape, np.asarray(value).dtype if dtype is None else dtype, stream)
        buffer.fill(value, stream)
        return buffer

    def to_device(self, array: ArrayLike, stream: Stream | None = None) -> Buffer:
        """Return a copy of an array, which may change as soon as this returns; a buffer of any device will do too."""
        source = array if isinstance(array, Buffer) else np.asarray(array)
        buffer = self.empty(source.shape, source.dtype, stream)
        buffer.copy_from(source, stream)
        return buffer

    def copy(self, destination: Any, source: Any, stream: Stream | None = None) -> None:
        """Copy between buffers of any devices, or a buffer and an array. Data of agents go straight between them."""
        if isinstance(destination, Buffer):
            destination.copy_from(source, stream)
        elif isinstance(source, Buffer):
            source.copy_to_host(destination, stream)
        else:
            raise errors.ArgumentError("one of the two must be a buffer: use numpy.copyto for arrays")

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes of its memory, as they are now."""
        info = self.ask()
        return int(info["free"]), int(info["total"])

    # -- calls -------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch, *args: Any, stream: Stream | None = None) -> None:
        """Run a kernel: ``device.launch(kernel[n], x, y)``. It does not wait, unless an argument is a NumPy array.

        NumPy arrays are copied there and back, as by launches on a local GPU; those that share memory share it there.

        Raises
        ------
        ArgumentError
            A buffer is of another device.
        CodeError
            The kernel names something that cannot be sent.
        """
        channel = self.channel(stream)
        if not isinstance(launch, Launch):
            raise errors.ArgumentError(f"{launch!r:.60} is no launch: give kernel[n]", name="launch")
        kernel: Any = launch.kernel
        code = Code.of(kernel)
        if isinstance(kernel, CudaSource) and self.target != "cuda":
            raise errors.DeviceNotFoundError(
                f"CUDA source {code.name!r} runs on a GPU, and device {self.index} is none", device=self.target
            )
        # a list: an interrupt that comes while Python closes a generator is lost
        host = HostArrays(self, stream, args) if any([isinstance(a, np.ndarray) for a in args]) else None
        self.connection.ensure(code)
        packed = pack_arguments(args if host is None else host.values(args), self._handle_of)
        self.connection.post(channel, Op.LAUNCH, code.key, launch.subscript(), packed)
        if host is not None:
            host.bring_back()
            host.free()

    def call(self, function: Callable[..., Any], *args: Any, stream: Stream | None = None, **options: Any) -> Result:
        """Call a Python function on the device's agent; do not wait for it.

        Buffers among the arguments arrive as NumPy arrays ("cpu"), or as CuPy's, or numba-cuda's where there is no
        CuPy ("cuda"). What the function does to them is done in the order of the stream.

        Returns
        -------
        Result
            Whose ``get()`` waits. Arrays in it are copies.
        """
        channel = self.channel(stream)
        code = Code.of(function)
        self.connection.ensure(code)
        with Arguments(self, channel) as arguments:
            data, handles = arguments.pack((args, options))
            reply = self.connection.ask(channel, Op.CALL, code.key, Reply, handles, data, cost=len(data), keep=True)
        return Result(reply, channel, f"{code.name!r} on {self.connection.label}")

    def create(self, service: str, *args: Any, stream: Stream | None = None, **options: Any) -> Any:
        """Make an object that stays on the agent, and return what stands for it here.

        Parameters
        ----------
        service : str
            A registered name (see `warpwell.registry.register`), or ``"module:callable"``.
        *args, **options
            Of the callable.

        Returns
        -------
        Remote
            Or the class that was registered with the name.
        """
        channel, handle = self.channel(stream), new_id()
        path = registry.path_of("service", service)
        known = registry.is_registered("stand-in", service)
        stand_in = registry.load(registry.path_of("stand-in", service if known else "any"))
        try:
            with Arguments(self, channel) as arguments:
                data, handles = arguments.pack((args, options))
                self.connection.post(channel, Op.CREATE, handle, path, handles, data, cost=len(data))
            return stand_in(self, handle, path)
        except BaseException:  # Ctrl-C: a file that nobody here has would stay open there
            self.connection.finalizer(handle)
            raise

    def open(self, path: Any, mode: str = "r", **options: Any) -> Any:
        """Open an array on storage where the device is: kernels of the device take it, and read it there.

        It waits until the array is open. See ``ww.open`` for parameters, and `warpwell.remote.RemoteArray` for what it
        returns. Paths are those of the device's host.
        """
        return self.create("open", _path(path), mode, device=self.target, **options)

    def open_store(self, path: Any, mode: str = "r", **options: Any) -> Any:
        """Open a key-value store where the device is: kernels of the device take it, and fetch records there.

        It waits until the store is open. See ``ww.kv.open`` for parameters, and `warpwell.remote.RemoteStore`
        for what it returns.
        """
        return self.create("store", _path(path), mode, device=self.target, **options)

    def set_global(self, kernel: Any, name: str, value: Any, stream: Stream | None = None) -> None:
        """Change a global variable of a kernel on this device, behind what the stream was given; it compiles again."""
        code = Code.of(kernel)
        self.connection.ensure(code)
        data, handles = dumps(value)
        self.connection.post(self.channel(stream), Op.GLOBAL, code.key, name, handles, data, cost=len(data))

    # -- order -------------------------------------------------------------------------------------------------

    def stream(self, priority: int = 0) -> Stream:
        """Return a new stream. 0 is the least priority."""
        return Stream(self, checked_integer(priority, "priority", least=0, most=1 << 30))

    def event(self, timing: bool = True) -> Event:
        """Return an event, which stands for no point yet."""
        return Event(self, timing)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait for all streams; raises as `Stream.synchronize` does, the default stream's failures first."""
        timeout, what = checked_timeout(timeout), f"all streams of {self.connection.label}"
        with self.connection.lock:  # no stream begins or ends meanwhile
            channels = list(self.connection.channels.values())
            replies = [self.connection.ask(channel, Op.SYNCHRONIZE, Reply) for channel in channels]
            replies += self.connection.ending
        for reply in replies:
            reply.wait(what, timeout)
        for channel in channels:
            channel.raise_kept()
        for reply in replies:
            reply.get(what)

    def channel(self, stream: Stream | None) -> Any:
        """Return the application's end of a stream of this device; None stands for the default one."""
        if stream is None:
            return self.default_stream.channel
        if not isinstance(stream, Stream):
            raise errors.ArgumentError(f"{stream!r:.60} is no stream of a device: use device.stream()", name="stream")
        if stream.device is not self:
            raise errors.ArgumentError(
                f"the stream is of device {stream.device.index}, and the call is for device {self.index}", name="stream"
            )
        return stream.channel

    # -- about -------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> str | None:
        """Why its agent is gone; None while it is there."""
        return self.connection.lost

    def can_access(self, other: Device) -> bool:
        """Tell whether kernels of this device may use buffers of another: only a device's own. Copy them instead."""
        return other is self

    def ask(self) -> dict[str, Any]:
        """Ask the agent about itself: what it did and holds, and its lanes."""
        return dict(self.connection.ask(None, Op.INFO, Reply).get(f"an answer of {self.connection.label}"))

    def trace(self) -> dict[str, tuple[int, int, float]]:
        """Return calls so far by kind: how many, bytes that went with them, seconds that the application waited."""
        return {name: (int(n), int(b), w) for name, (n, b, w) in sorted(self.connection.counts.items())}

    def _handle_of(self, value: Any) -> int | None:
        place = getattr(value, "warpwell_place", None)
        if place is None:
            if is_argument(value):
                raise errors.ArgumentError(
                    f"{type(value).__name__} is of this process: open it on device {self.index}, with device.open()"
                )
            return None
        if place is not self:
            raise errors.ArgumentError(
                f"{value!r:.80} is of device {place.index}, and the call is for device {self.index}: copy it there, "
                f"with device.to_device(...)"
            )
        return int(value.handle)

    def __enter__(self) -> Device:
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def __repr__(self) -> str:
        return f"<Device {self.index}: {self.name} ({self.target}) on {self.host}, {self.link}>"


def entered() -> Device | None:
    """Return the device of the innermost ``with device:`` of this thread."""
    stack = getattr(_thread, "stack", None)
    return stack[-1] if stack else None


def broadcast(devices: Iterable[Device], function: Callable[..., T], *args: Any, **options: Any) -> list[T]:
    """Call ``function(device, *args, **options)`` with each device as the current one; return what it returned.

    Calls that it makes run on all devices at the same time, since they do not wait. `Result` objects among what
    it returns are waited for at the end. All devices get the call, and what some of them raised is raised then: the
    first failure, the others as its notes.

    Examples
    --------
    >>> import warpwell as ww
    >>> sums = ww.broadcast(ww.devices(), lambda device: device.call(sum, [1, 2, 3]))
    """
    made: list[Any] = []
    failures: list[tuple[Device, Exception]] = []
    given = [] if isinstance(devices, Device) else list(devices)
    if isinstance(devices, Device) or not all(isinstance(device, Device) for device in given):
        raise errors.ArgumentError(f"{devices!r:.60}: give devices, such as ww.devices() or a lease", name="devices")
    for device in given:
        try:
            with device:
                made.append(function(device, *args, **options))
        except Exception as error:  # the others are to have the call
            made.append(None)
            failures.append((device, error))
    for place, value in enumerate(made):
        if isinstance(value, Result):
            try:
                made[place] = value.get()
            except Exception as error:
                failures.append((given[place], error))
    if failures:
        first = failures[0][1]
        for device, other in failures[1:]:
            first.add_note(f"and on device {device.index}: {type(other).__name__}: {other}")
        raise first
    return made


def _path(path: Any) -> Any:
    """Return a path as the agent's process, which may run in another folder, finds it."""
    return os.path.abspath(path) if isinstance(path, str | os.PathLike) else path


def _stack() -> list[Device]:
    stack = getattr(_thread, "stack", None)
    if stack is None:
        stack = _thread.stack = []
    return stack


__all__ = ["Device", "broadcast", "copying", "entered"]
