"""The process-wide fault page: one word that tells device code whether anything failed."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .atomics import SYSTEM, interrupted, load_relaxed
from .device import device
from .memory import view_of
from .uninterrupted import uninterrupted

FAULT_PAGE = 0x5A5A_0000_0000
"""Address of the fault page. Fixed, so that compiled code in the on-disk cache can name it."""

INTERRUPTED = 4
"""Word of a thread's context on `cpu`: not 0 when its launch was interrupted. So no launch sees another's interrupt."""

_NBYTES = 4096

_page: NDArray[np.int64] | None = None
_lock = threading.Lock()
_pinned: Any = None


@device
def failed() -> bool:
    """Tell whether an array has latched an error that was not raised yet, or the launch was interrupted.

    User loops that ask can stop. A thread calls it. It is one relaxed load of host memory: on a GPU, ask every so many
    iterations.
    """
    return load_relaxed(FAULT_PAGE, SYSTEM) != 0 or interrupted() != 0


def fault_page() -> NDArray[np.int64]:
    """Return the fault page (words); word 0 is not 0 while an error is latched, or a launch on a GPU is interrupted.

    Raises
    ------
    OSError
        Another library holds the address.
    """
    global _page
    if _page is not None:
        return _page
    with _lock:  # threads that launch their first kernels: the second to map the page would find its address taken
        if _page is None:
            _page = _map()
    return _page


def _map() -> NDArray[np.int64]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
    fixed_noreplace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    got = libc.mmap(FAULT_PAGE, _NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if got != FAULT_PAGE:
        raise OSError(ctypes.get_errno(), f"the address {FAULT_PAGE:#x} of Warpwell's fault page is taken")
    return view_of(FAULT_PAGE, _NBYTES, np.int64)


_reasons: list[Callable[[], bool]] = []


def reason(set_now: Callable[[], bool]) -> Callable[[], bool]:
    """Add a reason for the page to be set: what tells whether it holds now."""
    _reasons.append(set_now)
    return set_now


def settle() -> None:
    """Let the page say whether there is a reason for it to be set, after one has gone."""
    page = fault_page()
    page[0] = int(any(holds() for holds in _reasons))
    # device code latches first and sets the page then: what it latched since the look above must not be lost
    if any(holds() for holds in _reasons):
        page[0] = 1


_interrupted: set[Interrupt] = set()


@reason
def _any_interrupted() -> bool:
    return bool(_interrupted)


class Interrupt:
    """What Ctrl-C aborts of a launch on a GPU besides its arguments: loops that ask `failed` end without any."""

    def abort(self) -> None:
        """Let `failed` be true until the launch is over."""
        _interrupted.add(self)
        fault_page()[0] = 1

    def over(self) -> None:
        """Let `failed` be what it is without this launch."""
        if self in _interrupted:
            with uninterrupted():  # half of it would leave the page set for good
                _interrupted.discard(self)
                settle()


def _after_fork() -> None:
    _interrupted.clear()
    if _page is not None:
        _page[0] = 0  # arrays of the parent are of no use here, and what failed there failed for others


os.register_at_fork(after_in_child=_after_fork)


def share_fault_page() -> None:
    """Let the current GPU access the fault page (pins it; once a process)."""
    global _pinned
    if _pinned is None:
        from numba import cuda

        _pinned = cuda.current_context().mempin(fault_page(), FAULT_PAGE, _NBYTES, mapped=True)
