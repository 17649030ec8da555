"""Transport: access of this process to the registers of one controller; its failure, and its generations."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NoReturn

from .. import errors
from ..nvme.controller import ALL_ONES, CSTS, csts_fatal, csts_ready
from .arena import DmaArena

WATCH_SECONDS = 0.05
"""Period at which threads that wait for a controller check its state."""


class Transport(ABC):
    """Access to a controller.

    Registers are in BAR0; offsets are in bytes. Several threads may call all methods concurrently. If the
    controller has failed, each method raises the error that names the cause.

    Parameters
    ----------
    address : str
        Name of the drive in messages, for example ``"0000:04:00.0"``.
    arena : DmaArena
        The memory that the controller reaches, by the addresses that it has in this process.

    Attributes
    ----------
    failure : DriveLostError or None
        Why the controller must not be used, or None.
    generation : int
        Number of recoveries. Queues, namespaces and media record the generation in which they were made, and refuse
        in a later one.
    """

    def __init__(self, address: str, arena: DmaArena) -> None:
        self.address = address
        self.arena = arena
        self.failure: errors.DriveLostError | None = None
        self.generation = 0
        self._pid = os.getpid()
        self._failing = threading.RLock()  # A signal handler may acquire it again.
        self._recovering = threading.local()

    @abstractmethod
    def read32(self, offset: int) -> int:
        """Return a register of 32 bits.

        Raises
        ------
        DriveLostError
            The controller does not answer, or has failed before.
        ForkError
            This process was forked from the process that opened the drive.
        ClosedError
            The transport is closed.
        """

    @abstractmethod
    def write32(self, offset: int, value: int) -> None:
        """Store to a register of 32 bits; raises as `read32`."""

    def read64(self, offset: int) -> int:
        """Return a register of 64 bits, lower half first; raises as `read32`."""
        low = self.read32(offset)
        return low | self.read32(offset + 4) << 32

    def write64(self, offset: int, value: int) -> None:
        """Store to a register of 64 bits, lower half first; raises as `read32`. Never for doorbells."""
        self.write32(offset, value & 0xFFFFFFFF)
        self.write32(offset + 4, value >> 32)

    @abstractmethod
    def native_store(self) -> tuple[int, int]:
        """Return a native function that stores to registers without the interpreter lock, and its state.

        ``function(state, offset, value, 0, 0, 0)`` (`targets.native`) stores 32 bits after all earlier stores of the
        calling thread. It returns 0, or -1 if the controller has failed or is closed.
        """

    def examine(self) -> None:
        """Read the status of the controller; a controller that is absent, disabled or in a fatal state fails.

        Raises
        ------
        DriveLostError, ForkError, ClosedError
        """
        generation = self.generation
        status = self.read32(CSTS)
        if status == ALL_ONES:
            self.fail("its registers read as all ones: it was removed, or is not powered", generation)
        elif csts_fatal(status):
            self.fail(f"it reports a fatal error (CSTS {status:#x})", generation)
        elif not csts_ready(status):
            self.fail(f"it is no longer enabled (CSTS {status:#x}): something has reset it", generation)
        self.check()

    def watch(self, command: str, age: float, limit: float, generation: int) -> None:
        """Check a controller that a thread waits for; call this every `WATCH_SECONDS`.

        Parameters
        ----------
        command : str
            The command in flight, for the message of a time-out: ``"read was"``.
        age, limit : float
            Seconds since its submission, and the time-out.
        generation : int
            Generation in which it was submitted.

        Raises
        ------
        DriveLostError, ForkError, ClosedError
        """
        if age > limit:
            self.fail_timeout(command, limit, generation)
        self.examine()

    @abstractmethod
    def reset(self) -> None:
        """Stop the controller by force, so that it never accesses the arena again. It has failed after that.

        Raises
        ------
        DriveError
            The controller cannot be stopped: no memory of the arena may be reused.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the controller (idempotent). It must be disabled or reset."""

    def fail(self, why: str, generation: int | None = None) -> errors.DriveLostError:
        """Mark the controller as failed, once; return the error. Freed memory stays in quarantine until a reset.

        An observation from an earlier `generation` changes nothing: the controller has been recovered since then.
        """
        with self._failing:
            error = errors.DriveLostError(f"drive {self.address} is lost: {why}", drive=self.address)
            if generation not in (None, self.generation):
                return error
            if self.failure is None:
                self._disable_stores()
                self.arena.quarantine()
                self.failure = error
            return error if self._is_recovering() else self.failure

    def fail_timeout(self, command: str, seconds: float, generation: int | None = None) -> errors.DriveLostError:
        """Mark the controller as failed because of a time-out; `command` is, for example, ``"read was"``."""
        return self.fail(f"{command} not completed within {seconds:g} s", generation)

    # -- recovery: see `Drive.recover` -----------------------------------------------------------------------------

    def _disable_stores(self) -> None:  # noqa: B027 - a native store that calls `check` needs neither
        """Make native stores fail from now on."""

    def _enable_stores(self) -> None:  # noqa: B027 - see `_disable_stores`
        """Let native stores reach the controller again."""

    def restore(self) -> None:  # noqa: B027 - a reset does not clear these in every controller
        """Give the controller its addresses and the bus again, which a reset clears; raises as `read32`."""

    def reset_function(self) -> bool:
        """Reset the controller by force, so that it can be enabled again; return False if that is not possible."""
        return False

    def pass_generation(self) -> None:
        """Begin a new generation; the controller is disabled, and has failed."""
        with self._failing:
            self.generation += 1

    def revive(self) -> None:
        """Use the controller again: it was enabled in a new generation."""
        with self._failing:
            self._enable_stores()
            self.failure = None

    def require(self, generation: int) -> None:
        """Raise `DriveLostError` if `generation` is an earlier one."""
        if generation != self.generation:
            raise errors.DriveLostError(
                f"drive {self.address} was lost and has been started again since: unflushed data may be lost. Create "
                "namespaces, queues and media of the drive again; call recover() on arrays",
                drive=self.address,
            )

    def check(self) -> None:
        """Raise if this process cannot use the drive.

        Raises
        ------
        DriveLostError, ForkError
        """
        if os.getpid() != self._pid:
            raise errors.ForkError(
                f"drive {self.address} was opened in process {self._pid}, from which this process ({os.getpid()}) was "
                "forked: use it there, or open another drive here"
            )
        if self.failure is not None and not self._is_recovering():
            self._raise_failure()

    def _is_recovering(self) -> bool:
        return getattr(self._recovering, "active", False)

    @contextlib.contextmanager
    def despite_failure(self) -> Iterator[None]:
        """Let this thread use registers in the block, to disable a failed controller."""
        self._recovering.active = True
        try:
            yield
        finally:
            self._recovering.active = False

    def _raise_failure(self) -> NoReturn:
        assert self.failure is not None
        # Each call makes a new error, because a raised error collects the frames of its callers.
        raise errors.DriveLostError(str(self.failure), drive=self.address)
