"""`LaunchFlag`, which `failed` reads: a failed access of this launch, or Ctrl-C; and the fault page."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .gpu import memory as gpu_memory
from .memory import Block, memory_for, view_of

FAULT_PAGE = 0x5A5A_0000_0000
"""Address of the fault page, which kernels read that other libraries launch (``@cuda.jit``), because they have no
flag."""

FLAG = 4
"""Word of a thread's context on `cpu`: address of the launch's flag. The words before it are the index and the launch
shape (3)."""

_NBYTES = 4096

_page: NDArray[np.int64] | None = None
_lock = threading.Lock()
_pinned: Any = None


class LaunchFlag:
    """The flag of a launch: two words that device code reads.

    Word 0 is not 0 when the launch failed or was interrupted, word 1 when it was interrupted.

    Parameters
    ----------
    target : {"cpu", "cuda", "interp"}

    Attributes
    ----------
    interrupted : bool
    """

    def __init__(self, target: str) -> None:
        self.interrupted = False
        self._pinned: Pair | None = None
        self._pair: Pair | None = None
        if target != "cuda":
            pair = np.zeros(2, np.int64)
            self._pair = pair, int(pair.ctypes.data)

    @property
    def address(self) -> int:
        """Address of the words, which a GPU reads too: pinned memory, allocated at first use."""
        if self._pair is None:
            self._pair = self._pinned = _take()
            self._pair[0][:] = self.interrupted
        return self._pair[1]

    @property
    def failed(self) -> bool:
        """Whether device code has latched an error, or the launch was interrupted."""
        return self._pair is not None and bool(self._pair[0][0])

    def interrupt(self) -> None:
        """Let `failed` be true, and waits and misses end."""
        self.interrupted = True
        if self._pair is not None:
            self._pair[0][:] = 1

    def clear(self) -> None:
        """Clear the flag that device code set, unless the launch was interrupted."""
        if self._pair is not None and not self.interrupted:
            self._pair[0][:] = 0

    def __del__(self) -> None:
        if getattr(self, "_pinned", None) is not None:
            _free.append(self._pinned)  # One step, because a finalizer may run while the lock is held.


class PlainFlag(LaunchFlag):
    """The flag of kernels that Warpwell does not launch. They all read the words of the fault page."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self._pair = share_fault_page()[:2], FAULT_PAGE


Pair = tuple[NDArray[np.int64], int]
"""The words of a flag, and their address."""

_free: list[Any] = []
_blocks: list[Block] = []


def _take() -> Pair:
    """Return two words of pinned memory, which any GPU of the process reads."""
    with _lock:
        if not _free:
            block = memory_for("cuda").allocate_shared(_NBYTES)
            _blocks.append(block)
            rows = block.words[: _NBYTES // 8].reshape(-1, 8)  # a line each
            _free.extend((row[:2], block.address + 64 * k) for k, row in enumerate(rows))
        pair: Pair = _free.pop()
    return pair


def _map() -> NDArray[np.int64]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
    fixed_noreplace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    got = libc.mmap(FAULT_PAGE, _NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if got != FAULT_PAGE:
        raise OSError(ctypes.get_errno(), f"the address {FAULT_PAGE:#x} of Warpwell's fault page is in use")
    return view_of(FAULT_PAGE, _NBYTES, np.int64)


def _after_fork() -> None:
    if _page is not None:
        _page[0] = 0  # A child cannot use arrays of the parent, so their failures do not concern it.


os.register_at_fork(after_in_child=_after_fork)


def share_fault_page() -> NDArray[np.int64]:
    """Return the fault page (words), which is mapped and pinned once a process, so that all its GPUs access it.

    Raises
    ------
    OSError
        Another library uses the address.
    """
    global _page, _pinned
    if _page is None or _pinned is None:
        with _lock:  # several threads may launch their first kernels at once
            if _page is None:
                _page = _map()
            if _pinned is None:
                _pinned = gpu_memory.pin_mapped(_page, FAULT_PAGE, _NBYTES)
    return _page
