"""`Group`: devices in a row, as pools and leases are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from .device import Device


class Group(Sequence[Device]):
    """Devices that are counted, indexed and waited for together.

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
