"""Names and objects in the code of a function; functions as bytes.

Nothing here imports a compiler.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

VERSIONED = {"warpwell", "numba", "numpy", "llvmlite", *sys.stdlib_module_names}
"""Packages whose versions are in the name of the cache's folder."""


def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of variables and attributes in code and in its inner functions, each once."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(names_of(constant)))
    return tuple(found)


def attributes(module: types.ModuleType, names: Iterable[str]) -> dict[str, Any]:
    """Return those of `names` that a module has, in the order of the alphabet.

    A module may import a name when it is first read, as `warpwell` does, so each name is read.
    """
    present = {*vars(module), *dir(module)}
    return {name: getattr(module, name, None) for name in sorted(present.intersection(names))}


ABSENT: Any = object()
"""The value of a name that a scope does not define: a builtin, or an error that the compiler reports."""


def value_in(cell: Any) -> Any:
    """Return the value in a closure's cell, or `ABSENT`."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def copied(function: types.FunctionType, scope: dict[str, Any], cells: tuple[Any, ...]) -> types.FunctionType:
    """Return a function of the same code with other global and free variables."""
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(copy, function)
    del copy.__wrapped__  # type: ignore[attr-defined]
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def instructions_of(function: Any) -> Iterator[tuple[dis.Instruction, Any, Any]]:
    """Yield the instructions of a function, each with the object that it names, if any, and the module it is in."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    reach = {**function.__globals__, **{name: value for name, cell in cells if (value := value_in(cell)) is not ABSENT}}
    owner: Any = None
    for instruction in dis.get_instructions(function.__code__):
        found = None
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if isinstance(owner, types.ModuleType):
                found = getattr(owner, instruction.argval, None)
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
            owner, found = None, reach.get(instruction.argval)
        else:
            owner = None
        yield instruction, found, owner
        owner = found


def line_of(instruction: dis.Instruction) -> int | None:
    """Return the source line of an instruction, or None if it is unknown."""
    return instruction.positions.lineno if instruction.positions else None


def functions_of(value: Any) -> list[types.FunctionType]:
    """Return a function and the functions that it calls, directly or not; primitives call none."""
    found: dict[types.FunctionType, None] = {}

    def visit(value: Any) -> None:
        value = getattr(value, "py_func", value)
        if isinstance(value, types.FunctionType) and value not in found:
            found[value] = None
            if not is_primitive(value):
                for _, named, _ in instructions_of(value):
                    visit(named)

    visit(value)
    return list(found)


def is_primitive(function: types.FunctionType) -> bool:
    """Return True if each target has its own body of a function."""
    return (function.__module__ or "").startswith("warpwell.targets.")


@functools.cache
def cloudpickle() -> Any:
    """Return the package cloudpickle, or the copy in Numba: devices of this process need no extra."""
    try:
        import cloudpickle as found
    except ImportError:
        from numba import cloudpickle as found
    return found
