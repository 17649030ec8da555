"""BlockLaunch: a launch whose blocks are claimed one by one by workers, which can be stopped between two of them.

Workers claim blocks from a cursor, check before each claim whether they must leave, and always run the blocks that they
have claimed. So the state of a launch that was stopped is one number, and every block runs exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ... import errors
from ..._check import checked_device
from ..arguments import KernelArgument, begin, device_of, finish, participants
from ..compiler.virtual import returns_early, virtual_copy
from ..fault import LaunchFlag
from ..memory import Block, memory_for
from ..signature import configuration
from . import cpu
from .control import CONTROL_WORDS, fresh

BLOCK_INDICES = 256
"""Indices of a block of a kernel that is launched over indices."""


class BlockLaunch:
    """A launch with its arguments, block by block.

    Parameters
    ----------
    launch : Launch
        ``kernel[n]``.
    args : sequence
    device : str, optional
        As for a launch.

    Attributes
    ----------
    blocks : int
    threads : int
        Threads of a block (1 on `cpu` for block kernels).
    preemptible : bool
        Whether workers can run the blocks. If not, the launch runs whole.
    reason : TransformError or None
        Why workers cannot run the blocks.

    Raises
    ------
    ArgumentError
        The launch is empty, or an argument is on another device.
    """

    def __init__(self, launch: Any, args: Any, device: str | None = None) -> None:
        self.launch = launch
        self.args = tuple(args)
        self.device = checked_device(device or device_of(self.args), among=("cpu", "cuda"))
        self.kernel = launch.kernel
        self.name = str(launch.kernel.__name__)
        self.total = math.prod(launch.shape)
        if self.total < 1:
            raise errors.ArgumentError(f"launch of {self.name!r} over {launch.shape} has no blocks")
        self.participants = participants(self.args, self.device)
        self.reason: errors.TransformError | None = None
        self._check()
        self.preemptible = self.reason is None
        self.blocks, self.threads = self._shape()
        self._values: list[Any] | None = None
        self._started: list[KernelArgument] = []
        self._copied: list[tuple[Any, Any]] = []
        self.flag = LaunchFlag(self.device)

    def _check(self) -> None:
        function, compiled = self.kernel.function, self.kernel.compiled
        self.launch.check(self.args)
        if self.device == "cpu":
            return  # a block is one thread, for which no barrier waits
        try:
            self.virtual = compiled.get("virtual") or compiled.setdefault("virtual", virtual_copy(function))
        except errors.TransformError as error:
            self.reason = error
            return
        line = returns_early(function) if self.kernel.block is not None else None
        if line is not None:
            self.reason = errors.TransformError(
                f"{self.name!r} returns (line {line}) before a barrier that others of its block reach: "
                f"it runs whole; let all threads reach the barrier",
                construct="return before barrier",
                line=line,
            )

    def _shape(self) -> tuple[int, int]:
        block = self.kernel.block
        if self.device == "cpu":
            per = 1 if block is not None else BLOCK_INDICES
            return -(-self.total // per), per
        across, threads = configuration(self.launch.shape, block)
        if math.prod(across) >= 1 << 31:
            raise errors.ArgumentError(f"launch of {self.name!r} over {self.launch.shape} has more than 2^31 blocks")
        return math.prod(across), math.prod(threads)

    def begin(self) -> None:
        """Prepare the arguments (once, before the first block). NumPy arrays are copied to a GPU."""
        try:
            values = begin(self.participants, self._started, self.args, self.flag)
            if self.device == "cuda":
                from ..gpu.copies import to_gpu  # needs the cuda extra

                values, self._copied = to_gpu(values)
            self._values = values
        except BaseException:
            self._close()
            raise

    def end(self) -> None:
        """Copy NumPy arrays back and raise the latched error (once, after the last block or a failure)."""
        try:
            if self._copied:
                from ..gpu.copies import copy_out  # needs the cuda extra

                copy_out(self._copied)
        finally:
            self._close()

    @property
    def ends_at_once(self) -> bool:
        """Whether `end` has no array to copy back and no argument to call."""
        return not self._copied and not self._started

    def _close(self) -> None:
        started, self._started = self._started, []
        self._copied = []
        self._values = None
        finish(started, self.flag)

    def abort(self) -> None:
        """Make waits of device code on the arguments end soon, and loops that call `failed`, of this launch only."""
        self.flag.interrupt()
        for argument in self.participants:
            argument.abort(self.flag)

    def new_control(self) -> Block:
        """Return a control record for a new launch: no stop, no target, cursor 0 (device memory on `cuda`)."""
        import numpy as np

        control = memory_for(self.device).allocate(8 * CONTROL_WORDS)
        control.write(0, np.array(fresh(), np.int64))
        return control

    @property
    def values(self) -> list[Any]:
        """Arguments that the kernel receives; only between `begin` and `end`."""
        if self._values is None:
            raise errors.ArgumentError(f"{self.name!r} has not started: call begin() before its blocks run")
        return self._values

    def prepare(self) -> None:
        """Compile the workers of a CPU, so that the first block starts at once."""
        cpu.driver(self)

    def kept_forms(self, ordinal: int, words_of: Callable[[Sequence[Any]], tuple[Any, ...] | None]) -> Any:
        """Return the compiled forms on the current GPU (see `blocks.cuda.Forms`), between `begin` and `end`.

        An equal earlier launch may have made them (see `Gpu.words`).
        """
        from .cuda import kept_forms  # needs the cuda extra

        return kept_forms(self, ordinal, words_of)

    def work(self, control: int, worker: int) -> None:
        """Run blocks in the calling thread until none is left, or it must leave (`cpu`; holds no GIL).

        Parameters
        ----------
        control : int
            Address of a control record.
        worker : int
            Its number, from 0: it leaves if `TARGET` is not larger, or if `STOP` is.
        """
        cpu.work(self, control, worker)
