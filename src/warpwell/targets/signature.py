"""Facts about a kernel before it is compiled: its parameters, the extents that its code requests, its grid."""

from __future__ import annotations

import dis
import inspect
import os
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import errors
from . import primitives
from .compiler.bytecode import functions_of, instructions_of, is_primitive, line_of


def check_launch(kernel: Any, shape: tuple[int, ...], count: int) -> None:
    """Check the number of a launch's arguments, and that its shape has the dimensions that the kernel requests.

    Raises
    ------
    ArgumentError
    """
    _check_count(kernel, count)
    code = kernel.function.__code__
    if code.co_flags & _NEVER_RUN:
        raise errors.ArgumentError(
            f"kernel {kernel.__name__!r} ({code.co_filename}, line {code.co_firstlineno}) is a generator or coroutine; "
            f"a launch does not run its body; write results to an array instead"
        )
    line = _line_of_result(code)
    if line is not None:
        raise errors.ArgumentError(
            f"kernel {kernel.__name__!r} ({code.co_filename}, line {line}) returns a value, which a launch drops; "
            f"write it to an array that is an argument"
        )
    if 0 in shape:
        return
    dims = len(shape)
    configuration(shape, kernel.block)
    for requested, line, path in _requested_dims(kernel.function):
        if requested == dims:
            continue
        where = f"kernel {kernel.__name__!r} asks grid({requested}) ({path}, line {line}) in a launch of shape {shape}"
        if requested not in _EXTENTS:
            raise errors.ArgumentError(f"{where}: launches have 1, 2 or 3 extents")
        extents = f"launch over {_EXTENTS[requested]}, or ask grid({dims})"
        # CUDA users expect kernel[blocks, threads]. As a shape, that gives indices beyond the end of the array.
        hint = "; a shape counts indices, not blocks and threads" if dims > requested else ""
        raise errors.ArgumentError(f"{where}: {extents}{hint}")


_NEVER_RUN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_EXTENTS = {1: "one extent", 2: "two extents", 3: "three extents"}


def _line_of_result(code: types.CodeType) -> int | None:
    """Return a line that returns a value other than None or the result of a call, which may be None."""
    previous = None
    for instruction in dis.get_instructions(code):
        value = None
        if instruction.opname == "RETURN_CONST":
            value = instruction
        elif instruction.opname == "RETURN_VALUE" and previous is not None and "CALL" not in previous.opname:
            value = previous
        if value is not None and not (value.opname in ("LOAD_CONST", "RETURN_CONST") and value.argval is None):
            return line_of(value) or code.co_firstlineno
        previous = instruction
    return None


def parameters(kernel: Any) -> list[str]:
    """Return the names of a kernel's positional parameters."""
    if kernel.function is kernel:  # in CUDA C++
        return [p.name for p in kernel.parameters]
    return [p.name for p in inspect.signature(kernel.function).parameters.values() if p.kind in _POSITIONAL]


_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def _check_count(kernel: Any, count: int) -> None:
    every = inspect.signature(kernel.function).parameters.values()
    found = [p for p in every if p.kind in _POSITIONAL]
    minimum = sum(p.default is p.empty for p in found)
    maximum = count if any(p.kind is p.VAR_POSITIONAL for p in every) else len(found)
    if not minimum <= count <= maximum:
        takes = f"{minimum}" if minimum == len(found) else f"{minimum} to {len(found)}"
        noun = "argument" if takes == "1" else "arguments"
        names = f" ({', '.join(p.name for p in found)})" if found else ""
        raise errors.ArgumentError(f"kernel {kernel.__name__!r} takes {takes} {noun}{names}, not {count}")


def _requested_dims(function: types.FunctionType) -> Iterator[tuple[int, int | None, str]]:
    """Yield the constants that a function, or one that it calls, passes to `grid`, each with line and file."""
    for each in functions_of(function):
        if is_primitive(each):
            continue
        calls_grid = False
        for instruction, found, _ in instructions_of(each):
            if calls_grid and instruction.opname not in ("PUSH_NULL", "CACHE"):
                number = instruction.argval if instruction.opname.startswith("LOAD_") and found is None else found
                if isinstance(number, int) and not isinstance(number, bool):
                    yield number, line_of(instruction), each.__code__.co_filename
                calls_grid = False
            calls_grid = calls_grid or found is primitives.grid


BLOCK_THREADS = 256
"""Threads of a block for launches of one dimension."""


def configuration(shape: tuple[int, ...], block: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return blocks and threads of a launch, x first; `block` are the threads of a block kernel."""
    if block is not None:
        if len(shape) != 1:
            raise errors.ArgumentError(f"launch shape {shape} of a block kernel: pass one number, of blocks")
        return shape, (block,)
    if len(shape) == 1:
        return (-(-shape[0] // BLOCK_THREADS),), (BLOCK_THREADS,)
    threads = (32, 8) if len(shape) == 2 else (32, 4, 2)
    extents = shape[::-1]  # the last axis is CUDA's x
    return tuple(-(-n // t) for n, t in zip(extents, threads, strict=True)), threads


# -- arguments ---------------------------------------------------------------------------------------------------------


def argument(kernel: Any, k: int) -> str:
    """Return the name of argument `k` in messages."""
    names = parameters(kernel)
    return f"argument {names[k] if k < len(names) else k + 1!r} of kernel {kernel.__name__!r}"


def check_arguments(kernel: Any, values: Any, *, compiles: bool = True) -> None:
    """Check that kernels take the arguments. Called before a compilation; compiled code has checked its types.

    Raises
    ------
    ArgumentError, DTypeError
    """
    for k, value in enumerate(values):
        where = argument(kernel, k)
        advice = getattr(type(value), "no_kernel_argument", None)
        if advice is not None:
            raise errors.ArgumentError(
                f"{where} is a {type(value).__name__}, which kernels cannot use this way: {advice}"
            )
        if isinstance(value, str | os.PathLike):
            raise errors.ArgumentError(
                f"{where} is a {type(value).__name__}, which kernels do not take: open a file with ww.open(path), and "
                "pass the array"
            )
        if isinstance(value, list | dict | set | bytearray | range) or _only_converts(value):
            raise errors.ArgumentError(
                f"{where} is a {type(value).__name__}, which kernels do not take: convert it with numpy.array()"
            )
        dtype = getattr(value, "dtype", None)
        if compiles and isinstance(dtype, np.dtype) and not _compiles(dtype):
            raise errors.DTypeError(
                f"{where} has items of {dtype.name if dtype.isnative else 'the other byte order'}, which kernels do "
                f"not take: convert it first, with astype(...)"
            )


def _only_converts(value: Any) -> bool:
    """Return whether `value` is not an array, but converts to one, like a pandas Series."""
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__array__"):
        return False
    protocols = ("kernel_struct", "__dlpack__", "__cuda_array_interface__")
    return not any(hasattr(value, name) for name in protocols)


def _compiles(dtype: np.dtype[Any]) -> bool:
    return dtype.isnative and not dtype.hasobject and dtype.str[1:] not in ("f2", "f16", "c32")
