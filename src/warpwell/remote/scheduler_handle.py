"""`PoolHandle`: a task that was submitted to the devices of a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..pool.device import Device
from ..pool.host_arrays import HostArrays
from ..scheduler.handle import Handle
from ..scheduler.task import Task

if TYPE_CHECKING:
    from .scheduler_member import Member
    from .scheduler_places import Places


class PoolHandle(Handle):
    """A `Handle` whose task runs on some device of a pool.

    Where the device is lost, a task whose arguments are all arrays and numbers of this process runs again on another;
    for others `result` raises `TaskLostError`. Callbacks run in a thread of the scheduler: they must not wait.

    Attributes
    ----------
    device : Device or None
        Where it is, or was; None as long as it waits for a place.
    tries : int
        Devices that it was given to.
    """

    def __init__(self, places: Places, task: Task, number: int) -> None:
        super().__init__(places, task)
        self.number = number
        self.device: Device | None = None
        self.tries = 0
        self._settled = threading.Lock()

    def settle(self, error: BaseException | None, cancelled: bool = False) -> None:
        """Tell everybody who waits; the first call counts."""
        if self._settled.acquire(blocking=False):
            super().settle(error, cancelled)


class Unit:
    """Tasks that go to a device together, in order.

    Attributes
    ----------
    handles : sequence of PoolHandle
    home : Member or None
        Where its buffers are.
    staged : int
        Bytes of this process that go with it.
    next : Unit or None
        What comes after it in its request: tasks with arrays of this process go one by one, since the next one reads
        what this one has brought back.
    member : Member or None
        Where it is.
    sent : bool
        Whether the device knows of it: its arrays are there, and what was cancelled before is not in it.
    given_up : bool
        Whether it is not to be tried again.
    seconds : float
        Predicted.
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
        """On whose account it runs."""
        return self.handles[0].task.tenant

    @property
    def tasks(self) -> list[Task]:
        """What it has."""
        return [h.task for h in self.handles]

    @property
    def memory(self) -> int:
        """Bytes that its largest task holds."""
        return max(h.task.memory for h in self.handles)

    def rest(self) -> list[PoolHandle]:
        """Return its handles, and those of what comes after it."""
        found = list(self.handles)
        unit = self.next
        while unit is not None:
            found += unit.handles
            unit = unit.next
        return found
