"""CudaRun: the state of a task on the GPU, for `CudaExecutor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ... import errors
from ...targets.blocks.launch import BlockLaunch
from ..executor import Ended, Stopped
from ..task import Job, Placement
from .block_executor import BlockRun, Phase

WHOLE = 100e-6
"""Seconds: a kernel that is shorter runs untransformed, because it is over before a flag and a launch would be."""


_NONE: list[Any] = []
"""Of runs whose stream has no event of theirs; nobody adds to it."""


class CudaRun(BlockRun):
    """A task on the GPU."""

    # Of thousands of short ones, most fields are never set: they are the class's.
    blocks: BlockLaunch | None = None
    forms: Any = None
    control = 0
    """Address of its control record, 0 before it has one."""
    stream: Any = None
    line: Any = None
    """What it was given to, if it runs as it is: a `targets.gpu.lines.Line`."""
    ticket = 0
    """Its number there."""
    behind = False
    """Whether it was given to its line behind others, so that it may leave before it begins."""
    alike = False
    """Whether it shares `blocks` with others, which were never begun."""
    pair: tuple[int, int] | None = None
    """Events before and behind it in its line, if its time is to be measured."""
    events: list[Any]
    timer: Any = None
    """An event before its first block, if the time of the kernel is to be measured."""
    last: Any = None
    """The last of `events` that was reached."""
    side: Any = None
    """A second stream: the first is busy until all workers that were launched there have left."""
    launched = 0
    """Workers that have been launched and not been told to leave, or of whom not all have left yet."""
    base = 0
    """`LEFT` when there were no others."""
    target = 0
    """Workers that are to stay."""
    floor = 0
    """`FLOOR` as it was last set."""
    top = 0
    """Number of the next worker."""
    chunk = 1
    done = 0
    resources: Mapping[str, int] = MappingProxyType({})

    def __init__(self, job: Job, placement: Placement) -> None:
        self.job = job
        self.placement = placement
        self.events = _NONE

    @property
    def runs(self) -> bool:
        """Whether something of it is on the GPU."""
        return self.phase in (Phase.RUNNING, Phase.STOPPING)

    @property
    def form(self) -> str:
        """How it runs: "plain" or "workers"."""
        assert self.blocks is not None
        if self.done and self.blocks.preemptible:
            return "workers"  # as it is, blocks that have ended would run once more
        return "plain" if self.placement.plain or self.short or not self.blocks.preemptible else "workers"

    @property
    def short(self) -> bool:
        """Whether it is expected to be over before it could be preempted."""
        seconds = self.job.task.profile.seconds
        # a kernel that runs whole cannot be preempted if the time was wrong
        return seconds is not None and seconds < WHOLE and not self.said

    @property
    def said(self) -> bool:
        """Whether its times were given by the submitter, neither measured nor predicted."""
        return self.job.task.profile.source == "given"

    @property
    def row(self) -> Any:
        """What a line takes; None where it runs otherwise, or its arguments are no words."""
        makes = getattr(self.forms, "plain_row", None)
        return None if makes is None or self.form != "plain" else makes()

    @property
    def timed(self) -> bool:
        """Whether its analyzer wants the kernel's time."""
        known = self.job.task.known
        return known is not None and known.wants and not self.done

    def begins(self, gpu: Any) -> None:
        """Record when its first block begins, if its analyzer wants the kernel's time. It costs an event."""
        self.timer = gpu.mark(self.stream, True) if self.timed else None

    def mark(self, gpu: Any) -> Any:
        """Return an event behind all work that its stream has so far."""
        return gpu.mark(self.stream, self.timer is not None)

    def ends(self, gpu: Any) -> None:
        """Note the time of the kernel, without copies, if its beginning was recorded."""
        if self.timer is not None and self.error is None:
            # one that grew has events of two streams, and was not alone from its beginning
            last = self.last if not self.events else self.events[0] if len(self.events) == 1 else None
            self.seconds = None if last is None else gpu.elapsed(self.timer, last)

    def arrived(self, gpu: Any) -> bool:
        """Tell whether the executor would find something new of it."""
        if not self.runs or not self.events:
            return False
        try:
            return self.quota > self.target > 0 or all(gpu.done(event) for event in self.events)
        except errors.DeviceNotFoundError:
            return True  # `poll` says so

    def start_workers(self, count: int, stream: Any) -> None:
        """Launch so many more workers."""
        self.forms.start(self.control, self.top, count, stream, self.chunk)
        self.top += count
        self.launched += count

    def most(self) -> int:
        """Return the workers that it may have, at most as many as can be resident."""
        resident = self.resources["resident"]
        wanted = resident if self.placement.workers is None else min(self.placement.workers, resident)
        return max(1, wanted)

    @property
    def block_seconds(self) -> float:
        """The expected time of a block, 0 where nothing is known."""
        assert self.blocks is not None
        resident = min(self.resources.get("resident", 1), self.blocks.blocks)
        return (self.job.task.profile.seconds or 0.0) * resident / self.blocks.blocks


def lost_with(
    error: BaseException, runs: Iterable[CudaRun], events: Sequence[Ended | Stopped], time: float
) -> list[Ended | Stopped]:
    """End the runs on a lost GPU; return the events for the scheduler, in place of `events`.

    Tasks that have ended stay ended. A task whose stop was polled is in a queue of the scheduler, which will find out;
    a task whose stop was not polled yet is lost.
    """
    told: list[Ended | Stopped] = [event for event in events if isinstance(event, Ended)]
    ended = {event.job for event in told}
    stopped = {event.job for event in events} - ended
    for run in runs:
        if run.job in ended or (run.phase is Phase.STOPPED and run.job not in stopped):
            continue
        run.phase = Phase.ENDING
        name = run.job.task.name
        lost = errors.TaskLostError(
            f"task {name!r} was lost when a kernel on the GPU failed ({error}): submit it again to a new process",
            task=name,
        )
        told.append(Ended(run.job, time, lost))
    return told
