"""`machine_code`: device functions of 64-bit words as C functions that are loaded without a compiler.

What is compiled through `dispatcher` needs Numba and all that it knows of types before it can be loaded, which takes a
process half a second. The processes of a pool need one function each to start, and most need no other: theirs is kept
as an object file that calls the C library alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm

from ..uninterrupted import uninterrupted
from . import symbols
from .code_cache import cache_folder, read_or_make

_SYMBOL = "warpwell_function"
_GIVEN = symbols.TLS_KEY, symbols.COPY, symbols.CLOCK_OFFSET  # LLVM knows them before code that names them is loaded
_engines: list[Any] = []  # a thread may be in their code until the process ends


@functools.cache
def machine_code(function: Callable[..., int]) -> Callable[..., int]:
    """Return a device function of this package as a C function, compiled or out of the on-disk cache.

    It runs without the interpreter lock, and must not raise: there is nobody to catch it. Of several processes that
    start together one compiles, for seconds, and the others load what it kept.

    Parameters
    ----------
    function : device function
        Takes 64-bit words and returns one. The cache key covers Warpwell's sources and the function's own file.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = _machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(_kept(function, machine)))
    engine.finalize_object()
    _engines.append(engine)
    words = len(inspect.signature(function).parameters)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * words)(engine.get_function_address(_SYMBOL))


def _machine() -> Any:
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features(), opt=3, jit=True, codemodel="jitdefault"
    )


def _features() -> str:
    try:
        return str(llvm.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM cannot ask this kind
        return ""


def _file_digest(function: Callable[..., int]) -> str:
    """Return a digest of a file that is not among Warpwell's sources; "" for one that is."""
    if function.__module__.startswith("warpwell."):
        return ""
    return hashlib.sha256(pathlib.Path(function.__code__.co_filename).read_bytes()).hexdigest()[:8]


def _kept(function: Callable[..., int], machine: Any) -> bytes:
    """Return the object file, which another process may be writing."""
    about = f"{llvm.get_host_cpu_name()} {_features()}"  # homes may be shared by hosts
    processor = hashlib.sha256(about.encode()).hexdigest()[:8]
    path = cache_folder() / f"{function.__module__}.{function.__name__}.{_file_digest(function)}{processor}.o"

    def make() -> bytes:
        from .compiled import object_file
        from .hooks import seam_for

        with uninterrupted():
            seam_for("cpu")
            return object_file(function, _SYMBOL, machine)

    return read_or_make(path, make)
