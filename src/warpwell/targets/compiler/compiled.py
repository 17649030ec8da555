"""Compiled host code: dispatchers in an on-disk cache, and object files.

Of processes that start together, one compiles a function for some types, which takes seconds, and the others load the
stored code. Files are named by types, not by the numbers of an index as Numba's are: two processes that store code at
once, on a file system without locks, cannot use one file for two signatures.

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
from typing import Any

import llvmlite.binding as llvm
from numba import config, njit, types
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.llvm_bindings import create_pass_builder
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from ... import errors
from ..._os import file_lock
from .code_cache import cache_folder, cache_key, read_kept, write_kept
from .compiling import compiling
from .machine_code import SYMBOL, Processor, link_callees
from .numba_patches import CalleeCompiler, bounded_ranges


@global_compiler_lock
def dispatcher(function: Callable[..., Any], *, user: Callable[..., Any] | None = None, salt: str = "") -> Any:
    """Return a Numba dispatcher (no GIL) for a plain Python function, cached on disk if that is safe.

    The source of `user` decides, together with Warpwell's own, whether cached code is valid; by default that of
    `function`.
    """
    _require_compiler()
    compiled = njit(nogil=True, error_model="numpy")(function)
    if (key := cache_key(user if user is not None else function, salt)) is not None:
        compiled._cache = cache = CodeCache(cache_folder() / key)
        compiled.compile = cache.compile_once(compiled)
    return compiled


def _require_compiler() -> None:
    if config.DISABLE_JIT:
        raise errors.CompileError(
            "NUMBA_DISABLE_JIT is set, and code for the CPU is compiled: unset it, or launch with device='interp'"
        )


@global_compiler_lock
def lower(function: Callable[..., int]) -> Any:
    """Compile a device function of 64-bit integers to LLVM IR, without machine code; return Numba's result."""
    _require_compiler()
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": CalleeCompiler}
    compiled = njit(nogil=True, error_model="numpy", **options)(function)
    compiled.compile((types.int64,) * len(inspect.signature(function).parameters))
    (overload,) = compiled.overloads.values()
    return overload


def compile_native(function: Callable[..., int], processor: Processor) -> bytes:
    """Compile a device function of 64-bit integers to an object file that exports the C function `SYMBOL`.

    All other functions become internal, so the optimizer drops Numba's wrappers for Python, which need an initialized
    Numba. An exception in the function ends the process. The hooks of the CPU must have been imported before.
    """
    # bounded_ranges: this may be part of a launch's compilation
    with compiling(f"{function.__name__!r}"), bounded_ranges(False), global_compiler_lock:
        lowered = lower(function)
        result = types.unliteral(lowered.signature.return_type)
        if result not in _LOAD_RESULT:
            raise errors.CompileError(
                f"a native function must return a 64-bit integer, a boolean or None, got {result}"
            )
        parameters = [f"i64 %{k}" for k in range(len(lowered.signature.args))]
        # Numba's calling convention: a pointer to the result, one to an exception, arguments
        arguments = ", ".join(["ptr %result", "ptr %error", *parameters])
        module = llvm.parse_assembly(f"""{lowered.library.get_llvm_str()}
            define i64 @{SYMBOL}({", ".join(parameters)}) {{
            entry:
              %result = alloca i64
              %error = alloca ptr
              %status = call i32 @{lowered.fndesc.llvm_func_name}({arguments})
              %succeeded = icmp eq i32 %status, 0
              br i1 %succeeded, label %return, label %raised
            raised:
              call void @llvm.trap()
              unreachable
            return:
              {_LOAD_RESULT[result]}
              ret i64 %value
            }}
            declare void @llvm.trap()
        """)
        for each in (*module.functions, *module.global_variables):
            if not each.is_declaration and each.name != SYMBOL:
                each.linkage = "internal"
        module.verify()
        machine = processor.machine()
        builder = create_pass_builder(machine, opt=3)
        builder.getModulePassManager().run(module, builder)
        return bytes(machine.emit_object(module))


_LOAD_RESULT = {
    types.none: "%value = add i64 0, 0",
    types.boolean: "%byte = load i8, ptr %result\n%value = zext i8 %byte to i64",
    types.int64: "%value = load i64, ptr %result",
    types.uint64: "%value = load i64, ptr %result",
}
"""LLVM IR that loads a result of each Numba type as the 64-bit integer %value."""


class CodeCache(NullCache):
    """The code of a dispatcher on disk: one file for each signature, named after it.

    Processes with the same code write the same file, without locks. The folder identifies the function.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def compile_once(self, dispatcher: Any) -> Any:
        """Return a dispatcher's `compile` that one of several processes runs; the wait is bounded, then all run it."""
        numbas = dispatcher.compile

        @global_compiler_lock  # Taken first, because a thread that holds it may need the same code.
        def compile_once(signature: Any) -> Any:
            path = self._path((signature, dispatcher.targetctx.codegen().magic_tuple()))
            if signature in dispatcher.overloads or os.path.exists(path):
                return numbas(signature)
            with compiling(repr(dispatcher.py_func.__name__)), file_lock(path.with_suffix(".lock")):
                return numbas(signature)

        return compile_once

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled function, or None."""
        # Without `context.refresh`: it imports all that Numba can compile, a third of the processor time from the start
        # of a process to its first result.
        payload = self.read((signature, context.codegen().magic_tuple()))
        if payload is None:
            return None
        _, _, (code, _) = payload[0]  # name, kind ("object"), object code and bitcode of the library
        link_callees(code, compile_native)
        if b"NRT_" in code:  # Numba's runtime: counted references
            rtsys.initialize(context)
        if b"_numba_hashsecret" in code:
            import_module("numba.cpython.hashing")
        return CompileResult._rebuild(context, *payload)

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store a compiled function, unless its code has addresses of this process."""
        if not compiled.library.has_dynamic_globals:
            self.write((signature, compiled.codegen.magic_tuple()), compiled._reduce())

    def read(self, key: Any) -> Any:
        """Return the content of the file for a key, or None."""
        if (found := read_kept(self._path(key))) is not None:
            with contextlib.suppress(Exception):  # any error of pickle, if a module that it names has changed
                stored, content = pickle.loads(found)
                if stored == key:  # types may look the same
                    return content
        return None

    def write(self, key: Any, content: Any) -> None:
        """Write the file for a key."""
        with contextlib.suppress(OSError):  # a cache that cannot be written, or is full, does not stop a launch
            self._folder.mkdir(parents=True, exist_ok=True)
            write_kept(self._path(key), dumps((key, content)))

    def _path(self, key: Any) -> pathlib.Path:
        return self._folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.nbc"
