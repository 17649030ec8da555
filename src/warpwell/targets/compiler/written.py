"""Which parameters of a kernel it may write: schedulers let tasks that only read an array run at the same time.

The analysis follows each parameter through Numba's intermediate representation of the function, without types: through
names, views, loops and calls of device functions. A use that it does not know counts as a write.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numba.core import compiler, ir

_READ_ATTRIBUTES = frozenset(("size", "shape", "ndim", "dtype", "itemsize", "nbytes", "strides"))
_READ_FUNCTIONS = (len, abs, min, max, int, float, bool, range, print)
_PURE = frozenset(("binop", "unary", "cast", "exhaust_iter", "phi"))
"""Operations whose result is new or, for the last three, the operand: none writes it."""
_DERIVED = frozenset(("build_tuple", "build_list", "getiter", "iternext", "pair_first", "pair_second"))
_OWN = __package__.partition(".")[0]

_results: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], frozenset[int]]] = weakref.WeakKeyDictionary()

Aliases = dict[int, int]
"""Parameters that a variable may refer to, each with the number of dimensions of the view."""


def written_arguments(kernel: Any, arguments: Sequence[Any]) -> list[bool]:
    """Return, for each argument of a launch, whether the kernel may write it."""
    declared = getattr(kernel, "parameters", None)  # CUDA C++
    if declared is not None:
        return [not parameter.constant for parameter in declared]
    function = getattr(kernel, "function", None)
    if not isinstance(function, types.FunctionType):
        return [True] * len(arguments)
    written = written_parameters(function, tuple(_dimensions(value) for value in arguments))
    return [k in written for k in range(len(arguments))]


def _dimensions(value: Any) -> int:
    """Return the dimensions of an array of numbers; of records, more than an index can have: a record is a view."""
    dtype = getattr(value, "dtype", None)
    return 99 if getattr(dtype, "names", None) else int(getattr(value, "ndim", 0))


def written_parameters(function: Callable[..., Any], dimensions: tuple[int, ...]) -> frozenset[int]:
    """Return the positions of parameters that a device function may write.

    Parameters
    ----------
    function : function
    dimensions : tuple of int
        Dimensions of each argument.
    """
    results = _results.setdefault(function, {})
    if dimensions not in results:
        everything = frozenset(range(len(dimensions)))
        results[dimensions] = everything  # a recursive call counts as a write
        code = function.__code__
        if code.co_argcount == len(dimensions) and not (code.co_kwonlyargcount or code.co_flags & _VARIABLE):
            try:
                results[dimensions] = _Function(compiler.run_frontend(function), dimensions).written()
            except Exception:  # the compiler refuses the function, and says why when it is launched
                results[dimensions] = everything
    return results[dimensions]


_VARIABLE = 0x04 | 0x08
"""Flags of a function that has ``*args`` or ``**options``."""


class _Function:
    def __init__(self, body: Any, dimensions: tuple[int, ...]) -> None:
        self._dimensions = dimensions
        self._statements = [statement for block in body.blocks.values() for statement in block.body]
        self._definitions: dict[str, list[Any]] = {}
        for statement in self._statements:
            if isinstance(statement, ir.Assign):
                self._definitions.setdefault(statement.target.name, []).append(statement.value)
        self._aliases: dict[str, Aliases] = {}
        self._written: set[int] = set()

    def written(self) -> frozenset[int]:
        before = None
        while before != (before := self._state()):
            for statement in self._statements:
                self._visit(statement)
        return frozenset(self._written)

    def _state(self) -> tuple[int, int]:
        return len(self._written), sum(1 + sum(views.values()) for views in self._aliases.values())

    def _of(self, variable: Any) -> Mapping[int, int]:
        return self._aliases.get(variable.name, {})

    def _add(self, target: Any, views: Mapping[int, int]) -> None:
        if views:
            known = self._aliases.setdefault(target.name, {})
            for parameter, dimensions in views.items():
                known[parameter] = max(dimensions, known.get(parameter, 0))

    def _visit(self, statement: Any) -> None:
        if isinstance(statement, ir.Assign):
            self._assign(statement.target, statement.value)
        elif isinstance(statement, ir.SetItem | ir.StaticSetItem):
            self._written.update(self._of(statement.target))
        elif not isinstance(statement, ir.Branch | ir.Return | ir.Jump | ir.Del | ir.Print | ir.Raise | ir.StaticRaise):
            for variable in statement.list_vars():
                self._written.update(self._of(variable))

    def _assign(self, target: Any, value: Any) -> None:
        if isinstance(value, ir.Arg):
            self._add(target, {value.index: self._dimensions[value.index]})
        elif isinstance(value, ir.Var):
            self._add(target, self._of(value))
        elif isinstance(value, ir.Expr):
            self._expression(target, value)

    def _expression(self, target: Any, value: Any) -> None:
        operands = [variable for variable in value.list_vars() if self._of(variable)]
        if not operands:
            return
        if value.op in ("getitem", "static_getitem"):
            count = self._index_count(value)
            views = self._of(value.value)
            self._add(target, {k: n - count for k, n in views.items() if n > count})
            if value.op == "getitem":
                self._written.update(self._of(value.index))
        elif value.op == "getattr":
            if value.attr not in _READ_ATTRIBUTES:
                self._add(target, self._of(value.value))
        elif value.op == "call":
            self._call(target, value)
        elif value.op == "inplace_binop":
            self._written.update(self._of(value.lhs))
        elif value.op in _PURE or value.op in _DERIVED:
            if value.op not in ("binop", "unary"):
                for variable in operands:
                    self._add(target, self._of(variable))
        else:
            for variable in operands:
                self._written.update(self._of(variable))

    def _index_count(self, value: Any) -> int:
        """Return by how many dimensions an index reduces a view at least."""
        if value.op == "static_getitem":
            index = value.index
            parts = index if isinstance(index, tuple) else (index,)
            return len(parts) if all(isinstance(part, int) for part in parts) else 0
        found = self._definitions.get(value.index.name, [])
        if len(found) == 1 and isinstance(found[0], ir.Expr) and found[0].op == "build_tuple":
            return len(found[0].items) if all(self._is_number(item.name) for item in found[0].items) else 0
        return 1 if self._is_number(value.index.name) else 0

    def _is_number(self, name: str) -> bool:
        """Return True unless a variable may be a slice or an ellipsis. Kernels take neither as arguments."""
        names, seen = [name], {name}
        while names:
            for value in self._definitions.get(names.pop(), ()):
                if isinstance(value, ir.Const | ir.Global | ir.FreeVar) and not isinstance(value.value, int):
                    return False
                if isinstance(value, ir.Expr) and value.op == "build_slice":
                    return False
                if isinstance(value, ir.Expr) and value.op == "call" and self._value(value.func) is slice:
                    return False
                if isinstance(value, ir.Var) and value.name not in seen:
                    names.append(value.name)
                    seen.add(value.name)
        return True

    def _value(self, variable: Any) -> Any:
        """Return the object that a variable names; None if that is unknown."""
        found = self._definitions.get(variable.name, [])
        if len(found) != 1:
            return None
        if isinstance(found[0], ir.Global | ir.FreeVar):
            return found[0].value
        if isinstance(found[0], ir.Var):
            return self._value(found[0])
        if isinstance(found[0], ir.Expr) and found[0].op == "getattr":
            module = self._value(found[0].value)
            return getattr(module, found[0].attr, None) if isinstance(module, types.ModuleType) else None
        return None

    def _call(self, target: Any, value: Any) -> None:
        function = self._value(value.func)
        function = getattr(function, "py_func", function)
        if any(function is known for known in _READ_FUNCTIONS):
            return
        written: frozenset[int] | range = range(len(value.args))
        if isinstance(function, types.FunctionType) and function.__module__.partition(".")[0] != _OWN:
            views = [self._of(argument) for argument in value.args]
            if not (value.kws or value.vararg):
                written = written_parameters(function, tuple(max(view.values(), default=0) for view in views))
        for k, argument in enumerate(value.args):
            if k in written:
                self._written.update(self._of(argument))
            self._add(target, self._of(argument))
        rest = [value.func, *(variable for _, variable in value.kws), *([value.vararg] if value.vararg else [])]
        for variable in rest:
            self._written.update(self._of(variable))
