"""`Holdings`: how many bytes each tenant has at a service, and whether it may have more."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from ... import errors
from .ledger import HeldRequest, Ledger

ROOM = 2.0
"""Seconds that a client waits for room that is about to be given back."""


class Holdings:
    """Bytes of tenants: messages on their way in, input, arrays on the device, and answers that were not read.

    They belong to the tenant, not to a connection: bytes that were not given back yet count after a reconnect, too.
    All methods run under the broker's lock; those that wait release it meanwhile.

    Parameters
    ----------
    lock : RLock
    ledger : Ledger
        Which knows input and arrays.
    most : int
        Bytes of a tenant.
    """

    def __init__(self, lock: threading.RLock, ledger: Ledger, most: int) -> None:
        self._room = threading.Condition(lock)
        self._ledger = ledger
        self._most = most
        self._coming: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()

    def of(self, tenant: str | None = None) -> int:
        """Return the bytes of a tenant, or of all."""
        counts = (self._coming, self._unread)
        found = sum(c[tenant] if tenant is not None else c.total() for c in counts)
        return found + self._ledger.held_bytes(tenant)

    def changed(self) -> None:
        """Wake those who wait for room."""
        self._room.notify_all()

    def admit(self, tenant: str, nbytes: int) -> None:
        """Return once a tenant may have so many more bytes.

        Raises
        ------
        QuotaError
            It may not, and nothing is about to be given back; or nothing was for a while.
        """

        def settled() -> bool:
            return self._fits(tenant, nbytes) or not (self._unread[tenant] or self._ledger.leaves(tenant))

        if not self._room.wait_for(settled, ROOM) or not self._fits(tenant, nbytes):
            raise errors.QuotaError(
                f"tenant {tenant!r} has {self.of(tenant)} bytes of input, arrays and answers at the service; {nbytes} "
                f"more are over {self._most}: wait for results, free arrays, or start the service with a larger "
                "--max-held"
            )

    def _fits(self, tenant: str, nbytes: int) -> bool:
        return self.of(tenant) + nbytes <= self._most

    def promise(self, tenant: str, nbytes: int) -> None:
        """Count an answer until it is read (`read`). One may be over the limit; others wait until it is read.

        Raises
        ------
        QuotaError
            It is not read.
        """
        if not self._room.wait_for(lambda: not self._unread[tenant] or self._fits(tenant, nbytes), ROOM):
            raise errors.QuotaError(
                f"tenant {tenant!r} has {self.of(tenant)} bytes at the service, among them answers that it has not "
                f"read; {nbytes} more are over {self._most}: read them first"
            )
        self._unread[tenant] += nbytes

    def results(
        self, held: HeldRequest, places: Sequence[int], arrays: Sequence[NDArray[Any]]
    ) -> tuple[Callable[[], list[NDArray[Any]]], Callable[[], None]]:
        """Return a function that gives the arrays of a result when it is sent, and one to call after that.

        Results are owed in any case. Of each array of a request there is one here, the newest, however many of its
        tasks' results were not read.
        """
        results, new = held.results, dict(zip(places, arrays, strict=True))
        self._unread[held.tenant] += sum(a.nbytes for p, a in new.items() if p not in results)
        results.update(new)
        held.unsent += 1

        def sent() -> None:
            with self._room:
                held.unsent -= 1
                if not held.unsent:
                    self.read(held.tenant, sum(a.nbytes for a in results.values()))
                    results.clear()

        return lambda: [results[p] for p in places], sent

    def reader(self, tenant: str, nbytes: int) -> Callable[[], None]:
        """Return a function that takes the lock and notes that an answer was read."""

        def read() -> None:
            with self._room:
                self.read(tenant, nbytes)

        return read

    def read(self, tenant: str, nbytes: int) -> None:
        """Note that an answer was sent, or that its client has gone."""
        self._unread[tenant] -= nbytes
        self._room.notify_all()

    def comes(self, tenant: str, nbytes: int) -> None:
        """Count a message that begins to come (negative: that is there, or given up). Raises as `admit` does."""
        if nbytes > 0:
            self.admit(tenant, nbytes)
        self._coming[tenant] += nbytes


def not_named(tenant: str, named: Iterable[str]) -> str:
    """Return the message for a tenant without a setting, if others have one."""
    return (
        f"tenant {tenant!r} has no setting in this service: connect(tenant=...) as one of "
        f"{', '.join(sorted(named))}, or ask for it in --tenants"
    )
