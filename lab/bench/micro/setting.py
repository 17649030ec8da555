"""`Setting`: the options of a micro-benchmark; arrays over the medium that they name."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.media import DriveRates, Latency, rates_of
from warpwell.array import Array, open_array
from warpwell.errors import ArgumentError
from warpwell.storage import FileMedium, Medium, RamMedium, Striped

STRIPE = 1 << 16
"""Bytes of a stripe of several drives."""


@dataclass(frozen=True)
class Setting:
    """How to run a micro-benchmark.

    Attributes
    ----------
    device : {"cpu", "cuda"}
    tier : {"storage", "host-cached", "host", "device", "mapped"}
    page_size : int
    cache : int
        Bytes of a cache that is smaller than the data; benchmarks of hits use a cache that holds all pages.
    nbytes : int
        Bytes of data.
    threads : int
        Threads of a kernel.
    service_threads : int
        Host threads that serve the commands.
    medium : str
        "ram", "file", or the name of a drive to emulate over host memory, such as "P5800X" or "980Pro/16": a
        sixteenth of its rates.
    drives : int
        Emulated drives, striped.
    runs : int
        Number of runs; each rate is their median.
    """

    device: str
    tier: str
    page_size: int
    cache: int
    nbytes: int
    threads: int
    service_threads: int
    medium: str
    drives: int = 1
    runs: int = 3

    @property
    def items(self) -> int:
        """Items of 8 bytes in the data."""
        return self.nbytes // 8

    @property
    def pages(self) -> int:
        """Pages of the data."""
        return -(-self.nbytes // self.page_size)

    @property
    def cached(self) -> bool:
        """Whether reads go through a cache of pages from a medium."""
        return self.tier == "storage"

    @property
    def emulated(self) -> bool:
        """Whether the times are of an emulated drive."""
        return self.medium not in ("ram", "file")

    def check(self) -> None:
        """Raise ArgumentError unless the medium can be made."""
        if self.emulated:
            model_of(self.medium)
        elif self.drives > 1:
            raise ArgumentError(f"{self.drives} drives of medium {self.medium!r}: only emulated drives are striped")
        if self.device == "cuda" and self.tier == "mapped":
            raise ArgumentError("kernels on a GPU cannot read a mapping: choose another --tier")
        if self.device == "cuda" and self.threads % 32:
            raise ArgumentError(f"{self.threads} threads on a GPU: expected whole warps, a multiple of 32")
        if self.emulated and self.tier != "storage":
            raise ArgumentError(f"tier {self.tier!r} does not read from a drive: omit --medium or --tier")

    def where(self) -> str:
        """Return the location of the data as text."""
        if self.tier in ("host", "device"):
            return f"{self.tier} memory"
        if self.tier == "mapped":
            return "a mapped file"
        if not self.emulated:
            return self.medium
        model, slower = model_of(self.medium)
        rate = f" at 1/{slower} of its rates" if slower > 1 else ""
        return f"{self.drives} x {model.name}{rate} (emulated)"

    def over(self, medium: str, drives: int = 1) -> Setting:
        """Return this setting with another medium."""
        return replace(self, medium=medium, drives=drives)

    @contextlib.contextmanager
    def opened(self, data: NDArray[Any], *, cache: int | None = None, **options: Any) -> Iterator[Array]:
        """Yield an array with these items; mode "r+" works on a copy of them."""
        if self.tier == "mapped":
            with (
                _file_of(data) as path,
                open_array(
                    path,
                    options.get("mode", "r"),
                    dtype=data.dtype,
                    shape=data.shape,
                    device=self.device,
                    tier=self.tier,
                ) as array,
            ):
                yield array
            return
        with self.medium_of(data, writable=options.get("mode") == "r+") as medium:
            threads: dict[str, Any] = {"threads": self.service_threads} if self.tier == "storage" else {}
            with open_array(
                medium,
                dtype=data.dtype,
                shape=data.shape,
                device=self.device,
                tier=self.tier,
                cache=max(self.page_size, self.cache if cache is None else cache),
                page_size=self.page_size,
                **(threads | options),
            ) as array:
                yield array

    @contextlib.contextmanager
    def medium_of(self, data: NDArray[Any], *, writable: bool = False) -> Iterator[Medium]:
        """Yield a medium with these items; a writable one has a copy of them."""
        if self.medium == "file":
            with _file_of(data) as path, FileMedium(path, writable=writable) as file:
                with path.open("rb") as cached:
                    os.fsync(cached.fileno())
                    os.posix_fadvise(cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # measure the drive, not the cache
                yield file
            return
        if not self.emulated:
            yield RamMedium(data.copy() if writable else data)
            return
        yield emulated(data, self.medium, self.drives, writable)


@contextlib.contextmanager
def _file_of(data: NDArray[Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="warpwell-bench-") as folder:
        path = Path(folder) / "data"
        data.tofile(path)
        yield path


def model_of(name: str) -> tuple[DriveRates, int]:
    """Return the drive in a medium's name, and the divisor of its rates."""
    model, _, divisor = name.partition("/")
    if divisor and not (divisor.isdecimal() and int(divisor) > 0):
        raise ArgumentError(f"medium {name!r}: the number after the slash divides the drive's rates, as in 980Pro/16")
    try:
        return rates_of(model), int(divisor or 1)
    except ArgumentError as error:
        raise ArgumentError(f"medium {name!r} is unknown: choose ram, file, or a drive to emulate ({error})") from None


def emulated(data: NDArray[Any], name: str, drives: int, writable: bool) -> Medium:
    """Return emulated drives, striped, that hold these items in host memory."""
    model, slower = model_of(name)
    share = -(-data.nbytes // (STRIPE * drives)) * STRIPE
    if drives == 1:
        parts = [RamMedium(data.copy() if writable else data)]
    else:
        parts = [RamMedium(share) for _ in range(drives)]
        Striped(parts, STRIPE).write(0, data)  # without the latency, which is added below
    slow = [
        Latency(
            part,
            model.name,
            read_iops=(model.read_iops[0] / slower, model.read_iops[1] / slower),
            write_iops=(model.write_iops[0] / slower, model.write_iops[1] / slower),
            bandwidth=model.bandwidth / slower,
        )
        for part in parts
    ]
    return slow[0] if drives == 1 else Striped(slow, STRIPE)


def numbers(items: int) -> NDArray[np.int64]:
    """Return distinct items in random order, whose sums show whether each item was read once."""
    return np.arange(items, dtype=np.int64) * 0x9E3779B1 + 12345
