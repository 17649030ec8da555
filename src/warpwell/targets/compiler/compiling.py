"""What users are told of a compilation: `compiling`, a line where it takes long, and `explained`, why it failed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ... import errors
from ..._settings import settings
from ..uninterrupted import uninterrupted
from .reasons import reason_of

SECONDS = 1.0
"""Compilations that take no longer say nothing."""

enabled = not settings.quiet
"""Whether to say anything; the command line has notices of its own."""

_said = False

_COMPILER_ERRORS = {"NumbaError", "UnsupportedBytecodeError"}


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
def explained(kernel: Any, target: str) -> Iterator[None]:
    """Raise `CompileError` for what the compiler raises; the error of the compiler is its cause."""
    try:
        yield
    except Exception as error:
        # numba-cuda has an exception tree of its own, with the same names
        is_compilers = any(cls.__name__ in _COMPILER_ERRORS for cls in type(error).__mro__)
        if not is_compilers and not (isinstance(error, AttributeError) and str(error).startswith("module '")):
            raise
        reason = reason_of(error, kernel.function)
        raise errors.CompileError(f"kernel {kernel.__name__!r} does not compile for {target!r}: {reason}") from error
