"""Compiled host code: dispatchers made from generated source, kept in an on-disk cache.

Of processes that start together one compiles a function for some types, for seconds, and the others load what it kept.
Files are named by types, not by the numbers of an index as Numba's are: two processes that keep code at once, on a
file system without locks, cannot give two signatures one file.

Dispatchers are made under Numba's lock, as they compile: Numba makes its target with the first one, and a fork waits
for this lock alone (`compile_lock`).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import pathlib
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from numba import config, njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.compiler_lock import global_compiler_lock
from numba.core.llvm_bindings import create_pass_builder
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from ... import errors
from ..._os import file_lock, uninterrupted
from .code_cache import cache_folder, cache_key, read_kept, write_kept
from .compiling import compiling
from .machine_code import SYMBOL, Processor, link_callees
from .numba_patches import CalleeCompiler, bounded_ranges


def compile_host(source: str, name: str, scope: dict[str, Any], user: Callable[..., Any] | None) -> Any:
    """Return a Numba dispatcher (no GIL) for the function `name` of the generated `source`.

    `user` is the function whose source, together with Warpwell's own, decides whether cached code is valid;
    None if there is only Warpwell's.
    """
    namespace = dict(scope, __name__=__name__)
    exec(compile(source, f"<warpwell {name}>", "exec"), namespace)
    return dispatcher(namespace[name], user=user, salt=source)


@global_compiler_lock
def dispatcher(function: Callable[..., Any], *, user: Callable[..., Any] | None = None, salt: str = "") -> Any:
    """Return a Numba dispatcher (no GIL) for a plain Python function, cached on disk where that is safe."""
    _require_compiler()
    compiled = njit(nogil=True, error_model="numpy")(function)
    if (key := cache_key(user if user is not None else function, salt)) is not None:
        compiled._cache = _cache_in(cache_folder() / key, function)
        _compile_once(compiled, cache_folder() / key)
    return compiled


def compile_for_words(compiled: Any, function: Callable[..., Any]) -> None:
    """Compile or load a dispatcher of a function whose parameters are 64-bit integers, before it is called."""
    compiled.compile((types.int64,) * len(inspect.signature(function).parameters))


def _require_compiler() -> None:
    if config.DISABLE_JIT:
        raise errors.CompileError(
            "NUMBA_DISABLE_JIT is set, and code for the CPU is compiled: unset it, or launch with device='interp'"
        )


class LoweredFunction(NamedTuple):
    """A device function of 64-bit integers as optimized LLVM IR."""

    text: str
    name: str
    """Its name in the IR, with Numba's calling convention: a pointer to the result, one to an exception, arguments."""
    parameters: int
    result: Any
    """The Numba type of the result."""


@global_compiler_lock
def lower(function: Callable[..., int]) -> LoweredFunction:
    """Compile a device function of 64-bit integers to LLVM IR, without machine code."""
    _require_compiler()
    parameters = len(inspect.signature(function).parameters)
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": CalleeCompiler}
    compiled = njit(nogil=True, error_model="numpy", **options)(function)
    compiled.compile((types.int64,) * parameters)
    (overload,) = compiled.overloads.values()
    name = overload.fndesc.llvm_func_name
    return LoweredFunction(overload.library.get_llvm_str(), name, parameters, overload.signature.return_type)


def compile_native(function: Callable[..., int], processor: Processor) -> bytes:
    """Compile a device function to an object file. The seam of the CPU must have been imported (`seam_for`)."""
    # bounded_ranges: this may be part of a launch's compilation
    with uninterrupted(), compiling(f"{function.__name__!r}"), bounded_ranges(False):
        return bytes(_compile_object(function, processor.machine()))


@global_compiler_lock
def _compile_object(function: Callable[..., int], machine: Any) -> bytes:
    """Compile a device function of 64-bit integers to an object file that exports the C function `SYMBOL`.

    All other functions become internal, so the optimizer drops Numba's wrappers for Python, which need an initialized
    Numba. An exception in the function ends the process.
    """
    lowered = lower(function)
    parameters = "".join(f", i64 %{k}" for k in range(lowered.parameters))
    declared = ", ".join(f"i64 %{k}" for k in range(lowered.parameters))
    module = llvm.parse_assembly(f"""{lowered.text}
        define i64 @{SYMBOL}({declared}) {{
        entry:
          %result = alloca i64
          %error = alloca ptr
          %status = call i32 @{lowered.name}(ptr %result, ptr %error{parameters})
          %succeeded = icmp eq i32 %status, 0
          br i1 %succeeded, label %return, label %raised
        raised:
          call void @llvm.trap()
          unreachable
        return:
          {_load_result(lowered.result)}
          ret i64 %value
        }}
        declare void @llvm.trap()
    """)
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != SYMBOL:
            each.linkage = "internal"
    module.verify()
    builder = create_pass_builder(machine, opt=3)
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def _load_result(result: Any) -> str:
    """Return LLVM IR that loads the result of a Numba type from %result as the 64-bit integer %value."""
    if result is types.none:
        return "%value = add i64 0, 0"
    if isinstance(result, types.Boolean):
        return "%byte = load i8, ptr %result\n          %value = zext i8 %byte to i64"
    if isinstance(result, types.Integer) and result.bitwidth == 64:
        return "%value = load i64, ptr %result"
    raise errors.CompileError(f"a native function must return a 64-bit integer, a boolean or None, got {result}")


def _compile_once(compiled: Any, folder: pathlib.Path) -> None:
    """Let one process compile what several need at the same time; the wait is bounded, then it compiles after all."""
    numbas = compiled.compile

    @global_compiler_lock  # Taken first, because a thread that holds it may need the same code.
    def compile_once(signature: Any) -> Any:
        if signature in compiled.overloads or compiled._cache.keeps(signature, compiled.targetctx):
            return numbas(signature)
        name = hashlib.sha256(repr(signature).encode()).hexdigest()[:16]
        with uninterrupted(), file_lock(folder / f"{name}.lock"):
            return numbas(signature)

    compiled.compile = compile_once


class _Files:
    """One file for each signature, named after it: processes with the same code write the same file, without locks."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def path(self, key: Any) -> pathlib.Path:
        return self._folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.nbc"

    def load(self, key: Any) -> Any:
        if (found := read_kept(self.path(key))) is not None:
            with contextlib.suppress(Exception):  # any error of pickle, if a module that it names has changed
                stored, data = pickle.loads(found)
                if stored == key:  # types may look the same
                    return data
        return None

    def save(self, key: Any, data: Any) -> None:
        write_kept(self.path(key), dumps((key, data)))


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

        def rebuild(self, target_context: Any, payload: Any) -> Any:
            _, kind, data = payload[0]  # of the library: its name and the cached data
            if kind == "object":
                link_callees(data[0], compile_native)
                if b"NRT_" in data[0]:  # Numba's runtime: counted references
                    rtsys.initialize(target_context)
                if b"_numba_hashsecret" in data[0]:
                    import_module("numba.cpython.hashing")
            else:
                target_context.refresh()
            return super().rebuild(target_context, payload)

    class CodeCache(FunctionCache):
        _impl_class = Implementation

        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__(function)
            self._cache_file = _Files(folder)

        def _index_key(self, signature: Any, codegen: Any) -> Any:
            return signature, codegen.magic_tuple()  # the folder identifies the rest

        def keeps(self, signature: Any, context: Any) -> bool:
            """Return True if there is cached code for these types, which may be loaded."""
            return os.path.exists(self._cache_file.path(self._index_key(signature, context.codegen())))

        def load_overload(self, signature: Any, context: Any) -> Any:
            # without Numba's own first step: it imports all that Numba can compile, a third of the processor time from
            # the start of a process to its first result
            return self._load_overload(signature, context)

        def save_overload(self, signature: Any, data: Any) -> None:
            with contextlib.suppress(OSError):  # a cache that cannot be written, or is full by now, stops no launch
                super().save_overload(signature, data)

    return CodeCache(function)
