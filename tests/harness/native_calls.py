"""NativeCalls: the native functions of a medium or store, called from Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from warpwell.storage import NativeMedium
from warpwell.testing.media import command_of


class NativeCalls:
    """Calls of the functions of a `NativeMedium`.

    Parameters
    ----------
    native : NativeMedium
    """

    def __init__(self, native: NativeMedium | None) -> None:
        assert native is not None
        self._native = native
        self._start = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(native.start)
        self._complete = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 2)(native.complete)

    def start(self, command: Any, tag: int) -> int:
        """Start a command of eight words; return ``status | result << 16``, or `PENDING`."""
        fields = np.array(command, np.int64)
        return int(self._start(self._native.state, fields.ctypes.data, tag))

    def start_block(self, opcode: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
        """Start a command to blocks; return its status, or `PENDING`."""
        return self.start(command_of(opcode, offset, nbytes, buffer), tag)

    def complete(self) -> tuple[int, int, int] | None:
        """Return tag, status and result of a command that completed, or None."""
        answer = np.full(3, -7, np.int64)
        if not self._complete(self._native.state, answer.ctypes.data):
            return None
        tag, status, result = answer.tolist()
        return tag, status, result
