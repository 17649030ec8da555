"""Messages about a compilation: `compiling`, a warning if it takes long, and `explained`, why it failed."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ... import errors
from ..._os import uninterrupted
from .reasons import reason_of

SECONDS = 1.0
"""Compilations that take no longer are not reported."""

_logger = logging.getLogger(__name__)

_warned = False

_COMPILER_ERRORS = {"NumbaError", "UnsupportedBytecodeError"}


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Log, once a process, that `name` is being compiled, if it takes over a second.

    This is a warning for users who wait: at a terminal, in an interactive session, or in a notebook. An interrupt is
    raised after the compilation: see `uninterrupted`.
    """
    timer = threading.Timer(SECONDS, _warn, (name,))
    timer.daemon = True
    with uninterrupted():
        if not _warned:
            with contextlib.suppress(RuntimeError):  # no thread can be started, for example when the interpreter ends
                timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _warn(name: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        is_interactive = hasattr(sys, "ps1") or getattr(sys.stderr, "isatty", bool)()
        _logger.log(
            logging.WARNING if is_interactive else logging.INFO,
            "warpwell is compiling %s, and other new code; code for the CPU is cached on disk. `warpwell compile` does "
            "this beforehand (WARPWELL_LOG_LEVEL=ERROR hides this line) ...",
            name,
        )


@contextlib.contextmanager
def explained(kernel: Any, target: str) -> Iterator[None]:
    """Raise `CompileError` for errors of the compiler.

    The compiler's own message has a hundred lines: it is the context of the error, which Python does not print.
    """
    try:
        yield
    except Exception as error:
        # numba-cuda has an exception tree of its own, with the same names
        is_compilers = any(cls.__name__ in _COMPILER_ERRORS for cls in type(error).__mro__)
        if not is_compilers and not (isinstance(error, AttributeError) and str(error).startswith("module '")):
            raise
        reason = reason_of(error, kernel.function)
        _logger.debug("the compiler's message", exc_info=error)
        raise errors.CompileError(f"kernel {kernel.__name__!r} does not compile for {target!r}: {reason}") from None
