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
from ..scheduler import Handle
from ..scheduler.extend import State, Task
from ..scheduler.handle import Runner
from ..scheduler.tenants import Tenants
from ..targets import CudaSource

MAX_STAGED_SHARE = 0.5
"""Maximum share of a device's memory for arrays of waiting tasks. Tasks beyond it wait in this process."""

START_SECONDS = 60.0
"""Timeout of an agent that creates or closes its scheduler, in seconds."""

CANCEL_SECONDS = 15.0
"""Time that ``close(cancel=True)`` waits for tasks. A device itself abandons its tasks after 10 s."""

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
        self.chain: Chain


@dataclass(eq=False)
class Chain:
    """The tasks of a request, which are sent to one device together and run in order.

    If any of them has arrays of this process, the arrays are copied to the device once, and copied back when all tasks
    have ended. Before that no array is modified, so a lost device can be replaced by another one.

    Attributes
    ----------
    name : str
        Name of the request.
    number : int
        Position in the order of submission.
    tenant : str
    home : Member or None
        The device that holds the buffers, or None without buffers.
    handles : dict of PoolHandle to None
        The tasks whose handles are not done, in order.
    sizes : dict of int to int
        Sizes in bytes of the arrays of this process, by identity.
    staged : int
        Their sum.
    member : Member or None
        The device on which the tasks are placed.
    seconds : float
        Predicted time of the tasks.
    is_sent : bool
        Whether the device has the tasks. Before that, `Placements` cancels them.
    cancelled : set of PoolHandle
        Tasks that the device was requested to cancel. They must not be placed again.
    outcomes : dict of PoolHandle to tuple
        Of tasks that have ended, and whose arrays are not copied back: the error or None, and whether it was cancelled.
    arrays : HostArrays or None
    """

    name: str
    number: int
    tenant: str
    home: Member | None
    handles: dict[PoolHandle, None] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    staged: int = 0
    member: Member | None = None
    seconds: float = 0.0
    is_sent: bool = False
    cancelled: set[PoolHandle] = field(default_factory=set)
    outcomes: dict[PoolHandle, tuple[BaseException | None, bool]] = field(default_factory=dict)
    arrays: HostArrays | None = None

    @property
    def request(self) -> Chain:
        """The chain itself, for the order of tasks that use the same arrays."""
        return self

    @property
    def memory(self) -> int:
        """The device memory of the largest task, in bytes."""
        return max((h.task.memory for h in self.handles), default=0)

    def following(self, handle: PoolHandle) -> list[PoolHandle]:
        """Return a task and all later ones."""
        return list(itertools.dropwhile(lambda h: h is not handle, list(self.handles)))


class Member:
    """One device of a scheduler of a pool.

    Its thread sends tasks to the device and copies results back, so that slow copies of one device do not delay
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
        The chains that are placed on the device.
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
        self.submits = threading.RLock()  # reentrant, because a signal handler may interrupt a submit
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
        """Return True if the arrays of a chain fit in addition to the arrays of other chains."""
        return not self.staged or self.staged + chain.staged <= MAX_STAGED_SHARE * self.capacity.memory

    def exceeds_quota(self, chain: Chain) -> bool:
        """Return True if the chain would wait for its tenant's memory quota."""
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

    def enqueue(self, call: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Run ``call()`` in the member's thread; if it raises, run ``failed(error)``."""
        self._calls.put((call, failed))

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, failed = item
            try:
                try:
                    call()
                except BaseException as error:  # fails one chain; the thread continues with the next
                    failed(error)
            except BaseException:  # no handle is left to raise it
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del item, call, failed

    def request(self, method: str, number: int) -> Any:
        """Call a method of the device's scheduler for a task and return the result. Raises `DeviceLostError`."""
        with self.submits:  # the call must follow the submit
            result = self.call(method, number)
        return result.get()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def copy_arguments(self, chain: Chain, handles: Sequence[PoolHandle]) -> dict[PoolHandle, tuple[Any, ...]]:
        """Copy the arrays of tasks to the device. Return the tasks as the agent's scheduler expects them.

        Raises
        ------
        DeviceLostError
            The device was lost.
        Exception
            An argument cannot be sent.
        """
        arguments = [a for h in handles for a in h.task.arguments]
        if any(hasattr(a, "warpwell_place") for a in arguments):
            self.stream.wait(self.device.default_stream)  # the stream in which buffers were written
        chain.arrays = arrays = HostArrays(self.device, self.stream, arguments)
        tasks = {}
        for handle in handles:
            task, launch = handle.task, handle.task.launch
            code, values = Code.of(launch.kernel), arrays.replace_arrays(task.arguments)
            tasks[handle] = handle.number, code, launch.subscript(), values, options_of(task)
        return tasks

    def fetch(self, chain: Chain, handles: Iterable[PoolHandle]) -> None:
        """Copy the arrays of tasks back. No array is modified before all have arrived."""
        keys = {id(a) for h in handles for a in h.task.arguments}
        if keys and chain.arrays is not None:
            for array, values in [pair for pair in chain.arrays.fetch() if id(pair[0]) in keys]:
                np.copyto(array, values)

    def wait_for_end(self, task: Task, result: CallResult) -> tuple[BaseException | None, bool]:
        """Return the error of a task, and whether it was cancelled; measure its kernel. Raises `DeviceLostError`."""
        try:
            state, seconds = result.get()
        except errors.RemoteError as error:
            self._drop_failures()
            return remote_cause(error, self.device), False
        if seconds > 0:
            rate = seconds / task.blocks
            self.rates[task.name] = 0.7 * self.rates.get(task.name, rate) + 0.3 * rate
        return None, state == "cancelled"

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

    A chain is placed on the device that holds its buffers, else on the device with the least predicted load. It waits
    if its arrays do not fit. One lock guards the state; no slow call is made with it.

    Parameters
    ----------
    members : sequence of Member
    order : DataOrder
        Orders the chains that use the same arrays of this process.
    """

    def __init__(self, members: Sequence[Member], order: Any) -> None:
        self.members = members
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._order = order
        self._waiting: deque[Chain] = deque()
        self._open: set[Chain] = set()
        self._turns = itertools.count(1)
        self._closed = False
        self._thread = threading.local()
        closing.ready()

    # -- for the scheduler and handles -----------------------------------------------------------------------------

    def submit(
        self, name: str, tasks: Iterable[Task], home: Member | None, after: Sequence[Future[Any]]
    ) -> list[PoolHandle]:
        """Accept the tasks of a request, and place them after all futures in `after` have succeeded.

        They are one chain, or several in order if their arrays do not fit together.
        """
        limit = MAX_STAGED_SHARE * min(m.capacity.memory for m in self.members)
        chains: list[Chain] = []
        handles: list[PoolHandle] = []
        for task in tasks:
            handle = PoolHandle(self, task, next(self._numbers))
            handle.after = handles[-1:] or after
            handles.append(handle)
            sizes = {id(a): max(1, a.nbytes) for a in task.arguments if isinstance(a, np.ndarray)}
            added = sum(size for key, size in sizes.items() if not chains or key not in chains[-1].sizes)
            if not chains or (added and chains[-1].staged + added > limit):
                chains.append(Chain(name, next(self._numbers), task.tenant, home))
                added = sum(sizes.values())
            handle.chain = chain = chains[-1]
            chain.handles[handle] = None
            chain.sizes.update(sizes)
            chain.staged += added
        # the chains of later requests would wait forever for one that Ctrl-C has interrupted here
        with uninterrupted():
            ready, events = [], []
            with self._lock:
                if self._closed:
                    raise errors.ClosedError("the scheduler is closed: create a new one")
                for chain in chains:
                    self._open.add(chain)
                    self._order.add(chain, [a for h in chain.handles for a in h.task.accesses], after)
                    if not self._order.is_waiting(chain):
                        ready.append(chain)
                    events += [(future, chain) for future in after]
                    after = list(chain.handles)
            for future, chain in events:
                future.add_done_callback(functools.partial(self._handle_event, chain))
            self._dispatch_all(ready)
        return handles

    def _handle_event(self, chain: Chain, future: Future[Any]) -> None:
        """Place the chains that waited only for a future, or cancel a chain if the future has not succeeded."""
        with self._lock:
            released = self._order.release(future)
        if future.cancelled() or future.exception() is not None:  # every released chain is called
            self._run(lambda: self._settle(chain, chain.handles, None, True))
        else:
            self._dispatch_all(released)

    def _dispatch_all(self, chains: Iterable[Chain]) -> None:
        for chain in chains:
            self._run(functools.partial(self.dispatch, chain))

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
        chain = handle.chain
        with self._lock:
            if handle not in chain.handles:
                return handle.cancelled()
            following, member = chain.following(handle), chain.member if chain.is_sent else None
            if member is None:  # with the same lock, so that no thread sends them
                settled = self._detach(chain, following)
            else:
                chain.cancelled.update(following)
        if member is None:
            self._complete(chain, *settled, None, True)
            return True
        try:
            will_end, has_ended = member.request("cancel", handle.number)
        except errors.DeviceLostError:
            return True
        if has_ended:
            self._settle(chain, following, None, True)
        return bool(will_end) or handle.cancelled()

    def state_of(self, handle: PoolHandle) -> State:
        """Return the state of a task whose handle is not done."""
        with self._lock:
            member = handle.chain.member if handle.chain.is_sent else None
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
            handles = [handle for chain in self._open for handle in chain.handles]
        if cancel:
            for handle in handles:
                handle.cancel()
        remaining: Any = wait(handles, CANCEL_SECONDS if cancel else None).not_done
        for handle in remaining:
            message = f"task {handle.task.name!r} was still running when the scheduler was closed"
            self._settle(handle.chain, [handle], errors.SchedulerError(message, task=handle.task.name))
        for member in self.members:
            member.close(cancel)

    def retire(self) -> None:
        """Close in a thread, after the scheduler was garbage-collected. Safe in a finalizer."""
        closing.hand_over_to_thread(functools.partial(self.close, False), "warpwell-pool-retired")

    # -- placement -------------------------------------------------------------------------------------------------

    def dispatch(self, chain: Chain) -> None:
        """Place a chain on a device, or queue it until its arrays fit."""
        with self._lock:
            if not chain.handles:
                return  # all tasks were cancelled
            chain.member, chain.is_sent, chain.outcomes = None, False, {}
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
        for handle in chain.handles:
            handle.device = member.device
            handle.tries += 1
        return member

    def _predicted(self, chain: Chain, member: Member) -> float:
        """Return the solo time of a chain in seconds, from profiles, or as measured on this or another device."""
        seconds = 0.0
        for task in [h.task for h in chain.handles]:
            rates = (m.rates[task.name] * task.blocks for m in (member, *self.members) if task.name in m.rates)
            seconds += next(rates, UNKNOWN_SECONDS) if task.profile.seconds is None else task.profile.seconds
        return seconds

    def _send(self, chain: Chain, member: Member) -> None:
        try:
            tasks = member.copy_arguments(chain, list(chain.handles))
            with member.submits:
                with self._lock:  # tasks that were cancelled before are not sent
                    handles, chain.is_sent = list(chain.handles), True
                if not handles:
                    chain.arrays = None  # the handles keep the chain, which must not keep memory of the device
                    return
                results = [member.call("submit", chain.name, [tasks[h] for h in handles])]
                results += [member.call("ended", h.number) for h in handles[1:]]
        except errors.DeviceLostError as error:
            self._handle_loss(chain, error)
            return
        except Exception as error:  # an argument cannot be sent
            self._settle(chain, chain.handles, error)
            return
        for handle, result in zip(handles, results, strict=True):
            end = functools.partial(self._handle_end, chain, handle, member, result)
            result.when_done(functools.partial(member.enqueue, end, functools.partial(self._fail, chain)))

    def _handle_end(self, chain: Chain, handle: PoolHandle, member: Member, result: CallResult) -> None:
        """Process the end of a task, in the thread of its device."""
        if chain.member is not member or handle not in chain.handles:
            return  # from a lost device, after the chain was placed on another one; or it has failed already
        try:
            error, cancelled = member.wait_for_end(handle.task, result)
            with self._lock:
                if handle in chain.handles:
                    chain.outcomes[handle] = error, cancelled
                if chain.staged and len(chain.outcomes) < len(chain.handles):
                    return
                outcomes = dict(chain.outcomes)
            member.fetch(chain, [h for h, outcome in outcomes.items() if outcome == (None, False)])
        except errors.DeviceLostError as loss:
            self._handle_loss(chain, loss)
            return
        for ended, outcome in outcomes.items():
            self._settle(chain, [ended], *outcome)

    def _fail(self, chain: Chain, error: BaseException) -> None:
        """Fail a chain with an unexpected error that was raised while it was sent or fetched."""
        error.add_note(f"while {chain.name!r} was sent to a device of a pool, or fetched")
        if not chain.handles:
            raise error  # no handle is left to raise it
        self._settle(chain, chain.handles, error)

    def _remove(self, chain: Chain) -> None:
        """Remove a chain from its device, and place waiting chains that fit."""
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
        tasks = [h.task for h in chain.handles]
        return [m for m in self.members if m.is_alive and chain.home in (None, m) and all(map(m.can_run, tasks))]

    def _handle_loss(self, chain: Chain, error: BaseException | None) -> None:
        """Place the tasks of a lost device on another device if they have no buffers; else fail them."""
        self._remove(chain)
        self._settle(chain, chain.cancelled, None, True)
        if chain.home is None and self._candidates(chain):
            self.dispatch(chain)
            return
        for handle in list(chain.handles):
            device = chain.home.device if chain.home is not None else handle.device
            reason = (
                "no remaining device can run it" if device is None else f"device {device.index} is gone ({device.lost})"
            )
            reason += ", and the task's arguments are lost" if chain.home is not None else ""
            lost = errors.TaskLostError(f"task {handle.task.name!r} was lost: {reason}", task=handle.task.name)
            lost.__cause__ = error
            self._settle(chain, [handle], lost)

    def _settle(
        self, chain: Chain, handles: Iterable[PoolHandle], error: BaseException | None, cancelled: bool = False
    ) -> None:
        """Complete tasks of a chain. After the last one, place the chains that wait for its arrays or for its place."""
        with self._lock:
            settled = self._detach(chain, handles)
        self._complete(chain, *settled, error, cancelled)

    def _detach(self, chain: Chain, handles: Iterable[PoolHandle]) -> tuple[Sequence[PoolHandle], Sequence[Chain]]:
        """Remove tasks from a chain, with the lock; return those that it had, and the chains that may be placed."""
        settled = [h for h in list(handles) if h in chain.handles]
        for handle in settled:
            del chain.handles[handle]
            chain.outcomes.pop(handle, None)
        if not settled or chain.handles:
            return settled, ()
        self._open.discard(chain)
        return settled, self._order.release(chain)

    def _complete(
        self,
        chain: Chain,
        handles: Sequence[PoolHandle],
        released: Sequence[Chain],
        error: BaseException | None,
        cancelled: bool,
    ) -> None:
        if not chain.handles:
            self._remove(chain)
        try:
            for handle in handles:
                handle.settle(error, cancelled)
        finally:
            self._dispatch_all(released)


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
