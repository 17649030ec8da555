"""Over how large a hole two reads are better merged into one, measured once for each file system.

A command costs a time c, and a byte a time b. To read a hole of h bytes saves a command: it pays while h < c / b.
Each hole is decided by itself, and nothing else has to be planned: where rows are so dense that the whole extent is
cheaper, all holes are below that, and the whole extent is read.

Both times are measured with the mechanism that reads rows: pages, and runs of 128 KiB, at random places that are not in
memory, as many in flight as a gather has. This takes some 30 ms, comes with the first gather that is large enough to
gain by it, and is kept for the process.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._check import checked_nbytes
from ...storage import FileMedium
from .memory import RowCopy

DEFAULT = 16 << 10
"""Bytes, where nothing was measured: with small gathers, small files, and files that are in memory."""
MOST = 128 << 10
SHORT = 4096
LONG = 128 << 10
SECONDS = 0.02
"""Time after which no further reads of a size begin."""
READS = {SHORT: 256, LONG: 32}
"""Reads of a size that are timed together, as many in flight as a gather has; the fastest of four times counts."""
LEAST_BYTES = 64 << 20
"""A smaller file is not worth measuring."""

VARIABLE = "WARPWELL_HOLE_BYTES"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_lock = threading.Lock()
_measured: dict[Any, int] = {}


def given() -> int | None:
    """Return what the environment says, in bytes, or None.

    Raises
    ------
    ArgumentError
        It is no size.
    """
    text = os.environ.get(VARIABLE)
    return checked_nbytes(text, VARIABLE, minimum=0) if text else None


def of_mapping(array: Any, *, measure: bool) -> int:
    """Return the bytes of a hole over which reads of a mapped file are merged; measure it once if asked to."""
    key = "mapped", os.fstat(array.medium.fileno()).st_dev
    return _hole(key, (lambda: _time_mapping(array)) if measure else None)


def of_cache(array: Any, *, measure: bool) -> int:
    """Return the same for reads of the medium behind a cache."""
    medium = array.medium
    key = ("file", os.fstat(medium.fileno()).st_dev) if isinstance(medium, FileMedium) else weakref.ref(medium)
    return _hole(key, (lambda: _time_medium(array)) if measure and array.tier == "storage" else None)


def of_reads(key: Any, measure: Callable[[], tuple[float, float] | None] | None, nbytes: int) -> int:
    """Return the same for reads of another kind, of a file of so many bytes; `measure` returns what `timed` does."""
    return _hole(key, measure if nbytes >= LEAST_BYTES else None)


def timed(
    reader: Callable[[int], Callable[[NDArray[np.int64]], None]], nbytes: int, address: int | None
) -> tuple[float, float] | None:
    """Return the seconds of a read of `SHORT` and of one of `LONG` bytes at random places, or None.

    ``reader(size)`` returns a function that reads some places, in units of the size. Of a file that is mapped at an
    address, only places that are not in memory count.
    """
    found = []
    for size in (SHORT, LONG):
        some = _places(nbytes // size, 8 * READS[size])
        if address is not None:
            some = np.array([one for one in some.tolist() if not _there(address + one * size)], np.int64)
        found.append(_seconds_each(reader(size), some[: 1 + 4 * READS[size]], READS[size]))
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _hole(key: Any, measure: Callable[[], tuple[float, float] | None] | None) -> int:
    wanted = given()
    if wanted is not None:
        return wanted
    with _lock:  # one measures, and others wait: two at once would find half the rate
        found = _measured.get(key)
        if found is None and measure is not None:
            seconds = measure()
            found = _measured[key] = DEFAULT if seconds is None else break_even(*seconds)
    return DEFAULT if found is None else found


def break_even(short: float, long: float) -> int:
    """Return the break-even for the seconds of a read of `SHORT` and of `LONG` bytes, as a multiple of 4096."""
    byte = (long - short) / (LONG - SHORT)
    command = short - SHORT * byte
    if command <= 0:
        return 0
    hole = MOST if byte <= 0 else min(MOST, command / byte)
    return int(hole) // 4096 * 4096


def _seconds_each(read: Callable[[NDArray[np.int64]], None], places: NDArray[np.int64], some: int) -> float | None:
    """Return the seconds of a read, of `some` at once; `read` reads some places at once.

    The fastest counts: others had to share the processor, or the drive, for a moment.
    """
    read(places[:1])  # which may compile
    since = time.perf_counter()
    best: float | None = None
    for at in range(1, len(places) - some + 1, some):
        begun = time.perf_counter()
        read(places[at : at + some])
        took = (time.perf_counter() - begun) / some
        best = took if best is None else min(best, took)
        if time.perf_counter() - since > SECONDS:
            break
    return best


def _time_mapping(array: Any) -> tuple[float, float] | None:
    """Return the seconds of a read of `SHORT` bytes and of one of `LONG` bytes of a mapped file, or None."""
    mapping = array._part.mapping
    if not mapping.tells or mapping.end - mapping.address < LEAST_BYTES:
        return None
    room = np.empty(LONG, np.uint8)  # all are copied to one place: it is reads that are timed

    def reader(size: int) -> Callable[[NDArray[np.int64]], None]:
        def read(places: NDArray[np.int64]) -> None:
            rows = RowCopy(
                places,
                np.zeros(len(places), np.int64),
                source=mapping.address,
                extent=1 << 62,
                stride=size,
                nbytes=size,
                out=room.ctypes.data,
                mapped=mapping,
            )
            rows.fetch(0, len(places), 0)

        return read

    return timed(reader, mapping.end - mapping.address, mapping.address)


def _time_medium(array: Any) -> tuple[float, float] | None:
    """Return the same for the medium behind a cache."""
    bulk = array.cache.bulk
    if array.medium.nbytes < LEAST_BYTES:
        return None
    found = []
    for size in (SHORT, LONG):
        some = _places(array.medium.nbytes // size, 1 + 4 * READS[size])

        def read(places: NDArray[np.int64], size: int = size) -> None:
            bulk.read_for_nobody(array._nsid, places * size, size)

        found.append(_seconds_each(read, some, READS[size]))
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _places(count: int, most: int) -> NDArray[np.int64]:
    """Return up to `most` random places among `count`, each once."""
    places = np.unique(np.random.default_rng().integers(0, count, most))
    np.random.default_rng().shuffle(places)
    return places


def _there(address: int) -> bool:
    """Return whether the page at an address of a mapping is in memory."""
    vector = ctypes.c_ubyte(1)
    return _libc.mincore(address, 1, ctypes.byref(vector)) != 0 or bool(vector.value & 1)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
