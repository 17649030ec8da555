"""Native functions: compiled host code that other native code calls by address (media use them)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .device import device
from .interp.interpreter import native_functions


class NativeFunction:
    """A function ``(state, a, b, c, d, e) -> int`` of 64-bit words with a C address.

    It runs in a service thread without the interpreter lock, so it must keep to device code: words,
    `copy_bytes`, `pread`, `pwrite`, atomics and other `device` functions. The interpreter calls the
    plain Python function instead, or `interpreted` where that is given.
    """

    def __init__(self, function: Callable[..., int], interpreted: Callable[..., int] | None = None) -> None:
        self.function = device(function)
        self._interpreted = self.function if interpreted is None else interpreted
        self._compiled: Any = None

    @property
    def address(self) -> int:
        """The C address (compiles on first use)."""
        if self._compiled is None:
            from .compiler.compiled import compile_native  # imports the compiler
            from .compiler.hooks import seam_for

            seam_for("cpu")
            self._compiled = compile_native(self.function)
            native_functions[int(self._compiled.address)] = self._interpreted
        return int(self._compiled.address)


def native(function: Callable[..., int]) -> NativeFunction:
    """Make a native function of a plain Python one (a decorator); see `NativeFunction`."""
    return NativeFunction(function)


def native_but_interpreted(interpreted: Callable[..., int]) -> Callable[[Callable[..., int]], NativeFunction]:
    """Make a native function that the interpreter replaces by another one: it models no kernel of the system."""
    return lambda function: NativeFunction(function, interpreted)
