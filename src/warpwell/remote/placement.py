"""`Placements`: chooses a device of a pool for each batch of tasks, and another one when the device is lost."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import closing, errors
from ..pool import CallResult, Code, Device, HostArrays
from ..scheduler import Handle, State, Task
from ..scheduler.handle import Runner
from ..scheduler.tenants import Tenants
from ..targets import CudaSource

MAX_STAGED_SHARE = 0.5
"""Maximum share of a device's memory for the arrays of waiting tasks; further batches wait in this process."""

START_SECONDS = 60.0
"""Time that an agent has to create its scheduler, or to close it."""

CANCEL_SECONDS = 15.0
"""Time that a cancelling close waits for tasks. A device abandons its own tasks after 10 s."""

UNKNOWN_SECONDS = 1e-3
"""Predicted time of a task before any task was measured."""


class PoolHandle(Handle):
    """A `Handle` whose task runs on one device of a pool.

    If the device is lost, a task without buffers or opened arrays among its arguments runs again on another device; the
    `result` of other tasks raises `TaskLostError`. Callbacks run in a thread of the scheduler, so they must not block.

    Attributes
    ----------
    device : Device or None
        The last device of the task, or None until it is placed.
    tries : int
        Number of devices on which the task was placed.
    """

    def __init__(self, placements: Runner, task: Task, number: int) -> None:
        super().__init__(placements, task)
        self.number = number
        self.device: Device | None = None
        self.tries = 0
        self._settled = threading.Lock()

    def settle(self, error: BaseException | None, cancelled: bool = False) -> None:
        """Set the result and notify all waiting threads; only the first call counts."""
        if self._settled.acquire(blocking=False):
            super().settle(error, cancelled)


@dataclass(eq=False)
class Batch:
    """Tasks that are sent to a device together, in order.

    Attributes
    ----------
    name : str
        Name of the request.
    handles : sequence of PoolHandle
    home : Member or None
        The device that holds the buffers, or None without buffers.
    staged : int
        Size in bytes of the arrays of this process that are copied to the device.
    next : Batch or None
        The next batch of the request. Each task with arrays of this process has its own batch, because the next task
        may read its results.
    member : Member or None
        The device on which the batch is placed.
    is_sent : bool
        Whether the device has the tasks. Before that, `Placements` cancels them.
    is_cancelled : bool
        Whether the batch must not be placed again.
    seconds : float
        Predicted time.
    attempt : int
        Number of times that the batch was dispatched.
    arrays : HostArrays or None
    """

    name: str
    handles: Sequence[PoolHandle]
    home: Member | None
    staged: int
    next: Batch | None = None
    member: Member | None = None
    is_sent: bool = False
    is_cancelled: bool = False
    seconds: float = 0.0
    attempt: int = 0
    arrays: HostArrays | None = None

    def __post_init__(self) -> None:
        self.remaining = len(self.handles)  # tasks that have not ended

    @property
    def tenant(self) -> str:
        """The tenant of the tasks."""
        return self.handles[0].task.tenant

    @property
    def memory(self) -> int:
        """The device memory of the largest task, in bytes."""
        return max(h.task.memory for h in self.handles)

    def handles_from(self, first: PoolHandle | None = None) -> list[PoolHandle]:
        """Return the handles of this batch and all later ones, from `first` on."""
        handles: list[PoolHandle] = []
        batch: Batch | None = self
        while batch is not None:
            handles += batch.handles
            batch = batch.next
        return handles if first is None else handles[handles.index(first) :]


class Member:
    """One device of a scheduler of a pool.

    Its thread sends batches to the device and copies results back, so that slow copies of one device do not delay
    another one.

    Parameters
    ----------
    device : Device
    tenants : mapping or iterable, optional
        Settings of tenants, with their memory quotas.
    options : mapping
        Options of the `Scheduler` on the device.

    Attributes
    ----------
    batches : set of Batch
        The batches on the device that have not ended.
    seconds, staged : float, int
        Their predicted time, and the size in bytes of the arrays that are copied for them.
    rates : dict of str to float
        Measured seconds per block of each kernel.
    """

    def __init__(self, device: Device, tenants: Any, options: Mapping[str, Any]) -> None:
        self.device = device
        self.stream = device.stream()
        self.batches: set[Batch] = set()
        self.seconds, self.staged = 0.0, 0
        self._closed = False
        self.rates: dict[str, float] = {}
        self._codes: set[str] = set()
        self._submits = threading.RLock()  # reentrant, because a signal handler may interrupt a submit
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Callable[[BaseException], None]] | None]
        self._calls = queue.SimpleQueue()
        ordinal = int(device.info.get("ordinal", 0))
        self.service = device.create(
            "scheduler", device.target, ordinal, stream=self.stream, tenants=tenants, **options
        )
        self._capacity = self.call("inspect", _capacity_of)
        self._settings = tenants
        self.tenants: Tenants
        self._thread = threading.Thread(target=self._work, name=f"warpwell-pool-{device.index}", daemon=True)

    def call(self, method: str, *args: Any) -> CallResult:
        """Call a method of the device's scheduler asynchronously."""
        result: CallResult = self.service.call(method, *args, stream=self.stream)
        return result

    def start(self) -> None:
        """Wait until the agent has created its scheduler; raise its failure."""
        try:
            self.capacity = self._capacity.get(START_SECONDS)
        except errors.RemoteError as error:
            self._drop_failures()
            raise remote_cause(error, self.device) from error
        self.tenants = Tenants(self.capacity, self._settings)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the agent is not lost."""
        return self.device.lost is None

    def can_run(self, task: Task) -> bool:
        """Return True unless the task is CUDA source and the device is not a GPU."""
        return self.device.target == "cuda" or not isinstance(task.launch.kernel, CudaSource)

    def has_room(self, batch: Batch) -> bool:
        """Return True if the arrays of a batch fit in addition to the arrays of waiting batches."""
        return not self.staged or self.staged + batch.staged <= MAX_STAGED_SHARE * self.capacity.memory

    def exceeds_quota(self, batch: Batch) -> bool:
        """Return True if the batch would wait for its tenant's memory quota."""
        limit = self.tenants.account(batch.tenant).memory
        if limit is None:
            return False
        return sum(b.memory for b in self.batches if b.tenant == batch.tenant) + batch.memory > limit

    def load(self, tenant: str) -> float:
        """Return the predicted seconds until the current tasks end for a tenant, considering its share of the time."""
        share = self.tenants.account(tenant).tenant.share
        if share is None:
            return self.seconds
        return max(self.seconds, sum(b.seconds for b in self.batches if b.tenant == tenant) / share)

    def add_measurement(self, task: Task, seconds: float) -> None:
        """Add the time of a task to the moving average of its kernel."""
        if seconds > 0:
            rate = seconds / task.blocks
            self.rates[task.name] = 0.7 * self.rates.get(task.name, rate) + 0.3 * rate

    def enqueue(self, call: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Run ``call()`` in the member's thread; if it raises, run ``failed(error)``."""
        self._calls.put((call, failed))

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, failed = item
            try:
                try:
                    call()
                except BaseException as error:  # fails one batch; the thread continues with the next
                    failed(error)
            except BaseException:  # no handle is left to raise it
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del item, call, failed

    def request(self, method: str, number: int) -> Any:
        """Call a method of the device's scheduler for a task and return the result. Raises `DeviceLostError`."""
        with self._submits:  # the call must follow the submit
            result = self.call(method, number)
        return result.get()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def send(self, batch: Batch, choose: Callable[[], list[PoolHandle]]) -> list[tuple[PoolHandle, CallResult]]:
        """Send a batch to the device. Return the sent handles, each with the future of its task.

        Parameters
        ----------
        batch : Batch
        choose : callable
            Called after the arrays have arrived; returns the handles to send, without those that were cancelled.

        Raises
        ------
        DeviceLostError
            The device was lost.
        Exception
            An argument cannot be sent.
        """
        if any(hasattr(a, "warpwell_place") for h in batch.handles for a in h.task.arguments):
            self.stream.wait(self.device.default_stream)  # the stream in which buffers were written
        batch.arrays = HostArrays(self.device, self.stream, [a for h in batch.handles for a in h.task.arguments])
        tasks = {h: (h.number, *self._pack(h.task, batch.arrays)) for h in batch.handles}
        with self._submits:
            handles = choose()
            if not handles:
                return []
            packed = [tasks[h] for h in handles]
            results = [self.call("submit", batch.name, packed)]
        self._codes |= {key for _, key, *_ in packed}
        results += [self.call("ended", h.number) for h in handles[1:]]
        return list(zip(handles, results, strict=True))

    def _pack(self, task: Task, arrays: HostArrays) -> tuple[Any, ...]:
        code = Code.of(task.launch.kernel)
        data = None if code.key in self._codes else code.data
        arguments = arrays.replace_arrays(task.arguments)
        return code.key, code.name, data, task.launch.subscript(), arguments, options_of(task)

    def fetch(self, batch: Batch) -> None:
        """Copy a batch's arrays back. No array is modified before all have arrived."""
        for array, values in [] if batch.arrays is None else list(batch.arrays.fetch()):
            np.copyto(array, values)

    def wait_for_end(self, result: CallResult) -> tuple[str, float]:
        """Return "done" or "cancelled" and the run time of a task; raise its error, or `DeviceLostError`."""
        try:
            state, seconds = result.get()
            return state, seconds
        except errors.RemoteError as error:
            self._drop_failures()
            raise remote_cause(error, self.device) from error

    def _drop_failures(self) -> None:
        """Drop failures that handles raise, so that the next synchronization does not raise them again."""
        with contextlib.suppress(errors.WarpwellError):
            self.stream.channel.raise_failures()

    def close(self, cancel: bool) -> None:
        """Close the device's scheduler and stop the thread (idempotent)."""
        if self._closed:
            return
        self._closed = True
        self._calls.put(None)
        if self.is_alive:
            with contextlib.suppress(errors.WarpwellError):  # if it was not created, `start` has raised the error
                self.call("close", cancel).get(START_SECONDS)
            self._drop_failures()
            self.service.free()
            self.stream.close()


class Placements:
    """Decides which device runs which batch.

    A batch is placed on the device that holds its buffers, else on the device with the least predicted load. It waits
    if its arrays do not fit. One lock guards the state; no slow call is made with it.

    Parameters
    ----------
    members : sequence of Member
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._lock = threading.RLock()
        self._waiting: deque[Batch] = deque()
        self._open: dict[PoolHandle, Batch] = {}
        self._numbers = itertools.count(1)
        self._turns = itertools.count(1)
        self._closed = False
        closing.ready()

    # -- for the scheduler and handles -----------------------------------------------------------------------------

    def handle(self, task: Task) -> PoolHandle:
        """Return a handle for a new task."""
        return PoolHandle(self, task, next(self._numbers))

    def submit(self, batches: Sequence[Batch], after: Sequence[Future[Any]]) -> None:
        """Accept the batches of a request, and place them after all futures in `after` have succeeded."""
        with self._lock:
            if self._closed:
                raise errors.ClosedError("the scheduler is closed: create a new one")
            for batch in batches:
                self._open.update(dict.fromkeys(batch.handles, batch))
        for batch, following in itertools.pairwise(batches):
            batch.next = following
        first, pending = batches[0], set(after)

        def released(future: Future[Any]) -> None:
            if future.cancelled() or future.exception() is not None:
                self._settle(first.handles_from(), None, cancelled=True)
                return
            with self._lock:
                pending.discard(future)
                if pending:
                    return
            self.dispatch(first)

        for future in list(pending):
            future.add_done_callback(released)
        if not after:
            self.dispatch(first)

    def cancel(self, handle: PoolHandle) -> bool:
        """Cancel a task and all later tasks of its request; see `Handle.cancel`."""
        with self._lock:
            batch = self._open.get(handle)
            if batch is None:
                return handle.cancelled()
            batch.is_cancelled = True
            member, handles = batch.member if batch.is_sent else None, batch.handles_from(handle)
        if member is None:
            self._settle(handles, None, cancelled=True)
            return True
        try:
            will_end, has_ended = member.request("cancel", handle.number)
        except errors.DeviceLostError:
            return True
        if has_ended:
            self._end(batch, handles, None, cancelled=True)
        return bool(will_end) or handle.cancelled()

    def state_of(self, handle: PoolHandle) -> State:
        """Return the state of a task whose handle is not done."""
        with self._lock:
            batch = self._open.get(handle)
            member = batch.member if batch is not None and batch.is_sent else None
        if member is None:
            return State.WAITING
        try:
            state = member.request("state", handle.number)
        except errors.DeviceLostError:
            return State.WAITING
        # until the results have arrived, a task that has ended on the device is still running for the caller
        ended = state is None or State(state) in (State.DONE, State.FAILED, State.CANCELLED)
        return State.RUNNING if ended else State(state)

    def close(self, cancel: bool) -> None:
        """Refuse new tasks, wait for all tasks or cancel them, and close the devices' schedulers (idempotent)."""
        with self._lock:
            self._closed = True
            handles = list(self._open)
        if cancel:
            for handle in handles:
                handle.cancel()
        wait(handles, CANCEL_SECONDS if cancel else None)
        for handle in list(self._open):
            message = f"task {handle.task.name!r} was still running when the scheduler was closed"
            self._settle([handle], errors.SchedulerError(message, task=handle.task.name))
        for member in self.members:
            member.close(cancel)

    def retire(self) -> None:
        """Close in a thread, after the scheduler was garbage-collected. Safe in a finalizer."""
        closing.hand_over_to_thread(functools.partial(self.close, False), "warpwell-pool-retired")

    # -- placement -------------------------------------------------------------------------------------------------

    def dispatch(self, batch: Batch) -> None:
        """Place a batch on a device, or queue it until its arrays fit."""
        with self._lock:
            batch.member, batch.is_sent = None, False
            batch.attempt += 1
            batch.handles = [h for h in batch.handles if h in self._open]
            batch.remaining = len(batch.handles)
            if not batch.handles:
                return  # cancelled
            candidates = self._candidates(batch)
            with_room = [m for m in candidates if m.has_room(batch)]
            if with_room:
                member = self._assign(batch, with_room)
            elif candidates:
                self._waiting.append(batch)
                return
        if candidates:
            member.enqueue(lambda: self._send(batch, member), lambda error: self._fail(batch, error))
        else:
            self._handle_loss(batch, None)

    def _assign(self, batch: Batch, members: Sequence[Member]) -> Member:
        turn, count = next(self._turns), len(self.members)

        def cost(member: Member) -> tuple[bool, float, int, int]:
            seconds = member.load(batch.tenant) + self._predicted(batch, member)
            order = (self.members.index(member) - turn) % count
            return member.exceeds_quota(batch), seconds, len(member.batches), order

        member = min(members, key=cost)
        batch.seconds = self._predicted(batch, member)
        batch.member = member
        member.batches.add(batch)
        member.seconds += batch.seconds
        member.staged += batch.staged
        for handle in batch.handles:
            handle.device = member.device
            handle.tries += 1
        return member

    def _predicted(self, batch: Batch, member: Member) -> float:
        """Return the solo time of a batch in seconds, from profiles, or as measured on this or another device."""
        seconds = 0.0
        for task in (h.task for h in batch.handles):
            rates = (m.rates[task.name] * task.blocks for m in (member, *self.members) if task.name in m.rates)
            seconds += next(rates, UNKNOWN_SECONDS) if task.profile.seconds is None else task.profile.seconds
        return seconds

    def _send(self, batch: Batch, member: Member) -> None:
        with self._lock:
            if all(h not in self._open for h in batch.handles):
                self._remove(batch)
                return
        try:
            ends = member.send(batch, lambda: self._mark_sent(batch))
        except errors.DeviceLostError as error:
            self._handle_loss(batch, error)
            return
        except Exception as error:  # an argument cannot be sent
            self._end(batch, batch.handles_from(), error)
            return
        for handle, result in ends:
            end = functools.partial(self._handle_end, batch, handle, batch.attempt, result)
            result.when_done(functools.partial(member.enqueue, end, functools.partial(self._fail, batch)))

    def _mark_sent(self, batch: Batch) -> list[PoolHandle]:
        """Return the open handles of a batch and mark it as sent, so that its device cancels its tasks."""
        with self._lock:
            handles = [h for h in batch.handles if h in self._open]
            if handles:
                batch.handles, batch.remaining, batch.is_sent = handles, len(handles), True
            else:
                self._remove(batch)
            return handles

    def _handle_end(self, batch: Batch, handle: PoolHandle, attempt: int, result: CallResult) -> None:
        """Process the end of a task, in the thread of its device."""
        member = batch.member
        if member is None or batch.attempt != attempt or handle not in self._open:
            return  # from a lost device, after the batch was placed on another one
        try:
            state, seconds = member.wait_for_end(result)
            if state == "cancelled":
                self._end(batch, batch.handles_from(handle), None, cancelled=True)
                return
            member.fetch(batch)
        except errors.DeviceLostError as error:
            self._handle_loss(batch, error)
            return
        except BaseException as error:  # raised by the task
            following = batch.handles_from(handle)[1:]
            self._end(batch, [handle], error)
            self._end(batch, following, None, cancelled=True)
            return
        with self._lock:
            member.add_measurement(handle.task, seconds)
        is_last = batch.remaining == 1
        self._end(batch, [handle], None)
        if is_last and batch.next is not None:
            self.dispatch(batch.next)

    def _fail(self, batch: Batch, error: BaseException) -> None:
        """Fail a batch with an unexpected error that was raised while it was sent or fetched."""
        error.add_note(f"while {batch.name!r} was sent to a device of a pool, or fetched")
        handles = batch.handles_from()
        if not any(h in self._open for h in handles):
            raise error  # no handle is left to raise it
        self._end(batch, handles, error)

    def _end(
        self, batch: Batch, handles: Sequence[PoolHandle], error: BaseException | None, *, cancelled: bool = False
    ) -> None:
        with self._lock:
            batch.remaining -= sum(h in self._open for h in handles if h in batch.handles)
            if batch.remaining <= 0:
                self._remove(batch)
        self._settle(handles, error, cancelled=cancelled)

    def _remove(self, batch: Batch) -> None:
        """Remove a batch from its device, and place waiting batches that fit."""
        with self._lock:
            member = batch.member
            if member is None or batch not in member.batches:
                return
            member.batches.discard(batch)
            member.seconds = sum(b.seconds for b in member.batches)
            member.staged -= batch.staged
            batch.arrays = None
        while True:
            with self._lock:
                waiting = self._waiting[0] if self._waiting else None
                candidates = [] if waiting is None else self._candidates(waiting)
                if waiting is None or (candidates and not any(m.has_room(waiting) for m in candidates)):
                    return
                self._waiting.popleft()
            self.dispatch(waiting)

    def _candidates(self, batch: Batch) -> list[Member]:
        tasks = [h.task for h in batch.handles]
        return [m for m in self.members if m.is_alive and batch.home in (None, m) and all(map(m.can_run, tasks))]

    def _handle_loss(self, batch: Batch, error: BaseException | None) -> None:
        """Place a batch of a lost device on another device if it has no buffers; else fail it."""
        with self._lock:
            self._remove(batch)
            can_retry = batch.home is None and not batch.is_cancelled and bool(self._candidates(batch))
        if can_retry:
            self.dispatch(batch)
            return
        if batch.is_cancelled:
            self._settle(batch.handles_from(), None, cancelled=True)
            return
        for handle in batch.handles_from():
            device = batch.home.device if batch.home is not None else handle.device
            reason = (
                "no remaining device can run it" if device is None else f"device {device.index} is gone ({device.lost})"
            )
            if batch.home is not None:
                reason += ", and its arguments with it"
            lost = errors.TaskLostError(f"task {handle.task.name!r} was lost: {reason}", task=handle.task.name)
            lost.__cause__ = error
            self._settle([handle], lost)

    def _settle(self, handles: Sequence[PoolHandle], error: BaseException | None, *, cancelled: bool = False) -> None:
        with self._lock:
            settled = [h for h in handles if self._open.pop(h, None) is not None]
        for handle in settled:
            handle.settle(error, cancelled)


def remote_cause(error: errors.RemoteError, device: Device) -> BaseException:
    """Return the exception that was raised on a device, with a note that names the device."""
    cause = error.__cause__
    if cause is None:
        return error
    cause.add_note(f"on device {device.index} ({device.target} on {device.host}):\n{error.remote_traceback}")
    return cause


def options_of(task: Task) -> dict[str, Any]:
    """Return the options with which `Scheduler.task` creates this task again."""
    options = {name: getattr(task, name) for name in ("name", "tenant", "priority", "deadline", "memory", "size")}
    return {**options, "profile": task.profile if task.profile.source != "unknown" else None}


def _capacity_of(core: Any) -> Any:
    return core.executor.capacity
