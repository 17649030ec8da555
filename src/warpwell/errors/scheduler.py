"""Errors of tasks that share a device."""

from __future__ import annotations

from .general import WarpwellError


class SchedulerError(WarpwellError, RuntimeError):
    """A scheduler could not run a task.

    Parameters
    ----------
    task : str, optional
        The task's name.
    """

    def __init__(self, message: str, *, task: str | None = None) -> None:
        super().__init__(message)
        self.task = task


class TaskLostError(SchedulerError):
    """The device or process that ran a task died, and the task's input was lost with it."""


class TaskMemoryError(SchedulerError, MemoryError):
    """A task needs more memory than the device has, or than its tenant may use."""


class ServiceError(SchedulerError, ConnectionError):
    """A scheduler service does not answer, or refuses a call."""


class MessageSizeError(ServiceError, ValueError):
    """A message to or from a scheduler service is too large; the connection stays usable."""


class TurnTimeoutError(WarpwellError, TimeoutError):
    """A turn at a GPU did not come in the time that its caller would wait.

    Parameters
    ----------
    device : str, optional
        Name of the device.
    """

    def __init__(self, message: str, *, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device
