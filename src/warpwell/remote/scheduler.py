"""`PoolScheduler`: a scheduler whose tasks run on the devices of a pool; ``Scheduler(devices=...)`` makes one."""

from __future__ import annotations

import contextlib
import io
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np

from .. import errors
from ..pool import Buffer, Code, Device, pack_arguments
from ..scheduler import Handle, Log, Policy, Profile, Rates, Request, Scheduler, Task, Tenant
from ..scheduler.scheduler import require_launch
from ..scheduler.task import require_profile
from ..scheduler.tenants import read_tenants
from ..targets import Launch, viewed
from ..targets.blocks import BLOCK_INDICES
from .placement import Batch, Member, Placements
from .stand_in import Remote


class PoolScheduler(Scheduler):
    """Places each task on a device of a pool; that device's own scheduler runs it by the policy.

    A task with buffers among its arguments, or with arrays that a device has opened, goes to that device, and runs
    after the work that the device's default stream was given before. Other tasks go to the device with the least
    predicted load, by the times of kernels in profiles or as measured. NumPy arrays are copied there when the task is
    placed, and copied back before its handle is done; read-only arrays are not copied back.

    Use it as a `Scheduler`. It differs in this: the handle raises what a device refuses; `inspect` returns a list;
    `logs` returns the decisions; ``analyzer`` is called in this process.

    Parameters
    ----------
    devices : Devices, Lease or iterable of Device
    policy, limit, rates, tenants, analyzer, stuck_after
        See `Scheduler`; quotas of tenants hold on each device.
    """

    def __init__(
        self,
        device: str | None = None,
        policy: str | Policy = "lanes",
        *,
        devices: Iterable[Device] | None = None,
        limit: int | None = None,
        rates: Rates | None = None,
        tenants: Mapping[str, Any] | Iterable[Tenant] | None = None,
        analyzer: Callable[[Task], Profile] | None = None,
        executor: Any = None,
        stuck_after: float | None = 60.0,
        log: Log | None = None,
    ) -> None:
        for name, given in (("device", device), ("executor", executor), ("log", log)):
            if given is not None:
                raise errors.ArgumentError(f"{name}= is for a scheduler of one device: leave it out", name=name)
        found = list(devices or ())
        if not found:
            raise errors.ArgumentError("devices= is empty: give at least one", name="devices")
        if len({id(d) for d in found}) < len(found):
            raise errors.ArgumentError("devices= has a device twice", name="devices")
        self._analyzer = analyzer
        settings = None if tenants is None else read_tenants(tenants)
        options = {"policy": policy, "limit": limit, "rates": rates, "stuck_after": stuck_after}
        members: list[Member] = []
        try:
            for d in found:
                members.append(Member(d, settings, options))
            for member in members:
                member.start()
        except BaseException:
            for member in members:
                member.close(cancel=True)
            raise
        self.devices = tuple(found)
        self._members = {id(m.device): m for m in members}
        self._placements = Placements(members)
        weakref.finalize(self, self._placements.retire).atexit = False

    def task(
        self,
        launch: Launch,
        *args: Any,
        name: str | None = None,
        memory: int | str | None = None,
        profile: Profile | None = None,
        size: dict[str, float] | None = None,
        **options: Any,
    ) -> Task:
        """Return the task of a launch without submitting it; see `Scheduler.submit`.

        Raises
        ------
        CodeError
            The kernel cannot be sent.
        ArgumentError, DTypeError
            An argument cannot be sent, or arguments are on several devices, or on a device of another scheduler.
        """
        require_launch(launch)
        launch = launch.current() if type(launch) is Launch else launch
        kernel = launch.kernel
        code = Code.of(kernel)  # now: it has the present values of the variables that the kernel names
        title = name or code.name
        total = math.prod(launch.shape)
        if total < 1:
            raise errors.ArgumentError(f"launch of {title!r} over {launch.shape} has no blocks")
        args = viewed(kernel, args)
        self._home([args])
        each = BLOCK_INDICES if getattr(kernel, "block", 1) is None else 1
        task = Task(
            title,
            -(-total // each),
            launch=launch,
            arguments=_kept(args),
            memory=cast(int, 0 if memory is None else memory),  # `Task` reads text
            size=size or {},
            profile=Profile(source="unknown") if profile is None else profile,
            **options,
        )
        task.memory = max(task.memory, _nbytes(args))
        if profile is None and self._analyzer is not None:
            task.profile = require_profile(self._analyzer(task), title)
        return task

    def _accept(self, request: Request, after: Sequence[Future[Any]]) -> list[Handle]:
        tasks = request.tasks
        home = self._home([t.arguments for t in tasks])
        for task in tasks:
            self._check(task, [home] if home is not None else list(self._members.values()))
        handles = [self._placements.handle(task) for task in tasks]
        staged = [_staged(t.arguments) for t in tasks]
        if any(staged):  # one by one: the next task may read what this one brings back
            batches = [Batch(request.name, [h], home, n) for h, n in zip(handles, staged, strict=True)]
        else:
            batches = [Batch(request.name, handles, home, 0)]
        self._placements.submit(batches, after)
        return list(handles)

    def _home(self, arguments: Sequence[Sequence[Any]]) -> Member | None:
        """Return the member that holds the arguments, or None; check that they can be sent."""
        places = {id(p): p for args in arguments for a in args if (p := getattr(a, "warpwell_place", None)) is not None}
        if len(places) > 1:
            numbers = ", ".join(str(p.index) for p in places.values())
            raise errors.ArgumentError(f"the arguments are on devices {numbers}: copy them to one of them")
        member = None
        for key, place in places.items():
            member = self._members.get(key)
            if member is None:
                raise errors.ArgumentError(f"an argument is on device {place.index}, which is not of this scheduler")
        device: Any = member.device if member is not None else self.devices[0]
        for args in arguments:
            for value in args:
                if isinstance(value, np.ndarray) and value.dtype.hasobject:
                    raise errors.DTypeError(f"{value.dtype} holds Python objects, which live in one process only")
            pack_arguments([a for a in args if not isinstance(a, np.ndarray)], device.handle_of)
        return member

    def _check(self, task: Task, members: Sequence[Member]) -> None:
        """Raise if no device could ever run a task."""
        members = [m for m in members if m.can_run(task)]
        if not members:
            raise errors.DeviceNotFoundError(f"CUDA source {task.name!r} runs on a GPU, and no device is one")
        accounts = [m.tenants.account(task.tenant) for m in members]
        most = max(
            min(m.capacity.memory, math.inf if a.memory is None else a.memory)
            for m, a in zip(members, accounts, strict=True)
        )
        if task.memory > most:
            raise errors.TaskMemoryError(
                f"task {task.name!r} needs {task.memory} bytes and no device gives its tenant more than {most}: make "
                "it smaller, or split it",
                task=task.name,
            )

    def inspect(self, function: Callable[[Any], Any]) -> list[Any]:  # type: ignore[override]
        """Return what ``function(core)`` returns on each device that is not lost, between two decisions."""
        results = [m.call("inspect", function) for m in self._placements.members if m.is_alive]
        return [result.get() for result in results]

    def logs(self) -> dict[int, Log]:
        """Return the decisions and their reasons, by index of the device."""
        results = {m.device.index: m.call("log") for m in self._placements.members if m.is_alive}
        return {index: Log.read(io.StringIO(result.get())) for index, result in results.items()}

    @property
    def failure(self) -> BaseException | None:
        """The loss of the last device; None while a device is left."""
        if any(m.is_alive for m in self._placements.members):
            return None
        last = self._placements.members[-1].device
        return errors.DeviceLostError(f"device {last.index} is gone, the last one: {last.lost}", device=last.index)

    def _end(self, cancel: bool) -> None:
        self._placements.close(cancel)


def _kept(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments with views in place of buffers, so that the caller may free the buffers before they are sent."""
    views: dict[int, Any] = {}
    for value in args:
        if isinstance(value, Buffer) and value.ndim and id(value) not in views:
            with contextlib.suppress(errors.DeviceLostError):  # the handle raises it
                views[id(value)] = value[:]
    return tuple(views.get(id(a), a) for a in args)


def _staged(args: Sequence[Any]) -> int:
    """Return the bytes of arrays of this process, each counted once."""
    return sum({id(a): max(1, a.nbytes) for a in args if isinstance(a, np.ndarray)}.values())


def _nbytes(args: Sequence[Any]) -> int:
    """Return the bytes that arguments hold on a device, each counted once, without arrays on storage."""
    arrays = [a for a in args if hasattr(a, "nbytes") and not isinstance(a, Remote | np.generic)]
    return sum({id(a): int(a.nbytes) for a in arrays}.values())
