"""CudaExecutor: kernels that share a GPU, as workers that claim blocks, or whole.

The life of a task, from its first launch to its end. The scheduler's thread does all of it, but for what takes long:
beginning the arguments, compiling, and bringing arrays back happen in a thread beside it. ::

            launch             compiled              no block left, no worker left
    (none) ───────► PREPARING ─────────► RUNNING ─────────────────────────────────► ENDING ──► Ended
                        │                 │   ▲                                       ▲
                        │ preempted       │   │ launch                                │ the same, while it stopped
                        │ meanwhile       ▼   │                                       │
                        └────────────► STOPPING ──────────────────────────────────────┘
                                          │ all workers have left
                                          └──► Stopped

- Workers are launched as blocks of the hardware; they take blocks of the task from a cursor in device memory. A
  preemption sets a flag, which each worker sees before its next claim; the cursor is all that is kept.
- Shrinking raises a number, and workers below it leave: the oldest. Growing waits until as many have left as were to,
  then launches those that are missing: a quota is never exceeded.
- Workers are relieved by raising the number to that of the next worker, and launching others in the same stream, which
  begin as those leave: they are younger than all that was launched meanwhile.
- What runs whole is given to a line (`targets.gpu.lines`), whose thread launches it and notes its end. Several may be
  in one line, one behind the other; what that thread has not launched yet still leaves when it is asked to.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ... import errors
from ...targets.blocks.control import CONTROL_WORDS, CURSOR, DONE, FLOOR, LEFT, STOP, fresh
from ...targets.gpu.gpu import Gpu
from ..executor import Capacity, Ended, Machine, Stopped
from ..predict.peaks import machine_for
from ..task import Job, Placement
from .block_executor import BlockExecutor, Phase
from .cuda_launch import Ahead, Order, Pace
from .cuda_run import CudaRun, lost_with
from .threads import Threads

SHORT = 20e-6
"""Seconds: blocks that are shorter are claimed several at a time, so that a claim costs little (FLEP's L)."""

FLAG = 20e-6
"""Seconds from setting the flag to the last worker seeing it between two blocks (H200, median)."""

SPIN = 2e-3
"""Seconds for which `wait` looks without a pause, while something runs."""

LINGER = 1e-3
"""Seconds for which `wait` is called although nothing runs."""

GATHER = 200e-6
"""Seconds between two returns of `wait`, while lines have ten times as much to do: who waits for a task of a train
hears so much later of its end, and the device is not kept from anything."""

PAUSE, PATIENT = 20e-6, 2e-3
"""Seconds between two looks after that, at the least, and as a part of what has been waited; a millisecond at most."""

LEVELS = 8
"""Priorities of streams, at most."""

RECORDS = 4096
"""Tasks that may have begun and not ended."""


class CudaExecutor(BlockExecutor[CudaRun]):
    """Runs kernels on one GPU.

    Parameters
    ----------
    ordinal : int
        Of the GPU.
    memory : int, optional
        Bytes that tasks may hold together; by default what is free now.
    gpu : Gpu, optional
        In place of a new one; closed with the executor.

    Raises
    ------
    DeviceNotFoundError
    """

    linger = LINGER

    def __init__(self, ordinal: int = 0, *, memory: int | None = None, gpu: Any = None) -> None:
        self._gpu = gpu = Gpu(ordinal) if gpu is None else gpu
        super().__init__(Capacity(
            processors=gpu.processors, registers=gpu.registers, shared=gpu.shared, threads=gpu.threads, blocks=32,
            memory=gpu.free_memory() if memory is None else memory, clock=gpu.clock, modes=("drain",),
        ))  # fmt: skip
        # one block of memory for all: to free memory waits for every kernel that runs
        self._slab = gpu.allocate(8 * CONTROL_WORDS * RECORDS)
        self._records = [self._slab.address + 8 * CONTROL_WORDS * k for k in range(RECORDS)]
        self._helpers = Threads("warpwell-gpu")
        self._finished: list[tuple[CudaRun, BaseException | None]] = []
        self._prepared: list[tuple[CudaRun, BaseException | None]] = []
        self._lock = threading.Lock()
        self._lines = gpu.lines
        self._busy: list[Any] = []
        self._seen = 0
        self._timers: list[tuple[int, int]] = []
        self._looked: dict[CudaRun, None] = {}
        self._told = self._returned = 0.0
        self._lost: BaseException | None = None
        self._thread = -1
        self._ahead = Ahead(gpu, self._begin)
        self._pace = Pace()
        self._order = Order(gpu)

    def keeps(self, array: Any) -> bool:
        """See `Executor`."""
        return hasattr(array, "__cuda_array_interface__") or self._gpu.device != "cuda"

    def now(self) -> float:
        """See `Executor`. No event is told with an earlier time than this."""
        self._told = self._time()
        return self._told

    # -- calls of the scheduler ----------------------------------------------------------------------------------

    def launch(self, job: Job, placement: Placement) -> None:
        """See `Executor`. A kernel is compiled before its first block runs, in a thread beside this one."""
        self._enter()
        asked = self._time()
        self._check_quota(placement.workers)
        run = self._runs.get(job)
        if run is not None and run.alike and self._may_launch_again(run):
            run = None  # what it shared with others says nothing of workers
        if run is None:
            run = self._runs[job] = self._ahead.take(job, placement)
            if run.blocks is not None:
                self._ready(run, None)
            elif self._gpu.at_hand(job.task.launch, job.task.arguments):
                # nothing is copied or compiled: another thread would take longer to wake
                self._ready(run, self._begin(run))
            else:
                self._helpers.run(lambda: self._prepare(run))
                return
        elif self._may_launch_again(run):
            run.placement = placement
            run.leave = False
            self._start(run)
        else:
            raise self._runs_already(job)
        self._pace.launched(asked, self._time())

    def launch_behind(self, job: Job, placement: Placement, other: Job) -> bool:
        """See `Executor`. Nothing may have to be copied or compiled for it."""
        before, run = self._runs.get(other), self._runs.get(job)
        line = None if before is None else before.line
        if line is None or not line.room:
            return False
        if run is None:
            run = self._ahead.take(job, placement)
            if run.blocks is None and not (
                self._gpu.at_hand(job.task.launch, job.task.arguments) and self._begin(run) is None
            ):
                return False  # a failure comes out of its launch
        else:
            run.placement, run.leave = placement, False
        row = run.row
        if row is None:
            if job not in self._runs:
                self._ahead.keep(run)
            return False
        self._runs[job] = run
        run.phase, run.behind = Phase.RUNNING, True
        self._enqueue(run, line, row, None)
        return True

    def launch_train(self, jobs: Sequence[Job], placement: Placement, other: Job) -> int:
        """See `Executor`."""
        before, task = self._runs.get(other), jobs[0].task
        line = None if before is None else before.line
        forms = None if task.pattern is None else task.pattern.forms
        if line is None or forms is None or any([job in self._runs for job in jobs]):
            return super().launch_train(jobs, placement, other)
        jobs = jobs[: line.room]
        runs = [CudaRun(job, placement) for job in jobs]
        blocks = task.launch.cut(task.arguments, self._gpu.device)
        self._gpu.wait_default()  # as `begin` does for each of the others
        first = line.push_alike(forms.plain_row(), task.profile.seconds or 0.0, runs)
        for ticket, run in enumerate(runs, first):
            run.blocks, run.forms, run.line, run.ticket = blocks, forms, line, ticket
            run.phase, run.behind, run.alike = Phase.RUNNING, True, True
        self._ahead.drop(*jobs)
        self._runs.update(zip(jobs, runs, strict=True))
        return len(jobs)

    def words(self, arguments: Sequence[Any]) -> tuple[Any, ...] | None:
        """See `Executor`."""
        words: tuple[Any, ...] | None = self._gpu.words(arguments)
        return words

    def prepare(self, job: Job) -> None:
        """See `Executor`. It is done while `wait` has nothing else to do, where nothing is copied or compiled."""
        pattern = job.task.pattern
        if pattern is None or pattern.forms is None:
            self._ahead.note(job)

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """See `Executor`. Every mode is a drain."""
        self._check_mode(mode)
        run = self._running(job)
        run.leave = True
        if run.phase is not Phase.RUNNING:
            return
        if run.form == "workers":
            run.phase = Phase.STOPPING
            self._gpu.set_word(run.control + 8 * STOP, 1)
        elif run.behind and run.line is not None and run.line.withdraw(run.ticket):
            run.line, run.phase = None, Phase.STOPPED
            self._events.append(Stopped(job, self._time(), 0))

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """See `Executor`. What runs whole takes no notice."""
        self._check_quota(workers)
        run = self._running(job)
        run.placement = replace(run.placement, workers=workers)
        if run.phase is Phase.RUNNING and run.form == "workers":
            run.quota = run.most()
            if younger:
                self._relieve(run)
            elif run.quota < run.target:
                run.target = run.quota
                if run.floor < run.top - run.quota:
                    run.floor = run.top - run.quota
                    self._gpu.set_word(run.control + 8 * FLOOR, run.floor)
            elif run.quota > run.target:
                self._grow(run)

    def progress(self, job: Job) -> int:
        """See `Executor`. What runs whole has ended no block until it has ended all."""
        run = self._runs.get(job)
        if run is not None and run.runs and run.form == "workers":
            words = self._gpu.read_words(run.control, CONTROL_WORDS)
            run.done = min(int(words[DONE]), run.blocks.blocks if run.blocks else 0)
        return job.done if run is None else run.done

    def claimed(self, job: Job) -> int:
        """See `Executor`. What runs whole because it is short has claimed all of its blocks."""
        run = self._runs.get(job)
        if run is None or not run.runs or not (run.short or run.form == "workers"):
            return self.progress(job)
        assert run.blocks is not None
        words = [run.blocks.blocks] if run.form == "plain" else self._gpu.read_words(run.control + 8 * CURSOR, 1)
        return min(int(words[0]), run.blocks.blocks)

    def cost(self, victim: Job, stays: Sequence[Job]) -> float:
        """See `Executor`: the rest of a block, the flag, and, as they were so far, the next decision and launch."""
        run = self._runs.get(victim)
        rest = 0.0
        if run is not None and run.blocks is not None:
            block = run.block_seconds
            rest = block * run.chunk  # the last of all workers
        return rest + FLAG + self._pace.seconds

    def discard(self, job: Job) -> None:
        """See `Executor`."""
        run = self._runs.pop(job, None)
        self._ahead.drop(job)
        if run is not None:
            self._give_record(run)
            self._helpers.run(lambda: self._end(run, report=False))

    def poll(self) -> list[Ended | Stopped]:
        """See `Executor`. What there was to say when the GPU was lost is said first."""
        if self._lost is None or not self._events:
            self._enter()
            self._advance()
        return self._take_events()

    def _advance(self) -> None:
        """Advance every run, and note its events."""
        with self._lock:
            prepared, self._prepared = self._prepared, []
        fault: BaseException | None = None
        try:
            for run, error in prepared:
                self._ready(run, error)
            fault = self._reap()
            for run in list(self._looked):
                self._look(run)
        except errors.DeviceNotFoundError as error:
            fault = error
        with self._lock:
            finished, self._finished = self._finished, []
        for run, failure in finished:
            if self._runs.get(run.job) is run and (fault is None or failure is None):
                self._give_record(run)
                run.done = run.blocks.blocks if run.blocks and failure is None else run.done
                self._events.append(Ended(run.job, self._pace.freed(self._time()), failure, run.seconds))
        if fault is not None:
            self._lose(fault)

    def _reap(self) -> BaseException | None:
        """Note what has ended in lines; return why the GPU is lost, if it is."""
        if self._lines.news == self._seen:
            return None
        self._seen = self._lines.news
        began, told, last = self._began, self._told, None
        for line in list(self._busy):
            for run, status, _, ended in line.reap():
                if status < 0:
                    continue  # it was withdrawn, and may be in another line by now
                run.line = None
                if run.alike and not status:
                    run.phase, last = Phase.ENDING, max(told, ended - began)
                    self._events.append(Ended(run.job, last))
                    continue
                if status:
                    failure = self._gpu.failure(status, run.job.task.name)
                    if not isinstance(failure, errors.ArgumentError):
                        return failure
                    run.error = failure
                    self._finish(run)
                    continue
                if run.pair is not None:
                    run.seconds = self._gpu.between(*run.pair)
                    self._timers.append(run.pair)
                    run.pair = None
                if run.blocks.ends_at_once:
                    run.phase = Phase.ENDING
                    run.done = run.blocks.blocks
                    run.blocks.end()
                    self._give_record(run)
                    self._events.append(Ended(run.job, self._pace.freed(max(told, ended - began)), None, run.seconds))
                else:
                    self._finish(run)
            if line.empty:
                self._busy.remove(line)
                self._lines.give(line)
        if last is not None:
            self._pace.freed(last)
        return None

    def wait(self, until: float | None) -> None:
        """See `Executor`. Ends of kernels that run whole wake it; for the others it looks often."""
        self._enter()
        lines, began = self._lines, self._time()
        if not self._looked and self._busy and min([line.seconds for line in self._busy]) > 10 * GATHER:
            # the device is busy for long: many ends together cost little more than one
            lines.watch(self._seen, 0.0, 0.0, self._began + min(self._returned + GATHER, until or math.inf))
        while not lines.woken:
            if (
                lines.news != self._seen or self._prepared or self._finished
                or any([run.arrived(self._gpu) for run in self._looked])
            ):  # fmt: skip
                self._advance()
            now = self._time()
            if self._events or (until is not None and now >= until) or (until is None and not self._runs):
                break
            if self._ahead.step(self._runs):
                continue
            latest = now + 1.0 if until is None else until
            if not self._looked:
                lines.watch(self._seen, self._began + latest, SPIN)
            elif now - began < SPIN:
                lines.watch(self._seen, 0.0, SPIN)  # a pause of any length takes as long as a short kernel
            else:
                # what takes long may be noticed later: looking takes time, and the lock, from the program's threads
                pause = min(1e-3, max(PAUSE, PATIENT * (now - began)))
                lines.watch(self._seen, self._began + min(latest, now + pause), 0.0)
        lines.rest()
        self._returned = self._time()

    def wake(self) -> None:
        """See `Executor`."""
        self._lines.wake()

    def close(self) -> None:
        """See `Executor`. Workers leave at the end of their blocks; what runs whole is waited for."""
        if self._closed:
            return
        self._closed = True
        if self._lost is None:
            for run in self._runs.values():
                if run.line is not None:
                    run.line.withdraw(run.ticket)
                elif run.control and run.form == "workers":
                    self._gpu.set_word(run.control + 8 * STOP, 1)
                if run.blocks is not None:
                    run.blocks.abort()
        self._lines.close()
        if self._lost is None:
            for run in self._runs.values():
                if run.stream is not None:
                    self._gpu.synchronize(run.stream)
            for line in self._busy:
                self._gpu.synchronize(line.stream)
        for run in self._runs.values():
            self._end(run, report=False)
        self._runs.clear()
        self._helpers.close()
        if self._lost is None:
            self._gpu.close()

    def machine(self) -> Machine:
        """See `Executor`."""
        return machine_for(self._gpu.name, self._gpu.bandwidth)

    def resources(self, job: Job) -> dict[str, int]:
        """Return registers, shared and local bytes, threads and resident blocks of a launched job's form."""
        return dict(self._runs[job].resources)

    # -- phases --------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._require_open()
        if self._lost is not None:
            raise errors.TaskLostError("the GPU is lost: restart the process that owns it") from self._lost
        if self._thread != threading.get_ident():
            self._gpu.enter()
            self._thread = threading.get_ident()

    def _prepare(self, run: CudaRun) -> None:
        """Begin the arguments and compile (a thread of its own)."""
        self._gpu.enter()
        error = self._begin(run)
        with self._lock:
            self._prepared.append((run, error))
        self._lines.nudge()

    def _begin(self, run: CudaRun) -> BaseException | None:
        """Begin the arguments and compile; return what went wrong."""
        try:
            task = run.job.task
            blocks, task.cut = task.cut, None
            if blocks is None or blocks.device != self._gpu.device:
                blocks = task.launch.cut(task.arguments, self._gpu.device)
            blocks.begin()
            run.blocks = blocks
            run.forms = self._gpu.forms(blocks)
            run.forms.prepare()
            run.resources = run.forms.resources(run.form)
        except BaseException as failure:  # the task's own failure, which is its end
            return failure
        return None

    def _ready(self, run: CudaRun, error: BaseException | None) -> None:
        if self._runs.get(run.job) is not run:
            return
        if error is not None:
            run.error = error
            self._finish(run)
            return
        assert run.blocks is not None
        if run.leave and run.form != "plain":
            run.phase = Phase.STOPPED
            self._events.append(Stopped(run.job, self._time(), 0))
        else:
            self._start(run)

    def _start(self, run: CudaRun) -> None:
        """Launch a task from its first block that has not been claimed."""
        blocks, placement = run.blocks, run.placement
        assert blocks is not None
        run.phase = Phase.RUNNING
        row = run.row
        line = None if row is None else self._lines.take(max(0, min(placement.priority, LEVELS)))
        run.behind = False
        if line is not None:
            self._busy.append(line)
            self._order.keep(run, line.stream, self._time())
            self._enqueue(run, line, row, self._timer() if run.timed else None)
            return
        if not run.control:
            run.control = self._records.pop(0)  # not the last one: a stream may still wait for a word in it
        run.stream = self._gpu.stream(placement.priority)
        self._looked[run] = None
        self._order.keep(run, run.stream, self._time())
        if run.form == "plain":
            run.begins(self._gpu)
            run.forms.start_plain(run.stream)
            run.events = [run.mark(self._gpu)]
            return
        seconds = run.block_seconds
        run.chunk = max(1, min(16, int(SHORT / seconds))) if seconds else 1
        run.quota = run.most()
        run.target = run.quota
        run.launched, run.floor = 0, run.top
        words = fresh(run.done, run.floor)
        self._gpu.set_words(run.stream, run.control, words if run.top == 0 else words[:DONE])
        run.begins(self._gpu)
        self._work(run, run.done)

    def _enqueue(self, run: CudaRun, line: Any, row: Any, timer: tuple[int, int] | None) -> None:
        """Give a run to a line."""
        run.line, run.pair = line, timer
        task = run.job.task
        run.ticket = line.push(row, task.profile.seconds or 0.0, run, timer or (0, 0))
        if task.pattern is not None and task.pattern.forms is None and getattr(run.forms, "lasting", False):
            task.pattern.forms = run.forms

    def _timer(self) -> tuple[int, int]:
        """Return two events with times."""
        return self._timers.pop() if self._timers else (self._gpu.new_event(True), self._gpu.new_event(True))

    def _work(self, run: CudaRun, claimed: int) -> None:
        """Launch workers as the placement says, behind all that the run's stream has; `claimed` blocks are not left."""
        assert run.blocks is not None
        run.start_workers(min(run.quota, -(-(run.blocks.blocks - claimed) // run.chunk)), run.stream)
        run.events = [*run.events, run.mark(self._gpu)]

    def _relieve(self, run: CudaRun) -> None:
        """Make all workers leave at the end of their blocks, and those that the placement wants now come after them."""
        assert run.blocks is not None
        while run.events and self._gpu.done(run.events[0]):
            run.last = run.events.pop(0)
        run.target, run.base, run.launched, run.floor = run.quota, run.top, 0, run.top
        self._gpu.set_word(run.control + 8 * FLOOR, run.floor)
        if run.side is not None:
            for event in run.events:
                self._gpu.after(run.stream, event)
        claimed = int(self._gpu.read_words(run.control + 8 * CURSOR, 1)[0])
        if claimed < run.blocks.blocks:
            self._work(run, claimed)
        elif not run.events:  # it has ended since it was polled: something must still say so
            run.events = [run.mark(self._gpu)]

    def _look(self, run: CudaRun) -> None:
        """Read the progress of a run, and act on it."""
        if not all(self._gpu.done(event) for event in run.events):
            if run.phase is Phase.RUNNING and run.form == "workers" and run.quota > run.target:
                self._grow(run)
            return
        blocks = run.blocks
        if run.form == "plain":
            self._finish(run)
            return
        assert blocks is not None
        words = self._gpu.read_words(run.control, CONTROL_WORDS)
        run.base = int(words[LEFT])
        run.done = min(int(words[CURSOR]), blocks.blocks)
        if run.done >= blocks.blocks:
            self._finish(run)
        elif run.phase is Phase.STOPPING:
            self._leave(run)
        else:  # all left because the quota shrank at the very end of the others' blocks
            self._release(run)
            self._start(run)

    def _grow(self, run: CudaRun) -> None:
        """Launch the workers that a larger quota wants, once those that were to leave have left."""
        assert run.blocks is not None
        leaving = run.launched - (run.top - run.floor)
        # fewer than none have left where those that were relieved have not
        gone = int(self._gpu.read_words(run.control, CONTROL_WORDS)[LEFT]) - run.base
        if gone < leaving:
            return
        run.base += leaving
        run.launched -= leaving
        missing = min(run.quota, run.blocks.blocks) - run.launched
        if run.side is None:
            run.side = self._gpu.stream(run.placement.priority)
        run.target = run.quota
        if missing > 0:
            run.start_workers(missing, run.side)
        run.events = [*run.events, self._gpu.mark(run.side)]

    def _leave(self, run: CudaRun) -> None:
        self._release(run)
        run.phase = Phase.STOPPED
        self._events.append(Stopped(run.job, self._pace.freed(self._time()), run.done))

    def _finish(self, run: CudaRun) -> None:
        run.ends(self._gpu)
        self._release(run)
        run.phase = Phase.ENDING
        if run.blocks is not None and run.blocks.ends_at_once:
            self._end(run)
        else:
            self._helpers.run(lambda: self._end(run))

    def _release(self, run: CudaRun) -> None:
        self._looked.pop(run, None)
        run.events = []
        run.launched = 0
        for stream in (run.stream, run.side):
            if stream is not None:
                self._gpu.release(stream)
        run.stream = run.side = None

    def _end(self, run: CudaRun, report: bool = True) -> None:
        """Bring arrays back and end the arguments (a thread of its own)."""
        error = run.error
        try:
            self._gpu.enter()
            if run.blocks is not None:
                run.blocks.end()
        except BaseException as failure:  # what device code latched is the task's failure
            error = error or failure
        if report:
            with self._lock:
                self._finished.append((run, error))
            self._lines.nudge()

    def _give_record(self, run: CudaRun) -> None:
        if run.control:
            self._records.append(run.control)
            run.control = 0

    def _lose(self, error: BaseException) -> None:
        """Give every run up: after a fault no kernel runs in this process any more."""
        self._lost = error
        self._events = lost_with(error, self._runs.values(), self._events, self._time())
        told = {event.job for event in self._events}
        self._runs = {job: run for job, run in self._runs.items() if job in told}
        self._looked.clear()
        self._lines.stop()
