"""`run_program`: runs a program on this machine's own driver, with the pass-through driver in front of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..driver import Board, machine_driver, passthrough_environ, uses_driver_directly
from ..errors import WarpwellError
from ..shared_file import shared_folder
from .operator import board_names

ARBITER_CHECK_SECONDS = 0.5
"""Interval at which arbiters are started for shared GPUs without an arbiter. Until then, the gates of these GPUs are
open."""

_DIRECT = (
    "warpwell share: this program's calls are not ordered, because it uses the CUDA driver directly; "
    "do not change LD_LIBRARY_PATH in the program, and load the driver as libcuda.so.1"
)

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_program(command: Sequence[str], share: str) -> int:
    """Run a program that shares this machine's GPUs, and return its exit code: 128 + N if signal N ended it.

    Parameters
    ----------
    command : sequence of str
        Path of the program, and its arguments.
    share : str
        Priority and tenant: PRIORITY:TENANT.
    """
    variables = {"WARPWELL_SHARE": share, "WARPWELL_TURNS": str(shared_folder())}
    driver, is_known = machine_driver(), False
    environ = passthrough_environ(os.environ, driver) | variables
    with subprocess.Popen(command, env=environ) as child, _forward_signals(child):
        while True:
            try:
                code = child.wait(ARBITER_CHECK_SECONDS)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                _ensure_arbiters()
                if not is_known:
                    is_direct = uses_driver_directly(child.pid, driver)
                    is_known = is_direct is not None
                    if is_direct:
                        print(_DIRECT, file=sys.stderr)


def _ensure_arbiters() -> None:
    for name in board_names():
        with contextlib.suppress(WarpwellError, OSError):  # another user or version may have created the board
            board = Board.of(name)
            if any(board.is_alive(index) for index, _ in board.used_slots()):
                board.ensure_arbiter()


@contextlib.contextmanager
def _forward_signals(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Forward signals that end a process to the program. A terminal itself sends Ctrl-C to both processes."""
    before = {number: signal.signal(number, lambda number, _: child.send_signal(number)) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, _: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
