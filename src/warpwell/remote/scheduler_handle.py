"""`PoolHandle`: a task that was submitted to the devices of a pool."""

from __future__ import annotations

import threading

from ..pool import Device
from ..scheduler import Handle, Task
from ..scheduler.handle import Runner


class PoolHandle(Handle):
    """A `Handle` whose task runs on one device of a pool.

    If the device is lost, a task whose arguments are all arrays and numbers of this process runs again on another
    device; the `result` of other tasks raises `TaskLostError`. Callbacks run in a thread of the scheduler: they must
    not wait.

    Attributes
    ----------
    device : Device or None
        The device that has or had the task; None until it is placed.
    tries : int
        How many devices the task was given to.
    """

    def __init__(self, places: Runner, task: Task, number: int) -> None:
        super().__init__(places, task)
        self.number = number
        self.device: Device | None = None
        self.tries = 0
        self._settled = threading.Lock()

    def settle(self, error: BaseException | None, cancelled: bool = False) -> None:
        """Set the result, for everybody who waits; only the first call counts."""
        if self._settled.acquire(blocking=False):
            super().settle(error, cancelled)
