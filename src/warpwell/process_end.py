"""`end_processes`: ends processes of the same host by signals, and waits until they have exited."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping

from ._os import clock
from .errors import SchedulerError

KILL_SECONDS = 5.0
"""Time that Linux has to end a process after SIGKILL."""


def end_processes(processes: Iterable[int], is_same: Callable[[int], bool], seconds: float) -> list[int]:
    """End processes: SIGTERM, then SIGKILL after `seconds`; return their numbers.

    Parameters
    ----------
    processes : iterable of int
    is_same : callable
        Returns whether a number still belongs to the intended process. It is called after a descriptor of the process
        was opened, so that no later process is ended.
    seconds : float

    Raises
    ------
    SchedulerError
        A process is of another user, or did not exit.
    """
    numbers = sorted(processes)
    with contextlib.ExitStack() as stack:
        living = {}
        for process in numbers:
            try:
                descriptor = os.pidfd_open(process)
            except ProcessLookupError:
                continue
            stack.callback(os.close, descriptor)
            if is_same(process):
                living[process] = descriptor
        for number, limit in ((signal.SIGTERM, seconds), (signal.SIGKILL, KILL_SECONDS)):
            _send(living, number)
            living = _wait_for_exit(living, limit)
    if living:
        raise SchedulerError(f"processes {sorted(living)} do not exit; see their state in /proc")
    return numbers


def _send(living: Mapping[int, int], number: signal.Signals) -> None:
    for process, descriptor in living.items():
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            raise SchedulerError(f"process {process} belongs to another user; ask that user, or root") from None


def _wait_for_exit(living: Mapping[int, int], seconds: float) -> dict[int, int]:
    """Return the processes that have not exited after a time."""
    deadline, remaining = clock.monotonic() + seconds, dict(living)
    while remaining and (limit := deadline - clock.monotonic()) > 0:
        exited = set(select.select(list(remaining.values()), [], [], limit)[0])
        remaining = {process: handle for process, handle in remaining.items() if handle not in exited}
    return remaining
