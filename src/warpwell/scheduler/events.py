"""Log: the events of a scheduler and its decisions, equal for every executor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from .. import errors
from .._check import checked_integer

KEPT = 16_384
"""Events that a scheduler keeps by default: some five thousand tasks, ten megabytes."""

KINDS = (
    "arrive",
    "launch",
    "preempt",
    "resize",
    "stop",
    "end",
    "fail",
    "cancel",
    "reject",
    "hold",
    "lost",
)


@dataclass(slots=True)
class Event:
    """One line of a log.

    Attributes
    ----------
    time : float
        Seconds since the executor was made.
    kind : str
        One of `KINDS`. "hold" is a preemption that was weighed and not done.
    task : int
        `Task.number`.
    name, tenant : str
        Of the task.
    why : dict
        The rule that decided and the figures that it compared; ``explain`` prints them.
    """

    time: float
    kind: str
    task: int
    name: str
    tenant: str = "default"
    why: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return its fields by name."""
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = {"time": int | float, "kind": str, "task": int, "name": str, "tenant": str, "why": dict}


@dataclass(slots=True)
class Many:
    """Events of one kind of tasks that are alike, as they are noted; `events` makes them.

    Parameters
    ----------
    kind, name, tenant : str
    numbers : sequence of int
        Of the tasks.
    times : float or sequence of float
        Of all, or of each.
    why : dict
        What all have.
    key : str
        What else each has in `why`, which is in `values`; empty: nothing.
    values : sequence
    """

    kind: str
    name: str
    tenant: str
    numbers: Sequence[int]
    times: float | Sequence[float]
    why: dict[str, Any]
    key: str = ""
    values: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def events(self) -> Iterator[Event]:
        """Return the events."""
        times, why, key = self.times, self.why, self.key
        for k, number in enumerate(self.numbers):
            time = times if isinstance(times, float | int) else times[k]
            its = {**why, key: self.values[k]} if key else why
            yield Event(time, self.kind, number, self.name, self.tenant, its)

    def without(self, count: int) -> Many:
        """Return all but the first ones."""
        times = self.times if isinstance(self.times, float | int) else self.times[count:]
        return replace(self, numbers=self.numbers[count:], times=times, values=self.values[count:])


class Log:
    """Events in order; equal for equal input and seed.

    Parameters
    ----------
    kinds : collection of str, optional
        Kinds to keep, of `KINDS`; all by default. Others are not even made, which saves a simulation time and memory.
    most : int, optional
        Events that are kept, the last ones (up to an eighth more); all by default.

    Attributes
    ----------
    events : list of Event
        A new one each time.
    dropped : int
        Events that are not kept any more.
    about : dict
        About the run, as plain data: policy, rates, seed, device. The first line of a file, unless empty.
    """

    def __init__(self, kinds: Container[str] | None = None, *, most: int | None = None) -> None:
        self._noted: list[Event | tuple[Any, ...] | Many] = []
        self._count = 0
        self.dropped = 0
        self.most = None if most is None else checked_integer(most, "most")
        self._full = math.inf if self.most is None else self.most + max(1, self.most >> 3)
        self.kinds = frozenset(KINDS) if kinds is None else kinds
        self.about: dict[str, Any] = {}

    @property
    def events(self) -> list[Event]:
        """What was noted, as events: most are read by nobody, so they are made here."""
        found: list[Event] = []
        for noted in self._noted.copy():
            if isinstance(noted, Many):
                found += noted.events()
            else:
                found.append(noted if isinstance(noted, Event) else Event(*noted))
        return found

    def add(self, event: Event) -> None:
        """Append an event.

        A scheduler calls it in its thread when it has carried out what it decided: it must not raise, and must not call
        the scheduler.
        """
        self._append(event, 1)

    def note(self, found: Sequence[tuple[Any, ...]]) -> None:
        """Append events by their fields, in the order of `Event`."""
        if type(self).add is Log.add:
            for fields in found:
                self._append(fields, 1)
        else:  # somebody else's log
            for fields in found:
                self.add(Event(*fields))

    def note_many(self, found: Many) -> None:
        """Append events of tasks that are alike."""
        if type(self).add is Log.add:
            self._append(found, len(found))
        else:
            for event in found.events():
                self.add(event)

    def _append(self, noted: Event | tuple[Any, ...] | Many, count: int) -> None:
        self._noted.append(noted)
        self._count += count
        if self._count >= self._full:  # seldom: the events that stay move to the front
            assert self.most is not None
            self._drop(self._count - self.most)

    def _drop(self, count: int) -> None:
        """Forget the first events."""
        noted, gone, left = self._noted, 0, count
        rest: list[Many] = []
        while left:
            first = noted[gone]
            its = len(first) if isinstance(first, Many) else 1
            if isinstance(first, Many) and its > left:
                rest.append(first.without(left))
            left -= min(its, left)
            gone += 1
        noted[:gone] = rest  # one step: other threads read
        self.dropped += count
        self._count -= count

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return self._count

    def write(self, stream: TextIO) -> None:
        """Write one JSON object a line; the first is ``{"about": ...}``, unless `about` is empty.

        It has ``dropped`` where events are not kept any more.
        """
        about = {**self.about, "dropped": self.dropped} if self.dropped else self.about
        if about:
            stream.write(json.dumps({"about": about}, sort_keys=True) + "\n")
        for event in self.events:
            stream.write(json.dumps(event.plain(), sort_keys=True) + "\n")

    @classmethod
    def read(cls, lines: Iterable[str], path: str = "a log") -> Log:
        """Read what `write` wrote.

        Raises
        ------
        FormatError
            A line is not an event; the message names `path` and the line.
        """
        log = cls()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if "about" in fields:
                    log.about = dict(fields["about"])
                else:
                    event = Event(**fields)
                    if not all(isinstance(getattr(event, name), kind) for name, kind in _FIELDS.items()):
                        raise TypeError(f"an event has {event!r:.80}")
                    log.add(event)
            except (ValueError, TypeError, RecursionError):
                raise errors.FormatError(
                    f"{path}: line {number} is not an event of a log: each is a JSON object with time, kind, task and "
                    "name, as --log writes it",
                    path=path,
                ) from None
        return log

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Log:
        """Read a file that `write` wrote.

        Raises
        ------
        MissingFileError
            There is no such file.
        FormatError
            A line is not an event of a log.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            message = f"{path} does not exist: make a log with --log of another command"
            raise errors.MissingFileError(message, path=path) from None
        except UnicodeDecodeError:
            raise errors.FormatError(f"{path} is not a log: it is not text", path=path) from None
        return cls.read(text.splitlines(), str(path))
