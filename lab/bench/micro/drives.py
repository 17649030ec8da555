"""`drive_reads`: pages read at random from a namespace of a drive, by more and more threads of a kernel.

The drive carries out the commands of the kernels' own rings, and in another run those that our controller passes on by
a `DriveMedium`. Nothing is written. The items that kernels read are compared with the host's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from warpwell.array import Array, open_array
from warpwell.drives import DriveMedium, Namespace
from warpwell.drives.superblock import MAGIC
from warpwell.errors import ArgumentError
from warpwell.nvme import READ

from .commands import _Raw
from .figures import Report, Row
from .setting import Setting

IN_FLIGHT = (1, 4, 16, 64)
"""Threads of a kernel on `cpu`, each of which waits for a page."""
COMMANDS = 512
"""Of each thread, for one figure."""


def drive_reads(
    namespace: Namespace,
    *,
    page: int = 4096,
    nbytes: int = 32 << 20,
    runs: int = 3,
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Measure random reads of a namespace.

    Parameters
    ----------
    namespace : Namespace
    page : int
        Bytes of a read.
    nbytes : int
        Maximum number of bytes at the start of the namespace that are read.
    runs : int
        Number of runs; each rate is their median.
    report : callable, optional
        ``report("run", done, total)``.

    Raises
    ------
    ArgumentError
        The namespace is smaller than 64 pages, or pages smaller than its blocks.
    DriveError
        The drive fails.
    WarpwellError
        A kernel read other items than the host.
    """
    nbytes = min(nbytes, namespace.nbytes) // page * page
    if nbytes < 64 * page or page % namespace.block:
        raise ArgumentError(
            f"{namespace.name}: pages of {page} bytes: it has {namespace.nbytes} bytes, in blocks of {namespace.block}",
            name="page_size",
        )
    data = namespace.read(0, nbytes // namespace.block).view(np.int64)
    order = np.random.default_rng(4).permutation(nbytes // page)
    setting = Setting(
        device="cpu",
        tier="storage",
        page_size=page,
        cache=64 * page,
        nbytes=nbytes,
        threads=64,
        service_threads=2,
        medium="ram",
        runs=runs,
    )
    rows = []
    backends = {"the drive serves the rings": _served, "our controller passes them on": _passed_on}
    for at, (label, opened) in enumerate(backends.items()):
        with opened(namespace, page) as array:
            for k, threads in enumerate(IN_FLIGHT):
                report("run", at * len(IN_FLIGHT) + k, len(backends) * len(IN_FLIGHT))
                raw = _Raw(setting, array, data, order[: COMMANDS * threads], READ)
                raw.setting = replace(raw.setting, threads=threads)
                rate = raw.rate(f"{threads} in flight, {label}")
                rows.append(
                    Row(
                        f"{threads} in flight, {label}",
                        rate * 1e3,
                        notes={"MB_a_second": rate * page, "us_each": threads / rate},
                    )
                )
    return Report("drive", f"k reads/s of {page} B", str(namespace.drive.model), rows)


@contextlib.contextmanager
def _served(namespace: Namespace, page: int) -> Iterator[Array]:
    has_superblock = namespace.read(0, max(1, 4096 // namespace.block))[: len(MAGIC)].tobytes() == MAGIC
    dtype = None if has_superblock else np.int64
    with open_array(
        namespace, dtype=dtype, device="cpu", cache=64 * page, page_size=page, queues=1, depth=256, merge=1
    ) as array:
        yield array


@contextlib.contextmanager
def _passed_on(namespace: Namespace, page: int) -> Iterator[Array]:
    with (
        DriveMedium(namespace, writable=False, queues=1, depth=256) as medium,
        open_array(
            medium,
            dtype=np.int64,
            shape=medium.nbytes // 8,
            device="cpu",
            cache=64 * page,
            page_size=page,
            queues=1,
            depth=256,
            merge=1,
            threads=2,
        ) as array,
    ):
        yield array
