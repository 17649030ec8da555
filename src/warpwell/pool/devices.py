"""`Devices`: all devices of a pool, as a sequence; the current device; the choice of the device of a launch.

A launch runs on the device of its stream, else on that of its arguments: buffers on their device, arrays that this
process opened in this process. If the arguments do not decide (NumPy arrays, numbers), it runs on `current_device`;
without a pool and an entered device, this process runs it itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .. import errors
from .._check import checked_device
from ..targets import DeviceStruct, has_cuda, is_argument, set_place
from .agent.agent import Agent, start
from .agent.protocol import Op
from .agent.runtime import Runtime
from .caller import Caller
from .device import Buffer, Device, Stream, entered
from .lease import DeviceGroup, Lease, Leases
from .reply import Reply
from .result import CallResult
from .transport.local_transport import local_transports
from .transport.transport import Transport

T = TypeVar("T")


class Devices(DeviceGroup):
    """The devices of a pool.

    Parameters
    ----------
    transport : Transport, optional
        Its peers are agents, or `agents` among them. Without one, the devices are local: agents in threads of this
        process.
    targets : sequence of str, optional
        Local devices: "cpu", "cuda" or "cuda:1", one each. Default: each GPU, or one "cpu" if there is none.
    timeout : float
        Timeout of an agent's first answer, in seconds.

    Raises
    ------
    AgentError
        An agent does not answer.
    """

    def __init__(
        self,
        transport: Transport | None = None,
        *,
        targets: Sequence[str] | None = None,
        timeout: float = 60.0,
        agents: Sequence[int] | None = None,
    ) -> None:
        self._found: list[Device] = []
        super().__init__(self._found)
        self._caller: Caller | None = None
        self._closing: list[tuple[threading.Thread, Transport]] = []
        self._leases = Leases(self._devices)
        self._process = os.getpid()
        _all.add(self)
        try:
            if transport is None:
                transport = self._start(_default_targets() if targets is None else targets)
            self._join(transport, transport.peers if agents is None else agents, timeout)
        except BaseException:
            self.close()
            raise
        for device in self._devices:
            device.peers = tuple(d for d in self._devices if d is not device)
        set_place(place)  # launches ask it from now on

    def _start(self, targets: Sequence[str]) -> Transport:
        own, *others = local_transports(1 + len(targets))
        # all of them before any runs: nobody would tell those that run to end if the next target cannot be used
        agents = [Agent(transport, runtime_for(target)) for target, transport in zip(targets, others, strict=True)]
        for target, agent in zip(targets, agents, strict=True):
            self._closing.append((start(agent, f"warpwell agent {target}"), agent.transport))
        return own

    def _join(self, transport: Transport, agents: Sequence[int], timeout: float) -> None:
        caller = self._caller = Caller(transport, agents)
        asked = [(c, c.ask(None, Op.INFO, Reply)) for c in caller.connections.values()]
        for connection, reply in asked:
            try:
                info = reply.get(f"{connection.label} to say what it is", timeout)
            except (errors.StallError, errors.DeviceLostError) as error:
                raise errors.AgentError(f"the agent of {connection.label} does not answer: {error}") from error
            except errors.RemoteError as error:
                raise errors.AgentError(f"the device of {connection.label} cannot be used: {error}") from error
            self._found.append(Device(caller, connection, len(self._found), info))

    @overload
    def __getitem__(self, index: int) -> Device: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Device]: ...
    def __getitem__(self, index: int | slice) -> Device | Sequence[Device]:
        try:
            return super().__getitem__(index)
        except IndexError:
            there = "there is one device" if len(self) == 1 else f"there are {len(self)} devices"
            raise IndexError(
                f"devices()[{index}]: {there}; `warpwell run --agents N FILE.py` starts a program with more"
            ) from None

    def lease(
        self,
        count: int = 1,
        *,
        target: str | None = None,
        memory: int | str | None = None,
        host: str | None = None,
        timeout: float | None = None,
    ) -> Lease:
        """Lease devices that no other thread of this program has leased; wait until enough are free.

        Parameters
        ----------
        count : int
        target : {"cpu", "cuda"}, optional
        memory : int or str, optional
            Minimal memory of each device ("16GiB").
        host : str, optional
            The host of the devices.
        timeout : float, optional
            Seconds to wait for devices to be released; 0 does not wait. Default: ``WARPWELL_POOL_STALL``, or an hour.

        Returns
        -------
        Lease
            A sequence of the devices, and a context manager that releases them.

        Raises
        ------
        PoolError
            The pool has fewer devices.
        StallError
            Not enough devices were released in time.
        """
        return self._leases.lease(count, target=target, memory=memory, host=host, timeout=timeout)

    def close(self) -> None:
        """End the agents. Calls in flight have two seconds to end; buffers are lost."""
        if self._caller is not None:
            self._caller.close()
        for thread, transport in self._closing:
            thread.join(5.0)
            with contextlib.suppress(errors.WarpwellError):
                transport.close()
        self._closing = []

    def forked(self) -> None:
        """Let every call raise `ForkError`: the threads that receive answers exist in the parent process only."""
        caller, self._caller, self._closing = self._caller, None, []
        if caller is None:
            return
        caller.closed = True
        for connection in caller.connections.values():
            connection.lost = connection.forked = (
                f"{connection.label} belongs to process {self._process} and this is {os.getpid()}, forked from it: "
                f"call ww.devices() here, and move data as NumPy arrays"
            )
            connection.lock = threading.RLock()
        for rank, reply in list(caller.replies.values()):
            with contextlib.suppress(Exception):
                reply.come(None, errors.ForkError(str(caller.connections[rank].forked)))

    def __enter__(self) -> Devices:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._devices)) or "<Devices: none>"


_lock = threading.Lock()
_devices: Devices | None = None
_own = False
"""Whether `devices` found them, rather than was told them."""
_all: weakref.WeakSet[Devices] = weakref.WeakSet()


def _after_fork() -> None:
    global _lock, _devices
    _lock = threading.Lock()
    for found in list(_all):
        found.forked()
    _devices = None  # the child is a program of its own: it asks again, and finds this machine's


os.register_at_fork(after_in_child=_after_fork)


def devices() -> Devices:
    """Return all devices: those of the agents under ``warpwell run``, else each GPU, or the CPU if there is none."""
    global _devices, _own
    with _lock:
        if _devices is None:
            _devices, _own = Devices(), True
            atexit.register(_devices.close)
        return _devices


def use(found: Devices | None) -> None:
    """Set what `devices` returns (for launchers and tests); after None it finds them again."""
    global _devices, _own
    with _lock:
        _devices, _own = found, False


def joined() -> bool:
    """Return whether `devices` has found, or was given, the devices that it returns."""
    return _devices is not None


def current_device() -> Device:
    """Return the device of the innermost ``with device:`` of this thread, else the first one.

    ``ww.to_device``, ``ww.empty`` and ``ww.zeros`` allocate there. Under ``warpwell run``, launches with NumPy arrays
    run there, and ``ww.open`` and ``ww.create`` open files there. In a program without a pool they use the entered
    device, if any, else the process itself.
    """
    return entered() or devices()[0]


def chosen_device() -> Device | None:
    """Return `current_device` if it was entered or is one of a pool; None if this process does the work itself."""
    return entered() or _first_of_pool()


def _first_of_pool() -> Device | None:
    return _devices[0] if _devices is not None and not _own and len(_devices) else None


# -- what runs and lies on the current device ---------------------------------------------------------------------


def place(launch: Any, args: Sequence[Any], device: str | None) -> bool:
    """Run a launch on the device of the pool where it belongs, if there is one.

    Parameters
    ----------
    launch : Launch
    args : sequence
    device : str or None
        The launch's option ``device=``.

    Returns
    -------
    bool
        Whether it ran there; otherwise the launch is a local one.
    """
    stream = launch.stream if isinstance(launch.stream, Stream) else None
    chosen: Device | None = None if stream is None else stream.device
    if chosen is None:
        for value in args:
            chosen = getattr(value, "warpwell_place", None)
            if chosen is not None:
                break
    if chosen is not None and device is not None:
        raise errors.ArgumentError(
            f"device={device!r} for a launch with buffers or a stream of device {chosen.index} of the pool: leave it "
            f"out",
            name="device",
        )
    if chosen is None and device is None and not any(_is_here(value) for value in args):
        chosen = chosen_device()
    if chosen is None:
        return False
    chosen.launch(launch, *args, stream=stream)
    return True


def _is_here(value: Any) -> bool:
    """Return whether an argument belongs to this process: opened in it, or on a GPU that it uses itself."""
    return is_argument(value) or isinstance(value, DeviceStruct) or hasattr(value, "__cuda_array_interface__")


def to_device(array: ArrayLike) -> Buffer:
    """Return a copy of an array, or of a buffer, on the current device."""
    return current_device().to_device(array)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float64) -> Buffer:
    """Return an uninitialized buffer on the current device."""
    return current_device().empty(shape, dtype)


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike = np.float64) -> Buffer:
    """Return a buffer of zeros on the current device."""
    return current_device().zeros(shape, dtype)


def empty_like(other: Any) -> Buffer:
    """Return a buffer of the shape and dtype of an array or buffer: on the buffer's device, else on the current one."""
    if not hasattr(other, "shape") or not hasattr(other, "dtype"):
        raise errors.ArgumentError(f"{other!r:.60} has no shape and dtype: give an array or a buffer", name="other")
    place = getattr(other, "warpwell_place", None) or current_device()
    buffer: Buffer = place.empty(other.shape, other.dtype)
    return buffer


def broadcast(devices: Iterable[Device], function: Callable[..., T], *args: Any, **options: Any) -> list[T]:
    """Call ``function(device, *args, **options)`` with each device as the current one; return what it returned.

    Calls in the function do not wait, so they run on all devices at the same time. `CallResult` objects among the
    results are waited for at the end. The function is called for every device; then the first failure is raised, with
    the others as its notes.

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
        if isinstance(value, CallResult):
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


# -- local devices ---------------------------------------------------------------------------------------------------


def runtime_for(target: str) -> Runtime:
    """Return the runtime for "cpu", "cuda" (the first GPU) or "cuda:1"."""
    device = checked_device(target, "targets", among=("cpu", "cuda"), every_gpu=True)
    if device == "cpu":
        return Runtime()
    from .agent.cuda_runtime import CudaRuntime

    return CudaRuntime(int(device.removeprefix("cuda").removeprefix(":") or 0))


def _default_targets() -> list[str]:
    if not has_cuda():
        return ["cpu"]
    from ..targets.gpu import gpu_count

    return [f"cuda:{k}" for k in range(gpu_count())]
