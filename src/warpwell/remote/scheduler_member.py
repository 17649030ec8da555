"""`Member`: one device of a `PoolScheduler`, and `Unit`: the tasks that it is given together."""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .. import errors
from ..pool import CallResult, Code, Device, HostArrays
from ..scheduler import Task
from ..scheduler.tenants import Tenants
from ..targets import CudaSource
from .scheduler_handle import PoolHandle

STAGED = 0.5
"""Share of a device's memory that the arrays of waiting tasks may take; other arrays wait in this process."""

ANSWER = 60.0
"""Seconds that an agent has to make its scheduler."""

Failed = Callable[[BaseException], None]
"""Called with the error that a call has raised."""


class Unit:
    """Tasks that go to a device together, in order.

    Attributes
    ----------
    handles : sequence of PoolHandle
    home : Member or None
        The device that holds its buffers; None if it has none.
    staged : int
        Bytes of arrays of this process that are copied to the device for it.
    next : Unit or None
        The unit after it in its request. Tasks with arrays of this process go one by one, because the next task reads
        what this one has brought back.
    member : Member or None
        The device it was given to.
    sent : bool
        Whether the device has it: its arrays are there, and the tasks that were cancelled before are not in it.
    given_up : bool
        Whether it must not be tried again.
    seconds : float
        Predicted time.
    """

    def __init__(self, name: str, handles: Sequence[PoolHandle], home: Member | None, staged: int) -> None:
        self.name = name
        self.handles = handles
        self.home = home
        self.staged = staged
        self.next: Unit | None = None
        self.member: Member | None = None
        self.sent = False
        self.given_up = False
        self.seconds = 0.0
        self.left = len(handles)
        self.attempt = 0
        self.arrays: HostArrays | None = None

    @property
    def tenant(self) -> str:
        """Tenant on whose account it runs."""
        return self.handles[0].task.tenant

    @property
    def tasks(self) -> list[Task]:
        """Its tasks."""
        return [h.task for h in self.handles]

    @property
    def memory(self) -> int:
        """Bytes that its largest task holds on the device."""
        return max(h.task.memory for h in self.handles)

    def rest(self) -> list[PoolHandle]:
        """Return its handles, and those of the units after it."""
        found = list(self.handles)
        unit = self.next
        while unit is not None:
            found += unit.handles
            unit = unit.next
        return found


class Reports(Protocol):
    """What a member needs of the `Places` that it reports to."""

    def goes(self, unit: Unit) -> list[PoolHandle]:
        """Return the handles of a unit that are to be sent now."""
        ...

    def ended(self, unit: Unit, handle: PoolHandle, attempt: int, result: CallResult) -> None:
        """Take the end of a task."""
        ...

    def failed(self, unit: Unit, error: BaseException) -> None:
        """Take an error that was not expected."""
        ...


class Member:
    """One device of a scheduler of a pool.

    A thread of its own sends tasks to the device and brings results back, so that slow copies of one device delay no
    other.

    Parameters
    ----------
    device : Device
    tenants : mapping or iterable, optional
        Settings of tenants, for what each may hold on the device.
    options : mapping
        Options of the `Scheduler` on the device.

    Attributes
    ----------
    seconds, staged : float, int
        Predicted time of its tasks, and the bytes that were copied to it for them.
    units : set of Unit
        What it was given and has not ended.
    """

    def __init__(self, device: Device, tenants: Any, options: Mapping[str, Any]) -> None:
        self.device = device
        self.stream = device.stream()
        self.seconds = 0.0
        self.staged = 0
        self.units: set[Unit] = set()
        self._closed = False
        self._rates: dict[str, float] = {}
        self._codes: set[str] = set()
        self._submits = threading.RLock()  # reentrant: a signal handler may ask while its thread does
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Failed] | None] = queue.SimpleQueue()
        self.service = device.create(
            "scheduler",
            device.target,
            int(device.info.get("ordinal", 0)),
            stream=self.stream,
            tenants=tenants,
            **options,
        )
        self._capacity = self.service.call("inspect", _capacity_of, stream=self.stream)
        self._settings = tenants
        self.tenants: Tenants
        self._thread = threading.Thread(target=self._work, name=f"warpwell-pool-{device.index}", daemon=True)

    def begin(self) -> None:
        """Wait until the agent has made its scheduler. Raise what making it raised."""
        try:
            self.capacity = self._capacity.get(ANSWER)
        except errors.RemoteError as error:
            self.forget_failures()
            raise told_by(error, self.device) from error
        self.tenants = Tenants(self.capacity, self._settings)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its agent lives."""
        return self.device.lost is None

    def runs(self, task: Task) -> bool:
        """Return whether the device can run a task: CUDA sources need a GPU."""
        return self.device.target == "cuda" or not isinstance(task.launch.kernel, CudaSource)

    def room(self, unit: Unit) -> bool:
        """Return whether the arrays of a unit fit beside those of the units that wait there."""
        return not self.staged or self.staged + unit.staged <= STAGED * self.capacity.memory

    def holds_too_much(self, unit: Unit) -> bool:
        """Return whether the unit would have to wait, because its tenant would hold too much memory there."""
        most = self.tenants.account(unit.tenant).memory
        if most is None:
            return False
        return sum(u.memory for u in self.units if u.tenant == unit.tenant) + unit.memory > most

    def load(self, tenant: str) -> float:
        """Return the seconds until a new task of a tenant would end: the time of all tasks, or its own at its quota.

        A tenant with a quota of the device's time waits for its share even if no other tenant has tasks.
        """
        share = self.tenants.account(tenant).tenant.share
        if share is None:
            return self.seconds
        own = sum(u.seconds for u in self.units if u.tenant == tenant)
        return max(self.seconds, own / share)

    def rate(self, task: Task) -> float | None:
        """Return the measured seconds a block of a task's kernel; None if it has not run here."""
        return self._rates.get(task.name)

    def measured(self, task: Task, seconds: float) -> None:
        """Take the time that a task took into the mean of its kernel."""
        if seconds > 0:
            known = self._rates.get(task.name)
            new = seconds / task.blocks
            self._rates[task.name] = new if known is None else 0.7 * known + 0.3 * new

    def do(self, call: Callable[[], None], failed: Failed) -> None:
        """Make a call in the member's thread; if it raises, call ``failed(error)``."""
        self._calls.put((call, failed))

    def _work(self) -> None:
        while True:
            item = self._calls.get()
            if item is None:
                return
            call, failed = item
            try:
                try:
                    call()
                except BaseException as error:  # of one unit: the thread goes on with the others
                    failed(error)
            except BaseException:  # no handle is left to raise it
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del item, call, failed

    def ask(self, method: str, number: int) -> Any:
        """Call a method of the device's scheduler for a task that was or is being sent. Raise `DeviceLostError`."""
        with self._submits:  # the question comes behind the task
            result = self.service.call(method, number, stream=self.stream)
        return result.get()

    # -- in the thread -----------------------------------------------------------------------------------------

    def send(self, unit: Unit, places: Reports) -> None:
        """Send a unit to the device. Raise `DeviceLostError`, or what is wrong with the arguments."""
        if any(hasattr(a, "warpwell_place") for h in unit.handles for a in h.task.arguments):
            self.stream.wait(self.device.default_stream)  # where buffers were written
        tasks = {}
        unit.arrays = HostArrays(self.device, self.stream, [a for h in unit.handles for a in h.task.arguments])
        for handle in unit.handles:
            task = handle.task
            kernel = task.launch.kernel
            code = Code.of(kernel)
            data = None if code.key in self._codes else code.data
            args = unit.arrays.values(task.arguments)
            subscript = task.launch.subscript()
            tasks[handle] = handle.number, code.key, code.name, data, subscript, args, options_of(task)
        with self._submits:
            handles = places.goes(unit)  # some may have been cancelled while arrays were on their way
            if not handles:
                return
            sent = [tasks[h] for h in handles]
            results = [self.service.call("submit", unit.name, sent, stream=self.stream)]
        self._codes |= {key for _, key, *_ in sent}
        results += [self.service.call("ended", h.number, stream=self.stream) for h in handles[1:]]
        for handle, result in zip(handles, results, strict=True):
            end = functools.partial(places.ended, unit, handle, unit.attempt, result)
            result.when_done(_once(functools.partial(self.do, end, functools.partial(places.failed, unit))))

    def fetch(self, unit: Unit) -> None:
        """Copy a unit's arrays back. None is changed until all have arrived."""
        come = [] if unit.arrays is None else list(unit.arrays.fetch())
        for array, values in come:
            np.copyto(array, values)

    def result(self, result: CallResult) -> tuple[str, float]:
        """Return how a task ended; raise what it raised, or `DeviceLostError`."""
        try:
            told, seconds = result.get()
            return told, seconds
        except errors.RemoteError as error:
            self.forget_failures()
            raise told_by(error, self.device) from error

    def forget_failures(self) -> None:
        """Drop failures that handles have raised: the next synchronization must not raise them again."""
        with contextlib.suppress(errors.WarpwellError):
            self.stream.channel.raise_kept()

    def close(self, cancel: bool) -> None:
        """Close the device's scheduler and end the thread (idempotent)."""
        if self._closed:
            return
        self._closed = True
        self._calls.put(None)
        if self.alive:
            with contextlib.suppress(errors.WarpwellError):  # it may not exist; handles have its error
                self.service.call("close", cancel, stream=self.stream).get(ANSWER)
            self.forget_failures()
            self.service.free()
            self.stream.close()


def told_by(error: errors.RemoteError, device: Device) -> BaseException:
    """Return the error that was raised on a device, with a note that names the device."""
    cause = error.__cause__
    if cause is None:
        return error
    cause.add_note(f"on device {device.index} ({device.target} on {device.host}):\n{error.remote_traceback}")
    return cause


def options_of(task: Task) -> dict[str, Any]:
    """Return the options with which `Scheduler.task` makes this task again."""
    return {
        "name": task.name,
        "tenant": task.tenant,
        "priority": task.priority,
        "deadline": task.deadline,
        "memory": task.memory,
        "size": task.size,
        "profile": task.profile if task.profile.source != "unknown" else None,
    }


def _capacity_of(core: Any) -> Any:
    return core.executor.capacity


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that makes a call the first time it is called, from any thread, and then never again."""
    first = threading.Lock()
    return lambda: call() if first.acquire(blocking=False) else None
