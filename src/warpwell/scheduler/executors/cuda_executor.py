"""CudaExecutor: kernels that share a GPU, as workers that claim blocks, or unmodified. See `engine`.

The scheduler's thread runs all steps except the slow ones.

- A launch is pushed to a queue (`launch_queues.py`). The queues' native thread launches the kernel and records its end.
  A queue may
  hold several tasks: the GPU begins the next one without the host.
- Workers are launched as blocks of the hardware. Growing launches the missing workers in another queue, in which the
  GPU waits until all leaving workers have left.
- A re-issue is a preemption and new workers in the same queue, which start when the old ones leave: they are younger
  than all launches in between.
- `STOP` may reach workers before they have started. If this happened to all workers of a run again and again, the
  run would never end. So the executor postpones the run's growth, and does not re-issue the run, until it has claimed a
  block.
- Tasks that are queued after workers must start after the youngest of them. So before more workers are launched, these
  tasks are withdrawn, and launched again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

from ... import errors
from ...targets.blocks import BEGUN, CURSOR, LEFT, NEVER, STOP
from ..batch import Batch
from ..executor import Capacity, Ended, Machine, Stopped
from ..predict.peaks import machine_for
from ..task import Job, Placement
from .cuda_launch import Ahead, Order, Records
from .cuda_run import CudaRun, PreparedForms, lost_with
from .engine import Engine, Phase
from .gpu import Gpu
from .launch_queues import NOTHING, SLOTS, LaunchQueue

INITIAL_LAUNCH_SECONDS = 300e-6
"""Assumed time of a launch until one has been measured."""

CHUNK_BELOW_SECONDS = 20e-6
"""Below this time, a worker claims several blocks at once, so that a claim costs little (FLEP's L)."""

STOP_FLAG_SECONDS = 20e-6
"""Time from setting the stop flag until the last worker reads it between two blocks (H200, median)."""

SPIN_SECONDS = 2e-3
"""Spin time of `wait` while tasks run."""

LINGER_SECONDS = 1e-3
"""Time for which `wait` is still called after the last task has ended."""

COALESCE_SECONDS = 200e-6
"""Minimum time between two returns of `wait` while queues have ten times as much work. This delays reports of ends of
queued tasks, but the device does not idle."""

MIN_IDLE_RATIO = 2.0
"""The same minimum, as a multiple of the scheduler's time since the last return. If Python is slow, other threads need
the interpreter, too."""

POSTPONED_SECONDS = 1e-3
"""Interval at which `wait` retries the growth of runs that was postponed."""

MIN_FREE_ROWS = 64
"""Minimum number of free rows of a queue in which workers are re-issued."""

MAX_STREAM_PRIORITY = 8
"""Highest priority of a stream."""


class CudaExecutor(Engine[CudaRun]):
    """Runs kernels on one GPU.

    Parameters
    ----------
    ordinal : int
        Number of the GPU.
    gpu : Gpu, optional
        The GPU to use; the executor closes it. By default, the executor opens a new `Gpu`.

    Raises
    ------
    DeviceNotFoundError
    """

    linger = LINGER_SECONDS
    stop_seconds = STOP_FLAG_SECONDS

    def __init__(self, ordinal: int = 0, *, gpu: Any = None) -> None:
        self._gpu = gpu = Gpu(ordinal) if gpu is None else gpu
        capacity = Capacity(
            processors=gpu.processors,
            registers=gpu.registers,
            shared=gpu.shared,
            threads=gpu.threads,
            blocks=32,
            memory=gpu.memory_info()[0],
            clock=gpu.clock,
            modes=("drain",),
        )
        super().__init__(capacity, gpu.device, INITIAL_LAUNCH_SECONDS)
        self._records = Records(gpu)
        self._queues = gpu.launch_queues
        self._busy: list[Any] = []
        self._postponed: set[CudaRun] = set()
        self._seen_news = 0
        self._timers: list[tuple[int, int]] = []
        self._reported_time = self._returned = 0.0
        self._lost: BaseException | None = None
        self._thread = -1
        self._ahead = Ahead(gpu, self._begin)
        self._order = Order(gpu)

    def keeps(self, array: Any) -> bool:
        """See `Executor`."""
        return hasattr(array, "__cuda_array_interface__") or self._gpu.device != "cuda"

    def now(self) -> float:
        """See `Executor`. No later event has an earlier time than this."""
        self._reported_time = self._time()
        return self._reported_time

    # -- calls of the scheduler ----------------------------------------------------------------------------------

    def launch_behind(self, job: Job, placement: Placement, predecessor: Job) -> bool:
        """See `Executor`. Returns False if the launch needs copies or compilation."""
        self._check_quota(placement.workers)
        before, run = self._runs.get(predecessor), self._runs.get(job)
        queue = None if before is None else before.queue
        if before is None or queue is None or not queue.room:
            return False
        if before.is_batch or isinstance(job.task.launch, Batch):
            return False  # a batch pushes more launches to its queue later
        if run is None:
            run = self._ahead.take(job, placement)
            if run.blocks is None and not (self._at_hand(job, placement) and self._begin(run) is None):
                return False  # the launch will report the failure
        else:
            run.placement, run.leave = placement, False
        if before.phase is Phase.STOPPING and not before.is_queued:  # the job gets the room of each worker that leaves
            self._runs[job] = run
            run.after = before
            self._start(run)
            return True
        workers = run.form == "workers"
        row = self._workers_row(run) if workers else run.row
        if row is None:
            if job not in self._runs:
                self._release(run)
                self._ahead.keep(run)
            return False
        self._runs[job] = run
        run.phase, run.behind = Phase.RUNNING, True
        if before.count or before.after:  # workers may be in several queues; only the rows of one queue end in order
            run.after = before
        self._push(run, queue, row, workers)
        return True

    def completes_on_device(self, job: Job) -> bool:
        """See `Executor`. Arrays of the host are copied back after the kernel has ended."""
        run = self._runs.get(job)
        return run is not None and run.blocks is not None and run.blocks.ends_at_once

    def prepare(self, job: Job) -> None:
        """See `Executor`. `wait` prepares the launch when it is idle, if nothing is copied or compiled."""
        self._ahead.note(job)

    def progress(self, job: Job) -> int:
        """See `Executor`. An unmodified launch has completed no blocks until all have completed."""
        run = self._runs.get(job)
        if run is not None and run.runs and run.count:
            run.done = max(run.done, self._records.progress(run.control))
        return job.done if run is None else run.done

    def claimed(self, job: Job) -> int:
        """See `Executor`. A launch that is unmodified because it is short has claimed all its blocks."""
        run = self._runs.get(job)
        if run is None or not run.runs or not (run.short or run.count):
            return self.progress(job)
        cursor = [run.blocks.blocks] if not run.count else self._gpu.read_words(run.control + 8 * CURSOR, 1)
        return min(int(cursor[0]), int(run.blocks.blocks))

    def discard(self, job: Job) -> None:
        """See `Executor`."""
        run = self._runs.pop(job, None)
        self._ahead.drop(job)
        if run is not None:
            self._release(run)
            self._in_background(run, self._end, lambda run, error: None)

    def poll(self) -> list[Ended | Stopped]:
        """See `Executor`. Events from before the loss of the GPU are returned first."""
        if self._lost is None or not self._events:
            self._enter()
            self._advance()
        return self._take_events()

    def _advance(self) -> None:
        if not self._posts and not self._postponed and self._queues.news == self._seen_news:
            return
        try:
            fault = self._poll_queues()
            if fault is None:
                super()._advance()
                self._grow_postponed()
        except errors.DeviceNotFoundError as error:
            fault = error
        if fault is not None:
            # Tasks that have ended stay ended. Other outcomes may be results of the loss.
            posts = [post for post in self._posts if post[0].phase is Phase.ENDING and post[1] is None]
            self._posts.clear()
            for run, _, then in posts:
                then(run, None)
            self._lose(fault)

    def _poll_queues(self) -> BaseException | None:
        """Record the kernels that have ended in queues; return the error if the GPU is lost."""
        if self._queues.news == self._seen_news:
            return None
        self._seen_news = self._queues.news
        began, min_time = self._began, self._reported_time
        for queue in list(self._busy):
            for run, status, _, ended in queue.poll_completions():
                if isinstance(run, list):
                    self._release_records(run)
                    continue
                if run.queue is queue and queue.polled > run.ticket:
                    run.queue = None
                if status < 0:
                    continue  # the run was withdrawn, and may already be in another queue
                run.rows -= 1
                if run.is_batch and not status:
                    run.done += 1
                    if run.rows <= SLOTS // 2:
                        self._fill_batch(run, queue)
                if status:
                    failure = self._gpu.failure(status, run.job.task.name)
                    if not isinstance(failure, errors.ArgumentError):
                        return failure
                    run.error = failure
                    if run.is_batch:
                        self._withdraw_batch(run)
                    if run.count:  # other streams may wait for the run's workers to start or to leave
                        self._leave(run, run.top)
                        for word in (BEGUN, LEFT):
                            self._gpu.set_word(run.control + 8 * word, NEVER)
                if not run.rows:
                    self._finish_or_continue(run, max(min_time, ended - began))
            if queue.empty:
                self._busy.remove(queue)
                self._queues.put(queue)
        return None

    def _release_records(self, runs: list[CudaRun]) -> None:
        """Return records to the pool if a stream has stopped waiting for them and their runs have ended."""
        for run in runs:
            run.pending_waits -= 1
            if run.gave and not run.pending_waits:
                self._records.put(run.gave)

    def _finish_or_continue(self, run: CudaRun, time: float) -> None:
        """Continue or finish a run that has no launches left."""
        if run.after is not None and run.after.runs:
            return  # this run is reported after that run
        then = self._leave_order(run)
        blocks = run.blocks
        pair, run.pair = run.pair, None
        if pair is not None:
            if run.error is None and len(run.launch_rows) == 1:  # else workers were launched more than once
                run.seconds = self._gpu.between(*pair)
            self._timers.append(pair)
        run.launch_rows = []
        if not run.is_batch:
            run.done = blocks.blocks
        if run.error is None and run.count and run.floor == run.top:  # all workers had to leave
            run.exited = run.top
            run.done = min(int(self._gpu.read_words(run.control + 8 * CURSOR, 1)[0]), blocks.blocks)
        super()._finish_or_continue(run, time)
        self._report_ended(then, time)

    def _leave_order(self, run: CudaRun) -> list[CudaRun]:
        """Return the runs that come after a run. From now on, they come after the predecessor of that run."""
        then = [other for other in self._runs.values() if other.after is run]
        for other in then:
            other.after = run.after
        run.after = None
        return then

    def _report_ended(self, runs: Sequence[CudaRun], time: float) -> None:
        """Report the runs that have no launches left, and that ended before a run that must be reported first."""
        for run in runs:
            if run.runs and not run.rows:
                self._finish_or_continue(run, time)

    def wait(self, until: float | None) -> None:
        """See `Executor`. Ends wake it."""
        self._enter()
        queues = self._queues
        left = min([queue.seconds for queue in self._busy], default=0.0)
        if left > 10 * COALESCE_SECONDS:
            # The device is busy for long: handling many ends together costs little more than handling one end.
            now = self._time()
            idle = min(MIN_IDLE_RATIO * (now - self._returned), left / 10)
            soonest = max(self._returned + COALESCE_SECONDS, now + idle)
            queues.watch(self._seen_news, 0.0, 0.0, self._began + min(soonest, math.inf if until is None else until))
        super().wait(until)
        self._returned = self._time()

    def wake(self) -> None:
        """See `Executor`."""
        self._queues.wake()

    def close(self) -> None:
        """See `Executor`. Workers leave at the end of their blocks. Waits for unmodified launches."""
        if self._closed:
            return
        self._closed = True
        if self._lost is None:
            for run in self._runs.values():
                if run.behind:
                    self._withdraw(run)
                if run.control:
                    # All workers leave, and no stream waits for a launch that was withdrawn.
                    for word in (STOP, BEGUN, LEFT):
                        self._gpu.set_word(run.control + 8 * word, NEVER)
                if run.blocks is not None:
                    run.blocks.abort()
        self._queues.close()
        if self._lost is None:
            for queue in self._busy:
                self._gpu.synchronize(queue.stream)
        for run in self._runs.values():
            self._end(run)
        self._runs.clear()
        self._helpers.close()
        if self._lost is None:
            self._gpu.close()

    def machine(self) -> Machine:
        """See `Executor`."""
        return machine_for(self._gpu.name, self._gpu.bandwidth)

    # -- phases --------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        super()._enter()
        if self._lost is not None:
            raise errors.TaskLostError("the GPU is lost: restart the process that owns the GPU") from self._lost
        if self._thread != threading.get_ident():
            self._gpu.enter()
            self._thread = threading.get_ident()

    def _new_run(self, job: Job, placement: Placement) -> CudaRun:
        return self._ahead.take(job, placement)

    def _enter_helper(self) -> None:
        self._gpu.enter()

    def _at_hand(self, job: Job, placement: Placement) -> bool:
        task = job.task
        if isinstance(task.launch, Batch) or (task.prepared is not None and task.prepared.forms is not None):
            return True
        return bool(self._gpu.at_hand(task.launch, task.arguments))

    def _load(self, run: CudaRun) -> None:
        task = run.job.task
        if task.prepared is not None and task.prepared.forms is not None:
            task.cut = None
            self._gpu.wait_default()  # `begin` of arguments does the same
            run.blocks, run.forms = task.prepared.forms, task.prepared.forms.forms
        else:
            blocks = self._cut(task)
            blocks.begin()
            run.blocks = blocks
            run.forms = blocks.forms_of(self._gpu) if run.is_batch else self._gpu.forms(blocks)
        run.resources = run.forms.resources(run.form)

    def _stop(self, run: CudaRun) -> None:
        if run.is_batch:
            self._withdraw_batch(run)
            if not run.rows:
                self._finish_or_continue(run, self._time())
        elif run.behind and self._withdraw(run) and not run.rows:
            run.queue = None
            time = self._time()
            if 0 < run.count < run.top - run.exited and self.claimed(run.job) > run.done:  # from an earlier launch
                run.phase = Phase.STOPPING
                self._finish_or_continue(run, time)
            else:
                run.phase, run.exited = Phase.STOPPED, run.top
                then = self._leave_order(run)
                self._events.append(Stopped(run.job, time, run.done))
                self._report_ended(then, time)
        else:
            super()._stop(run)

    def _change_quota(self, run: CudaRun, younger: bool) -> None:
        grows = run.max_workers() > run.top - run.floor
        if self._is_followed(run):
            younger = False  # an unmodified kernel that is queued on the GPU would start before the new workers
        if (younger or grows) and not self._may_launch_more(run):
            if grows:
                return
            younger = False  # the run's youngest workers have not started
        if younger or (grows and run.is_queued):
            self._reissue(run)
        else:
            super()._change_quota(run, younger)

    def _may_launch_more(self, run: CudaRun) -> bool:
        """Return True if a run may launch more workers; if not, postpone its growth unless all blocks are claimed.

        It may if workers of the previous check remain, or if the run has claimed blocks since that check.
        """
        if run.floor <= run.settled:
            return True
        claimed = self.claimed(run.job)
        if claimed == run.blocks.blocks:
            return False
        if claimed == run.claims:
            self._postponed.add(run)
            return False
        run.claims, run.settled = claimed, run.top
        return True

    def _grow_postponed(self) -> None:
        """Retry the growth of runs, except of queued runs, which have to wait for their predecessors."""
        runs, self._postponed = self._postponed, set()
        for run in runs:
            if run.phase is Phase.RUNNING and run.rows and run.has_workers:
                if run.is_queued:
                    self._postponed.add(run)
                else:
                    self._change_quota(run, False)

    def _start(self, run: CudaRun) -> None:
        """Launch a task from its first block that has not been claimed."""
        run.phase = Phase.RUNNING
        run.behind = False
        queue = self._take_queue(run)
        if queue is None:
            queue = max(self._busy, key=lambda queue: queue.room)
        else:
            self._order.keep(run, queue.stream, self._time())
        if run.is_batch:
            run.next_launch = run.done
            self._fill_batch(run, queue)
            return
        workers, pair = run.form == "workers", self._timer() if run.timed else None
        timer = pair
        row = self._workers_row(run) if workers else run.row
        if row is None:  # the arguments do not fit into 64-bit fields, or the task is not a kernel
            if pair is not None:
                self._gpu.record(pair[0], queue.stream)
                timer = (0, pair[1])
            if workers:
                run.forms.start(run.control, run.top, run.next_workers, queue.stream, run.chunk)
            else:
                run.forms.start_plain(queue.stream)
            row = NOTHING
        self._push(run, queue, row, workers, timer)
        run.pair = pair
        self._order.began(run, self._time())

    def _take_queue(self, run: CudaRun) -> LaunchQueue | None:
        """Return an empty queue of the run's priority; None if no queue is free."""
        queue: LaunchQueue | None = self._queues.take(max(0, min(run.placement.priority, MAX_STREAM_PRIORITY)))
        if queue is not None:
            self._busy.append(queue)
        return queue

    def _push(
        self, run: CudaRun, queue: LaunchQueue, row: Any, workers: bool, timer: tuple[int, int] | None = None
    ) -> None:
        """Push a run to a queue: `next_workers` workers, or the unmodified kernel."""
        task = run.job.task
        if not run.rows:
            run.pair, run.launch_rows = None, []
        run.count = run.next_workers if workers else 0
        # Workers are not held back, so that their followers start without the host.
        expected = 0.0 if workers else task.profile.seconds or 0.0
        run.ticket = queue.push(row, expected, run, timer or (0, 0))
        run.queue = queue
        run.rows += 1
        run.launch_rows.append(row)
        run.top += run.count
        if run.rows == 1:
            run.settled = run.top
        if task.prepared is not None and task.prepared.forms is None and getattr(run.forms, "lasting", False):
            task.prepared.forms = PreparedForms(run.forms, run.blocks)

    def _fill_batch(self, run: CudaRun, queue: LaunchQueue) -> None:
        """Push launches of a batch to a queue until the queue is full."""
        task, forms = run.job.task, run.forms
        expected = (task.profile.seconds or 0.0) / task.blocks
        max_rows = SLOTS if forms.can_withdraw else 2
        while run.phase is Phase.RUNNING and run.next_launch < task.blocks and queue.room > 0 and run.rows < max_rows:
            position = forms.order[run.next_launch]
            row = forms.rows[position]
            if row is None:
                forms.forms[position].start_plain(queue.stream)
                row = NOTHING
            run.ticket = queue.push(row, expected, run)
            run.queue = queue
            run.rows += 1
            run.next_launch += 1

    @staticmethod
    def _withdraw_batch(run: CudaRun) -> None:
        """Withdraw the launches of a batch that are not on the GPU."""
        run.phase = Phase.STOPPING
        while run.rows and run.forms.can_withdraw and run.queue is not None and run.queue.withdraw(run.ticket):
            run.rows -= 1
            run.ticket -= 1
            run.next_launch -= 1

    def _timer(self) -> tuple[int, int]:
        """Return two events with times."""
        if self._timers:
            return self._timers.pop()
        first, last = self._gpu.new_events(2, timing=True)
        return first, last

    def _workers_row(self, run: CudaRun, count: int | None = None) -> Any:
        """Return the row that launches `count` workers, by default the quota, and set `next_workers`.

        None if the kernel's arguments do not fit into 64-bit fields.
        """
        if not run.control:
            run.control = self._records.take(run.blocks.blocks)
        seconds = run.block_seconds
        run.chunk = max(1, min(16, int(CHUNK_BELOW_SECONDS / seconds))) if seconds else 1
        needed = -(-(run.blocks.blocks - run.done) // run.chunk)
        run.next_workers = max(1, min(run.max_workers() if count is None else count, needed))
        return run.forms.workers_row(run.control, run.top, run.next_workers, run.chunk)

    def _grow(self, run: CudaRun) -> None:
        """Launch the missing workers of a larger quota."""
        now = run.top - run.floor
        missing = min(run.max_workers(), run.blocks.blocks) - now
        if missing > 0:
            queue = self._next_queue(run)
            if queue is not None:
                self._launch_more(run, self._workers_row(run, missing), queue, run.floor)

    def _reissue(self, run: CudaRun) -> None:
        """Make all workers leave at the end of their blocks, and launch a quota of new workers after them."""
        row, queue = self._workers_row(run), run.queue
        # In the same queue they start in order. In another queue they wait until the old workers have left.
        same = row is not None and queue is not None and (run.rows == 1 or run.is_queued)
        same = same and queue.room > MIN_FREE_ROWS + len(self._followers(run))
        if not same:
            queue = self._next_queue(run)
        if queue is not None:
            self._launch_more(run, row, queue, run.top)

    def _next_queue(self, run: CudaRun) -> LaunchQueue | None:
        """Return an empty queue for more workers of a run; None if no queue is free or launches are held back.

        Streams may share a hardware queue, in which a wait delays all later launches. So a stream may wait only for
        earlier launches. Without a queue, the growth of the run is postponed.
        """
        queue = self._take_queue(run) if run.is_launched() else None
        if queue is None:
            self._postponed.add(run)
        return queue

    def _launch_more(self, run: CudaRun, row: Any, queue: LaunchQueue, floor: int) -> None:
        """Launch more workers when the workers below `floor` have left. Queued followers come after the new workers."""
        own = queue is not run.queue
        again: list[CudaRun] = []
        watched: list[CudaRun] = []
        for follower in reversed(self._followers(run)):  # the last first, so that no follower overtakes another
            if self._withdraw(follower) or follower.count:
                again.append(follower)
            if follower.count and follower.rows:
                self._leave(follower, follower.top)
        if floor > run.floor:
            self._leave(run, floor)
        if own:
            if floor > run.exited:
                self._gpu.wait_word(queue.stream, run.control + 8 * LEFT, floor - run.never)
            for follower in again:
                if follower.rows and follower.count:  # they stay queued, and must not run with the new workers
                    self._gpu.wait_word(queue.stream, follower.control + 8 * STOP, follower.floor)
                    watched.append(follower)
        if row is None:
            run.forms.start(run.control, run.top, run.next_workers, queue.stream, run.chunk)
            row = NOTHING
        self._push(run, queue, row, True)
        if watched and queue.room > len(again):
            for follower in watched:  # the runs may end before the stream reads their records
                follower.pending_waits += 1
            queue.push(NOTHING, 0.0, watched)
        for follower in reversed(again):
            workers = bool(follower.count)
            self._push(follower, queue, self._workers_row(follower) if workers else follower.row, workers)

    def _followers(self, run: CudaRun) -> list[CudaRun]:
        """Return the runs that are queued after a run in its queue, in order."""
        if run.queue is None:
            return []
        followers = [
            follower
            for follower in self._runs.values()
            if follower.queue is run.queue and follower.ticket > run.ticket and follower.phase is Phase.RUNNING
        ]
        return sorted(followers, key=lambda follower: follower.ticket)

    def _is_followed(self, run: CudaRun) -> bool:
        """Return True if an unmodified kernel is queued after a run and cannot be withdrawn."""
        return any(
            not follower.count and not follower.queue.withdrawable(follower.ticket) for follower in self._followers(run)
        )

    def _withdraw(self, run: CudaRun) -> bool:
        """Withdraw the last launch of a run from its queue, if it was not launched."""
        if run.queue is None or not run.queue.withdraw(run.ticket):
            return False
        run.rows -= 1
        if run.count:  # no worker has these numbers: without other workers, all below `top` have left
            run.never += run.count
            run.floor = run.top
        return True

    def _set_stop(self, run: CudaRun) -> None:
        self._gpu.set_word(run.control + 8 * STOP, run.floor)

    def _release(self, run: CudaRun) -> None:
        if run.control:
            if run.pending_waits:
                run.gave = run.control  # a stream may still read the record
            else:
                self._records.put(run.control)
            run.control = 0

    @property
    def _woken(self) -> bool:
        return bool(self._queues.woken)

    def _clear_wake(self) -> None:
        self._queues.clear_wake()

    def _watch(self, until: float) -> None:
        if any(not run.is_queued for run in self._postponed):
            until = min(until, self._time() + POSTPONED_SECONDS)
        self._queues.watch(self._seen_news, self._began + until, SPIN_SECONDS)

    def _notify(self) -> None:
        self._queues.nudge()

    def _prepare_ahead(self) -> bool:
        return self._ahead.step(self._runs) or self._records.step()

    def _lose(self, error: BaseException) -> None:
        """End every run with an error: after a fault, this process cannot run kernels."""
        self._lost = error
        self._events = lost_with(error, self._runs.values(), self._events, self._time())
        reported = {event.job for event in self._events}
        self._runs = {job: run for job, run in self._runs.items() if job in reported}
        self._queues.stop()
