"""Live: how fast two kernels ran together, from the blocks that both ended; in place of a table of pairs."""

from __future__ import annotations

from collections.abc import Sequence

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

UNTRIED, USUAL = 1.3, 0.1
"""Sum of rates of a pair that was not measured, before any was, and what a measurement counts for it from then on."""

SLOWED = 0.8
"""Rate below which a kernel might gain by a larger share."""


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
        self._usual = UNTRIED
        self._shares: dict[Key, float] = {}
        self._times: dict[Key, float] = {}
        self._key: Key | None = None
        self._since = self._least = 0.0
        self._begun: dict[Job, int] = {}
        self._found: dict[Kind, float] = {}

    def begin(self, memory: Job, compute: Job, now: float) -> None:
        """Begin a window: these two run together from now on, with the share that was chosen for them."""
        self._key, self._since, self._found = _key(memory, compute), now, {}
        self._begun = {memory: memory.done, compute: compute.done}
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
        if len(self._found) == 2 and now - self._since > self._least:
            self._note(self._key, (self._found[MEMORY], self._found[COMPUTE]), now)
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
        said_enough = job.state is DONE or ended >= WAVES * min(profile.resident, job.task.blocks)
        if profile.kind is not None and profile.seconds and seconds > 0 and said_enough:
            self._found[profile.kind] = ended / job.task.blocks * profile.seconds / seconds

    def _note(self, key: Key, rates: tuple[float, float], now: float) -> None:
        share = self._shares.get(key)
        if share is None:
            return
        self.pairs.note(key, share, rates)
        self._usual += USUAL * (sum(rates) - self._usual)
        self._times[key] = now

    def choose(self, memory: Job, compute: Job) -> float:
        """Return the share that a memory-intensive kernel gets now: the best, or one that may be better.

        If the slower of the two has much to gain by a larger share, that is tried once.
        """
        key = _key(memory, compute)
        found = self.pairs.of(key)
        share = SHARES[0]
        if found:
            share = max(found, key=lambda its: sum(found[its]))
            its, other = found[share]
            larger = SHARES[1] if its < other else SHARES[2]
            if share == SHARES[0] and larger not in found and min(its, other) < SLOWED:
                share = larger
        if key not in self._shares and len(self._shares) >= REMEMBERED:
            self._shares.clear()
            self._times.clear()
        self._shares[key] = share
        return share

    def rates(self, one: Job, two: Job) -> tuple[float, float] | None:
        """Return the rates of a pair at its best share, memory-intensive first; None where it was not measured."""
        found = self.pairs.of(_key(*in_order(one, two)))
        return max(found.values(), key=sum) if found else None

    def sum(self, one: Job, two: Job) -> float:
        """Return the largest sum of rates of a pair, to two digits; as usual where it was not measured."""
        rates = self.rates(one, two)
        return self._usual if rates is None else round(sum(rates), 2)

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


def _key(memory: Job, compute: Job) -> Key:
    return key_of(memory.task), key_of(compute.task)
