"""`Device`, `Buffer`, `Stream` and `Event`: the program's objects for one device of the pool, local or remote.

The four are in one file because each refers to the others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .. import errors, registry
from .._check import checked_dtype, checked_integer, checked_shape, checked_timeout
from .._os import uninterrupted
from ..targets import CudaSource, Launch, is_argument, viewed
from .agent.code import Code, dumps
from .agent.protocol import Op, new_id, pack_arguments, pack_dtype
from .caller import AgentConnection, Caller
from .channel import Channel
from .copies import Arguments, between_agents, download, upload
from .host_memory import HostArrays
from .reply import Reply
from .result import CallResult
from .tuning import Tuning

Shape: TypeAlias = int | tuple[int, ...]


class _Thread(threading.local):
    """The devices that a thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.devices: list[Device] = []


_thread = _Thread()


class AgentObject:
    """An object on an agent, which releases it when this one is dropped.

    Parameters
    ----------
    device : Device
    handle : int
        Its number on the agent.
    """

    _handle = 0  # for `__del__` after an interrupted `__init__`

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self._release = device.connection.finalizer
        self._handle = handle

    @property
    def handle(self) -> int:
        """The number of the object on its agent.

        Raises
        ------
        ClosedError
            The object was freed.
        """
        if not self._handle:
            raise errors.ClosedError(f"{self!r} was freed")
        return self._handle

    def free(self) -> None:
        """Free the object after the calls that use it. It cannot be used again."""
        if self._handle and self.device.connection.lost is None:
            self.device.connection.tell(Op.FREE, self._handle)
        self._handle = 0  # last: after Ctrl-C the finalizer frees it, and twice does no harm

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} stays on its device: it cannot be copied or pickled")

    def __del__(self) -> None:
        if self._handle:
            self._release(self._handle)


class Event(AgentObject):
    """A point in a stream of a device. Streams of any device, and the program, can wait for it.

    Parameters
    ----------
    device : Device
    timing : bool
        Whether the device notes the time, for ``later - earlier``.

    Attributes
    ----------
    recorded : bool
        Whether the event was recorded.
    """

    def __init__(self, device: Device, timing: bool = True) -> None:
        self.timing = timing
        self.recorded = False
        self._channel: Channel | None = None
        super().__init__(device, new_id())

    def record(self, stream: Stream | None = None) -> None:
        """Record the event: set it to the point after all calls so far of a stream of its device."""
        stream = self.device.default_stream if stream is None else stream
        if getattr(stream, "device", self.device) is not self.device:
            raise errors.ArgumentError(
                f"the event belongs to device {self.device.index}, and the stream to device {stream.device.index}"
            )
        self._channel = self.device.channel(stream)
        self.device.connection.post(self._channel, Op.RECORD, self._handle, self.timing)
        self.recorded = True

    @property
    def done(self) -> bool:
        """Whether the stream has reached the point; True for an event that was not recorded."""
        if not self.recorded:
            return True
        return bool(self._ask(Op.REACHED, self._handle).get(self._what))

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the stream has reached the point. Raise what `Stream.synchronize` raises."""
        timeout = checked_timeout(timeout)
        if self.recorded:
            reply = self._ask(Op.UNTIL, self._handle)
            reply.wait(self._what, timeout)
            assert self._channel is not None
            self._channel.raise_kept()
            reply.get(self._what)

    def elapsed(self, earlier: Event) -> float:
        """Wait for both events, and return the seconds from `earlier` to this one. Both are of the same device."""
        if _checked_event(earlier).device is not self.device:
            raise errors.ArgumentError("the clocks of two devices differ: use events of one device", name="earlier")
        if not (self.recorded and earlier.recorded and self.timing and earlier.timing):
            raise errors.ArgumentError("both events must have been recorded, and made with timing=True")
        return float(self._ask(Op.ELAPSED, self._handle, earlier._handle).get(self._what))

    def __sub__(self, earlier: Event) -> float:
        """Return the milliseconds since `earlier`."""
        return 1e3 * self.elapsed(earlier) if isinstance(earlier, Event) else NotImplemented

    @property
    def _what(self) -> str:
        return f"an event of {self.device.connection.label}"

    def _ask(self, op: Op, *operands: int) -> Reply:
        return self.device.connection.ask(None, op, *operands, Reply)


def _checked_event(thing: Any, wanted: str = "an event") -> Event:
    """Return an event; raise `ArgumentError` for anything else."""
    if not isinstance(thing, Event):
        raise errors.ArgumentError(f"{thing!r:.60}: give {wanted} of a device", name="event")
    return thing


class Stream:
    """A queue of calls, which run in order; calls of different streams run in any order. See ``device.stream()``.

    Pass it as a stream argument: ``kernel[n, stream](...)``, ``buffer.copy_to_host(stream=stream)``. The default stream
    of a device and other streams do not wait for each other.

    Attributes
    ----------
    device : Device
    priority : int
        0 is the lowest.
    """

    def __init__(self, device: Device, priority: int = 0, *, channel: Channel | None = None) -> None:
        self.device = device
        self.priority = priority
        self._default = channel is not None
        self._ended = device.connection.stream_finalizer
        self._channel: Channel | None = channel
        if channel is None:
            channel = Channel(new_id())
            with uninterrupted(), device.connection.lock:  # who synchronizes the device finds a stream its agent knows
                device.connection.tell(Op.STREAM, priority, stream=channel.number)
                device.connection.channels[channel.number] = self._channel = channel

    @property
    def channel(self) -> Channel:
        """The program's end of the stream."""
        if self._channel is None:
            raise errors.ClosedError("the stream was closed")
        return self._channel

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all calls of the stream are done.

        Raises
        ------
        RemoteError
            A call failed since the last synchronization. The first failure is raised; its notes name the others.
        DeviceLostError
            The device is gone.
        StallError
            The calls were not done after `timeout` seconds.
        """
        connection = self.device.connection
        what = f"a stream of {connection.label}"
        timeout = checked_timeout(timeout)
        reply = connection.ask(self.channel, Op.SYNCHRONIZE, Reply)
        reply.wait(what, timeout)
        self.channel.raise_kept()
        reply.get(what)

    def record(self, event: Event | None = None) -> Event:
        """Record an event after all calls of the stream so far, and return it.

        Parameters
        ----------
        event : Event, optional
            An event of this device; default: a new one.
        """
        event = Event(self.device) if event is None else _checked_event(event)
        event.record(self)
        return event

    def wait(self, other: Event | Stream) -> None:
        """Make later calls wait for an event, or for all calls so far of another stream, of any device.

        An event that was never recorded is not waited for. If it is recorded again later, the calls still wait for its
        current point.
        """
        event = other.record() if isinstance(other, Stream) else _checked_event(other, "an event, or a stream")
        if not event.recorded:
            return
        to, origin = self.device, event.device
        if to is origin:
            to.connection.post(self.channel, Op.WAIT, event.handle)
        elif to.caller is not origin.caller:
            event.synchronize()  # two pools know nothing of each other
        else:
            to.connection.check()
            number, channel = new_id(), self.channel
            with uninterrupted():
                origin.connection.tell(Op.NOTIFY, event.handle, number, to.connection.rank)
                to.connection.post(channel, Op.AWAIT, number, origin.connection.rank)

    def close(self) -> None:
        """Close the stream after its calls have run. From now on the default stream raises its failures."""
        if self._default or self._channel is None:
            return
        if self.device.connection.lost is None:
            self.device.connection.end_stream(self._channel.number)
        self._channel = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        number = "closed" if self._channel is None else self._channel.number
        return f"<Stream {number} of device {self.device.index}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream stays on its device: it cannot be copied or pickled")

    def __del__(self) -> None:
        channel = getattr(self, "_channel", None)
        if channel is not None and not self._default:
            self._ended(channel.number)


class Buffer(AgentObject):
    """An array on a device, C-ordered. Devices make them: ``device.to_device``, ``empty``, ``zeros``, ``full``.

    Kernels receive it as an array. ``buffer[a:b]`` and ``buffer[i]`` are views, which share its memory; the memory is
    freed when the last of them is dropped or freed (`free`) and all calls that use it are done.

    Attributes
    ----------
    device : Device
    shape : tuple of int
    dtype : numpy.dtype
    size, nbytes, ndim : int
    """

    def __init__(self, device: Device, handle: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = int(np.prod(shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize
        self._root = handle
        self._offset = 0
        super().__init__(device, handle)

    @property
    def warpwell_place(self) -> Device:
        """Where launches with it run."""
        return self.device

    def copy_to_host(self, out: NDArray[Any] | None = None, stream: Stream | None = None) -> NDArray[Any]:
        """Return a copy of the contents, after earlier calls of the stream.

        Parameters
        ----------
        out : ndarray, optional
            Array to copy to, of the same shape and dtype, contiguous or not.
        stream : Stream, optional
            A stream of the buffer's device; default: the default stream.

        Raises
        ------
        RemoteError
            An earlier call of the stream failed, or this one did.
        DeviceLostError
            The device is gone.
        ArgumentError
            `out` has another shape or dtype.
        """
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif not isinstance(out, np.ndarray) or out.shape != self.shape or out.dtype != self.dtype:
            raise errors.ArgumentError(
                f"out is {_kind(out)}, and the buffer {self.dtype} {self.shape}: they must have the same dtype "
                "and shape",
                name="out",
            )
        elif not out.flags.writeable:
            raise errors.ArgumentError("out is read-only", name="out")
        download(self.device.connection, self.device.channel(stream), self.handle, out)
        return out

    def copy_from(self, source: ArrayLike | Buffer, stream: Stream | None = None) -> None:
        """Copy from an array, which may change as soon as this returns, or from a buffer of any device.

        Parameters
        ----------
        source : array-like or Buffer
            The source, of the same shape and dtype.
        stream : Stream, optional
        """
        if isinstance(source, Buffer):
            _copy_between(self, source, stream)
            return
        array = np.asarray(source)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise errors.ArgumentError(
                f"the source is {_kind(array)}, and the buffer {self.dtype} {self.shape}: they must have the "
                "same dtype and shape",
                name="source",
            )
        upload(self.device.connection, self.device.channel(stream), self.handle, array)

    def fill(self, value: Any, stream: Stream | None = None) -> None:
        """Set every item to a value."""
        try:
            item = b"" if value is None else np.array(value).astype(self.dtype).tobytes()
        except (TypeError, ValueError):  # a text for numbers
            item = b""
        if len(item) != self.dtype.itemsize or np.ndim(value):
            raise errors.ArgumentError(f"{value!r:.60} is not one item of {self.dtype}", name="value")
        self.device.connection.post(self.device.channel(stream), Op.FILL, self.handle, item)

    def __getitem__(self, index: Any) -> Buffer:
        if not self.ndim:
            raise IndexError("a buffer without dimensions has no items")
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            first = int(index) + (self.shape[0] if index < 0 else 0)
            if not 0 <= first < self.shape[0]:
                raise IndexError(f"index {index} of {self.shape[0]}")
            shape = self.shape[1:]
        elif isinstance(index, slice) and index.step in (None, 1):
            first, last, _ = index.indices(self.shape[0])
            shape = (max(0, last - first), *self.shape[1:])
        else:
            raise errors.ArgumentError(f"a view [{index!r:.40}] of a buffer: give an integer, or a slice of step 1")
        view = Buffer(self.device, new_id(), shape, self.dtype)
        view._root, view._offset = self._root, self._offset + first * row
        self.device.connection.tell(Op.VIEW, view.handle, self.handle, first * row, pack_dtype(self.dtype), shape, None)
        return view

    def part(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> Buffer:
        """Return another array in this buffer's memory, for kernels; only contiguous ones can be copied."""
        view = Buffer(self.device, new_id(), shape, dtype)
        view._root, view._offset = self._root, self._offset + offset
        self.device.connection.tell(Op.VIEW, view.handle, self.handle, offset, pack_dtype(dtype), shape, strides)
        return view

    def __setitem__(self, index: Any, value: Any) -> None:
        view = self[index]
        if np.ndim(value) or isinstance(value, Buffer):
            view.copy_from(value if isinstance(value, Buffer) else np.asarray(value, self.dtype))
        else:
            view.fill(value)

    def overlaps(self, other: Buffer) -> bool:
        """Return whether it shares bytes with another buffer."""
        return (
            self._root == other._root
            and self._offset < other._offset + other.nbytes
            and other._offset < self._offset + self.nbytes
        )

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a buffer without dimensions has no length")
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a buffer is on a device: NumPy can only get a copy of it")
        host = self.copy_to_host()
        return host if dtype is None else host.astype(dtype, copy=False)

    def __repr__(self) -> str:
        state = "" if self._handle else ", freed"
        return f"<Buffer {self.dtype} {self.shape} on device {self.device.index}{state}>"

    def __reduce__(self) -> NoReturn:  # a copy of this object would free the memory of both
        raise TypeError("a buffer stays on its device: use copy_to_host, or Device.copy to a new one")


def _copy_between(destination: Buffer, source: Buffer, stream: Stream | None) -> None:
    """Copy a buffer to another, of any device, without waiting.

    The copy is a call of `stream`, which belongs to either device; without a stream, of both default streams.
    """
    if destination.shape != source.shape or destination.dtype != source.dtype:
        raise errors.ArgumentError(
            f"the source is {source.dtype} {source.shape}, and the destination {destination.dtype} "
            f"{destination.shape}: they must have the same dtype and shape",
            name="source",
        )
    to, origin = destination.device, source.device
    if stream is not None and stream.device not in (to, origin):
        raise errors.ArgumentError(f"the stream is of device {stream.device.index}: use one of the buffers' devices")
    if to is origin:
        if destination.overlaps(source) and destination.nbytes:
            raise errors.ArgumentError("the source overlaps the destination: copy it elsewhere first", name="source")
        to.connection.post(to.channel(stream), Op.COPY, destination.handle, source.handle, nbytes=source.nbytes)
    elif to.caller is not origin.caller:
        # two pools know nothing of each other: through the application
        host = source.copy_to_host(stream=stream if stream and stream.device is origin else None)
        destination.copy_from(host, stream if stream and stream.device is to else None)
    elif destination.handle and source.handle and source.nbytes:
        sides = (origin.connection, source.handle), (to.connection, destination.handle)
        channels = [d.channel(stream) if stream is None or stream.device is d else None for d in (origin, to)]
        between_agents(*sides, source.nbytes, *channels)
    elif stream is None:  # no data will hold either stream back until the other is there
        ends = to.default_stream.record(), origin.default_stream.record()
        to.default_stream.wait(ends[1])
        origin.default_stream.wait(ends[0])


def _kind(thing: Any) -> str:
    return f"{thing.dtype} {thing.shape}" if isinstance(thing, np.ndarray) else f"a {type(thing).__name__}"


class Device:
    """A device of the pool.

    Calls return at once if possible, and run in the order of their stream; the next synchronization raises a failure,
    with the call's name. ``with device:`` makes it the thread's current one: launches of the block run there, and
    ``ww.to_device``, ``ww.empty`` and the like allocate there.

    Attributes
    ----------
    index : int
        Its index among the application's devices.
    name, host, uuid : str
    target : {"cpu", "cuda"}
    memory : int
        Bytes; `memory_info` tells how many are free.
    process : int
        Process id of its agent, on that host.
    compute_capability : (int, int) or None
    link : str
        The transport of its calls.
    info : dict
        All properties that its agent reported at the start.
    """

    def __init__(self, caller: Caller, connection: AgentConnection, index: int, info: dict[str, Any]) -> None:
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
        connection.transfers = Tuning.from_environment()
        connection.index = index
        connection.host, connection.target = self.host, self.target
        connection.label = f"device {index} ({self.target} on {self.host})"
        self.default_stream = Stream(self, channel=connection.channels[0])

    # -- memory ------------------------------------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: DTypeLike = np.float64, stream: Stream | None = None) -> Buffer:
        """Return an uninitialized buffer. The next synchronization raises if there was no memory."""
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

    def full(self, shape: Shape, value: Any, dtype: DTypeLike | None = None, stream: Stream | None = None) -> Buffer:
        """Return a buffer filled with a value; default dtype: that of the value."""
        buffer = self.empty(shape, np.asarray(value).dtype if dtype is None else dtype, stream)
        buffer.fill(value, stream)
        return buffer

    def to_device(self, array: ArrayLike, stream: Stream | None = None) -> Buffer:
        """Return a copy of an array, or of a buffer of any device. An array may change as soon as this returns."""
        source = array if isinstance(array, Buffer) else np.asarray(array)
        buffer = self.empty(source.shape, source.dtype, stream)
        buffer.copy_from(source, stream)
        return buffer

    def copy(self, destination: Any, source: Any, stream: Stream | None = None) -> None:
        """Copy between buffers of any devices, or a buffer and an array. Agents exchange data directly."""
        if isinstance(destination, Buffer):
            destination.copy_from(source, stream)
        elif isinstance(source, Buffer):
            source.copy_to_host(destination, stream)
        else:
            raise errors.ArgumentError("one of the two must be a buffer: use numpy.copyto for arrays")

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory."""
        info = self.ask()
        return int(info["free"]), int(info["total"])

    # -- calls -------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch, *args: Any, stream: Stream | None = None) -> None:
        """Run a kernel: ``device.launch(kernel[n], x, y)``. It waits only if an argument is a NumPy array.

        NumPy arrays are copied to the device and back, as on a local GPU; arrays that share memory here share it there.

        Raises
        ------
        ArgumentError
            A buffer belongs to another device.
        CodeError
            The kernel refers to an object that cannot be sent.
        """
        channel = self.channel(stream)
        if not isinstance(launch, Launch):
            raise errors.ArgumentError(f"{launch!r:.60} is not a launch: give kernel[n]", name="launch")
        kernel: Any = launch.kernel
        code = Code.of(kernel)
        if isinstance(kernel, CudaSource) and self.target != "cuda":
            raise errors.DeviceNotFoundError(
                f"CUDA source {code.name!r} runs on a GPU, and device {self.index} is not one", device=self.target
            )
        args = viewed(kernel, args)
        # a list: an interrupt that comes while Python closes a generator is lost
        host = HostArrays(self, stream, args) if any([isinstance(a, np.ndarray) for a in args]) else None
        self.connection.ensure(code)
        packed = pack_arguments(args if host is None else host.values(args), self.handle_of)
        self.connection.post(channel, Op.LAUNCH, code.key, launch.subscript(), packed)
        if host is not None:
            host.bring_back()
            host.free()

    def call(
        self, function: Callable[..., Any], *args: Any, stream: Stream | None = None, **options: Any
    ) -> CallResult:
        """Call a Python function on the device's agent, without waiting.

        Buffers among the arguments arrive as NumPy arrays ("cpu"), or as CuPy arrays, or numba-cuda arrays if CuPy is
        not installed ("cuda"). The function runs in the order of the stream.

        Returns
        -------
        CallResult
            Its ``get()`` waits for the result. Arrays in it are copies.
        """
        channel = self.channel(stream)
        code = Code.of(function)
        self.connection.ensure(code)
        with Arguments(self.connection, channel, self.handle_of) as arguments:
            data, handles = arguments.pack((args, options))
            reply = self.connection.ask(channel, Op.CALL, code.key, Reply, handles, data, cost=len(data), keep=True)
        return CallResult(reply, channel, f"{code.name!r} on {self.connection.label}")

    def call_method(
        self, thing: AgentObject, path: str, name: str, handles: tuple[int, ...], data: bytes, stream: Stream | None
    ) -> CallResult:
        """Call a method of an object on the agent, or read an attribute (a name that begins with a dot)."""
        channel = self.channel(stream)
        operands = (thing.handle, name, Reply, handles, data)
        reply = self.connection.ask(channel, Op.METHOD, *operands, cost=len(data), keep=True)
        return CallResult(reply, channel, f"{name!r} of {path!r} on {self.connection.label}")

    def create(self, service: str, *args: Any, stream: Stream | None = None, **options: Any) -> Any:
        """Create an object that stays on the agent, and return its stand-in.

        Parameters
        ----------
        service : str
            A registered name (see `warpwell.registry.register`), or ``"module:callable"``.
        *args, **options
            Arguments of the callable.

        Returns
        -------
        Remote
            Or the stand-in class that was registered with the name.
        """
        channel, handle = self.channel(stream), new_id()
        path = registry.path_of("service", service)
        known = registry.is_registered("stand-in", service)
        stand_in = registry.load(registry.path_of("stand-in", service if known else "any"))
        try:
            with Arguments(self.connection, channel, self.handle_of) as arguments:
                data, handles = arguments.pack((args, options))
                self.connection.post(channel, Op.CREATE, handle, path, handles, data, cost=len(data))
            return stand_in(self, handle, path)
        except BaseException:  # Ctrl-C: a file that nobody here has would stay open there
            self.connection.finalizer(handle)
            raise

    def open(self, path: Any, mode: str = "r", **options: Any) -> Any:
        """Open an array on storage on the device's host; kernels of the device read it there.

        It waits until the array is open. See ``ww.open`` for parameters, and `warpwell.remote.RemoteArray` for what it
        returns. Paths are those of the device's host.
        """
        return self.create("open", _path(path), mode, device=self.target, **options)

    def open_store(self, path: Any, mode: str = "r", **options: Any) -> Any:
        """Open a key-value store on the device's host; kernels of the device fetch records there.

        It waits until the store is open. See ``ww.kv.open`` for parameters, and `warpwell.remote.RemoteStore`
        for what it returns.
        """
        return self.create("store", _path(path), mode, device=self.target, **options)

    def set_global(self, kernel: Any, name: str, value: Any, stream: Stream | None = None) -> None:
        """Change a global variable of a kernel on this device, in the order of the stream; it compiles again.

        The value is kept until a variable that the kernel names changes in this process.
        """
        code = Code.of(kernel)
        self.connection.ensure(code)
        data, handles = dumps(value)
        self.connection.post(self.channel(stream), Op.GLOBAL, code.key, name, handles, data, cost=len(data))

    # -- order -------------------------------------------------------------------------------------------------

    def stream(self, priority: int = 0) -> Stream:
        """Return a new stream. 0 is the lowest priority."""
        return Stream(self, checked_integer(priority, "priority", minimum=0, maximum=1 << 30))

    def event(self, timing: bool = True) -> Event:
        """Return a new event, which is not recorded yet."""
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

    @property
    def transfers(self) -> Tuning:
        """How copies to and from the device are split into chunks; may be set at any time."""
        return self.connection.transfers

    @transfers.setter
    def transfers(self, tuning: Tuning) -> None:
        self.connection.transfers = tuning

    def channel(self, stream: Stream | None) -> Channel:
        """Return the application's end of a stream of this device; None stands for the default one."""
        if stream is None:
            return self.default_stream.channel
        if not isinstance(stream, Stream):
            raise errors.ArgumentError(
                f"{stream!r:.60} is not a stream of a device: use device.stream()", name="stream"
            )
        if stream.device is not self:
            raise errors.ArgumentError(
                f"the stream is of device {stream.device.index}, and the call is for device {self.index}", name="stream"
            )
        return stream.channel

    # -- about -------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> str | None:
        """The reason why the agent is lost; None while it runs."""
        return self.connection.lost

    def can_access(self, other: Device) -> bool:
        """Return whether kernels of this device can use buffers of another device: True only for itself."""
        return other is self

    def ask(self) -> dict[str, Any]:
        """Return the agent's report: calls done, objects held, and its lanes."""
        return dict(self.connection.ask(None, Op.INFO, Reply).get(f"an answer of {self.connection.label}"))

    def trace(self) -> dict[str, tuple[int, int, float]]:
        """Return statistics by kind of call: calls, bytes sent, seconds that the program waited."""
        return {name: (int(n), int(b), w) for name, (n, b, w) in sorted(self.connection.counts.items())}

    def handle_of(self, value: Any) -> int | None:
        """Return the handle of an object that is on this device, None for anything else.

        Raises
        ------
        ArgumentError
            The object is on another device, or was opened in this process.
        """
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
        _thread.devices.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.devices.pop()

    def __repr__(self) -> str:
        return f"<Device {self.index}: {self.name} ({self.target}) on {self.host}, {self.link}>"


def entered() -> Device | None:
    """Return the device of the innermost ``with device:`` of this thread."""
    return _thread.devices[-1] if _thread.devices else None


def _path(path: Any) -> Any:
    """Return a path that is valid for the agent's process, which may run in another folder."""
    return os.path.abspath(path) if isinstance(path, str | os.PathLike) else path
