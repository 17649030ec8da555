"""Statistics of a cache or array, and sizes in bytes: pages, text such as "256MiB", batches of items with sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NOUNS = (
    ("hits", "hits"),
    ("misses", "misses"),
    ("evictions", "evictions"),
    ("writebacks", "pages written back"),
    ("read_commands", "read commands"),
    ("write_commands", "write commands"),
    ("prefetched", "pages prefetched"),
    ("prefetch_dropped", "prefetches dropped"),
    ("retries", "retries"),
    ("host_reads", "reads by the host past the cache"),
    ("bytes_read", "read"),
    ("bytes_written", "written"),
    ("bytes_wanted", "wanted"),
    ("host_bytes", "read by the host"),
)


@dataclass(frozen=True, repr=False)
class Statistics:
    """Counters of a cache since it was created.

    All counters are for the whole cache, which several arrays may share. `hits` and `bytes_wanted` are counted only
    with ``stats="full"``, because counting them slows every access down; otherwise they are None.
    """

    misses: int
    """Pages that were loaded because a read or write needed them."""
    evictions: int
    writebacks: int
    """Dirty pages written to storage."""
    read_commands: int
    """Submitted read commands. One command may load several adjacent pages."""
    write_commands: int
    bytes_read: int
    """Size of all pages read from storage, or from host memory in tier "host-cached"."""
    bytes_written: int
    prefetched: int
    prefetch_dropped: int
    """Prefetches that were dropped because no id or frame was free."""
    retries: int
    """Merged commands that failed and were repeated page by page."""
    hits: int | None = None
    """Reads that the cache answered at once."""
    bytes_wanted: int | None = None
    """Number of bytes requested by kernels."""
    host_reads: int = 0
    """Reads of an array's file by the host that bypassed the cache."""
    host_bytes: int = 0
    """Bytes of these reads."""
    uncounted: str = ""
    """Text that names the accesses of an array that are not counted, and why; empty if all accesses are counted."""

    @property
    def io_amplification(self) -> float | None:
        """Bytes read from storage divided by requested bytes; None if requested bytes were not counted."""
        if not self.bytes_wanted:
            return None
        return self.bytes_read / self.bytes_wanted

    def __str__(self) -> str:
        """Return the counters that are not zero, "60 misses, 45 evictions, 240.0 KiB read", then `uncounted`."""
        counted = ", ".join(
            f"{format_size(number) if 'bytes' in name else f'{number:,}'} {noun}"
            for name, noun in _NOUNS
            if (number := getattr(self, name))
        )
        return "; ".join(filter(None, (counted, self.uncounted))) or "nothing yet"

    def __repr__(self) -> str:
        return f"<Statistics: {self}>"

    def as_dict(self) -> dict[str, Any]:
        """Return all counters, and `io_amplification`."""
        return {**asdict(self), "io_amplification": self.io_amplification}

    def __sub__(self, earlier: Statistics) -> Statistics:
        """Return the differences to the counters `earlier`."""
        later, sooner = asdict(self), asdict(earlier)
        counters = later.keys() - {"uncounted"}
        since: dict[str, Any] = {
            name: None if later[name] is None or sooner[name] is None else later[name] - sooner[name]
            for name in counters
        }
        return Statistics(**since, uncounted=self.uncounted)


def format_size(nbytes: float) -> str:
    """Return a size as readable text: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def batches_of(sizes: NDArray[np.int64], max_sum: int, max_count: int) -> Iterator[slice]:
    """Yield slices of a list of sizes: at most `max_count` with a sum of at most `max_sum`, or one larger size."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + max_sum, "right")))
        stop = min(stop, start + max_count)
        yield slice(start, stop)
        start = stop
