"""Waiting: jobs that could be launched, in order of arrival and in the buckets of a policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator

from .task import Job


class Waiting:
    """What waits. Iteration is in order of arrival and leaves out what may not be launched now (memory, quotas).

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
        self._order: list[tuple[float, int, Job]] = []
        self._buckets: dict[Hashable, list[tuple[float, int, Job]]] = {}
        self._passed: dict[Hashable, int] = {}
        self._places: dict[Job, tuple[Hashable, tuple[float, int, Job]]] = {}

    def __iter__(self) -> Iterator[Job]:
        """Jobs that may be launched, in order of arrival."""
        allowed = self.allowed
        return (entry[2] for entry in self._order if allowed(entry[2]))

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
        return len(self._order)

    def first(self) -> Job | None:
        """Return the oldest that may be launched."""
        allowed = self.allowed
        for entry in self._order:
            if allowed(entry[2]):
                return entry[2]
        return None

    def heads(self) -> list[Job]:
        """Return the first of each bucket that may be launched."""
        allowed = self.allowed
        found = []
        for entries in self._buckets.values():
            for entry in entries:
                if allowed(entry[2]):
                    found.append(entry[2])
                    break
        return found

    def passed(self, job: Job) -> int:
        """Return how many younger jobs of other buckets went ahead since one of its own bucket was last launched.

        This is what waiting ages by: it needs no unit of time, and grows only where others are preferred.
        """
        return self._passed[self._places[job][0]]

    def add(self, job: Job) -> None:
        """Take a job in."""
        bucket = self._bucket(job)
        entry = (self._key(job), job.number, job)
        entries = self._buckets.get(bucket)
        if entries is None:
            self._buckets[bucket] = [entry]
            self._passed[bucket] = 0
        else:
            insort(entries, entry)
        insort(self._order, (job.arrival, job.number, job))
        self._places[job] = bucket, entry

    def remove(self, job: Job) -> None:
        """Let a job go that does not want to run any more."""
        bucket, entry = self._places.pop(job)
        entries = self._buckets[bucket]
        if len(entries) == 1:
            del self._buckets[bucket], self._passed[bucket]
        else:
            del entries[bisect_left(entries, entry)]
        del self._order[bisect_left(self._order, (job.arrival, job.number, job))]

    def launched(self, job: Job) -> None:
        """Let a job go that was launched, and count it for the older ones that it passed."""
        mine = self._places[job][0]
        passed = self._passed
        for bucket, entries in self._buckets.items():
            if bucket == mine:
                passed[bucket] = 0
            else:
                head = entries[0][2]
                if (head.arrival, head.number) < (job.arrival, job.number):
                    passed[bucket] += 1
        self.remove(job)
