"""`Seat`: a thread at one device; `Station`: its process there. They take the lease, keep it, and hand it over.

A process keeps the lease between two turns: nobody who waits, no call of the system. Whoever waits sets his flag, which
the holder sees at the end of its turn (or its pause); it then lets the GPU finish what it has enqueued, frees the lock
that is the lease, and wakes the one who is next. A holder that is between two turns is rung for, and a thread of its
process hands over; the lock says who has the lease, whatever the words say::

    waits: flag, ring a holder that is outside ──► sleeps until its bell rings, or LOOK is over ──► tries the lock
    holds: inside ──► end, pause: a flag? ──► drain ──► is another still the next? ──► free the lock, ring it
    dies: the kernel frees the lock; who is next finds it at its next look
    stays: who waits longer than the limit counts the lease's number up; the lock of the old number counts no more
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref

from .. import errors
from .board import (
    AHEAD,
    EPOCH,
    GRANT,
    GRANTED,
    HOLDER,
    HOME,
    IDLE,
    INSIDE,
    LIMITS,
    OPEN,
    PRIORITY,
    SINCE,
    SLOTS,
    STATE,
    TURNS,
    USE,
    WAITING,
    YIELDED,
    Board,
)
from .choice import FILE, Limits, least_use, next_of, overstays
from .gpu_work import Work

LOOK = 4e-3
"""Seconds after which who waits looks whether the holder has died."""

LINGER = 1e-4
"""Seconds between two turns for which a holder keeps the lease that is to keep it: it may be a loop that comes back."""

OFTEN = 2.5e-4
"""Seconds after which a pause that nobody waits for is marked on the GPU, which costs some microseconds."""

QUIET = 60.0
"""Seconds after which a process looks although nobody rang."""

LATE = 25e-3
"""Seconds for which one that was rung is waited for before others try."""

_clock = time.monotonic_ns


class Station:
    """The process at one device.

    Attributes
    ----------
    seat : Seat or None
        Of the thread that has the lease, inside a turn or between two.
    gates : bool
        Whether some thread's work waits at gates, or did.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.lock = threading.RLock()  # a handler of signals may begin a turn, too
        self.process = os.getpid()
        self.gates = False
        self.seat: Seat | None = None
        self.epoch = 0
        self.kept_since = 0
        self.limits = Limits()
        self.version = 0
        if not board.words[LIMITS]:
            with contextlib.suppress(OSError):
                text = (board.path.parent / FILE).read_bytes()
                if Limits.of(text) is not None:
                    board.write_text(text)
        self._home = board.sit()
        threading.Thread(target=self._serve, name="warpwell-turns", daemon=True).start()

    @property
    def home(self) -> int:
        """The slot whose bell this process listens to."""
        return self._home

    def lost(self) -> bool:
        """Return whether the lease was taken away from this process; forget it then."""
        if self.epoch == self.board.words[EPOCH]:
            return False
        with self.lock:
            if self.seat is not None:
                self.seat, self.board.held = None, 0
                self.board.unlock(self.board.lease(self.epoch))
        return True

    def take(self, seat: Seat) -> bool:
        """Take the lease for a thread, if it is free."""
        board = self.board
        with self.lock:
            if self.seat is not None and not self.lost():
                return False
            epoch = board.words[EPOCH]
            try:
                if not board.lock(board.lease(epoch)):
                    return False
                if board.words[EPOCH] != epoch:
                    board.unlock(board.lease(epoch))
                    return False
                self.epoch, self.seat, seat.inside = epoch, seat, True
                seat.entries += 1
                board.held = board.lease(epoch)
                self.kept_since = board.words[YIELDED] = _clock()
                board.words[HOLDER], board.words[GRANT] = seat.slot, 0
                return True
            except BaseException:
                self.seat, board.held, seat.inside = None, 0, False
                board.unlock(board.lease(epoch))
                raise

    def hand_over(self, seat: Seat | None, stays: bool) -> bool:
        """Hand over to whoever comes before a thread that has the lease and is outside; return whether that was done.

        Parameters
        ----------
        seat : Seat or None
            The thread; None: any of this process.
        stays : bool
            Whether it would go on.
        """
        board, marked, entries = self.board, None, 0
        try:
            with self.lock:
                held = self.seat
                if held is None or held.inside or (seat is not None and held is not seat) or self.lost():
                    return False
                if not next_of(board, held.slot if stays else 0, self.kept_since, _clock()):
                    return False
                entries, marked = held.entries, held
                held.inside = True  # so that no other thread does the same
            held.drain()
            with self.lock:
                if held.entries != entries:  # it has begun a turn meanwhile
                    return False
                held.inside = False
                if self.seat is not held or self.lost():
                    return False
                chosen = next_of(board, held.slot if stays else 0, self.kept_since, _clock())
                if chosen:
                    self.release(chosen)
                return chosen > 0
        except BaseException:
            if marked is not None and marked.entries == entries:
                marked.inside = False
            raise

    def release(self, chosen: int) -> None:
        """Free the lease, and wake the slot that is next (0: none)."""
        board = self.board
        try:
            if self.seat is not None and board.words[HOLDER] == self.seat.slot:  # else somebody has overtaken
                board.words[HOLDER] = 0
            self.seat, board.held = None, 0
            board.words[GRANT], board.words[GRANTED] = chosen, _clock()
            board.unlock(board.lease(self.epoch))
            if chosen and board.words[board.at(chosen) + HOME] == chosen:  # it has gates
                board.words[board.at(chosen) + OPEN] = 1
        except BaseException:
            self.seat, board.held = None, 0
            board.unlock(board.lease(self.epoch))
            raise
        if chosen:
            board.ring(chosen)

    def refresh(self) -> None:
        """Read the operator's limits if they have changed."""
        if self.version != self.board.words[LIMITS]:
            version, limits = Limits.read(self.board)
            if limits is not None:
                self.version, self.limits = version, limits

    def retire(self, slot: int) -> None:
        """Give back the slot of a thread that has ended, and the lease if it had it."""
        if self.process != os.getpid():
            return
        with self.lock:
            if self.seat is not None and self.seat.slot == slot:
                self.seat.inside = False
                self.hand_over(self.seat, False)
                if self.seat is not None and not self.lost():
                    self.release(0)
        self.board.rise(slot)

    def _serve(self) -> None:
        """Hand over while the program does something else than turns."""
        while True:
            heard = self.board.heard(self._home)
            held = self.seat
            if held is None or held.gated or held.inside or not self.board.anyone():
                pass
            elif not self.hand_over(None, True):
                turns = held.turns
                time.sleep(LINGER)
                if held.turns == turns:
                    self.hand_over(held, False)
            self.board.listen(self._home, heard, QUIET)


class Seat:
    """A thread at one device. Only its thread calls its methods.

    Attributes
    ----------
    gated : bool
        Whether its work waits at gates (`ahead.py`).
    broken : bool
        Whether it holds up nothing any more: the driver refused a gate.
    stream : object
        What the last turn named as its streams. They live until the next turn begins: a new stream could have the
        handle of one that is no more, and would be taken for it.
    inside : bool
        Whether it is in a turn, so that nobody else may hand over.
    owner : int
        Whose turn is open: the identity of the outermost `Turn`.
    entries : int
        How often it has begun a turn or a part of one.
    turns : int
        Turns, and parts of turns, that have ended.
    """

    gated = False
    broken = False

    def __init__(self, station: Station) -> None:
        self.station = station
        self.stream: object = None
        self.work = Work()
        self.inside = False
        self.owner = 0
        self.entries = 0
        self.depth = 0
        self.turns = 0
        self.slot = station.board.sit()
        self._at = station.board.at(self.slot)
        self._began = 0
        self._tenant = ""
        self._priority: int | None = None
        self._version = 0
        self._streams: tuple[int, ...] = ()
        station.board.words[self._at + HOME] = station.home

    def begin(self, tenant: str, priority: int, streams: tuple[int, ...], timeout: float | None) -> None:
        """Begin a turn; one within another is a part of it."""
        if self.depth:
            self.depth += 1
            return
        self._introduce(tenant, priority)
        self._streams = streams
        self._enter(timeout)
        self.depth = 1

    def pause(self, timeout: float | None) -> None:
        """Hand over inside a turn, if another comes first, and go on when the lease is back."""
        if self.depth == 0 or (_clock() - self._began < OFTEN * 1e9 and not self.station.board.anyone()):
            return
        try:
            self._leave()
            self._enter(timeout)
        except BaseException:
            self.cancel(0)  # the turn is over: whatever it does now is without the lease
            raise

    def end(self) -> None:
        """End a turn."""
        if self.depth == 1:
            self.depth = 0
            self._leave()
            if self.station.board.anyone() and self.station.seat is self:
                self.station.board.ring(self.station.home)  # if it does not come back, another thread hands over
        elif self.depth:
            self.depth -= 1

    def cancel(self, depth: int) -> None:
        """Undo what began or ended and was interrupted, whatever of it was done; `depth` turns are open then."""
        self.depth = depth
        if depth:
            return
        board = self.station.board
        self.work.forget_mark()
        board.flag(self.slot, False)
        board.words[self._at + STATE] = IDLE
        if board.words[GRANT] == self.slot:
            board.words[GRANT] = 0
        self.inside = False
        if board.anyone():
            board.ring(self.station.home)  # it may have the lease: another thread hands over

    def drain(self) -> None:
        """Wait until what it has enqueued is done; any thread may call it."""
        self.work.drain(not self.station.gates)

    def settle(self) -> None:
        """Have no work waiting at a gate, behind which other work of the thread would be."""

    def retire(self) -> None:
        """Give its slot back: its thread has ended."""
        self.station.retire(self.slot)

    def _introduce(self, tenant: str, priority: int) -> None:
        """Write who has this seat from now on, if it is somebody else."""
        station = self.station
        if tenant == self._tenant and priority == self._priority and self._version == station.board.words[LIMITS]:
            return
        station.refresh()
        station.board.words[self._at + PRIORITY] = station.limits.priority(tenant, priority)
        station.board.set_name(self.slot, tenant.encode())
        self._tenant, self._priority, self._version = tenant, priority, station.version

    def _enter(self, timeout: float | None) -> None:
        station, words = self.station, self.station.board.words
        with station.lock:
            kept = station.seat is self and station.epoch == words[EPOCH]
            self.inside = kept
            self.entries += kept
        if kept:
            self._began = words[YIELDED] = words[self._at + SINCE] = _clock()
            words[self._at + STATE] = INSIDE
            self.work.wait_ahead()
            if not station.board.anyone():
                return
            words[self._at + STATE] = IDLE
            self.inside = False
            if not station.hand_over(self, True):
                with station.lock:
                    self.inside = kept = station.seat is self and station.epoch == words[EPOCH]
                    self.entries += kept  # another thread that is handing over must not release what is kept here
                if kept:
                    words[self._at + STATE] = INSIDE
                    return
        self._wait(timeout)
        self.work.resume()
        self._began = words[self._at + SINCE] = _clock()
        words[self._at + STATE] = INSIDE

    def _leave(self) -> None:
        station, words = self.station, self.station.board.words
        try:
            self.work.mark(self._streams)
            now = words[YIELDED] = _clock()
            words[self._at + USE] += now - self._began
            self.turns = words[self._at + TURNS] = self.turns + 1
        finally:
            words[self._at + STATE] = IDLE
            self.inside = False
        if station.board.anyone():
            station.hand_over(self, True)

    def _wait(self, timeout: float | None) -> None:
        """Wait for the lease."""
        station, board = self.station, self.station.board
        if not board.anyone() and station.take(self):
            return
        words, at = board.words, self._at
        since = words[at + SINCE] = _clock()
        words[at + USE] = max(words[at + USE], least_use(board) or 0)
        words[at + STATE] = WAITING
        end = None if timeout is None else since + int(timeout * 1e9)
        tried = since
        try:
            while True:
                heard = board.heard(self.slot)
                board.flag(self.slot, True)
                now = _clock()
                if self._may_try(now) or now - tried > LATE * 1e9:
                    tried = now
                    if station.take(self):
                        return
                if end is not None and now >= end:
                    raise errors.TurnTimeoutError(
                        f"no turn at {board.name} in {timeout:g} s: see `warpwell sched status` for who has it",
                        device=board.name,
                    )
                self._ask(now, since)
                board.listen(self.slot, heard, LOOK if end is None else min(LOOK, (end - now) / 1e9))
        finally:
            board.flag(self.slot, False)
            if station.seat is not self:  # interrupted, or too late: what was granted is for the others
                words[at + STATE] = IDLE
                if words[GRANT] == self.slot:
                    words[GRANT] = 0

    def _may_try(self, now: int) -> bool:
        """Return whether no other waiter comes before this one."""
        board = self.station.board
        granted = board.words[GRANT]
        if granted == self.slot:
            return True
        if granted and board.flagged(granted % SLOTS):
            if now - board.words[GRANTED] < LATE * 1e9:
                return False
            board.flag(granted % SLOTS, False)  # it is stopped: once it goes on it says again that it waits
        return next_of(board, 0, 0, now) == self.slot

    def _ask(self, now: int, since: int) -> None:
        """Ring the holder's process if it is outside of a turn; take away what is held for too long."""
        station, board = self.station, self.station.board
        station.refresh()
        holder = board.words[HOLDER]
        if not 0 < holder < SLOTS:
            return
        at = board.at(holder)
        if board.words[at + STATE] != INSIDE:
            board.ring(board.words[at + HOME] % SLOTS)
        if board.words[at + STATE] == AHEAD and next_of(board, holder, now, now) == self.slot:
            self._overtake(holder)
            return
        if overstays(board, since, now, station.limits.holds(board.tenant(holder))):
            try:
                if board.seize() and board.words[HOLDER] == holder and overstays(board, since, now, 0.0):
                    board.words[EPOCH] += 1
                    board.words[HOLDER] = 0
                board.let_go()
            except BaseException:  # Ctrl-C as soon as the lock is taken, or before it is freed
                board.let_go()
                raise

    def _overtake(self, holder: int) -> None:
        """Take the lease away from a holder once its work stands at a gate; its process need not run for that."""
        board = self.station.board
        at, epoch = board.at(holder), board.words[EPOCH]
        stands = board.shut(holder, epoch, LOOK)
        if board.words[at + STATE] == IDLE:
            board.words[at + OPEN] = 1  # it holds up nothing any more, and nobody there may be left to open
        if not stands:
            return
        try:
            free = board.seize() and board.words[HOLDER] == holder and board.words[EPOCH] == epoch
            waits = board.pending(holder)
            if free and board.words[at + STATE] == AHEAD and not (waits and board.words[at + OPEN]):
                board.words[at + OPEN] = 0  # nothing was behind the gate, which somebody has opened meanwhile
                if board.words[at + STATE] == IDLE:
                    board.words[at + OPEN] = 1
                if waits:
                    board.words[at + STATE], board.words[at + SINCE] = WAITING, _clock()
                    board.flag(holder, True)
                board.words[EPOCH] += 1
                board.words[HOLDER] = 0
                board.ring(self.slot)  # so that it does not sleep now
            board.let_go()
        except BaseException:  # as in _ask
            board.let_go()
            raise


class _Ticket:
    """What goes with its thread."""


class _Seats(threading.local):
    """Seats of the calling thread, by device."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, type[Seat]], Seat] = {}
        self.tickets: list[_Ticket] = []


_all: weakref.WeakSet[Seat] = weakref.WeakSet()
_seats = _Seats()
_stations: dict[str, Station] = {}
_making = threading.Lock()


def _after_fork() -> None:
    """Forget all in a forked child: locks are not inherited, and threads do not exist there."""
    global _seats, _stations, _making
    for seat in _all:
        seat.depth = 0  # a turn that was open at the fork is the parent's
    _seats, _stations, _making = _Seats(), {}, threading.Lock()
    Board.forget()


os.register_at_fork(after_in_child=_after_fork)


def seat_of(name: str, kind: type[Seat] = Seat) -> Seat:
    """Return the calling thread's seat at a device, of a kind: while it is in a turn there, the seat of that turn."""
    for other, one in _seats.found.items():
        if other[0] == name:
            if one.depth:
                return one
            if kind is not other[1]:
                one.settle()
    found = _seats.found.get((name, kind))
    if found is None:
        with _making:
            station = _stations.get(name) or _stations.setdefault(name, Station(Board.of(name)))
        found = _seats.found[name, kind] = kind(station)
        _all.add(found)
        ticket = _Ticket()
        _seats.tickets.append(ticket)
        weakref.finalize(ticket, found.retire).atexit = False
    return found
