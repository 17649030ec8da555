"""`CpuExecutor`: threads of this machine that claim blocks, with true preemption and without a GPU.

A run is the life of a task from its first launch to its end. One lock guards every transition::

            launch             compiled              last block, or an error
    (none) ───────► PREPARING ─────────► RUNNING ────────────────────────────► ENDING ──► Ended
                        │                 │   ▲                                  ▲
                        │         preempt │   │ launch                           │ the same, while it stopped
                        │ compiled, and   ▼   │                                  │
                        │ preempted    STOPPING ─────────────────────────────────┘
                        │ before          │   │ all threads have left
                        └───────────────► ▼   │
                                        STOPPED ──► Stopped
    discard, abandon (with Ended), close: ──► ABANDONED

- PREPARING: a thread begins the arguments and compiles the kernel. If either fails, the run reports ``Ended(error)``
  and no argument remains begun. A preemption during this phase takes effect after compilation.
- RUNNING: up to `quota` slots, each with a thread that claims blocks. A thread that has left its loop takes the lock
  and checks again: it continues if its slot is still required (the quota grew, or the task was launched again), else it
  frees the slot. A slot has at most one thread, so a run never exceeds its quota: a larger quota takes effect in slots
  whose threads have left.
- STOPPING: the flag is set, and each thread leaves at the end of its block. The last thread moves the run to ENDING if
  no block is left or a block failed, else to STOPPED. So a task that is preempted in its last blocks ends, and all
  threads of a cancelled task have left before the scheduler may discard it.
- STOPPED: the cursor is the entire state. The arguments stay begun: a task calls ``launch_begins`` and ``launch_ended``
  once, so an error that device code latches in a storage-backed array is raised at the end of that task.
- ENDING: the last thread ends the arguments without the lock, because that may take long, and then reports `Ended`.
  A request between an `Ended` or `Stopped` and the `poll` that returns it is too late and has no effect.
- ABANDONED: the run reports no further event. If threads are still inside, the last one to leave ends the arguments.
- A non-preemptible run (``placement.plain``, or a launch that cannot be cut into blocks) has one slot and is RUNNING
  from the start. It cannot be preempted or resized.
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
"""Default workers of a task per core: more than one, because a thread that waits for storage uses no core."""

HAND_OVER = 2e-4
"""Seconds from the end of a block to the first block of the next task: waking threads, and the scheduler's decision."""


class CpuRun(BlockRun):
    """A task on the threads of a `CpuExecutor`. The executor's lock guards all fields except the control record.

    Parameters
    ----------
    job : Job
    blocks : BlockLaunch
    quota : int
        Maximum number of threads.
    is_plain : bool
        Whether one thread runs the unmodified kernel, not block by block.

    Attributes
    ----------
    slots : set of int
        Numbers of the workers that have a thread.
    inside : bool
        Whether a thread is preparing or ending the run.
    """

    def __init__(self, job: Job, blocks: BlockLaunch, quota: int, is_plain: bool) -> None:
        super().__init__(job)
        self.blocks = blocks
        self.quota = quota
        self.is_plain = is_plain
        self.slots: set[int] = set()
        self.inside = False
        self._control = blocks.new_control()
        self._control_words = self._control.words
        self._done_at_launch = 0

    @property
    def done(self) -> int:
        """Blocks that have ended."""
        return int(self._control_words[DONE])

    @property
    def claimed(self) -> int:
        """Blocks that have begun."""
        return min(int(self._control_words[CURSOR]), self.blocks.blocks)

    @property
    def is_over(self) -> bool:
        """Whether a run without threads is complete: every block has ended, or one has failed."""
        return self.is_plain or self.error is not None or self.done == self.blocks.blocks

    @property
    def is_busy(self) -> bool:
        """Whether a thread works for the run."""
        return self.inside or bool(self.slots)

    def write(self, word: int, value: int) -> None:
        """Set a word of the control record; workers look before each claim."""
        self._control_words[word] = value

    def should_continue(self, slot: int) -> bool:
        """Return True if the thread of a slot must claim another block."""
        more = not self.is_plain and self.error is None and self.claimed < self.blocks.blocks
        return more and self.phase is Phase.RUNNING and slot < self.quota

    def fail(self, error: BaseException) -> None:
        """Record a failure and stop all workers."""
        self.error = self.error or error
        self.write(STOP, NEVER)

    def mark(self, now: float) -> None:
        """Record the time of a launch, for `block_seconds`."""
        self.since = now
        self._done_at_launch = self.done

    def block_seconds(self, now: float) -> float:
        """Return the mean seconds of the blocks that ended since the launch; without any, the time since the launch."""
        ran = max(now - self.since, 0.0)
        ended = self.done - self._done_at_launch
        return ran if ended == 0 else ran * max(len(self.slots), 1) / ended

    def remaining_seconds(self, now: float) -> float:
        """Return the remaining seconds of a non-preemptible task; if they are unknown or past, its time so far."""
        ran = max(now - self.since, 0.0)
        solo = self.job.task.profile.seconds
        return ran if solo is None or ran > solo else solo - ran

    def begin(self) -> None:
        """Begin the arguments and compile the kernel. If either fails, no argument remains begun."""
        self.blocks.begin()
        try:
            self.blocks.prepare()
        except BaseException:
            with contextlib.suppress(Exception):  # report the compilation error
                self.blocks.end()
            raise

    def work(self, slot: int) -> None:
        """Run blocks in this thread until it must leave; or the unmodified kernel, also in threads of the target."""
        if self.is_plain:
            self.job.task.launch(*self.job.task.arguments, device="cpu", flag=self.blocks.flag)
        else:
            self.blocks.work(self._control.address, slot)

    def end(self) -> BaseException | None:
        """End the arguments. Return the first error of a block, else the error that device code latched."""
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
        Workers of a task without a quota; by default 4 per core.
    memory : int, optional
        Total bytes that tasks and their arrays may hold. By default the memory of the machine, which already holds
        the arrays.
    patience : float
        Seconds that `close` waits for running blocks.
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
        """See `Executor`. `poll` returns an error of the task itself as its end."""
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
                self._start(run)
            else:
                raise self._runs_already(job)

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """See `Executor`. Mode "switch" drains as well."""
        self._check_mode(mode)
        with self._lock:
            run = self._running(job)
            run.leave = True
            if run.phase is Phase.RUNNING and not run.is_plain:
                run.phase = Phase.STOPPING
                run.write(STOP, NEVER)

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """See `Executor`. A stopping or non-preemptible task ignores the call, and threads ignore `younger`."""
        quota = self._quota(job, workers)
        with self._lock:
            run = self._running(job)
            run.quota = quota
            if run.phase is Phase.RUNNING:
                run.write(TARGET, quota)
                self._fill(run)

    def progress(self, job: Job) -> int:
        """See `Executor`. A non-preemptible task has completed 0 blocks until its end."""
        run = self._runs.get(job)
        return job.done if run is None else run.done

    def claimed(self, job: Job) -> int:
        """See `Executor`."""
        run = self._runs.get(job)
        return job.done if run is None else run.claimed

    def live(self, job: Job) -> int:
        """Return the number of threads of a job. It exceeds a reduced quota until the surplus threads have left."""
        run = self._runs.get(job)
        return 0 if run is None else len(run.slots)

    def cost(self, victim: Job, stays: Sequence[Job]) -> float:
        """See `Executor`: the mean time of a block, or the remaining time of a non-preemptible task."""
        run = self._runs.get(victim)
        if run is None:
            return HAND_OVER
        now = self.now()
        return HAND_OVER + (run.remaining_seconds(now) if run.is_plain else run.block_seconds(now))

    def poll(self) -> list[Ended | Stopped]:
        """See `Executor`."""
        with self._lock:
            return self._take_events()

    def wait(self, until: float | None) -> None:
        """See `Executor`. With None, return at once if no task runs."""
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
        """See `Executor`. Memory bandwidth is measured once per process."""
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
        """See `Executor`. A thread that never leaves its block is lost and uses a core until the process exits."""
        with self._lock:
            run = self._running(job)
            if run.phase in (Phase.STOPPED, Phase.ENDING, Phase.ABANDONED):
                return
            self._abandon_run(run)
            self._report(Ended(job, self.now(), error))
            active = [peer for peer in self._runs.values() if peer.phase is not Phase.ABANDONED]
            shared = {id(a) for peer in active for a in peer.blocks.participants}
        run.blocks.flag.interrupt()  # a loop that checks `failed` exits, so its thread is not lost
        for argument in run.blocks.participants:
            # Interrupt waits for storage, unless another task uses the same array.
            if id(argument) not in shared:
                argument.abort(run.blocks.flag)

    def close(self) -> None:
        """See `Executor`. Wait for running blocks; after `patience` seconds, interrupt their waits for storage."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            runs = [run for run in self._runs.values() if run.phase is not Phase.ABANDONED]
            left = [run for run in runs if self._abandon_run(run)]
            self._leaving = {run for run in runs if run.is_busy}
            self._runs.clear()
            self._await_threads(self._patience)
            stuck = list(self._leaving)
        for run in stuck:
            run.blocks.abort()
        with self._lock:
            self._await_threads(min(self._patience, 1.0))
            self._changed.notify_all()
        for run in left:
            run.end()
        self._pool.close()

    # -- threads -------------------------------------------------------------------------------------------------

    def _prepare(self, run: CpuRun) -> None:
        error: BaseException | None = None
        try:
            run.begin()
        except BaseException as failure:  # reported to the scheduler
            error = failure
        with self._lock:
            run.error = error
            run.inside = False
            if run.phase is Phase.ABANDONED:
                ends = True
            elif error is not None:
                ends = self._mark_ending(run)
            elif run.leave:
                ends = self._mark_stopped(run)
            else:
                ends = False
                self._start(run)
        if ends:
            self._end(run)

    def _work(self, run: CpuRun, slot: int) -> None:
        ends = False
        has_more = True
        while has_more:
            error: BaseException | None = None
            try:
                run.work(slot)
            except BaseException as failure:  # reported to the scheduler
                error = failure
            with self._lock:
                if error is not None:
                    run.fail(error)
                has_more = run.should_continue(slot)
                if not has_more:
                    run.slots.discard(slot)
                    ends = not run.slots and self._settle(run)
        if ends:
            self._end(run)

    def _end(self, run: CpuRun) -> None:
        """End the arguments, then report the end of the run unless it was abandoned."""
        error = run.end()
        with self._lock:
            run.inside = False
            self._leaving.discard(run)
            self._changed.notify_all()
            if run.phase is Phase.ENDING:
                self._report(Ended(run.job, self.now(), error, run.seconds if error is None else None))

    # -- under the lock; a returned bool is True if the caller must call _end -----------------------------------------

    def _launch_new(self, job: Job, quota: int, plain: bool) -> None:
        task = job.task
        try:
            blocks = task.launch.cut(task.arguments, "cpu")
            if blocks.blocks != task.blocks:
                raise errors.ArgumentError(
                    f"task {task.name!r} has {blocks.blocks} blocks, but was submitted with {task.blocks}"
                )
        except Exception as error:
            self._report(Ended(job, self.now(), error))
            return
        plain = not blocks.preemptible or (plain and not isinstance(task.launch, Batch))
        run = self._runs[job] = CpuRun(job, blocks, quota, plain)
        if run.is_plain:
            self._start(run)
        else:
            run.inside = True
            self._pool.run(lambda: self._prepare(run))

    def _start(self, run: CpuRun) -> None:
        """Start threads that run the blocks, or the unmodified kernel."""
        run.phase = Phase.RUNNING
        run.mark(self.now())
        run.write(TARGET, run.quota)
        self._fill(run)

    def _fill(self, run: CpuRun) -> None:
        """Start a thread in each free slot of the quota while unclaimed blocks remain."""
        unclaimed = (0 if run.slots else 1) if run.is_plain else run.blocks.blocks - run.claimed
        for slot in range(run.quota):
            if unclaimed > 0 and slot not in run.slots:
                self._pool.run(lambda slot=slot: self._work(run, slot))  # type: ignore[misc]
                run.slots.add(slot)
                unclaimed -= 1

    def _settle(self, run: CpuRun) -> bool:
        """Move a run to its next phase after its last thread has left."""
        if run.phase is Phase.ABANDONED:
            return True
        if run.is_over:
            return self._mark_ending(run)
        if run.phase is Phase.STOPPING:
            return self._mark_stopped(run)
        run.fail(
            errors.SchedulerError(
                f"task {run.job.task.name!r} has no worker at block {run.done} of {run.blocks.blocks}: report this",
                task=run.job.task.name,
            )
        )
        return self._mark_ending(run)

    def _mark_stopped(self, run: CpuRun) -> bool:
        run.phase = Phase.STOPPED
        self._report(Stopped(run.job, self.now(), run.done))
        return False

    def _mark_ending(self, run: CpuRun) -> bool:
        # The time of an unmodified kernel may include its compilation.
        if run.phase is Phase.RUNNING and (not run.is_plain or isinstance(run.job.task.launch, Call)):
            run.seconds = self.now() - run.since
        run.phase = Phase.ENDING
        run.inside = True
        return True

    def _abandon_run(self, run: CpuRun) -> bool:
        """Abandon a run unless it is ending. Return True if the caller must end its arguments."""
        run.write(STOP, NEVER)
        if run.phase is not Phase.ENDING:
            run.phase = Phase.ABANDONED
        return not run.is_busy

    def _await_threads(self, seconds: float) -> None:
        """Wait until all threads of abandoned runs have left, for at most `seconds`."""
        until = time.monotonic() + seconds
        while self._leaving and (remaining := until - time.monotonic()) > 0:
            self._changed.wait(remaining)

    def _report(self, event: Ended | Stopped) -> None:
        self._events.append(event)
        self._changed.notify_all()

    def _quota(self, job: Job, workers: int | None) -> int:
        self._check_quota(workers)
        if isinstance(job.task.launch, Batch):
            return 1  # each launch uses the threads of the target
        return self.threads if workers is None else min(workers, self.threads)
