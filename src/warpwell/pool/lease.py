"""`Lease`: exclusive use of devices among the threads of a program; `DeviceGroup`: a sequence of devices."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from .. import errors
from .._check import checked_device, checked_integer, checked_nbytes, checked_timeout
from .device import Device
from .transport.milestone import LOOK, limit


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
        return self._devices[index]

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices)


class Lease(DeviceGroup):
    """Devices for one thread, from ``devices.lease(2)``. A context manager that releases them.

    Functions that accept `Devices` accept a lease, too: ``ww.broadcast``, ``Scheduler(devices=...)``. Leases are
    advisory: a thread without a lease can use the devices, too.

    Parameters
    ----------
    devices : sequence of Device
    leases : Leases
    """

    def __init__(self, devices: Sequence[Device], leases: Leases) -> None:
        super().__init__(tuple(devices))
        self._finalizer = weakref.finalize(self, leases.release, self._devices)

    @property
    def released(self) -> bool:
        """Whether the devices were released."""
        return not self._finalizer.alive

    def release(self) -> None:
        """Release the devices (idempotent). Calls in flight continue."""
        self._finalizer()

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
    fits: Callable[[Device], bool]


class Leases:
    """The leased devices of a pool, and the waiting requests.

    Requests are served in FIFO order: a waiting request reserves the devices that it could use. So a request for many
    devices is not starved by requests for one.

    Parameters
    ----------
    devices : sequence of Device
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._leased: set[int] = set()
        self._waiting: list[_LeaseRequest] = []
        self._lock = threading.RLock()  # the finalizer of a lease may interrupt any code
        self._changed = threading.Condition(self._lock)

    def lease(
        self, count: int, *, target: str | None, memory: int | str | None, host: str | None, timeout: float | None
    ) -> Lease:
        if checked_integer(count, "count", minimum=None) < 1:
            raise errors.ArgumentError(f"count must be at least 1, got {count}", name="count")
        if memory is not None:
            memory = checked_nbytes(memory, "memory", minimum=0, maximum=1 << 62)
        if target is not None:
            target = checked_device(target, "target", among=("cpu", "cuda"))

        def fits(device: Device) -> bool:
            return (
                target in (None, device.target)
                and host in (None, device.host)
                and (memory is None or device.memory >= memory)
            )

        properties = (("target", target), ("host", host), ("memory", memory))
        conditions = "".join(f", {name} {value!r}" for name, value in properties if value)
        bound = limit(checked_timeout(timeout))
        end = time.monotonic() + bound
        request = _LeaseRequest(count, fits)
        with self._lock:
            self._waiting.append(request)
            try:
                while True:
                    fitting = sum(d.lost is None and fits(d) for d in self._devices)
                    if fitting < count:
                        lost = sum(d.lost is not None for d in self._devices)
                        raise errors.PoolError(
                            f"{count} devices were requested{conditions}, but the pool has {fitting}"
                            f"{f' ({lost} are lost)' if lost else ''}: request fewer, or start more agents"
                        )
                    granted = self._select(request)
                    if granted is not None:
                        self._leased |= {d.index for d in granted}
                        return Lease(granted, self)
                    left = end - time.monotonic()
                    if left <= 0:
                        raise errors.StallError(
                            f"waited {bound:g} s for {count} devices{conditions}: {len(self._leased)} are leased",
                            seconds=bound,
                        )
                    self._changed.wait(min(LOOK, left))
            finally:
                self._waiting.remove(request)
                self._changed.notify_all()

    def _select(self, request: _LeaseRequest) -> list[Device] | None:
        """Return free devices for a request, without those that earlier requests reserve, or None if too few."""
        free = [d for d in self._devices if d.lost is None and d.index not in self._leased]
        for earlier in self._waiting:
            usable = [d for d in free if earlier.fits(d)][: earlier.count]
            if earlier is request:
                return usable if len(usable) == request.count else None
            free = [d for d in free if d not in usable]
        return None

    def release(self, devices: Iterable[Device]) -> None:
        """Make leased devices available again."""
        with self._lock:
            self._leased -= {d.index for d in devices}
            self._changed.notify_all()
