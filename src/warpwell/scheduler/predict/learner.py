"""`Learner`: what a scheduler analyzes tasks with: it says what they are like, and learns from those that ran alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import errors
from ..task import Profile, Task

if TYPE_CHECKING:
    from ..executor import Capacity, Machine
    from .analyzer import Analyzer
    from .sample import Sample

KERNELS = 1024
"""Kernels and sizes that are known at the same time; those that were asked for first are forgotten first."""

ALWAYS = 4
"""Measurements of a kernel that are all taken; then one of `RARELY` launches is, to follow the clock and the driver."""
RARELY = 16

_SIZES, _KERNELS = 8, 256
"""What predictions are made from: more would take longer than a submission may."""
_SAME = 0.1
"""Part by which a time may differ before the profile changes: policies remember what they have worked out of it."""


class Known:
    """What is known of one kernel, the types of its arguments and its size; tasks carry it (`Task.known`).

    Attributes
    ----------
    sample : Sample
        What it is measured as.
    profile : Profile
    wants : bool
        Whether the next launch that runs alone is to be measured.
    """

    __slots__ = ("_launches", "profile", "sample", "wants")

    def __init__(self, sample: Sample, profile: Profile) -> None:
        self.sample = sample
        self.profile = profile
        self.wants = True
        self._launches = 0

    def launched(self) -> None:
        """Note a launch, and whether the next one is to be measured."""
        self._launches += 1
        self.wants = self.sample.seconds is None or self._launches < ALWAYS or self._launches % RARELY == 0


class Learner:
    """Profiles for tasks that come without one; the times of those that ran alone make the next ones better.

    Any thread may ask it; the scheduler's thread teaches it.

    Parameters
    ----------
    analyzer : Analyzer, optional
        By default one of the scheduler's device, with its peaks. A kernel is known once it has run alone.
    saves : bool
        Whether that analyzer begins with what was measured on this device before, in other processes, and `save` writes
        what it has learnt (`warpwell.scheduler.predict.history`). A file that is damaged, or cannot be read, is none.
    """

    def __init__(self, analyzer: Analyzer | None = None, *, saves: bool = False) -> None:
        self._analyzer = analyzer
        self._saves = saves
        self._make: Callable[[], Analyzer] | None = None
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], Known] = {}
        self._learnt = 0
        self._saved = 0

    def meets(self, capacity: Capacity, machine: Callable[[], Machine | None]) -> None:
        """Learn where a scheduler runs, which says so before it asks; the first one counts.

        Parameters
        ----------
        capacity : Capacity
        machine : callable
            Returns the peaks (`Executor.machine`); called when a profile is first asked for.
        """
        saves = self._saves

        def make() -> Analyzer:
            from .analyzer import Analyzer
            from .history import History
            from .predictor import Predictor

            its = machine()
            history = History.usable(its.name) if saves and its is not None else History()
            # forests take longer to grow than a launch may wait
            predictor = Predictor(history.samples, trees=False, sizes=_SIZES, kernels=_KERNELS)
            return Analyzer(history, predictor, capacity=capacity, machine=its)

        if self._make is None:
            self._make = make

    def _analyzer_here(self) -> Analyzer:
        found = self._analyzer
        if found is None:
            with self._lock:
                if self._analyzer is None:
                    if self._make is None:
                        raise errors.ArgumentError("this learner has no analyzer: give it to a scheduler first")
                    self._analyzer = self._make()
                found = self._analyzer
        return found

    def __call__(self, task: Task) -> Profile:
        """Return what is believed of a task."""
        launch = task.launch
        if launch is None:
            return task.profile
        analyzer = self._analyzer_here()
        key = analyzer.key(launch, task.arguments, task.size)
        known = self._known.get(key)
        if known is None:
            known = self._meet(analyzer, task, key)
        task.known = known
        return known.profile

    def _meet(self, analyzer: Analyzer, task: Task, key: tuple[Any, ...]) -> Known:
        from .identity import footprint

        launch = task.launch
        with self._lock:
            found = self._known.get(key)
            if found is None:
                sample = analyzer.sample_of(key, launch, footprint(task.arguments))
                measured = analyzer.history.find(sample)
                if measured is not None:
                    sample = replace(measured, moving=sample.moving)  # older files do not have it
                found = self._known[key] = Known(sample, analyzer.profile(launch, sample))
                if len(self._known) > KERNELS:
                    del self._known[next(iter(self._known))]
        return found

    def learn(self, task: Task, seconds: float) -> bool:
        """Learn what a task took alone; return whether those like it that wait are to be seen with other eyes."""
        known, analyzer = task.known, self._analyzer
        if known is None or analyzer is None or not (math.isfinite(seconds) and seconds > 0):
            return False
        wanted = known.wants
        known.launched()
        if not wanted:
            return False
        with self._lock:
            first = known.sample.seconds is None
            known.sample = analyzer.took(known.sample, seconds)
            self._learnt += 1
            if first:
                # of its other sizes, those that nobody has measured can be predicted from now on
                kernel = known.sample.kernel
                for key in [k for k, k_ in self._known.items() if k[0] == kernel and k_.sample.seconds is None]:
                    del self._known[key]
            new = analyzer.measured(known.profile, task.launch, known.sample)
            old, known.profile = known.profile, new
            alike = old.seconds is not None and new.seconds is not None and abs(new.seconds / old.seconds - 1) <= _SAME
            if alike and (old.kind, old.source, old.registers) == (new.kind, new.source, new.registers):
                known.profile = old
            return known.profile is not old

    def save(self) -> None:
        """Save what was learnt since the last time, if anything was.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        with self._lock:
            learnt = self._learnt
            if not self._saves or self._analyzer is None or learnt == self._saved:
                return
            content = self._analyzer.history.snapshot()
        content.save()
        self._saved = learnt
