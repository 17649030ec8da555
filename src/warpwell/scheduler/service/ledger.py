"""`Ledger`: requests and arrays that a service holds, and their fate when the owner dies. `Holdings`: quotas.

Nothing here does I/O or starts threads. A request stays here, with its input, until its last task has ended; the owner
gets it once all that it comes after has succeeded. When the owner dies, what has its input here runs again in the next
owner; what used memory of the device cannot, because that is gone, or was changed.

Who killed the owner? If the owner could still say so (a stuck kernel), that task. Otherwise each request that was on
the device, or was being taken in (imported, looked at), runs again alone, before everything else. If the owner dies
while one is alone, that one did it, and the others are no suspects any more. One that has been alone for a while is
joined by what waits (`acquit`), so that a long task holds nobody up; but only once.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from ... import errors

ASKED = {"rule": "asked"}
BEFORE = {"rule": "a task before it did not succeed"}

ROOM = 2.0
"""Seconds that a client waits for room that is about to be given back."""


@dataclass
class Piece:
    """A task of a request."""

    number: int
    name: str
    state: str = "waiting"
    cancelled: bool = False  # its client was told that it is
    ended: bool = False

    @property
    def launched(self) -> bool:
        """Whether it is on the device."""
        return self.state in ("running", "stopping") and not self.ended


@dataclass(eq=False)
class HeldRequest:
    """A request that has not ended."""

    client: int
    tenant: str
    pieces: list[Piece]
    tasks: list[dict[str, Any]]
    options: dict[str, Any]
    arrays: list[NDArray[Any]]
    buffers: set[int] = field(default_factory=set)
    lent: list[dict[str, Any]] = field(default_factory=list)  # memory of the client, which tasks may have changed
    waits: set[int] = field(default_factory=set)  # tasks that it comes after
    sent: bool = False
    taking: bool = False  # the owner imports its kernels, or looks at it
    begun: bool = False  # it has done so
    acquitted: bool = False
    left: bool = False  # its client has gone; the owner has not told its end yet
    results: dict[int, NDArray[Any]] = field(default_factory=dict)  # results that its client has not been sent yet
    unsent: int = 0  # messages with them

    @property
    def nbytes(self) -> int:
        """Bytes of input."""
        return sum(a.nbytes for a in self.arrays)

    @property
    def launched(self) -> bool:
        """Whether it is on the device."""
        return any(p.launched for p in self.pieces)


@dataclass
class KeptArray:
    """An array on the device; one that `leaves` counts until the owner has freed it, one that is `lost` is gone."""

    client: int
    tenant: str
    nbytes: int
    leaves: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Gone:
    """A task that will not run (again), and why; without an error it was cancelled."""

    held: HeldRequest
    piece: Piece
    why: dict[str, Any]
    error: errors.WarpwellError | None = None


class Ledger:
    """Requests in order of arrival, and the arrays that clients keep on the device.

    Attributes
    ----------
    held : Counter
        Bytes of each tenant: input and arrays here, what `Holdings` adds, and nothing twice.
    """

    def __init__(self) -> None:
        self.requests: dict[HeldRequest, None] = {}  # in order of arrival
        self._ready: dict[HeldRequest, None] = {}  # to be sent
        self._pieces: dict[int, tuple[HeldRequest, Piece]] = {}
        self._followers: dict[int, list[HeldRequest]] = {}  # those that wait for a task
        self._suspects: dict[HeldRequest, None] = {}  # the last one is tried first
        self.alone: HeldRequest | None = None
        self._numbers = itertools.count(1)
        self.buffers: dict[int, KeptArray] = {}
        self.held: Counter[str] = Counter()

    def number(self) -> int:
        """Return a number for a task or an array; none is given twice in the service's life."""
        return next(self._numbers)

    def add(self, held: HeldRequest) -> None:
        """Take a request in."""
        self.requests[held] = None
        self.held[held.tenant] += held.nbytes
        for piece in held.pieces:
            self._pieces[piece.number] = (held, piece)
        for number in held.waits:
            self._followers.setdefault(number, []).append(held)
        if not held.waits:
            self._ready[held] = None

    def sendable(self) -> list[HeldRequest]:
        """Return the requests that the owner may have now, and count them as sent.

        While there are suspects that is one of them (`alone`), until it has ended or is acquitted.
        """
        if self.alone is not None:
            return []
        if self._suspects:
            self.alone, _ = self._suspects.popitem()
            found = [self.alone]
        else:
            found = list(self._ready)
        for held in found:
            held.sent = True
            del self._ready[held]
        return found

    def find(self, client: int, number: int) -> tuple[HeldRequest, Piece] | None:
        """Return a client's task that has not ended."""
        held, piece = self._pieces.get(number, (None, None))
        return None if held is None or piece is None or held.client != client or piece.ended else (held, piece)

    def taking(self, number: int) -> None:
        """Note that the owner has begun to take a task's request in."""
        if number in self._pieces:
            held = self._pieces[number][0]
            held.taking = held.begun = True

    def taken(self, number: int) -> None:
        """Note that the owner has taken a task's request in."""
        if number in self._pieces:
            self._pieces[number][0].taking = False

    def moved(self, number: int, state: str) -> None:
        """Note that a task has got onto the device, is asked to leave it, or has left it."""
        if number in self._pieces:
            held, piece = self._pieces[number]
            piece.state, held.taking = state, False

    def acquit(self) -> None:
        """Note that the suspect has been alone for long enough: others may join it."""
        if self.alone is not None and not self.alone.acquitted:
            self.alone.acquitted, self.alone = True, None

    def ended(self, number: int) -> tuple[HeldRequest, Piece] | None:
        """Note that a task has ended; return it, or None if its client has been told before, or has gone."""
        found = self._pieces.get(number)
        if found is None:
            return None
        held, piece = found
        told, piece.ended = piece.ended or held.left, True
        self._forget_if_complete(held)
        return None if told else found

    def release(self, number: int, *, badly: bool) -> list[Gone]:
        """Let what comes after an ended task go on, or withdraw it where that ended `badly`."""
        gone: list[Gone] = []
        for held in self._followers.pop(number, []):
            held.waits.discard(number)
            if badly:
                gone += self.withdraw(held, why=BEFORE)
            elif not held.waits and held in self.requests:
                self._ready[held] = None
        return gone

    def cancelled(self, number: int) -> None:
        """Note that a task's client was told that it is cancelled: it does not run again if the owner dies first."""
        if number in self._pieces:
            self._pieces[number][1].cancelled = True

    def withdraw(
        self,
        held: HeldRequest,
        piece: Piece | None = None,
        why: dict[str, Any] = ASKED,
        error: errors.WarpwellError | None = None,
    ) -> list[Gone]:
        """Forget a request that the owner does not have, from a task on; return that, and what comes after it."""
        gone: list[Gone] = []
        ends = [(held, piece, why, error)]
        while ends:
            held, piece, why, error = ends.pop()
            if held not in self.requests:
                continue
            begin = 0 if piece is None else held.pieces.index(piece)
            left = held.pieces[begin:]
            held.pieces, held.tasks = held.pieces[:begin], held.tasks[:begin]
            for one in left:
                self._pieces.pop(one.number, None)
                if not one.ended:
                    gone.append(Gone(held, one, why, error))
                    ends += [(f, None, BEFORE, None) for f in self._followers.pop(one.number, [])]
            self._forget_if_complete(held)
        return gone

    def _forget_if_complete(self, held: HeldRequest) -> None:
        if all(p.ended for p in held.pieces) and held in self.requests:
            del self.requests[held]
            self.held[held.tenant] -= held.nbytes
            for piece in held.pieces:
                self._pieces.pop(piece.number, None)
            self._ready.pop(held, None)
            self._suspects.pop(held, None)
            if self.alone is held:
                self.alone = None

    def drop(self, client: int) -> tuple[list[Piece], list[int], list[Gone]]:
        """Forget a client; return its tasks and arrays that the owner has, which are to go there, and other tasks."""
        sent: list[Piece] = []
        gone: list[Gone] = []
        for held in [h for h in self.requests if h.client == client]:
            if held.sent:
                held.left = True  # it counts until the owner has told its end
                sent += [p for p in held.pieces if not p.ended]
            else:
                gone += self.withdraw(held)
        return sent, [number for number in list(self.buffers) if self.free_buffer(client, number)], gone

    def owner_died(self, guilty: int | None, reason: str) -> list[Gone]:
        """Note that the owner is gone; return the tasks that go with it.

        `guilty` is the number of the task that did it, where that is known, and `reason` what happened, for people.
        """
        sent = {h: None for h in self.requests if h.sent}
        suspects = [h for h in sent if h.taking or h.launched] or sent
        culprit = self.alone if guilty is None and list(sent) == [self.alone] else None
        if guilty in self._pieces:
            culprit = self._pieces[guilty][0]
        gone: list[Gone] = []
        for held in sent:
            held.sent = held.taking = False
            for piece in held.pieces:
                piece.state = "waiting"
            cancelled = next((p for p in held.pieces if p.cancelled and not p.ended), None)
            if held.left or cancelled is not None:
                gone += self.withdraw(held, None if held.left else cancelled)
        for held in [h for h in self.requests if h is culprit or h.buffers or (h.lent and h.begun)]:
            gone += self._give_up(held, reason, guilty=held is culprit)
        if guilty is not None or culprit is not None:
            suspects = []
        # those that have been alone for a while come last; who was not there did not do it
        self._suspects = {h: None for h in sorted(suspects, key=lambda h: not h.acquitted) if h in self.requests}
        self.alone = None
        self._ready = {h: None for h in self.requests if not h.waits}
        for number, buffer in list(self.buffers.items()):
            self.held[buffer.tenant] -= buffer.nbytes
            buffer.nbytes, buffer.lost = 0, True
            if buffer.leaves:
                del self.buffers[number]
        return gone

    def _give_up(self, held: HeldRequest, reason: str, *, guilty: bool) -> list[Gone]:
        name = next((p.name for p in held.pieces if not p.ended), held.pieces[-1].name)
        if guilty:
            text = f"the process that owns the device was started again because of task {name!r}: {reason}"
        elif held.buffers:
            text = (
                f"task {name!r} needs arrays on the device, and they are gone: {reason}. Put them there again with "
                "to_device, and submit again"
            )
        else:
            text = (
                f"task {name!r} may have changed memory of your process when the owner of the device ended: "
                f"{reason}. Set the arrays again, and submit again"
            )
        return self.withdraw(held, why={"reason": reason}, error=errors.TaskLostError(text, task=name))

    def new_buffer(self, client: int, tenant: str, nbytes: int) -> int:
        """Note an array on the device; return its number."""
        number = self.number()
        self.buffers[number] = KeptArray(client, tenant, nbytes)
        self.held[tenant] += nbytes
        return number

    def free_buffer(self, client: int, number: int) -> bool:
        """Forget an array of a client; tell whether the owner has it, so that it counts until it is `freed`."""
        buffer = self.buffers.get(number)
        if buffer is None or buffer.client != client or buffer.leaves:
            return False
        buffer.leaves = True
        if buffer.lost:
            del self.buffers[number]
        return not buffer.lost

    def freed(self, number: int) -> None:
        """Note that an array is gone from the device, or never got there."""
        buffer = self.buffers.pop(number, None)
        if buffer is not None:
            self.held[buffer.tenant] -= buffer.nbytes

    def check_buffers(self, client: int, numbers: Iterable[int]) -> None:
        """Raise for an array that is not this client's.

        Raises
        ------
        TaskLostError
            It died with an owner.
        ArgumentError
            It was freed, or there never was one.
        """
        for number in numbers:
            buffer = self.buffers.get(number)
            if buffer is None or buffer.client != client or buffer.leaves:
                raise errors.ArgumentError(f"there is no array {number} on the device: it was freed", name="args")
            if buffer.lost:
                raise errors.TaskLostError(
                    "the array on the device is gone: the process that owned it was started again. Put it there again "
                    "with to_device"
                )

    def leaves(self, tenant: str) -> bool:
        """Tell whether any of a tenant's are being given back: the owner has not confirmed it yet."""
        given = (h.left for h in self.requests if h.tenant == tenant)
        return any(given) or any(b.leaves for b in self.buffers.values() if b.tenant == tenant)


class Holdings:
    """Bytes of tenants: messages on their way in, input, arrays on the device, and answers that were not read.

    They belong to the tenant, not to a connection: bytes that were not given back yet count after a reconnect, too.
    All methods run under the broker's lock; those that wait release it meanwhile.

    Parameters
    ----------
    lock : RLock
    ledger : Ledger
        Which counts the bytes, and knows what is about to be given back.
    most : int
        Bytes of a tenant.
    """

    def __init__(self, lock: threading.RLock, ledger: Ledger, most: int) -> None:
        self._room = threading.Condition(lock)
        self._ledger = ledger
        self._most = most
        self._unread: Counter[str] = Counter()

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
                f"tenant {tenant!r} has {self._ledger.held[tenant]} bytes of input, arrays and answers at the service; "
                f"{nbytes} more are over {self._most}: wait for results, free arrays, or start the service with a "
                "larger --max-held"
            )

    def _fits(self, tenant: str, nbytes: int) -> bool:
        return self._ledger.held[tenant] + nbytes <= self._most

    def promise(self, tenant: str, nbytes: int) -> Callable[[], None]:
        """Count an answer; return what to call when it was sent, or its client has gone.

        One may be over the limit; others wait until it is read.

        Raises
        ------
        QuotaError
            It is not read.
        """
        if not self._room.wait_for(lambda: not self._unread[tenant] or self._fits(tenant, nbytes), ROOM):
            raise errors.QuotaError(
                f"tenant {tenant!r} has {self._ledger.held[tenant]} bytes at the service, among them answers that it "
                f"has not read; {nbytes} more are over {self._most}: read them first"
            )
        self._owe(tenant, nbytes)

        def sent() -> None:
            with self._room:
                self._owe(tenant, -nbytes)

        return sent

    def results(
        self, held: HeldRequest, places: Sequence[int], arrays: Sequence[NDArray[Any]]
    ) -> tuple[Callable[[], list[NDArray[Any]]], Callable[[], None]]:
        """Return a function that gives the arrays of a result when it is sent, and one to call after that.

        Results are owed in any case. Of each array of a request there is one here, the newest, however many of its
        tasks' results were not read.
        """
        results, new = held.results, dict(zip(places, arrays, strict=True))
        self._owe(held.tenant, sum(a.nbytes for p, a in new.items() if p not in results))
        results.update(new)
        held.unsent += 1

        def sent() -> None:
            with self._room:
                held.unsent -= 1
                if not held.unsent:
                    self._owe(held.tenant, -sum(a.nbytes for a in results.values()))
                    results.clear()

        return lambda: [results[p] for p in places], sent

    def _owe(self, tenant: str, nbytes: int) -> None:
        self._unread[tenant] += nbytes
        self._ledger.held[tenant] += nbytes
        self._room.notify_all()

    def comes(self, tenant: str, nbytes: int) -> None:
        """Count a message that begins to come (negative: that is there, or given up). Raises as `admit` does."""
        if nbytes > 0:
            self.admit(tenant, nbytes)
        self._ledger.held[tenant] += nbytes
