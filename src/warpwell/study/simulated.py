"""Simulated: a job on the simulated device: how far it is, how fast, and what is to become of it."""

from __future__ import annotations

import math

from ..scheduler.executor import Capacity
from ..scheduler.residency import Resident, Shape
from ..scheduler.task import Job, Placement

NEVER = math.inf


class Simulated:
    """A job that was launched.

    Blocks run in waves: as many as are resident begin together and end together, so a drain lasts to the end of the
    wave. Positions are in blocks and may lie within a block.

    Attributes
    ----------
    position : float
        Blocks of work that are done.
    base : int
        Where the waves began: the position at launch, or at the last change of the quota.
    alone, allowed, wanted, found, kept : int
        Blocks that would be resident alone; that the quota allows; that are left of those; that have found room; that
        had it before.
    width : int
        Blocks of a wave.
    said : int
        Blocks that it was said to have done: none of them is taken back.
    speed : float
        Blocks a second.
    hold : float or None
        Time until which nothing is done, because registers are saved or restored.
    easy : bool
        Whether it has never been asked for anything.
    saving : bool
        Whether it leaves at `hold`.
    stop_at, resize_at : float
        Time at which it sees that it is to stop, or that its quota is `next_allowed`.
    stop_goal, resize_goal : float
        Position, once it has seen that, at which it does so.
    goal : float
        The next position at which something happens.
    goal_due, due : float
        Times of that, and of the next thing at all.
    """

    __slots__ = (
        "alone", "allowed", "base", "blocks", "due", "easy", "found", "goal", "goal_due", "hold", "job", "kept", "load",
        "mode", "next_allowed", "partition", "per_block", "plain", "position", "profile", "rate", "resident",
        "resize_at", "resize_goal", "said", "saving", "shape", "speed", "stop_at", "stop_goal", "wanted", "width",
    )  # fmt: skip

    def __init__(self, job: Job, shape: Shape, position: float, placement: Placement, capacity: Capacity) -> None:
        self.job = job
        self.shape = shape
        self.profile = shape.profile
        self.blocks = shape.blocks
        # A kernel of no duration still ends after it has begun.
        self.per_block = max(shape.profile.seconds or 0.0, 1e-9) / shape.blocks
        self.position = position
        self.base = int(position)
        self.alone = shape.alone
        self.allowed = shape.allowed(placement, capacity)
        self.next_allowed = self.allowed
        self.load = shape.load
        self.width = self.allowed
        self.said = self.base
        self.partition = placement.partition
        self.plain = placement.plain
        self.goal: float = shape.blocks
        self.found = self.kept = self.wanted = 0
        self.rate = self.speed = 0.0
        self.stop_at = self.resize_at = self.stop_goal = self.resize_goal = self.goal_due = self.due = NEVER
        self.hold: float | None = None
        self.resident: Resident | None = None
        self.easy = True
        self.saving = False
        self.mode = ""

    def last_wave(self) -> int:
        """Return the position at which its last wave begins."""
        base, allowed = self.base, self.allowed
        return base + (self.blocks - base - 1) // allowed * allowed

    def wave_end(self) -> int:
        """Return the position at which the blocks that run now will have ended."""
        waves = math.ceil((self.position - self.base) / self.width - 1e-9)
        return min(self.blocks, self.base + waves * self.width)

    def wave_begin(self) -> int:
        """Return the position at which the blocks that run now began."""
        waves = math.floor((self.position - self.base) / self.width + 1e-9)
        return min(self.blocks, self.base + waves * self.width)

    def plan(self, now: float, squeezed: bool) -> None:
        """Find what happens next, and when.

        Parameters
        ----------
        now : float
        squeezed : bool
            Whether a younger kernel waits for room, so that it matters when the last wave begins.
        """
        if self.easy and not squeezed:
            # Nothing is asked of it, and nobody waits for its room: it just goes on.
            self.goal = self.blocks
            rate = self.rate
            if rate > 0:
                self.speed = rate / self.per_block
                self.due = self.goal_due = now + (self.blocks - self.position) / self.speed
            else:
                self.speed = 0.0
                self.due = self.goal_due = NEVER
            return
        goal = float(self.blocks)
        if self.stop_goal < goal:
            goal = self.stop_goal
        if self.resize_goal < goal:
            goal = self.resize_goal
        if squeezed:
            tail = self.last_wave()
            if self.position < tail < goal:
                goal = tail
        self.goal = goal
        if self.hold is not None:
            self.speed = 0.0
            self.goal_due = NEVER
            self.due = self.hold
            return
        self.speed = self.rate / self.per_block
        left = goal - self.position
        if left <= 0:
            due = now
        else:
            due = now + left / self.speed if self.speed > 0 else NEVER
        self.goal_due = due
        if self.stop_at < due:
            due = self.stop_at
        if self.resize_at < due:
            due = self.resize_at
        self.due = due
