"""StoreStatistics: what a store holds and what it has done since it was opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cache.sizes import format_size


@dataclass(frozen=True)
class StoreStatistics:
    """Figures of a store.

    Attributes
    ----------
    records : int
        Keys that it has.
    live_bytes : int
        Bytes of their values.
    disk_bytes : int
        Bytes of all of its files.
    segments : int
        Files that hold values.
    index_bytes : int
        Memory of the index.
    gets, hits : int
        Keys looked up, and values found, since it was opened.
    read_bytes : int
        Bytes of values read.
    read_errors : int
        Values that could not be read or whose CRC was wrong.
    puts, deletes, commits : int
        Since it was opened.
    shards : int
        Folders.
    durability : str
        "commit", "always" or "none".
    python_served : list of str
        Kinds of requests of kernels that the interpreter serves, slowly.
    """

    records: int
    live_bytes: int
    disk_bytes: int
    segments: int
    index_bytes: int
    gets: int
    hits: int
    read_bytes: int
    read_errors: int
    puts: int
    deletes: int
    commits: int
    shards: int
    durability: str
    python_served: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return what is not zero: "10 records, 640 B of values, 13.6 KiB on disk in 1 segment, 3 gets"."""
        disk = f"{format_size(self.disk_bytes)} on disk in {_count(self.segments, 'segment')}"
        told = [_count(self.records, "record"), f"{format_size(self.live_bytes)} of values", disk]
        if self.shards > 1:
            told[-1] += f" of {self.shards} shards"
        told += [
            _count(getattr(self, name), name.removesuffix("s").replace("_", " "))
            for name in ("gets", "hits", "puts", "deletes", "commits", "read_errors")
            if getattr(self, name)
        ]
        if self.read_bytes:
            told.append(f"{format_size(self.read_bytes)} read")
        return ", ".join(told)

    def __repr__(self) -> str:
        return f"<StoreStatistics: {self}>"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class LogStatistics:
    """Sizes of a log: `segments` files with `value_bytes` in all, and `journal_records` since the snapshot."""

    segments: int
    value_bytes: int
    journal_records: int
    seq: int
    durable_seq: int
