"""`Signal`: a condition word that threads and native code sleep on (futex)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time

import numpy as np

from ..._os import FUTEX

FUTEX_WAIT, FUTEX_WAKE = 128, 129
"""Operations of futex(2) within one process (FUTEX_PRIVATE_FLAG)."""

FUTEX_ALL = 2**31 - 1
"""Number of sleeping threads that FUTEX_WAKE wakes: all."""

_MAX_SLEEP = 0.1  # seconds; bounds the delay of Ctrl-C in the main thread

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None)  # releasing and reacquiring the GIL may take longer than a wake-up


class Signal:
    """A counter that each change of the associated state increments.

    A waiter reads the counter, checks the state, and sleeps only while the counter is unchanged. So a change between
    the check and the sleep is not missed. Native code may increment the counter, too.

    Parameters
    ----------
    address : int, optional
        Address of a 64-bit word whose low half is the counter. By default, the signal allocates its own.
    """

    def __init__(self, address: int | None = None) -> None:
        self._memory = np.zeros(1, np.int64)
        self.address = int(self._memory.ctypes.data) if address is None else address
        self._word = ctypes.c_int32.from_address(self.address)

    @property
    def value(self) -> int:
        """The counter."""
        return self._word.value

    def raise_(self, wake: bool = True) -> None:
        """Increment the counter and wake all sleeping threads. Without `wake`, only increment (no system call)."""
        self._word.value = (self._word.value + 1) & 0x7FFFFFFF
        if FUTEX and wake:
            number, address = ctypes.c_long(FUTEX), ctypes.c_void_p(self.address)
            _libc_with_gil.syscall(number, address, FUTEX_WAKE, ctypes.c_int(FUTEX_ALL), None, None, 0)

    def sleep(self, version: int, seconds: float) -> None:
        """Sleep for at most `seconds`, and at most 0.1 s, while the counter is `version`."""
        seconds = min(max(seconds, 0.0), _MAX_SLEEP)
        if not FUTEX:
            time.sleep(min(seconds, 1e-4) if self.value == version else 0)
            return
        timeout = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))  # struct timespec
        number, address = ctypes.c_long(FUTEX), ctypes.c_void_p(self.address)
        status = _libc.syscall(number, address, FUTEX_WAIT, ctypes.c_int(version), ctypes.byref(timeout), None, 0)
        if status and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))


def short_naps() -> None:
    """Reduce the timer slack of the calling thread from 50 us to 1 us."""
    with contextlib.suppress(OSError, AttributeError):
        _libc.prctl(29, ctypes.c_ulong(1000), 0, 0, 0)  # PR_SET_TIMERSLACK, nanoseconds
