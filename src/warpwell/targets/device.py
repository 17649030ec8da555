"""`device`: marks plain Python functions as device code for every target."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# Registered functions, in order. A target's intrinsics adopts them when the target is first used, so that
# importing Warpwell compiles nothing and imports no compiler.
_registered: list[tuple[str, tuple[Any, ...]]] = []
_subscribers: list[Any] = []
_registers: dict[Callable[..., Any], int] = {}
_marked: set[int] = set()
"""Identities of the registered functions, which are never deleted."""


def device(function: F) -> F:
    """Mark `function` as device code and return it unchanged.

    Kernels and other device functions may then call it on every target. It must use only Python that
    Numba compiles, and the primitives of `warpwell.targets` for memory that other threads access.
    """
    _register("device", function)
    return function


def is_device(function: Callable[..., Any]) -> bool:
    """Return True if a function was marked by `device` or `linked`."""
    return id(function) in _marked


def linked(function: F) -> F:
    """Mark a device function of 64-bit words, returning one, that is compiled once and linked to its callers.

    A kernel that calls it is compiled faster. If the call is rare, the hot loops of the kernel keep their registers:
    a call within a module saves all live values of the caller, a linked call follows the ABI and saves a few.
    """
    _register("linked", function)
    return function


def linked_functions() -> list[Callable[..., int]]:
    """Return all functions marked by `linked` so far."""
    return [args[0] for kind, args in _registered if kind == "linked"]


def register_method(name: str, parameters: tuple[str, ...]) -> None:
    """Make ``struct.name(...)`` available in device code (see `DeviceStruct.methods`)."""
    _register("method", name, parameters)


def struct_function(stub: Callable[..., Any], name: str, store: Callable[..., Any]) -> None:
    """Make ``stub(struct, ...)`` mean the struct's implementation of `name` in device code.

    For NumPy and device arrays, which must not be read-only, it means the device function `store`.
    """
    _register("device", store)
    _register("function", stub, name, store)


class StructKind(NamedTuple):
    """The type of an argument that is a `DeviceStruct`, for a chooser."""

    cls: type
    static: Any


class ArrayKind(NamedTuple):
    """The type of an argument that is a NumPy or device array, for a chooser."""

    ndim: int
    contiguous: bool
    """Whether the items follow each other in C order, and subscripts check nothing."""


def chosen(stub: Callable[..., Any], choose: Callable[..., Callable[..., Any] | None], registers: int = 0) -> None:
    """Make ``stub(*args)`` in device code mean the device function that ``choose(target, *kinds)`` returns.

    `target` is "cpu" or "cuda". A kind is a `StructKind`, an `ArrayKind`, the Python function where the argument is a
    device function, a tuple of kinds for a tuple, and None for anything else. A chooser that knows no function for them
    returns None or raises `DTypeError`. `registers` is the number of registers per thread that a calling kernel needs
    on `cuda`.
    """
    _registers[stub] = registers
    _register("chosen", stub, choose)


def registers_wanted(value: Any) -> int:
    """Return the number of registers per thread that a function needs in kernels that call it; 0 if it needs none."""
    return _registers.get(value, 0) if isinstance(value, FunctionType) else 0


def subscribe(intrinsics: Any) -> None:
    """Pass a target's compiler hooks everything that has been or will be registered."""
    for kind, args in _registered:
        getattr(intrinsics, kind)(*args)
    _subscribers.append(intrinsics)


def _register(kind: str, *args: Any) -> None:
    _registered.append((kind, args))
    if kind in ("device", "linked"):
        _marked.add(id(args[0]))
    for intrinsics in _subscribers:
        getattr(intrinsics, kind)(*args)
