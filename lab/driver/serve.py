"""`serve`: a driver server with a folder of its own, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from warpwell.driver import DriverServer


@contextlib.contextmanager
def serve(devices: int | Sequence[str] = 1, **options: Any) -> Iterator[DriverServer]:
    """Serve devices to programs of this host; see `DriverServer`."""
    # not below TMPDIR, because a path of a socket has at most 107 bytes
    with (
        tempfile.TemporaryDirectory(prefix="ww-cuda-", dir="/tmp") as folder,
        DriverServer(devices, folder=folder, **options) as server,
    ):
        yield server
