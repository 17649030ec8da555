"""`Member`: one device of a `PoolScheduler`: its scheduler there, what it has to do, and who talks to it."""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import errors
from ..pool.agent.code import Code
from ..pool.device import Device
from ..pool.host_arrays import HostArrays
from ..pool.result import Result
from ..scheduler.task import Task
from ..scheduler.tenants import Tenants
from ..targets.gpu.cuda_source import CudaSource
from .scheduler_handle import Unit

if TYPE_CHECKING:
    from .scheduler_places import Places

STAGED = 0.5
"""Part of a device's memory that arrays of waiting tasks may take; others wait in this process."""

ANSWER = 60.0
"""Seconds that an agent has to make its scheduler."""

Failed = Callable[[BaseException], None]
"""What is told of an error that a call has raised."""


class Member:
    """A device, as the scheduler of a pool sees it.

    A thread of its own sends tasks to it and brings results back, so that slow copies of one device hold up no other.

    Parameters
    ----------
    device : Device
    tenants : mapping or iterable, optional
        Settings, to know what a tenant may hold there.
    options : mapping
        Of the `Scheduler` there.

    Attributes
    ----------
    seconds, staged : float, int
        What its tasks are predicted to take, and the bytes that went there for them.
    units : set of Unit
        What it has to do.
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
            "scheduler", device.target, int(device.info.get("ordinal", 0)), stream=self.stream, tenants=tenants,
            **options,
        )  # fmt: skip
        self._capacity = self.service.call("inspect", _capacity_of, stream=self.stream)
        self._settings = tenants
        self.tenants: Tenants
        self._thread = threading.Thread(target=self._work, name=f"warpwell-pool-{device.index}", daemon=True)

    def begin(self) -> None:
        """Wait for its scheduler. Raises what making it raised."""
        try:
            self.capacity = self._capacity.get(ANSWER)
        except errors.RemoteError as error:
            self.forget_failures()
            raise told_by(error, self.device) from error
        self.tenants = Tenants(self.capacity, self._settings)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its agent is there."""
        return self.device.lost is None

    def runs(self, task: Task) -> bool:
        """Tell whether it can run a kernel: CUDA sources need a GPU."""
        return self.device.target == "cuda" or not isinstance(task.launch.kernel, CudaSource)

    def room(self, unit: Unit) -> bool:
        """Tell whether the arrays that go with a unit fit beside those of others that wait there."""
        return not self.staged or self.staged + unit.staged <= STAGED * self.capacity.memory

    def holds_too_much(self, unit: Unit) -> bool:
        """Tell whether the unit's tenant would be over its memory there, so that the unit had to wait."""
        most = self.tenants.account(unit.tenant).memory
        if most is None:
            return False
        return sum(u.memory for u in self.units if u.tenant == unit.tenant) + unit.memory > most

    def load(self, tenant: str) -> float:
        """Return seconds after which a new task of a tenant would end there: all tasks' time, or its own at its quota.

        A tenant with a quota of the device's time waits for it even where nobody else has anything to do.
        """
        share = self.tenants.account(tenant).tenant.share
        if share is None:
            return self.seconds
        own = sum(u.seconds for u in self.units if u.tenant == tenant)
        return max(self.seconds, own / share)

    def rate(self, task: Task) -> float | None:
        """Return seconds a block of a kernel, as measured here, or None."""
        return self._rates.get(task.name)

    def measured(self, task: Task, seconds: float) -> None:
        """Learn from a task that has ended."""
        if seconds > 0:
            known = self._rates.get(task.name)
            new = seconds / task.blocks
            self._rates[task.name] = new if known is None else 0.7 * known + 0.3 * new

    def do(self, call: Callable[[], None], failed: Failed) -> None:
        """Have its thread make a call; ``failed(error)`` is called with what it raises."""
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
                except BaseException as error:  # one unit's: the thread has others to do
                    failed(error)
            except BaseException:  # nobody is left to be told
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del item, call, failed

    def ask(self, method: str, number: int) -> Any:
        """Return what its scheduler says of a task that goes there, or has gone. Raises `DeviceLostError`."""
        with self._submits:  # the question comes behind the task
            result = self.service.call(method, number, stream=self.stream)
        return result.get()

    # -- in the thread -----------------------------------------------------------------------------------------

    def send(self, unit: Unit, places: Places) -> None:
        """Give the device a unit. Raises `DeviceLostError`, and what is wrong with the arguments."""
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
        """Bring a unit's arrays back. None is changed unless all have come."""
        come = [] if unit.arrays is None else list(unit.arrays.fetch())
        for array, values in come:
            np.copyto(array, values)

    def result(self, result: Result) -> tuple[str, float]:
        """Return how a task has ended; raise what it raised, or `DeviceLostError`."""
        try:
            told, seconds = result.get()
            return told, seconds
        except errors.RemoteError as error:
            self.forget_failures()
            raise told_by(error, self.device) from error

    def forget_failures(self) -> None:
        """Handles have told of them: the next synchronization is not to."""
        with contextlib.suppress(errors.WarpwellError):
            self.stream.channel.raise_kept()

    def close(self, cancel: bool) -> None:
        """End its scheduler and the thread (idempotent)."""
        if self._closed:
            return
        self._closed = True
        self._calls.put(None)
        if self.alive:
            with contextlib.suppress(errors.WarpwellError):  # there may be none, and tasks have been told of
                self.service.call("close", cancel, stream=self.stream).get(ANSWER)
            self.forget_failures()
            self.service.free()
            self.stream.close()


def told_by(error: errors.RemoteError, device: Device) -> BaseException:
    """Return what was raised on a device, as it would have been raised here, with a note of where it came from."""
    cause = error.__cause__
    if cause is None:
        return error
    cause.add_note(f"on device {device.index} ({device.target} on {device.host}):\n{error.remote_traceback}")
    return cause


def options_of(task: Task) -> dict[str, Any]:
    """Return what `Scheduler.task` takes beside launch and arguments."""
    return {
        "name": task.name, "tenant": task.tenant, "priority": task.priority, "deadline": task.deadline,
        "memory": task.memory, "idempotent": task.idempotent, "size": task.size,
        "profile": task.profile if task.profile.source != "unknown" else None,
    }  # fmt: skip


def _capacity_of(core: Any) -> Any:
    return core.executor.capacity


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Make a call once, however often it is asked for, by whatever thread."""
    first = threading.Lock()
    return lambda: call() if first.acquire(blocking=False) else None
