"""What host objects offer to be arguments of kernels, and the device that a launch with them runs on."""

from __future__ import annotations

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
    """What a host object offers to be passed to a kernel (an `Array` does)."""

    device: str

    def kernel_struct(self, flag: LaunchFlag | None = None) -> DeviceStruct:
        """Return the struct that device code receives in place of the object.

        `flag` is that of a launch that has begun. Without it only the type of the struct counts.
        """

    def launch_begins(self, flag: LaunchFlag) -> None:
        """Prepare for the launch with this flag. Raise what an earlier launch, which went on in a stream, has left."""

    def launch_ended(self, flag: LaunchFlag) -> None:
        """Raise what device code latched during this launch."""

    def launch_continues(self, flag: LaunchFlag, done: Callable[[], bool]) -> None:
        """Note that the launch goes on in a stream until `done` says True (in place of `launch_ended`)."""

    def abort(self, flag: LaunchFlag) -> None:
        """Make every wait of this launch's device code on this object end soon (Ctrl-C; takes no lock)."""


def is_argument(value: Any) -> bool:
    """Tell whether a value is a `KernelArgument`. The answer depends on its class alone, and is kept for each class."""
    cls = type(value)
    if cls not in _known:
        # isinstance() of a protocol looks at every member of every object: tens of microseconds a launch
        _known[cls] = all(callable(getattr(cls, name, None)) for name in _METHODS)
    return _known[cls]


_known: dict[type, bool] = {}
_METHODS = ("kernel_struct", "launch_begins", "launch_ended", "launch_continues", "abort")


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


def begin(participants: Sequence[KernelArgument], begun: list[Any], args: Sequence[Any], flag: LaunchFlag) -> list[Any]:
    """Begin a launch for its arguments, which are added to `begun` one by one; return what device code receives."""
    for argument in participants:
        argument.launch_begins(flag)
        begun.append(argument)
    return [a.kernel_struct(flag) if is_argument(a) else a for a in args]


def finish(participants: Sequence[KernelArgument], flag: LaunchFlag) -> None:
    """Tell every argument that its launch has ended; raise the first failure that one reports."""
    first: BaseException | None = None
    for argument in participants:
        try:
            argument.launch_ended(flag)
        except Exception as error:
            # every array must see the end of the launch; the first failure is the one to report
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
    """Return ``WARPWELL_DEVICE`` where it is set, else "cuda" where there is a GPU, else "cpu"."""
    if settings.device:
        return checked_device(settings.device, "WARPWELL_DEVICE")
    return "cuda" if has_cuda() else "cpu"
