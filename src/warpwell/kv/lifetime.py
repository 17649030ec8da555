"""What becomes of open stores when the process forks.

A child goes on with what its parent had: memory as of the fork (`warpwell.targets.memory.private_memory`), and
descriptors and mappings of its own of files that never change in place. Three things have to be seen to.

- A refresh in another thread would leave its half of the work in the child. So a fork waits for it, for `_SECONDS` at
  most; the store of one that takes longer is of no use in the child, and says so.
- Locks that other threads have, and the marks of readers that are inside, are the parent's: the child makes them anew.
- A store that is open for writing has one writer, the parent.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ..targets.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from .part import Part
    from .store import Store

_SECONDS = 5.0

_open: dict[int, weakref.ref[Store]] = {}


def opened(store: Store) -> None:
    """Note an open store."""
    _open[id(store)] = weakref.ref(store)


def closed(store: Store) -> None:
    """Forget a store."""
    _open.pop(id(store), None)


def open_stores() -> list[Store]:
    """Return the stores that are open."""
    return [store for store in (reference() for reference in list(_open.values())) if store is not None]


class _Holding(threading.local):
    """What a thread holds while it forks."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.busy: set[int] = set()


_holding = _Holding()


def _before_fork() -> None:
    _holding.parts, _holding.busy = [], set()
    parts = [part for store in open_stores() if not store.writable for part in store.folders()]
    if not parts:
        return
    end = time.monotonic() + _SECONDS
    with uninterrupted():  # what is raised in here is printed and forgotten, with locks held
        for part in sorted(parts, key=id):  # in one order: other threads may be forking, too
            if part.hold(max(0.0, end - time.monotonic())):
                _holding.parts.append(part)
            else:
                _holding.busy.add(id(part))


def _after_fork_in_parent() -> None:
    for part in _holding.parts:
        part.let_go()
    _holding.parts = []


def _after_fork_in_child() -> None:
    for store in open_stores():
        parts = store.folders()
        for part in parts:
            part.forked()
        store.forked(busy=any(id(part) in _holding.busy for part in parts))
    _holding.parts = []


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
