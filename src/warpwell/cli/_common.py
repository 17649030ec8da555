"""``Output``: results on stdout as a table or JSON, progress and notes on stderr."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..cache import format_size

_COMPILE_NOTICE_SECONDS = 1.0
_STAGES = {
    "read": "reading",
    "generate": "generating",
    "write": "writing",
    "compile": "compiling",
    "search": "level",
    "iterate": "iterating",
    "count": "counting",
    "link": "linking",
    "load": "loading",
    "run": "running",
    "convert": "converting",
    "verify": "verifying",
    "compact": "compacting",
}

_SIZES = {"bytes", "memory"}
_NUMBERS = {"pid", "seed", "source"}
"""Words of keys whose integers are names: they are printed without separators of thousands."""

Report = Callable[[str, int, int], None]


class Output:
    """Where a command prints.

    Parameters
    ----------
    as_json : bool
        One JSON object instead of tables; no progress and no notes.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.screen = _console(soft_wrap=True)
        self.notes = _console(stderr=True)

    def result(self, title: str, values: dict[str, Any]) -> None:
        """Print the result of a command."""
        if self.as_json:
            json.dump(values, sys.stdout)
            sys.stdout.write("\n")
            return
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for key, value in values.items():
            table.add_row(key.replace("_", " "), readable(key, value))
        self.screen.print(table)

    def table(self, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> None:
        """Print a table as wide as its figures need: in a file, or a narrow terminal, they would be cut.

        Parameters
        ----------
        title : str
        heads : sequence of str
            Heads of the columns.
        rows : iterable of sequences of str
        left : sequence of str
            Heads of the columns of text, which start at the left, beside the first column; figures end at the right.
        """
        table = Table(title=title, title_justify="left")
        for head in heads:
            table.add_column(head, justify="left" if head in (heads[0], *left) else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        natural = Measurement.get(self.screen, self.screen.options.update(max_width=1000), table).maximum
        _console(width=max(self.screen.width, natural)).print(table)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Report]:
        """Yield a function that shows progress: ``report(stage, done, total)``; a total of 0 is unknown.

        Nothing is shown with JSON, or if stderr is not a terminal. But a compilation that takes over a second is
        announced on any stderr, because nothing else would explain the wait.
        """
        notice: threading.Timer | None = None
        from ..targets.compiler import compiling as launches

        launches.enabled = False  # the stage says it
        words = TextColumn("{task.description}", markup=False)
        bar = Progress(
            SpinnerColumn(),
            words,
            BarColumn(),
            TimeElapsedColumn(),
            console=self.notes,
            transient=True,
            disable=self.as_json or not self.notes.is_terminal,
        )
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            nonlocal notice
            if stage == "compile":
                if notice is not None:
                    notice.cancel()
                    notice = None
                if done == 0 and not self.as_json:
                    notice = threading.Timer(_COMPILE_NOTICE_SECONDS, self._announce)
                    notice.daemon = True
                    notice.start()
            name = _STAGES.get(stage, stage)
            text = name if total else f"{name} {done:,}"
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(text, total=total or None)
            bar.update(tasks[stage], completed=done if total else None, total=total or None, description=text)

        try:
            with bar:
                yield report
        finally:
            if notice is not None:
                notice.cancel()

    def _announce(self) -> None:
        self.notes.print("compiling kernels for this machine; they are kept for the next time ...")


def _console(**options: Any) -> Console:
    # names of files, tasks and devices are text: [brackets] are no markup in them, and :words: no pictures
    return Console(highlight=False, markup=False, emoji=False, **options)


def readable(key: str, value: Any) -> str:
    """Return a value of a result for people; its key tells the unit."""
    if value is None:
        return "not counted"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "uptime":
        return f"{datetime.timedelta(seconds=int(value))} (h:mm:ss)"
    words = set(key.split("_"))
    if isinstance(value, int) and words & _SIZES:
        return f"{format_size(value)} ({value:,})"
    if isinstance(value, int) and not words & _NUMBERS:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)
