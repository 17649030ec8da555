"""walk: how often sampled warps of a kernel pass through each basic block, without running the kernel.

Only the statements that control flow depends on are carried out (`Program.control`): loop counters and what they are
compared with. The lanes of a warp that part meet again at the first block in the order of the text. A loop that counts
up or down by a constant is passed in one step, so its length costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .lanes import Lanes, Value
from .ptx import LOAD, STORE, Block, Program, Statement

WARP = 32
_DETAILED = 3
"""Visits of a block whose memory accesses are looked at."""
_CONTINUES = {
    "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_CONTRARY = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}


@dataclass
class Visits:
    """What a walk found.

    Attributes
    ----------
    count : ndarray of float, (blocks, warps)
        Times that each warp passes through each block.
    sectors : dict
        32-byte sectors that one execution of a load or store asks for, on average, by (block, place in it).
    assumed : bool
        Whether a branch depended on what is not known (data in device memory), so that a trip count was assumed.
    cut : bool
        Whether the walk ended at its limit: counts are too small.
    """

    count: NDArray[np.float64]
    sectors: dict[tuple[int, int], float] = field(default_factory=dict)
    assumed: bool = False
    cut: bool = False


def walk(program: Program, lanes: Lanes, *, trips: float = 8, limit: int = 20_000) -> Visits:
    """Follow lanes through a program.

    Parameters
    ----------
    program : Program
    lanes : Lanes
        Whole warps: a multiple of 32 threads.
    trips : float
        Trip count of a loop whose end depends on what is not known. Of two sides of such a branch, half of the lanes
        take each.
    limit : int
        Blocks to pass through at most.
    """
    return _Walk(program, lanes, trips).run(limit)


class _Walk:
    def __init__(self, program: Program, lanes: Lanes, trips: float) -> None:
        self.program = program
        self.lanes = lanes
        self.trips = trips
        self.end = len(program.blocks)
        self.visits = Visits(np.zeros((self.end, lanes.count // WARP)))
        self.at = np.zeros(lanes.count, np.int64)
        self.times = np.zeros((self.end, lanes.count), np.int64)
        self.steps = [0] * self.end
        self.history: dict[int, list[dict[str, Any]]] = {}
        self.asked: dict[tuple[int, int], list[float]] = {}

    def run(self, limit: int) -> Visits:
        """Go on until all lanes have ended."""
        for _ in range(limit):
            k = int(self.at.min(initial=self.end))
            if k == self.end:
                break
            self._step(k)
        else:
            self.visits.cut = True
        self.visits.sectors = {key: total / max(1.0, times) for key, (total, times) in self.asked.items()}
        return self.visits

    def _step(self, k: int) -> None:
        block, here = self.program.blocks[k], self.at == k
        mask = None if here.all() else here
        detailed = self.steps[k] < _DETAILED
        self.steps[k] += 1
        for place, statement in enumerate(block.statements if detailed else self.program.control[k]):
            if detailed and statement.kind in (LOAD, STORE):
                self._look(k, place, statement, here)
            self.lanes.run(statement, mask)
        self._count(k, here, 1)
        leaves = self._branch(k, block, here)
        if k in block.successors[:1] and not detailed:
            self._skip(k, block, here & ~leaves, mask)

    def _count(self, k: int, here: NDArray[np.bool_], times: int) -> None:
        self.visits.count[k] += times * here.reshape(-1, WARP).any(axis=1)
        self.times[k] += times * here

    def _branch(self, k: int, block: Block, here: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Move lanes on; return those that left the block (not those that a loop brings back to it)."""
        branch = block.branch
        if branch is None or branch.guard is None:
            self.at[here] = block.successors[0]
            return here
        held = self.lanes.operand(branch.guard, "pred")
        taken = held.data ^ branch.negated
        if held.known is not None and not held.known[here].all():
            taken = np.where(held.known, taken, self._guess(k, block))
            self.visits.assumed = True
        self.at[here] = np.where(taken, block.successors[0], block.successors[1])[here]
        return np.asarray(here & (self.at != k))

    def _guess(self, k: int, block: Block) -> NDArray[np.bool_]:
        """Say whether a branch is taken that depends on what is not known."""
        for body in sorted(self.program.loops.values(), key=len):
            inside = [successor in body for successor in block.successors]
            if k in body and inside[0] != inside[1]:
                over = self.times[k] % max(1, round(self.trips)) == 0
                return np.asarray(over ^ inside[0])
        return np.asarray(np.arange(self.lanes.count) % 2 == 0)

    def _look(self, k: int, place: int, statement: Statement, here: NDArray[np.bool_]) -> None:
        """Count the sectors that a load or store asks for."""
        if "global" not in statement.parts:
            return
        address = self.lanes.address(statement.operands[1 if statement.kind == LOAD else 0])
        # what is not known is scattered
        sector = address.data >> 5
        if address.known is not None:
            sector = np.where(address.known, sector, -2 - np.arange(self.lanes.count))
        rows = np.sort(np.where(here, sector, -1).reshape(-1, WARP), axis=1)
        distinct = (np.diff(rows, axis=1, prepend=-1) != 0) & (rows != -1)
        total = self.asked.setdefault((k, place), [0.0, 0.0])
        total[0] += float(distinct.sum()) * max(1, statement.nbytes // 32)
        total[1] += float(here.reshape(-1, WARP).any(axis=1).sum())

    # -- counted loops ------------------------------------------------------------------------------------------

    def _skip(self, k: int, block: Block, stays: NDArray[np.bool_], mask: Any) -> None:
        """Pass the rest of a loop of one block at once, where its counters go by constants."""
        held = {name: self.lanes.registers[name] for s in self.program.control[k] for name in s.writes}
        history = self.history.setdefault(k, [])
        history.append(held)
        del history[:-3]
        test = _test(block)
        if len(history) < 3 or test is None or not stays.any():
            return
        steps = {name: _step_of([h[name] for h in history], stays) for name in held}
        counters = {name: step for name, step in steps.items() if step is not None}
        if any(steps[name] is None and held[name].data.dtype != np.bool_ for name in held):
            return
        relation, operands, kind = test
        left, right = (self.lanes.operand(text, kind) for text in operands)
        if any(v.known is not None and not v.known[stays].all() for v in (left, right)):
            return
        zero = np.zeros(self.lanes.count, np.int64)
        slope = counters.get(operands[0], zero) - counters.get(operands[1], zero)
        if kind[0] == "u" and (left.data[stays].min() < 0 or right.data[stays].min() < 0):
            return
        rest = _rest((left.data - right.data)[stays], slope[stays], relation)
        times = int(rest.min()) - 1
        if times < 2:
            return
        for name, step in counters.items():
            old = self.lanes.registers[name]
            self.lanes.registers[name] = Value(np.where(stays, old.data + times * step, old.data), old.known)
        self._count(k, stays, times)
        history.clear()


def _test(block: Block) -> tuple[str, tuple[str, str], str] | None:
    """Return the comparison under which a loop of one block goes on, if it is a plain one."""
    branch = block.branch
    if branch is None or branch.guard is None:
        return None
    setters = [s for s in block.statements if branch.guard in s.writes]
    if len(setters) != 1 or setters[0].parts[0] != "setp" or len(setters[0].operands) != 3 or setters[0].guard:
        return None
    found = setters[0]
    relation = _CONTINUES.get(found.parts[1])
    after = block.statements[block.statements.index(found) :]
    if any(name in s.writes for s in after for name in found.operands[1:]) or found.type[0] not in "su":
        return None
    if relation is not None and branch.negated:
        relation = _CONTRARY.get(relation)
    elif relation is None and branch.negated and found.parts[1] == "eq":
        relation = "!="
    return None if relation is None else (relation, (found.operands[1], found.operands[2]), found.type)


def _step_of(values: list[Value], where: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    """Return by how much a register grows in each pass, if by the same twice."""
    if any(v.data.dtype != np.int64 or (v.known is not None and not v.known[where].all()) for v in values):
        return None
    first, second = values[1].data - values[0].data, values[2].data - values[1].data
    return np.asarray(second) if (first == second)[where].all() else None


def _rest(difference: NDArray[np.int64], slope: NDArray[np.int64], relation: str) -> NDArray[np.int64]:
    """Return after how many passes ``difference + passes * slope`` no longer has the relation to 0."""
    never = np.int64(1) << 60
    if relation == "!=":
        exact = (slope != 0) & (difference % np.where(slope == 0, 1, slope) == 0)
        passes = np.where(exact, -difference // np.where(slope == 0, 1, slope), never)
        return np.asarray(np.where(passes > 0, passes, never))
    if relation in (">", ">="):
        difference, slope, relation = -difference, -slope, {">": "<", ">=": "<="}[relation]
    safe = np.maximum(slope, 1)
    passes = -(difference // safe) if relation == "<" else -difference // safe + 1
    return np.asarray(np.where(slope > 0, passes, never))
