"""Experiments of the source documents: their settings, results and verdicts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..bench.machine import Load
from .shapes import Check

ATTEMPTS = 3
"""Runs of an experiment whose shape disagrees; the last run decides."""

AGREES, DISAGREES, BUSY, UNAVAILABLE, FAILED = "agrees", "disagrees", "machine busy", "cannot run here", "failed"


@dataclass(frozen=True)
class Document:
    """The statement of a source document about an experiment.

    Attributes
    ----------
    document, figure, title : str
        `figure` is the number of the figure or table, or another place in the document.
    value : str
        The document's values in words, or "shape only" if its text has no numbers.
    numbers : dict
        The same values, for checks.
    quotes : list of str
        The sentences of the document that have them, unchanged.
    """

    document: str
    figure: str
    title: str
    value: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    quotes: list[str] = field(default_factory=list)


@cache
def documents() -> dict[str, Document]:
    """Return the documents' statements by experiment."""
    content = json.loads(Path(__file__).with_name("documents.json").read_text(encoding="utf-8"))
    return {name: Document(**entry) for name, entry in content.items()}


class Unavailable(Exception):
    """The experiment cannot be run here; the message states the reason."""


@dataclass(frozen=True)
class Setting:
    """Options of a run.

    Attributes
    ----------
    folder : Path
        An empty folder for files of the run.
    quick : bool
        Fewer points and smaller data.
    """

    folder: Path
    quick: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of one run of an experiment.

    Attributes
    ----------
    text : str
        Measured values in words; says "emulated" if a drive or link is.
    checks : list of Check
    values : dict
        All measured values, for JSON.
    instrument : Check or None
        Whether the emulated hardware reached its own rates without Warpwell. If not, the shape is not judged.
    """

    text: str
    checks: list[Check]
    values: Mapping[str, Any] = field(default_factory=dict)
    instrument: Check | None = None

    @property
    def agrees(self) -> bool:
        """Whether every check agrees."""
        return bool(self.checks) and all(check.agrees for check in self.checks)


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes
    ----------
    name : str
        Key of `documents`.
    run : callable
        Takes a `Setting` and the experiment's `Document`; returns an `Outcome` or raises `Unavailable`.
    timed : bool
        Whether a busy machine can change the result, so that a disagreement is measured again.
    """

    name: str
    run: Callable[[Setting, Document], Outcome]
    timed: bool = True


@dataclass(frozen=True)
class Result:
    """The verdict on an experiment.

    Attributes
    ----------
    name : str
    status : {"agrees", "disagrees", "machine busy", "cannot run here", "failed"}
    outcome : Outcome or None
        The outcome of the last run.
    reason : str
        Reason why the experiment cannot be run or judged.
    runs : int
    seconds, cpu_seconds : float
        Of all runs together, child processes included.
    other_load : float
        Cores that other programs used during the last run.
    """

    name: str
    status: str
    outcome: Outcome | None = None
    reason: str = ""
    runs: int = 1
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    other_load: float = 0.0


def carry_out(experiment: Experiment, setting: Setting, attempts: int = ATTEMPTS) -> Result:
    """Run an experiment until its shape agrees, at most `attempts` times, and return the verdict on the last run.

    A disagreement is never dropped: if the last run disagrees, so does the result. Only if the emulated hardware missed
    its own rates while other programs used the cores, the result says that the machine is busy instead.
    """
    document = documents()[experiment.name]
    began, cpu_seconds = time.perf_counter(), 0.0
    outcome: Outcome | None = None
    runs = 0
    while runs < (attempts if experiment.timed else 1):
        runs += 1
        with Load() as meter:
            try:
                outcome = experiment.run(setting, document)
                status, reason = AGREES, ""
            except Unavailable as error:
                return Result(experiment.name, UNAVAILABLE, reason=str(error))
            except Exception as error:
                outcome, status, reason = None, FAILED, f"{type(error).__name__}: {error}"
        cpu_seconds += meter.cpu_seconds
        if outcome is not None:
            status, reason = _verdict(outcome, meter)
        if status == AGREES:
            break
    seconds = time.perf_counter() - began
    return Result(experiment.name, status, outcome, reason, runs, seconds, cpu_seconds, meter.other_cores)


def _verdict(outcome: Outcome, meter: Load) -> tuple[str, str]:
    if outcome.agrees:
        return AGREES, ""
    load = f"other programs used {meter.other_cores:.1f} of {meter.cores} cores"
    broken = outcome.instrument is not None and not outcome.instrument.agrees
    if broken and meter.busy:
        assert outcome.instrument is not None
        return BUSY, f"{load}; {outcome.instrument.claim}: {outcome.instrument.found}"
    return DISAGREES, load if meter.busy else ""
