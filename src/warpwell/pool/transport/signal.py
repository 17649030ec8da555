"""`Signal`: a word that threads sleep on, with or without the interpreter lock, until another changes it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import time

import numpy as np

_WAIT, _WAKE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE, within this process
_EVERYBODY = 2**31 - 1
_SLICE = 0.1  # a thread looks up this often, so that Ctrl-C reaches the main thread
FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 0)
"""The number of the futex system call, 0 where it is not known."""

_libc = ctypes.CDLL(None, use_errno=True)
_quick = ctypes.PyDLL(None)  # keeps the interpreter lock: to get it back may take longer than all the rest


class Timespec(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> Timespec:
        """Return `seconds` as a time."""
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


class Signal:
    """A word that grows with each change of what it stands for.

    Whoever waits notes the word, looks at the thing, and sleeps only while the word is still the same: no change
    between looking and sleeping is missed. Native code may raise it too, since it is 32 bits at an address.

    Parameters
    ----------
    address : int, optional
        Where the word lies (the low half of a 64-bit word); without, it has its own memory.
    """

    def __init__(self, address: int | None = None) -> None:
        self._memory = np.zeros(1, np.int64)
        self.address = int(self._memory.ctypes.data) if address is None else address
        self._word = ctypes.c_int32.from_address(self.address)

    @property
    def value(self) -> int:
        """The word now."""
        return self._word.value

    def raise_(self, wake: bool = True) -> None:
        """Change the word and wake all who sleep on it; without `wake`, nobody does: a system call less."""
        self._word.value = (self._word.value + 1) & 0x7FFFFFFF
        if FUTEX and wake:
            _quick.syscall(
                ctypes.c_long(FUTEX), ctypes.c_void_p(self.address), _WAKE, ctypes.c_int(_EVERYBODY), None, None, 0
            )

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep while the word is `seen`, at most `seconds` and at most a tenth of a second."""
        seconds = min(max(seconds, 0.0), _SLICE)
        if not FUTEX:
            time.sleep(min(seconds, 1e-4) if self.value == seen else 0)
            return
        until = Timespec.of(seconds)
        done = _libc.syscall(
            ctypes.c_long(FUTEX),
            ctypes.c_void_p(self.address),
            _WAIT,
            ctypes.c_int(seen),
            ctypes.byref(until),
            None,
            0,
        )
        if done and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))


def short_naps() -> None:
    """Let the naps of this thread end within microseconds of when they should, not within 50."""
    with contextlib.suppress(OSError, AttributeError):
        _libc.prctl(29, ctypes.c_ulong(1000), 0, 0, 0)  # PR_SET_TIMERSLACK, nanoseconds
