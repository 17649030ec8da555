"""`OpeningProcess`: whose threads serve a cache."""

from __future__ import annotations

import os

from .. import errors


class OpeningProcess:
    """The process that opened something, whose threads a process that is forked from it does not have."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is another process, forked from it."""
        return self.pid != os.getpid()

    def require(self, name: str) -> None:
        """Raise `ForkError` in a process that was forked from it."""
        if self.forked:
            raise errors.ForkError(
                f"{name} was opened in process {self.pid} and this is {os.getpid()}, forked from it: open it again "
                f"here (multiprocessing: use the spawn method, or open it in the worker)"
            )
