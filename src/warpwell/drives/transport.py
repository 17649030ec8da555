"""Transport: how this process reaches the registers of one controller, and the controller this process's memory."""

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


class Transport(ABC):
    """The way to one controller.

    Registers are those of BAR0; an offset is in bytes. All methods may be called by several threads at once. Once the
    controller is lost, each of them raises the error that says why.

    Parameters
    ----------
    address : str
        What the drive is called in messages, for example ``"0000:04:00.0"``.
    arena : DmaArena
        The memory that the controller reaches, by the addresses that it has in this process.

    Attributes
    ----------
    lost : DriveLostError or None
        Why the controller is not used any more.
    generation : int
        How often it was started again after a loss. What was made before (queues, namespaces, media) keeps the number
        of its time, and refuses when that has passed.
    """

    def __init__(self, address: str, arena: DmaArena) -> None:
        self.address = address
        self.arena = arena
        self.lost: errors.DriveLostError | None = None
        self.generation = 0
        self._pid = os.getpid()
        self._losing = threading.RLock()  # a signal's handler may come back for it
        self._despite = threading.local()

    @abstractmethod
    def read32(self, offset: int) -> int:
        """Return a register of 32 bits.

        Raises
        ------
        DriveLostError
            There is no answer, now or before.
        ForkError
            This process was forked from the one that opened the drive.
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
        """Return what threads without the interpreter lock store to registers by: a native function and its state.

        ``function(state, offset, value, 0, 0, 0)`` (`targets.native`) stores 32 bits after everything that the calling
        thread stored before. It returns 0, or -1 where the store cannot be made: the controller is lost, or closed.
        """

    @abstractmethod
    def alive(self) -> bool:
        """Tell whether the controller is still there, without waiting; False also loses it."""

    def examine(self) -> None:
        """Look whether the controller is there and well; one that is not is lost. Whoever waits for it calls this.

        Raises
        ------
        DriveLostError, ForkError, ClosedError
        """
        generation = self.generation
        if self.alive():
            status = self.read32(CSTS)
            if status == ALL_ONES:
                self.lose("its registers read as all ones: it is not there any more", generation)
            elif csts_fatal(status):
                self.lose(f"it reports a fatal error (CSTS {status:#x})", generation)
            elif not csts_ready(status):
                self.lose(f"it is not enabled any more (CSTS {status:#x}): something has reset it", generation)
        self.check()

    @abstractmethod
    def reset(self) -> None:
        """Stop the controller by force, so that it never touches the arena again. It is lost after that.

        Raises
        ------
        DriveError
            It cannot be stopped: nothing in the arena may be used again.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the controller up (idempotent). It must be disabled, or reset."""

    def lose(self, why: str, generation: int | None = None) -> errors.DriveLostError:
        """Declare the controller lost, once; return the error. Freed memory waits for a reset from now on.

        What was seen in a `generation` that has passed loses nothing: the controller was started again since.
        """
        with self._losing:
            told = errors.DriveLostError(f"drive {self.address} is lost: {why}", drive=self.address)
            if generation not in (None, self.generation):
                return told
            if self.lost is None:
                self._cut()
                self.arena.hold()
                self.lost = told
            return told if self._is_despite() else self.lost

    # -- being started again: see `Drive.recover` ------------------------------------------------------------------

    def _cut(self) -> None:  # noqa: B027 - a native store that asks `check` needs neither
        """Let native stores fail from now on."""

    def _mend(self) -> None:  # noqa: B027 - see `_cut`
        """Let native stores reach the controller again."""

    def restore(self) -> None:  # noqa: B027 - not every controller loses them by a reset
        """Give the controller its addresses and the bus again, which a reset has taken; raises as `read32`."""

    def reset_function(self) -> bool:
        """Reset the controller by force, so that it can be started again; return whether that can be done."""
        return False

    def pass_generation(self) -> None:
        """Begin a new generation; the controller is silent, and still lost."""
        with self._losing:
            self.generation += 1

    def revive(self) -> None:
        """Use the controller again: it was started anew in a generation that nobody has used."""
        with self._losing:
            self._mend()
            self.lost = None

    def require(self, generation: int) -> None:
        """Raise `DriveLostError` for what was made in a generation that has passed."""
        if generation != self.generation:
            raise errors.DriveLostError(
                f"drive {self.address} was lost and has been started again since: what was not flushed may be gone. "
                "Take namespaces, queues and media from the drive again; call recover() on arrays",
                drive=self.address,
            )

    def check(self) -> None:
        """Raise where the drive cannot be used: it is lost, or the parent's.

        Raises
        ------
        DriveLostError, ForkError
        """
        if os.getpid() != self._pid:
            raise errors.ForkError(
                f"drive {self.address} was opened in process {self._pid}, and this is {os.getpid()}, forked from it: "
                "use it there, or open another drive here"
            )
        if self.lost is not None and not self._is_despite():
            self._raise_lost()

    def _is_despite(self) -> bool:
        return getattr(self._despite, "loss", False)

    @contextlib.contextmanager
    def despite_loss(self) -> Iterator[None]:
        """Let this thread use registers in the block, so that it can disable a controller that is lost."""
        self._despite.loss = True
        try:
            yield
        finally:
            self._despite.loss = False

    def _raise_lost(self) -> NoReturn:
        assert self.lost is not None
        # a new one each time: a raised error collects the frames of whoever catches it
        raise errors.DriveLostError(str(self.lost), drive=self.address)
