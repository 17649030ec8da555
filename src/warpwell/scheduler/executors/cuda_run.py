"""CudaRun: the state of a task on the GPU, for `CudaExecutor`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ... import errors
from ...targets.blocks import BlockLaunch
from ..executor import Ended, Stopped
from .engine import Phase, Run

UNMODIFIED_BELOW_SECONDS = 100e-6
"""A shorter kernel runs unmodified, because it ends before the stop flag and another launch would take effect."""

_EMPTY: list[Any] = []
"""Shared default of list fields; never modified."""


class CudaRun(Run):
    """A task on the GPU."""

    forms: Any = None
    control = 0
    """Address of the run's control record; 0: none yet."""
    queue: Any = None
    """The `launch_queues.LaunchQueue` of the last launch; None if the last launch has ended."""
    ticket = 0
    """Number of its last launch in that queue."""
    rows = 0
    """Number of its launches in queues that have not ended."""
    launch_rows = _EMPTY
    """Rows of these launches, and of ended ones before them. Their memory must stay valid."""
    behind = False
    """Whether the run was queued after other launches in its queue, so that it may be withdrawn before it starts."""
    pending_waits = 0
    """Number of streams that may still read its control record."""
    gave = 0
    """Control record of an ended run, which is returned when no stream reads it."""
    after: CudaRun | None = None
    """The run whose end must be reported before the end of this run."""
    next_launch = 0
    """Batches: position of the next launch to push to a queue."""
    pair: tuple[int, int] | None = None
    """Events before and after the run in its queue, if its time is measured."""
    count = 0
    """Number of workers of the last launch; 0 if it runs unmodified."""
    next_workers = 0
    """Number of workers of the next launch."""
    never = 0
    """Number of pushed workers that were withdrawn before they started."""
    exited = 0
    """Number of workers that are known to have left."""
    claims = 0
    """Number of claimed blocks at the last check of the run's progress."""
    settled = 0
    """Number of workers at that check or at its start. Until all of them must leave, more may be launched."""
    chunk = 1

    @property
    def runs(self) -> bool:
        """Whether it has launches on the GPU or in a queue."""
        return self.phase in (Phase.RUNNING, Phase.STOPPING)

    @property
    def form(self) -> str:
        """Form of the launch: "plain", "workers" or "batch"."""
        if self.is_batch:
            return "batch"
        if self.done and self.blocks.preemptible:
            return "workers"  # unmodified, it would run completed blocks again
        return "plain" if self.placement.plain or self.short or not self.blocks.preemptible else "workers"

    @property
    def is_unmodified(self) -> bool:
        """Whether it is prepared to run unmodified."""
        return self.form == "plain"

    @property
    def has_workers(self) -> bool:
        """Whether its last launch was of workers."""
        return bool(self.count)

    @property
    def short(self) -> bool:
        """Whether the kernel is expected to end before it could be preempted."""
        seconds = self.job.task.profile.seconds
        # An unmodified kernel cannot be preempted if the submitter's time was wrong.
        return seconds is not None and seconds < UNMODIFIED_BELOW_SECONDS and not self.is_time_given

    @property
    def is_time_given(self) -> bool:
        """Whether the submitter gave its time, which is then not measured or predicted."""
        return self.job.task.profile.source == "given"

    @property
    def row(self) -> Any:
        """The launch as a row of a queue; None if it runs as workers or its arguments do not fit into 64-bit fields."""
        makes = getattr(self.forms, "plain_row", None)
        return None if makes is None or self.form != "plain" else makes()

    @property
    def timed(self) -> bool:
        """Whether its analyzer needs the kernel's time."""
        record = self.job.task.known
        return record is not None and record.should_measure and not self.done

    @property
    def is_queued(self) -> bool:
        """Whether it is queued after launches of other runs that have not ended."""
        return self.behind and self.queue is not None and self.queue.follows(self.ticket, self)

    def is_launched(self) -> bool:
        """Return True if all its pushed launches are on the GPU. Waits for the thread of the queues."""
        return self.queue is None or bool(self.queue.launched(self.ticket))

    @property
    def block_seconds(self) -> float:
        """The expected time of a block, or 0 if unknown."""
        resident = min(self.resources.get("resident", 1), self.blocks.blocks)
        return float((self.job.task.profile.seconds or 0.0) * resident / self.blocks.blocks)

    @property
    def drain_seconds(self) -> float:
        """The expected time of the blocks that a worker has claimed together."""
        return self.block_seconds * self.chunk


class PreparedForms:
    """The compiled launch that all tasks of a prepared launch share: a `BlockLaunch` without steps to begin or end.

    Parameters
    ----------
    forms : object
        The compiled forms with their arguments. All arrays are on the GPU.
    blocks : BlockLaunch
        The launch of one of the tasks. No reference to it is kept.
    """

    __slots__ = ("blocks", "forms", "preemptible")

    ends_at_once = True

    def __init__(self, forms: Any, blocks: BlockLaunch) -> None:
        self.forms = forms
        self.blocks = blocks.blocks
        self.preemptible = blocks.preemptible

    def abort(self) -> None:
        """Do nothing: its kernel checks no flag."""

    def end(self) -> None:
        """Do nothing: no array is copied back."""


def lost_with(
    error: BaseException, runs: Iterable[CudaRun], found: Sequence[Ended | Stopped], time: float
) -> list[Ended | Stopped]:
    """End the runs on a lost GPU; return the events that replace `found`.

    Tasks that have ended stay ended. A task whose stop was polled waits in the scheduler, which detects the loss
    itself. A task whose stop was not polled yet is lost.
    """
    events: list[Ended | Stopped] = [event for event in found if isinstance(event, Ended)]
    ended = {event.job for event in events}
    stopped = {event.job for event in found} - ended
    for run in runs:
        if run.job in ended or (run.phase is Phase.STOPPED and run.job not in stopped):
            continue
        run.phase = Phase.ENDING
        name = run.job.task.name
        lost = errors.TaskLostError(
            f"task {name!r} was lost when a kernel on the GPU failed ({error}): submit it again to a new process",
            task=name,
        )
        events.append(Ended(run.job, time, lost))
    return events
