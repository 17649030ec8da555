"""`Ledger`: requests and arrays that a service holds, and their fate when the owner dies. No I/O, no threads.

A request stays here, with its input, until its last task has ended. So when the owner dies, what has its input here
runs again in the next owner; what used arrays on the device cannot, because they died with it.

Who killed the owner? If the owner could still say so (a stuck kernel), that task. Otherwise the one that it was taking
in (importing, looking at) and those that were on the device are suspects. They run again one by one, in this order, the
last launched first, before everything else: an owner that dies while one is alone was killed by it. So what kills its
owner costs the others one run that is repeated, and is given up after two. A suspect that has been alone for a while
(`cleared`) goes on beside the next, so that a long task holds nobody up; one that is being taken in beside it is to
blame all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from ... import errors

MAX_DEATHS = 3
"""Owners that may die while a request was on the device, before it is given up, whichever task killed them."""


@dataclass
class Piece:
    """A task of a request: its number in the service, and the client's."""

    number: int
    theirs: int
    name: str
    launched: int = 0  # its place in the order of launches; 0: not on the device
    cancelled: bool = False  # its client was told that it is
    ended: bool = False


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
    sent: bool = False
    taking: int = 0  # its place in the order in which the owner takes them in; 0: it does not do so now
    taken: bool = False  # it has done so
    deaths: int = 0
    results: dict[int, NDArray[Any]] = field(default_factory=dict)  # results that its client has not been sent yet
    unsent: int = 0  # messages with them

    @property
    def nbytes(self) -> int:
        """Bytes of input."""
        return sum(a.nbytes for a in self.arrays)

    @property
    def launched(self) -> int:
        """When its task on the device was launched, in the order of launches; 0: it has none there."""
        return max((p.launched for p in self.pieces if not p.ended), default=0)

    def follows(self, other: HeldRequest) -> bool:
        """Tell whether it comes after a task of another request that has not ended."""
        after = self.options.get("after", ())
        return other.client == self.client and any(p.theirs in after for p in other.pieces if not p.ended)


@dataclass(frozen=True)
class KeptArray:
    """An array on the device."""

    client: int
    tenant: str
    nbytes: int


@dataclass(frozen=True)
class Gone:
    """A task that will not run (again), and why; without an error it was cancelled."""

    held: HeldRequest
    piece: Piece
    error: errors.WarpwellError | None = None


class Ledger:
    """Requests in order of arrival, and the arrays that clients keep on the device."""

    def __init__(self) -> None:
        self.requests: dict[HeldRequest, None] = {}  # in order of arrival
        self._unsent: dict[HeldRequest, None] = {}
        self._pieces: dict[int, tuple[HeldRequest, Piece]] = {}
        self._dropped: dict[int, Gone] = {}
        self._suspects: dict[HeldRequest, None] = {}  # in the order in which they are tried
        self.alone: HeldRequest | None = None
        self._launches = 0
        self._numbers = 0
        self.buffers: dict[int, KeptArray] = {}
        self._freeing: dict[int, KeptArray] = {}
        self._lost: dict[int, int] = {}
        self._buffers_made = 0
        self._bytes: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        self._left: Counter[HeldRequest] = Counter()

    def number(self) -> int:
        """Return a number for a task; none is given twice in the service's life."""
        self._numbers += 1
        return self._numbers

    def add(self, held: HeldRequest) -> None:
        """Take a request in."""
        self.requests[held] = self._unsent[held] = None
        self._bytes[held.tenant] += held.nbytes
        for piece in held.pieces:
            self._pieces[piece.number] = (held, piece)

    def sendable(self) -> list[HeldRequest]:
        """Return the requests that the owner may have now, and count them as sent.

        While there are suspects that is one of them (`alone`), until it has ended or is cleared.
        """
        if self.alone is not None:
            return []
        if self._suspects:
            self.alone = self._before(next(iter(self._suspects)))
            self._suspects.pop(self.alone, None)
            found = [self.alone]
        else:
            found = list(self._unsent)
        for held in found:
            held.sent = True
            del self._unsent[held]
        return found

    def _before(self, held: HeldRequest) -> HeldRequest:
        """Return the request that must be sent before this one, or this one."""
        if not held.options.get("after"):
            return held
        first, earlier = held, False
        for other in reversed(self._unsent):
            if earlier and first.follows(other):
                first = other
            earlier = earlier or other is held
        return first

    def find(self, number: int) -> tuple[HeldRequest, Piece] | None:
        """Return a task that has not been forgotten."""
        return self._pieces.get(number)

    def taking(self, number: int, now: bool) -> None:
        """Note that the owner has begun to take a task's request in, or (not `now`) has done so."""
        if number in self._pieces:
            self._launches += 1
            held = self._pieces[number][0]
            held.taking, held.taken = self._launches if now else 0, not now

    def launched(self, number: int, now: bool) -> None:
        """Note that a task has got onto the device, or (not `now`) has left it."""
        if number in self._pieces:
            self._launches += 1
            held, piece = self._pieces[number]
            piece.launched = self._launches if now else 0
            held.taking, held.taken = 0, True

    @property
    def judged(self) -> bool:
        """Whether the suspect's time alone counts: it runs, or cannot run before others have ended."""
        alone = self.alone
        if alone is None or alone.launched:
            return alone is not None
        return alone.taken and any(alone.follows(h) for h in self.requests if h.sent)

    def cleared(self) -> None:
        """Note that the suspect has been alone for long enough: others may join it."""
        self.alone = None

    def ended(self, number: int) -> tuple[HeldRequest, Piece] | None:
        """Note that a task has ended; return it, or None if its client has been told before, or has gone."""
        found = self._pieces.get(number)
        gone = self._dropped.pop(number, None)
        if gone is not None:
            self._left[gone.held] -= 1
            if not self._left[gone.held]:
                del self._left[gone.held]
                self._leaving[gone.held.tenant] -= gone.held.nbytes
        if found is None:
            return None
        held, piece = found
        told, piece.ended = piece.ended, True
        if self._complete(held):
            self._forget(held)
        return None if told else found

    def _complete(self, held: HeldRequest) -> bool:
        return all(p.ended for p in held.pieces)

    def cancelled(self, number: int) -> None:
        """Note that a task's client was told that it is cancelled: it does not run again if the owner dies first."""
        if number in self._pieces:
            self._pieces[number][1].cancelled = True

    def withdraw(self, held: HeldRequest, piece: Piece | None = None) -> list[Gone]:
        """Forget a request that the owner does not have, from a task on; return those that have not ended."""
        first = 0 if piece is None else held.pieces.index(piece)
        left = held.pieces[first:]
        for one in left:
            del self._pieces[one.number]
        held.pieces, held.tasks = held.pieces[:first], held.tasks[:first]
        if self._complete(held):
            self._forget(held)
        return [Gone(held, p) for p in left if not p.ended]

    def drop(self, client: int) -> tuple[list[Piece], list[Gone]]:
        """Forget a client; return its tasks that the owner has, which are to be cancelled there, and the others."""
        sent: list[Piece] = []
        gone: list[Gone] = []
        for held in [h for h in self.requests if h.client == client]:
            left = [Gone(held, p) for p in held.pieces if not p.ended]
            if held.sent and left:
                sent += [g.piece for g in left]
                self._dropped.update({g.piece.number: g for g in left})  # until the owner has told their end
                self._left[held] = len(left)
                self._leaving[held.tenant] += held.nbytes  # so long it counts
            else:
                gone += left
            self._forget(held)
        for number in [n for n, b in self.buffers.items() if b.client == client]:
            self.free_buffer(client, number)
        self._lost = {n: c for n, c in self._lost.items() if c != client}
        return sent, gone

    def owner_died(self, guilty: int | None, reason: str) -> list[Gone]:
        """Note that the owner is gone; return the tasks that go with it.

        Parameters
        ----------
        guilty : int or None
            Number of the task that did it, where that is known.
        reason : str
            What happened, for people.
        """
        gone, self._dropped = list(self._dropped.values()), {}
        self._left.clear()
        self._leaving.clear()
        self._freeing.clear()
        again: dict[HeldRequest, None] = {}
        sent = [h for h in self.requests if h.sent]
        found = [h for h in sent if h.taking or h.launched] or sent
        suspects = dict.fromkeys(sorted(found, key=lambda h: (-h.taking, -h.launched)))
        culprit = self._pieces[guilty][0] if guilty in self._pieces else None
        if guilty is None and self.alone is not None and (sent == [self.alone] or self.alone.taking):
            culprit = self.alone
        self.alone = None
        for held in [*suspects, *(h for h in sent if h not in suspects)]:
            held.sent, held.taking, held.taken = False, 0, False
            cancelled = next((p for p in held.pieces if p.cancelled and not p.ended), None)
            if cancelled is not None:
                gone += self.withdraw(held, cancelled)
                if held not in self.requests:
                    continue
            if held is culprit:
                gone += self._give_up(held, errors.TaskLostError(
                    f"the process that owns the device was started again because of task {_name(held)!r}: {reason}",
                    task=_name(held)))  # fmt: skip
                continue
            if held.buffers:
                gone += self._give_up(held, errors.TaskLostError(
                    f"task {_name(held)!r} used arrays on the device, and they are gone: {reason}. Put them there "
                    "again with to_device, and submit again",
                    task=_name(held)))  # fmt: skip
                continue
            for piece in held.pieces:
                piece.launched = 0
            if guilty is None and culprit is None and held in suspects:
                held.deaths += 1
                if held.deaths >= MAX_DEATHS:
                    gone += self._give_up(held, errors.TaskLostError(
                        f"task {_name(held)!r} was on the device when its owner died, {held.deaths} times: {reason}",
                        task=_name(held)))  # fmt: skip
                else:
                    again[held] = None
        # those that were still to be looked at come after
        self._suspects = again | self._suspects
        self._unsent = {h: None for h in self.requests if not h.sent}
        for held in [h for h in self.requests if h.buffers]:
            gone += self._give_up(held, errors.TaskLostError(
                f"task {_name(held)!r} waits for arrays on the device that are gone: {reason}. Put them there again "
                "with to_device, and submit again",
                task=_name(held)))  # fmt: skip
        for number, buffer in self.buffers.items():
            self._lost[number] = buffer.client
            self._bytes[buffer.tenant] -= buffer.nbytes
        self.buffers.clear()
        return gone

    def _give_up(self, held: HeldRequest, error: errors.WarpwellError) -> list[Gone]:
        self._forget(held)
        return [Gone(held, p, error) for p in held.pieces if not p.ended]

    def _forget(self, held: HeldRequest) -> None:
        if held in self.requests:
            del self.requests[held]
            self._bytes[held.tenant] -= held.nbytes
        self._unsent.pop(held, None)
        for piece in held.pieces:
            self._pieces.pop(piece.number, None)
        self._suspects.pop(held, None)
        if self.alone is held:
            self.alone = None

    def new_buffer(self, client: int, tenant: str, nbytes: int) -> int:
        """Note an array on the device; return its number."""
        self._buffers_made += 1
        self.buffers[self._buffers_made] = KeptArray(client, tenant, nbytes)
        self._bytes[tenant] += nbytes
        return self._buffers_made

    def free_buffer(self, client: int, number: int, *, there: bool = True) -> bool:
        """Forget an array of a client; tell whether the owner has it.

        Where it is `there`, it counts until the owner says that it is gone (`freed`): tasks may use it.
        """
        self._lost.pop(number, None)
        buffer = self.buffers.get(number)
        if buffer is None or buffer.client != client:
            return False
        del self.buffers[number]
        self._bytes[buffer.tenant] -= buffer.nbytes
        if there:
            self._freeing[number] = buffer
            self._leaving[buffer.tenant] += buffer.nbytes
        return True

    def freed(self, number: int) -> None:
        """Note that an array is gone from the device."""
        buffer = self._freeing.pop(number, None)
        if buffer is not None:
            self._leaving[buffer.tenant] -= buffer.nbytes

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
            if number in self.buffers and self.buffers[number].client == client:
                continue
            if self._lost.get(number, -1) == client:
                raise errors.TaskLostError(
                    "the array on the device is gone: the process that owned it was started again. Put it there again "
                    "with to_device"
                )
            raise errors.ArgumentError(f"there is no array {number} on the device: it was freed", name="args")

    def held_bytes(self, tenant: str | None = None) -> int:
        """Return the bytes of input and of arrays on the device that are held for a tenant, or for all."""
        counts = (self._bytes, self._leaving)
        return sum(c[tenant] if tenant is not None else c.total() for c in counts)

    def leaving_bytes(self, tenant: str) -> int:
        """Return the bytes among them that are being given back: the owner has not confirmed it yet."""
        return self._leaving[tenant]


def _name(held: HeldRequest) -> str:
    waits = [p for p in held.pieces if not p.ended]
    return waits[0].name if waits else held.pieces[-1].name
