"""`Placements`: chooses a device of a pool for each batch of tasks, and another one when the device is lost."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import closing, errors
from .._os import uninterrupted
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
        self.staged = 0
        self.device: Device | None = None
        self.tries = 0


@dataclass(eq=False)
class Chain:
    """The tasks of a request, which run in order.

    They are sent to a device together. If any of them has arrays of this process, they are sent one by one, because the
    next task may read what the previous one has copied back.

    Attributes
    ----------
    name : str
        Name of the request.
    handles : dict of PoolHandle to None
        The tasks that have not ended, in order.
    home : Member or None
        The device that holds the buffers, or None without buffers.
    batch : dict of PoolHandle to None
        The tasks that are placed together now and have not ended, in order.
    member : Member or None
        The device of the batch.
    staged : int
        Size in bytes of the arrays that are copied for the batch.
    seconds : float
        Predicted time of the batch.
    is_sent : bool
        Whether the device has the batch. Before that, `Placements` cancels its tasks.
    is_cancelled : bool
        Whether the batch must not be placed again.
    arrays : HostArrays or None
    """

    name: str
    handles: dict[PoolHandle, None]
    home: Member | None
    batch: dict[PoolHandle, None] = field(default_factory=dict)
    member: Member | None = None
    staged: int = 0
    seconds: float = 0.0
    is_sent: bool = False
    is_cancelled: bool = False
    arrays: HostArrays | None = None

    def __post_init__(self) -> None:
        self.tenant = next(iter(self.handles)).task.tenant
        self._is_staged = any(h.staged for h in self.handles)

    @property
    def memory(self) -> int:
        """The device memory of the largest task of the batch, in bytes."""
        return max((h.task.memory for h in self.batch), default=0)

    def next_batch(self) -> None:
        """Put the tasks that are sent next into the batch."""
        self.batch = dict.fromkeys(itertools.islice(self.handles, 1 if self._is_staged else None))
        self.staged = sum(h.staged for h in self.batch)
        self.member, self.is_sent = None, False

    def following(self, handle: PoolHandle) -> list[PoolHandle]:
        """Return a task and all later ones."""
        return list(itertools.dropwhile(lambda h: h is not handle, list(self.handles)))


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
    chains : set of Chain
        The chains whose batch is on the device.
    seconds, staged : float, int
        Their predicted time, and the size in bytes of the arrays that are copied for them.
    rates : dict of str to float
        Measured seconds per block of each kernel.
    """

    def __init__(self, device: Device, tenants: Any, options: Mapping[str, Any]) -> None:
        self.device = device
        self.stream = device.stream()
        self.chains: set[Chain] = set()
        self.seconds, self.staged = 0.0, 0
        self._closed = False
        self.rates: dict[str, float] = {}
        self._submits = threading.RLock()  # reentrant, because a signal handler may interrupt a submit
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        ordinal = int(device.info.get("ordinal", 0))
        options = {"stream": self.stream, "tenants": tenants, **options}
        self.service = device.create("scheduler", device.target, ordinal, **options)
        self._capacity = self.call("inspect", lambda core: core.executor.capacity)
        self._settings = tenants
        self.tenants: Tenants
        self._thread = threading.Thread(target=self._work, name=f"warpwell-pool-{device.index}", daemon=True)

    def call(self, method: str, *args: Any) -> CallResult:
        """Call a method of the device's scheduler asynchronously."""
        return self.service.call(method, *args, stream=self.stream)  # type: ignore[no-any-return]

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

    def has_room(self, chain: Chain) -> bool:
        """Return True if the arrays of a batch fit in addition to the arrays of waiting batches."""
        return not self.staged or self.staged + chain.staged <= MAX_STAGED_SHARE * self.capacity.memory

    def exceeds_quota(self, chain: Chain) -> bool:
        """Return True if the batch would wait for its tenant's memory quota."""
        limit = self.tenants.account(chain.tenant).memory
        if limit is None:
            return False
        return sum(c.memory for c in self.chains if c.tenant == chain.tenant) + chain.memory > limit

    def load(self, tenant: str) -> float:
        """Return the predicted seconds until the current tasks end for a tenant, considering its share of the time."""
        share = self.tenants.account(tenant).tenant.share
        if share is None:
            return self.seconds
        return max(self.seconds, sum(c.seconds for c in self.chains if c.tenant == tenant) / share)

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

    def send(self, chain: Chain, choose: Callable[[], list[PoolHandle]]) -> list[tuple[PoolHandle, CallResult]]:
        """Send the batch of a chain to the device. Return the sent handles, each with the future of its task.

        Parameters
        ----------
        chain : Chain
        choose : callable
            Called after the arrays have arrived; returns the handles to send, without those that were cancelled.

        Raises
        ------
        DeviceLostError
            The device was lost.
        Exception
            An argument cannot be sent.
        """
        batch = list(chain.batch)
        arguments = [a for h in batch for a in h.task.arguments]
        if any(hasattr(a, "warpwell_place") for a in arguments):
            self.stream.wait(self.device.default_stream)  # the stream in which buffers were written
        chain.arrays = arrays = HostArrays(self.device, self.stream, arguments)
        tasks = {}
        for handle in batch:
            task, launch = handle.task, handle.task.launch
            code, values = Code.of(launch.kernel), arrays.replace_arrays(task.arguments)
            tasks[handle] = handle.number, code, launch.subscript(), values, options_of(task)
        with self._submits:
            handles = choose()
            if not handles:
                return []
            results = [self.call("submit", chain.name, [tasks[h] for h in handles])]
        results += [self.call("ended", h.number) for h in handles[1:]]
        return list(zip(handles, results, strict=True))

    def fetch(self, chain: Chain) -> None:
        """Copy the arrays of a batch back. No array is modified before all have arrived."""
        for array, values in [] if chain.arrays is None else list(chain.arrays.fetch()):
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
    """Decides which device runs which tasks.

    A batch is placed on the device that holds its buffers, else on the device with the least predicted load. It waits
    if its arrays do not fit. One lock guards the state; no slow call is made with it.

    Parameters
    ----------
    members : sequence of Member
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._lock = threading.RLock()
        self._waiting: deque[Chain] = deque()
        self._open: dict[PoolHandle, Chain] = {}
        self._numbers = itertools.count(1)
        self._turns = itertools.count(1)
        self._closed = False
        self._thread = threading.local()
        closing.ready()

    # -- for the scheduler and handles -----------------------------------------------------------------------------

    def handle(self, task: Task, staged: int) -> PoolHandle:
        """Return a handle for a new task, for which arrays of N bytes are copied to its device."""
        handle = PoolHandle(self, task, next(self._numbers))
        handle.staged = staged
        return handle

    def submit(self, chain: Chain, after: Sequence[Future[Any]]) -> None:
        """Accept the tasks of a request, and place them after all futures in `after` have succeeded."""
        with self._lock:
            if self._closed:
                raise errors.ClosedError("the scheduler is closed: create a new one")
            self._open.update(dict.fromkeys(chain.handles, chain))
        pending = set(after)

        def released(future: Future[Any]) -> None:
            if future.cancelled() or future.exception() is not None:
                self._run(lambda: self._settle(chain.handles, None, cancelled=True))
                return
            with self._lock:
                pending.discard(future)
                if pending:
                    return
            self._run(lambda: self.dispatch(chain))

        for future in list(pending):
            future.add_done_callback(released)
        if not after:
            self.dispatch(chain)

    def _run(self, call: Callable[[], None]) -> None:
        """Run ``call()`` after the calls of this thread in progress, so that a sequence of requests ends in a loop."""
        if (calls := getattr(self._thread, "calls", None)) is not None:
            calls.append(call)
            return
        with uninterrupted():
            self._thread.calls = calls = deque([call])
            try:
                while calls:
                    calls.popleft()()
            finally:
                self._thread.calls = None

    def cancel(self, handle: PoolHandle) -> bool:
        """Cancel a task and all later tasks of its request; see `Handle.cancel`."""
        with self._lock:
            chain = self._open.get(handle)
            if chain is None:
                return handle.cancelled()
            following, member = chain.following(handle), self._device_of(chain, handle)
            chain.is_cancelled = chain.is_cancelled or handle in chain.batch
        if member is None:
            self._settle(following, None, cancelled=True)
            return True
        try:
            will_end, has_ended = member.request("cancel", handle.number)
        except errors.DeviceLostError:
            return True
        if has_ended:
            self._settle(following, None, cancelled=True)
        return bool(will_end) or handle.cancelled()

    @staticmethod
    def _device_of(chain: Chain, handle: PoolHandle) -> Member | None:
        """Return the device to which a task was sent, or None."""
        return chain.member if chain.is_sent and handle in chain.batch else None

    def state_of(self, handle: PoolHandle) -> State:
        """Return the state of a task whose handle is not done."""
        with self._lock:
            chain = self._open.get(handle)
            member = None if chain is None else self._device_of(chain, handle)
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

    def dispatch(self, chain: Chain) -> None:
        """Place the next batch of a chain on a device, or queue it until its arrays fit."""
        with self._lock:
            chain.next_batch()
            if not chain.batch:
                return  # all tasks have ended
            candidates = self._candidates(chain)
            with_room = [m for m in candidates if m.has_room(chain)]
            if with_room:
                member = self._assign(chain, with_room)
            elif candidates:
                self._waiting.append(chain)
                return
        if candidates:
            member.enqueue(lambda: self._send(chain, member), lambda error: self._fail(chain, error))
        else:
            self._handle_loss(chain, None)

    def _assign(self, chain: Chain, members: Sequence[Member]) -> Member:
        turn, count = next(self._turns), len(self.members)

        def cost(member: Member) -> tuple[bool, float, int, int]:
            seconds = member.load(chain.tenant) + self._predicted(chain, member)
            order = (self.members.index(member) - turn) % count
            return member.exceeds_quota(chain), seconds, len(member.chains), order

        member = min(members, key=cost)
        chain.seconds = self._predicted(chain, member)
        chain.member = member
        member.chains.add(chain)
        member.seconds += chain.seconds
        member.staged += chain.staged
        for handle in chain.batch:
            handle.device = member.device
            handle.tries += 1
        return member

    def _predicted(self, chain: Chain, member: Member) -> float:
        """Return the solo time of a batch in seconds, from profiles, or as measured on this or another device."""
        seconds = 0.0
        for task in (h.task for h in chain.batch):
            rates = (m.rates[task.name] * task.blocks for m in (member, *self.members) if task.name in m.rates)
            seconds += next(rates, UNKNOWN_SECONDS) if task.profile.seconds is None else task.profile.seconds
        return seconds

    def _send(self, chain: Chain, member: Member) -> None:
        if not self._mark(chain):
            return
        try:
            ends = member.send(chain, lambda: self._mark(chain, is_sent=True))
        except errors.DeviceLostError as error:
            self._handle_loss(chain, error)
            return
        except Exception as error:  # an argument cannot be sent
            self._settle(chain.handles, error)
            return
        for handle, result in ends:
            end = functools.partial(self._handle_end, chain, handle, member, result)
            result.when_done(functools.partial(member.enqueue, end, functools.partial(self._fail, chain)))

    def _mark(self, chain: Chain, is_sent: bool = False) -> list[PoolHandle]:
        """Return the open tasks of a batch. With `is_sent`, its device cancels them from now on."""
        with self._lock:
            chain.is_sent = is_sent and bool(chain.batch)
            return list(chain.batch)

    def _handle_end(self, chain: Chain, handle: PoolHandle, member: Member, result: CallResult) -> None:
        """Process the end of a task, in the thread of its device."""
        if chain.member is not member or handle not in chain.batch:
            return  # from a lost device, after the batch was placed on another one
        try:
            state, seconds = member.wait_for_end(result)
            if state == "cancelled":
                self._settle(chain.following(handle), None, cancelled=True)
                return
            member.fetch(chain)
        except errors.DeviceLostError as error:
            self._handle_loss(chain, error)
            return
        except BaseException as error:  # raised by the task
            following = chain.following(handle)[1:]
            self._settle([handle], error)
            self._settle(following, None, cancelled=True)
            return
        with self._lock:
            member.add_measurement(handle.task, seconds)
        is_last = len(chain.batch) == 1
        self._settle([handle], None)
        if is_last:
            self.dispatch(chain)

    def _fail(self, chain: Chain, error: BaseException) -> None:
        """Fail a chain with an unexpected error that was raised while it was sent or fetched."""
        error.add_note(f"while {chain.name!r} was sent to a device of a pool, or fetched")
        if not chain.handles:
            raise error  # no handle is left to raise it
        self._settle(chain.handles, error)

    def _remove(self, chain: Chain) -> None:
        """Remove a batch from its device, and place waiting batches that fit."""
        with self._lock:
            member = chain.member
            if member is None or chain not in member.chains:
                return
            member.chains.discard(chain)
            member.seconds = sum(c.seconds for c in member.chains)
            member.staged -= chain.staged
            chain.arrays = None
        while True:
            with self._lock:
                waiting = self._waiting[0] if self._waiting else None
                candidates = [] if waiting is None else self._candidates(waiting)
                if waiting is None or (candidates and not any(m.has_room(waiting) for m in candidates)):
                    return
                self._waiting.popleft()
            self.dispatch(waiting)

    def _candidates(self, chain: Chain) -> list[Member]:
        tasks = [h.task for h in chain.batch]
        return [m for m in self.members if m.is_alive and chain.home in (None, m) and all(map(m.can_run, tasks))]

    def _handle_loss(self, chain: Chain, error: BaseException | None) -> None:
        """Place the batch of a lost device on another device if it has no buffers; else fail its chain."""
        with self._lock:
            self._remove(chain)
            can_retry = chain.home is None and not chain.is_cancelled and bool(self._candidates(chain))
            handles = list(chain.handles)
        if can_retry:
            self.dispatch(chain)
            return
        if chain.is_cancelled:
            self._settle(handles, None, cancelled=True)
            return
        for handle in handles:
            device = chain.home.device if chain.home is not None else handle.device
            reason = (
                "no remaining device can run it" if device is None else f"device {device.index} is gone ({device.lost})"
            )
            reason += ", and its arguments with it" if chain.home is not None else ""
            lost = errors.TaskLostError(f"task {handle.task.name!r} was lost: {reason}", task=handle.task.name)
            lost.__cause__ = error
            self._settle([handle], lost)

    def _settle(self, handles: Iterable[PoolHandle], error: BaseException | None, *, cancelled: bool = False) -> None:
        """Complete tasks, and remove batches without remaining tasks from their devices."""
        settled: dict[PoolHandle, Chain] = {}
        with self._lock:
            for handle in list(handles):
                if (chain := self._open.pop(handle, None)) is not None:
                    del chain.handles[handle]
                    chain.batch.pop(handle, None)
                    settled[handle] = chain
        for chain in {id(chain): chain for chain in settled.values() if not chain.batch}.values():
            self._remove(chain)
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
