"""`Log`: the events and decisions of a scheduler, in one format for all executors."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .. import errors
from .._check import checked_integer

DEFAULT_MAX_EVENTS = 16_384
"""Default capacity of the log of a scheduler, in events: about 5,000 tasks and 10 MB."""

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
        Seconds since the executor was created.
    kind : str
        One of `KINDS`. "hold" is a preemption that the policy considered and declined.
    task : int
        `Task.number`.
    name, tenant : str
        Name and tenant of the task.
    why : dict
        The rule of the decision and the values that it compared; ``explain`` prints them.
    """

    time: float
    kind: str
    task: int
    name: str
    tenant: str = "default"
    why: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in _FIELDS}

    def line(self) -> str:
        """Return the event as a line of a file."""
        return json.dumps(self.plain(), sort_keys=True) + "\n"


_FIELDS = {"time": int | float, "kind": str, "task": int, "name": str, "tenant": str, "why": dict}


class Log:
    """Events in order; equal for equal input and seed.

    Parameters
    ----------
    kinds : collection of str, optional
        The `KINDS` to record; all by default. Other events are not created, which saves a simulation time and memory.
    max_events : int, optional
        Number of latest events to keep; all by default.

    Attributes
    ----------
    events : list of Event
        A new list on each access.
    dropped : int
        Number of deleted events.
    about : dict
        Properties of the run as plain data: policy, rates, seed, device. The first line of a file, unless empty.
    """

    def __init__(self, kinds: Container[str] | None = None, *, max_events: int | None = None) -> None:
        self.max_events = None if max_events is None else checked_integer(max_events, "max_events")
        self._events: deque[Event] = deque(maxlen=self.max_events)
        self.dropped = 0
        self.kinds = frozenset(KINDS) if kinds is None else kinds
        self.about: dict[str, Any] = {}

    @property
    def events(self) -> list[Event]:
        """Return the recorded events."""
        return list(self._events)  # in one step, because the scheduler's thread may add events

    def add(self, event: Event) -> None:
        """Append an event.

        A scheduler calls this method in its thread after it has executed its decisions. An override must not raise and
        must not call the scheduler.
        """
        self.dropped += len(self._events) == self.max_events
        self._events.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self._events)

    def write(self, stream: TextIO) -> None:
        """Write one JSON object per line. The first is ``{"about": ...}``, unless `about` is empty.

        That object has the field ``dropped`` if events were deleted.
        """
        header = {**self.about, "dropped": self.dropped} if self.dropped else self.about
        if header:
            stream.write(json.dumps({"about": header}, sort_keys=True) + "\n")
        stream.writelines(self._file_lines())

    def _file_lines(self) -> Iterable[str]:
        return (event.line() for event in self.events)

    @classmethod
    def read(cls, text_lines: Iterable[str], path: str = "a log") -> Log:
        """Read the lines of a file that `write` wrote.

        Raises
        ------
        FormatError
            A line is not an event; the message names `path` and the line.
        """
        log = cls()
        for number, line in enumerate(text_lines, 1):
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
                    f"{path}: line {number} is not an event of a log: expected a JSON object with time, kind, task and "
                    "name, as --log writes",
                    path=path,
                ) from None
        return log

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Log:
        """Read a file that `write` wrote.

        Raises
        ------
        MissingFileError
            The file does not exist.
        FormatError
            A line is not an event of a log.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            message = f"{path} does not exist: `warpwell share` writes a log, and so does the option --log of a command"
            raise errors.MissingFileError(message, path=path) from None
        except UnicodeDecodeError:
            raise errors.FormatError(f"{path} is not a log: it is not text", path=path) from None
        return cls.read(text.splitlines(), str(path))
