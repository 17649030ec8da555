"""Live: how fast two kernels ran together, from the blocks that both ended; in place of a table of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..predict.pairs import Key, Pairs, key_of
from ..residency import REMEMBERED
from ..task import COMPUTE, DONE, MEMORY, Job, Kind

SHARES = (0.5, 0.75, 0.25)
"""Parts of the device that the memory-intensive kernel of a pair may get; the first is tried first."""

WINDOW = 50e-3
"""Seconds after which a pair that goes on is measured once more."""

WAVES = 2
"""Waves of blocks that a kernel must have ended, or itself, for its rate to say something."""

LEAST = 0.5
"""Part of the shorter one's time alone that a window must last: in the beginning of one, a kernel makes room."""

SLOWED = 0.8
"""Rate below which a kernel might gain by a larger share."""

NEAR = 0.05
"""Sums of rates of a pair's shares that differ by less are alike: more was measured between two windows."""

LEAST_RATE = 1e-3
"""Rates are taken for at least so much, to divide by."""

UNTRIED = 1.3
"""Sum of rates of a pair that was not measured."""


Work = Callable[[], tuple[float, float]]
"""Returns seconds alone of each class, memory-intensive first; called only where it decides."""


class _Part(NamedTuple):
    """What a kernel did in a window: seconds of work that it had alone, seconds, waves of blocks."""

    work: float
    seconds: float
    waves: float

    def added(self, other: _Part | None) -> _Part:
        return self if other is None else _Part(*[one + two for one, two in zip(self, other, strict=True)])


class Live:
    """Measures the normalized IPC of pairs, a memory-intensive kernel first, by the share of the device that it had.

    A window begins when a pair does, and ends with either of the two.

    Attributes
    ----------
    pairs : Pairs
        What was measured, here and earlier.
    """

    def __init__(self) -> None:
        self.pairs = Pairs()
        self._shares: dict[Key, float] = {}
        self._times: dict[Key, float] = {}
        self._key: Key | None = None
        self._since = self._least = self._fresh = 0.0
        self._begun: dict[Job, int] = {}
        self._found: dict[Kind, _Part] = {}
        self._short: dict[Key, tuple[float, dict[Kind, _Part]]] = {}

    def begin(self, memory: Job, compute: Job, now: float, least: float = 0.0) -> None:
        """Begin a window: these two run together from now on, with the share that was chosen for them.

        It counts if it lasts for `least` seconds.
        """
        self._key, self._since, self._found = _key(memory, compute), now, {}
        self._begun = {memory: memory.done, compute: compute.done}
        self._fresh = least
        self._least = LEAST * min([job.task.profile.seconds or 0.0 for job in (memory, compute)])

    def look(self, running: Sequence[Job], now: float) -> None:
        """See what runs, with fresh counts of blocks: end the window where the pair has parted, or it was long."""
        if self._key is None:
            return
        pair = list(self._begun)
        together = len(pair) == 2 and all([job in running for job in pair])
        if together and now - self._since < WINDOW:
            return
        for job in pair:
            self._measure(job, now)
        if len(self._found) == 2:
            self._close(self._key, now)
        if together:
            self.begin(*in_order(*pair), now)
        else:
            self._key, self._begun = None, {}

    def ended(self, job: Job, now: float) -> None:
        """Measure one that has ended; its partner is measured when its blocks are counted next."""
        if job in self._begun:
            self._measure(job, now)
            del self._begun[job]

    def _measure(self, job: Job, now: float) -> None:
        profile, seconds = job.task.profile, now - self._since
        ended = job.done - self._begun[job]
        if profile.kind is not None and profile.seconds and seconds > 0:
            waves = math.inf if job.state is DONE else ended / min(profile.resident, job.task.blocks)
            self._found[profile.kind] = _Part(ended / job.task.blocks * profile.seconds, seconds, waves)

    def _close(self, key: Key, now: float) -> None:
        """End a window; those of a pair that are too short to say something count together, if both had room."""
        share = self._shares.get(key)
        seconds = min([its.seconds for its in self._found.values()])
        if share is None or seconds < self._fresh:
            return
        before, parts = self._short.pop(key, (share, {}))
        if before == share:
            self._found = {kind: part.added(parts.get(kind)) for kind, part in self._found.items()}
        memory, compute = self._found[MEMORY], self._found[COMPUTE]
        if min(memory.waves, compute.waves) >= WAVES and min(memory.seconds, compute.seconds) > self._least:
            self._note(key, share, (memory.work / memory.seconds, compute.work / compute.seconds), now)
        elif len(self._short) < REMEMBERED:
            self._short[key] = share, self._found

    def _note(self, key: Key, share: float, rates: tuple[float, float], now: float) -> None:
        self.pairs.note(key, share, rates)
        self._times[key] = now

    def choose(self, memory: Job, compute: Job, work: Work, shortest: float = 0.0) -> float:
        """Return the share that a memory-intensive kernel gets now: the best, or one that may be better.

        The best has the largest sum of rates; of those that differ little, it is that with which both classes would end
        their `work` soonest, seconds alone of what runs and waits. A larger share for the class that would end last is
        tried once if that has much to gain, with pairs of which both take at least `shortest` seconds.
        """
        key = _key(memory, compute)
        share = self._best_share(memory, compute, work, shortest)
        if key not in self._shares and len(self._shares) >= REMEMBERED:
            self._shares.clear()
            self._times.clear()
        self._shares[key] = share
        return share

    def _best_share(self, memory: Job, compute: Job, work: Work, shortest: float) -> float:
        found = self.pairs.of(_key(memory, compute))
        if not found:
            return SHARES[0]
        most = max(map(sum, found.values()))
        alike = [its for its in found if sum(found[its]) >= most - NEAR]
        share = alike[0]
        if len(alike) > 1:
            seconds = work()
            share = min(alike, key=lambda its: _makespan(seconds, found[its]))
        long = min(memory.task.profile.seconds or 0.0, compute.task.profile.seconds or 0.0) >= shortest
        if share != SHARES[0] or not long or min(found[share]) >= SLOWED:
            return share
        first, second = _times(work(), found[share])
        rate, larger = (found[share][0], SHARES[1]) if first > second else (found[share][1], SHARES[2])
        return larger if larger not in found and rate < SLOWED else share

    def share(self, one: Job, two: Job, work: Work, shortest: float = 0.0) -> float:
        """Return the share that the first of a pair would get now; see `choose`."""
        memory, compute = in_order(one, two)
        share = self._best_share(memory, compute, work, shortest)
        return share if one is memory else 1.0 - share

    def rates(self, one: Job, two: Job) -> tuple[float, float] | None:
        """Return the rates of a pair at its best share, memory-intensive first; None where it was not measured."""
        found = self.pairs.of(_key(*in_order(one, two)))
        return max(found.values(), key=sum) if found else None

    def sum(self, one: Job, two: Job) -> float:
        """Return the largest sum of rates of a pair, to two digits; `UNTRIED` where it was not measured."""
        rates = self.rates(one, two)
        return UNTRIED if rates is None else round(sum(rates), 2)

    def poor(self, one: Job, two: Job, least: float, now: float, rest: float) -> bool:
        """Whether all shares of a pair that were tried added up to less than `least`, the last within `rest` seconds.

        What was measured in another process counts as if it were measured when it is first asked for.
        """
        rates = self.rates(one, two)
        if rates is None or sum(rates) >= least:
            return False
        return now - self._times.setdefault(_key(*in_order(one, two)), now) < rest


def in_order(one: Job, two: Job) -> tuple[Job, Job]:
    """Return a pair with its memory-intensive kernel first."""
    return (one, two) if one.task.profile.kind is MEMORY else (two, one)


def _times(work: tuple[float, float], rates: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds in which each class would end its work at these rates."""
    first, second = (its / max(rate, LEAST_RATE) for its, rate in zip(work, rates, strict=True))
    return first, second


def _makespan(work: tuple[float, float], rates: tuple[float, float]) -> float:
    """Return the seconds in which both end: together at these rates, and what is left of one alone."""
    together = min(_times(work, rates))
    return together + sum(its - rate * together for its, rate in zip(work, rates, strict=True))


def _key(memory: Job, compute: Job) -> Key:
    return key_of(memory.task), key_of(compute.task)
