"""CpuExecutor: threads of this machine that claim blocks; preemption that is real, without a GPU.

The life of a task, from its first launch to its end (a "run"). Every change is made under one lock::

            launch             compiled              last block, or an error
    (none) ───────► PREPARING ─────────► RUNNING ────────────────────────────► ENDING ──► Ended
                        │                 │   ▲                                  ▲
                        │         preempt │   │ launch                           │ the same, while it stopped
                        │ compiled, and   ▼   │                                  │
                        │ preempted    STOPPING ─────────────────────────────────┘
                        │ before          │   │ all threads have left
                        └───────────────► ▼   │
                                        STOPPED ──► Stopped
    discard, abandon (with Ended), close: ──► GONE

- PREPARING: a thread begins the arguments and compiles. A kernel that does not compile, or an argument that refuses, is
  ``Ended(error)`` with nothing begun. A preemption that comes now is carried out once it is compiled.
- RUNNING: up to `quota` slots, each a thread that claims blocks. A thread that has come out of its loop takes the lock
  and looks once more: it goes on where its slot is wanted (the quota grew again, the task was launched again), else it
  gives the slot up. A slot has one thread at most, so a quota is never exceeded: growing waits for what has not left.
- STOPPING: the flag is set, and each thread leaves at the end of its block. The last one decides: nothing left to run,
  or an error: ENDING; else STOPPED. So a task that is asked to leave in its last blocks ends, and one that is cancelled
  while it stops has left before anybody may discard it.
- STOPPED: the cursor is the whole state. The arguments stay begun: ``launch_begins`` and ``launch_ended`` are called
  once a task, so what device code latches in a storage-backed array comes out at that task's end, preempted or not.
- ENDING: the last thread ends the arguments, outside of the lock, because that may take long; then there is an `Ended`.
  Whatever is asked between an `Ended` or `Stopped` and the `poll` that tells of it comes too late and does nothing.
- GONE: nothing more is said of it. Where threads are still inside, the last one to leave ends the arguments.
- What is launched with ``placement.plain``, or cannot be cut into blocks, runs whole, in one slot, and is RUNNING from
  the beginning. It cannot be preempted or resized.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from ... import errors
from ..._check import checked_integer, checked_nbytes, checked_seconds
from ..._os import Threads
from ...targets.blocks import CURSOR, DONE, NEVER, STOP, TARGET, BlockLaunch
from ..batch import Batch
from ..callables import Call
from ..executor import Capacity, Ended, Machine, Stopped
from ..task import Job, Placement
from .block_executor import BlockExecutor, BlockRun, Phase

THREADS_PER_CORE = 4
"""Workers of a task, a core, by default: more than one, because a thread that waits for storage costs nothing."""

HAND_OVER = 2e-4
"""Seconds from the end of a block to the first one of the next task: waking threads, and the scheduler's own time."""


class CpuRun(BlockRun):
    """A task on the threads of a `CpuExecutor`. Its lock guards everything here but the control record.

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
        Whether a thread prepares it or ends it.
    """

    def __init__(self, job: Job, blocks: BlockLaunch, quota: int, whole: bool) -> None:
        super().__init__(job)
        self.blocks = blocks
        self.quota = quota
        self.whole = whole
        self.slots: set[int] = set()
        self.inside = False
        self._control = blocks.new_control()
        self._words = self._control.words
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
        """Whether nothing is left to run, once no slot has a thread: every block has ended, or one has failed."""
        return self.whole or self.error is not None or self.done == self.blocks.blocks

    @property
    def busy(self) -> bool:
        """Whether a thread is inside."""
        return self.inside or bool(self.slots)

    def write(self, word: int, value: int) -> None:
        """Set a word of the control record; workers look before each claim."""
        self._words[word] = value

    def wants(self, slot: int) -> bool:
        """Tell whether the thread of a slot is to go on."""
        more = not self.whole and self.error is None and self.claimed < self.blocks.blocks
        return more and self.phase is Phase.RUNNING and slot < self.quota

    def fail(self, error: BaseException) -> None:
        """Note a failure; all workers leave."""
        self.error = self.error or error
        self.write(STOP, NEVER)

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
        """Return how long a task that runs whole will go on; if that is unknown or past, as long as it has run."""
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
        """Run blocks in this thread until it is to leave; or the kernel as it is, here and in the target's threads."""
        if self.whole:
            self.job.task.launch(*self.job.task.arguments, device="cpu", flag=self.blocks.flag)
        else:
            self.blocks.work(self._control.address, slot)

    def end(self) -> BaseException | None:
        """End the arguments; return the first error: of a block, else what device code latched."""
        try:
            self.blocks.end()
        except Exception as latched:
            return self.error or latched
        return self.error


class CpuExecutor(BlockExecutor[CpuRun]):
    """Runs kernels on the `cpu` target, block by block, in threads.

    Parameters
    ----------
    threads : int, optional
        Workers of a task without a quota; 4 a core by default.
    memory : int, optional
        Bytes that tasks may hold together, with their arrays; by default the machine's memory, in which these are
        already.
    patience : float
        Seconds that `close` waits for blocks that run.
    """

    def __init__(self, threads: int | None = None, *, memory: int | str | None = None, patience: float = 10.0) -> None:
        threads = None if threads is None else checked_integer(threads, "threads")
        memory = None if memory is None else checked_nbytes(memory, "memory", minimum=0)
        patience = checked_seconds(patience, "patience")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads or THREADS_PER_CORE * cores
        processors = min(cores, self.threads)
        super().__init__(
            Capacity(
                processors=processors,
                blocks=-(-self.threads // processors),
                memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory is None else memory,
            )
        )
        self._counts_arrays = memory is not None
        self._patience = patience
        self._pool = Threads("warpwell-block")
        self._leaving: set[CpuRun] = set()
        self._woken = False
        self._lock = threading.RLock()
        from ...targets.compiler import load_cpu

        load_cpu()
        self._changed = threading.Condition(self._lock)

    # -- calls of the scheduler ----------------------------------------------------------------------------------

    def keeps(self, array: Any) -> bool:
        """See `Executor`."""
        return not self._counts_arrays

    def launch(self, job: Job, placement: Placement) -> None:
        """See `Executor`. What is wrong with the task itself comes out of `poll`, as its end."""
        quota = self._quota(job, placement.workers)
        with self._lock:
            self._require_open()
            run = self._runs.get(job)
            if run is None:
                self._launch_new(job, quota, placement.plain)
            elif self._may_launch_again(run):
                run.quota = quota
                run.leave = False
                run.write(STOP, 0)
                self._go(run)
            else:
                raise self._runs_already(job)

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """See `Executor`. "switch" is a drain."""
        self._check_mode(mode)
        with self._lock:
            run = self._running(job)
            run.leave = True
            if run.phase is Phase.RUNNING and not run.whole:
                run.phase = Phase.STOPPING
                run.write(STOP, NEVER)

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """See `Executor`. A task that is leaving, or that runs whole, takes no notice; threads have no age."""
        quota = self._quota(job, workers)
        with self._lock:
            run = self._running(job)
            run.quota = quota
            if run.phase is Phase.RUNNING:
                run.write(TARGET, quota)
                self._fill(run)

    def progress(self, job: Job) -> int:
        """See `Executor`. A task that runs whole has ended none until its end."""
        run = self._runs.get(job)
        return job.done if run is None else run.done

    def claimed(self, job: Job) -> int:
        """See `Executor`."""
        run = self._runs.get(job)
        return job.done if run is None else run.claimed

    def live(self, job: Job) -> int:
        """Return how many threads a job has now; more than its quota only until those that are to leave have left."""
        run = self._runs.get(job)
        return 0 if run is None else len(run.slots)

    def cost(self, victim: Job, stays: Sequence[Job]) -> float:
        """See `Executor`: a block, as long as they took since the launch; of a task that runs whole, its rest."""
        run = self._runs.get(victim)
        if run is None:
            return HAND_OVER
        now = self.now()
        return HAND_OVER + (run.rest(now) if run.whole else run.block_seconds(now))

    def poll(self) -> list[Ended | Stopped]:
        """See `Executor`."""
        with self._lock:
            return self._take_events()

    def wait(self, until: float | None) -> None:
        """See `Executor`. With None it returns at once where nothing runs."""
        with self._lock:
            while not self._events and not self._woken:
                if until is None and all(run.phase is Phase.STOPPED for run in self._runs.values()):
                    break
                seconds = None if until is None else until - self.now()
                if seconds is not None and seconds <= 0:
                    break
                self._changed.wait(seconds)
            self._woken = False

    def wake(self) -> None:
        """See `Executor`."""
        with self._lock:
            self._woken = True
            self._changed.notify_all()

    def machine(self) -> Machine:
        """See `Executor`. The memory's bandwidth is measured, once a process."""
        from ..predict.peaks import host_machine

        return host_machine()

    def discard(self, job: Job) -> None:
        """See `Executor`."""
        with self._lock:
            run = self._runs.get(job)
            if run is None:
                return
            if run.phase is not Phase.STOPPED:
                raise errors.SchedulerError(f"task {job.task.name!r} runs: preempt it first", task=job.task.name)
            del self._runs[job]
        run.end()

    def abandon(self, job: Job, error: BaseException) -> None:
        """See `Executor`. A thread that never leaves its block is lost, and keeps its core until the process ends."""
        with self._lock:
            run = self._running(job)
            if run.phase in (Phase.STOPPED, Phase.ENDING, Phase.GONE):
                return
            self._gone(run)
            self._say(Ended(job, self.now(), error))
            going_on = [other for other in self._runs.values() if other.phase is not Phase.GONE]
            others = {id(a) for other in going_on for a in other.blocks.participants}
        run.blocks.flag.interrupt()  # a loop that asks `failed` ends, and its thread is not lost
        for argument in run.blocks.participants:
            # its waits for storage end at once; those of other tasks on the same arrays must not
            if id(argument) not in others:
                argument.abort(run.blocks.flag)

    def close(self) -> None:
        """See `Executor`. Blocks that run may end; after `patience` seconds their waits for storage are cut short."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            runs = [run for run in self._runs.values() if run.phase is not Phase.GONE]
            left = [run for run in runs if self._gone(run)]
            self._leaving = {run for run in runs if run.busy}
            self._runs.clear()
            self._await(self._patience)
            stuck = list(self._leaving)
        for run in stuck:
            run.blocks.abort()
        with self._lock:
            self._await(min(self._patience, 1.0))
            self._changed.notify_all()
        for run in left:
            run.end()
        self._pool.close()

    # -- threads -------------------------------------------------------------------------------------------------

    def _prepare(self, run: CpuRun) -> None:
        error: BaseException | None = None
        try:
            run.begin()
        except BaseException as failure:  # told to the scheduler
            error = failure
        with self._lock:
            run.error = error
            run.inside = False
            if run.phase is Phase.GONE:
                ends = True
            elif error is not None:
                ends = self._ending(run)
            elif run.leave:
                ends = self._stopped(run)
            else:
                ends = False
                self._go(run)
        if ends:
            self._end(run)

    def _work(self, run: CpuRun, slot: int) -> None:
        ends = False
        wanted = True
        while wanted:
            error: BaseException | None = None
            try:
                run.work(slot)
            except BaseException as failure:  # told to the scheduler
                error = failure
            with self._lock:
                if error is not None:
                    run.fail(error)
                wanted = run.wants(slot)
                if not wanted:
                    run.slots.discard(slot)
                    ends = not run.slots and self._settle(run)
        if ends:
            self._end(run)

    def _end(self, run: CpuRun) -> None:
        """End the arguments, then report it, unless the run was given up."""
        error = run.end()
        with self._lock:
            run.inside = False
            self._leaving.discard(run)
            self._changed.notify_all()
            if run.phase is Phase.ENDING:
                self._say(Ended(run.job, self.now(), error, run.seconds if error is None else None))

    # -- under the lock; what returns a bool says whether the caller must call _end ------------------------------------

    def _launch_new(self, job: Job, quota: int, plain: bool) -> None:
        task = job.task
        try:
            blocks = task.launch.cut(task.arguments, "cpu")
            if blocks.blocks != task.blocks:
                raise errors.ArgumentError(f"task {task.name!r} says {task.blocks} blocks, and has {blocks.blocks}")
        except Exception as error:
            self._say(Ended(job, self.now(), error))
            return
        plain = not blocks.preemptible or (plain and not isinstance(task.launch, Batch))
        run = self._runs[job] = CpuRun(job, blocks, quota, plain)
        if run.whole:
            self._go(run)
        else:
            run.inside = True
            self._pool.run(lambda: self._prepare(run))

    def _go(self, run: CpuRun) -> None:
        """Let blocks go, or the whole kernel."""
        run.phase = Phase.RUNNING
        run.mark(self.now())
        run.write(TARGET, run.quota)
        self._fill(run)

    def _fill(self, run: CpuRun) -> None:
        """Give a thread to every free slot of the quota, as far as there are blocks for them."""
        unclaimed = (0 if run.slots else 1) if run.whole else run.blocks.blocks - run.claimed
        for slot in range(run.quota):
            if unclaimed > 0 and slot not in run.slots:
                self._pool.run(lambda slot=slot: self._work(run, slot))  # type: ignore[misc]
                run.slots.add(slot)
                unclaimed -= 1

    def _settle(self, run: CpuRun) -> bool:
        """Decide what follows when the last thread of a run has left."""
        if run.phase is Phase.GONE:
            return True
        if run.over:
            return self._ending(run)
        if run.phase is Phase.STOPPING:
            return self._stopped(run)
        run.fail(
            errors.SchedulerError(
                f"task {run.job.task.name!r} has no worker at block {run.done} of {run.blocks.blocks}: report this",
                task=run.job.task.name,
            )
        )
        return self._ending(run)

    def _stopped(self, run: CpuRun) -> bool:
        run.phase = Phase.STOPPED
        self._say(Stopped(run.job, self.now(), run.done))
        return False

    def _ending(self, run: CpuRun) -> bool:
        # a kernel that runs whole may have been compiled meanwhile
        if run.phase is Phase.RUNNING and (not run.whole or isinstance(run.job.task.launch, Call)):
            run.seconds = self.now() - run.since
        run.phase = Phase.ENDING
        run.inside = True
        return True

    def _gone(self, run: CpuRun) -> bool:
        """Give a run up, unless its end is under way; return whether the caller must end its arguments."""
        run.write(STOP, NEVER)
        if run.phase is not Phase.ENDING:
            run.phase = Phase.GONE
        return not run.busy

    def _await(self, seconds: float) -> None:
        """Wait until no thread is inside of a run that was given up."""
        until = time.monotonic() + seconds
        while self._leaving and (rest := until - time.monotonic()) > 0:
            self._changed.wait(rest)

    def _say(self, event: Ended | Stopped) -> None:
        self._events.append(event)
        self._changed.notify_all()

    def _quota(self, job: Job, workers: int | None) -> int:
        self._check_quota(workers)
        if isinstance(job.task.launch, Batch):
            return 1  # each launch has the target's threads
        return self.threads if workers is None else min(workers, self.threads)
