"""`virtual_copy`: a device function whose blocks are numbered by the workers that claim them, not by the hardware.

The copy is the same code with other global variables: if the original, or a device function that it calls, names
``grid`` or ``block_index``, this name refers to the virtual index in the copy. No source is needed, and nothing is
rewritten, so the results of the kernel are the same bit for bit.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ... import errors
from .. import primitives
from ..device import device, registers_wanted
from .bytecode import (
    ABSENT,
    VERSIONED,
    attributes,
    copied,
    functions_of,
    instructions_of,
    is_primitive,
    line_of,
    names_of,
    value_in,
)

_VIRTUAL: dict[Any, Any] = {
    primitives.grid: primitives.virtual_grid,
    primitives.block_index: primitives.virtual_block_index,
}
_OWN = __package__.partition(".")[0]
_WHOLE_GRID = ("blockIdx", "gridDim", "grid", "gridsize", "cg")
"""Attributes of `numba.cuda` that return a position in the hardware's grid."""


def virtual_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a device function that reads its position from the virtual block.

    Raises
    ------
    TransformError
        The function names the hardware's grid itself; ``construct`` and ``line`` give the position.
    """
    copy = _Copier({**_VIRTUAL, primitives.failed: primitives.launch_failed}, refuses=True).copy(function)
    return device(copy) if copy is function else copy


def launch_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a device function in which `failed` reads its own launch; or the function without it."""
    copy: Callable[..., Any] = _Copier({primitives.failed: primitives.launch_failed}, refuses=False).copy(function)
    return copy


def returns_early(function: Callable[..., Any]) -> int | None:
    """Return the line of a return before, or in a loop with, a barrier that other threads may reach; None without."""
    barriers: list[int] = []
    returns: list[dis.Instruction] = []
    loops: list[tuple[int, int]] = []
    instructions: list[dis.Instruction] = []
    for instruction, found, _ in instructions_of(function):
        instructions.append(instruction)
        if primitives.barrier in functions_of(found):
            barriers.append(instruction.offset)
        elif instruction.opname.startswith("RETURN_"):
            returns.append(instruction)
        elif "JUMP" in instruction.opname and isinstance(instruction.argval, int):
            if instruction.argval < instruction.offset:
                loops.append((instruction.argval, instruction.offset))
    waiting = [loop for loop in loops if any(loop[0] <= b <= loop[1] for b in barriers)]
    early = [r for r in returns if any(b > r.offset for b in barriers) or any(a <= r.offset <= b for a, b in waiting)]
    early += [found for loop in waiting for found in _moved_returns(instructions, *loop)]
    if not early:
        return None
    return line_of(early[0]) or function.__code__.co_firstlineno


def _moved_returns(instructions: Sequence[dis.Instruction], start: int, end: int) -> Iterator[dis.Instruction]:
    """Yield the returns of a loop's body that Python 3.12 puts after the loop.

    A branch leads out of the loop to these returns, and their text is indented like the body, unlike code after the
    loop.
    """
    inside = [(line, i) for i in instructions if start <= i.offset <= end and (line := line_of(i)) is not None]
    first = min((line for line, _ in inside), default=0)
    body = [i for line, i in inside if line > first]
    indent = min((_column(i) for i in body), default=0)
    targets = {i.argval for i in body if "JUMP" in i.opname and isinstance(i.argval, int) and i.argval > end}
    for target in targets:
        for instruction in instructions:
            if instruction.offset < target:
                continue
            if instruction.opname.startswith("RETURN_") and _column(instruction) >= indent:
                yield instruction
            if instruction.opname.startswith("RETURN_") or "JUMP" in instruction.opname:
                break


def _column(instruction: dis.Instruction) -> int:
    return (instruction.positions.col_offset if instruction.positions else None) or 0


class _Copier:
    """Copies device functions with other global variables.

    Parameters
    ----------
    instead : dict
        Replacements of functions in the copy.
    refuses : bool
        Whether functions that name the hardware's grid are refused.
    """

    def __init__(self, instead: dict[Any, Any], *, refuses: bool) -> None:
        self._instead = instead
        self._refuses = refuses
        self._copies: dict[Any, Any] = {}

    def copy(self, value: Any) -> Any:
        """Return the object for `value` in a copy: itself if no function below it is replaced."""
        copies = self._copies
        if not isinstance(value, types.FunctionType):
            if self._refuses:
                _refuse_compiled(value)
            return value
        if value in self._instead:
            return self._instead[value]
        if id(value) in copies:
            return copies[id(value)]
        copies[id(value)] = value  # a function that calls itself is, so far, its own copy
        if is_primitive(value):
            return value
        if self._refuses:
            _refuse_hardware(value)
        names = set(names_of(value.__code__))
        scope = {n: value.__globals__[n] for n in names if n in value.__globals__}
        changed = {n: new for n, old in scope.items() if (new := self._inner(old, names)) is not old}
        cells = tuple(self._cell(cell, names) for cell in value.__closure__ or ())
        if not changed and all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
            return value
        copies[id(value)] = copied(value, {**value.__globals__, **changed}, cells)
        return device(copies[id(value)])

    def _inner(self, value: Any, names: set[str]) -> Any:
        """Return the replacement of `value` in the copy of a function that names `names`."""
        return self._module(value, names) if isinstance(value, types.ModuleType) else self.copy(value)

    def _module(self, module: types.ModuleType, names: set[str]) -> Any:
        """Return a module whose functions and inner modules are replaced as in the copy. Only `names` are checked."""
        copies = self._copies
        key = id(module), frozenset(names)
        if key in copies:
            return copies[key]
        copies[key] = module  # a module that names itself is, so far, its own copy
        if module.__name__.partition(".")[0] in VERSIONED - {_OWN}:
            return module  # these modules do not use block indices
        kinds = types.FunctionType, types.ModuleType
        found = {n: v for n, v in attributes(module, names).items() if isinstance(v, kinds)}
        changed = {n: new for n, v in found.items() if (new := self._inner(v, names)) is not v}
        if changed:
            copies[key] = types.ModuleType(module.__name__)
            vars(copies[key]).update({**vars(module), **changed})
        return copies[key]

    def _cell(self, cell: Any, names: set[str]) -> Any:
        value = value_in(cell)
        new = value if value is ABSENT else self._inner(value, names)
        return cell if new is value else types.CellType(new)


def registers(function: Callable[..., Any]) -> int:
    """Return the maximum of registers per thread that a device function, or a function that it calls, wants, or 0."""
    return max(map(registers_wanted, functions_of(function)), default=0)


def _refuse_compiled(value: Any) -> None:
    function = getattr(value, "py_func", None)
    if isinstance(function, types.FunctionType):
        _refuse_hardware(function)


def _refuse_hardware(function: types.FunctionType) -> None:
    """Raise where a function names the hardware's grid through `numba.cuda`."""
    cuda = sys.modules.get("numba.cuda")
    hardware = {id(value): name for name in _WHOLE_GRID if (value := getattr(cuda, name, None)) is not None}
    for instruction, found, owner in instructions_of(function):
        name = hardware.get(id(found))
        if name is None and getattr(owner, "__name__", "") == "numba.cuda" and instruction.argval in _WHOLE_GRID:
            name = instruction.argval
        if name is not None:
            line = line_of(instruction)
            raise errors.TransformError(
                f"{function.__name__!r} uses cuda.{name} (line {line} of {function.__code__.co_filename}): blocks "
                "that workers claim have no position in the hardware's grid, so it runs whole and cannot be "
                "preempted; use gpu.grid or gpu.block_index",
                construct=f"cuda.{name}",
                line=line,
            )
