"""Series: tasks that differ in nothing but their number, submitted one behind the other; what they share is there once.

Thousands of short tasks cost as much as is made for each of them. So a task of a series is a handle, a byte that says
how it ended, and its record in the scheduler; its `Task` is made when somebody asks for it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .handle import Handle, Runner
from .task import Job, Pattern, Task

PENDING, DONE, FAILED, CANCELLED = range(4)
"""What a task's byte says."""

MANY = 1024
"""Tasks of a series, at most."""

_new = object.__new__

_STATES = ("PENDING", "FINISHED", "FINISHED", "CANCELLED_AND_NOTIFIED")


class Series:
    """Tasks that differ in nothing but their number. Handles come to it until the scheduler takes it in.

    Parameters
    ----------
    runner : Runner
    pattern : Pattern
    arguments : tuple

    Attributes
    ----------
    task : Task
        What all records refer to, until somebody asks for the task of one.
    handles : list of Handle or None
        Of those that have not ended: the scheduler keeps them until then.
    ends : bytearray
        How each has ended.
    first : int
        Number of the first task, once it was taken in; until then -1.
    jobs : list of Job
        Records, from then on.
    """

    __slots__ = (
        "arguments",
        "awaited",
        "ends",
        "errors",
        "first",
        "handles",
        "jobs",
        "pattern",
        "process",
        "runner",
        "task",
        "tasks",
    )

    def __init__(self, runner: Runner, pattern: Pattern, arguments: tuple[Any, ...]) -> None:
        self.runner = runner
        self.pattern = pattern
        self.arguments = arguments
        self.process = os.getpid()
        self.task: Task = pattern.task(arguments)
        self.handles: list[Handle | None] = []
        self.ends = bytearray()
        self.first = -1
        self.jobs: list[Job] = []
        self.tasks: dict[int, Task] = {}
        self.awaited: dict[int, SeriesHandle] = {}
        self.errors: dict[int, BaseException] = {}

    def takes(self, pattern: Pattern, arguments: tuple[Any, ...]) -> bool:
        """Whether a task with these arguments, which are equal to the device, can be of this series."""
        if pattern is not self.pattern or len(self.handles) >= MANY:
            return False
        for its, given in zip(self.arguments, arguments, strict=True):
            # equal numbers are as good as the same one; of arrays, each must be kept until its task has ended
            if its is not given and not isinstance(given, _NUMBERS):
                return False
        return True

    def add(self) -> SeriesHandle:
        """Add a task; return its handle. Not from several threads at a time. Ctrl-C leaves nothing added."""
        handles = self.handles
        index = len(handles)
        handle = _new(SeriesHandle)
        handle._series = self
        handle._index = index
        try:
            if len(self.ends) == index:
                self.ends.append(PENDING)
            handles.append(handle)
            return handle
        except KeyboardInterrupt:
            del handles[index:]
            raise

    def taken_in(self, first: int, jobs: list[Job]) -> None:
        """Note the records that the scheduler has made, and their numbers."""
        self.jobs = jobs
        self.first = first
        for index, task in list(self.tasks.items()):
            self._numbers(index, task)

    def task_of(self, index: int) -> Task:
        """Return the task of one."""
        task = self.tasks.get(index)
        if task is None:
            made = self.pattern.task(self.arguments)
            made.profile = self.task.profile
            task = self.tasks.setdefault(index, made)
            self._numbers(index, task)  # `taken_in` does, or this: one of both sees the other
        return task

    def _numbers(self, index: int, task: Task) -> None:
        if self.first >= 0:
            task.number = self.first + index
            job = self.jobs[index]
            job.task = task
            job.__dict__.pop("request", None)  # which has the one of all

    def settle(self, index: int, error: BaseException | None = None, cancelled: bool = False) -> None:
        """Note the end of one task, and tell who waits (once)."""
        if error is not None:
            self.errors[index] = error
        self.ends[index] = CANCELLED if cancelled else DONE if error is None else FAILED
        self.handles[index] = None
        # Who comes to wait is in `awaited` first and looks at the end then, so one of both sees the other.
        if self.awaited:
            handle = self.awaited.pop(index, None)
            if handle is not None:
                handle._tell()

    def settle_all(self, indices: list[int]) -> None:
        """Note that tasks have ended well, in order, and tell who waits (once)."""
        ends, handles, awaited = self.ends, self.handles, self.awaited
        for index in indices:
            ends[index] = DONE
            handles[index] = None
        if awaited:  # see `settle`
            for index in indices:
                handle = awaited.pop(index, None)
                if handle is not None:
                    handle._tell()

    def pending(self) -> list[Handle]:
        """Return the handles of those that have not ended."""
        return [handle for handle in self.handles if handle is not None]


_NUMBERS = (int, float, np.generic)


class SeriesHandle(Handle):
    """The handle of a task of a series, where all that is known of the task is kept."""

    _series: Series
    _index: int

    def __init__(self) -> None:  # `Series.add` makes them
        raise NotImplementedError

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the task."""
        return self._series.task.name

    @property
    def task(self) -> Task:  # type: ignore[override]
        """The task."""
        return self._series.task_of(self._index)

    @property
    def job(self) -> Job | None:  # type: ignore[override]
        """The scheduler's record."""
        series = self._series
        if series.first < 0:
            return None
        series.task_of(self._index)  # the record refers to it from now on
        return series.jobs[self._index]

    @property
    def _runner(self) -> Runner:  # type: ignore[override]
        return self._series.runner

    @property
    def _process(self) -> int:  # type: ignore[override]
        return self._series.process

    @property
    def _live_state(self) -> str:  # type: ignore[override]
        return _STATES[self._series.ends[self._index]]

    @property
    def _exception(self) -> BaseException | None:  # type: ignore[override]
        return self._series.errors.get(self._index)

    @property
    def added(self) -> bool:
        """Whether its series has it, and it has not ended: Ctrl-C may have come before."""
        return self._index < len(self._series.handles) and self._series.handles[self._index] is self

    def done(self) -> bool:
        """See `Handle`."""
        return self._series.ends[self._index] != PENDING

    def cancelled(self) -> bool:
        """See `Handle`."""
        return self._series.ends[self._index] == CANCELLED

    def result(self, timeout: float | None = None) -> None:
        """See `Handle`."""
        if timeout is None and self._series.ends[self._index] == DONE:
            return None
        return super().result(timeout)

    def _made(self, name: str, make: Any) -> Any:
        if not self.done():
            self._series.awaited[self._index] = self  # to be told of the end
        return super()._made(name, make)

    def settle(self, error: BaseException | None, cancelled: bool = False) -> None:
        """See `Handle`."""
        self._series.settle(self._index, error, cancelled)
