"""Run: one task on the threads of `CpuExecutor`, from its first launch to its end. See there for its life."""

from __future__ import annotations

import contextlib
import enum

from ...targets.blocks.launch import CURSOR, DONE, STOP, BlockLaunch
from ..task import Job


class Phase(enum.Enum):
    """Of a run: PREPARING, RUNNING, STOPPING, STOPPED, WHOLE, ENDING, GONE (`cpu_executor`)."""

    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    WHOLE = "whole"
    ENDING = "ending"
    GONE = "gone"


class Run:
    """What the executor knows of a task. Its lock guards everything here but the control record.

    Parameters
    ----------
    job : Job
    blocks : BlockLaunch
    quota : int
        Threads at most.
    whole : bool
        Whether it runs as the kernel is, not block by block.

    Attributes
    ----------
    slots : set of int
        Numbers of the workers that have a thread.
    inside : bool
        Whether a thread prepares it, runs it whole or ends it.
    leave : bool
        Whether it is to stop as soon as it is compiled.
    told : bool
        Whether the scheduler knows that it has stopped.
    error : BaseException or None
        The first failure.
    since : float
        When its blocks were last let go.
    seconds : float or None
        What its blocks took since then, where they ran to the end.
    """

    def __init__(self, job: Job, blocks: BlockLaunch, quota: int, whole: bool) -> None:
        self.job = job
        self.blocks = blocks
        self.quota = quota
        self.phase = Phase.WHOLE if whole else Phase.PREPARING
        self.slots: set[int] = set()
        self.inside = True
        self.leave = False
        self.told = False
        self.error: BaseException | None = None
        self._control = blocks.new_control()
        self._words = self._control.words
        self._whole = whole
        self.since = 0.0
        self.seconds: float | None = None
        self._done_then = 0

    @property
    def done(self) -> int:
        """Blocks that have ended."""
        return int(self._words[DONE])

    @property
    def claimed(self) -> int:
        """Blocks that have begun."""
        return min(int(self._words[CURSOR]), self.blocks.blocks)

    @property
    def over(self) -> bool:
        """Whether nothing is left to run: every block has ended, or one has failed."""
        return self.error is not None or self.done == self.blocks.blocks

    @property
    def busy(self) -> bool:
        """Whether a thread is inside."""
        return self.inside or bool(self.slots)

    def write(self, word: int, value: int) -> None:
        """Set a word of the control record; workers look before each claim."""
        self._words[word] = value

    def wants(self, slot: int) -> bool:
        """Tell whether the thread of a slot is to go on."""
        unclaimed = self.claimed < self.blocks.blocks
        return self.phase is Phase.RUNNING and slot < self.quota and self.error is None and unclaimed

    def fail(self, error: BaseException) -> None:
        """Note a failure; all workers leave."""
        self.error = self.error or error
        self.write(STOP, 1)

    def mark(self, now: float) -> None:
        """Note that it is launched now (for `block_seconds`)."""
        self.since = now
        self._done_then = self.done

    def block_seconds(self, now: float) -> float:
        """Return how long a block takes, from what ended since the launch; before that, the time since then."""
        ran = max(now - self.since, 0.0)
        ended = self.done - self._done_then
        return ran if ended == 0 else ran * max(len(self.slots), 1) / ended

    def rest(self, now: float) -> float:
        """Return how long a task that runs whole will go on; where nobody knows, or it should be over, as it has."""
        ran = max(now - self.since, 0.0)
        whole = self.job.task.profile.seconds
        return ran if whole is None or ran > whole else whole - ran

    def begin(self) -> None:
        """Begin the arguments and compile; what raises has begun nothing."""
        self.blocks.begin()
        try:
            self.blocks.prepare()
        except BaseException:
            with contextlib.suppress(Exception):  # the kernel that does not compile is the error to report
                self.blocks.end()
            raise

    def work(self, slot: int) -> None:
        """Run blocks in this thread until it is to leave."""
        self.blocks.work(self._control.address, slot)

    def run_whole(self) -> None:
        """Run the kernel as it is, in this thread and those of the `cpu` target."""
        self.job.task.launch(*self.job.task.arguments, device="cpu", flag=self.blocks.flag)

    def end(self) -> BaseException | None:
        """End the arguments; return the first error: of a block, else what device code latched."""
        if not self._whole:
            try:
                self.blocks.end()
            except Exception as latched:
                return self.error or latched
        return self.error
