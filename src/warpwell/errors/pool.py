"""Errors between an application and the devices of its pool."""

from __future__ import annotations

from .general import WarpwellError


class PoolError(WarpwellError, RuntimeError):
    """A failure between an application and the devices of its pool."""


class DeviceLostError(PoolError, ConnectionError):
    """The agent of a device died or stopped answering; the data on the device are lost.

    Parameters
    ----------
    device : int, optional
        Its index among the application's devices.
    """

    def __init__(self, message: str, *, device: int | None = None) -> None:
        super().__init__(message)
        self.device = device


class RemoteError(PoolError):
    """A call failed on its device. The next synchronization raises this; ``__cause__`` is the error itself.

    Parameters
    ----------
    call : str, optional
        The call that failed, for example ``"launch of 'scale'"``.
    remote_traceback : str, optional
        The traceback on the agent.
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
        The agent and its host.
    """

    def __init__(self, message: str, *, agent: str | None = None) -> None:
        super().__init__(message)
        self.agent = agent


class PoolVersionError(PoolError):
    """The application and an agent have different versions of Warpwell, Python or the protocol."""


class CodeError(WarpwellError, TypeError):
    """A kernel or function cannot be sent to a device, because it refers to something that cannot be serialized."""
