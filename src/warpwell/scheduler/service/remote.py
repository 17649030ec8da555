"""`RemoteHandle` and `RemoteArray`: a task, and an array on the device, of a service in another process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..task import State

if TYPE_CHECKING:
    from .client import Client


class RemoteHandle(Future[None]):
    """A task that was submitted to a service; a future like `Handle`.

    `result` returns None once the task has ended and what it wrote is in the caller's arrays. It raises what `Handle`
    raises, and `ServiceError` where the service is gone, or says nothing for some seconds. Callbacks run in the thread
    that hears the service: they must not wait.

    Attributes
    ----------
    name : str
        The kernel's.
    """

    def __init__(self, client: Client, number: int, name: str, targets: list[NDArray[Any] | None]) -> None:
        super().__init__()
        self.name = name
        self.number = number
        self._client = client
        self._targets = targets

    @property
    def state(self) -> State:
        """Where the task is (asks the service)."""
        if self.done():
            if self.cancelled():
                return State.CANCELLED
            return State.DONE if self.exception() is None else State.FAILED
        return self._client.state_of(self)

    def running(self) -> bool:
        """Tell whether the task has a place on the device now."""
        return self.state in (State.RUNNING, State.STOPPING)

    def cancel(self) -> bool:
        """Ask for the end of the task; see `Handle.cancel`."""
        if self.done():
            return self.cancelled()
        return self._client.cancel(self)

    def settle(
        self, error: BaseException | None = None, *, cancelled: bool = False,
        changed: dict[int, NDArray[Any]] | None = None,
    ) -> None:  # fmt: skip
        """Put what came into the caller's arrays, and tell everybody who waits (once)."""
        if self.done():
            return
        if cancelled:
            super().cancel()
            self.set_running_or_notify_cancel()
            return
        try:
            for place, values in (changed or {}).items():
                target = self._targets[place]
                if target is not None:
                    np.copyto(target, values)
        except (ValueError, IndexError) as wrong:
            error = errors.SchedulerError(
                f"the result of task {self.name!r} does not fit into the array that was passed ({wrong}): leave arrays "
                "as they are until the task has ended",
                task=self.name,
            )
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(None)


class RemoteArray:
    """An array on the device of a service; kernels take it as an argument, and it stays there between them.

    It dies with the client's connection, and with the process that owns the device: then tasks that use it raise
    `TaskLostError`.
    """

    def __init__(self, client: Client, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.client = client
        self.number = number
        self.shape = shape
        self.dtype = dtype

    def numpy(self) -> NDArray[Any]:
        """Return a copy in host memory. Tasks that write to it should have ended.

        Raises
        ------
        TaskLostError
            The process that owned it is gone.
        ServiceError
            The service is gone.
        """
        return self.client.fetch(self)

    def free(self) -> None:
        """Give the memory back. Tasks that were submitted before go on with it."""
        self.client.free(self)

    def __repr__(self) -> str:
        return f"<RemoteArray {self.number}: {self.dtype} {self.shape}>"
