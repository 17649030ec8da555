"""Which parameters of a kernel it may write: schedulers let tasks that only read an array run at the same time.

The analysis follows each parameter through Numba's intermediate representation of the function, without types: through
names, views, loops and calls of device functions. An unknown use counts as a write.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numba.core import compiler, ir

_READ_ATTRIBUTES = frozenset(("size", "shape", "ndim", "dtype", "itemsize", "nbytes", "strides"))
_READ_FUNCTIONS = (len, abs, min, max, int, float, bool, range, print)
_SELECTIONS = frozenset(("cast", "exhaust_iter", "getiter", "iternext", "pair_first", "pair_second", "phi"))
"""Operations whose result is an operand or an item of the operand."""
_ADDRESSES = frozenset(("ctypes", "data"))
"""Attributes with the address of an array: arithmetic on addresses is not followed."""
_MANY = 99
"""Dimensions of records, tuples and values of unknown dimensions: more than indices of a kernel remove."""
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
    """Return the dimensions of an array, at least 1: ``x[...]`` is a view. 0 for a number; `_MANY` if unknown."""
    if isinstance(value, int | float | complex | np.number | np.bool_):
        return 0
    shape = getattr(value, "shape", None)
    has_records = getattr(getattr(value, "dtype", None), "names", None)
    return _MANY if shape is None or has_records else max(1, len(shape))


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
        results[dimensions] = frozenset(range(len(dimensions)))  # a recursive call counts as a write
        code = function.__code__
        if code.co_argcount == len(dimensions) and not (code.co_kwonlyargcount or code.co_flags & _VARIABLE):
            with contextlib.suppress(Exception):  # the launch reports why the compiler refuses the function
                results[dimensions] = _Function(compiler.run_frontend(function), dimensions).written()
    return results[dimensions]


_VARIABLE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class _Function:
    """The analysis of one function for arguments of given dimensions."""

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
            bases = self._aliases.setdefault(target.name, {})
            for parameter, dimensions in views.items():
                bases[parameter] = max(dimensions, bases.get(parameter, 0))

    def _visit(self, statement: Any) -> None:
        if isinstance(statement, ir.Assign):
            self._assign(statement.target, statement.value)
        elif isinstance(statement, ir.SetItem | ir.StaticSetItem):
            views = self._of(statement.target)
            self._written.update(views)
            if _MANY in views.values():  # a list may keep the value
                self._add(statement.target, self._of(statement.value))
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
            self._add(target, {k: min(n - count, _MANY) for k, n in views.items() if n > count})
            if value.op == "getitem":
                self._written.update(self._of(value.index))
        elif value.op == "getattr":
            if value.attr in _ADDRESSES:
                self._written.update(self._of(value.value))
            elif value.attr not in _READ_ATTRIBUTES:
                self._add(target, self._of(value.value))
        elif value.op == "call":
            self._call(target, value)
        elif value.op == "inplace_binop":
            self._written.update(self._of(value.lhs))
        elif value.op in ("build_tuple", "build_list") or (value.op == "binop" and value.fn is operator.add):
            for variable in operands:
                views = self._of(variable)
                if value.op != "binop" or all(_MANY in self._of(side).values() for side in (value.lhs, value.rhs)):
                    self._add(target, dict.fromkeys(views, _MANY))  # tuples that are joined
        elif value.op in _SELECTIONS:
            for variable in operands:
                self._add(target, self._of(variable))
        elif value.op not in ("binop", "unary"):
            for variable in operands:
                self._written.update(self._of(variable))

    def _index_count(self, value: Any) -> int:
        """Return the minimum number of dimensions that an index removes; negative if it may add dimensions."""
        if value.op == "static_getitem":
            parts = value.index if isinstance(value.index, tuple) else (value.index,)
            removed = [1 if isinstance(part, int) else -(part is None) for part in parts]
        else:
            found = self._definitions.get(value.index.name, [])
            is_tuple = len(found) == 1 and isinstance(found[0], ir.Expr) and found[0].op == "build_tuple"
            removed = [self._removed(item.name) for item in (found[0].items if is_tuple else [value.index])]
        return len(removed) if all(count == 1 for count in removed) else sum(count for count in removed if count < 0)

    def _removed(self, name: str) -> int:
        """Return 1 if a variable is a number, 0 if it may be a slice, an ellipsis or the result of a function.

        Negative if it may be None or a tuple of unknown items. A tuple of numbers counts as a number.
        """
        names, visited, removed = [name], {name}, 1
        while names:
            for value in self._definitions.get(names.pop(), ()):
                operands: Sequence[Any] = ()
                if isinstance(value, ir.Const | ir.Global | ir.FreeVar):
                    if value.value is None or isinstance(value.value, tuple):
                        return -_MANY
                    removed *= not isinstance(value.value, slice | types.EllipsisType)
                elif isinstance(value, ir.Arg):
                    if self._dimensions[value.index] == _MANY:
                        return -_MANY
                elif isinstance(value, ir.Var):
                    operands = [value]
                elif value.op == "call":
                    removed *= self._returns_number(self._value(value.func))
                elif value.op == "build_slice":
                    removed = 0
                elif value.op in ("build_tuple", "build_list"):
                    operands = value.items
                    removed *= bool(operands)
                elif value.op == "phi":
                    operands = value.incoming_values
                elif value.op in ("getitem", "static_getitem", *_SELECTIONS):
                    operands = [value.value]
                for operand in operands:
                    if isinstance(operand, ir.Var) and operand.name not in visited:
                        names.append(operand.name)
                        visited.add(operand.name)
        return removed

    @staticmethod
    def _returns_number(function: Any) -> bool:
        """Return True for functions of Warpwell, NumPy and Python; another one may return a slice."""
        function = getattr(function, "py_func", function)
        if isinstance(function, types.FunctionType):
            return _is_own(function)
        return function is not None and function is not slice and function is not tuple

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
        if any(function is reader for reader in _READ_FUNCTIONS):
            return
        written: frozenset[int] | range = range(len(value.args))
        if isinstance(function, types.FunctionType) and not (_is_own(function) or value.kws or value.vararg):
            written = written_parameters(function, tuple(map(self._passed_dimensions, value.args)))
        for k, argument in enumerate(value.args):
            if k in written:
                self._written.update(self._of(argument))
            self._add(target, dict.fromkeys(self._of(argument), _MANY))  # the result may be a tuple
        unfollowed = [value.func, *(variable for _, variable in value.kws), *([value.vararg] if value.vararg else [])]
        for variable in unfollowed:
            self._written.update(self._of(variable))

    def _passed_dimensions(self, argument: Any) -> int:
        views = self._of(argument)
        if not views:
            return 0 if self._removed(argument.name) == 1 else _MANY
        return max(views.values())


def _is_own(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == _OWN
