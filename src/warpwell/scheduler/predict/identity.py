"""Identity: the key under which a kernel is measured: its code, the types of its arguments, and its size."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...targets import KernelArgument, Launch, is_argument
from ...targets.compiler import cache_key
from .record import PROCESS_ONLY

SIZE_CLASSES_PER_DOUBLING = 4
"""Number of size classes between a size and its double. Chosen, not fitted."""

_codes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def identity(launch: Launch, arguments: Sequence[Any]) -> str:
    """Return the key of a kernel with arguments of these types: its name, "@", and a hash.

    The hash covers the code, all objects that the code names, and the options. A function without a file gets a key
    that is valid in this process only (`record.is_persistent`).
    """
    kernel = launch.kernel
    code = _codes.get(kernel.function)
    if code is None:
        code = _codes[kernel.function] = _code(kernel)
    types = len(launch.shape), kernel.max_registers, kernel.block, *[_type(value) for value in arguments]
    return _key(str(kernel.__name__), code, types)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _key(name: str, code: str, types: tuple[Any, ...]) -> str:
    digest = hashlib.sha256(f"{code} {types}".encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{name}{PROCESS_ONLY if code.startswith('~') else '@'}{digest}"


@functools.lru_cache(maxsize=4096)
def size_class(value: float) -> float:
    """Return the representative of all sizes within a fifth of this one; a value that is not positive unchanged."""
    steps = SIZE_CLASSES_PER_DOUBLING
    return 2.0 ** (round(steps * math.log2(value)) / steps) if value > 0 and math.isfinite(value) else value


def default_size(launch: Launch, arguments: Sequence[Any]) -> dict[str, float]:
    """Return the features of a launch's size, as size classes, for a task without ``size=``.

    They are its shape, its integer arguments, and the bytes of its arrays.
    """
    size = {f"extent{k}": size_class(n) for k, n in enumerate(launch.shape)}
    for k, value in enumerate(arguments):
        if isinstance(value, int | np.integer) and not isinstance(value, bool) and value > 0:
            size[f"argument{k}"] = size_class(value)
    nbytes = footprint(arguments)
    if nbytes:
        size["bytes"] = size_class(nbytes)
    return size


def footprint(arguments: Sequence[Any]) -> int:
    """Return the size in bytes of the device memory of the arrays among a launch's arguments.

    An array on storage counts with the size of its cache. An array that is passed twice counts once.
    """
    found: dict[int, int] = {}
    for value in arguments:
        if type(value) is np.ndarray:
            found[id(value)] = value.nbytes
            continue
        cache = getattr(value, "cache", None)
        if cache is not None and isinstance(value, KernelArgument):
            found[id(cache)] = int(getattr(cache, "cache_bytes", 0))
        elif hasattr(value, "nbytes") and getattr(value, "ndim", False):
            found[id(value)] = int(value.nbytes)
    return sum(found.values())


def _code(kernel: Any) -> str:
    if kernel.function is kernel:  # CUDA C++
        text = repr((kernel.code, kernel.name, kernel.options))
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return cache_key(kernel.function) or f"~{next(_numbers)}"


def _type(value: Any) -> Any:
    if type(value) is np.ndarray:  # the most frequent type
        return value.dtype, value.ndim, value.flags.c_contiguous
    if is_argument(value):
        return type(value).__qualname__, str(getattr(value, "dtype", "")), getattr(value, "ndim", 0)
    if getattr(value, "ndim", False) and hasattr(value, "dtype"):
        flags = getattr(value, "flags", None)
        return value.dtype, value.ndim, flags is None or bool(flags["C_CONTIGUOUS"])
    return type(value).__qualname__
