"""`Snapshot`: a device function that is bound to the present values of the variables that it names.

A compiler reads global variables, free variables and attributes of modules once, and its code contains their values. A
snapshot copies a function, and the device functions that it calls, with the values of one moment, so that all
code that is compiled from the copy has the same values. `is_current` reports whether the variables still have them.
Equal values give the same copy: when a variable returns to an earlier value, nothing is compiled.

Nothing here imports a compiler.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ... import errors
from ..device import device, is_device, linked_functions
from .bytecode import ABSENT, VERSIONED, attributes, copied, names_of, value_in

MAX_COPIED_BYTES = 10**6
"""Size limit of an array whose content is copied and compared, in bytes: Numba reads larger global arrays in place."""

_Path = tuple[str, ...]
"""Names of attributes that code reads, one after the other, from a variable."""

_copies: weakref.WeakKeyDictionary[types.FunctionType, dict[Any, types.FunctionType]] = weakref.WeakKeyDictionary()
"""The copies of each device function by the key of their values."""

_compiled: weakref.WeakKeyDictionary[types.FunctionType, Any] = weakref.WeakKeyDictionary()
"""The key of the first values of each function that Numba compiles by itself, without Warpwell."""


class Snapshot:
    """A device function with the values of the variables that it and its helpers name.

    Parameters
    ----------
    function : function

    Attributes
    ----------
    function : function
        The copy that is bound to the values. It is the original if that names only objects of installed packages.

    Raises
    ------
    CompileError
        A variable of a helper that Numba compiles by itself (``numba.njit``) has changed.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._variables: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._open: dict[int, types.FunctionType] = {}
        self._open_modules: set[int] = set()
        self.function, _ = self._bind(function)

    def is_current(self) -> bool:
        """Return True if all variables still have the values of the snapshot."""
        for scope, name, value in self._variables:
            if scope.get(name, ABSENT) is not value:
                return False
        for cell, value in self._cells:
            if value_in(cell) is not value:
                return False
        for array, content in self._contents:
            if _content(array) != content:
                return False
        return True

    def _bind(self, function: types.FunctionType) -> tuple[types.FunctionType, Any]:
        """Return the copy of a device function for the present values of its variables, and the key of the copy."""
        if id(function) in self._open:
            # A function that calls itself is its own copy. A longer cycle gets a new copy each time: the key of this
            # function is not known yet.
            innermost = next(reversed(self._open)) == id(function)
            return self._open[id(function)], "recursion" if innermost else object()
        scope = {"__name__": function.__module__, "__builtins__": function.__globals__.get("__builtins__", builtins)}
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copy = self._open[id(function)] = copied(function, scope, cells)
        try:
            key, is_fixed = self._fill(function, scope, cells)
        finally:
            del self._open[id(function)]
        copies = _copies.setdefault(function, {})
        if key not in copies:
            # the first copy may be the function itself, if its variables are never assigned again
            copies[key] = function if is_fixed and not copies else copy
        return _as_device(copies[key]), id(copies[key])

    def _fill(self, function: types.FunctionType, scope: dict[str, Any], cells: tuple[Any, ...]) -> tuple[Any, bool]:
        """Store the present values in the variables of a copy; return their key, and whether all values are final."""
        names = names_of(function.__code__)
        keys: list[Any] = []
        is_fixed = True
        free = dict(
            zip(function.__code__.co_freevars, zip(function.__closure__ or (), cells, strict=True), strict=True)
        )
        for (name, is_free), paths in _loads(function.__code__).items():
            if is_free:
                if name not in free:
                    continue  # a local variable that an inner function reads
                cell, new = free[name]
                value = value_in(cell)
                if value is ABSENT:
                    continue
                self._cells.append((cell, value))
                new.cell_contents, key = self._value(value, paths, names)
            else:
                value = function.__globals__.get(name, ABSENT)
                self._variables.append((function.__globals__, name, value))
                new, key = self._value(value, paths, names)
                if value is not ABSENT:
                    scope[name] = new
            keys.append((name, key))
            is_fixed = is_fixed and _is_fixed(value)
        return tuple(keys), is_fixed

    def _value(self, value: Any, paths: Iterable[_Path], names: tuple[str, ...]) -> tuple[Any, Any]:
        """Return the value of a variable in a copy, and the key of the value."""
        if isinstance(value, types.ModuleType):
            return self._module(value, list(paths), names)
        if isinstance(value, types.FunctionType) and not _is_own(value):
            return self._bind(value) if is_device(value) else self._helper(value, value)
        if isinstance(inner := getattr(value, "py_func", None), types.FunctionType):
            return self._helper(value, inner)
        if isinstance(value, tuple):
            found = [self._value(item, (), names) for item in value]
            items = [item for item, _ in found]
            same = all(new is old for new, old in zip(items, value, strict=True))
            make = getattr(type(value), "_make", tuple)
            return value if same else make(items), (type(value), *(key for _, key in found))
        content = _content(value)
        if isinstance(value, np.ndarray | np.void) and content[1] is None:
            self._contents.append((value, content))
            return value.copy(), content
        return value, content

    def _module(self, module: types.ModuleType, paths: list[_Path], names: tuple[str, ...]) -> tuple[Any, Any]:
        """Return a module that has the present values of the attributes that code reads, and their key."""
        if module.__name__.partition(".")[0] in VERSIONED or id(module) in self._open_modules:
            return module, id(module)
        read: dict[str, list[_Path]] = {}
        if not all(paths):  # the module itself is assigned or passed on: any name may be read from it
            read = {name: [()] for name in attributes(module, names)}
        for path in filter(None, paths):
            read.setdefault(path[0], []).append(path[1:])
        self._open_modules.add(id(module))
        copy = types.ModuleType(module.__name__)
        keys: list[Any] = [id(module)]
        for name, tails in read.items():
            value = getattr(module, name, ABSENT)  # a module may import the attribute only now
            if value is ABSENT or name in vars(module):
                self._variables.append((vars(module), name, value))
            new, key = self._value(value, tails, names)
            keys.append((name, key))
            if value is not ABSENT:
                setattr(copy, name, new)
        self._open_modules.discard(id(module))
        return copy, tuple(keys)

    def _helper(self, value: Any, function: types.FunctionType) -> tuple[Any, Any]:
        """Return a function that Numba compiles by itself, unless its variables have changed since it was first met."""
        if id(function) in self._open or _is_own(function):
            return value, id(value)
        self._open[id(function)] = function
        try:
            key, _ = self._fill(function, {}, tuple(types.CellType() for _ in function.__closure__ or ()))
        finally:
            del self._open[id(function)]
        first = _compiled.setdefault(function, key)
        changed = [name for (name, before), (_, now) in zip(first, key, strict=True) if before != now]
        if changed:
            raise errors.CompileError(
                f"{function.__name__!r} ({function.__code__.co_filename}, line {function.__code__.co_firstlineno}) is "
                f"compiled with another value of {', '.join(map(repr, changed))} than the variable has: decorate it "
                f"with @gpu.function, or pass the value as an argument"
            )
        return value, id(value)


def _as_device(function: types.FunctionType) -> types.FunctionType:
    return function if is_device(function) else device(function)


def _is_own(function: types.FunctionType) -> bool:
    """Return True for functions whose variables are never assigned again; a copy would not be linked."""
    return (function.__module__ or "").startswith("warpwell.") or function in linked_functions()


def _is_fixed(value: Any) -> bool:
    """Return True for a builtin, and for a module, function or class of a package whose version is in cache keys."""
    if value is ABSENT:
        return True
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in VERSIONED
    is_code = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
    return is_code and (value.__module__ or "").partition(".")[0] in VERSIONED


def _content(value: Any) -> tuple[Any, ...]:
    """Return a key that is equal for values that compile to the same code."""
    kind = type(value)
    if kind in (int, bool, str, bytes):
        return kind, None, value
    if kind in (float, complex):
        return kind, None, repr(value)  # zeros with another sign differ, and NaN equals itself
    if isinstance(value, np.generic):
        return kind, None, value.dtype, value.tobytes()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.nbytes <= MAX_COPIED_BYTES:
        return kind, None, value.dtype, value.shape, value.tobytes()
    return kind, _Same(value)


class _Same:
    """A key that is equal for one object alone, which it keeps alive."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, key: object) -> bool:
        return isinstance(key, _Same) and key._value is self._value


_Variable = tuple[str, bool]
"""The name of a variable that code reads, and whether it is a free variable."""


@functools.lru_cache(maxsize=4096)
def _loads(code: types.CodeType) -> dict[_Variable, tuple[_Path, ...]]:
    """Return the global and free variables that code reads, each with the attributes that are read from it."""
    found: dict[_Variable, dict[_Path, None]] = {}
    for variable, path in _paths(code):
        found.setdefault(variable, {})[path] = None
    return {variable: tuple(paths) for variable, paths in found.items()}


def _paths(code: types.CodeType) -> Iterator[tuple[_Variable, _Path]]:
    variable: _Variable | None = None
    path: list[str] = []
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        if operation in ("LOAD_ATTR", "LOAD_METHOD") and variable:
            path.append(instruction.argval)
        elif operation not in ("PUSH_NULL", "CACHE", "EXTENDED_ARG"):
            if variable:
                yield variable, tuple(path)
            is_load = operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
            variable, path = (instruction.argval, operation == "LOAD_DEREF") if is_load else None, []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _paths(constant)
