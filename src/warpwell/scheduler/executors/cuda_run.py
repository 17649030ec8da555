"""CudaRun: the state of a task on the GPU, for `CudaExecutor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ... import errors
from ...targets.blocks import BlockLaunch
from ..batch import Batch
from ..executor import Ended, Stopped
from ..task import Job, Placement
from .block_executor import BlockRun, Phase

WHOLE = 100e-6
"""Seconds: a kernel that is shorter runs untransformed, because it is over before a flag and a launch would be."""


_NONE: list[Any] = []
"""Of runs of which nothing has to be kept; nobody adds to it."""


class CudaRun(BlockRun):
    """A task on the GPU."""

    # Of thousands of short ones, most fields are never set: they are the class's.
    blocks: BlockLaunch | Kept | None = None
    forms: Any = None
    control = 0
    """Address of its control record, 0 before it has one."""
    line: Any = None
    """The `lines.Line` that its last launch was given to; None where that has ended."""
    ticket = 0
    """Its last number there."""
    rows = 0
    """Launches of it in lines that have not ended."""
    kept = _NONE
    """What these launch."""
    behind = False
    """Whether it was given to its line behind others, so that it may leave before it begins."""
    pending_waits = 0
    """Number of streams that may still read its control record."""
    gave = 0
    """The control record of one that has ended, which is given back when no stream reads it."""
    after: CudaRun | None = None
    """Of whom is told first, that it has left."""
    then = _NONE
    """Those that come after it."""
    next_launch = 0
    """Of a batch: the position of the next launch that a line is given."""
    pair: tuple[int, int] | None = None
    """Events before and behind it in its line, if its time is to be measured."""
    several = False
    """Whether workers were launched more than once since it began: then its time is not known."""
    count = 0
    """Workers of the last launch; 0 where it runs whole."""
    wanted = 0
    """Workers that are launched next."""
    top = 0
    """Number of the next worker: as many were given to lines."""
    never = 0
    """Of these, as many were withdrawn before they began."""
    floor = 0
    """`STOP` as it was last set: workers below it are to leave."""
    gone = 0
    """Of these, as many are known to have left."""
    chunk = 1
    done = 0
    resources: Mapping[str, int] = MappingProxyType({})

    def __init__(self, job: Job, placement: Placement) -> None:
        self.job = job
        self.placement = placement

    @property
    def runs(self) -> bool:
        """Whether something of it is on the GPU."""
        return self.phase in (Phase.RUNNING, Phase.STOPPING)

    @property
    def is_batch(self) -> bool:
        """Whether its blocks are launches."""
        return isinstance(self.job.task.launch, Batch)

    @property
    def form(self) -> str:
        """How it runs: "plain", "workers" or "batch"."""
        assert self.blocks is not None
        if self.is_batch:
            return "batch"
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

    @property
    def waits(self) -> bool:
        """Whether it is behind others that have not ended."""
        return self.behind and self.line is not None and self.line.follows(self.ticket, self)

    def is_launched(self) -> bool:
        """Return whether all that was pushed of it is on the GPU; the thread of the lines is waited for."""
        return self.line is None or bool(self.line.launched(self.ticket))

    def comes_after(self, other: CudaRun) -> None:
        """Let its end be told behind that of another."""
        self.after, other.then = other, [*other.then, self]

    def leaves_order(self) -> list[CudaRun]:
        """Return those that came after it; they come after who was before it now."""
        then, self.then = [its for its in self.then if its.after is self], []
        for its in then:
            its.after = None
            if self.after is not None:
                its.comes_after(self.after)
        self.after = None
        return then

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


class Kept:
    """How tasks of one prepared launch are launched: as a `BlockLaunch`, with nothing to begin or to end.

    Parameters
    ----------
    forms : object
        Compiled, with the arguments of all of them, whose arrays are on the GPU.
    blocks : BlockLaunch
        Of one of them; it is not kept.
    """

    __slots__ = ("blocks", "forms", "preemptible")

    ends_at_once = True

    def __init__(self, forms: Any, blocks: BlockLaunch) -> None:
        self.forms = forms
        self.blocks = blocks.blocks
        self.preemptible = blocks.preemptible

    def abort(self) -> None:
        """Its kernel asks no flag."""

    def end(self) -> None:
        """There is nothing to bring back."""


def lost_with(
    error: BaseException, runs: Iterable[CudaRun], found: Sequence[Ended | Stopped], time: float
) -> list[Ended | Stopped]:
    """End the runs on a lost GPU; return the events for the scheduler, in place of those `found`.

    Tasks that have ended stay ended. A task whose stop was polled is in a queue of the scheduler, which will find out;
    a task whose stop was not polled yet is lost.
    """
    events = list(found)
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
