"""The interface of host objects that are arguments of kernels, and the device of a launch with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ... import errors
from ..._check import checked_device
from ..._settings import settings
from ..fault import LaunchFlag
from ..gpu.device import has_cuda
from ..struct import DeviceStruct


@runtime_checkable
class KernelArgument(Protocol):
    """The interface of a host object that is passed to a kernel, such as an `Array`."""

    device: str

    def kernel_struct(self, flag: LaunchFlag | None = None) -> DeviceStruct:
        """Return the struct that device code receives instead of the object.

        `flag` is the flag of a launch that has started. Without a flag, the caller needs only the type of the struct.
        """

    def launch_begins(self, flag: LaunchFlag) -> None:
        """Prepare for the launch with this flag. Raise the error of an earlier launch in a stream, if there is one."""

    def launch_ended(self, flag: LaunchFlag) -> None:
        """Raise the error that device code latched during this launch, if any."""

    def launch_continues(self, flag: LaunchFlag, done: Callable[[], bool]) -> None:
        """Record that the launch runs in a stream until `done` returns True. It is called instead of `launch_ended`."""

    def abort(self, flag: LaunchFlag) -> None:
        """Make every wait of this launch's device code on this object end soon (Ctrl-C; takes no lock)."""


def is_argument(value: Any) -> bool:
    """Return True if a value is a `KernelArgument`. The result depends on its class alone, and is cached for it."""
    return _has_methods(type(value))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _has_methods(cls: type) -> bool:
    # isinstance() of a protocol checks every member of every object: tens of microseconds per launch
    names = ("kernel_struct", "launch_begins", "launch_ended", "launch_continues", "abort")
    return all(callable(getattr(cls, name, None)) for name in names)


def participants(args: Sequence[Any], device: str) -> list[KernelArgument]:
    """Return the `KernelArgument`s among arguments, each once.

    Raises
    ------
    ArgumentError
        One of them is on another device.
    """
    if not any([is_argument(a) for a in args]):
        return []
    found = list({id(a): a for a in args if is_argument(a)}.values())
    for argument in found:
        if argument.device != device:
            raise errors.ArgumentError(
                f"an array on {argument.device!r} cannot be used by a kernel on {device!r}: open it with device="
            )
    return found


def begin(
    participants: Sequence[KernelArgument], started: list[Any], args: Sequence[Any], flag: LaunchFlag
) -> list[Any]:
    """Begin a launch for its arguments, which are added to `started` one by one; return what device code receives."""
    for argument in participants:
        argument.launch_begins(flag)
        started.append(argument)
    return [a.kernel_struct(flag) if is_argument(a) else a for a in args]


def finish(participants: Sequence[KernelArgument], flag: LaunchFlag) -> None:
    """Call `launch_ended` of every argument; raise the first failure."""
    first: BaseException | None = None
    for argument in participants:
        try:
            argument.launch_ended(flag)
        except Exception as error:
            # every array must see the end of the launch; report the first failure
            first = first or error
    if first is not None:
        raise first


def device_of(args: Sequence[Any]) -> str:
    """Return the device that a launch with these arguments runs on."""
    for argument in args:
        if is_argument(argument):
            return str(argument.device)
    if any(hasattr(a, "__cuda_array_interface__") for a in args):
        return "cuda"
    return default_device()


def default_device() -> str:
    """Return ``WARPWELL_DEVICE`` if it is set, else "cuda" if there is a GPU, else "cpu"."""
    if settings.device:
        return checked_device(settings.device, "WARPWELL_DEVICE")
    return "cuda" if has_cuda() else "cpu"
