"""Pages of a file in the system's page cache: commands copy them from there instead of reading the drive again.

Direct reads bypass the page cache, so they are not faster if the cache has the file. If the kernel reports the pages in
the cache (`cachestat`, Linux 6.5), a command whose pages are all in the cache is read through it. Other commands are
not, because a read of missing pages through the cache would read ahead into it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

from .._os import probe
from ..targets import device
from ..targets.primitives import SYSTEM, call_foreign, load_relaxed, scratch, store_relaxed
from .commands import set_word, word

_libc = ctypes.CDLL(None, use_errno=True)
CACHESTAT = 451
"""System call, on every processor."""
PAGE_SHIFT = 12
GAP_MAX = 63
"""Maximum number of commands between two lookups while no lookup succeeds: a lookup takes 0.3 us."""

L_SYSCALL = 0
"""Address of the function ``syscall``; 0: no lookups."""
L_FD = 1
L_SKIP = 2
"""Number of next commands that skip the lookup."""
L_GAP = 3
"""Number of commands to skip that the last lookup without success chose."""
LOOKUP_WORDS = 4


_TRY_IT = f"""
import ctypes, sys
where = (ctypes.c_uint64 * 7)(0, 4096)
file = open(sys.executable, "rb")
sys.exit(ctypes.CDLL(None).syscall({CACHESTAT}, file.fileno(), where, ctypes.byref(where, 16), 0) != 0)
"""


@functools.cache
def allowed() -> bool:
    """Return whether this process may query the page cache (probed once per process)."""
    try:
        filtered = "\nSeccomp:\t0\n" not in Path("/proc/self/status").read_text()
    except OSError:
        filtered = True
    if filtered:
        return probe(_TRY_IT) is None
    with open("/proc/self/exe", "rb") as file:
        return _cachestat(file.fileno(), 0, 1 << PAGE_SHIFT) is not None


def _cachestat(fd: int, offset: int, nbytes: int) -> int | None:
    """Return the number of pages of a range of a file that the page cache has, or None if the kernel refuses."""
    where, counted = (ctypes.c_uint64 * 2)(offset, nbytes), (ctypes.c_uint64 * 5)()
    failed = _libc.syscall(CACHESTAT, fd, ctypes.byref(where), ctypes.byref(counted), 0)
    return None if failed else counted[0]


def enable_lookup(fd: int, state: np.ndarray) -> None:
    """Fill the words with which commands look up a file's pages, if the kernel allows it."""
    # the kernel refuses the query for files that this process neither owns nor may write
    if allowed() and _cachestat(fd, 0, 1 << PAGE_SHIFT) is not None:
        state[L_SYSCALL], state[L_FD] = ctypes.cast(_libc["syscall"], ctypes.c_void_p).value or 0, fd


def is_in_page_cache(fd: int, offset: int, pages: int) -> bool:
    """Return whether the page cache has `pages` pages of a file from `offset` on; False if that is not known.

    It is faster to count pages than to list them (``mincore``). Pages that are being read count, too.
    """
    return allowed() and _cachestat(fd, offset, pages << PAGE_SHIFT) == pages


@device
def page_cache_lookup(look: int, offset: int, nbytes: int) -> bool:
    """Return whether the page cache had all bytes at the call; False if the lookup is skipped (native)."""
    function = word(look, L_SYSCALL)
    if function == 0:
        return False
    skip = word(look, L_SKIP)
    if skip > 0:
        set_word(look, L_SKIP, skip - 1)  # threads may lose some of these counts, which only delays a lookup
        return False
    query = scratch(56)
    store_relaxed(query, offset, SYSTEM)
    store_relaxed(query + 8, nbytes, SYSTEM)
    store_relaxed(query + 16, 0, SYSTEM)
    failed = call_foreign(function, CACHESTAT, word(look, L_FD), query, query + 16, 0, 0, 0)
    pages = ((offset + nbytes - 1) >> PAGE_SHIFT) - (offset >> PAGE_SHIFT) + 1
    if failed == 0 and load_relaxed(query + 16, SYSTEM) == pages:
        set_word(look, L_GAP, 0)
        return True
    gap = min(2 * word(look, L_GAP) + 1, GAP_MAX)
    set_word(look, L_GAP, gap)
    set_word(look, L_SKIP, gap)
    return False
