"""Close stores that are dropped or still open when the process ends; forks.

A store that is no longer referenced is closed as by `Store.close`, with a commit; so are stores that are open for
writing when the process ends: no record is lost because a program forgot to close. If an exception ends the process,
nothing is committed, as at the end of a ``with`` block: the exception may have interrupted a group of changes. The
number of lost changes is printed on stderr.

A dropped store that is open for writing has files to sync, and one on a device has threads and kernels that may still
run. The closing thread (`warpwell.closing`) does both, because a finalizer may run at any point, with locks
held, and Ctrl-C may interrupt it. A reader on the host closes its files at once.

After a fork the child continues with a copy of its parent's state: memory as of the fork
(`warpwell.targets.memory.private_memory`), and its own descriptors and mappings of files that never change in place.
Three cases need care.

- A refresh in another thread would be left half done in the child. So a fork waits for it, at most `_SECONDS`; if it
  takes longer, the store cannot be used in the child and raises ForkError.
- Locks held by other threads, and the counts of active readers, belong to the parent: the child creates new ones.
- A store that is open for writing has one writer, the parent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

from .. import closing, errors
from .._os import clock, uninterrupted
from .device.engine import Engine
from .records import Records

_logger = logging.getLogger(__name__)

_SECONDS = 5.0
"""Time that a fork waits for a refresh, and `wait_until_closed` for dropped stores, in seconds."""
_DEVICE_SECONDS = 60.0
"""Time that a dropped store on a device waits for the kernels that use it, in seconds."""


class _OpenStore(Protocol):
    """The methods of a `Store` that this module calls."""

    path: str
    writable: bool
    _estate: Any
    _records: Records

    @property
    def closed(self) -> bool: ...
    def commit(self) -> int: ...
    def uncommitted(self) -> int: ...
    def forked(self, *, busy: bool) -> None: ...
    def _close(self, *, commit: bool) -> None: ...


_open: dict[int, weakref.ref[_OpenStore]] = {}


@dataclass(eq=False)
class Estate:
    """The parts of a store that must be closed when it is dropped."""

    store: weakref.ref[_OpenStore]
    records: Records
    writable: bool
    pid: int = field(default_factory=os.getpid)
    engine: Engine | None = None
    controller_store: _OpenStore | None = None
    """The store whose controller the engine uses. It is closed after this store, even if both are dropped at once."""

    def drop(self) -> None:
        """Close after the store was dropped."""
        end = clock.monotonic() + _DEVICE_SECONDS
        while self.engine is not None and clock.monotonic() < end:
            try:
                self.engine.close()
                break
            except errors.SharingError:  # kernels are under way
                clock.sleep(0.01)
            except Exception:
                break  # `close` raises the same error, and reports it
        self.close()

    def close(self) -> None:
        """Close, and print the number of lost changes; a forked child commits nothing."""
        is_owner, left, why = self.pid == os.getpid(), 0, ""
        try:
            if self.engine is not None:
                self.engine.close()
            left = self.records.uncommitted() if is_owner else 0
            self.records.close(commit=is_owner)
            if left and self.records.log.failed:
                why = "a write failed before"
        except BaseException as error:  # in a finalizer or the closing thread, no caller would receive it
            why = str(error) or type(error).__name__
        where = f"{self.records.path}, which was dropped without close(),"
        if why and left:
            _report_lost(left, where, f": {why}")
        elif why:
            _logger.error("warpwell: %s could not be closed: %s", where, why)

    def finish(self) -> None:
        """Close at the end of the program. If the store is open for reading, only read the batches in flight."""
        if self.engine is not None and self.pid == os.getpid():
            for batch in list(self.engine.gathered):
                batch.read()
        store = self.store()
        if store is not None and store.writable and not store.closed:
            _close_at_exit(store, _ended_by_exception())


def opened(store: _OpenStore, records: Records) -> tuple[Estate, weakref.finalize[..., _OpenStore]]:
    """Register an open store; return its estate, and the finalizer that closes the store when it is dropped."""
    estate = Estate(weakref.ref(store), records, store.writable)
    if store.writable:
        closing.ready()
        closing.keep(estate, records.path)
    _open[id(store)] = estate.store
    finalizer = weakref.finalize(store, _dropped, id(store), estate)
    finalizer.atexit = False
    return estate, finalizer


def on_device(estate: Estate, engine: Engine, controller_store: _OpenStore | None) -> None:
    """Register the engine of a store that is on a device."""
    closing.ready()
    closing.keep(estate, estate.records.path)
    estate.engine, estate.controller_store = engine, controller_store


def closed(store: _OpenStore) -> None:
    """Unregister a closed store."""
    _open.pop(id(store), None)
    closing.forget(store._estate)


def open_stores() -> list[_OpenStore]:
    """Return the stores that are open."""
    return [store for store in (reference() for reference in list(_open.values())) if store is not None]


def wait_until_closed(seconds: float = _SECONDS) -> None:
    """Wait until dropped stores are closed: their records are durable then, and their locks are free."""
    closing.wait_until_closed(seconds)


# -- dropped stores -----------------------------------------------------------------------------------------------


def _dropped(key: int, estate: Estate) -> None:
    _open.pop(key, None)
    closing.forget(estate)
    if (estate.writable or estate.engine is not None) and estate.pid == os.getpid():
        closing.hand_over(estate.drop)
    else:
        estate.close()


def _report_lost(count: int, where: str, why: str) -> None:
    changes, verb = ("1 change", "is") if count == 1 else (f"{count} changes", "are")
    _logger.error("warpwell: %s of %s %s lost%s", changes, where, verb, why)


# -- the end of the process ---------------------------------------------------------------------------------------


def _close_at_exit(store: _OpenStore, failed: bool) -> None:
    left = 0
    try:
        left = store.uncommitted()
        try:
            store._close(commit=not failed)
        except errors.SharingError:  # kernels are under way
            if not failed:
                store.commit()
        if failed and left:
            _report_lost(
                left,
                f"{store.path} since its last commit()",
                ", as at the end of a `with` block: an exception ended the program. Call commit() after each group of"
                " changes that belongs together",
            )
    except BaseException as error:
        why = str(error) or type(error).__name__
        _report_lost(left, f"{store.path}, which the program left open,", f": {why}")


_errors_of_parent: tuple[BaseException | None, ...] = ()
"""The result of `_errors` in the parent when this process was forked."""


def _errors() -> tuple[BaseException | None, ...]:
    """Return the exception that is being handled, and the last uncaught exception, unless Python runs interactively.

    In a process of multiprocessing an exception that ends the process is still being handled at exit.
    """
    handled = sys.exc_info()[1]
    return handled, None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _ended_by_exception() -> bool:
    uncaught = next((error for error in _errors() if error is not None and error not in _errors_of_parent), None)
    return uncaught is not None and not isinstance(uncaught, SystemExit)


# -- forks --------------------------------------------------------------------------------------------------------


def busy_error(path: str) -> Exception:
    """Return the error for a store that was forked during a refresh in another thread."""
    return errors.ForkError(
        f"{path} was being refreshed when this process ({os.getpid()}) was forked: open it again here, or fork when no"
        " refresh() is under way",
        path=path,
    )


class _BlockedRefreshes(threading.local):
    """The stores whose refreshes a forking thread has blocked, and those that it could not block."""

    def __init__(self) -> None:
        self.records: list[Records] = []
        self.busy: set[int] = set()


_blocked = _BlockedRefreshes()


def _before_fork() -> None:
    _blocked.records, _blocked.busy = [], set()
    opened = [store._records for store in open_stores() if not store.writable]
    if not opened:
        return
    end = clock.monotonic() + _SECONDS
    with uninterrupted():  # Python only prints an exception of this hook, and forks with the locks held
        for records in sorted(opened, key=id):  # in one order: other threads may be forking, too
            if records.block_refreshes(max(0.0, end - clock.monotonic())):
                _blocked.records.append(records)
            else:
                _blocked.busy.add(id(records))


def _after_fork_in_parent() -> None:
    for records in _blocked.records:
        records.unblock_refreshes()
    _blocked.records = []


def _after_fork_in_child() -> None:
    global _errors_of_parent
    _errors_of_parent = _errors()
    for store in open_stores():
        store._records.forked()
        store.forked(busy=id(store._records) in _blocked.busy)
    _blocked.records = []


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
