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
- WHOLE: a task that is launched with ``placement.plain``, or that cannot be cut into blocks, has only this phase before
  ENDING. It cannot be preempted or resized.

Flush (idempotent tasks only) is STOPPED at once. No thread can be taken out of a block, so those that have one end it,
and then give up their slots, or go on where the task has been launched again. Nothing is run twice (`Stopped.wasted` is
0), but the task may still write for the time of a block. It ends only when these threads have left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from ... import errors
from ...targets.blocks.launch import STOP, TARGET
from ..executor import Capacity, Ended, Executor, Machine, Stopped
from ..task import Job, Placement
from .cpu_run import Phase, Run
from .threads import Threads

THREADS_PER_CORE = 4
"""Workers of a task, a core, by default: more than one, because a thread that waits for storage costs nothing."""

HAND_OVER = 2e-4
"""Seconds from the end of a block to the first one of the next task: waking threads, and the scheduler's own time."""


class CpuExecutor(Executor):
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

    def __init__(self, threads: int | None = None, *, memory: int | None = None, patience: float = 10.0) -> None:
        threads = None if threads is None else errors.checked_integer(threads, "threads")
        memory = None if memory is None else errors.checked_integer(memory, "memory", least=0)
        patience = errors.checked_seconds(patience, "patience")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads or THREADS_PER_CORE * cores
        processors = min(cores, self.threads)
        self._capacity = Capacity(
            processors=processors,
            blocks=-(-self.threads // processors),
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory is None else memory,
        )
        self._counts_arrays = memory is not None
        self._patience = patience
        self._began = time.perf_counter()
        self._pool = Threads("warpwell-block")
        self._runs: dict[Job, Run] = {}
        self._leaving: set[Run] = set()
        self._events: list[Ended | Stopped] = []
        self._woken = False
        self._closed = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    # -- what the scheduler calls --------------------------------------------------------------------------------

    def keeps(self, array: Any) -> bool:
        """See `Executor`."""
        return not self._counts_arrays

    @property
    def capacity(self) -> Capacity:
        """See `Executor`. A processor is a core, and its `blocks` are threads."""
        return self._capacity

    def launch(self, job: Job, placement: Placement) -> None:
        """See `Executor`. What is wrong with the task itself comes out of `poll`, as its end."""
        quota = self._quota(placement.workers)
        with self._lock:
            if self._closed:
                raise errors.ClosedError("the executor is closed: make another one")
            run = self._runs.get(job)
            if run is None:
                self._launch_new(job, quota, placement.plain)
            elif run.phase is Phase.STOPPED and run.told:
                self._launch_again(run, quota)
            else:
                raise errors.SchedulerError(f"task {job.task.name!r} runs already", task=job.task.name)

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """See `Executor`. "switch" is a drain; for "flush" see the module."""
        if mode not in ("drain", "flush", "switch"):
            raise errors.ArgumentError(f"mode {mode!r} is unknown: choose drain, flush or switch", name="mode")
        with self._lock:
            run = self._running(job)
            run.leave = True
            if run.phase in (Phase.RUNNING, Phase.STOPPING):
                run.phase = Phase.STOPPING
                run.write(STOP, 1)
                if mode == "flush" and job.task.idempotent and not run.over:
                    self._stopped(run)

    def resize(self, job: Job, workers: int | None) -> None:
        """See `Executor`. A task that is leaving, or that runs whole, takes no notice."""
        quota = self._quota(workers)
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
        return HAND_OVER + (run.rest(now) if run.phase is Phase.WHOLE else run.block_seconds(now))

    def poll(self) -> list[Ended | Stopped]:
        """See `Executor`."""
        with self._lock:
            events, self._events = self._events, []
            for event in events:
                if isinstance(event, Ended):
                    self._runs.pop(event.job, None)
                elif event.job in self._runs:
                    self._runs[event.job].told = True
        return events

    def now(self) -> float:
        """See `Executor`."""
        return time.perf_counter() - self._began

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
            left = self._gone(run)
        if left:
            run.end()

    def abandon(self, job: Job, error: BaseException) -> None:
        """See `Executor`. A thread that never leaves its block is lost, and keeps its core until the process ends."""
        with self._lock:
            run = self._running(job)
            if run.phase in (Phase.STOPPED, Phase.ENDING, Phase.GONE):
                return
            left = self._gone(run)
            self._say(Ended(job, self.now(), error))
            going_on = [other for other in self._runs.values() if other.phase is not Phase.GONE]
            others = {id(a) for other in going_on for a in other.blocks.participants}
        run.blocks.flag.interrupt()  # a loop that asks `failed` ends, and its thread is not lost
        for argument in run.blocks.participants:
            # its waits for storage end at once; those of other tasks on the same arrays must not
            if id(argument) not in others:
                argument.abort(run.blocks.flag)
        if left:
            run.end()

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

    def _prepare(self, run: Run) -> None:
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
                run.phase = Phase.RUNNING
                run.mark(self.now())
                run.write(TARGET, run.quota)
                ends = self._fill(run)
        if ends:
            self._end(run)

    def _work(self, run: Run, slot: int) -> None:
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

    def _whole(self, run: Run) -> None:
        try:
            run.run_whole()
        except BaseException as failure:  # told to the scheduler
            run.error = failure
        with self._lock:
            if run.phase is not Phase.GONE:
                self._ending(run)
        self._end(run)

    def _end(self, run: Run) -> None:
        """End the arguments, then say so, unless nobody is to hear of it."""
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
        # here a block is one thread, which no barrier waits for: what runs in slices elsewhere runs by blocks
        whole = plain or not (blocks.preemptible or blocks.sliceable)
        run = self._runs[job] = Run(job, blocks, quota, whole)
        run.mark(self.now())
        self._pool.run((lambda: self._whole(run)) if whole else (lambda: self._prepare(run)))

    def _launch_again(self, run: Run, quota: int) -> None:
        run.quota = quota
        run.leave = False
        run.phase = Phase.RUNNING
        run.mark(self.now())
        if run.over:
            # a flush let threads go that ended the last block, or failed, after it was said to have stopped
            if not run.slots and self._ending(run):
                self._pool.run(lambda: self._end(run))
            return
        run.write(TARGET, quota)
        run.write(STOP, 0)
        self._fill(run)

    def _fill(self, run: Run) -> bool:
        """Give a thread to every free slot of the quota, as far as there are blocks for them."""
        unclaimed = run.blocks.blocks - run.claimed
        for slot in range(run.quota):
            if unclaimed > 0 and slot not in run.slots:
                self._pool.run(lambda slot=slot: self._work(run, slot))  # type: ignore[misc]
                run.slots.add(slot)
                unclaimed -= 1
        return False

    def _settle(self, run: Run) -> bool:
        """The last thread of a run has left: see what that means."""
        if run.phase is Phase.GONE:
            return True
        if run.phase is Phase.STOPPED:  # flushed: all was said
            return False
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

    def _stopped(self, run: Run) -> bool:
        run.phase = Phase.STOPPED
        run.told = False
        self._say(Stopped(run.job, self.now(), run.done))
        return False

    def _ending(self, run: Run) -> bool:
        if run.phase is Phase.RUNNING:
            run.seconds = self.now() - run.since
        run.phase = Phase.ENDING
        run.inside = True
        return True

    def _gone(self, run: Run) -> bool:
        """Say nothing more of a run, but for an end that is under way; return whether the caller must end it."""
        run.write(STOP, 1)
        if run.phase is not Phase.ENDING:
            run.phase = Phase.GONE
        return not run.busy

    def _await(self, seconds: float) -> None:
        """Wait until no thread is inside of a run that nobody asks for any more."""
        until = time.monotonic() + seconds
        while self._leaving and (rest := until - time.monotonic()) > 0:
            self._changed.wait(rest)

    def _say(self, event: Ended | Stopped) -> None:
        self._events.append(event)
        self._changed.notify_all()

    def _running(self, job: Job) -> Run:
        run = self._runs.get(job)
        if run is None or (run.phase is Phase.STOPPED and run.told):
            raise errors.SchedulerError(f"task {job.task.name!r} does not run: launch it first", task=job.task.name)
        return run

    def _quota(self, workers: int | None) -> int:
        if workers is not None and workers < 1:
            raise errors.ArgumentError(f"a quota of {workers} workers: give at least one, or preempt", name="workers")
        return self.threads if workers is None else min(workers, self.threads)
