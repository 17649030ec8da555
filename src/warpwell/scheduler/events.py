"""Log: the events of a scheduler and its decisions, equal for every executor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
        self._noted: list[Event | tuple[Any, ...]] = []
        self.dropped = 0
        self.most = None if most is None else checked_integer(most, "most")
        self._full = math.inf if self.most is None else self.most + max(1, self.most >> 3)
        self.kinds = frozenset(KINDS) if kinds is None else kinds
        self.about: dict[str, Any] = {}

    @property
    def events(self) -> list[Event]:
        """Return the recorded events. Few programs read them, so they are created here."""
        return [noted if isinstance(noted, Event) else Event(*noted) for noted in self._noted.copy()]

    def add(self, event: Event) -> None:
        """Append an event.

        A scheduler calls it in its thread when it has carried out what it decided: it must not raise, and must not call
        the scheduler.
        """
        self._append(event)

    def note(self, found: Sequence[tuple[Any, ...]]) -> None:
        """Append events by their fields, in the order of `Event`."""
        if type(self).add is Log.add:
            for fields in found:
                self._append(fields)
        else:  # a subclass receives events
            for fields in found:
                self.add(Event(*fields))

    def _append(self, noted: Event | tuple[Any, ...]) -> None:
        self._noted.append(noted)
        if len(self._noted) >= self._full:  # rarely: the remaining events move to the front
            assert self.most is not None
            count = len(self._noted) - self.most
            del self._noted[:count]  # one step: other threads read
            self.dropped += count

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self._noted)

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
