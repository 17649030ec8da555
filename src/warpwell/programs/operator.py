"""Status, limits and end of the programs and leases that share GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from .._os import clock
from ..driver import Board
from ..errors import ArgumentError, SchedulerError
from ..process_end import end_processes
from ..shared_file import shared_folder
from .arbiter import read_limits, tenant_of, write_limits
from .policy import AGING_SECONDS

TERMINATE_SECONDS = 5.0
"""Time that a program has to exit after SIGTERM."""

_STATES = {Board.RUNNING: "running", Board.LEAVING: "leaving", Board.WAITING: "waiting", Board.OVERDUE: "overdue"}


def boards() -> Iterator[Board]:
    """Yield the boards of all devices that programs have shared."""
    yield from map(Board.of, board_names())


def board_names() -> list[str]:
    """Return the names of the devices that programs have shared."""
    return sorted(path.stem for path in shared_folder().glob("*.board"))


def program_status(limits: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return the programs that share GPUs.

    Parameters
    ----------
    limits : mapping, optional
        Settings of tenants (`tenant_limits`), for the levels.

    Returns
    -------
    list of dict
        "device", "process" (in its own container), "tenant", "priority", "level" (its priority with the tenant's
        settings and the waiting time, which decides), "state" ("running", "leaving", "waiting", "overdue" or "idle"),
        "seconds" in that state, "launches" (busy periods) and "used" (seconds).
    """
    found = []
    for each, index in _living_slots():
        at, fields = each.slot(index), each.fields
        tenant, priority = tenant_of(each.tenant(index), limits or {}), each.priority(index)
        state, seconds = fields[at + Board.STATE], max(0, clock.monotonic_ns() - fields[at + Board.SINCE_NS]) / 1e9
        level = tenant.priority + max(-tenant.ceiling, min(priority, tenant.ceiling))
        found.append(
            {
                "device": each.name,
                "process": each.named_process(index),
                "tenant": tenant.name,
                "priority": priority,
                "level": level + (int(seconds / AGING_SECONDS) if state == Board.WAITING else 0),
                "state": _STATES.get(state, "idle"),
                "seconds": seconds,
                "launches": fields[at + Board.LAUNCHES],
                "used": fields[at + Board.USED_NS] / 1e9,
            }
        )
    return found


def tenant_limits() -> dict[str, dict[str, Any]]:
    """Return the settings of tenants, by name; raise SchedulerError if they are ignored."""
    return read_limits(shared_folder())


def known_tenants() -> list[str]:
    """Return the tenants of the programs that share GPUs, and of the last programs that shared them."""
    return sorted(set().union(*(board.tenants() for board in boards())))


def _living_slots() -> Iterator[tuple[Board, int]]:
    """Yield board and index of each slot whose program has not exited."""
    for board in boards():
        yield from ((board, index) for index, _ in board.used_slots() if board.is_alive(index))


def set_limits(tenants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Change settings of tenants for all GPUs, including running programs; return all settings.

    Parameters
    ----------
    tenants : mapping
        By name, some of "weight", "priority" (added to the priority of each program), "ceiling", and "hold" (seconds
        that a turn of `warpwell.turn` may take while another program waits); an empty mapping resets a tenant.

    Raises
    ------
    ArgumentError
        A setting is unknown or has an invalid value.
    SchedulerError
        The file of the settings cannot be used.
    """
    found = tenant_limits()
    for name, values in tenants.items():
        if unknown := set(values) - {"weight", "priority", "ceiling", "hold"}:
            raise ArgumentError(
                f"unknown setting {min(unknown)!r} of tenant {name!r}; expected weight, priority, ceiling or hold",
                name="tenants",
            )
        found[name] = {**found.get(name, {}), **values} if values else {}
        tenant_of(name, found)
    found = {name: values for name, values in found.items() if values}
    write_limits(shared_folder(), found)
    for each in boards():
        each.ring()
    return found


def end_programs(name: str, seconds: float = TERMINATE_SECONDS) -> list[int]:
    """End the programs of a tenant, or the program with a process number: SIGTERM, then SIGKILL after `seconds`.

    Returns
    -------
    list of int
        The processes that have exited.

    Raises
    ------
    ArgumentError
        No program that shares a GPU has this tenant or number.
    SchedulerError
        A process belongs to another user or container, or did not exit.
    """
    slots = list(_living_slots())
    named = [slot for slot in slots if name in (slot[0].tenant(slot[1]), str(slot[0].named_process(slot[1])))]
    found = {_process_of(*slot) for slot in named} - {os.getpid()}
    processes = {process for process in found if process is not None}
    if None in found:
        raise SchedulerError(f"a program of {name!r} belongs to another user or container; end the program there")
    if not processes:
        tenants = ", ".join(sorted({board.tenant(index) for board, index in slots}))
        others = f"tenants are {tenants}" if tenants else "no program does"
        raise ArgumentError(f"no tenant or process {name!r} shares a GPU here; {others}", name="tenant")
    return end_processes(
        processes, lambda process: any(_process_of(*slot) == process for slot in _living_slots()), seconds
    )


def _process_of(board: Board, index: int) -> int | None:
    """Return the process of a program: the owner of its slot, or, for a worker, the process that the slot names.

    None if the program runs in another container, or if its worker and the named process have different users.
    """
    owner, named = board.owner(index), board.named_process(index)
    if not owner or board.fields[board.slot(index) + Board.KIND] != Board.WORKER:
        return owner or None
    worker, program = _process_fields(owner), _process_fields(named)
    is_here = len(worker.get("NSpid", "0").split()) == 1
    if not program:
        return owner  # the process exits
    return named if is_here and worker.get("Uid") == program.get("Uid") else None


def _process_fields(process: int) -> dict[str, str]:
    """Return the fields of a process in /proc, or nothing if it has exited."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}
