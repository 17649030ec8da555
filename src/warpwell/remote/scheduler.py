"""`PoolScheduler`: a scheduler whose tasks run on the devices of a pool; ``Scheduler(devices=...)`` creates one."""

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
from ..pool import Buffer, Code, Device, Remote, pack_arguments
from ..scheduler import Handle, Policy, Profile, Scheduler, Tenant
from ..scheduler.extend import Log, Request, Task
from ..scheduler.scheduler import require_launch
from ..scheduler.task import require_profile
from ..scheduler.tenants import read_tenants
from ..targets import Launch, viewed
from ..targets.blocks import BLOCK_INDICES
from .placement import Member, Placements


class PoolScheduler(Scheduler):
    """Places each task on a device of a pool. The device's own scheduler runs it according to the policy.

    A task with buffers among its arguments, or with arrays that a device has opened, is placed on that device, and runs
    after all previous calls of the device's default stream. Other tasks are placed on the device with the least
    predicted load, which is computed from profiles or measured times of kernels. All tasks of a request go to one
    device. NumPy arrays are copied to the device when the task is placed, and copied back before its handle is done;
    read-only arrays are not copied back. The handles of a request with NumPy arrays are done together, after its last
    task.

    Use it as a `Scheduler`, with these differences: handles raise errors of the device's scheduler; `inspect` returns a
    list with an item for each device; `logs` returns the decisions; ``analyzer`` is called in this process.

    Tasks on the same array of this process run in the order of their submission, unless all of them only read it.

    Parameters
    ----------
    devices : Devices, Lease or iterable of Device
    policy, limit, tenants, analyzer, stuck_after
        See `Scheduler`. The quotas of tenants apply to each device.
    """

    def __init__(
        self,
        device: str | None = None,
        policy: str | Policy = "lanes",
        *,
        devices: Iterable[Device] | None = None,
        limit: int | None = None,
        tenants: Mapping[str, Any] | Iterable[Tenant] | None = None,
        analyzer: Callable[[Task], Profile] | None = None,
        executor: Any = None,
        stuck_after: float | None = 60.0,
        log: Log | None = None,
    ) -> None:
        for name, value in (("device", device), ("executor", executor), ("log", log)):
            if value is not None:
                raise errors.ArgumentError(f"{name}= is only valid for a scheduler of one device: omit it", name=name)
        self.devices = tuple(devices or ())
        if not self.devices:
            raise errors.ArgumentError("devices= is empty: pass at least one device", name="devices")
        if len({id(d) for d in self.devices}) < len(self.devices):
            raise errors.ArgumentError("devices= contains a device twice: pass each device once", name="devices")
        self._analyzer = analyzer
        settings = None if tenants is None else read_tenants(tenants)
        options = {"policy": policy, "limit": limit, "stuck_after": stuck_after}
        members: list[Member] = []
        try:
            for d in self.devices:
                members.append(Member(d, settings, options))
            for member in members:
                member.start()
        except BaseException:
            for member in members:
                member.close(cancel=True)
            raise
        self._members = {id(m.device): m for m in members}
        self._placements = Placements(members, self._new_order())
        weakref.finalize(self, self._placements.retire).atexit = False

    def task(
        self,
        launch: Launch,
        *args: Any,
        name: str | None = None,
        memory: int | str | None = None,
        profile: Profile | None = None,
        size: dict[str, float] | None = None,
        order: str = "data",
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
        code = Code.of(kernel)  # here, because it captures the current values of the kernel's global variables
        title = name or code.name
        total = math.prod(launch.shape)
        if total < 1:
            raise errors.ArgumentError(f"the launch of {title!r} over {launch.shape} has no blocks")
        args = viewed(kernel, args)
        self._find_home([args])
        indices_per_block = BLOCK_INDICES if getattr(kernel, "block", 1) is None else 1
        task = Task(
            title,
            -(-total // indices_per_block),
            launch=launch,
            arguments=_view_buffers(args),
            memory=cast(int, 0 if memory is None else memory),  # `Task` parses text
            size=size or {},
            profile=Profile(source="unknown") if profile is None else profile,
            **options,
        )
        task.memory = max(task.memory, _device_bytes(args))
        # a device orders the tasks that use its buffers
        task.accesses = self._accesses(launch, [a if isinstance(a, np.ndarray) else 0 for a in args], order)
        if profile is None and self._analyzer is not None:
            task.profile = require_profile(self._analyzer(task), title)
        return task

    def _is_short(self, task: Task) -> bool:
        return False  # a device runs the launches of a request as tasks

    def _accept(self, request: Request, after: Sequence[Future[Any]]) -> list[Handle]:
        tasks = request.tasks
        home = self._find_home([t.arguments for t in tasks])
        for task in tasks:
            self._check(task, [home] if home is not None else list(self._members.values()))
        return list(self._placements.submit(request.name, tasks, home, after))

    def _find_home(self, arguments: Sequence[Sequence[Any]]) -> Member | None:
        """Return the member whose device holds buffers among the arguments, or None; check the arguments."""
        owners = {id(d): d for args in arguments for a in args if (d := getattr(a, "warpwell_place", None)) is not None}
        if len(owners) > 1:
            numbers = ", ".join(str(d.index) for d in owners.values())
            raise errors.ArgumentError(f"the arguments are on devices {numbers}: copy them to one device")
        member = None
        for key, owner in owners.items():
            member = self._members.get(key)
            if member is None:
                raise errors.ArgumentError(
                    f"an argument is on device {owner.index}, which the scheduler does not use: copy it to another one"
                )
        device: Any = member.device if member is not None else self.devices[0]
        for args in arguments:
            for value in args:
                if isinstance(value, np.ndarray) and value.dtype.hasobject:
                    raise errors.DTypeError(f"an array of {value.dtype} cannot be sent: it contains Python objects")
            pack_arguments([a for a in args if not isinstance(a, np.ndarray)], device.handle_of)
        return member

    def _check(self, task: Task, members: Sequence[Member]) -> None:
        """Raise if no device can ever run a task."""
        members = [m for m in members if m.can_run(task)]
        if not members:
            raise errors.DeviceNotFoundError(f"CUDA source {task.name!r} needs a GPU: pass a device with one")
        quotas = [m.tenants.account(task.tenant).memory for m in members]
        limit = max(min(m.capacity.memory, math.inf if q is None else q) for m, q in zip(members, quotas, strict=True))
        if task.memory > limit:
            raise errors.TaskMemoryError(
                f"task {task.name!r} needs {task.memory} bytes, but its tenant can use at most {limit} on a device: "
                "make the task smaller, or split it",
                task=task.name,
            )

    def inspect(self, function: Callable[[Any], Any]) -> list[Any]:  # type: ignore[override]
        """Return the result of ``function(core)``, called between two decisions, for each device that is not lost."""
        results = [m.call("inspect", function) for m in self._placements.members if m.is_alive]
        return [result.get() for result in results]

    def logs(self) -> dict[int, Log]:
        """Return the decisions and their reasons, by device index."""
        results = {m.device.index: m.call("log") for m in self._placements.members if m.is_alive}
        return {index: Log.read(io.StringIO(result.get())) for index, result in results.items()}

    @property
    def failure(self) -> BaseException | None:
        """The loss of the last device, or None while a device is left."""
        if any(m.is_alive for m in self._placements.members):
            return None
        last = self._placements.members[-1].device
        return errors.DeviceLostError(f"device {last.index} is gone, the last one: {last.lost}", device=last.index)

    def _end(self, cancel: bool) -> None:
        self._placements.close(cancel)


def _view_buffers(args: Sequence[Any]) -> tuple[Any, ...]:
    """Replace buffers by views, so that the caller may free the buffers before the arguments are sent."""
    views: dict[int, Any] = {}
    for value in args:
        if isinstance(value, Buffer) and value.ndim and id(value) not in views:
            with contextlib.suppress(errors.DeviceLostError):  # the handle raises it
                views[id(value)] = value[:]
    return tuple(views.get(id(a), a) for a in args)


def _device_bytes(args: Sequence[Any]) -> int:
    """Return the size in bytes of the arguments in device memory, each counted once, without arrays on storage."""
    arrays = [a for a in args if hasattr(a, "nbytes") and not isinstance(a, Remote | np.generic)]
    return sum({id(a): int(a.nbytes) for a in arrays}.values())
