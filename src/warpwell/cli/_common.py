"""Shared parts of commands: parsers and options, output as a table or JSON, and the handling of errors and Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .._check import checked_device
from ..errors import ArgumentError, MissingFileError, WarpwellError

if TYPE_CHECKING:
    from rich.console import Console

DAMAGED = 1
"""Exit code if a command found damaged data, or wrong results."""

BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

CLEANUP_SECONDS = 0.6
"""How long an interrupted command may clean up before its process exits."""

SCHEMA = 1
"""Version of the JSON that commands print."""

Commands = argparse._SubParsersAction  # the type of add_subparsers(), for which argparse has no public name
Run = Callable[[argparse.Namespace], int]
Report = Callable[..., None]

# -- parsers -----------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose commands report unknown arguments with their own usage, not with that of ``warpwell``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_formatter, allow_abbrev=False, **options)
        self._literal_options: dict[str, int] = {}

    def add_literal_option(self, name: str, values: int, **options: Any) -> None:
        """Add an option of several values that may begin with a dash, such as -1e3, -inf or -x."""
        self._literal_options[name] = values
        self.add_argument(name, nargs=values, type=lambda text: text.removeprefix("\0"), **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments; exit if one is unknown."""
        args, first = list(sys.argv[1:] if args is None else args), 0
        for position, text in enumerate(args):
            if position >= first and text in self._literal_options:
                first = position + 1 + self._literal_options[text]
            elif position < first:
                args[position] = f"\0{text}"  # argparse takes anything with a dash for an option
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            counts = [f"; {name} takes {count} values" for name, count in self._literal_options.items() if name in args]
            advice = "".join(counts) + (", so put a value of several words in quotes" if counts else "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return arguments, unknown


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return the formatter of help: with colors on a terminal, and elsewhere plain, which needs 40 ms less."""
    if not sys.stdout.isatty():
        return argparse.HelpFormatter(prog)
    from rich_argparse import RichHelpFormatter

    class Formatter(RichHelpFormatter):
        group_name_formatter = staticmethod(str)
        text_markup = help_markup = False  # [brackets] in help are text

    return Formatter(prog)


def add_group(commands: Commands[Any], name: str, text: str) -> Commands[Any]:
    """Add a group of commands; return where its commands are added."""
    group = commands.add_parser(name, help=text, description=_sentence(text))
    verbs: Commands[Any] = group.add_subparsers(metavar="COMMAND", required=True)
    return verbs


def add_command(commands: Commands[Any], name: str, run: Run, text: str, description: str = "") -> Parser:
    """Add a command.

    Parameters
    ----------
    commands
        The result of `add_subparsers` or `add_group`.
    name : str
    run : callable
        Takes the parsed arguments and returns the exit code.
    text : str
        Effect of the command: lower case, imperative, without a period.
    description : str, optional
        More sentences for the help of the command; default `text`.
    """
    parser: Parser = commands.add_parser(name, help=text, description=description or _sentence(text))
    parser.set_defaults(run=run, command=parser.prog.partition(" ")[2])
    return parser


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def json_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, without progress")


def _device(text: str) -> str:
    try:
        return checked_device(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def device_option(parser: argparse._ActionsContainer, choices: Sequence[str] = ("cpu", "cuda", "interp")) -> None:
    """Add ``--device``."""
    parser.add_argument(
        "--device", type=_device, choices=choices, help="where kernels run (default: cuda if there is a GPU, else cpu)"
    )


def cache_option(parser: argparse._ActionsContainer, value: str | None = None, text: str = "256MiB") -> None:
    """Add ``--cache`` with a default value, which the help describes as `text`."""
    parser.add_argument("--cache", default=value, metavar="SIZE", help=f"size of the page cache (default: {text})")


def page_size_option(parser: argparse._ActionsContainer, value: str | None = None, text: str = "4KiB") -> None:
    """Add ``--page-size`` with a default value, which the help describes as `text`."""
    parser.add_argument("--page-size", default=value, metavar="SIZE", help=f"size of a page (default: {text})")


def split_names(text: str | None) -> list[str] | None:
    """Return the names in an option such as ``A,B``, or None."""
    return None if text is None else [name for name in text.split(",") if name]


def new_file(name: str, option: str, suffixes: Sequence[str] = ()) -> Path:
    """Return the path of a file to write, checked before any work is done.

    Parameters
    ----------
    name : str
    option : str
        The option with this name, for messages.
    suffixes : sequence of str
        The suffixes that are allowed; default: any.

    Raises
    ------
    ArgumentError
        The path is a folder, or has another suffix, or its folder is not writable.
    MissingFileError
        The folder of the file does not exist.
    """
    path = Path(name)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ArgumentError(f"{option} {name} must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise MissingFileError(f"{option} {name}: the folder {path.parent} does not exist; create it first", path=name)
    if path.is_dir():
        raise ArgumentError(f"{option} {name} is a folder; give the name of a file")
    if not os.access(path.parent, os.W_OK, effective_ids=True):
        raise ArgumentError(f"{option} {name}: the folder {path.parent} is not writable; choose another one")
    return path


# -- output ------------------------------------------------------------------------------------------------------------

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
_IDENTIFIERS = {"pid", "seed", "source"}
"""Parts of keys whose integers are identifiers, printed without thousands separators."""


class Output:
    """Results on stdout as a table or JSON, progress and notes on stderr.

    Parameters
    ----------
    as_json : bool
        Print one JSON object instead of tables, without progress and notes.
    command : str
        The command, for the JSON object.
    """

    def __init__(self, as_json: bool = False, command: str = "") -> None:
        self.as_json, self.command = as_json, command
        self.screen = _console(soft_wrap=True)
        self.notes = _console(stderr=True)

    def print_json(self, values: dict[str, Any]) -> bool:
        """Print values as JSON and return True, or return False without ``--json``."""
        if self.as_json:
            import json

            json.dump({"schema": SCHEMA, "command": self.command, **values}, sys.stdout)
            sys.stdout.write("\n")
        return self.as_json

    def result(self, title: str, values: dict[str, Any], shown: dict[str, Any] | None = None) -> None:
        """Print the values of a result as JSON, or as a table with a row for each.

        Parameters
        ----------
        title : str
        values : dict
        shown : dict, optional
            Replaces values in the table. None removes a value.
        """
        if self.print_json(values):
            return
        from rich.table import Table

        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        hidden = {key for key, value in (shown or {}).items() if value is None}
        for key, value in {**values, **(shown or {})}.items():
            if key not in hidden:
                table.add_row(key.replace("_", " "), readable(key, value))
        self.screen.print(table)

    def table(self, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> None:
        """Print a table that is as wide as its cells, so that none is cut in a file or a narrow terminal.

        Parameters
        ----------
        title : str
        heads : sequence of str
            Heads of the columns.
        rows : iterable of sequences of str
        left : sequence of str
            Heads of columns of text, which are aligned left like the first column. Numbers are aligned right.
        """
        from rich.measure import Measurement
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for head in heads:
            table.add_column(head, justify="left" if head in (heads[0], *left) else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        natural = Measurement.get(self.screen, self.screen.options.update(max_width=1000), table).maximum
        _console(width=max(self.screen.width, natural)).print(table)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Report]:
        """Yield a function that shows progress: ``report(stage, done, total, details)``; a total of 0 is unknown.

        Nothing is shown with JSON, or if stderr is not a terminal.
        """
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=self.notes,
            transient=True,
            disable=self.as_json or not self.notes.is_terminal,
        )
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int, details: str = "") -> None:
            name = _STAGES.get(stage, stage)
            text = f"{name} {details}".rstrip() if total else f"{name} {done:,}"
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(text, total=total or None)
            bar.update(tasks[stage], completed=done if total else None, total=total or None, description=text)

        with bar:
            yield report


def output_of(arguments: argparse.Namespace) -> Output:
    """Return the output of a command with the option ``--json``."""
    return Output(arguments.json, arguments.command)


def _console(**options: Any) -> Console:
    from rich.console import Console

    # names of files, tasks and devices are text: [brackets] and :colons: are not markup
    return Console(highlight=False, markup=False, emoji=False, **options)


def readable(key: str, value: Any) -> str:
    """Return a value of a result as text; its key determines the unit."""
    from ..cache import format_size

    if value is None:
        return "none" if key in {"cache_bytes", "names", "weights"} else "not counted"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "uptime":
        import datetime

        return f"{datetime.timedelta(seconds=int(value))} (h:mm:ss)"
    parts = set(key.split("_"))
    if isinstance(value, int) and parts & _SIZES:
        return f"{format_size(value)} ({value:,})"
    if isinstance(value, int) and not parts & _IDENTIFIERS:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or abs(value) >= 0.1 else f"{value:.3g}"
    return str(value)


def print_problems(output: Output, problems: Iterable[Any], lost: str = "") -> None:
    """Print damage, a line for each problem; `lost` is printed after the key of a value."""
    for problem in problems:
        offset = "" if problem.offset is None else f", byte {problem.offset:,}"
        key = "" if problem.key is None else f" (key {describe_key(problem.key)}{lost})"
        output.screen.print(f"{problem.path}{offset}: {problem.what}{key}")


def problem_values(problem: Any) -> dict[str, object]:
    """Return a problem for JSON."""
    from ..kv import as_key

    key = None if problem.key is None else as_key(problem.key).hex()
    return {"path": problem.path, "offset": problem.offset, "what": problem.what, "key_hex": key}


def describe_key(key: int | bytes) -> str:
    """Return the key of a store as text."""
    if isinstance(key, int):
        return str(key)
    text = key.decode("utf-8", "replace")
    return text if text.isprintable() and "\ufffd" not in text else f"0x{key.hex()}"


# -- errors and interrupts ---------------------------------------------------------------------------------------------


def execute(run: Run, arguments: argparse.Namespace, own_process: bool) -> int:
    """Run a command; report its errors on stderr, and return the exit code.

    Parameters
    ----------
    run : callable
        Takes the arguments and returns the exit code.
    arguments : Namespace
    own_process : bool
        Whether Ctrl-C ends this process. False if the caller continues, or the command handles Ctrl-C itself.
    """
    if own_process:
        exit_on_interrupt()
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except WarpwellError as error:
        return _report_error(str(error))
    except BrokenPipeError:
        # the reader of the output has exited; Python would report that again when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        return _report_error(f"{path}{error.strerror or error}. Check the path and its permissions.")
    except MemoryError as error:
        return _report_error(f"out of memory ({error}); use a smaller --cache, a smaller input or --tier storage")
    except KeyboardInterrupt:
        print("warpwell: interrupted", file=sys.stderr, flush=True)
        if own_process:
            _exit_after_interrupt()
        return INTERRUPTED


def _report_error(message: str) -> int:
    print(f"warpwell: error: {message}", file=sys.stderr)
    return BAD_INPUT


def exit_on_interrupt() -> None:
    """Exit `CLEANUP_SECONDS` after Ctrl-C, unless KeyboardInterrupt has ended the process before.

    Python raises KeyboardInterrupt between two lines of its own code, so compiling, sorting or waiting for a device
    delays it. The files are then as after a kill: stores and graphs are complete, or absent.
    """
    import threading

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch_interrupts, args=(reading,), name="warpwell-interrupt", daemon=True).start()


def _exit_after_interrupt() -> NoReturn:
    """Run exit handlers and exit, without freeing objects, which may take seconds."""
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(INTERRUPTED)


def _watch_interrupts(reading: int) -> None:
    import time

    from ..replacing import remove, unfinished

    while signal.SIGINT not in os.read(reading, 64):
        pass
    time.sleep(CLEANUP_SECONDS)
    for path in list(unfinished):
        remove(path)
    os.write(2, b"warpwell: interrupted\n")
    os._exit(INTERRUPTED)
