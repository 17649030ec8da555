"""`CpuExecutor`: threads of this machine that claim blocks, with true preemption and without a GPU. See `engine`.

A thread that leaves posts an event, and the scheduler's thread starts another thread if the quota has room. A task that
the scheduler has given up (`abandon`, `close`) is ABANDONED: its arguments end when its last thread has left.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import errors
from ..._check import checked_integer, checked_seconds
from ..._os import clock
from ...targets.blocks import CURSOR, DONE, STOP, fresh
from ..batch import Batch
from ..callables import Call, Enqueued
from ..executor import Capacity, Ended, Machine
from ..task import Job, Placement, Task
from .engine import Engine, Phase, Run

THREADS_PER_CORE = 4
"""Default workers of a task per core: more than one, because a thread that waits for storage uses no core."""

HAND_OVER_SECONDS = 2e-4
"""Assumed time from the end of a block to the first block of the next task: waking threads, and a decision."""


class CpuRun(Run):
    """A task on the threads of a `CpuExecutor`.

    Attributes
    ----------
    since : float
        Time of the last launch of its blocks (`warpwell._os.clock`).
    done_at_launch : int
        Completed blocks at that time.
    fields : array of int64 or None
        The control record; None until the run is prepared.
    """

    since = 0.0
    fields: Any = None
    is_unmodified = False
    done_at_launch = 0

    @property
    def has_workers(self) -> bool:
        """Whether threads run the task block by block."""
        return not self.is_unmodified

    @property
    def claimed(self) -> int:
        """Number of blocks that have begun."""
        return 0 if self.fields is None else min(int(self.fields[CURSOR]), self.blocks.blocks)

    def count_blocks(self) -> int:
        """Update `done` and return it. An unmodified launch has completed no blocks until its end."""
        if self.fields is not None:
            self.done = int(self.fields[DONE])
        return self.done

    @property
    def drain_seconds(self) -> float:
        """The mean seconds of the blocks that ended since the launch; if none has ended, the time since the launch."""
        ran = clock.monotonic() - self.since
        ended = self.count_blocks() - self.done_at_launch
        return ran if ended == 0 else ran * max(self.inside, 1) / ended

    def load(self, blocks: Any, threads: int) -> None:
        """Begin the arguments and compile the kernel. An unmodified launch does both itself."""
        task = self.job.task
        if blocks.blocks != task.blocks:
            raise errors.ArgumentError(
                f"task {task.name!r} has {blocks.blocks} blocks, but was submitted with {task.blocks}"
            )
        self.is_unmodified = not blocks.preemptible or (self.placement.plain and not self.is_batch)
        self.resources = {"resident": 1 if self.is_batch or self.is_unmodified else threads}
        if not self.is_unmodified:
            blocks.begin()
        self.since = clock.monotonic()
        self.blocks, self.fields = blocks, np.array(fresh(), np.int64)
        if not self.is_unmodified:
            blocks.prepare()
        elif _needs_compiler(task):
            from ...targets.compiler import compile_launch  # imports the compiler

            blocks.begin()
            try:
                compile_launch(blocks.kernel, blocks.values)
            finally:
                blocks.end()

    def work(self, worker: int) -> BaseException | None:
        """Run blocks until the thread must leave, or the unmodified kernel, which uses more threads; return the error.

        The helper thread of `worker` calls this.
        """
        task = self.job.task
        try:
            if self.is_unmodified:
                task.launch(*task.arguments, device="cpu", flag=self.blocks.flag)
                return None
            self.blocks.work(self.fields.ctypes.data, worker)
            if worker >= self.floor and self.claimed < self.blocks.blocks:
                raise errors.SchedulerError(
                    f"worker {worker} of task {task.name!r} left at block {self.claimed} of {self.blocks.blocks}: "
                    "report this",
                    task=task.name,
                )
        except BaseException as failure:  # the error fails the task
            return failure
        return None


class CpuExecutor(Engine[CpuRun]):
    """Runs kernels on the `cpu` target, block by block, in threads.

    Parameters
    ----------
    threads : int, optional
        Workers of a task without a quota; by default 4 per core.
    patience : float
        Seconds that `close` waits for running blocks.
    """

    _woken = False

    def __init__(self, threads: int | None = None, *, patience: float = 10.0) -> None:
        threads = None if threads is None else checked_integer(threads, "threads")
        patience = checked_seconds(patience, "patience")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads or THREADS_PER_CORE * cores
        processors = min(cores, self.threads)
        capacity = Capacity(
            processors=processors,
            blocks=-(-self.threads // processors),
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )
        super().__init__(capacity, "cpu", HAND_OVER_SECONDS)
        self._patience = patience
        from ...targets.compiler import load_cpu

        load_cpu()
        # Held unless `_watch` must return. Ctrl-C can leave an `Event` in a wrong state, but not this lock.
        self._bell = threading.Lock()
        self._bell.acquire()

    # -- calls of the scheduler ----------------------------------------------------------------------------------

    def keeps(self, array: Any) -> bool:
        """See `Executor`. The memory of the machine already holds all arrays."""
        return True

    def progress(self, job: Job) -> int:
        """See `Executor`. An unmodified launch has completed no blocks until all have completed."""
        self._advance()
        run = self._runs.get(job)
        return job.done if run is None else run.count_blocks()

    def claimed(self, job: Job) -> int:
        """See `Executor`."""
        self._advance()
        run = self._runs.get(job)
        return job.done if run is None else run.claimed

    def wake(self) -> None:
        """See `Executor`."""
        self._woken = True
        self._notify()

    def machine(self) -> Machine:
        """See `Executor`. Memory bandwidth is measured once per process."""
        from ..predict.peaks import host_machine

        return host_machine()

    def abandon(self, job: Job, error: BaseException) -> None:
        """See `Executor`. A thread that never leaves its block is lost and uses a core until the process exits."""
        run = self._running(job)
        if run.phase in (Phase.STOPPED, Phase.ENDING, Phase.ABANDONED):
            return
        self._abandon(run)
        self._events.append(Ended(job, self.now(), error))
        if run.blocks is None:
            return
        active = [peer.blocks for peer in self._runs.values() if peer.phase is not Phase.ABANDONED and peer.blocks]
        shared = {id(argument) for blocks in active for argument in blocks.participants}
        run.blocks.flag.interrupt()  # a loop that checks `failed` exits, so its thread is not lost
        for argument in run.blocks.participants:
            # Interrupt waits for storage, unless another task uses the same array.
            if id(argument) not in shared:
                argument.abort(run.blocks.flag)

    def close(self) -> None:
        """See `Executor`. Wait for running blocks; after `patience` seconds, interrupt their waits for storage."""
        if self._closed:
            return
        self._closed = True
        self._advance()
        runs = [run for run in self._runs.values() if run.phase is not Phase.ABANDONED]
        for run in runs:
            if run.phase is not Phase.ENDING:
                self._abandon(run)
        self._await(runs, self._patience)
        for run in runs:
            if run.inside and run.blocks is not None:
                run.blocks.abort()
        self._await(runs, min(self._patience, 1.0))
        self._runs.clear()
        if self._abandoned:
            self._helpers.run(self._end_abandoned)
        self._helpers.close()

    # -- threads -------------------------------------------------------------------------------------------------

    def _new_run(self, job: Job, placement: Placement) -> CpuRun:
        return CpuRun(job, placement)

    def _at_hand(self, job: Job, placement: Placement) -> bool:
        return isinstance(job.task.launch, Call) or (placement.plain and not _needs_compiler(job.task))

    def _load(self, run: CpuRun) -> None:
        run.load(self._cut(run.job.task), self.threads)

    def _start(self, run: CpuRun) -> None:
        run.phase, run.since, run.done_at_launch = Phase.RUNNING, clock.monotonic(), run.done
        self._grow(run)

    def _grow(self, run: CpuRun) -> None:
        """Start a thread for each free place of the quota while unclaimed blocks remain."""
        for _ in range(min(run.max_workers() - run.inside, run.blocks.blocks - run.claimed)):
            self._in_background(run, functools.partial(CpuRun.work, worker=run.top), self._exited)
            run.top += 1

    def _exited(self, run: CpuRun, error: BaseException | None) -> None:
        """Replace a thread that has left, or end the run if no thread is left."""
        if error is not None:
            run.error = run.error or error
            self._leave(run, run.top)
        elif run.error is None and run.phase is Phase.RUNNING and run.has_workers:
            self._grow(run)
        if run.inside:
            return
        run.done = run.blocks.blocks if run.is_unmodified else run.count_blocks()
        # The time of an unmodified kernel may include its compilation for other types.
        if run.phase is Phase.RUNNING and run.error is None and (run.has_workers or isinstance(run.blocks, Enqueued)):
            run.seconds = clock.monotonic() - run.since
        self._finish_or_continue(run, self.now())

    def _set_stop(self, run: CpuRun) -> None:
        if run.fields is not None:
            run.fields[STOP] = run.floor

    def _abandon(self, run: CpuRun) -> None:
        """Give up a run. Its arguments end when its last thread has left."""
        run.phase = Phase.ABANDONED
        self._leave(run, run.top)
        if run.inside:
            self._abandoned.add(run)
        else:
            self._end(run)

    def _end_abandoned(self) -> None:
        """End the arguments of runs whose threads leave after `close`."""
        while self._abandoned:
            self._watch(self._time() + 10.0)
            self._advance()

    def _await(self, runs: Sequence[CpuRun], seconds: float) -> None:
        """Wait until all threads of runs have left, for at most `seconds`."""
        until = self._time() + seconds
        while any(run.inside for run in runs) and self._time() < until:
            self._watch(until)
            self._advance()

    def _clear_wake(self) -> None:
        self._woken = False

    def _watch(self, until: float) -> None:
        self._bell.acquire(timeout=max(0.0, until - self._time()))

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # already released
            self._bell.release()


def _needs_compiler(task: Task) -> bool:
    """Return True if the unmodified kernel of a task is not compiled; False for functions and batches."""
    is_kernel = not isinstance(task.launch, Call | Batch)
    return is_kernel and ("cpu", len(task.arguments)) not in task.launch.kernel.compiled
