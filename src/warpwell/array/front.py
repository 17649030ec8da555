"""`open_placed` and `create_placed`: ``ww.open`` and ``ww.create``, which open files on the current device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .. import errors
from ..cache import Cache
from ..pool.devices import chosen_device
from .opening import create, open_array

F = TypeVar("F", bound=Callable[..., Any])


def _placed(service: str, function: F) -> F:
    """Open on the current device if the program has entered a device or has a pool, else in this process.

    The kernels of that device can use the array. Calls with ``device=``, a medium or a `Cache` always run in this
    process.
    """

    @functools.wraps(function)
    def placed(path: Any, *args: Any, **options: Any) -> Any:
        named = isinstance(path, str | os.PathLike) and options.get("device") is None
        device = chosen_device() if named and not isinstance(options.get("cache"), Cache) else None
        if device is None:
            return function(path, *args, **options)
        options.pop("device", None)
        try:
            return device.create(service, os.path.abspath(path), *args, device=device.target, **options)
        except errors.RemoteError as error:
            if not isinstance(error.__cause__, errors.WarpwellError):
                raise
            error.__cause__.add_note(f"on device {device.index} ({device.target} on {device.host})")
            raise error.__cause__ from None  # the same error as in one process

    return cast(F, placed)


open_placed = _placed("open", open_array)
create_placed = _placed("create", create)
