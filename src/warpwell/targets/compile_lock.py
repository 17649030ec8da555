"""A fork waits for compilations of other threads, whose locks would otherwise stay held in the child.

A module that blocks other threads before a fork imports this module first. Handlers run in reverse order of
registration, so these locks are then taken last: a thread that holds another lock may have to compile before it can
release that lock.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any


class _ForkLocks(threading.local):
    """The locks that a thread holds while it forks."""

    locks: tuple[Any, ...] = ()


_held = _ForkLocks()


def _before_fork() -> None:
    numba = getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None)
    # compiled code that is loaded or dropped needs only LLVM's lock
    llvm = getattr(getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None), "_lock", None)
    _held.locks = tuple(lock for lock in (numba, llvm) if lock is not None)
    for lock in _held.locks:
        lock.__enter__()


def _after_fork() -> None:
    locks, _held.locks = _held.locks, ()
    for lock in reversed(locks):
        lock.__exit__(None, None, None)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
