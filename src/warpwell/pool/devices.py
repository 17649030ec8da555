"""`Devices`: all devices of a pool, as a sequence; the current device; the device of a launch.

A launch runs on the device of its stream, else on the device of its buffers. A launch with an array that this process
opened runs in this process. A launch with neither (NumPy arrays, numbers) runs on `current_device` if the program has a
pool or has entered a device, else in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .. import errors
from .._check import checked_device
from .._os import uninterrupted
from ..targets import DeviceStruct, has_cuda, is_argument, set_place
from .agent.agent import Agent, start
from .agent.protocol import Op
from .agent.runtime import Runtime
from .caller import Caller
from .device import Buffer, Device, Stream, entered
from .lease import DeviceGroup, Lease, Leases
from .reply import CallResult, Reply
from .spares import Spares
from .transport.local_transport import local_transports
from .transport.transport import Transport

T = TypeVar("T")

_RETRY_SECONDS = 0.01
"""Interval at which a request to leave is repeated, because frees of dropped objects may be in flight."""


class Devices(DeviceGroup):
    """The devices of a pool.

    Parameters
    ----------
    transport : Transport, optional
        Transport to the agents. By default, the agents are threads of this process.
    targets : sequence of str, optional
        Targets of local devices: "cpu", "cuda" or "cuda:1". Default: each GPU, or "cpu" on a machine without a GPU.
    timeout : float
        Timeout of an agent's first reply, in seconds.
    agents : sequence of int, optional
        Ranks of the agents. Default: all peers of the transport.
    idle : float, optional
        A device leaves the pool after this number of seconds without a lease, objects or calls. Default: never.

    Attributes
    ----------
    changed : threading.Event
        Set when a device has joined, has left or is lost. The program clears it.

    Raises
    ------
    AgentError
        An agent does not reply, or its device cannot be used.
    """

    def __init__(
        self,
        transport: Transport | None = None,
        *,
        targets: Sequence[str] | None = None,
        timeout: float = 60.0,
        agents: Sequence[int] | None = None,
        idle: float | None = None,
    ) -> None:
        super().__init__(())
        self.changed = threading.Event()
        self._caller: Caller | None = None
        self._closing: list[tuple[threading.Thread, Transport]] = []
        self._leases = Leases(self)
        self._closed = threading.Event()
        self._process = os.getpid()
        _all.add(self)
        try:
            if transport is None:
                transport = self._start(_default_targets() if targets is None else targets)
            self._join(transport, transport.peers if agents is None else agents, timeout)
        except BaseException:
            self.close()
            raise
        set_place(place_launch)
        if idle is not None:
            threading.Thread(target=self._leave_idle, args=(idle,), name="warpwell idle devices", daemon=True).start()

    def _start(self, targets: Sequence[str]) -> Transport:
        transport, *ends = local_transports(1 + len(targets))
        # create all agents before the first agent runs: if a target is not usable, no agent has to be stopped
        agents = [Agent(end, runtime_for(target)) for target, end in zip(targets, ends, strict=True)]
        for target, agent in zip(targets, agents, strict=True):
            self._closing.append((start(agent, f"warpwell agent {target}"), agent.transport))
        return transport

    def _join(self, transport: Transport, agents: Sequence[int], timeout: float) -> None:
        caller = self._caller = Caller(transport, agents)
        requests = [(c, c.request(None, Op.INFO, Reply)) for c in caller.connections.values()]
        infos = {}
        for connection, reply in requests:
            try:
                info = reply.get(f"the properties of {connection.label}", timeout)
            except (errors.StallError, errors.DeviceLostError) as error:
                raise errors.AgentError(f"the agent of {connection.label} does not reply: {error}") from error
            except errors.RemoteError as error:
                raise errors.AgentError(f"the device of {connection.label} cannot be used: {error}") from error
            infos[connection.rank] = info
        self._leases.spares = Spares(caller, infos, self._change)
        if self._leases.spares.is_fixed:
            self._change([Device(caller, c, index, infos[c.rank]) for index, (c, _) in enumerate(requests)])
        transport.on_lost(lambda *_: self.changed.set())

    def _change(self, joined: Sequence[Device], left: Device | None = None) -> None:
        """Add and remove devices. A thread that iterates over the devices continues with the previous sequence."""
        with self._leases.lock:
            devices = [*(d for d in self._devices if d is not left), *joined]
            self._devices = tuple(sorted(devices, key=lambda device: device.index))
            for device in self._devices:
                device.peers = tuple(d for d in self._devices if d is not device)
                device.leave_pool = self._leave
        self.changed.set()
        self._leases.notify()

    def _leave(self, device: Device, timeout: float) -> None:
        """Let a device leave; see `Device.leave`."""
        spares, end = self._leases.spares, time.monotonic() + timeout
        if spares.is_fixed:
            raise errors.PoolError(
                f"device {device.index} cannot leave: the devices of this program are fixed; start it with "
                "warpwell run --allocate use"
            )
        with self._leases.lease_device(device):
            Spares.is_busy(device)  # raises if the agent does not answer; LEAVE would make it lost
            while True:
                with uninterrupted():
                    held = spares.leave(device)
                    if held is None:
                        self._change([], device)
                        return
                if time.monotonic() >= end:
                    raise errors.PoolError(
                        f"device {device.index} cannot leave: it has {held}; free them, or wait until they are done"
                    )
                time.sleep(_RETRY_SECONDS)

    def _leave_idle(self, seconds: float) -> None:
        """Let devices leave that have had no calls for a time, until the pool is closed."""
        last: weakref.WeakKeyDictionary[Device, tuple[float, float]] = weakref.WeakKeyDictionary()
        while not self._closed.wait(min(seconds / 4, 1.0)):
            for device in self:
                calls, now = sum(entry[0] for entry in list(device.connection.counts.values())), time.monotonic()
                if last.setdefault(device, (calls, now))[0] != calls:
                    last[device] = calls, now
                if now - last[device][1] < seconds or device.index in self._leases.leased:
                    continue
                with contextlib.suppress(errors.WarpwellError):  # the device holds objects, or is lost
                    is_busy = Spares.is_busy(device)  # before `leave`: failures arrive before this answer
                    if not is_busy and not any(c.failures for c in list(device.connection.channels.values())):
                        self._leave(device, 0.0)

    def _describe_range(self, index: Any) -> str:
        if not self._leases.spares.is_fixed:
            return f"devices()[{index}]: {len(self)} devices have joined; ww.devices().lease() lets more join"
        count = "there is one device" if len(self) == 1 else f"there are {len(self)} devices"
        return f"devices()[{index}]: {count}; `warpwell run --agents N FILE.py` starts a program with more"

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

        Under ``warpwell run --allocate use``, devices that no other job uses join the pool if the lease needs them:
        either all that are missing or none.

        Parameters
        ----------
        count : int
        target : {"cpu", "cuda"}, optional
        memory : int or str, optional
            Minimum memory of each device, in bytes or as text such as "16GiB".
        host : str, optional
            The host of the devices.
        timeout : float, optional
            Seconds to wait until devices are released; 0 does not wait. Default: ``WARPWELL_POOL_STALL``, or an hour.

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
        RemoteError
            A device that was to join could not be opened.
        """
        return self._leases.lease(count, target=target, memory=memory, host=host, timeout=timeout)

    def close(self) -> None:
        """Stop the agents. Calls in flight have 2 s to complete; buffers are lost."""
        self._closed.set()
        if self._caller is not None:
            self._caller.close()
        for thread, transport in self._closing:
            thread.join(5.0)
            with contextlib.suppress(errors.WarpwellError):
                transport.close()
        self._closing = []

    def forked(self) -> None:
        """Make every call raise `ForkError`, because the threads that receive replies exist only in the parent."""
        self._leases.forked()
        caller, self._caller, self._closing = self._caller, None, []
        if caller is None:
            return
        caller.closed = True
        for connection in caller.connections.values():
            connection.lost = connection.forked = (
                f"{connection.label} belongs to process {self._process}, but this is its forked child {os.getpid()}: "
                f"call ww.devices() in the child, and move data as NumPy arrays"
            )
            connection.lock = threading.RLock()
        for rank, reply in list(caller.replies.values()):
            with contextlib.suppress(Exception):
                reply.fail(errors.ForkError(str(caller.connections[rank].forked)))

    def __enter__(self) -> Devices:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._devices)) or "<Devices: none>"


_lock = threading.Lock()
_devices: Devices | None = None
_are_local = False
"""Whether `devices`, and not a launcher, has created the devices."""
_all: weakref.WeakSet[Devices] = weakref.WeakSet()


def _after_fork() -> None:
    global _lock, _devices
    _lock = threading.Lock()
    for parent_devices in list(_all):
        parent_devices.forked()
    _devices = None  # the child is a separate program, which uses the devices of this machine


os.register_at_fork(after_in_child=_after_fork)


def devices() -> Devices:
    """Return all devices.

    Under ``warpwell run``, these are the devices of the agents; otherwise each GPU of this machine, or the CPU on a
    machine without a GPU.
    """
    global _devices, _are_local
    with _lock:
        if _devices is None:
            _devices, _are_local = Devices(), True
            atexit.register(_devices.close)
        return _devices


def use(pool: Devices | None) -> None:
    """Set the result of `devices` (for launchers and tests). After None, `devices` creates local devices again."""
    global _devices, _are_local
    with _lock:
        _devices, _are_local = pool, False


def joined() -> bool:
    """Return True if the devices that `devices` returns exist."""
    return _devices is not None


def current_device() -> Device:
    """Return the device of the innermost ``with device:`` of this thread, else the first device.

    ``ww.to_device``, ``ww.empty`` and ``ww.zeros`` allocate there. Under ``warpwell run``, launches with NumPy arrays
    run there, and ``ww.open`` and ``ww.create`` open files there. In a program without a pool, launches and these
    functions use the entered device, or without one the process itself.
    """
    return entered() or devices()[0]


def chosen_device() -> Device | None:
    """Return `current_device` if it was entered or belongs to a pool, or None if this process does the work itself."""
    return entered() or (_devices[0] if _devices is not None and not _are_local and len(_devices) else None)


# -- the current device ------------------------------------------------------------------------------------------


def place_launch(launch: Any, args: Sequence[Any], target: str | None) -> bool:
    """Run a launch on a device of the pool, unless it belongs to this process.

    Parameters
    ----------
    launch : Launch
    args : sequence
    target : str or None
        The launch's option ``device=``.

    Returns
    -------
    bool
        False if the caller must run the launch in this process.
    """
    stream = launch.stream if isinstance(launch.stream, Stream) else None
    owners = (getattr(value, "warpwell_place", None) for value in args)
    device = next((owner for owner in owners if owner is not None), None) if stream is None else stream.device
    if device is not None and target is not None:
        raise errors.ArgumentError(
            f"device={target!r} conflicts with buffers or a stream of device {device.index} of the pool: omit device=",
            name="device",
        )
    if device is None and target is None and not any(_belongs_to_process(value) for value in args):
        device = chosen_device()
    if device is None:
        return False
    device.launch(launch, *args, stream=stream)
    return True


def _belongs_to_process(value: Any) -> bool:
    """Return True if an argument was opened in this process, or is on a GPU that this process uses itself."""
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


def empty_like(prototype: Any) -> Buffer:
    """Return an uninitialized buffer with the shape and dtype of an array (on the current device) or of a buffer."""
    if not hasattr(prototype, "shape") or not hasattr(prototype, "dtype"):
        raise errors.ArgumentError(f"expected an array or a buffer, got {prototype!r:.60}", name="prototype")
    device: Device = getattr(prototype, "warpwell_place", None) or current_device()
    return device.empty(prototype.shape, prototype.dtype)


def broadcast(devices: Iterable[Device], function: Callable[..., T], *args: Any, **options: Any) -> list[T]:
    """Call ``function(device, *args, **options)`` with each device as the current one; return the list of results.

    Calls of the function to its device are asynchronous, so they run on all devices at the same time. At the end, each
    `CallResult` among the results is replaced by its value. The function is called for every device; then the first
    failure is raised, and its notes name the others.

    Examples
    --------
    >>> import warpwell as ww
    >>> sums = ww.broadcast(ww.devices(), lambda device: device.call(sum, [1, 2, 3]))
    """
    results: list[Any] = []
    failures: list[tuple[Device, Exception]] = []
    targets = [] if isinstance(devices, Device) else list(devices)
    if isinstance(devices, Device) or not all(isinstance(device, Device) for device in targets):
        raise errors.ArgumentError(
            f"devices must be a sequence of devices, such as ww.devices() or a lease, got {devices!r:.60}",
            name="devices",
        )
    for device in targets:
        try:
            with device:
                results.append(function(device, *args, **options))
        except Exception as error:  # the remaining devices get the call, too
            results.append(None)
            failures.append((device, error))
    for k, value in enumerate(results):
        if isinstance(value, CallResult):
            try:
                results[k] = value.get()
            except Exception as error:
                failures.append((targets[k], error))
    if failures:
        first = failures[0][1]
        for device, failure in failures[1:]:
            first.add_note(f"and on device {device.index}: {type(failure).__name__}: {failure}")
        raise first
    return results


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
