"""`Places`: gives units of tasks to the devices of a pool, and to other devices when one is lost."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from .. import closing, errors
from ..pool import CallResult
from ..scheduler import State, Task
from .scheduler_handle import PoolHandle
from .scheduler_member import Member, Unit

PATIENCE = 15.0
"""Seconds that a cancelling close waits for tasks to end; a device gives up its own tasks after 10."""

UNKNOWN = 1e-3
"""Predicted seconds of a task while no time of any task is known."""


class Places:
    """Decides which device runs which unit.

    A unit whose arrays find no room waits. Any other unit goes at once to the device that holds its buffers, or else
    to the device with the least predicted load. One lock guards the state; nothing slow happens under it.

    Parameters
    ----------
    members : sequence of Member
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._lock = threading.RLock()
        self._waiting: deque[Unit] = deque()
        self._open: dict[PoolHandle, Unit] = {}
        self._numbers = 0
        self._turn = 0
        self._closed = False
        closing.ready()

    # -- what the scheduler and handles call -------------------------------------------------------------------

    def handle(self, task: Task) -> PoolHandle:
        """Return a handle for a new task."""
        with self._lock:
            self._numbers += 1
            return PoolHandle(self, task, self._numbers)

    def submit(self, units: Sequence[Unit], after: Sequence[Future[Any]]) -> None:
        """Accept the units of a request, and place them when all of `after` have succeeded."""
        with self._lock:
            if self._closed:
                raise errors.ClosedError("the scheduler is closed: make another one")
            for unit in units:
                self._open.update(dict.fromkeys(unit.handles, unit))
        for unit, following in itertools.pairwise(units):
            unit.next = following
        waits = set(after)

        def released(future: Future[Any]) -> None:
            if future.cancelled() or future.exception() is not None:
                self._settle(units[0].rest(), None, cancelled=True)
                return
            with self._lock:
                waits.discard(future)
                if waits:
                    return
            self.place(units[0])

        for future in list(waits):
            future.add_done_callback(released)
        if not after:
            self.place(units[0])

    def cancel(self, handle: PoolHandle) -> bool:
        """Cancel a task, and those after it in its request; see `Handle.cancel`."""
        with self._lock:
            unit = self._open.get(handle)
            if unit is None:
                return handle.cancelled()
            unit.given_up = True
            member = unit.member if unit.sent else None
            rest = unit.rest()
        if member is None:
            self._settle(rest[rest.index(handle) :], None, cancelled=True)
            return True
        try:
            leaves, left = member.ask("cancel", handle.number)
        except errors.DeviceLostError:
            return True
        if left:
            self._end(unit, rest[rest.index(handle) :], None, cancelled=True)
        return bool(leaves) or handle.cancelled()

    def state_of(self, handle: PoolHandle) -> State:
        """Return the state of a task that has not ended here."""
        with self._lock:
            unit = self._open.get(handle)
            member = unit.member if unit is not None and unit.sent else None
        if member is None:
            return State.WAITING
        try:
            state = member.ask("state", handle.number)
        except errors.DeviceLostError:
            return State.WAITING
        # a task that has ended on the device still runs for us until its results are here
        ended = state is None or State(state) in (State.DONE, State.FAILED, State.CANCELLED)
        return State.RUNNING if ended else State(state)

    def close(self, cancel: bool) -> None:
        """Accept no more tasks, wait for all (or cancel them), and close the devices' schedulers. Idempotent."""
        with self._lock:
            self._closed = True
            handles = list(self._open)
        if cancel:
            for handle in handles:
                handle.cancel()
        wait(handles, PATIENCE if cancel else None)
        with self._lock:
            left = list(self._open)
        for handle in left:
            why = f"task {handle.task.name!r} was still running when the scheduler was closed"
            self._settle([handle], errors.SchedulerError(why, task=handle.task.name))
        for member in self.members:
            member.close(cancel)

    def retire(self) -> None:
        """Close in a thread, after the scheduler was garbage-collected. Safe in a finalizer."""
        closing.hand_over_to_thread(functools.partial(self.close, False), "warpwell-pool-retired")

    # -- places ------------------------------------------------------------------------------------------------

    def place(self, unit: Unit) -> None:
        """Give a unit to a device, or put it among those that wait for room."""
        with self._lock:
            unit.member, unit.sent = None, False
            unit.attempt += 1
            unit.handles = [h for h in unit.handles if h in self._open]
            unit.left = len(unit.handles)
            if not unit.handles:
                return  # cancelled meanwhile
            candidates = self._candidates(unit)
            roomy = [m for m in candidates if m.room(unit)]
            if candidates and not roomy:
                self._waiting.append(unit)
                return
        if candidates:
            self._place(unit, roomy)
        else:
            self._lost(unit, None)

    def _place(self, unit: Unit, roomy: Sequence[Member]) -> None:
        with self._lock:
            self._turn += 1
            count = len(self.members)

            def cost(member: Member) -> tuple[bool, float, int, int]:
                seconds = sum(self.predicted(h.task, member) for h in unit.handles)
                turn = (self.members.index(member) - self._turn) % count
                return member.holds_too_much(unit), member.load(unit.tenant) + seconds, len(member.units), turn

            member = min(roomy, key=cost)
            unit.seconds = sum(self.predicted(h.task, member) for h in unit.handles)
            unit.member = member
            member.units.add(unit)
            member.seconds += unit.seconds
            member.staged += unit.staged
            for handle in unit.handles:
                handle.device = member.device
                handle.tries += 1
        member.do(lambda: self._send(unit, member), lambda error: self.failed(unit, error))

    def predicted(self, task: Task, member: Member) -> float:
        """Return the seconds of a task alone on a device: from its profile, as measured there, or on another device."""
        if task.profile.seconds is not None:
            return task.profile.seconds
        rate = member.rate(task)
        if rate is None:
            rate = next((r for r in (m.rate(task) for m in self.members) if r is not None), None)
        return UNKNOWN if rate is None else rate * task.blocks

    def _send(self, unit: Unit, member: Member) -> None:
        with self._lock:
            if all(h not in self._open for h in unit.handles):
                self._leave(unit)
                return
        try:
            member.send(unit, self)
        except errors.DeviceLostError as error:
            self._lost(unit, error)
        except Exception as error:  # an argument cannot be sent: the handles raise it
            self._end(unit, unit.rest(), error)

    def goes(self, unit: Unit) -> list[PoolHandle]:
        """Return the handles of a unit that are still open, and count it as sent: its device cancels it from now on."""
        with self._lock:
            left = [h for h in unit.handles if h in self._open]
            if left:
                unit.handles, unit.left, unit.sent = left, len(left), True
            else:
                self._leave(unit)
            return left

    def ended(self, unit: Unit, handle: PoolHandle, attempt: int, result: CallResult) -> None:
        """Take the end of a task (in its device's thread)."""
        member = unit.member
        if member is None or unit.attempt != attempt or handle not in self._open:
            return  # from a device that was lost; the unit is on another
        try:
            told, seconds = member.result(result)
            if told == "cancelled":
                rest = unit.rest()
                self._end(unit, rest[rest.index(handle) :], None, cancelled=True)
                return
            member.fetch(unit)
        except errors.DeviceLostError as error:
            self._lost(unit, error)
            return
        except BaseException as error:  # raised by the task itself
            rest = unit.rest()
            self._end(unit, [handle], error)
            self._end(unit, rest[rest.index(handle) + 1 :], None, cancelled=True)
            return
        with self._lock:
            member.measured(handle.task, seconds)
        last = unit.left == 1
        self._end(unit, [handle], None)
        if last and unit.next is not None:
            self.place(unit.next)

    def failed(self, unit: Unit, error: BaseException) -> None:
        """Fail a unit with an unexpected error that was raised while it was sent or brought back."""
        error.add_note(f"while {unit.name!r} was sent to a device of a pool, or brought back")
        rest = unit.rest()
        if not any(h in self._open for h in rest):
            raise error  # all its handles have ended before
        self._end(unit, rest, error)

    def _end(
        self, unit: Unit, handles: Sequence[PoolHandle], error: BaseException | None, *, cancelled: bool = False
    ) -> None:
        with self._lock:
            unit.left -= sum(h in self._open for h in handles if h in unit.handles)
            if unit.left <= 0:
                self._leave(unit)
        self._settle(handles, error, cancelled=cancelled)

    def _leave(self, unit: Unit) -> None:
        """Take a unit from its device, and place units that wait for the room."""
        with self._lock:
            member = unit.member
            if member is None or unit not in member.units:
                return
            member.units.discard(unit)
            member.seconds = sum(u.seconds for u in member.units)
            member.staged -= unit.staged
            unit.arrays = None
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Place waiting units, in their order, while there is room."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                unit = self._waiting[0]
                candidates = self._candidates(unit)
                if candidates and not any(m.room(unit) for m in candidates):
                    return
                self._waiting.popleft()
            self.place(unit)

    def _candidates(self, unit: Unit) -> list[Member]:
        return [m for m in self.members if m.alive and unit.home in (None, m) and all(map(m.runs, unit.tasks))]

    def _lost(self, unit: Unit, error: BaseException | None) -> None:
        """Place a unit whose device is lost on another one if all its arguments are in this process; else fail it."""
        with self._lock:
            self._leave(unit)
            again = unit.home is None and not unit.given_up and bool(self._candidates(unit))
        if again:
            self.place(unit)
        elif unit.given_up:
            self._settle(unit.rest(), None, cancelled=True)
        else:
            for handle in unit.rest():
                where = unit.home.device if unit.home is not None else handle.device
                if where is None:
                    reason = "no device is left that runs it"
                else:
                    reason = f"device {where.index} is gone ({where.lost})"
                if unit.home is not None:
                    reason += ", and its arguments with it"
                lost = errors.TaskLostError(f"task {handle.task.name!r} was lost: {reason}", task=handle.task.name)
                lost.__cause__ = error
                self._settle([handle], lost)

    def _settle(self, handles: Sequence[PoolHandle], error: BaseException | None, *, cancelled: bool = False) -> None:
        with self._lock:
            told = [h for h in handles if self._open.pop(h, None) is not None]
        for handle in told:
            handle.settle(error, cancelled)
