"""`place`: takes launches over that run on a device of the pool.

A launch runs where its stream is, else where its arguments are: buffers on their device, arrays that this process has
opened in this process. Where they say nothing (NumPy arrays, numbers), it runs on `current_device`; a program of
one process that entered no device runs it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import errors
from ..targets.kernel import is_argument, set_place
from ..targets.struct import DeviceStruct
from .device import Device, entered
from .stream import Stream


def place(launch: Any, args: Sequence[Any], device: str | None) -> bool:
    """Run a launch on a device of the pool if it belongs there.

    Parameters
    ----------
    launch : Launch
    args : sequence
    device : str or None
        What the launch was told with ``device=``.

    Returns
    -------
    bool
        Whether it did; otherwise the launch is a local one.
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
        chosen = entered() or _first()
    if chosen is None:
        return False
    chosen.launch(launch, *args, stream=stream)
    return True


def _nowhere() -> Device | None:
    return None


_first: Callable[[], Device | None] = _nowhere


def install(first: Callable[[], Device | None]) -> None:
    """Let launches ask, from now on; `first` returns the device of threads that entered none, if that is a pool's."""
    global _first
    _first = first
    set_place(place)


def _is_here(value: Any) -> bool:
    """Tell whether an argument is of this process: opened in it, or in the memory of a GPU that it uses itself."""
    return is_argument(value) or isinstance(value, DeviceStruct) or hasattr(value, "__cuda_array_interface__")
