"""`virtual_copy`: a device function whose blocks are numbered by the workers that claim them, not by the hardware.

The copy is the same code with other names in reach: where the original, or a device function that it calls, says
``grid`` or ``block_index``, the copy's name stands for the virtual index. No source is needed, and nothing is
rewritten, so what the kernel computes is the same bit for bit.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

from .. import errors
from . import atomics, block
from .device import device

_VIRTUAL: dict[Any, Any] = {atomics.grid: block.virtual_grid, block.block_index: block.virtual_block_index}
_WHOLE_GRID = ("blockIdx", "gridDim", "grid", "gridsize", "cg")
"""Attributes of `numba.cuda` that tell a function where it is in the hardware's grid."""


def virtual_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a device function that takes its place from the virtual block.

    Raises
    ------
    TransformError
        The function names the hardware's grid itself; ``construct`` and ``line`` say where.
    """
    copies: dict[int, Any] = {}
    copy = _copy(function, copies)
    return device(copy) if copy is function else copy


def returns_early(function: Callable[..., Any]) -> int | None:
    """Return the line of a return before, or in a loop with, a barrier that other threads may reach; None without."""
    barriers: list[int] = []
    returns: list[tuple[int, int | None]] = []
    loops: list[tuple[int, int]] = []
    code = function.__code__
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_") and instruction.argval == "barrier":
            barriers.append(instruction.offset)
        elif instruction.opname.startswith("RETURN_"):
            line = instruction.positions.lineno if instruction.positions else None
            returns.append((instruction.offset, line))
        elif "JUMP" in instruction.opname and isinstance(instruction.argval, int):
            if instruction.argval < instruction.offset:
                loops.append((instruction.argval, instruction.offset))
    for offset, line in returns:
        if any(b > offset for b in barriers):
            return line or code.co_firstlineno
        if any(start <= offset <= end and start <= b for start, end in loops for b in barriers if b <= end):
            return line or code.co_firstlineno
    return None


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """Return what stands for `value` in a copy: itself where nothing below it asks for its place."""
    if not isinstance(value, types.FunctionType):
        _refuse_compiled(value)
        return value
    if value in _VIRTUAL:
        return _VIRTUAL[value]
    if id(value) in copies:
        return copies[id(value)]
    copies[id(value)] = value  # a function that calls itself is, so far, its own copy
    if value.__module__ and value.__module__.startswith(f"{__package__}."):
        return value  # a primitive, whose body is the target's
    _refuse_hardware(value)
    names = set(_names(value.__code__))
    scope = {n: value.__globals__[n] for n in names if n in value.__globals__}
    changed = {n: new for n, old in scope.items() if (new := _inner(old, names, copies)) is not old}
    cells = tuple(_cell(cell, names, copies) for cell in value.__closure__ or ())
    if not changed and all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
        return value
    copy = types.FunctionType(
        value.__code__, {**value.__globals__, **changed}, value.__name__, value.__defaults__, cells
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    copy.__module__ = value.__module__
    copies[id(value)] = copy
    return device(copy)


def _inner(value: Any, names: set[str], copies: dict[int, Any]) -> Any:
    """Return what stands for `value` in the copy of a function that says `names`."""
    return _module(value, names, copies) if isinstance(value, types.ModuleType) else _copy(value, copies)


def _module(module: types.ModuleType, names: set[str], copies: dict[int, Any]) -> Any:
    """Return a module that says the virtual index where this one says the hardware's.

    Only `names` are looked at, and by asking: a module may import them no sooner, as `warpwell` itself does.
    """
    said = {n: getattr(module, n, None) for n in names.intersection(dir(module))}
    changed = {n: _VIRTUAL[v] for n, v in said.items() if isinstance(v, types.FunctionType) and v in _VIRTUAL}
    if not changed:
        return module
    shadow = copies.get(id(module))
    if shadow is None:
        shadow = copies[id(module)] = types.ModuleType(module.__name__)
        vars(shadow).update(vars(module))
    vars(shadow).update(changed)
    return shadow


def _cell(cell: Any, names: set[str], copies: dict[int, Any]) -> Any:
    if not _bound(cell):
        return cell
    new = _inner(cell.cell_contents, names, copies)
    return cell if new is cell.cell_contents else types.CellType(new)


def _bound(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where the name has no value yet
    except ValueError:
        return False
    return True


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _refuse_compiled(value: Any) -> None:
    function = getattr(value, "py_func", None)
    if isinstance(function, types.FunctionType):
        _refuse_hardware(function)


def _refuse_hardware(function: types.FunctionType) -> None:
    """Raise where a function names the hardware's grid through `numba.cuda`."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    reach = {**function.__globals__, **{name: cell.cell_contents for name, cell in cells if _bound(cell)}}
    previous = ""
    for instruction in dis.get_instructions(function.__code__):
        if instruction.argval in _WHOLE_GRID and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            owner = reach.get(previous)
            if getattr(owner, "__name__", "") == "numba.cuda":
                line = instruction.positions.lineno if instruction.positions else None
                raise errors.TransformError(
                    f"{function.__name__!r} uses cuda.{instruction.argval} (line {line} of "
                    f"{function.__code__.co_filename}): blocks that workers claim have no place in the hardware's "
                    f"grid, so it runs whole and cannot be preempted; use ww.grid or ww.block_index",
                    construct=f"cuda.{instruction.argval}",
                    line=line,
                )
        previous = str(instruction.argval)
