"""`status`, `end`, `limit` and `limited`: what an operator asks of turns, and does."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import errors
from .._check import checked_integer, checked_seconds
from ..process_end import end_processes
from ..replacing import replacing
from ..shared_file import shared_folder
from .board import EPOCH, HOLDER, INSIDE, LIMITS, PRIORITY, SINCE, SLOTS, STATE, TURNS, USE, WAITING, Board
from .choice import CEILING, FILE, HOLD, Limits

GRACE = 5.0
"""Seconds that a program has to end by itself."""

BEFORE = "limits-before.json"
"""In the folder of the boards: the limits from before `limited`, by device; of "", for all that are made later."""


def boards() -> list[Board]:
    """Return the boards of all devices at which somebody has taken turns."""
    return [Board.of(path.stem) for path in sorted(shared_folder().glob("*.turns"))]


def status() -> list[dict[str, Any]]:
    """Return who takes turns: a dictionary for each thread of a program that lives.

    Its keys are "device", "process" (0: of another container), "tenant", "priority" as it counts, "state" ("inside" a
    turn, "holds" the lease between two, "waits" or "idle"), "seconds" since when, "turns" and "used" (seconds).
    """
    now = time.monotonic_ns()
    found = []
    for board in boards():
        words = board.words
        for slot in range(1, SLOTS):
            at = board.at(slot)
            named = board.tenant(slot)
            process = board.process(slot) if named else None
            if process is None:
                continue
            holds = words[HOLDER] == slot and board.holds(board.lease(words[EPOCH]))
            state = {INSIDE: "inside" if holds else "without", WAITING: "waits"}.get(words[at + STATE], "idle")
            found.append(
                {
                    "device": board.name,
                    "process": process,
                    "tenant": named,
                    "priority": words[at + PRIORITY],
                    "state": "holds" if holds and state == "idle" else state,
                    "seconds": max(0, now - words[at + SINCE]) / 1e9,
                    "turns": words[at + TURNS],
                    "used": words[at + USE] / 1e9,
                }
            )
    return found


def end(who: str, grace: float = GRACE) -> list[int]:
    """End the programs of a tenant, or a process by its number: SIGTERM, and SIGKILL for those that go on.

    Their leases are free at that moment.

    Parameters
    ----------
    who : str
    grace : float
        Seconds from one signal to the other.

    Returns
    -------
    list of int
        The processes that have ended.

    Raises
    ------
    ArgumentError
        Nobody who takes turns has this name or number.
    SchedulerError
        A process is another user's or another container's, or has not ended.
    """
    named = {(row["process"], row["tenant"]) for row in status()}
    processes = {process for process, tenant in named if who in (tenant, str(process))} - {os.getpid()}
    if not processes:
        known = ", ".join(sorted({tenant for _, tenant in named})) or "nobody"
        raise errors.ArgumentError(f"no tenant or process {who!r} takes turns here: there is {known}", name="tenant")
    if 0 in processes:
        raise errors.SchedulerError(f"tenant {who!r} runs in another container: end it there, or on the host")
    return end_processes(processes, lambda process: any(row["process"] == process for row in status()), grace)


def limit(
    device: str | None = None,
    *,
    hold: float = HOLD,
    ceiling: int = CEILING,
    tenants: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[str]:
    """Set what turns may do: those that begin from now on, in all processes.

    Parameters
    ----------
    device : str, optional
        Name of a device, as `status` has it; default: all, with those at which nobody has taken turns yet.
    hold : float
        Seconds that a holder may let others wait without an end or a pause; its lease counts no more after that.
    ceiling : int
        Priorities count up to this and its negative.
    tenants : mapping, optional
        Of names, to those of "hold", "ceiling" and "priority" (added to that of its turns) that differ.

    Returns
    -------
    list of str
        The devices.

    Raises
    ------
    ArgumentError
    """
    text = _limits(hold, ceiling, tenants).text()
    if device is None:
        (shared_folder() / BEFORE).unlink(missing_ok=True)  # `limited` has nothing to give back
        _keep(FILE, text)
    chosen = boards() if device is None else [Board.of(device)]
    for board in chosen:
        board.write_text(text)
    return [board.name for board in chosen]


@contextlib.contextmanager
def limited(*, hold: float = HOLD, tenants: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[None]:
    """Set limits as `limit` does while the block runs; then those from before count again.

    Not where somebody has set others meanwhile. A program that is killed in the block leaves its limits, and the file
    from which the next one gives back what was before.
    """
    text = _limits(hold, CEILING, tenants).text()
    before = shared_folder() / BEFORE
    if not before.exists():
        found = {board.name: board.read_text() for board in boards() if board.words[LIMITS]}
        found[""] = _read(shared_folder() / FILE)
        valid = {name: its.decode() for name, its in found.items() if Limits.of(its) is not None}
        _keep(BEFORE, json.dumps(valid).encode())
    _keep(FILE, text)
    for board in boards():
        board.write_text(text)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError, errors.SchedulerError):  # the folder was removed, or damaged
            if _read(shared_folder() / FILE) == text:
                kept = json.loads(before.read_bytes())
                all_others = kept.get("", Limits().text().decode()).encode()
                _keep(FILE, all_others)
                for board in boards():
                    if board.read_text() == text:
                        board.write_text(kept[board.name].encode() if board.name in kept else all_others)
                before.unlink()


def _limits(hold: float, ceiling: int, tenants: Mapping[str, Mapping[str, Any]] | None) -> Limits:
    own = {name: dict(_checked(name, values)) for name, values in (tenants or {}).items()}
    return Limits(checked_seconds(hold, "hold"), checked_integer(ceiling, "ceiling", minimum=0, maximum=1 << 30), own)


def _keep(name: str, text: bytes) -> None:
    """Replace a file in the folder of the boards."""
    with replacing(shared_folder() / name) as path:
        path.write_bytes(text)


def _read(path: Path) -> bytes:
    """Return what a file has; nothing where it is missing."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _checked(name: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    if not isinstance(values, Mapping) or set(values) - {"hold", "ceiling", "priority"}:
        raise errors.ArgumentError(
            f"limits of tenant {name!r} are {values!r:.60}: give some of hold, ceiling and priority", name="tenants"
        )
    for key, value in values.items():
        if key == "hold":
            yield key, checked_seconds(value, f"hold of tenant {name!r}")
        else:
            least = 0 if key == "ceiling" else -(1 << 30)
            yield key, checked_integer(value, key, minimum=least, maximum=1 << 30, of=f"tenant {name!r}")
