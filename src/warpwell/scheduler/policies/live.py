"""Live: measures how fast two kernels run together, by the blocks that each kernel completes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..predict.pairs import Key, Pairs, key_of
from ..residency import REMEMBERED
from ..task import COMPUTE, DONE, MEMORY, Job, Kind

SHARES = (0.5, 0.75, 0.25)
"""Shares of the device for the memory-intensive kernel of a pair, in the order of their trials. With 0.5 alone, the
simulated throughput on the trace of seven kernels is 7 % lower."""

WINDOW_SECONDS = 50e-3
"""Time after which a pair that still runs is measured again. Protection against outdated rates, not tuned."""

MIN_WINDOW_WAVES = 2
"""A rate counts if the kernel has completed at least this many waves of blocks, or has ended. Chosen, not fitted."""

MIN_WINDOW_FRACTION = 0.5
"""Minimum length of a window, as a fraction of the shorter solo time: early in a window, a kernel still makes room.
Chosen, not fitted."""

RAISE_SHARE_BELOW_RATE = 0.8
"""Rate below which a kernel might gain from a larger share. Chosen, not fitted."""

SAME_RATE_TOLERANCE = 0.05
"""Shares of a pair are equally good if their sums of rates differ by less. Two windows of one pair on an H200 have
differed by more."""

MIN_RATE = 1e-3
"""Lower bound of a rate that is used as a divisor. Protection, not tuned."""

UNMEASURED_PAIR_RATE = 1.3
"""Assumed sum of rates of a pair that was never measured. In the simulator, 2.6 cost 61 % of turnaround (ANTT) on the
trace of seven kernels."""


Work = Callable[[], tuple[float, float]]
"""Returns the solo seconds of each class, memory-intensive first. It is called only if a choice depends on it."""


class _Progress(NamedTuple):
    """Progress of a kernel in a window: solo seconds of completed work, elapsed seconds, and waves of blocks."""

    work: float
    seconds: float
    waves: float

    def added(self, earlier: _Progress | None) -> _Progress:
        return self if earlier is None else _Progress(*[a + b for a, b in zip(self, earlier, strict=True)])


class Live:
    """Measures the normalized IPC of pairs, by the share of the device that the memory-intensive kernel had.

    A window starts when two kernels start to run together, and ends when either of them ends.

    Attributes
    ----------
    pairs : Pairs
        All measured rates, also from earlier processes.
    """

    def __init__(self) -> None:
        self.pairs = Pairs()
        self._times: dict[Key, float] = {}
        self._key: Key | None = None
        self._share = SHARES[0]
        self._since = self._min_work_seconds = self._min_window_seconds = 0.0
        self._done_before: dict[Job, int] = {}
        self._progress: dict[Kind, _Progress] = {}
        self._short: dict[Key, tuple[float, dict[Kind, _Progress]]] = {}

    def begin(self, memory: Job, compute: Job, share: float, now: float, min_seconds: float = 0.0) -> None:
        """Start a window: these two kernels run together from now on, and the memory-intensive one has this share.

        The window counts if it lasts for `min_seconds`.
        """
        self._key, self._share, self._since, self._progress = _key(memory, compute), share, now, {}
        self._done_before = {memory: memory.done, compute: compute.done}
        self._min_window_seconds = min_seconds
        shorter = min([job.task.profile.seconds or 0.0 for job in (memory, compute)])
        self._min_work_seconds = MIN_WINDOW_FRACTION * shorter

    def update(self, running: Sequence[Job], now: float) -> None:
        """End the window if the pair has separated or `WINDOW_SECONDS` have passed. Block counts must be current."""
        if self._key is None:
            return
        pair = list(self._done_before)
        together = len(pair) == 2 and all([job in running for job in pair])
        if together and now - self._since < WINDOW_SECONDS:
            return
        for job in pair:
            self._measure(job, now)
        if len(self._progress) == 2:
            self._close(self._key, now)
        if together:
            self.begin(*in_order(*pair), self._share, now)
        else:
            self._key, self._done_before = None, {}

    def ended(self, job: Job, now: float) -> None:
        """Measure a kernel that has ended. The co-runner is measured at the next count of its blocks."""
        if job in self._done_before:
            self._measure(job, now)
            del self._done_before[job]

    def _measure(self, job: Job, now: float) -> None:
        profile, seconds = job.task.profile, now - self._since
        ended = job.done - self._done_before[job]
        if profile.kind is not None and profile.seconds and seconds > 0:
            waves = math.inf if job.state is DONE else ended / min(profile.resident, job.task.blocks)
            self._progress[profile.kind] = _Progress(ended / job.task.blocks * profile.seconds, seconds, waves)

    def _close(self, key: Key, now: float) -> None:
        """End a window. Windows of a pair that are too short count together, if both kernels had room in each."""
        share, seconds = self._share, min([progress.seconds for progress in self._progress.values()])
        if seconds < self._min_window_seconds:
            return
        before, earlier = self._short.pop(key, (share, {}))
        if before == share:
            self._progress = {kind: progress.added(earlier.get(kind)) for kind, progress in self._progress.items()}
        memory, compute = self._progress[MEMORY], self._progress[COMPUTE]
        waves, seconds = min(memory.waves, compute.waves), min(memory.seconds, compute.seconds)
        if waves >= MIN_WINDOW_WAVES and seconds > self._min_work_seconds:
            self.pairs.record(key, share, (memory.work / memory.seconds, compute.work / compute.seconds))
            if len(self._times) >= REMEMBERED:
                self._times.clear()
            self._times[key] = now
        elif len(self._short) < REMEMBERED:
            self._short[key] = share, self._progress

    def share(self, memory: Job, compute: Job, work: Work, min_trial_seconds: float = 0.0) -> float:
        """Return the share of the memory-intensive kernel: the best measured one, or one that may be better.

        The best share has the largest sum of rates. If several shares are equally good, the time in which both classes
        complete their `work` decides. A larger share for the class that would end last is tried once, if its kernel has
        much to gain and both kernels take at least `min_trial_seconds`.
        """
        measured = self.pairs.get(_key(memory, compute))
        if not measured:
            return SHARES[0]
        best_sum = max(map(sum, measured.values()))
        candidates = [share for share in measured if sum(measured[share]) >= best_sum - SAME_RATE_TOLERANCE]
        share = candidates[0]
        if len(candidates) > 1:
            seconds = work()
            share = min(candidates, key=lambda candidate: _makespan(seconds, measured[candidate]))
        shorter = min(memory.task.profile.seconds or 0.0, compute.task.profile.seconds or 0.0)
        if share != SHARES[0] or shorter < min_trial_seconds or min(measured[share]) >= RAISE_SHARE_BELOW_RATE:
            return share
        memory_time, compute_time = _times(work(), measured[share])
        slower = 0 if memory_time > compute_time else 1
        trial = SHARES[1 + slower]
        return trial if trial not in measured and measured[share][slower] < RAISE_SHARE_BELOW_RATE else share

    def rates(self, job: Job, co_runner: Job) -> tuple[float, float] | None:
        """Return the rates of a pair at its best share, memory-intensive first; None if it was never measured."""
        measured = self.pairs.get(_key(*in_order(job, co_runner)))
        return max(measured.values(), key=sum) if measured else None

    def sum(self, job: Job, co_runner: Job) -> float:
        """Return the largest sum of rates of a pair, to two digits, or `UNMEASURED_PAIR_RATE`."""
        rates = self.rates(job, co_runner)
        return UNMEASURED_PAIR_RATE if rates is None else round(sum(rates), 2)

    def poor(self, job: Job, co_runner: Job, min_sum: float, now: float, cooldown: float) -> bool:
        """Return True if no measured share of a pair adds up to `min_sum`, the last measured within `cooldown` seconds.

        A rate of another process counts as measured when it is first needed.
        """
        rates = self.rates(job, co_runner)
        if rates is None or sum(rates) >= min_sum:
            return False
        return now - self._times.setdefault(_key(*in_order(job, co_runner)), now) < cooldown


def in_order(job: Job, co_runner: Job) -> tuple[Job, Job]:
    """Return a pair with its memory-intensive kernel first."""
    return (job, co_runner) if job.task.profile.kind is MEMORY else (co_runner, job)


def _times(work: tuple[float, float], rates: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds in which each class would complete its work at these rates."""
    memory, compute = (seconds / max(rate, MIN_RATE) for seconds, rate in zip(work, rates, strict=True))
    return memory, compute


def _makespan(work: tuple[float, float], rates: tuple[float, float]) -> float:
    """Return the seconds until both classes have completed: together at these rates, then one of them solo."""
    together = min(_times(work, rates))
    return together + sum(seconds - rate * together for seconds, rate in zip(work, rates, strict=True))


def _key(memory: Job, compute: Job) -> Key:
    return key_of(memory.task), key_of(compute.task)
