"""`Lease`: devices that no other thread of this program has leased; `DeviceGroup`: a sequence of devices."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        """Wait for all of them."""
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
    """Devices for one user; ``devices.lease(2)`` makes one. A context manager, which gives them back.

    It can be passed wherever `Devices` can: ``ww.broadcast``, ``Scheduler(devices=...)``. Leases are an agreement of
    the threads of one program: nothing prevents others from using the devices.

    Parameters
    ----------
    devices : sequence of Device
    leases : Leases
    """

    def __init__(self, devices: Sequence[Device], leases: Leases) -> None:
        super().__init__(tuple(devices))
        # one that is dropped is given back, too
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


class _LeaseRequest:
    def __init__(self, count: int, fits: Callable[[Device], bool]) -> None:
        self.count = count
        self.fits = fits


class Leases:
    """The leased devices of a pool, and the requests that wait.

    First come, first served: a waiting request blocks later ones from the devices that it could use, so that a request
    for many devices is served even while others repeatedly request one.

    Parameters
    ----------
    devices : sequence of Device
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._leased: set[int] = set()
        self._waiting: list[_LeaseRequest] = []
        self._lock = threading.RLock()  # a lease may be dropped anywhere
        self._changed = threading.Condition(self._lock)

    def lease(
        self, count: int, *, target: str | None, memory: int | str | None, host: str | None, timeout: float | None
    ) -> Lease:
        if checked_integer(count, "count", minimum=None) < 1:
            raise errors.ArgumentError(f"a lease of {count} devices: ask for one at least", name="count")
        if memory is not None:
            memory = checked_nbytes(memory, "memory", minimum=0, maximum=1 << 62)
        if target is not None:
            target = checked_device(target, "target", among=("cpu", "cuda"))
        wanted = {"target": target, "host": host}

        def fits(device: Device) -> bool:
            return all(w in (None, getattr(device, name)) for name, w in wanted.items()) and (
                memory is None or device.memory >= memory
            )

        asked = "".join(f", {name} {value!r}" for name, value in (*wanted.items(), ("memory", memory)) if value)
        bound = limit(checked_timeout(timeout))
        end = time.monotonic() + bound
        request = _LeaseRequest(count, fits)
        with self._lock:
            self._waiting.append(request)
            try:
                while True:
                    there = [d for d in self._devices if d.lost is None and fits(d)]
                    if len(there) < count:
                        lost = sum(d.lost is not None for d in self._devices)
                        raise errors.PoolError(
                            f"{count} devices were asked for{asked}, and the pool has {len(there)}"
                            f"{f' ({lost} are lost)' if lost else ''}: ask for fewer, or start more agents"
                        )
                    found = self._granted(request)
                    if found is not None:
                        self._leased |= {d.index for d in found}
                        return Lease(found, self)
                    left = end - time.monotonic()
                    if left <= 0:
                        raise errors.StallError(
                            f"waited {bound:g} s for {count} devices{asked}: {len(self._leased)} are leased",
                            seconds=bound,
                        )
                    self._changed.wait(min(LOOK, left))
            finally:
                self._waiting.remove(request)
                self._changed.notify_all()

    def _granted(self, request: _LeaseRequest) -> list[Device] | None:
        """Return the devices that a request may have now, after what those before it could use."""
        free = [d for d in self._devices if d.lost is None and d.index not in self._leased]
        for other in self._waiting:
            usable = [d for d in free if other.fits(d)]
            if other is request:
                return usable[: request.count] if len(usable) >= request.count else None
            taken = usable[: other.count] if len(usable) >= other.count else usable
            free = [d for d in free if d not in taken]
        return None

    def release(self, devices: Iterable[Device]) -> None:
        """Give devices back."""
        with self._lock:
            self._leased -= {d.index for d in devices}
            self._changed.notify_all()
