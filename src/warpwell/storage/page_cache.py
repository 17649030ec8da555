"""What the system's page cache holds of a file: commands copy that from there, and do not ask the drive for it again.

Direct reads pass the page cache by, and so take as long when it holds the file as when it does not. Where the kernel
can tell (`cachestat`, Linux 6.5), a command whose pages are all there is read through the cache, and nothing else is: a
read through the cache of what is not there would read ahead into it.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from pathlib import Path

import numpy as np

from ..targets import SYSTEM, call_foreign, device, load_relaxed, scratch, store_relaxed
from .commands import set_word, word

_libc = ctypes.CDLL(None, use_errno=True)
CACHESTAT = 451
"""System call, on every processor."""
PAGE_SHIFT = 12
GAP_MAX = 63
"""Most commands between two looks while nothing is found: a look takes 0.3 us."""

L_SYSCALL = 0
"""Address of the function ``syscall``; 0: nobody looks."""
L_FD = 1
L_SKIP = 2
"""Commands that do not look from now on."""
L_GAP = 3
"""How many the last look without success told not to look."""
LOOK_WORDS = 4


@functools.cache
def allowed() -> bool:
    """Return whether this process may ask what the page cache holds, and is told (asked once a process)."""
    try:
        filtered = "\nSeccomp:\t0\n" not in Path("/proc/self/status").read_text()
    except OSError:
        filtered = True
    if not filtered:
        place = (ctypes.c_uint64 * 7)(0, 1 << PAGE_SHIFT)
        with open("/proc/self/exe", "rb") as file:
            return bool(_libc.syscall(CACHESTAT, file.fileno(), place, ctypes.byref(place, 16), 0) == 0)
    if getattr(sys, "frozen", False) or not Path(sys.executable or ".").name.startswith("python"):
        return False
    # in a child: a sandbox may kill who asks
    program = (
        "import ctypes, sys; place = (ctypes.c_uint64 * 7)(0, 4096); file = open(sys.executable, 'rb'); "
        f"sys.exit(ctypes.CDLL(None).syscall({CACHESTAT}, file.fileno(), place, ctypes.byref(place, 16), 0))"
    )
    try:
        command = [sys.executable, "-I", "-S", "-c", program]
        asked = subprocess.run(command, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return asked.returncode == 0


def look_at(fd: int, words: np.ndarray) -> bool:
    """Fill the words by which commands look for a file's pages; return False if they cannot."""
    if not allowed():
        return False
    libc = ctypes.CDLL(None)
    place = (ctypes.c_uint64 * 7)(0, 1 << PAGE_SHIFT)
    # of files of others, the kernel does not tell
    if libc.syscall(CACHESTAT, fd, place, ctypes.byref(place, 16), 0) != 0:
        return False
    words[L_SYSCALL] = ctypes.cast(libc["syscall"], ctypes.c_void_p).value or 0
    words[L_FD] = fd
    return True


def has_all(fd: int, offset: int, pages: int) -> bool:
    """Return whether the page cache has so many pages of a file from `offset` on; False where nobody can tell.

    Pages are counted faster than they are listed (``mincore``). Those that are being read count, too.
    """
    if not allowed():
        return False
    counted = (ctypes.c_uint64 * 5)()  # of which the first is the pages that it has
    span = (ctypes.c_uint64 * 2)(offset, pages << PAGE_SHIFT)
    failed = _libc.syscall(CACHESTAT, fd, ctypes.byref(span), ctypes.byref(counted), 0)
    return not failed and counted[0] == pages


@device
def in_page_cache(look: int, offset: int, nbytes: int) -> bool:
    """Return whether the page cache holds all bytes, a moment ago; False where this is not to be asked (native)."""
    function = word(look, L_SYSCALL)
    if function == 0:
        return False
    skip = word(look, L_SKIP)
    if skip > 0:
        set_word(look, L_SKIP, skip - 1)  # threads may lose some of these counts: they look a little later
        return False
    place = scratch(56)
    store_relaxed(place, offset, SYSTEM)
    store_relaxed(place + 8, nbytes, SYSTEM)
    store_relaxed(place + 16, 0, SYSTEM)
    said = call_foreign(function, CACHESTAT, word(look, L_FD), place, place + 16, 0, 0, 0)
    pages = ((offset + nbytes - 1) >> PAGE_SHIFT) - (offset >> PAGE_SHIFT) + 1
    if said == 0 and load_relaxed(place + 16, SYSTEM) == pages:
        set_word(look, L_GAP, 0)
        return True
    gap = min(2 * word(look, L_GAP) + 1, GAP_MAX)
    set_word(look, L_GAP, gap)
    set_word(look, L_SKIP, gap)
    return False
