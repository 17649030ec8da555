"""Compiled host code: dispatchers made from generated source, kept in an on-disk cache.

Of processes that start together one compiles a function for some types, for seconds, and the others load what it kept.
Files are named by types, not by the numbers of an index as Numba's are: two processes that keep code at once, without
locks where the file system has none, cannot give two signatures one file.

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
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.llvm_bindings import create_pass_builder
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from ... import errors
from ..uninterrupted import uninterrupted
from .code_cache import cache_folder, cache_key, one_process, read_kept, write_kept

before_loading: list[Callable[[bytes], None]] = []
"""Called with object code from the disk before it is loaded: what it names has to be known by then."""


def compile_host(source: str, name: str, scope: dict[str, Any], user: Callable[..., Any] | None) -> Any:
    """Return a Numba dispatcher (no GIL) for the function `name` of the generated `source`.

    `user` is the function whose source decides, besides Warpwell's own, whether cached code is still good;
    None where there is only Warpwell's.
    """
    namespace = dict(scope, __name__=__name__)
    exec(compile(source, f"<warpwell {name}>", "exec"), namespace)
    return dispatcher(namespace[name], user=user, salt=source)


@global_compiler_lock
def dispatcher(
    function: Callable[..., Any], *, user: Callable[..., Any] | None = None, salt: str = "", now: bool = False
) -> Any:
    """Return a Numba dispatcher (no GIL) for a plain Python function, cached on disk where that is safe.

    A function of 64-bit words may be compiled `now`, otherwise it is when it is first called.
    """
    if config.DISABLE_JIT:
        raise errors.CompileError(
            "NUMBA_DISABLE_JIT is set, and code for the CPU is compiled: unset it, or launch with device='interp'"
        )
    compiled = njit(nogil=True, error_model="numpy")(function)
    _keep(compiled, function, cache_key(user if user is not None else function, salt))
    if now:
        compile_for_words(compiled, function)
    return compiled


def compile_for_words(compiled: Any, function: Callable[..., Any]) -> None:
    """Compile or load a dispatcher of a function whose arguments are all 64-bit words, before it is called."""
    with uninterrupted():
        compiled.compile((types.int64,) * len(inspect.signature(function).parameters))


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


@global_compiler_lock
def compile_native(function: Callable[..., int]) -> Any:
    """Compile a device function of 64-bit words to a C function; return Numba's object with its `address`."""
    words = len(inspect.signature(function).parameters)
    result = CFunc(
        function,
        ((types.int64,) * words, types.int64),
        locals={},
        options={"nopython": True, "nogil": True, "error_model": "numpy"},
    )
    _keep(result, function, cache_key(function))
    with uninterrupted():
        result.compile()
    return result


def _keep(compiled: Any, function: Callable[..., Any], key: str | None) -> None:
    """Let what Numba compiles for `function` be kept on disk under a key, and one process compile what others need."""
    if key is not None:
        folder = cache_folder() / key
        compiled._cache = _cache_in(folder, function)
        _compile_once(compiled, folder)


def _compile_once(compiled: Any, folder: pathlib.Path) -> None:
    """Have one process compile what others need at the same time; a wait is bounded, and compiles after all."""
    own = isinstance(compiled, CFunc)  # which has one signature
    context = compiled._targetdescr.target_context if own else compiled.targetctx
    numbas = compiled.compile

    @global_compiler_lock  # taken first: a thread that holds it may come here for the same
    def compile_once(*given: Any) -> Any:
        (signature,) = given or (compiled._sig,)
        if (not own and signature in compiled.overloads) or compiled._cache.keeps(signature, context):
            return numbas(*given)
        name = hashlib.sha256(repr(signature).encode()).hexdigest()[:16]
        with one_process(folder / f"{name}.lock"):
            return numbas(*given)

    compiled.compile = compile_once


class _Files:
    """One file for each signature, named after it: whoever keeps the same writes the same file, and needs no lock."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def path(self, key: Any) -> pathlib.Path:
        return self._folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.nbc"

    def load(self, key: Any) -> Any:
        if (found := read_kept(self.path(key))) is not None:
            with contextlib.suppress(Exception):  # whatever pickle raises where a module that it names has changed
                kept, data = pickle.loads(found)
                if kept == key:  # types may look the same
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
            _, kind, data = payload[0]  # of the library: its name and what was kept
            if kind == "object":
                for call in before_loading:
                    call(data[0])
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
            return signature, codegen.magic_tuple()  # the folder tells the rest

        def keeps(self, signature: Any, context: Any) -> bool:
            """Tell whether there is code for these types: it may be loaded meanwhile."""
            return os.path.exists(self._cache_file.path(self._index_key(signature, context.codegen())))

        def load_overload(self, signature: Any, context: Any) -> Any:
            # without Numba's own first step: it imports all that Numba can compile, a third of the processor time from
            # the start of a process to its first result
            return self._load_overload(signature, context)

        def save_overload(self, signature: Any, data: Any) -> None:
            with contextlib.suppress(OSError):  # a cache that cannot be written, or is full by now, stops no launch
                super().save_overload(signature, data)

    return CodeCache(function)
