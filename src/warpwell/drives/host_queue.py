"""HostQueue: a queue pair on which the host submits a command and polls until it completes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._os import interruptible
from ..nvme import (
    COMMAND,
    COMPLETION,
    word1_cid,
    word1_phase,
    word1_sqhd,
    word1_sqid,
    word1_status,
)
from ..nvme.controller import completion_doorbell, submission_doorbell
from .transport import Transport

SPINS = 200
"""Looks at the completion queue before a wait begins to sleep."""
LOOK_SECONDS = 0.05
"""How often a wait looks whether the controller is still there and well."""


@dataclass(frozen=True)
class Answer:
    """What a completion says.

    Attributes
    ----------
    status : int
        15 bits, without the phase; 0 is success.
    dw0 : int
        The result, 32 bits.
    """

    status: int
    dw0: int


class HostQueue:
    """A queue pair of the host. Commands are carried out one at a time; several threads may call `run`.

    `Drive.host_queue` makes one, and `Drive.close` ends it.

    Parameters
    ----------
    transport : Transport
    entries : int
        Of each ring, 2 or more.

    Attributes
    ----------
    qid : int
        Its id; 0 is the admin queue, -1 one that the controller does not know yet.
    submission, completion : Block
        Its rings, zeroed.
    """

    def __init__(self, transport: Transport, entries: int) -> None:
        self.transport = transport
        self.generation = transport.generation
        self.qid = -1
        self.entries = entries
        self.submission = transport.arena.allocate(COMMAND.itemsize * entries)
        self.completion = transport.arena.allocate(COMPLETION.itemsize * entries)
        self._commands = self.submission.words.reshape(entries, -1)
        self._completions = self.completion.words.reshape(entries, -1)
        self._doorbells = 0, 0
        self._tail = self._head = self._cid = 0
        self._phase = 1
        self._lock = threading.RLock()
        self._busy = False

    def connect(self, qid: int, stride: int) -> None:
        """Begin: the controller knows the rings by the id `qid`; its doorbells are `stride` bytes apart."""
        self.qid = qid
        self._doorbells = submission_doorbell(qid, stride), completion_doorbell(qid, stride)

    def run(self, command: NDArray[Any], name: str, *, seconds: float, nsid: int | None = None) -> Answer:
        """Carry out one command and return what its completion says, whatever the status.

        Ctrl-C waits until the command is done, so that nothing is in flight that nobody waits for.

        Parameters
        ----------
        command : ndarray
            One `COMMAND`; its cid is set here. The memory that it names lies in the arena and must stay there.
        name : str
            Of the command, for messages.
        seconds : float
            A drive that takes longer is lost.
        nsid : int, optional
            The namespace, for messages.

        Raises
        ------
        DriveLostError, ForkError, ClosedError
        """
        self.transport.check()
        with interruptible(lambda: None), self._lock:
            if self._busy:  # this thread's own command
                raise self._lose(f"a signal's handler ran {name} in the middle of another command")
            self.transport.check()
            self.transport.require(self.generation)
            self._cid = (self._cid + 1) & 0x7FFF
            command["cid"] = self._cid
            self._commands[self._tail] = np.frombuffer(command.tobytes(), np.int64)
            self._tail = (self._tail + 1) % self.entries
            try:
                self._busy = True
                self.transport.write32(self._doorbells[0], self._tail)
                word = self._wait(name, time.monotonic() + seconds, seconds)
                answer = Answer(word1_status(word), int(self._completions[self._head, 0]) & 0xFFFFFFFF)
                self._check(word, name)
                self._head += 1
                if self._head == self.entries:
                    self._head, self._phase = 0, self._phase ^ 1
                self.transport.write32(self._doorbells[1], self._head)
            except errors.DriveLostError as error:
                raise errors.DriveLostError(
                    f"{error} (queue {self.qid}, {name})", drive=error.drive, namespace=nsid, command=name
                ) from None
            except BaseException:  # of another signal's handler: the answer would be taken for that of the next command
                self._lose(f"{name} was abandoned")
                raise
            finally:
                self._busy = False
            return answer

    def leave(self, seconds: float) -> bool:
        """Wait until no thread has a command here, which a loss ends; return whether that is so in time."""
        if not self._lock.acquire(timeout=seconds):
            return False
        self._lock.release()
        return not self._busy

    def _lose(self, why: str) -> errors.DriveLostError:
        return self.transport.lose(why, self.generation)

    def _wait(self, name: str, until: float, seconds: float) -> int:
        """Return the second word of the next completion."""
        spins, look = 0, time.monotonic() + LOOK_SECONDS
        while True:
            word = int(self._completions[self._head, 1])
            if word1_phase(word) == self._phase:
                return word
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            if now >= look:
                look = now + LOOK_SECONDS
                self.transport.examine()
            if now > until:
                raise self._lose(f"{name} was not completed within {seconds:g} s")
            time.sleep(0.00005 if spins < 4 * SPINS else 0.001)

    def _check(self, word: int, name: str) -> None:
        found = {"cid": word1_cid(word), "sqid": word1_sqid(word), "sqhd": word1_sqhd(word)}
        expected = {"cid": self._cid, "sqid": self.qid, "sqhd": self._tail}
        if found != expected:
            raise self._lose(
                f"it completed {name} with {found} and not {expected}: it does not keep to the specification"
            )
