"""Errors of tasks that share a device."""

from __future__ import annotations

from .general import WarpwellError


class SchedulerError(WarpwellError, RuntimeError):
    """A scheduler could not carry a task out.

    Parameters
    ----------
    task : str, optional
        The task's name.
    """

    def __init__(self, message: str, *, task: str | None = None) -> None:
        super().__init__(message)
        self.task = task


class TaskLostError(SchedulerError):
    """The device or the process that ran a task died, and its input is gone with it."""


class TaskMemoryError(SchedulerError, MemoryError):
    """A task is larger than the device's memory, or than its tenant's part of it."""


class ServiceError(SchedulerError, ConnectionError):
    """A scheduler service does not answer, or refused the call."""


class MessageSizeError(ServiceError, ValueError):
    """A message to or from a scheduler service is larger than it may be; the connection goes on."""
