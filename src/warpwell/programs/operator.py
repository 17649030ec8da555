"""Status, limits and end of the programs that share GPUs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from .._os import clock
from ..driver import Board, board_folder
from ..errors import ArgumentError, SchedulerError
from ..scheduler import Tenant
from .arbiter import read_limits, write_limits

TERMINATE_SECONDS = 5.0
"""Time that a program has to exit after SIGTERM, and Linux after SIGKILL."""

_STATES = {Board.RUNNING: "running", Board.LEAVING: "leaving", Board.WAITING: "waiting"}


def boards() -> Iterator[Board]:
    """Yield the boards of all devices that programs have shared."""
    for path in sorted(board_folder().glob("*.board")):
        yield Board.of(path.stem)


def program_status() -> list[dict[str, Any]]:
    """Return the programs that share GPUs.

    Returns
    -------
    list of dict
        "device", "process" (in its own container), "tenant", "priority", "state" ("running", "leaving", "waiting" or
        "idle"), "seconds" in that state, "launches" (busy periods) and "used" (seconds).
    """
    found = []
    for each in boards():
        for index, _ in each.used_slots():
            if not each.is_alive(index):
                continue
            at, fields = each.slot(index), each.fields
            priority = fields[at + Board.PRIORITY]
            found.append(
                {
                    "device": each.name,
                    "process": fields[at + Board.PID] & 0x7FFFFFFF,
                    "tenant": each.tenant(index),
                    "priority": priority - (1 << 64) if priority >> 63 else priority,
                    "state": _STATES.get(fields[at + Board.STATE], "idle"),
                    "seconds": max(0, clock.monotonic_ns() - fields[at + Board.SINCE_NS]) / 1e9,
                    "launches": fields[at + Board.LAUNCHES],
                    "used": fields[at + Board.USED_NS] / 1e9,
                }
            )
    return found


def set_limits(tenants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Change settings of tenants for all GPUs, including running programs; return all settings.

    Parameters
    ----------
    tenants : mapping
        By name, some of "weight", "priority" (added to the priority of each program) and "ceiling"; an empty mapping
        resets a tenant.

    Raises
    ------
    ArgumentError
        A setting is unknown or has an invalid value.
    """
    found = read_limits(board_folder())
    for name, values in tenants.items():
        if unknown := set(values) - {"weight", "priority", "ceiling"}:
            raise ArgumentError(
                f"unknown setting {sorted(unknown)[0]!r} of tenant {name!r}; expected weight, priority or ceiling",
                name="tenants",
            )
        found[name] = {**found.get(name, {}), **values} if values else {}
        Tenant(name, **found[name])
    found = {name: values for name, values in found.items() if values}
    write_limits(board_folder(), found)
    for each in boards():
        each.ring()
    return found


def end_programs(name: str, seconds: float = TERMINATE_SECONDS) -> list[int]:
    """End the programs of a tenant, or one by its process number: SIGTERM, then SIGKILL after `seconds`.

    Returns
    -------
    list of int
        The processes that have exited.

    Raises
    ------
    ArgumentError
        No program that shares a GPU has this tenant or number.
    SchedulerError
        A process is of another user or container, or did not exit.
    """
    rows = program_status()
    processes = {row["process"] for row in rows if name in (row["tenant"], str(row["process"]))} - {os.getpid()}
    if not processes:
        tenants = ", ".join(sorted({row["tenant"] for row in rows})) or "no program"
        raise ArgumentError(f"no tenant or process {name!r} shares a GPU here; there is {tenants}", name="tenant")
    with contextlib.ExitStack() as stack:
        handles = {process: _open_process(process, stack) for process in processes}
        living = {process: handle for process, handle in handles.items() if handle is not None}
        for number, limit in ((signal.SIGTERM, seconds), (signal.SIGKILL, TERMINATE_SECONDS)):
            _send(living, number)
            living = _wait_for_exit(living, limit)
    if living:
        raise SchedulerError(f"processes {sorted(living)} do not exit; see their state in /proc")
    return sorted(processes)


def _open_process(process: int, stack: contextlib.ExitStack) -> int | None:
    """Return a descriptor of a process, or None if it has exited: its number may be another process's by now."""
    try:
        handle = os.pidfd_open(process)
    except OSError:
        return None
    stack.callback(os.close, handle)
    return handle if any(row["process"] == process for row in program_status()) else None


def _send(living: Mapping[int, int], number: signal.Signals) -> None:
    for process, handle in living.items():
        try:
            signal.pidfd_send_signal(handle, number)
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
