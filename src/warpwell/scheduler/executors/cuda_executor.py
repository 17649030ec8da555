"""CudaExecutor: kernels that share a GPU, as workers that claim blocks, or whole.

The life of a task, from its first launch to its end. The scheduler's thread runs all steps except the slow ones: a
second thread prepares the arguments, compiles, and copies arrays back. ::

            launch             compiled              no block left, no worker left
    (none) ───────► PREPARING ─────────► RUNNING ─────────────────────────────────► ENDING ──► Ended
                        │                 │   ▲                                       ▲
                        │ preempted       │   │ launch                                │ the same, while it stopped
                        │ meanwhile       ▼   │                                       │
                        └────────────► STOPPING ──────────────────────────────────────┘
                                          │ all workers have left
                                          └──► Stopped

- A launch is pushed to a line (`lines.py`). The thread of the lines launches it and records its end. A line may hold
  several tasks: the GPU begins the next one without the host.
- Workers are launched as blocks of the hardware; they take blocks of the task from a cursor in device memory, which is
  all that is kept. Each looks at a number before it claims a block, and leaves if its own is below: a preemption sets
  it to that of the next worker. What was launched again has larger numbers.
- Shrinking raises the number by as many as are to leave: the oldest. Growing launches those that are missing in another
  line, which the GPU holds up until those that were to leave have left: a quota is never exceeded.
- A re-issue is a preemption and new workers in the same line, which start as the old ones leave: they are younger than
  all that was launched in between.
- Tasks that are behind workers must come behind the youngest of them. So where workers are launched, those behind leave
  first, and are launched once more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ... import errors
from ..._check import checked_nbytes
from ..._os import Threads
from ...targets.blocks import BEGUN, CURSOR, LEFT, NEVER, STOP, BlockLaunch
from ..batch import Batch
from ..executor import Capacity, Ended, Machine, Stopped
from ..predict.peaks import machine_for
from ..task import Job, Placement
from .block_executor import BlockExecutor, Phase
from .cuda_launch import Ahead, Order, Pace, Records
from .cuda_run import CudaRun, Kept, lost_with
from .gpu import Gpu
from .lines import NOTHING, SLOTS, Line

SHORT = 20e-6
"""Seconds: blocks that are shorter are claimed several at a time, so that a claim costs little (FLEP's L)."""

FLAG = 20e-6
"""Seconds from setting the flag to the last worker seeing it between two blocks (H200, median)."""

SPIN = 2e-3
"""Spin time of `wait` in seconds, while something runs."""

LINGER = 1e-3
"""Seconds for which `wait` is called although nothing runs."""

GATHER = 200e-6
"""Seconds between two returns of `wait`, while lines have ten times as much to do: who waits for a task of a train
hears so much later of its end, and the device is not kept from anything."""

REST = 2.0
"""The same, in times of what the scheduler did since the last one: where Python is slow, other threads want it, too."""

SOME = 64
"""Minimum number of free rows of a line in which workers are re-issued."""

LEVELS = 8
"""Priorities of streams, at most."""


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

    def __init__(self, ordinal: int = 0, *, memory: int | str | None = None, gpu: Any = None) -> None:
        self._gpu = gpu = Gpu(ordinal) if gpu is None else gpu
        super().__init__(
            Capacity(
                processors=gpu.processors,
                registers=gpu.registers,
                shared=gpu.shared,
                threads=gpu.threads,
                blocks=32,
                memory=gpu.memory_info()[0] if memory is None else checked_nbytes(memory, "memory", minimum=0),
                clock=gpu.clock,
                modes=("drain",),
            )
        )
        self._records = Records(gpu)
        self._helpers = Threads("warpwell-gpu")
        self._finished: list[tuple[CudaRun, BaseException | None]] = []
        self._prepared: list[tuple[CudaRun, BaseException | None]] = []
        self._lock = threading.Lock()
        self._lines = gpu.lines
        self._busy: list[Any] = []
        self._seen = 0
        self._timers: list[tuple[int, int]] = []
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
        if run is None:
            run = self._runs[job] = self._ahead.take(job, placement)
            if run.blocks is not None:
                self._ready(run, None)
            elif self._at_hand(job):
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
        self._check_quota(placement.workers)
        before, run = self._runs.get(other), self._runs.get(job)
        line = None if before is None else before.line
        if before is None or line is None or not line.room:
            return False
        if before.is_batch or isinstance(job.task.launch, Batch):
            return False  # a batch gives its line more launches later
        if run is None:
            run = self._ahead.take(job, placement)
            if run.blocks is None and not (self._at_hand(job) and self._begin(run) is None):
                return False  # a failure comes out of its launch
        else:
            run.placement, run.leave = placement, False
        if before.phase is Phase.STOPPING and not before.waits:  # the room of each worker that leaves is its own
            self._runs[job] = run
            run.comes_after(before)
            self._start(run)
            return True
        workers = run.form == "workers"
        row = self._workers_row(run) if workers else run.row
        if row is None:
            if job not in self._runs:
                self._give_record(run)
                self._ahead.keep(run)
            return False
        self._runs[job] = run
        run.phase, run.behind = Phase.RUNNING, True
        if before.count or before.after:  # workers may be in several lines; the rows of one line end in order
            run.comes_after(before)
        self._push(run, line, row, workers)
        return True

    def prepare(self, job: Job) -> None:
        """See `Executor`. It is done while `wait` has nothing else to do, where nothing is copied or compiled."""
        self._ahead.note(job)

    def preempt(self, job: Job, mode: str = "drain") -> None:
        """See `Executor`. Every mode is a drain."""
        self._check_mode(mode)
        run = self._running(job)
        run.leave = True
        if run.phase is not Phase.RUNNING:
            return
        if run.is_batch:
            self._withdraw_batch(run)
            if not run.rows:
                self._left(run, self._time())
            return
        if run.behind and self._withdraw(run) and not run.rows:
            run.line = None
            time = self._time()
            if 0 < run.count < run.top - run.gone and self.claimed(job) > run.done:  # by workers of an earlier launch
                run.phase = Phase.STOPPING
                self._left(run, time)
            else:
                run.phase, run.gone = Phase.STOPPED, run.top
                then = run.leaves_order()
                self._events.append(Stopped(job, time, run.done))
                self._report_ended(then, time)
            return
        if run.count:
            run.phase = Phase.STOPPING
            self._leave(run, run.top)

    def resize(self, job: Job, workers: int | None, younger: bool = False) -> None:
        """See `Executor`. What runs whole takes no notice."""
        self._check_quota(workers)
        run = self._running(job)
        run.placement = replace(run.placement, workers=workers)
        if run.phase is Phase.RUNNING and run.count:
            quota, now = run.most(), run.top - run.floor
            if self._is_followed(run):
                younger = False  # an unmodified kernel that is queued on the GPU would start before the new workers
            if younger or (quota > now and run.waits):
                self._reissue(run)
            elif quota < now:
                self._leave(run, run.top - quota)
            else:
                self._grow(run)

    def progress(self, job: Job) -> int:
        """See `Executor`. What runs whole has ended no block until it has ended all."""
        run = self._runs.get(job)
        if run is not None and run.runs and run.count:
            run.done = max(run.done, self._records.progress(run.control))
        return job.done if run is None else run.done

    def claimed(self, job: Job) -> int:
        """See `Executor`. What runs whole because it is short has claimed all of its blocks."""
        run = self._runs.get(job)
        if run is None or not run.runs or not (run.short or run.count):
            return self.progress(job)
        assert run.blocks is not None
        words = [run.blocks.blocks] if not run.count else self._gpu.read_words(run.control + 8 * CURSOR, 1)
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
            self._helpers.run(lambda: self._end(run))

    def poll(self) -> list[Ended | Stopped]:
        """See `Executor`. What there was to say when the GPU was lost is said first."""
        if self._lost is None or not self._events:
            self._enter()
            self._advance()
        return self._take_events()

    def _advance(self) -> None:
        """Advance every run, and note its events."""
        if not (self._prepared or self._finished) and self._lines.news == self._seen:
            return
        with self._lock:
            prepared, self._prepared = self._prepared, []
        fault: BaseException | None = None
        try:
            for run, error in prepared:
                self._ready(run, error)
            fault = self._reap()
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
        began, told = self._began, self._told
        for line in list(self._busy):
            for run, status, _, ended in line.reap():
                if isinstance(run, list):
                    self._release_records(run)
                    continue
                if run.line is line and line.told > run.ticket:
                    run.line = None
                if status < 0:
                    continue  # it was withdrawn, and may be in another line by now
                run.rows -= 1
                if run.is_batch and not status:
                    run.done += 1
                    if run.rows <= SLOTS // 2:
                        self._fill_batch(run, line)
                if status:
                    failure = self._gpu.failure(status, run.job.task.name)
                    if not isinstance(failure, errors.ArgumentError):
                        return failure
                    run.error = failure
                    if run.is_batch:
                        self._withdraw_batch(run)
                    if run.count:  # others may wait for them to begin or to leave
                        self._leave(run, run.top)
                        for word in (BEGUN, LEFT):
                            self._gpu.set_word(run.control + 8 * word, NEVER)
                if not run.rows:
                    self._left(run, max(told, ended - began))
            if line.empty:
                self._busy.remove(line)
                self._lines.give(line)
        return None

    def _release_records(self, runs: list[CudaRun]) -> None:
        """Give back the records that a stream has stopped waiting for, if their runs have ended."""
        for run in runs:
            run.pending_waits -= 1
            if run.gave and not run.pending_waits:
                self._records.give(run.gave)

    def _left(self, run: CudaRun, time: float) -> None:
        """Act on that nothing of a run is on the GPU any more."""
        if run.after is not None and run.after.runs:
            return  # it is told behind that one
        then = run.leaves_order()
        blocks = run.blocks
        assert blocks is not None
        run.kept = []
        pair, run.pair = run.pair, None
        if pair is not None:
            if run.error is None and not run.several:
                run.seconds = self._gpu.between(*pair)
            self._timers.append(pair)
        if not run.is_batch:
            run.done = blocks.blocks
        if run.error is None and run.count and run.floor == run.top:  # all were to leave, blocks left or none
            run.gone = run.top
            run.done = min(int(self._gpu.read_words(run.control + 8 * CURSOR, 1)[0]), blocks.blocks)
        if run.done < blocks.blocks and run.error is None:
            run.seconds = None
            if run.phase is Phase.STOPPING:
                run.phase = Phase.STOPPED
                self._events.append(Stopped(run.job, self._pace.freed(time), run.done))
            else:  # the launch of their replacements failed
                self._start(run)
        else:
            self._finish(run, time)
        self._report_ended(then, time)

    def _report_ended(self, runs: Sequence[CudaRun], time: float) -> None:
        """Report the runs of which nothing is on the GPU any more: they ended before a run that they came after."""
        for run in runs:
            if run.runs and not run.rows:
                self._left(run, time)

    def wait(self, until: float | None) -> None:
        """See `Executor`. Ends wake it."""
        self._enter()
        lines = self._lines
        left = min([line.seconds for line in self._busy], default=0.0)
        if left > 10 * GATHER:
            # the device is busy for long: many ends together cost little more than one
            now = self._time()
            soonest = max(self._returned + GATHER, now + min(REST * (now - self._returned), left / 10))
            lines.watch(self._seen, 0.0, 0.0, self._began + min(soonest, until or math.inf))
        while not lines.woken:
            self._advance()
            now = self._time()
            if self._events or (until is not None and now >= until) or (until is None and not self._runs):
                break
            if self._ahead.step(self._runs) or self._records.step():
                continue
            latest = now + 1.0 if until is None else until
            lines.watch(self._seen, self._began + latest, SPIN)
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
                if run.behind:
                    self._withdraw(run)
                if run.control:
                    # workers leave, those that have not begun too; and nobody waits for what is not launched any more
                    for word in (STOP, BEGUN, LEFT):
                        self._gpu.set_word(run.control + 8 * word, NEVER)
                if run.blocks is not None:
                    run.blocks.abort()
        self._lines.close()
        if self._lost is None:
            for line in self._busy:
                self._gpu.synchronize(line.stream)
        for run in self._runs.values():
            self._end(run)
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

    def _at_hand(self, job: Job) -> bool:
        """Tell whether `_begin` copies nothing and compiles nothing."""
        task = job.task
        if isinstance(task.launch, Batch) or (task.prepared is not None and task.prepared.forms is not None):
            return True
        return bool(self._gpu.at_hand(task.launch, task.arguments))

    def _begin(self, run: CudaRun) -> BaseException | None:
        """Begin the arguments and compile; return what went wrong."""
        try:
            task = run.job.task
            kept = None if task.prepared is None else task.prepared.forms
            blocks, task.cut = task.cut, None
            if kept is not None:
                self._gpu.wait_default()  # as where arguments begin
                run.blocks, run.forms = kept, kept.forms
            else:
                if blocks is None or blocks.device != self._gpu.device:
                    blocks = task.launch.cut(task.arguments, self._gpu.device)
                blocks.begin()
                run.blocks = blocks
                run.forms = blocks.forms_of(self._gpu) if run.is_batch else self._gpu.forms(blocks)
            run.resources = run.forms.resources(run.form)
        except BaseException as failure:  # the task's own failure, which is its end
            return failure
        return None

    def _ready(self, run: CudaRun, error: BaseException | None) -> None:
        if self._runs.get(run.job) is not run:
            return
        if error is not None:
            run.error = error
            self._finish(run, self._time())
            return
        assert run.blocks is not None
        if run.leave and run.form != "plain":
            run.phase = Phase.STOPPED
            self._events.append(Stopped(run.job, self._time(), 0))
        else:
            self._start(run)

    def _start(self, run: CudaRun) -> None:
        """Launch a task from its first block that has not been claimed."""
        assert run.blocks is not None
        run.phase = Phase.RUNNING
        run.behind = run.several = False
        line, own = self._line(run.placement.priority)
        if own:
            self._order.keep(run, line.stream, self._time())
        if run.is_batch:
            run.next_launch = run.done
            self._fill_batch(run, line)
            return
        workers, pair = run.form == "workers", self._timer() if run.timed else None
        timer = pair
        row = self._workers_row(run) if workers else run.row
        if row is None:  # its arguments are no words, or it is no kernel
            if pair is not None:
                self._gpu.record(pair[0], line.stream)
                timer = (0, pair[1])
            if workers:
                run.forms.start(run.control, run.top, run.wanted, line.stream, run.chunk)
            else:
                run.forms.start_plain(line.stream)
            row = NOTHING
        self._push(run, line, row, workers, timer)
        run.pair = pair
        self._order.began(run, self._time())

    def _line(self, priority: float) -> tuple[Line, bool]:
        """Return a line, and whether it is empty: where all are busy, one of them."""
        line = self._lines.take(max(0, min(priority, LEVELS)))
        if line is None:
            return max(self._busy, key=lambda line: line.room), False
        self._busy.append(line)
        return line, True

    def _push(self, run: CudaRun, line: Line, row: Any, workers: bool, timer: tuple[int, int] | None = None) -> None:
        """Give a run to a line: workers, as `wanted` says, or the kernel as it is."""
        task = run.job.task
        if run.rows:
            run.several = True
        else:
            run.pair, run.kept = None, []
        run.count = run.wanted if workers else 0
        # workers are not held back, so that their followers need no host
        expected = 0.0 if workers else task.profile.seconds or 0.0
        run.ticket = line.push(row, expected, run, timer or (0, 0))
        run.line = line
        run.rows += 1
        run.kept.append(row)
        run.top += run.count
        if task.prepared is not None and task.prepared.forms is None and getattr(run.forms, "lasting", False):
            assert isinstance(run.blocks, BlockLaunch)
            task.prepared.forms = Kept(run.forms, run.blocks)

    def _fill_batch(self, run: CudaRun, line: Line) -> None:
        """Give a line more launches of a batch, as many as it takes."""
        task, forms = run.job.task, run.forms
        expected = (task.profile.seconds or 0.0) / task.blocks
        most = SLOTS if forms.can_withdraw else 2
        while run.phase is Phase.RUNNING and run.next_launch < task.blocks and line.room > 0 and run.rows < most:
            position = forms.order[run.next_launch]
            row = forms.rows[position]
            if row is None:
                forms.forms[position].start_plain(line.stream)
                row = NOTHING
            run.ticket = line.push(row, expected, run)
            run.line = line
            run.rows += 1
            run.next_launch += 1

    @staticmethod
    def _withdraw_batch(run: CudaRun) -> None:
        """Withdraw the launches of a batch that are not on the GPU."""
        run.phase = Phase.STOPPING
        while run.rows and run.forms.can_withdraw and run.line is not None and run.line.withdraw(run.ticket):
            run.rows -= 1
            run.ticket -= 1
            run.next_launch -= 1

    def _timer(self) -> tuple[int, int]:
        """Return two events with times."""
        return self._timers.pop() if self._timers else (self._gpu.new_event(True), self._gpu.new_event(True))

    def _workers_row(self, run: CudaRun, count: int | None = None) -> Any:
        """Return what launches so many workers, by default as many as the placement says, and set `wanted`.

        None where the kernel's arguments are no words.
        """
        assert run.blocks is not None
        if not run.control:
            run.control = self._records.take(run.blocks.blocks)
        seconds = run.block_seconds
        run.chunk = max(1, min(16, int(SHORT / seconds))) if seconds else 1
        needed = -(-(run.blocks.blocks - run.done) // run.chunk)
        run.wanted = max(1, min(run.most() if count is None else count, needed))
        return run.forms.workers_row(run.control, run.top, run.wanted, run.chunk)

    def _grow(self, run: CudaRun) -> None:
        """Launch the workers that a larger quota wants."""
        assert run.blocks is not None
        now = run.top - run.floor
        missing = min(run.most(), run.blocks.blocks) - now
        if missing > 0:
            line = self._next_line(run)
            if line is not None:
                self._launch_more(run, self._workers_row(run, missing), line, run.floor)

    def _reissue(self, run: CudaRun) -> None:
        """Make all workers leave at the end of their blocks, and those that the placement wants now come after them."""
        row, line = self._workers_row(run), run.line
        # of one line they come one behind the other; else they wait for the others to have left
        same = row is not None and line is not None and (run.rows == 1 or run.waits)
        same = same and line.room > SOME + len(self._behind(run))
        if not same:
            line = self._next_line(run)
        if line is not None:
            self._launch_more(run, row, line, run.top)

    def _next_line(self, run: CudaRun) -> Line | None:
        """Return an empty line for more workers of a run; None where there is none, or launches are held back.

        Streams may share a queue of the GPU. So one may wait only for what was launched before: what is launched behind
        a wait may come behind it.
        """
        line = self._lines.take(max(0, min(run.placement.priority, LEVELS))) if run.is_launched() else None
        if line is not None:
            self._busy.append(line)
        return line

    def _launch_more(self, run: CudaRun, row: Any, line: Line, floor: int) -> None:
        """Launch more workers when those below a number, which must leave, have left; followers come behind them."""
        own = line is not run.line
        again: list[CudaRun] = []
        watched: list[CudaRun] = []
        for its in reversed(self._behind(run)):  # the last one first: none is to begin in the place of one before it
            if self._withdraw(its) or its.count:
                again.append(its)
            if its.count and its.rows:
                self._leave(its, its.top)
        if floor > run.floor:
            self._leave(run, floor)
        if own:
            if floor > run.gone:
                self._gpu.wait_word(line.stream, run.control + 8 * LEFT, floor - run.never)
            for its in again:
                if its.rows and its.count:  # they stay in their line, and are not to run beside those that come
                    self._gpu.wait_word(line.stream, its.control + 8 * STOP, its.floor)
                    watched.append(its)
        if row is None:
            run.forms.start(run.control, run.top, run.wanted, line.stream, run.chunk)
            row = NOTHING
        self._push(run, line, row, True)
        if watched and line.room > len(again):
            for its in watched:  # they may end before the stream has read their records
                its.pending_waits += 1
            line.push(NOTHING, 0.0, watched)
        for its in reversed(again):
            workers = bool(its.count)
            self._push(its, line, self._workers_row(its) if workers else its.row, workers)

    def _behind(self, run: CudaRun) -> list[CudaRun]:
        """Return the runs that are behind one in its line, in order."""
        if run.line is None:
            return []
        found = [
            its
            for its in self._runs.values()
            if its.line is run.line and its.ticket > run.ticket and its.phase is Phase.RUNNING
        ]
        return sorted(found, key=lambda its: its.ticket)

    def _is_followed(self, run: CudaRun) -> bool:
        """Return whether a kernel that runs whole is behind a run, and cannot be withdrawn."""
        return any(not its.count and not its.line.withdrawable(its.ticket) for its in self._behind(run))

    def _withdraw(self, run: CudaRun) -> bool:
        """Withdraw the last launch of a run from its line, if it was not launched."""
        if run.line is None or not run.line.withdraw(run.ticket):
            return False
        run.rows -= 1
        if run.count:  # nobody has their numbers: for those who have none but these, all below the next have left
            run.never += run.count
            run.floor = run.top
        return True

    def _leave(self, run: CudaRun, floor: int) -> None:
        """Make workers below a number leave at the end of their blocks."""
        run.floor = max(run.floor, floor)
        self._gpu.set_word(run.control + 8 * STOP, run.floor)

    def _finish(self, run: CudaRun, time: float) -> None:
        """End a task of which nothing is on the GPU any more since `time`."""
        run.phase = Phase.ENDING
        if run.blocks is None or run.blocks.ends_at_once:
            error = self._end(run)
            self._give_record(run)
            self._events.append(Ended(run.job, self._pace.freed(time), error, run.seconds))
        else:
            self._helpers.run(lambda: self._bring_back(run))

    def _bring_back(self, run: CudaRun) -> None:
        """Bring arrays back and end the arguments (a thread of its own)."""
        self._gpu.enter()
        error = self._end(run)
        with self._lock:
            self._finished.append((run, error))
        self._lines.nudge()

    @staticmethod
    def _end(run: CudaRun) -> BaseException | None:
        """End the arguments; return the task's failure."""
        error = run.error
        try:
            if run.blocks is not None:
                run.blocks.end()
        except BaseException as failure:  # what device code latched is the task's failure
            error = error or failure
        return error

    def _give_record(self, run: CudaRun) -> None:
        if run.control:
            if run.pending_waits:
                run.gave = run.control  # a stream may still read it
            else:
                self._records.give(run.control)
            run.control = 0

    def _lose(self, error: BaseException) -> None:
        """Give every run up: after a fault no kernel runs in this process any more."""
        self._lost = error
        self._events = lost_with(error, self._runs.values(), self._events, self._time())
        told = {event.job for event in self._events}
        self._runs = {job: run for job, run in self._runs.items() if job in told}
        self._lines.stop()
