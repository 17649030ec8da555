"""`HostQueue`: a queue pair on which the host submits a command and polls for its completion."""

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
from .transport import WATCH_SECONDS, Transport

SPINS = 200
"""Number of polls of the completion queue before a wait sleeps between two polls."""


@dataclass(frozen=True)
class Answer:
    """The content of a completion.

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
    """A queue pair of the host. It carries out one command at a time; several threads may call `run`.

    `Drive.host_queue` creates a queue, and `Drive.close` ends it.

    Parameters
    ----------
    transport : Transport
    entries : int
        Entries of each ring, at least 2.

    Attributes
    ----------
    qid : int
        Queue identifier; 0 is the admin queue, and -1 a queue that is not connected.
    submission, completion : Block
        The rings, zeroed.
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
        """Use the queue that the controller has created as `qid`; its doorbells are `stride` bytes apart."""
        self.qid = qid
        self._doorbells = submission_doorbell(qid, stride), completion_doorbell(qid, stride)

    def run(self, command: NDArray[Any], name: str, *, seconds: float, nsid: int | None = None) -> Answer:
        """Carry out one command and return its completion, for any status.

        Ctrl-C waits until the command is complete, so that no command is left in flight.

        Parameters
        ----------
        command : ndarray
            One `COMMAND`; its cid is set here. Its data are in the arena and must stay there.
        name : str
            Name of the command, for messages.
        seconds : float
            Time-out; the drive fails if the command takes longer.
        nsid : int, optional
            The namespace, for messages.

        Raises
        ------
        DriveLostError, ForkError, ClosedError
        """
        self.transport.check()
        with interruptible(lambda: None), self._lock:
            if self._busy:  # a command of this thread uses the queue
                raise self._fail(f"a signal's handler ran {name} in the middle of another command")
            self.transport.check()
            self.transport.require(self.generation)
            self._cid = (self._cid + 1) & 0x7FFF
            command["cid"] = self._cid
            self._commands[self._tail] = np.frombuffer(command.tobytes(), np.int64)
            self._tail = (self._tail + 1) % self.entries
            try:
                self._busy = True
                self.transport.write32(self._doorbells[0], self._tail)
                word = self._wait(name, seconds)
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
            except BaseException:
                # A signal handler raised. The next command would mistake this completion for its own.
                self._fail(f"{name} was abandoned")
                raise
            finally:
                self._busy = False
            return answer

    def quiesce(self, seconds: float) -> bool:
        """Wait until no thread runs a command here, after a failure; return False on time-out."""
        if not self._lock.acquire(timeout=seconds):
            return False
        self._lock.release()
        return not self._busy

    def _fail(self, why: str) -> errors.DriveLostError:
        return self.transport.fail(why, self.generation)

    def _wait(self, name: str, seconds: float) -> int:
        """Return the second word of the next completion."""
        spins, start = 0, time.monotonic()
        next_look = start + WATCH_SECONDS
        while True:
            word = int(self._completions[self._head, 1])
            if word1_phase(word) == self._phase:
                return word
            spins += 1
            if spins < SPINS:
                continue
            if (now := time.monotonic()) >= next_look:
                next_look = now + WATCH_SECONDS
                self.transport.watch(f"{name} was", now - start, seconds, self.generation)
            time.sleep(0.00005 if spins < 4 * SPINS else 0.001)

    def _check(self, word: int, name: str) -> None:
        found = {"cid": word1_cid(word), "sqid": word1_sqid(word), "sqhd": word1_sqhd(word)}
        expected = {"cid": self._cid, "sqid": self.qid, "sqhd": self._tail}
        if found != expected:
            raise self._fail(f"it completed {name} with {found} instead of {expected}: it violates the specification")
