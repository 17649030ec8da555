"""DataOrder: which tasks each task must follow, because they use the same memory and one of them may write it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Ordered(Protocol):
    """A job, or another object that uses memory."""

    @property
    def number(self) -> int:
        """Position in the order of submission."""

    @property
    def request(self) -> Any:
        """An object that jobs share if they run in order for another reason."""


J = TypeVar("J", bound=Ordered)

_START = attrgetter("start")
_EMPTY: frozenset[Hashable] = frozenset()


class Access(NamedTuple):
    """Memory that a task uses.

    Attributes
    ----------
    start, end : int
        Addresses of the first byte and after the last one.
    writes : bool
        Whether the task may write it.
    space : hashable
        Address space: 0 for the process's memory and the memory of its GPUs, which share addresses.
    """

    start: int
    end: int
    writes: bool
    space: Hashable = 0


@dataclass(eq=False)
class _Segment(Generic[J]):
    """A range of memory, the last unfinished job that may write it, and the jobs that read it after that job."""

    start: int
    end: int
    writer: J | None = None
    readers: set[J] = field(default_factory=set)


class DataOrder(Generic[J]):
    """Records, for each range of memory, the unfinished tasks that the next task to use the range must follow.

    A task follows only tasks that were added before it, so waiting tasks never form a cycle. If a task is cancelled
    before the tasks that it follows have ended, later tasks still wait for those tasks.
    """

    def __init__(self) -> None:
        self._segments: dict[Hashable, list[_Segment[J]]] = {}
        self._accesses: dict[J, Sequence[Access]] = {}
        self._awaited: dict[J, set[Hashable]] = {}
        self._followers: dict[Hashable, list[J]] = {}
        self._ended: set[Any] = set()

    def add(self, job: J, accesses: Sequence[Access], after: Iterable[Hashable] = ()) -> tuple[int, ...]:
        """Add a job with the memory that it uses, and the events (not jobs) that it also waits for.

        Returns
        -------
        tuple of int
            Numbers of the jobs of other requests that the job follows.
        """
        found: set[J] = set()
        for access in accesses:
            self._use(job, access, found)
        found.discard(job)
        if accesses:
            self._accesses[job] = accesses
        before = sorted(found, key=lambda earlier: earlier.number)
        events = [*before, *after]
        if events:
            self._awaited[job] = set(events)
            for event in events:
                self._followers.setdefault(event, []).append(job)
        return tuple(earlier.number for earlier in before if earlier.request is not job.request)

    def is_waiting(self, job: J) -> bool:
        """Return True if a job still waits for another job or an event."""
        return job in self._awaited

    def follows(self, job: J, other: J) -> bool:
        """Return True if a job still waits for the data of the job `other`."""
        return other in self._awaited.get(job, ())

    def followers(self, jobs: Sequence[Hashable], limit: int = 16) -> Iterator[J]:
        """Yield jobs that wait only for these jobs. Only the first `limit` followers of each job are checked."""
        for earlier in jobs:
            for job in islice(self._followers.get(earlier, []), limit):
                if self._awaited.get(job, _EMPTY).issubset(jobs):
                    yield job

    def release(self, event: Hashable) -> list[J]:
        """Record that an event has happened, or a job has ended; return the jobs that do not wait any more."""
        released: list[J] = []
        events = deque([event])
        while events:
            event = events.popleft()
            awaited = self._awaited.get(event)  # type: ignore[call-overload]
            if awaited is not None:  # for followers of a cancelled job, only the data matter
                for dropped in awaited.difference(self._accesses):
                    self._followers[dropped].remove(event)  # type: ignore[arg-type]
                    if not self._followers[dropped]:
                        del self._followers[dropped]
                awaited.intersection_update(self._accesses)
                if awaited:
                    self._ended.add(event)
                    continue
                del self._awaited[event]  # type: ignore[arg-type]
            self._forget(event)
            for job in self._followers.pop(event, ()):
                awaited = self._awaited.get(job, set())
                awaited.discard(event)
                if awaited or job not in self._awaited:
                    continue
                if job in self._ended:
                    events.append(job)  # type: ignore[arg-type]
                else:
                    del self._awaited[job]
                    released.append(job)
        return released

    def _forget(self, event: Hashable) -> None:
        self._ended.discard(event)
        for start, end, _, space in self._accesses.pop(event, ()):  # type: ignore[call-overload]
            segments = self._segments.get(space, [])
            first, last = (bisect_left(segments, address, key=_START) for address in (start, end))
            left = []
            for segment in segments[first:last]:
                if segment.writer is event:
                    segment.writer = None
                segment.readers.discard(event)
                if segment.writer is not None or segment.readers:
                    left.append(segment)
            segments[first:last] = left
            if not segments:
                self._segments.pop(space, None)

    def _use(self, job: J, access: Access, found: set[J]) -> None:
        """Add the jobs that an access must follow to `found`, and record it."""
        start, end = access.start, access.end
        if start >= end:
            return
        segments = self._segments.setdefault(access.space, [])
        first, last = _split(segments, start), _split(segments, end)
        new: list[_Segment[J]] = []
        position = start
        for segment in segments[first:last]:
            if segment.writer is not None:
                found.add(segment.writer)
            if access.writes:
                found |= segment.readers
            else:
                if position < segment.start:
                    new.append(_Segment(position, segment.start, None, {job}))
                segment.readers.add(job)
                new.append(segment)
                position = segment.end
        if position < end:
            new.append(_Segment(position, end, job) if access.writes else _Segment(position, end, None, {job}))
        segments[first:last] = new


def _split(segments: list[_Segment[J]], address: int) -> int:
    """Divide the segment that contains an address; return the position of the first segment from there on."""
    position = bisect_left(segments, address, key=_START)
    if position and segments[position - 1].end > address:
        before = segments[position - 1]
        segments.insert(position, _Segment(address, before.end, before.writer, set(before.readers)))
        before.end = address
    return position
