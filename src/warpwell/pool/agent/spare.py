"""`SpareDevice`: a device that an agent has only while it has joined the program (``--allocate use``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ... import errors
from ..launch.reservation import POLL_SECONDS, Claim, Reservation
from .runtime import Runtime


class SpareDevice:
    """The device of an agent that joins and leaves.

    The runtime is opened when the device first joins, and stays: compiled kernels and libraries refer to its context.

    Parameters
    ----------
    target : {"cpu", "cuda"}
    gpu : str or None
        UUID of the GPU, or None for the CPU.
    open_runtime : callable
        Returns the runtime.
    note : callable
        Takes a line about the position in the queue of jobs that wait for GPUs.

    Attributes
    ----------
    joined : bool
    """

    def __init__(
        self, target: str, gpu: str | None, open_runtime: Callable[[], Runtime], note: Callable[[str], None] = print
    ) -> None:
        self.joined = False
        self._target, self._gpu, self._open, self._note = target, gpu, open_runtime, note
        self._runtime: Runtime | None = None
        self._claim: Claim | None = None
        self._reservations: dict[int, threading.Event] = {}

    def info(self) -> dict[str, Any]:
        """Return what the agent reports in addition to the properties of its runtime."""
        unknown = {"target": self._target, "memory": None} if self._runtime is None else {}
        return {**unknown, "joined": self.joined, "gpu": self._gpu}

    def join(self) -> Runtime:
        """Claim the device, and return its runtime.

        Raises
        ------
        AgentError
            Another job has the GPU for itself.
        """
        if not self.joined:
            self._claim = None if self._gpu is None else Claim(self._gpu)
            try:
                self._runtime = self._runtime or self._open()
            except BaseException:
                self._free()
                raise
            self.joined = True
        assert self._runtime is not None
        return self._runtime

    def leave(self) -> None:
        """Return unused memory to the device, and release the claim."""
        if self.joined and self._runtime is not None:
            self._runtime.trim()
        self.joined = False
        self._free()

    def _free(self) -> None:
        if self._claim is not None:
            self._claim.free()
            self._claim = None

    def reserve(
        self, number: int, gpus: Sequence[str], count: int, seconds: float, answer: Callable[[Any, Any], None]
    ) -> None:
        """Reserve `count` of the GPUs in a thread; hold them until `release`.

        Parameters
        ----------
        number : int
            The request, for `release`.
        gpus : sequence of str
        count : int
        seconds : float
            Time to wait for GPUs that other jobs use.
        answer : callable
            ``answer(reserved, None)`` when the GPUs are reserved, or ``answer(None, error)``.
        """
        released = self._reservations[number] = threading.Event()

        def run() -> None:
            until = time.monotonic() + seconds
            reservation = Reservation(gpus, count, float("inf"), self._note if seconds else lambda _: None)
            try:
                while not (reserved := reservation.poll()):
                    if time.monotonic() >= until:
                        raise errors.StallError(reservation.shortage(), seconds=seconds)
                    if released.wait(POLL_SECONDS):
                        return
                answer(reserved, None)
                released.wait()
            except Exception as error:
                answer(None, error)
            finally:
                reservation.close()
                self._reservations.pop(number, None)

        threading.Thread(target=run, name="warpwell reservation", daemon=True).start()

    def release(self, number: int | None = None) -> None:
        """Release the GPUs of a reservation, or of all; stop waiting for them."""
        for key, released in list(self._reservations.items()):
            if number in (None, key):
                released.set()
