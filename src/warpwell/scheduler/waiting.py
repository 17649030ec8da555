"""`Waiting`: the queue of launchable jobs, in order of arrival and in the buckets of a policy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from .task import Job

Entry = tuple[float, int, Job, Hashable]
"""Key, number, job, and the key of its bucket."""


class Waiting:
    """Waiting jobs. Iteration is in order of arrival and leaves out jobs that may not be launched now (memory, quotas).

    A policy sorts jobs into buckets and considers only the first job of each. So the cost of a decision depends on the
    number of buckets, not on the number of jobs.

    Parameters
    ----------
    bucket : callable
        ``bucket(job)``: see `Policy.bucket`.
    key : callable
        ``key(job)``: see `Policy.key`.
    allowed : callable
        ``allowed(job)``: whether the job may be launched now.

    Attributes
    ----------
    unrestricted : bool
        Whether all jobs may be launched, so that calls of `allowed` are skipped.
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
        self._buckets: dict[Hashable, _Bucket] = {}
        self._entries: dict[Job, Entry] = {}

    def __iter__(self) -> Iterator[Job]:
        """Jobs that may be launched, in order of arrival."""
        allowed = self.allowed
        return (job for job in self.everything if self.unrestricted or allowed(job))

    def __len__(self) -> int:
        """Return the number of jobs that may be launched."""
        return sum(1 for _ in self)

    def __contains__(self, job: object) -> bool:
        return job in self._entries

    @property
    def everything(self) -> list[Job]:
        """All waiting jobs in order of arrival, whether they may be launched or not."""
        return sorted(self._entries, key=lambda job: (job.arrival, job.number))

    @property
    def count(self) -> int:
        """The number of waiting jobs, whether they may be launched or not."""
        return len(self._entries)

    def first(self) -> Job | None:
        """Return the oldest job that may be launched. Sorts all jobs, so a policy should read `heads` instead."""
        return next(iter(self), None)

    def all_of(self, record: Any) -> list[Job]:
        """Return the jobs whose task has the kernel record `record`, in order of submission."""
        return [job for job in self._entries if job.task.known is record]

    def heads(self) -> list[Job]:
        """Return the first job of each bucket that may be launched."""
        if self.unrestricted:
            return [bucket.entries[0][2] for bucket in self._buckets.values()]
        firsts = (self._first_of(bucket.entries) for bucket in self._buckets.values())
        return [job for job in firsts if job is not None]

    def _first_of(self, entries: list[Entry]) -> Job | None:
        return next((entry[2] for entry in entries if self.allowed(entry[2])), None)

    def buckets(self) -> list[tuple[Job, int]]:
        """Return the first job and the number of jobs of each bucket."""
        return [(bucket.entries[0][2], len(bucket.entries)) for bucket in self._buckets.values()]

    def behind(self, job: Job) -> Iterator[Job]:
        """Return the later jobs of the same bucket that may be launched, in order."""
        entry = self._entries[job]
        entries = self._buckets[entry[3]].entries
        later = (entries[k][2] for k in range(bisect_right(entries, entry), len(entries)))
        return later if self.unrestricted else filter(self.allowed, later)

    def passed(self, job: Job) -> int:
        """Return the overtaken count: younger jobs of other buckets launched since the last launch of its own bucket.

        Policies age jobs by this count, which needs no unit of time and grows only while other buckets are preferred.
        """
        return self._buckets[self._entries[job][3]].passed

    def add(self, job: Job) -> None:
        """Add a job that has arrived or was preempted."""
        bucket_key = self._bucket(job)
        self._entries[job] = entry = (self._key(job), job.number, job, bucket_key)
        insort(self._buckets.setdefault(bucket_key, _Bucket()).entries, entry)

    def remove(self, job: Job) -> None:
        """Remove a job."""
        entry = self._entries.pop(job)
        entries = self._buckets[entry[3]].entries
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._buckets[entry[3]]

    def launched(self, job: Job) -> None:
        """Remove a launched job, and increment the overtaken count of buckets with older jobs."""
        own_bucket = self._buckets[self._entries[job][3]]
        own_bucket.passed = 0
        if len(self._buckets) > 1:
            for bucket in self._buckets.values():
                head = bucket.entries[0][2]
                if bucket is not own_bucket and (head.arrival, head.number) < (job.arrival, job.number):
                    bucket.passed += 1
        self.remove(job)


class _Bucket:
    """Entries in order. `passed` counts launches of other buckets that overtook the first entry."""

    __slots__ = ("entries", "passed")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.passed = 0
