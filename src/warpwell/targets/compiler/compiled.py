"""Compiled host code: dispatchers made from generated source, kept in an on-disk cache."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from numba import njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.llvm_bindings import create_pass_builder

from ..uninterrupted import uninterrupted
from .code_cache import cache_folder, cache_key


def compile_host(source: str, name: str, scope: dict[str, Any], user: Callable[..., Any] | None) -> Any:
    """Return a Numba dispatcher (no GIL) for the function `name` of the generated `source`.

    `user` is the function whose source decides, besides Warpwell's own, whether cached code is still good;
    None where there is only Warpwell's.
    """
    namespace = dict(scope, __name__=__name__)
    exec(compile(source, f"<warpwell {name}>", "exec"), namespace)
    return dispatcher(namespace[name], user=user, salt=source)


def dispatcher(function: Callable[..., Any], *, user: Callable[..., Any] | None = None, salt: str = "") -> Any:
    """Return a Numba dispatcher (no GIL) for a plain Python function, cached on disk where that is safe."""
    compiled = njit(nogil=True, error_model="numpy")(function)
    key = cache_key(user if user is not None else function, salt)
    if key is not None:
        folder = cache_folder() / key
        with contextlib.suppress(OSError):  # a cache that cannot be written: compile each time
            compiled._cache = _cache_in(folder, function)
    return compiled


def object_file(function: Callable[..., int], symbol: str, machine: Any) -> bytes:
    """Compile a device function of 64-bit words to an object file with the C function `symbol`.

    Numba's own objects hold wrappers for Python besides, which call what only an initialised Numba has. Everything but
    the function becomes internal here, so that the optimiser drops it; what is left calls the C library alone.
    """
    words = len(inspect.signature(function).parameters)
    compiled = njit(nogil=True, error_model="numpy")(function)
    compiled.compile((types.int64,) * words)
    (result,) = compiled.overloads.values()
    passed = "".join(f", i64 %{k}" for k in range(words))
    given = ", ".join(f"i64 %{k}" for k in range(words))
    module = llvm.parse_assembly(f"""{result.library.get_llvm_str()}
        define i64 @{symbol}({given}) {{
        entry:
          %result = alloca i64
          %error = alloca ptr
          %status = call i32 @{result.fndesc.llvm_func_name}(ptr %result, ptr %error{passed})
          %right = icmp eq i32 %status, 0
          br i1 %right, label %return, label %raised
        raised:
          call void @llvm.trap()
          unreachable
        return:
          %value = load i64, ptr %result
          ret i64 %value
        }}
        declare void @llvm.trap()
    """)
    for inside in (*module.functions, *module.global_variables):
        if not inside.is_declaration and inside.name != symbol:
            inside.linkage = "internal"
    module.verify()
    builder = create_pass_builder(machine, opt=3)
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def compile_native(function: Callable[..., int]) -> Any:
    """Compile a device function of 64-bit words to a C function; return Numba's object with its `address`."""
    words = len(inspect.signature(function).parameters)
    result = CFunc(
        function,
        ((types.int64,) * words, types.int64),
        locals={},
        options={"nopython": True, "nogil": True, "error_model": "numpy"},
    )
    key = cache_key(function)
    if key is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written: compile each time
            result._cache = _cache_in(cache_folder() / key, function)
    with uninterrupted():
        result.compile()
    return result


def _cache_in(folder: pathlib.Path, function: Callable[..., Any]) -> FunctionCache:
    class Locator(_CacheLocator):
        def get_cache_path(self) -> str:
            return str(folder)

        def get_source_stamp(self) -> str:
            return folder.name

        def get_disambiguator(self) -> str:
            return folder.name[:10]

        @classmethod
        def from_function(cls, py_func: Any, py_file: Any) -> Any:
            return cls()

    class Implementation(CompileResultCacheImpl):
        _locator_classes = (Locator,)

    class CodeCache(FunctionCache):
        _impl_class = Implementation

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass  # a folder that cannot be written raises here, not in the middle of a launch
    return CodeCache(function)
