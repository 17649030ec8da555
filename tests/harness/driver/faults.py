"""Faults planted into layer, worker and the mirror between hosts; random programs must find them.

The folder `faults` has them as patches. A patch begins with a line ``# FAULT`` or ``# FAULT: WHAT FINDS IT``, and a
hunk with ``@@ FILE``. Its old lines occur once in the file, token by token.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.driver.natives import Changes, edit

from lab.testing.patches import Patch, read_patches

SOURCES = Path(__file__).parents[3] / "src" / "warpwell"


def _changes(patch: Patch) -> Changes:
    changes: dict[str, dict[str, str]] = {}
    for hunk in patch.hunks:
        changes.setdefault(hunk.location, {})[hunk.old] = hunk.new
    return changes


def _read(name: str) -> dict[str, tuple[str, Changes]]:
    """Return the faults of a file of patches: fault -> what finds it, and the changes that plant it."""
    found = {}
    for patch in read_patches(Path(__file__).parent / "faults" / f"{name}.diff"):
        fault, _, finder = patch.title.partition(": ")
        found[fault] = finder, _changes(patch)
    return found


PLANTED = {fault: changes for fault, (_, changes) in _read("planted").items()}
"""Fault -> the changes that plant it."""
PEERS = _read("peers")
"""The same, and the act of peer_acts.py that finds it."""
CHECKED = _read("checked")
"""The same, and the area of checks that finds it."""
OVER_MPI = {fault: changes for fault, (_, changes) in _read("over_mpi").items()}
"""Faults of the mirror, as changes of sources: an MPI job must find them. A thread that is not woken polls later."""
MIRRORED = _read("mirrored")
"""Faults of the mirror between hosts, and the symptom: random programs are wrong, do not end, or a program is wrong
that posts more than the rings hold."""
WRONG, STUCK, OVERRUN = "wrong", "stuck", "overrun"


def lands_at_once(client: Any, answers: bytes, slots: tuple[Any, ...]) -> None:
    """`NearClient.apply_answers` that does not wait for bulk data."""
    near = client._near
    near.apply(answers)
    for slot, use, result, payload in slots:
        if isinstance(payload, bytes):
            near.write(slot, payload)
        near.complete_slot(slot, use, result)


REPLACED: dict[str, dict[str, Any]] = {
    "entries are published before their bytes are there": {
        "warpwell.pool.cuda.far._Stop.ready": property(lambda stop: stop.started)
    },
    "a place is done before its bytes have landed": {"warpwell.pool.cuda.near.NearClient.apply_answers": lands_at_once},
}
"""Faults of `MIRRORED` that replace names in Python."""


def every() -> Iterator[tuple[str, Changes]]:
    """Yield the names and native changes of all faults; those in Python apply."""
    yield from PLANTED.items()
    yield from ((name, changes) for name, (_, changes) in [*PEERS.items(), *CHECKED.items(), *MIRRORED.items()])
    for target in (target for replaced in REPLACED.values() for target in replaced):
        pkgutil.resolve_name(target)
    for name, changes in OVER_MPI.items():
        for file in (file for file in changes if file.endswith(".py")):
            edit((SOURCES / "pool" / "cuda" / file).read_text(), changes[file], f"{name}: {file}")
        yield name, {file: pairs for file, pairs in changes.items() if file.endswith(".c")}
