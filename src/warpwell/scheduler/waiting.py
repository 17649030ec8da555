"""Waiting: jobs that could be launched, in order of arrival and in the buckets of a policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Any

from .task import Job

Entry = tuple[float, int, Job, Hashable]
"""Key, number, job, and its bucket."""

_GONE: Any = None


class Waiting:
    """Waiting jobs. Iteration is in order of arrival and leaves out jobs that may not be launched now (memory, quotas).

    A policy sorts jobs into buckets in which only the first is of interest, so a decision costs as much as there are
    buckets, however many jobs wait.

    Parameters
    ----------
    bucket : callable
        ``bucket(job)``: see `Policy.bucket`.
    key : callable
        ``key(job)``: see `Policy.key`.
    allowed : callable
        ``allowed(job)``: whether it may be launched now.

    Attributes
    ----------
    unrestricted : bool
        Whether all may be launched, so that `allowed` need not be asked.
    """

    def __init__(
        self,
        bucket: Callable[[Job], Hashable],
        key: Callable[[Job], float],
        allowed: Callable[[Job], bool] = lambda job: True,
    ) -> None:
        self._bucket = bucket
        self._key = key
        self.allowed = allowed
        self.unrestricted = False
        self._line: _Bucket | None = None
        self._lines: dict[Hashable, _Bucket] = {}
        self._places: dict[Job, Entry] = {}

    @property
    def _order(self) -> _Bucket:
        """All, in order of arrival; many policies never ask, so it is kept only from the first time on."""
        if self._line is None:
            self._line = _Bucket()
            self._line.entries = sorted((job.arrival, job.number, job, None) for job in self._places)
        return self._line

    def __iter__(self) -> Iterator[Job]:
        """Jobs that may be launched, in order of arrival."""
        allowed = self.allowed
        return (entry[2] for entry in self._order if self.unrestricted or allowed(entry[2]))

    def __bool__(self) -> bool:
        return self.first() is not None

    def __len__(self) -> int:
        """How many may be launched."""
        return sum(1 for _ in self)

    def __contains__(self, job: object) -> bool:
        return job in self._places

    def __getitem__(self, index: int) -> Job:
        return list(self)[index]

    @property
    def everything(self) -> list[Job]:
        """All that wait, in order of arrival, whether they may be launched or not."""
        return [entry[2] for entry in self._order]

    @property
    def count(self) -> int:
        """How many wait, whether they may be launched or not."""
        return len(self._places)

    def first(self) -> Job | None:
        """Return the oldest that may be launched."""
        if self.unrestricted:
            line = self._order
            return line.entries[line.start][2] if self._places else None
        return self._order.first(self.allowed)

    def all_of(self, known: Any) -> list[Job]:
        """Return those whose tasks an analyzer knows as `known`, in order of submission."""
        return [job for job in self._places if job.task.known is known]

    def heads(self) -> list[Job]:
        """Return the first of each bucket that may be launched."""
        if self.unrestricted:
            return [line.entries[line.start][2] for line in self._lines.values()]
        allowed = self.allowed
        found = []
        for line in self._lines.values():
            job = line.first(allowed)
            if job is not None:
                found.append(job)
        return found

    def buckets(self) -> list[tuple[Job, int]]:
        """Return the first of each bucket, and how many wait there."""
        return [(line.entries[line.start][2], len(line.entries) - line.start) for line in self._lines.values()]

    def behind(self, job: Job) -> Iterator[Job]:
        """Return those of its bucket that may be launched after it, in order."""
        entry = self._places[job]
        line = self._lines[entry[3]]
        entries = line.entries
        at = line.start if entries[line.start][2] is job else bisect_left(entries, entry, line.start)
        every = (entries[k][2] for k in range(at + 1, len(entries)))
        return every if self.unrestricted else (its for its in every if self.allowed(its))

    def passed(self, job: Job) -> int:
        """Return how many younger jobs of other buckets went ahead since one of its own bucket was last launched.

        This is what waiting ages by: it needs no unit of time, and grows only where others are preferred.
        """
        return self._lines[self._places[job][3]].passed

    def add(self, job: Job) -> None:
        """Add a job that has arrived, or was preempted."""
        bucket, key = self._bucket(job), self._key(job)
        line = self._lines.get(bucket)
        if line is None:
            line = self._lines[bucket] = _Bucket()
        self._places[job] = entry = (key, job.number, job, bucket)
        line.add(entry)
        if self._line is not None:
            self._line.add((job.arrival, job.number, job, None))

    def remove(self, job: Job) -> None:
        """Let a job go that does not want to run any more."""
        entry = self._places.pop(job)
        bucket = entry[3]
        line = self._lines[bucket]
        line.remove(entry)
        if line.start == len(line.entries):
            del self._lines[bucket]
        if self._line is not None:
            self._line.remove((job.arrival, job.number, job, None))

    def launched(self, job: Job) -> None:
        """Remove a job that was launched, and count it for the older jobs of other buckets."""
        mine = self._lines[self._places[job][3]]
        mine.passed = 0
        if len(self._lines) > 1:
            for line in self._lines.values():
                head = line.entries[line.start][2]
                if line is not mine and (head.arrival, head.number) < (job.arrival, job.number):
                    line.passed += 1
        self.remove(job)


class _Bucket:
    """Entries in order. Most leave at the front: it is an offset, so that a long line need not move up each time."""

    __slots__ = ("entries", "passed", "start")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.start = 0
        self.passed = 0

    def __iter__(self) -> Iterator[Entry]:
        return islice(self.entries, self.start, None)

    def first(self, allowed: Callable[[Job], bool]) -> Job | None:
        entries = self.entries
        for i in range(self.start, len(entries)):
            job = entries[i][2]
            if allowed(job):
                return job
        return None

    def add(self, entry: Entry) -> None:
        entries = self.entries
        if not entries or entries[-1] < entry:
            entries.append(entry)
        else:
            insort(entries, entry, self.start)

    def remove(self, entry: Entry) -> None:
        entries, start = self.entries, self.start
        if entries[start][2] is not entry[2]:
            i = bisect_left(entries, entry, start)
            if i > start:
                del entries[i]
                return
        entries[start] = _GONE  # its task, with its arrays, must not stay as long as the place does
        self.start = start = start + 1
        if start == len(entries) or (start >= 64 and 2 * start >= len(entries)):
            del entries[:start]
            self.start = 0
