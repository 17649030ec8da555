"""`Devices`: all devices of a pool, as a sequence."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, overload

from .. import errors
from ..targets.kernel import has_cuda
from . import placement
from .agent.agent import Agent, start
from .agent.caller import Caller
from .agent.protocol import Op
from .agent.reply import Reply
from .agent.runtime import CpuRuntime, Runtime
from .device import Device, entered
from .group import Group
from .lease import Lease, Leases
from .transport.local_transport import local_transports
from .transport.transport import Transport


class Devices(Group):
    """The devices of a pool.

    Parameters
    ----------
    transport : Transport, optional
        Its peers are agents. Without one, the devices are local: agents in threads of this process.
    local : bool
        Whether local devices come too, behind those of the transport.
    targets : sequence of str, optional
        Local devices: "cpu", "cuda" or "cuda:1", one each. By default each GPU, or one "cpu" where there is none.
    timeout : float
        Seconds that an agent has for its first answer.

    Raises
    ------
    AgentError
        An agent does not answer.
    """

    def __init__(
        self,
        transport: Transport | None = None,
        *,
        local: bool = False,
        targets: Sequence[str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._found: list[Device] = []
        super().__init__(self._found)
        self._callers: list[Caller] = []
        self._closing: list[Any] = []
        self._leases = Leases(self._devices)
        self._process = os.getpid()
        _all.add(self)
        try:
            if transport is not None:
                self._join(transport, timeout)
            if transport is None or local:
                self._join(self._start(_default_targets() if targets is None else targets), timeout)
        except BaseException:
            self.close()
            raise
        for device in self._devices:
            device.peers = tuple(d for d in self._devices if d is not device)
        placement.install(_first_of_pool)

    def _start(self, targets: Sequence[str]) -> Transport:
        own, *others = local_transports(1 + len(targets))
        for target, transport in zip(targets, others, strict=True):
            thread = start(Agent(transport, runtime_for(target)), f"warpwell agent {target}")
            self._closing.append((thread, transport))
        return own

    def _join(self, transport: Transport, timeout: float) -> None:
        caller = Caller(transport)
        self._callers.append(caller)
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
        memory: int | None = None,
        host: str | None = None,
        timeout: float | None = None,
    ) -> Lease:
        """Take devices that nobody else in this program has leased; wait until there are so many.

        Parameters
        ----------
        count : int
        target : {"cpu", "cuda"}, optional
        memory : int, optional
            Bytes that each must have at least.
        host : str, optional
            Where they must be.
        timeout : float, optional
            Seconds to wait for others to release some; 0 does not wait. By default ``WARPWELL_POOL_STALL``, or an hour.

        Returns
        -------
        Lease
            A sequence of them, to be released, and a context manager.

        Raises
        ------
        PoolError
            There are not so many in the pool.
        StallError
            They were not released in time.
        """
        return self._leases.lease(count, target=target, memory=memory, host=host, timeout=timeout)

    def close(self) -> None:
        """End the agents. What was not waited for has two seconds; buffers are gone."""
        for caller in self._callers:
            caller.close()
        for thread, transport in self._closing:
            thread.join(5.0)
            with contextlib.suppress(errors.WarpwellError):
                transport.close()
        self._closing = []

    def forked(self) -> None:
        """Let every call raise `ForkError`: the threads that would answer are those of the parent process."""
        for caller in self._callers:
            caller.closed = True
            for connection in caller.connections.values():
                connection.lost = connection.forked = (
                    f"{connection.label} belongs to process {self._process} and this is {os.getpid()}, forked from it: "
                    f"ask ww.devices() here (multiprocessing: use the spawn method), and move data as NumPy arrays"
                )
                connection.lock = threading.RLock()
            for rank, reply in list(caller.replies.values()):
                with contextlib.suppress(Exception):
                    reply.come(None, errors.ForkError(str(caller.connections[rank].forked)))
        self._callers, self._closing = [], []

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
    """Return all devices: those of the agents under ``warpwell run``, else each GPU, or the CPU where there is none."""
    global _devices, _own
    with _lock:
        if _devices is None:
            _devices, _own = Devices(), True
            atexit.register(_devices.close)
        return _devices


def use(found: Devices | None) -> None:
    """Let `devices` return these (for launchers and tests); None lets it find them again."""
    global _devices, _own
    with _lock:
        _devices, _own = found, False


def joined() -> bool:
    """Tell whether `devices` has been told, or has found, what it returns."""
    return _devices is not None


def current_device() -> Device:
    """Return the device of the innermost ``with device:`` of this thread, else the first one.

    What has no place of its own goes there: ``ww.to_device``, ``ww.empty`` and ``ww.zeros``, and under ``warpwell run``
    launches with NumPy arrays and files that ``ww.open`` and ``ww.create`` are given. In a program of one process these
    two take a device that was entered, else they stay in the process.
    """
    return entered() or devices()[0]


def chosen_device() -> Device | None:
    """Return `current_device` if it was entered, or is one of a pool; None where all stays in this process."""
    return entered() or _first_of_pool()


def _first_of_pool() -> Device | None:
    return _devices[0] if _devices is not None and not _own and len(_devices) else None


def runtime_for(target: str) -> Runtime:
    """Return what executes on "cpu", "cuda" (the first GPU) or "cuda:1"."""
    if target == "cpu":
        return CpuRuntime()
    kind, _, ordinal = target.partition(":")
    if kind != "cuda" or not (ordinal.isdigit() or not ordinal):
        raise errors.ArgumentError(f"target {target!r}: choose 'cpu', 'cuda' or 'cuda:1'", name="targets")
    from .agent.cuda_runtime import CudaRuntime

    return CudaRuntime(int(ordinal or 0))


def _default_targets() -> list[str]:
    if not has_cuda():
        return ["cpu"]
    from ..targets.gpu.device import gpu_count

    return [f"cuda:{k}" for k in range(gpu_count())]
