"""Statistics of a cache or array."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Statistics:
    """What a cache did so far.

    Counters are of the whole cache, which several arrays may share. `hits` and `bytes_wanted` cost time
    on every access and are counted only with ``stats="full"``; else they are None.
    """

    misses: int
    """Pages brought in because a read or write needed them."""
    evictions: int
    writebacks: int
    """Dirty pages written to storage."""
    read_commands: int
    """Read commands submitted; one may bring in several adjacent pages."""
    write_commands: int
    bytes_read: int
    """Bytes that came from storage, in whole pages ("host-cached": from host memory)."""
    bytes_written: int
    prefetched: int
    prefetch_dropped: int
    """Prefetches given up because ids or frames were short."""
    retries: int
    """Merged commands that failed and were repeated page by page."""
    hits: int | None = None
    """Reads that the cache answered at once."""
    bytes_wanted: int | None = None
    """Bytes that kernels asked for."""

    @property
    def io_amplification(self) -> float | None:
        """Bytes read from storage over bytes wanted; None where the latter were not counted."""
        if not self.bytes_wanted:
            return None
        return self.bytes_read / self.bytes_wanted

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, `io_amplification` included."""
        return {**asdict(self), "io_amplification": self.io_amplification}

    def __sub__(self, earlier: Statistics) -> Statistics:
        """Return what happened since `earlier`."""
        mine, before = asdict(self), asdict(earlier)
        since: dict[str, Any] = {
            k: None if mine[k] is None or before[k] is None else mine[k] - before[k] for k in mine
        }
        return Statistics(**since)
