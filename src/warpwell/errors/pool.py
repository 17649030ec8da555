"""Errors between an application and the devices of its pool."""

from __future__ import annotations

from .general import WarpwellError


class PoolError(WarpwellError, RuntimeError):
    """Something went wrong between an application and the devices of its pool."""


class DeviceLostError(PoolError, ConnectionError):
    """The agent of a device died, or does not answer any more: what was on the device is lost.

    Parameters
    ----------
    device : int, optional
        Its index among the application's devices.
    """

    def __init__(self, message: str, *, device: int | None = None) -> None:
        super().__init__(message)
        self.device = device


class RemoteError(PoolError):
    """A call failed on its device. It is raised by the next synchronization; ``__cause__`` is the failure itself.

    Parameters
    ----------
    call : str, optional
        The call that failed, for example ``"launch of 'scale'"``.
    remote_traceback : str, optional
        As the agent printed it.
    """

    def __init__(self, message: str, *, call: str | None = None, remote_traceback: str | None = None) -> None:
        super().__init__(message)
        self.call = call
        self.remote_traceback = remote_traceback


class AgentError(PoolError):
    """Agents could not be started, or one ended before it was ready.

    Parameters
    ----------
    agent : str, optional
        Which one, and where.
    """

    def __init__(self, message: str, *, agent: str | None = None) -> None:
        super().__init__(message)
        self.agent = agent


class PoolVersionError(PoolError):
    """The other end runs another version of Warpwell, of Python or of the protocol."""


class CodeError(WarpwellError, TypeError):
    """A kernel or function cannot be sent to a device: something that it names cannot be serialized."""
