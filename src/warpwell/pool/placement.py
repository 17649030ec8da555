"""`place`: takes launches over whose arguments, stream or block are of a device of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import errors
from ..targets.kernel import set_place
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
    if chosen is None and device is None:
        chosen = entered()
    if chosen is None:
        return False
    chosen.launch(launch, *args, stream=stream)
    return True


def install() -> None:
    """Let launches ask, from now on."""
    set_place(place)
