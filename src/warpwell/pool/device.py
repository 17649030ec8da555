"""`Device`, `Buffer`, `Remote`, `Stream` and `Event`: the program's objects for one device of the pool."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
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
from .reply import CallResult, Reply
from .tuning import Tuning

Shape: TypeAlias = int | tuple[int, ...]


class _Thread(threading.local):
    """The devices whose ``with`` blocks a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.devices: list[Device] = []


_thread = _Thread()


class AgentObject:
    """The program's reference to an object on an agent. The object is freed when the reference is dropped.

    Attributes
    ----------
    device : Device
    """

    _handle = 0  # for `__del__` after an interrupted `__init__`

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self._free_later = device.connection.free_later
        self._handle = handle

    @property
    def handle(self) -> int:
        """The handle of the object on its agent.

        Raises
        ------
        ClosedError
            The object was freed.
        """
        if not self._handle:
            raise errors.ClosedError(f"{self!r} was freed: create it again")
        return self._handle

    def free(self) -> None:
        """Free the object after the calls that use it. It cannot be used again."""
        if self._handle and self.device.connection.lost is None:
            self.device.connection.send(Op.FREE, self._handle)
        self._handle = 0  # last: after Ctrl-C the finalizer frees it; freeing it twice is harmless

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} stays on its device: it cannot be copied or pickled")

    def __del__(self) -> None:
        if self._handle:
            self._free_later(self._handle)


class Event(AgentObject):
    """A point in a stream of a device. The program and streams of any device can wait for it.

    Parameters
    ----------
    device : Device
    timing : bool
        Whether the device records the time, for ``later - earlier``.

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
        """Set the event to the point after all previous calls of a stream of its device, or of the default stream."""
        stream = self.device.default_stream if stream is None else stream
        if getattr(stream, "device", self.device) is not self.device:
            raise errors.ArgumentError(
                f"the event is on device {self.device.index}, the stream on {stream.device.index}: use one device"
            )
        self._channel = self.device.channel(stream)
        self.device.connection.post(self._channel, Op.RECORD, self._handle, self.timing)
        self.recorded = True

    @property
    def done(self) -> bool:
        """Whether the stream has reached the point; True if the event was not recorded."""
        return not self.recorded or bool(self._query(Op.REACHED))

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the stream has reached the point. Raises as `Stream.synchronize` does."""
        timeout = checked_timeout(timeout)
        if self.recorded:
            connection, description = self.device.connection, self._description
            assert self._channel is not None
            reply = connection.request(None, Op.UNTIL, self._handle, Reply)
            reply.get_after_failures(self._channel, description, timeout)

    def elapsed(self, earlier: Event) -> float:
        """Wait for both events and return the seconds from `earlier`, an event of the same device, to this one."""
        if _checked_event(earlier).device is not self.device:
            raise errors.ArgumentError("the clocks of two devices differ: use events of one device", name="earlier")
        if not (self.recorded and earlier.recorded and self.timing and earlier.timing):
            raise errors.ArgumentError("both events must have been created with timing=True and recorded")
        return float(self._query(Op.ELAPSED, earlier._handle))

    def __sub__(self, earlier: Event) -> float:
        """Return the milliseconds since `earlier`."""
        return 1e3 * self.elapsed(earlier) if isinstance(earlier, Event) else NotImplemented

    @property
    def _description(self) -> str:
        return f"an event of {self.device.connection.label}"

    def _query(self, op: Op, *operands: int) -> Any:
        return self.device.connection.request(None, op, self._handle, *operands, Reply).get(self._description)


def _checked_event(value: Any, expected: str = "an event") -> Event:
    if not isinstance(value, Event):
        raise errors.ArgumentError(f"expected {expected} of a device, got {value!r:.60}", name="event")
    return value


class Stream:
    """A queue of calls that run in order. ``device.stream()`` creates one. There is no order between streams.

    Pass a stream as an argument: ``kernel[n, stream](...)``, ``buffer.copy_to_host(stream=stream)``. The default stream
    of a device does not synchronize with other streams.

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
        self._close_later = partial(device.connection.free_later, op=Op.STREAM_END)
        self._channel: Channel | None = channel
        if channel is None:
            channel = Channel(new_id())
            # with the lock: `Device.synchronize` must not use a channel whose stream the agent has not created
            with uninterrupted(), device.connection.lock:
                device.connection.send(Op.STREAM, priority, stream=channel.number)
                device.connection.channels[channel.number] = self._channel = channel

    @property
    def channel(self) -> Channel:
        """The program's side of the stream."""
        if self._channel is None:
            raise errors.ClosedError("the stream was closed: create a new one")
        return self._channel

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all calls of the stream are done.

        Raises
        ------
        RemoteError
            A call failed since the last synchronization. The first failure is raised; its notes name the other
            failures.
        DeviceLostError
            The device was lost.
        StallError
            The calls were not done after `timeout` seconds.
        """
        connection = self.device.connection
        timeout = checked_timeout(timeout)
        reply = connection.request(self.channel, Op.SYNCHRONIZE, Reply)
        reply.get_after_failures(self.channel, f"a stream of {connection.label}", timeout)

    def record(self, event: Event | None = None) -> Event:
        """Record an event after all previous calls of the stream, and return it.

        Parameters
        ----------
        event : Event, optional
            An event of this device; default: a new one.
        """
        event = Event(self.device) if event is None else _checked_event(event)
        event.record(self)
        return event

    def wait(self, event: Event | Stream) -> None:
        """Make later calls wait for an event, or for all previous calls of another stream. Both may be of any device.

        An event that was never recorded has no effect. If it is recorded again later, the calls still wait for its
        current point.
        """
        event = event.record() if isinstance(event, Stream) else _checked_event(event, "an event or a stream")
        if not event.recorded:
            return
        to, origin = self.device, event.device
        if to is origin:
            to.connection.post(self.channel, Op.WAIT, event.handle)
        elif to.caller is not origin.caller:
            event.synchronize()  # agents of two pools have no connection
        else:
            to.connection.check()
            number, channel = new_id(), self.channel
            if channel.is_full:
                to.connection.wait_for_credit(channel)  # outside of the block, so that Ctrl-C ends the wait
            with uninterrupted():
                origin.connection.send(Op.NOTIFY, event.handle, number, to.connection.rank)
                with to.connection.lock:
                    to.connection.post_locked(channel, Op.AWAIT, number, origin.connection.rank)

    def close(self) -> None:
        """Close the stream after its calls. The next synchronization of the default stream raises their failures."""
        if self._default or self._channel is None:
            return
        if self.device.connection.lost is None:
            self.device.connection.close_stream(self._channel.number)
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
            self._close_later(channel.number)


class Buffer(AgentObject):
    """A C-ordered array on a device; ``device.to_device``, ``empty``, ``zeros`` and ``full`` create one.

    Kernels receive it as an array. ``buffer[a:b]`` and ``buffer[i]`` are views that share its memory. The memory is
    freed after the buffer and all views were freed or dropped and all calls that use it are done.

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
        """The device on which launches with this argument run."""
        return self.device

    def copy_to_host(self, out: NDArray[Any] | None = None, stream: Stream | None = None) -> NDArray[Any]:
        """Return a copy of the contents after the previous calls of the stream.

        Parameters
        ----------
        out : ndarray, optional
            Array to copy to, of the same shape and dtype, contiguous or not.
        stream : Stream, optional
            A stream of the buffer's device; default: the default stream.

        Raises
        ------
        RemoteError
            This call or a previous call of the stream failed.
        DeviceLostError
            The device was lost.
        ArgumentError
            `out` has another shape or dtype, or is read-only.
        """
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif not isinstance(out, np.ndarray) or out.shape != self.shape or out.dtype != self.dtype:
            raise _mismatch("out", out, self)
        elif not out.flags.writeable:
            raise errors.ArgumentError("out is read-only: pass a writable array", name="out")
        download(self.device.connection, self.device.channel(stream), self.handle, out)
        return out

    def copy_from(self, source: ArrayLike | Buffer, stream: Stream | None = None) -> None:
        """Copy from a buffer of any device, or from an array. You may modify an array once this has returned.

        Parameters
        ----------
        source : array-like or Buffer
            The source, of the same shape and dtype.
        stream : Stream, optional
            A stream of either device; default: the default stream of each.
        """
        if isinstance(source, Buffer):
            _copy_between(self, source, stream)
            return
        array = np.asarray(source)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise _mismatch("source", array, self)
        upload(self.device.connection, self.device.channel(stream), self.handle, array)

    def fill(self, value: Any, stream: Stream | None = None) -> None:
        """Set every item to `value`."""
        try:
            item = b"" if value is None else np.array(value).astype(self.dtype).tobytes()
        except (TypeError, ValueError):  # such as text for a numeric dtype
            item = b""
        if len(item) != self.dtype.itemsize or np.ndim(value):
            raise errors.ArgumentError(f"{value!r:.60} is not one item of {self.dtype}", name="value")
        self.device.connection.post(self.device.channel(stream), Op.FILL, self.handle, item)

    def __getitem__(self, index: Any) -> Buffer:
        if not self.ndim:
            raise IndexError("a buffer without dimensions has no items: use copy_to_host")
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            first = int(index) + (self.shape[0] if index < 0 else 0)
            if not 0 <= first < self.shape[0]:
                raise IndexError(f"index {index} is out of bounds for a first dimension of {self.shape[0]}")
            shape = self.shape[1:]
        elif isinstance(index, slice) and index.step in (None, 1):
            first, last, _ = index.indices(self.shape[0])
            shape = (max(0, last - first), *self.shape[1:])
        else:
            raise errors.ArgumentError(f"a buffer index must be an integer or a slice of step 1, got {index!r:.40}")
        return self.view_at(first * row, self.dtype, shape)

    def view_at(
        self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> Buffer:
        """Return an array at a byte offset in this buffer's memory. Only contiguous arrays can be copied."""
        view = Buffer(self.device, new_id(), shape, dtype)
        view._root, view._offset = self._root, self._offset + offset
        self.device.connection.send(Op.VIEW, view.handle, self.handle, offset, pack_dtype(dtype), shape, strides)
        return view

    def __setitem__(self, index: Any, value: Any) -> None:
        view = self[index]
        if np.ndim(value) or isinstance(value, Buffer):
            view.copy_from(value if isinstance(value, Buffer) else np.asarray(value, self.dtype))
        else:
            view.fill(value)

    def overlaps(self, buffer: Buffer) -> bool:
        """Return True if this buffer shares bytes with `buffer`."""
        return (
            self._root == buffer._root
            and self._offset < buffer._offset + buffer.nbytes
            and buffer._offset < self._offset + self.nbytes
        )

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a buffer without dimensions has no length")
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a buffer is in device memory: NumPy needs a copy of it")
        host = self.copy_to_host()
        return host if dtype is None else host.astype(dtype, copy=False)

    def __repr__(self) -> str:
        state = "" if self._handle else ", freed"
        return f"<Buffer {self.dtype} {self.shape} on device {self.device.index}{state}>"

    def __reduce__(self) -> NoReturn:  # a copy of this object would free the same memory
        raise TypeError("a buffer stays on its device: use copy_to_host, or Device.copy to a new buffer")


class Remote(AgentObject):
    """A proxy for an object on an agent; ``device.create(...)`` creates both.

    Pass it to kernels if the object is a valid argument, such as an array on storage. Call methods of the object by
    name: ``remote.call("put", b"key", b"value")``. Freeing the object does not close it.

    Attributes
    ----------
    device : Device
    path : str
        ``module:callable`` that created the object.
    """

    def __init__(self, device: Device, handle: int, path: str) -> None:
        self.path = path
        super().__init__(device, handle)

    @property
    def warpwell_place(self) -> Device:
        """The device on which launches with this argument run."""
        return self.device

    def call(self, method: str, *args: Any, stream: Stream | None = None, **options: Any) -> CallResult:
        """Call a method asynchronously. The method receives buffers as arrays."""
        name = f"{method!r} of {self.path!r}"
        return self.device._request_result(name, stream, (args, options), Op.METHOD, self.handle, method)

    def attribute(self, name: str) -> Any:
        """Wait for an attribute of the object, and return it."""
        return self.call(f".{name}").get()

    def __repr__(self) -> str:
        return f"<Remote {self.path} on device {self.device.index}>"


def _copy_between(destination: Buffer, source: Buffer, stream: Stream | None) -> None:
    """Start a copy between buffers of any devices.

    The copy is a call of `stream`, which belongs to either device, or of both default streams.
    """
    if destination.shape != source.shape or destination.dtype != source.dtype:
        raise _mismatch("source", source, destination)
    to, origin = destination.device, source.device
    if stream is not None and stream.device not in (to, origin):
        raise errors.ArgumentError(f"the stream is of device {stream.device.index}: use one of the buffers' devices")
    if to is origin:
        if destination.overlaps(source) and destination.nbytes:
            raise errors.ArgumentError("the source overlaps the destination: copy it elsewhere first", name="source")
        to.connection.post(to.channel(stream), Op.COPY, destination.handle, source.handle, nbytes=source.nbytes)
    elif to.caller is not origin.caller:
        # agents of two pools have no connection
        host = source.copy_to_host(stream=stream if stream and stream.device is origin else None)
        destination.copy_from(host, stream if stream and stream.device is to else None)
    elif destination.handle and source.handle and source.nbytes:
        channels = [d.channel(stream) if stream is None or stream.device is d else None for d in (origin, to)]
        sides = (origin.connection, source.handle, channels[0]), (to.connection, destination.handle, channels[1])
        between_agents(*sides, source.nbytes)
    elif stream is None:  # a copy without data synchronizes the streams, too
        events = to.default_stream.record(), origin.default_stream.record()
        to.default_stream.wait(events[1])
        origin.default_stream.wait(events[0])


def _mismatch(name: str, array: Any, buffer: Buffer) -> errors.ArgumentError:
    has_dtype = isinstance(array, np.ndarray | Buffer)
    description = f"{array.dtype} {array.shape}" if has_dtype else f"a {type(array).__name__}"
    return errors.ArgumentError(
        f"{name} must have the dtype and shape of the buffer, {buffer.dtype} {buffer.shape}, got {description}",
        name=name,
    )


class Device:
    """A device of the pool.

    Calls are asynchronous if possible, and run in the order of their stream. If a call fails, the next synchronization
    raises an error that names the call. ``with device:`` makes this device the current device of the thread: launches
    in the block run there, and ``ww.to_device``, ``ww.empty`` and ``ww.zeros`` allocate there.

    Attributes
    ----------
    index : int
        Index of the device in `devices` when all agents have joined.
    name, host, uuid : str
    target : {"cpu", "cuda"}
    memory : int
        Total memory in bytes; `memory_info` returns the free memory, too.
    process : int
        Process ID of the agent on its host.
    compute_capability : (int, int) or None
    link : str
        Name of the transport.
    info : dict
        All properties that the agent reported at the start.
    """

    def __init__(self, caller: Caller, connection: AgentConnection, index: int, info: dict[str, Any]) -> None:
        self.caller = caller
        self.connection = connection
        self.index = index
        self.info = info
        self.name, self.host, self.uuid, self.target = (str(info[key]) for key in ("name", "host", "uuid", "target"))
        self.memory, self.process = int(info["memory"]), int(info["pid"])
        self.compute_capability: tuple[int, int] | None = info["compute_capability"]
        self.link = caller.transport.name
        self.peers: tuple[Device, ...] = ()
        self.leave_pool: Callable[[Device, float], None]
        connection.transfers = Tuning.from_environment()
        connection.index = index
        connection.host, connection.target = self.host, self.target
        connection.label = f"device {index} ({self.target} on {self.host})"
        self.default_stream = Stream(self, channel=connection.channels[0])

    # -- memory ------------------------------------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: DTypeLike = np.float64, stream: Stream | None = None) -> Buffer:
        """Return an uninitialized buffer. The next synchronization raises if the device is out of memory."""
        kind, dimensions = checked_dtype(dtype), checked_shape(shape)
        handle, channel = new_id(), self.channel(stream)
        nbytes = int(np.prod(dimensions, dtype=object)) * kind.itemsize
        if nbytes >= 1 << 62:
            raise MemoryError(f"a buffer of {nbytes} bytes exceeds the memory of any device")
        buffer = Buffer(self, handle, dimensions, kind)  # first: its finalizer frees the memory after Ctrl-C
        self.connection.post(channel, Op.ALLOCATE, handle, nbytes, pack_dtype(kind), dimensions)
        return buffer

    def zeros(self, shape: Shape, dtype: DTypeLike = np.float64, stream: Stream | None = None) -> Buffer:
        """Return a buffer of zeros."""
        return self.full(shape, np.zeros((), dtype)[()], dtype, stream)

    def full(self, shape: Shape, value: Any, dtype: DTypeLike | None = None, stream: Stream | None = None) -> Buffer:
        """Return a buffer filled with `value`. By default, `dtype` is the dtype of `value`."""
        buffer = self.empty(shape, np.asarray(value).dtype if dtype is None else dtype, stream)
        buffer.fill(value, stream)
        return buffer

    def to_device(self, array: ArrayLike, stream: Stream | None = None) -> Buffer:
        """Return a copy of a buffer of any device, or of an array. You may modify an array once this has returned."""
        source = array if isinstance(array, Buffer) else np.asarray(array)
        buffer = self.empty(source.shape, source.dtype, stream)
        buffer.copy_from(source, stream)
        return buffer

    def copy(self, destination: Any, source: Any, stream: Stream | None = None) -> None:
        """Copy between buffers of any devices, or between a buffer and an array. Agents exchange data directly."""
        if isinstance(destination, Buffer):
            destination.copy_from(source, stream)
        elif isinstance(source, Buffer):
            source.copy_to_host(destination, stream)
        else:
            raise errors.ArgumentError("one of the two must be a buffer: use numpy.copyto for arrays")

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory."""
        info = self.query_agent()
        return int(info["free"]), int(info["total"])

    # -- calls -------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch, *args: Any, stream: Stream | None = None) -> None:
        """Run a kernel: ``device.launch(kernel[n], x, y)``. The call blocks only if an argument is a NumPy array.

        NumPy arrays are copied to the device and back, as on a local GPU. Arrays that share memory on the host share it
        on the device.

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
                f"CUDA source {code.name!r} needs a GPU, and device {self.index} has none", device=self.target
            )
        args = viewed(kernel, args)
        # a list, because an interrupt is lost if it arrives while Python closes a generator
        host = HostArrays(self, stream, args) if any([isinstance(a, np.ndarray) for a in args]) else None
        self.connection.ensure_code(code)
        packed = pack_arguments(args if host is None else host.replace_arrays(args), self.handle_of)
        self.connection.post(channel, Op.LAUNCH, code.key, launch.subscript(), packed)
        if host is not None:
            host.copy_back()
            host.free()

    def call(
        self, function: Callable[..., Any], *args: Any, stream: Stream | None = None, **options: Any
    ) -> CallResult:
        """Call a Python function on the device's agent, asynchronously.

        The function receives a buffer as a NumPy array ("cpu"), or as a CuPy array, or a numba-cuda array if CuPy is
        not installed ("cuda"). It runs in the order of the stream.

        Returns
        -------
        CallResult
            Its ``get()`` waits for the result. Arrays in it are copies.
        """
        code = Code.of(function)
        self.connection.ensure_code(code)
        return self._request_result(repr(code.name), stream, (args, options), Op.CALL, code.key)

    def _request_result(
        self, name: str, stream: Stream | None, values: tuple[Any, Any], op: Op, *operands: Any
    ) -> CallResult:
        """Send a call with pickled arguments `values`, and return the future of its result."""
        channel = self.channel(stream)
        with Arguments(self.connection, channel, self.handle_of) as arguments:
            data, handles = arguments.pack(values)
            reply = self.connection.request(channel, op, *operands, Reply, handles, data, cost=len(data), keep=True)
        return CallResult(reply, channel, f"{name} on {self.connection.label}")

    def create(self, service: str, *args: Any, stream: Stream | None = None, **options: Any) -> Any:
        """Create an object on the agent and return a proxy for it.

        Parameters
        ----------
        service : str
            A name of a service (see `warpwell.registry`), or ``"module:callable"``.
        *args, **options
            Arguments of the callable.

        Returns
        -------
        Remote
            A `Remote`, or the proxy class of the service.
        """
        channel, handle = self.channel(stream), new_id()
        path = registry.path_of(service)
        proxy: type[Remote] = registry.load(registry.stand_ins[service]) if service in registry.stand_ins else Remote
        try:
            with Arguments(self.connection, channel, self.handle_of) as arguments:
                data, handles = arguments.pack((args, options))
                self.connection.post(channel, Op.CREATE, handle, path, handles, data, cost=len(data))
            return proxy(self, handle, path)
        except BaseException:  # such as Ctrl-C: without a proxy, the agent would never close the object
            self.connection.free_later(handle)
            raise

    def open(self, path: Any, mode: str = "r", **options: Any) -> Any:
        """Open an array on storage of the device's host for kernels of the device, and wait until it is open.

        `path` is on that host. See ``ww.open`` for the parameters; the result is a `warpwell.remote.RemoteArray`.
        """
        return self.create("open", _path(path), mode, device=self.target, **options)

    def open_store(self, path: Any, mode: str = "r", **options: Any) -> Any:
        """Open a key-value store on the device's host for kernels of the device, and wait until it is open.

        See ``ww.kv.open`` for the parameters; the result is a `warpwell.remote.RemoteStore`.
        """
        return self.create("store", _path(path), mode, device=self.target, **options)

    def set_global(self, kernel: Any, name: str, value: Any, stream: Stream | None = None) -> None:
        """Set a global variable of a kernel on this device, in the order of the stream; the kernel is recompiled.

        The value is used until a variable that the kernel uses changes in this process.
        """
        code = Code.of(kernel)
        self.connection.ensure_code(code)
        data, handles = dumps(value)
        self.connection.post(self.channel(stream), Op.GLOBAL, code.key, name, handles, data, cost=len(data))

    # -- order -------------------------------------------------------------------------------------------------

    def stream(self, priority: int = 0) -> Stream:
        """Return a new stream. 0 is the lowest priority."""
        return Stream(self, checked_integer(priority, "priority", minimum=0, maximum=1 << 30))

    def event(self, timing: bool = True) -> Event:
        """Return a new event that is not recorded."""
        return Event(self, timing)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait for all streams. Raises as `Stream.synchronize` does, the default stream's failures first."""
        timeout, description = checked_timeout(timeout), f"all streams of {self.connection.label}"
        with self.connection.lock:  # no stream is created or closed concurrently
            channels = list(self.connection.channels.values())
            replies = [self.connection.request(channel, Op.SYNCHRONIZE, Reply) for channel in channels]
            replies += self.connection.closing
        for reply in replies:
            reply.wait(description, timeout)
        for channel in channels:
            channel.raise_failures()
        for reply in replies:
            reply.get(description)

    def leave(self, timeout: float = 1.0) -> None:
        """Let the device leave the program, so that other jobs can use it; wait for its calls first.

        Only devices of ``warpwell run --allocate use`` can leave. Before, free all its buffers, close arrays and
        objects on it, and release its leases. Afterwards, calls of this object raise `DeviceLostError`;
        ``devices.lease()`` lets the device join again, as a new object. The agent keeps its CUDA context.

        Parameters
        ----------
        timeout : float
            Seconds to wait until the objects are freed.

        Raises
        ------
        PoolError
            The device holds objects or is leased, or the devices of this program are fixed.
        RemoteError
            A previous call failed. The device does not leave.
        DeviceLostError
            The device was lost, or has left.
        """
        timeout = checked_timeout(timeout) or 0.0
        self.synchronize()
        self.leave_pool(self, timeout)

    @property
    def transfers(self) -> Tuning:
        """The settings for copies to and from the device; may be set at any time."""
        return self.connection.transfers

    @transfers.setter
    def transfers(self, tuning: Tuning) -> None:
        self.connection.transfers = tuning

    def channel(self, stream: Stream | None) -> Channel:
        """Return the program's side of a stream of this device, or of the default stream if `stream` is None."""
        if stream is None:
            return self.default_stream.channel
        if not isinstance(stream, Stream):
            raise errors.ArgumentError(f"stream must be a device.stream(), got {stream!r:.60}", name="stream")
        if stream.device is not self:
            text = f"the stream belongs to device {stream.device.index}, but the call to device {self.index}"
            raise errors.ArgumentError(text, name="stream")
        return stream.channel

    # -- properties --------------------------------------------------------------------------------------------

    @property
    def lost(self) -> str | None:
        """Why the agent is lost, or None while it runs."""
        return self.connection.lost

    def query_agent(self) -> dict[str, Any]:
        """Return the agent's report: completed calls, held objects, and lanes."""
        return dict(self.connection.request(None, Op.INFO, Reply).get(f"a reply of {self.connection.label}"))

    def trace(self) -> dict[str, tuple[int, int, float]]:
        """Return statistics by kind of call: number of calls, bytes sent, seconds that the program waited."""
        return {name: (int(n), int(b), w) for name, (n, b, w) in sorted(self.connection.counts.items())}

    def handle_of(self, value: Any) -> int | None:
        """Return the handle of an object on this device, or None for an object without a device.

        Raises
        ------
        ArgumentError
            The object is on another device, or was opened in this process.
        """
        device = getattr(value, "warpwell_place", None)
        if device is None:
            if is_argument(value):
                raise errors.ArgumentError(
                    f"the {type(value).__name__} was opened in this process: open it on device {self.index} with "
                    f"device.open()"
                )
            return None
        if device is not self:
            raise errors.ArgumentError(
                f"{value!r:.80} is on device {device.index}, but the call is for device {self.index}: copy it there "
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
    """Return an absolute path, because the agent's process may run in another folder."""
    return os.path.abspath(path) if isinstance(path, str | os.PathLike) else path
