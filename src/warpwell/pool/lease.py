"""`Lease`: exclusive use of devices among the threads of a program; `DeviceGroup`: a sequence of devices."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, overload

from .. import errors
from .._check import checked_device, checked_integer, checked_nbytes, checked_timeout
from .._os import uninterrupted
from .device import Device
from .spares import Fits, Joining, Spares
from .transport.milestone import ALIVE_CHECK_SECONDS, limit


class DeviceGroup(Sequence[Device]):
    """A sequence of devices, which can be synchronized together.

    Parameters
    ----------
    devices : sequence of Device
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait for all devices, as `Device.synchronize` does."""
        for device in self._devices:
            device.synchronize(timeout)

    @overload
    def __getitem__(self, index: int) -> Device: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Device]: ...
    def __getitem__(self, index: int | slice) -> Device | Sequence[Device]:
        try:
            return self._devices[index]
        except IndexError:
            raise IndexError(self._describe_range(index)) from None

    def _describe_range(self, index: Any) -> str:
        """Return the message for an index that is out of range."""
        return f"index {index} is out of range for a lease of {len(self)} devices"

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices)


class Lease(DeviceGroup):
    """Devices that one thread has leased, for example by ``devices.lease(2)``. A context manager that releases them.

    Functions that accept `Devices`, such as ``ww.broadcast`` and ``Scheduler(devices=...)``, accept a lease, too.
    Leases are advisory: a thread without a lease can use the devices, too.

    Parameters
    ----------
    devices : sequence of Device
    leases : Leases
    """

    def __init__(self, devices: Sequence[Device], leases: Leases) -> None:
        super().__init__(tuple(devices))
        self._leases = leases
        self._finalizer = weakref.finalize(self, leases.leased.difference_update, {d.index for d in devices})

    @property
    def released(self) -> bool:
        """Whether the devices were released."""
        return not self._finalizer.alive

    def release(self) -> None:
        """Release the devices (idempotent). Calls in flight continue."""
        with uninterrupted():
            self._finalizer()
        self._leases.notify()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<Lease of devices {', '.join(str(d.index) for d in self._devices)}, {state}>"


@dataclass(eq=False)
class _LeaseRequest:
    count: int
    fits: Fits
    conditions: str
    seconds: float
    joining: Joining

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds


_ANSWER_SECONDS = 15.0
"""Time, in seconds, that agents have to answer after the timeout of a lease request."""


class Leases:
    """The leased devices of a pool, and the waiting requests.

    Requests are served in FIFO order: a waiting request reserves the devices that it could use. So requests for one
    device do not starve a request for many devices.

    Parameters
    ----------
    devices : sequence of Device
        The sequence changes when devices join and leave.

    Attributes
    ----------
    leased : set of int
        Indices of the leased devices. A finalizer removes them; waiting requests check again every 0.25 s.
    spares : Spares
        The agents of the pool. `Devices` sets it.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.spares: Spares
        self.leased: set[int] = set()
        self._waiting: list[_LeaseRequest] = []
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    def lease(
        self, count: int, *, target: str | None, memory: int | str | None, host: str | None, timeout: float | None
    ) -> Lease:
        if checked_integer(count, "count", minimum=None) < 1:
            raise errors.ArgumentError(f"count must be at least 1, got {count}", name="count")
        if memory is not None:
            memory = checked_nbytes(memory, "memory", minimum=0, maximum=1 << 62)
        if target is not None:
            target = checked_device(target, "target", among=("cpu", "cuda"))

        def fits(device_target: str, device_host: str, device_memory: int | None) -> bool:
            return (
                target in (None, device_target)
                and host in (None, device_host)
                and (memory is None or device_memory is None or device_memory >= memory)
            )

        properties = (("target", target), ("host", host), ("memory", memory))
        conditions = "".join(f", {name} {value!r}" for name, value in properties if value)
        joining = Joining(self.spares, fits, self.notify)
        request = _LeaseRequest(count, fits, conditions, limit(checked_timeout(timeout)), joining)
        try:
            with uninterrupted(), self.lock:
                self._waiting.append(request)
            while True:
                with self.lock:
                    lease = self._wait(request)
                if lease is not None:
                    return lease
                with suppress(errors.DeviceLostError):  # then the number of devices is checked again
                    joining.join()
        finally:
            with uninterrupted():
                joining.cancel()
                with self.lock:
                    self._waiting = [waiting for waiting in self._waiting if waiting is not request]
                    self._changed.notify_all()

    def _wait(self, request: _LeaseRequest) -> Lease | None:
        """Wait until devices are free, and return a lease; or return None when devices can join."""
        joining = request.joining
        while True:
            self._check_count(request)
            granted, spare = self._select(request)
            if len(granted) == request.count:
                return self._grant(granted)
            left = request.end - time.monotonic()
            reason, answers = f"{len(self.leased)} are leased", left
            try:
                if joining.poll(request.count - len(granted), spare, max(0.0, left)):
                    return None
                answers += _ANSWER_SECONDS if joining.is_waiting else 0.0
            except errors.StallError as error:
                reason, answers = str(error), 0.0
            if answers <= 0:
                text = f"waited {request.seconds:g} s for {request.count} devices{request.conditions}: {reason}"
                raise errors.StallError(text, seconds=request.seconds)
            self._changed.wait(min(ALIVE_CHECK_SECONDS, left) if left > 0 else ALIVE_CHECK_SECONDS)

    def _check_count(self, request: _LeaseRequest) -> None:
        """Raise if the pool can never satisfy a request."""
        fitting, lost = sum(self.spares.fits(rank, request.fits) for rank in self.spares.infos), self.spares.lost
        if fitting < request.count:
            raise errors.PoolError(
                f"{request.count} devices were requested{request.conditions}, but the pool has {fitting}"
                f"{f' ({lost} are lost)' if lost else ''}: request fewer, or start more agents"
            )

    def _select(self, request: _LeaseRequest) -> tuple[list[Device], list[int]]:
        """Return free devices and the ranks of spare agents for a request, except those that earlier requests need."""
        free = [d for d in self._devices if d.index not in self.leased]
        spares = self.spares.unused()
        for earlier in self._waiting:
            reserved = 0 if earlier is request else earlier.joining.reserved
            missing = earlier.count - reserved
            usable = [d for d in free if self.spares.fits(d.connection.rank, earlier.fits)][:missing]
            fitting = [rank for rank in spares if self.spares.fits(rank, earlier.fits)]
            if earlier is request:
                return usable, fitting
            free = [d for d in free if d not in usable]
            spares = [rank for rank in spares if rank not in fitting[: missing - len(usable)]]
        return [], []

    def _grant(self, devices: Sequence[Device]) -> Lease:
        with uninterrupted():
            self.leased |= {d.index for d in devices}
            return Lease(devices, self)

    def lease_device(self, device: Device) -> Lease:
        """Return a lease of one device without waiting.

        Raises
        ------
        PoolError
            The device is leased.
        """
        with self.lock:
            if device.index in self.leased:
                raise errors.PoolError(f"device {device.index} is leased: release the lease first")
            return self._grant([device])

    def forked(self) -> None:
        """Replace the lock in a forked child process: a thread that exists only in the parent may hold it."""
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    def notify(self) -> None:
        """Make waiting requests check the devices again."""
        with self.lock:
            self._changed.notify_all()
