"""Print which files a call passes through: ``python -m tests.harness.ways miss|retrieve|submit|to_device``.

The files of the package are listed in the order in which the call enters them first. Device code runs on the ``interp``
target, where it is plain Python, so that its files show too. Everything is opened, and done once, before it is watched:
the list is the path of one call, without imports and set-up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import warpwell as ww
from warpwell import gpu

PACKAGE = str(Path(ww.__file__).parent)


class CallPath:
    """The files of the package that were entered, in order, and which functions of each."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}
        self._watching = False
        threading.setprofile(self._see)  # of threads that start from now on
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if self._watching and event == "call" and file.startswith(PACKAGE):
            self.files.setdefault(file[len(PACKAGE) + 1 :], set()).add(frame.f_code.co_name)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what is entered in every thread."""
        self._watching = True
        try:
            yield
        finally:
            self._watching = False


def miss(folder: str, path: CallPath) -> None:
    """Subscript an item on storage whose page is not in the cache."""
    np.save(f"{folder}/a.npy", np.arange(100_000))
    kernel = ww.kernel(_read)
    with ww.open(f"{folder}/a.npy", cache="16KiB", page_size=4096, device="interp") as a:
        out = np.zeros(1, np.int64)
        kernel[1](a, out, 0)
        with path.watched():
            kernel[1](a, out, 90_000)
        assert out[0] == 90_000


def retrieve(folder: str, path: CallPath) -> None:
    """Fetch the record of a key within a kernel."""
    with ww.kv.create(f"{folder}/s.kv", schema={"x": ("int64", (4,))}) as store:
        store.put_many(np.arange(100), {"x": np.arange(400).reshape(100, 4)})
    kernel, row, size = ww.kernel(_retrieve), np.zeros((1, 4), np.int64), np.zeros(1, np.int64)
    with ww.kv.open(f"{folder}/s.kv", device="interp") as store:
        kernel[1](store, row, size, 3)
        with path.watched():
            kernel[1](store, row, size, 70)
        assert size[0] == 32 and row[0, 0] == 280


def submit(folder: str, path: CallPath) -> None:
    """Submit a kernel to a scheduler and wait for it."""
    from warpwell.scheduler import Scheduler

    kernel, out = ww.kernel(_count), np.zeros(64, np.int64)
    with Scheduler(device="cpu") as scheduler:
        scheduler.submit(kernel[64], out).result()
        with path.watched():
            scheduler.submit(kernel[64], out).result()
    assert (out == 2).all()


def to_device(folder: str, path: CallPath) -> None:
    """Copy an array to a device of a pool."""
    device = ww.devices()[0]
    with device:
        ww.to_device(np.arange(1000)).copy_to_host()
        with path.watched():
            y = ww.to_device(np.arange(1 << 20))
            device.synchronize()
        assert y.copy_to_host()[-1] == (1 << 20) - 1


def _read(a, out, i):  # type: ignore[no-untyped-def]
    out[0] = a[i]


def _retrieve(kv, rows, sizes, key):  # type: ignore[no-untyped-def]
    sizes[0] = kv.retrieve(key, rows[0])


def _count(out):  # type: ignore[no-untyped-def]
    i = gpu.grid(1)
    out[i] += 1


CALLS: dict[str, Callable[[str, CallPath], Any]] = {
    "miss": miss,
    "retrieve": retrieve,
    "submit": submit,
    "to_device": to_device,
}


def main() -> None:
    """Print the way of one call, or of all."""
    parser = argparse.ArgumentParser(description="Print the files that a call passes through.")
    parser.add_argument("call", nargs="*", choices=[*CALLS, []], help="which calls; all if left out")
    for name in parser.parse_args().call or CALLS:
        path = CallPath()
        with tempfile.TemporaryDirectory() as folder:
            CALLS[name](folder, path)
        functions = sum(map(len, path.files.values()))
        print(f"{name}: {len(path.files)} files, {functions} functions: {', '.join(path.files)}")


if __name__ == "__main__":
    main()
