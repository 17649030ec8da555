"""What users are told of a compilation: `compiling`, a line where it takes long, and `explained`, why it failed."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

from ... import errors
from ..._settings import settings
from ..uninterrupted import uninterrupted

SECONDS = 1.0
"""Compilations that take no longer say nothing."""

enabled = not settings.quiet
"""Whether to say anything; the command line has notices of its own."""

_said = False

_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_HEADS = ("Failed in ", "Rejected as the implementation raised")
_MISSING = "No implementation of function"


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Write to standard error, once a process, that `name` is being compiled, if it takes over a second.

    An interrupt is raised when it is done: see `uninterrupted`.
    """
    with uninterrupted(), _saying(name):
        yield


@contextlib.contextmanager
def _saying(name: str) -> Iterator[None]:
    if not enabled or _said:
        yield
        return
    timer = threading.Timer(SECONDS, _say, (name,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(name: str) -> None:
    global _said
    if _said or sys.stderr is None:
        return
    _said = True
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(
            f"warpwell: compiling {name}, and other new code; code for the CPU is cached on disk "
            "(WARPWELL_QUIET=1 hides this line) ...\n"
        )
        sys.stderr.flush()


@contextlib.contextmanager
def explained(name: str, target: str) -> Iterator[None]:
    """Raise `CompileError` for what Numba raises; Numba's own is its cause."""
    try:
        yield
    except Exception as error:
        # numba-cuda has an exception tree of its own, with the same names
        if not any(cls.__name__ == "NumbaError" for cls in type(error).__mro__):
            raise
        said = innermost(str(error))
        raise errors.CompileError(f"kernel {name!r} does not compile for {target!r}: {said}") from error


def innermost(text: str) -> str:
    """Return the innermost message of an error of Numba, with the place in the user's code."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    said: list[str] = []
    open_calls: list[str] = []
    missing: str | None = None
    place: tuple[str, str] | None = None
    head = True  # the first line may be all there is
    for k, line in enumerate(lines):
        found = re.sub(r"^\w*Error: (?=Failed in )", "", line)
        if found.startswith(_HEADS):
            head = True
            continue
        if found.startswith(_MISSING) and k + 1 < len(lines):
            open_calls.append(lines[k + 1].removeprefix(">>>").strip())
        elif head:
            said.append(re.sub(r"^TypingError: ", "", found))
        head = False
        during = re.match(r"During: typing of .* at (.*) \((\d+)\)$", found)
        if during is not None:
            call = open_calls.pop() if open_calls else None
            if place is None and not during[1].startswith((_OWN, "<")):
                place, missing = (during[1], during[2]), call
    where = f" ({place[0]}, line {place[1]})" if place else ""
    if said:
        return said[-1] + where
    missing = missing or (open_calls[-1] if open_calls else None)
    return (f"there is no {missing}" if missing else lines[0] if lines else "no reason is given") + where
