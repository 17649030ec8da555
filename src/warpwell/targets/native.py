"""Native functions: compiled host code that other native code calls by address and Python calls without its lock."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

from .device import device, is_device
from .interp.interpreter import native_functions

_natives: dict[Callable[..., Any], NativeFunction] = {}


class NativeFunction:
    """A device function from 64-bit integers to a 64-bit integer, as compiled host code.

    It runs without Python's global interpreter lock, so it must keep to device code: integers, `copy_bytes`, `pread`,
    `pwrite`, atomics and other `device` functions. It must not raise. A boolean result becomes 0 or 1, None becomes 0.
    The first use compiles it, or loads its object file from the package or the disk cache. The interpreter calls the
    plain Python function instead, or `interpreted` if that is given. `call_native` calls functions of at most six
    arguments.
    """

    def __init__(self, function: Callable[..., Any], interpreted: Callable[..., int] | None = None) -> None:
        self.function = function if is_device(function) else device(function)
        self._interpreted = self.function if interpreted is None else interpreted
        self._address = 0
        self._call: Any = None

    @property
    def address(self) -> int:
        """The C address (compiles on first use)."""
        if self._address == 0:
            from .compiler.machine_code import load_address  # imports LLVM

            address = load_address(self.function, compile_for)
            native_functions[address] = self._interpreted
            self._address = address
        return self._address

    def load(self) -> NativeFunction:
        """Compile or load the function before its first call; return it."""
        if self._call is None:
            count = len(inspect.signature(self.function).parameters)
            self._call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(self.address)
        return self

    def __call__(self, *values: int) -> int:
        call = self._call or self.load()._call
        return int(call(*values))


def compile_for(function: Callable[..., int], processor: Any) -> bytes:
    """Compile a device function to an object file for a processor."""
    from .compiler.compiled import compile_native  # imports Numba
    from .compiler.hooks import intrinsics_for

    intrinsics_for("cpu")
    return compile_native(function, processor)


@overload
def native(function: Callable[..., int | None]) -> NativeFunction: ...
@overload
def native(*, interpreted: Callable[..., int]) -> Callable[[Callable[..., int]], NativeFunction]: ...
def native(function: Any = None, *, interpreted: Any = None) -> Any:
    """Return the native function of a plain Python one (also a decorator); see `NativeFunction`.

    The interpreter calls `interpreted` instead, for example because it models no system calls.
    """
    if function is None:
        return functools.partial(native, interpreted=interpreted)
    if function not in _natives:
        _natives[function] = NativeFunction(function, interpreted)
    return _natives[function]


def native_roots() -> list[NativeFunction]:
    """Return all native functions that the imported modules define."""
    return list(_natives.values())
