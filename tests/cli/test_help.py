"""The help of all commands: cheap, complete, and consistent with the constants that it states.

``python tests/cli/test_help.py`` writes the snapshot.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from warpwell.cli.main import build_parser, main

SNAPSHOT = Path(__file__).with_name("options.json")
CPU_SECONDS = 0.10
"""Budget of CPU time for the process of any ``--help``."""

START_SECONDS = 0.035
"""CPU time of ``python -c pass`` on the machine and in the environment for which the budget was set."""


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from commands(each)


def options() -> dict[str, list[str]]:
    """Return options and positional arguments by command."""
    return {
        parser.prog: sorted(
            name
            for action in parser._actions
            for name in action.option_strings or [str(action.metavar or action.dest)]
            if name not in ("-h", "--help", "COMMAND")
        )
        for parser in commands(build_parser())
    }


def test_commands_and_options_are_those_of_the_snapshot() -> None:
    assert options() == json.loads(SNAPSHOT.read_text()), "if intended: python tests/cli/test_help.py"


def cpu_seconds(*arguments: str, text: str = "") -> tuple[float, str]:
    """Run Python in a child process; return its CPU time and its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(text)
    process.stdin.close()
    output = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    return usage.ru_utime + usage.ru_stime, output


def test_every_help_is_cheap_and_imports_no_library() -> None:
    """The CPU time of a command is the sum for the start of Python, the imports, and its help.

    A loaded machine inflates CPU time, so the budget grows with the time that a bare start of Python takes there.
    """
    code = """
import contextlib, io, json, sys, time
from warpwell.cli.main import main
started, seconds = time.process_time(), {}
for name in json.load(sys.stdin):
    before = time.process_time()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text:
        main([*name.split()[1:], "--help"])
    assert text.getvalue().startswith("usage: " + name), name
    seconds[name] = started + time.process_time() - before
slow = {"numpy", "numba", "llvmlite", "scipy", "matplotlib", "rich", "pyarrow", "shtab"} & set(sys.modules)
assert not slow, slow
json.dump(seconds, sys.stdout)
"""
    best, names = {}, json.dumps(list(options()))
    # The first run may compile modules, and another one may share its processor with other programs.
    for _ in range(20):
        start, _ = cpu_seconds("-c", "pass")
        _, output = cpu_seconds("-c", code, text=names)
        process_seconds, _ = cpu_seconds("-m", "warpwell", "sched", "serve", "--help")
        scale = max(1.0, start / START_SECONDS)
        for name, seconds in {**json.loads(output), "a process": process_seconds}.items():
            best[name] = min(seconds / scale, best.get(name, seconds / scale))
        if max(best.values()) < CPU_SECONDS:
            break
    assert max(best.values()) < CPU_SECONDS, best


def test_help_on_a_terminal_has_colors_and_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    query = next(parser for parser in commands(build_parser()) if parser.prog == "warpwell table query")
    plain = query.format_help()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    colored = query.format_help()
    assert "\x1b[" in colored and "[[" in plain
    assert re.sub(r"\x1b\[\d+m", "", colored).split() == plain.split()


def test_defaults_in_help_are_those_of_the_library() -> None:
    from warpwell.scheduler.events import KINDS
    from warpwell.scheduler.service.device_process import METRICS_SECONDS

    found = {
        (parser.prog.removeprefix("warpwell "), option): action.help or ""
        for parser in commands(build_parser())
        for action in parser._actions
        for option in action.option_strings
    }
    assert found["sched serve", "--metrics"].endswith(f" {METRICS_SECONDS:g} s")
    assert found["sched explain", "--kind"].endswith(f": {', '.join(KINDS)}")


def test_options_of_one_name_have_one_text() -> None:
    texts: dict[str, set[str]] = {}
    for parser in commands(build_parser()):
        for action in parser._actions:
            for option in {"--device", "--cache", "--page-size", "--json"} & set(action.option_strings):
                texts.setdefault(option, set()).add(action.help or "")
    assert [len(each) for each in texts.values()] == [1, 1, 1, 1], texts


def test_help_of_options_is_lower_case_without_a_period() -> None:
    for parser in commands(build_parser()):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            text = action.help or ""
            assert text and not text.endswith("."), (parser.prog, action.option_strings or action.dest)
            first = text.split()[0].rstrip(",")
            assert not (first.isalpha() and first.istitle()) or first in ("Kronecker", "Parquet"), (parser.prog, text)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_all_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for name in options() for word in name.split()) and "--page-size" in script
    if shell == "bash":
        (tmp_path / "script").write_text(script)
        subprocess.run(["bash", "-n", tmp_path / "script"], check=True)
        assert "_shtab_compgen_files" in script


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(options(), indent=1) + "\n")
