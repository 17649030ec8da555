"""Recovery from the death of a device process: which request caused it, and in which order the requests run again.

A *token* names a request in all device processes of a service: the number of its session (32 bits), then the number
that its client gave it (32 bits). The *status page* holds the tokens of the requests that are being prepared (their
kernels imported) or are on the device. The page outlives the device process. When the device process dies, `Verdicts`
decides:

- The request that the device process named (because it was stuck), or that ran alone, is the culprit and never runs
  again.
- If there is no culprit, the requests on the page are suspects. The next device process runs them first, each alone
  (`Quarantine`). So each death convicts a request, or is followed by runs in which a culprit convicts itself.

Nothing here does I/O, waits or starts threads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ... import errors
from .messages import error_fields

SLOTS = 8192
"""Maximum number of tokens on a status page, which has 64 KiB. Requests beyond this number are not suspects."""

MAX_CULPRITS = 1024
"""Maximum number of culprits whose errors wait for the clients to resubmit them. Protection, not tuned."""

Start = Callable[[], object]
"""Function that starts a request."""


class StatusPage:
    """Tokens of requests that are being prepared or are on the device, in memory that service and device process share.

    Parameters
    ----------
    fd : int, optional
        Descriptor of an existing page; default: create one.

    Attributes
    ----------
    fd : int
    """

    def __init__(self, fd: int | None = None) -> None:
        nbytes = 8 * (2 + SLOTS)
        self.fd = os.memfd_create("warpwell-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if fd is None else fd
        if fd is None:
            os.truncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._values = np.frombuffer(mmap.mmap(self.fd, nbytes), np.uint64)
        self._slots: dict[int, int] = {}
        self._free = list(range(2, 2 + SLOTS))

    @property
    def alone(self) -> int:
        """Token of the request that runs alone, or 0."""
        return int(self._values[1])

    @alone.setter
    def alone(self, token: int) -> None:
        self._values[1] = token

    def reserve_numbers(self, count: int) -> int:
        """Return the first of `count` numbers of tasks that no device process of this service has used."""
        first = int(self._values[0])
        self._values[0] = first + count
        return first

    def add(self, token: int) -> None:
        """Add a token, unless it is there or the page is full."""
        if token not in self._slots and self._free:
            self._slots[token] = slot = self._free.pop()
            self._values[slot] = token

    def discard(self, token: int) -> None:
        """Remove a token, if it is there."""
        if (slot := self._slots.pop(token, None)) is not None:
            self._values[slot] = 0
            self._free.append(slot)

    def clear(self) -> list[int]:
        """Remove the tokens of a dead device process, and return them."""
        tokens = [int(token) for token in self._values[2:] if token]
        self._values[1:] = 0
        # A kernel that wrote to arbitrary memory may have changed the next number.
        self._values[0] = min(int(self._values[0]), 1 << 52)
        return tokens


class Verdicts:
    """Requests that ended a device process, or may have ended it.

    Attributes
    ----------
    culprits : dict
        Error of each culprit, as plain data, by token.
    suspects : list of int
        Tokens of the requests that must run alone.
    """

    def __init__(self) -> None:
        self.culprits: dict[int, dict[str, Any]] = {}
        self.suspects: list[int] = []

    def judge(self, running: list[int], alone: int, named: tuple[int, dict[str, Any]] | None, reason: str) -> None:
        """Decide after the death of a device process.

        Parameters
        ----------
        running : list of int
            Tokens on the status page.
        alone : int
            Token of the request that ran alone, or 0.
        named : tuple, optional
            Token and error of the request that the device process named as the culprit.
        reason : str
            Why the device process died, for messages.
        """
        if named is None and alone:
            named = alone, error_fields(errors.TaskLostError(reason))
        if named is not None:
            self.culprits[named[0]] = named[1]
            self.suspects = []
            while len(self.culprits) > MAX_CULPRITS:
                del self.culprits[next(iter(self.culprits))]
        elif running:
            self.suspects = running


class Quarantine:
    """Order of the requests that clients resubmit: suspects and the requests before them one by one, then the others.

    Parameters
    ----------
    suspects : iterable of int
        Tokens.

    Attributes
    ----------
    alone : int
        Token of the request that runs alone, or 0.
    """

    def __init__(self, suspects: Iterable[int] = ()) -> None:
        self.alone = 0
        self._suspects = set(suspects)
        self._held: dict[int, tuple[set[int], Start]] = {}

    def __contains__(self, token: int) -> bool:
        return token in self._held

    def admit(self, token: int, after: Iterable[int], start: Start) -> list[Start]:
        """Add a request that comes after others; return the functions to call now, in order."""
        # A client that has connected again resubmits the request that runs alone.
        if token == self.alone or not (self._suspects or self.alone):
            return [start]
        self._held[token] = {*after}, start
        needed = [token] if token in self._suspects else []
        while needed:
            before = [t for t in self._held[needed.pop()][0] if t in self._held and t not in self._suspects]
            self._suspects.update(before)
            needed += before
        return self._continue()

    def end(self, token: int) -> list[Start]:
        """Remove a request that has ended, or that was cancelled; return the functions to call now."""
        if token != self.alone and token not in self._held:
            return []
        self._held.pop(token, None)
        self._suspects.discard(token)
        if token == self.alone:
            self.alone = 0
        return self._continue()

    def expire(self, session: int | None = None) -> list[Start]:
        """Drop suspects (of a session) that were not resubmitted; return the functions to call now."""
        if self._suspects:
            self._suspects = {
                t
                for t in self._suspects
                if t in self._held or t == self.alone or (session is not None and t >> 32 != session)
            }
            return self._continue()
        return []

    def _continue(self) -> list[Start]:
        if self.alone:
            return []
        for token, (before, start) in self._held.items():
            if token in self._suspects and not before & self._held.keys():
                self.alone = token
                del self._held[token]
                return [start]
        if self._suspects:
            return []  # Their clients have not resubmitted them yet.
        found = [start for _, start in self._held.values()]
        self._held.clear()
        return found
