"""ScriptedMedium: a medium inside the interpreter that completes commands late and out of order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.nvme import READ, WRITE
from warpwell.storage import PENDING, Medium, NativeMedium, decode_command, write_answer
from warpwell.targets import memory_for
from warpwell.targets.interp.interpreter import current
from warpwell.targets.primitives import SYSTEM, fetch_add

from .adversary import native_handle

BLOCK = 512
PIECE = 128
"""Bytes moved between two switch points."""
Hook = Callable[[int, int, int, int, int], int]

_media: dict[int, ScriptedMedium] = {}
_keys = itertools.count(1)


class ScriptedMedium(Medium):
    """Blocks in a dict, all zero until written; only for interpreted runs.

    Parameters
    ----------
    nbytes : int
        Capacity, a multiple of 512.
    seed : int
        Decides which commands are pending, when they move their data and when they complete.
    moved : int
        Number of bytes of each block that are moved; fewer bytes are faster.
    on_start, on_move : callable, optional
        Called as ``f(opcode, offset, nbytes, buffer, tag)`` when a command arrives and before its data
        moves; `on_start` returns the status with which the command completes (0: success).
    """

    def __init__(
        self,
        nbytes: int,
        seed: int,
        *,
        moved: int = BLOCK,
        on_start: Hook | None = None,
        on_move: Hook | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.writable = True
        self.name = self.description = "scripted"
        self.blocks: dict[int, bytearray] = {}
        self.waiting: list[tuple[int, int, int, int, int, int, bool]] = []
        self._moved = moved
        self._random = Random(seed)
        self._pending_share = self._random.choice((0.0, 0.5, 1.0, 1.0))
        self._lazy = self._random.choice((0.0, 0.5, 0.9))
        self._prompt = self._random.random() < 0.5
        self._on_start, self._on_move = on_start, on_move
        # Orders threads as a medium's own queue does: the completing thread sees all stores of the starting thread.
        self.order = memory_for("interp").allocate(8)
        self._key = next(_keys)
        _media[self._key] = self

    def native(self) -> NativeMedium:
        """Return interpreted functions; compiled code cannot call them."""
        return NativeMedium(native_handle(_start), native_handle(_complete), self._key, memory=self._prompt)

    def start(self, opcode: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
        """Start a command; see `NativeMedium`."""
        command = (opcode, offset, nbytes, buffer, tag)
        status = self._on_start(*command) if self._on_start else 0
        if self._random.random() >= self._pending_share:
            self._move(status, command)
            return status
        early = self._random.random() < 0.3
        if early:
            self._move(status, command)
        fetch_add(self.order.address, 1, SYSTEM)
        self.waiting.append((*command, status, early))
        return PENDING

    def complete(self, answer: int) -> bool:
        """Complete a finished command; see `NativeMedium`."""
        if not self.waiting or self._random.random() < self._lazy:
            return False
        *command, status, early = self.waiting.pop(int(self._random.random() * len(self.waiting)))
        fetch_add(self.order.address, 1, SYSTEM)
        if not early:
            self._move(status, (command[0], command[1], command[2], command[3], command[4]))
        return write_answer(answer, command[4], status, 0)

    def _move(self, status: int, command: tuple[int, int, int, int, int]) -> None:
        opcode, offset, nbytes, buffer, _tag = command
        if self._on_move:
            self._on_move(*command)
        if status:
            return
        for start in range(0, nbytes, BLOCK):
            block = self.block_of((offset + start) // BLOCK)
            for at in range(0, self._moved, PIECE):
                end = min(at + PIECE, self._moved)
                if opcode == READ:
                    current().write_bytes(buffer + start + at, bytes(block[at:end]))
                elif opcode == WRITE:
                    block[at:end] = current().read_bytes(buffer + start + at, end - at)

    def block_of(self, number: int) -> bytearray:
        """Return the bytes of a block, which may be changed."""
        return self.blocks.setdefault(number, bytearray(BLOCK))

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return whole blocks."""
        first, end = offset // BLOCK, -(-(offset + nbytes) // BLOCK)
        raw = b"".join(bytes(self.block_of(k)) for k in range(first, end))
        return np.frombuffer(raw, np.uint8)[offset - first * BLOCK :][:nbytes]

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write whole blocks."""
        raw = np.ascontiguousarray(data).tobytes()
        for at in range(0, len(raw), BLOCK):
            self.block_of((offset + at) // BLOCK)[:] = raw[at : at + BLOCK]

    def sync(self) -> None:
        """Do nothing: the medium has no volatile cache of its own."""

    def close(self) -> None:
        """Unregister the medium."""
        _media.pop(self._key, None)


def _start(state: int, command: int, tag: int) -> int:
    return _media[state].start(*decode_command(command), tag)


def _complete(state: int, answer: int) -> int:
    return _media[state].complete(answer)
