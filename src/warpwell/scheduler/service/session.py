"""`Session`: one client of a service, as the service sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from . import wire
from .owner_process import SendQueue
from .protocol import ServiceConnection

LINES = 4
"""Lines of messages to the owner that a tenant has: importing holds up those on the same line."""

MAX_TASKS = 65_536
"""Tasks of a client that have not ended, at most."""


class Session:
    """A client that got in.

    Parameters
    ----------
    connection : ServiceConnection
    number : int
        Of the client, in the service.
    tenant : str
    user : int
        Its number, as the kernel of the operating system says.
    own : bool
        Whether it is a process of the owner's user.

    Attributes
    ----------
    coming : int
        Bytes of its message that is on its way in.
    tasks : dict
        The service's number of each of its tasks that has not ended, by the client's number.
    line : str
        What its messages to the owner pass: in order, and not past each other.
    badly : dict
        Its numbers of tasks that failed or were cancelled.
    """

    def __init__(self, connection: ServiceConnection, number: int, tenant: str, user: int, *, own: bool) -> None:
        self.connection = connection
        self.number = number
        self.tenant = tenant
        self.user = user
        self.own = own
        self.line = f"{tenant}/{number % LINES}"
        self.coming = 0
        self.tasks: dict[int, int] = {}
        self.badly: dict[int, None] = {}
        self._last = -1
        self.outbox = SendQueue(connection, f"warpwell-to-client-{number}")

    def new_tasks(self, theirs: Sequence[int]) -> None:
        """Take the client's numbers of the tasks of a request; they ascend.

        Raises
        ------
        ServiceError
            One was used before, or there are too many. None is taken.
        """
        for last, number in zip((self._last, *theirs), theirs, strict=False):
            if number <= last:
                raise errors.ServiceError(f"task {number} comes after {last}: numbers of tasks ascend")
        if len(self.tasks) + len(theirs) > MAX_TASKS:
            raise errors.ServiceError(f"you may have {MAX_TASKS} tasks at the service: wait for some of them")
        self._last = theirs[-1]

    def ended(self, theirs: int, *, badly: bool) -> None:
        """Note that a task has ended; tasks that come after one that ended badly are cancelled."""
        self.tasks.pop(theirs, None)
        if badly:
            self.badly[theirs] = None
            if len(self.badly) > MAX_TASKS:
                del self.badly[next(iter(self.badly))]

    def answer(
        self, call: int, header: dict[str, Any], arrays: Sequence[NDArray[Any]] = (),
        sent: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Answer a call; `sent` is called when the answer is sent, or when the client has gone."""
        self.outbox.put({**header, "type": "reply", "call": call}, arrays, sent)

    def answer_error(self, call: int, error: BaseException) -> None:
        """Answer a call that failed."""
        self.outbox.put({"type": "reply", "call": call, "error": wire.error_fields(error)})

    def refuse(self, why: str) -> None:
        """Tell the client that it is over, and end its connection."""
        with contextlib.suppress(errors.WarpwellError):
            self.outbox.put({"type": "refused", "message": why})
        self.close()
        self.connection.interrupt()

    def close(self) -> None:
        """Send the answers that are queued, for a moment, and stop."""
        self.outbox.close()


def bytes_of(text: str) -> NDArray[np.uint8]:
    """Return text as an array that travels."""
    return np.frombuffer(text.encode(), np.uint8)
