"""Planted faults: small changes of device code. The scenarios must find each of them.

The folder `faults` has them as patches: ``planted.diff``, ``rare.diff`` (runs find these faults too rarely: the first
in 0 of 7,000 runs, the second in 0 of 9,300, so the campaign searches for them only by name) and ``harmless.diff``. A
patch begins with a line ``# NAME: SCENARIO, seed SEED`` and a description, and a hunk with ``@@ MODULE: FUNCTION``. The
name of a method includes its class.

A fault replaces the code of functions by compiled code of a changed source. So every module that has imported the
function runs the changed code, and nothing is registered twice. The old lines of a hunk must occur in the function
exactly once: otherwise planting the fault raises, so that no fault is silently absent.

Some faults that suggest themselves are harmless in this protocol. ``harmless.diff`` has these changes, and a similar
harmful change is planted as a fault:

*DIRTY set before the store.* The page is pinned while the group stores, and write-backs and flushes skip pinned pages,
so DIRTY may be set at any time before the unpinning. It is harmful to release the pin, with DIRTY, before the store.

*Mark cleared early.* The mover may clear marks long before it rings the doorbell, because a cleared mark does not stand
for a rung doorbell. It is harmful to clear a mark before the tail has reached it.

*Entry released before its key is read.* The thread that reads the entry fetches no other entry in the meantime. There
are half as many ids as entries, so no submitter reaches this entry again.

*Turns kept by a rewind.* Threads are admitted to entries that the controller has not fetched. They overwrite nothing,
because there are half as many ids as entries.

A generation of 2 bits needs a reader that sleeps through four evictions of its page, so its `Focus` has one frame, two
pages and threads that only read.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from lab.testing.patches import Patch, read_patches

from .adversary import LONG, MIDDLE
from .cache_model import Focus

_FOCUSES = {
    "store-fence-removed": Focus(frames=1, pages=2, readers=True, naps=MIDDLE, writers=True),
    "generation-of-2-bits": Focus(frames=1, pages=2, readers=True, naps=LONG),
}
"""Restrictions of the scenarios of some faults."""


@dataclass(frozen=True)
class Edit:
    """A change of one function of ``warpwell.<module>``: the lines `old`, which occur in it once, become `new`.

    The name of a method includes its class.
    """

    module: str
    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A fault: its name, the scenario that finds it, a description, and the edits that plant it.

    Tests start with `seed`, which found the fault.
    """

    name: str
    scenario: str
    description: str
    edits: tuple[Edit, ...]
    seed: int = 0

    @property
    def focus(self) -> Focus:
        """Restriction of the scenario."""
        return _FOCUSES.get(self.name, Focus())


def _faults(name: str) -> tuple[Fault, ...]:
    """Read the faults of a file of patches."""
    return tuple(map(_fault, read_patches(Path(__file__).parent / "faults" / f"{name}.diff")))


def _fault(patch: Patch) -> Fault:
    name, _, setting = patch.title.partition(": ")
    scenario, _, seed = setting.partition(", seed ")
    edits = tuple(Edit(*hunk.location.split(": "), hunk.old, hunk.new) for hunk in patch.hunks)
    return Fault(name, scenario, *patch.notes, edits, int(seed or 0))


FAULTS, RARE, HARMLESS = _faults("planted"), _faults("rare"), _faults("harmless")


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Run the block with a fault in the device code (interpreted runs of this process only)."""
    edits: dict[tuple[str, str], list[Edit]] = defaultdict(list)
    for edit in fault.edits:
        edits[edit.module, edit.function].append(edit)
    changed: dict[FunctionType, CodeType] = {}
    for (name, function), changes in edits.items():
        module = importlib.import_module(f"warpwell.{name}")
        source = _edited(inspect.getsource(module), function, changes, fault.name)
        changed[inspect.unwrap(operator.attrgetter(function)(module))] = _code(source, function, str(module.__file__))
    _swap(changed)
    try:
        yield
    finally:
        _swap(changed)


def _edited(source: str, function: str, edits: list[Edit], fault: str) -> str:
    """Return `source` with changes of one of its functions."""
    node: Any = ast.parse(source)
    for name in function.split("."):  # a class and a method, or a function
        node = next(n for n in node.body if getattr(n, "name", None) == name)
    source_lines = source.splitlines(keepends=True)
    before, after = "".join(source_lines[: node.lineno]), "".join(source_lines[node.end_lineno :])
    text = "".join(source_lines[node.lineno : node.end_lineno])
    places = {}
    for edit in edits:  # all in the text without changes
        if (count := f"\n{text}".count(f"\n{edit.old}")) != 1:
            raise LookupError(f"fault {fault}: {count} places in {function} of {edit.module}:\n{edit.old}")
        places[f"\n{text}".index(f"\n{edit.old}")] = edit
    for place, edit in sorted(places.items(), reverse=True):
        text = text[:place] + edit.new + text[place + len(edit.old) :]
    return before + text + after


def _code(source: str, function: str, filename: str) -> CodeType:
    # the future import of the source keeps annotations as strings
    found = compile(source, filename, "exec")
    for name in function.split("."):  # a class and a method, or a function
        inside = [c for c in found.co_consts if isinstance(c, CodeType) and c.co_name == name]
        if not inside:
            raise LookupError(f"no function {function} in {filename}")
        found = inside[0]
    return found


def _swap(changed: dict[FunctionType, CodeType]) -> None:
    """Exchange the code of the functions, and drop cached views of the previous code."""
    for function, code in changed.items():
        function.__code__, changed[function] = code, function.__code__
    view: Any = importlib.import_module("warpwell.array.view")
    view._implementation.cache_clear()
    for name in ("calls", "words", "buffers"):
        for made in vars(importlib.import_module(f"warpwell.array.spans.{name}")).values():
            if hasattr(made, "cache_clear"):
                made.cache_clear()
