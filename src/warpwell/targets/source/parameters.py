"""Declared parameters of a CUDA C++ kernel, and the conversion of arguments to them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
NUMBERS = ("bool", *_INTEGERS, "float16", "float32", "float64")
"""Types of parameters that are passed by value, by their NumPy names."""

_DECLARATION = re.compile(r"(const\s+)?(\w+)\s*(\*?)")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel.

    Attributes
    ----------
    name : str
    declaration : str
        ``"float32"`` or ``"const float32*"``.
    pointer : bool
    dtype : numpy dtype or None
        Type of the number, or of the items that the pointer refers to. None for ``void*``.
    constant : bool
        Whether the kernel only reads the items.
    """

    name: str
    declaration: str
    pointer: bool
    dtype: np.dtype[Any] | None
    constant: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.declaration}"


def parse_parameters(declarations: Mapping[str, str], kernel: str) -> tuple[Parameter, ...]:
    """Return the parameters that a mapping from names to types declares.

    Raises
    ------
    ArgumentError
        A type is unknown.
    """
    if not isinstance(declarations, Mapping):
        raise errors.ArgumentError(
            f"parameters of CUDA kernel {kernel!r} must be a dict of names and types, got {declarations!r:.60}",
            name="parameters",
        )
    return tuple(_parse(str(name), declaration, kernel) for name, declaration in declarations.items())


def _parse(name: str, declaration: str, kernel: str) -> Parameter:
    match = _DECLARATION.fullmatch(declaration.strip()) if isinstance(declaration, str) else None
    pointer = match is not None and bool(match[3])
    if match is None or match[2] not in (*NUMBERS, *(("void",) if pointer else ())):
        raise errors.ArgumentError(
            f"parameter {name!r} of CUDA kernel {kernel!r} has unknown type {declaration!r:.60}; expected one of "
            f"{', '.join(NUMBERS)}, or a pointer such as 'float32*', 'const int32*' or 'void*'",
            name="parameters",
        )
    dtype = None if match[2] == "void" else np.dtype(match[2])
    return Parameter(name, declaration.strip(), pointer, dtype, bool(match[1]))


def convert_argument(value: Any, parameter: Parameter, kernel: str) -> Any:
    """Return an argument as a NumPy scalar of the parameter's type, or the array itself for a pointer.

    Raises
    ------
    ArgumentError
        The value is not a number, does not fit, or would lose its fraction, or the items of an array have another type.
    """
    try:
        return (_checked_array if parameter.pointer else _number)(value, parameter)
    except _RefusedError as problem:
        where = f"argument {parameter.name!r} of CUDA kernel {kernel!r}"
        raise errors.ArgumentError(f"{where} {problem}", name=parameter.name) from None


class _RefusedError(Exception):
    """The problem of an argument: "is too large ..."."""


def _number(value: Any, parameter: Parameter) -> Any:
    dtype: Any = parameter.dtype
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, bool | int | float):
        raise _RefusedError(f"is {value!r:.60}: pass a number for {str(parameter)!r}")
    if dtype.kind == "f":
        try:
            with np.errstate(over="ignore"):
                result = dtype.type(number)
        except OverflowError:
            result = dtype.type(np.inf)
        if np.isinf(result) and not (isinstance(number, float) and math.isinf(number)):
            raise _RefusedError(f"is {number}: too large for {str(parameter)!r}")
        return result
    if isinstance(number, float) and not (math.isfinite(number) and number.is_integer()):
        raise _RefusedError(f"is {value!r}: {str(parameter)!r} takes integers")
    number = int(number)
    minimum, maximum = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not minimum <= number <= maximum:
        raise _RefusedError(f"is {number}: {str(parameter)!r} holds {minimum} to {maximum}")
    return dtype.type(number)


def _checked_array(value: Any, parameter: Parameter) -> Any:
    if isinstance(value, np.ndarray):
        dtype = value.dtype
        if not (value.flags.c_contiguous or value.flags.f_contiguous):
            raise _RefusedError("has gaps between its items: pass numpy.ascontiguousarray of it")
        if not (value.flags.writeable or parameter.constant):
            raise _RefusedError(f"cannot be written: pass a copy, or declare {str(parameter)!r} const")
    elif hasattr(value, "__cuda_array_interface__"):
        dtype = np.dtype(value.__cuda_array_interface__["typestr"])
    else:
        raise _RefusedError(f"is {value!r:.60}: pass a NumPy array or one in device memory for {str(parameter)!r}")
    expected = parameter.dtype
    if dtype.hasobject:
        raise _RefusedError("holds Python objects: pass an array of numbers")
    if expected is not None and (dtype.itemsize != expected.itemsize or _category(dtype) != _category(expected)):
        raise _RefusedError(f"has items of {dtype}, expected {expected} for {str(parameter)!r}; use .astype or .view")
    return value


def _category(dtype: np.dtype[Any]) -> str:
    return "integer" if dtype.kind in "iub" else dtype.kind
