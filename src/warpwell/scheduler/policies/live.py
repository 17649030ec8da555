"""Live: how fast two kernels ran together, from the blocks that both ended; in place of a table of pairs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..residency import REMEMBERED
from ..task import COMPUTE, DONE, MEMORY, Job, Kind

Key = tuple[Hashable, Hashable]

LEARN = 0.5
"""Weight of a new measurement."""

WINDOW = 50e-3
"""Seconds after which a pair that goes on is measured once more."""

WAVES = 2
"""Waves of blocks that a kernel must have ended, or itself, for its rate to say something."""


class Live:
    """Normalized IPC of pairs, a memory-intensive kernel first, by the share of the device that it had.

    A window begins when a pair does, and ends with either of the two.
    """

    def __init__(self) -> None:
        self._rates: dict[Key, dict[float, tuple[float, float]]] = {}
        self._shares: dict[Key, float] = {}
        self._times: dict[Key, float] = {}
        self._key: Key | None = None
        self._since = 0.0
        self._begun: dict[Job, int] = {}
        self._found: dict[Kind, float] = {}

    def look(self, running: Sequence[Job], now: float) -> None:
        """See what runs, with fresh counts of blocks; end a window and begin one where the pair has changed."""
        pair = [job for job in running if job.placement is not None and not job.placement.plain]
        kinds = [job.task.profile.kind for job in pair]
        goes_on = self._begun.keys() == set(pair) and not self._found
        if goes_on and now - self._since < WINDOW:
            return
        for job in list(self._begun):
            self._measure(job, now)
        if self._key is not None and len(self._found) == 2:
            self._note(self._key, (self._found[MEMORY], self._found[COMPUTE]), now)
        self._begun, self._found, self._key = {}, {}, None
        if len(running) == 2 and set(kinds) == {MEMORY, COMPUTE}:
            memory, compute = pair if kinds[0] is MEMORY else pair[::-1]
            self._key, self._since = _key(memory, compute), now
            self._begun = {job: job.done for job in pair}

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
        of = self._rates.setdefault(key, {})
        was = of.get(share, rates)
        of[share] = was[0] + LEARN * (rates[0] - was[0]), was[1] + LEARN * (rates[1] - was[1])
        self._times[key] = now

    def shared(self, memory: Job, compute: Job, share: float) -> None:
        """Note the part of the device that the memory-intensive kernel of a pair gets from now on."""
        key = _key(memory, compute)
        if key not in self._shares and len(self._shares) >= REMEMBERED:
            for its in (self._rates, self._shares, self._times):
                its.clear()
        self._shares[key] = share

    def best(self, memory: Job, compute: Job, shares: Sequence[float]) -> float:
        """Return the first of `shares` that was not tried yet; if all were, the best."""
        found = self._rates.get(_key(memory, compute), {})
        for share in shares:
            if share not in found:
                return share
        return max(shares, key=lambda share: sum(found[share]))

    def rates(self, memory: Job, compute: Job) -> tuple[float, float] | None:
        """Return the rates of a pair at its last share; None where it was not measured."""
        key = _key(memory, compute)
        return self._rates.get(key, {}).get(self._shares.get(key, 0.0))

    def poor(self, memory: Job, compute: Job, least: float, since: float) -> bool:
        """Whether a pair was measured since then, and all shares that were tried added up to less than `least`."""
        key = _key(memory, compute)
        found = self._rates.get(key)
        return found is not None and self._times[key] > since and max(sum(its) for its in found.values()) < least


def _key(memory: Job, compute: Job) -> Key:
    return tuple(job.task.name if job.task.known is None else job.task.known for job in (memory, compute))  # type: ignore[return-value]
