"""`serve`: driver servers with a folder of their own, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warpwell.driver import DriverServer, build, make_library_folder
from warpwell.driver.environment import changes, without_layer


def client_environ(folder: str | Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program whose CUDA calls go to the sockets of a folder.

    Parameters
    ----------
    folder : path
        Folder of a `DriverServer`.
    environ : mapping
        All other variables of this environment are copied.
    """
    found = without_layer(environ)
    for name, value in changes(folder).items():
        before = found.pop(name, "")
        if value is not None:
            found[name] = f"{value}:{before}" if before and name in ("LD_LIBRARY_PATH", "PYTHONPATH") else value
    return found


class Servers:
    """The servers of several devices in one folder.

    Parameters
    ----------
    devices : sequence of str
        The driver's ordinals of the devices.
    folder : Path
    parts : Built
    **options
        See `DriverServer`.
    """

    def __init__(self, devices: Sequence[str], folder: Path, parts: build.Built, **options: Any) -> None:
        self.folder = folder
        make_library_folder(folder, parts.layer)
        self.servers: list[DriverServer] = []
        try:
            for ordinal, device in enumerate(devices):
                self.servers.append(DriverServer(device, ordinal, parts, folder=folder, **options))
        except BaseException:
            self.close()
            raise

    def environ(self) -> dict[str, str]:
        """Return the environment of a client, made from this process's."""
        return client_environ(self.folder, os.environ)

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers that are alive and have a client."""
        return [worker for server in self.servers for worker in server.workers]

    def programs(self) -> list[dict[str, Any]]:
        """Return the properties of the programs of all servers."""
        return [program for server in self.servers for program in server.programs()]

    def close(self) -> None:
        """Close all servers."""
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def serve(devices: int | Sequence[str] = 1, *, parts: build.Built | None = None, **options: Any) -> Iterator[Servers]:
    """Serve N devices, or those with the given ordinals of the driver, to programs of this host; see `Servers`."""
    names = [str(k) for k in range(devices)] if isinstance(devices, int) else devices
    # not below TMPDIR, because a path of a socket has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="ww-cuda-", dir="/tmp") as folder:
        servers = Servers(names, Path(folder), parts or build.parts(), **options)
        try:
            yield servers
        finally:
            servers.close()
