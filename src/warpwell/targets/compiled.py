"""Compiled host code: dispatchers made from generated source, kept in an on-disk cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import os
import pathlib
import sys
import tempfile
import types as python_types
from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc

from . import generated
from .uninterrupted import uninterrupted


def compile_host(source: str, name: str, scope: dict[str, Any], user: Callable[..., Any] | None) -> Any:
    """Return a Numba dispatcher (no GIL) for the function `name` of the generated `source`.

    `user` is the function whose source decides, besides Warpwell's own, whether cached code is still good;
    None where there is only Warpwell's.
    """
    namespace = dict(scope, __name__=generated.__name__)
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


def compile_once(function: Callable[..., Any], signature: str) -> Any:
    """Return a dispatcher that is compiled for one signature.

    Of several processes that start together one compiles, and the others load what it keeps.
    """
    compiled = dispatcher(function)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder / f"{function.__module__}.{function.__name__}.lock", "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        compiled.compile(signature)
    return compiled


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


def cache_folder() -> pathlib.Path:
    """Return the folder of compiled code for these very sources and versions."""
    root = os.environ.get("WARPWELL_CACHE_DIR")
    base = pathlib.Path(root) if root else pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return base / "warpwell" / _sources_hash()


_hash: str | None = None


def _sources_hash() -> str:
    global _hash
    if _hash is None:
        import llvmlite
        import numba
        import numpy

        digest = hashlib.sha256()
        package = pathlib.Path(__file__).parents[1]
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
        for version in (sys.version, numba.__version__, llvmlite.__version__, numpy.__version__):
            digest.update(version.encode())
        _hash = digest.hexdigest()[:20]
    return _hash


def cache_key(function: Callable[..., Any], salt: str = "") -> str | None:
    """Return a key of a function with every Python helper and constant that it names; None for no caching.

    Numba's own key does not see a changed helper in another file. Functions without a file (a notebook's)
    and functions that close over or name anything we cannot hash are compiled each time.
    """
    digest = hashlib.sha256(salt.encode())
    seen: set[int] = set()

    def visit(value: Any) -> bool:
        if id(value) in seen:
            return True
        seen.add(id(value))
        value = getattr(value, "py_func", value)
        if isinstance(value, python_types.FunctionType):
            if value.__module__ and value.__module__.startswith("warpwell."):
                digest.update(f"{value.__module__}.{value.__qualname__}".encode())
                return _visit_cells(value)
            code = value.__code__
            if not os.path.exists(code.co_filename):
                return False
            digest.update(str(value.__module__).encode())  # Numba imports it when it loads what it kept
            return visit_code(code, value) and _visit_cells(value)
        if isinstance(value, python_types.ModuleType | type | python_types.BuiltinFunctionType):
            digest.update(repr(getattr(value, "__name__", value)).encode())
            return True
        if isinstance(value, int | float | complex | str | bytes | bool | None | tuple):
            digest.update(repr(value).encode())
            return True
        if type(value).__module__ == "numpy" and not hasattr(value, "ctypes"):
            digest.update(repr(value).encode())
            return True
        function_inside = getattr(value, "function", None)
        return function_inside is not None and visit(function_inside)

    def _visit_cells(value: python_types.FunctionType) -> bool:
        return all(visit(cell.cell_contents) for cell in value.__closure__ or ())

    def visit_code(code: python_types.CodeType, owner: python_types.FunctionType) -> bool:
        digest.update(code.co_code)
        for constant in code.co_consts:
            if isinstance(constant, python_types.CodeType):
                if not visit_code(constant, owner):
                    return False
            else:
                digest.update(repr(constant).encode())
        digest.update(repr(code.co_names + code.co_varnames).encode())
        return all(visit(owner.__globals__[n]) for n in code.co_names if n in owner.__globals__)

    return digest.hexdigest()[:24] if visit(function) else None


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

    class Cache(FunctionCache):
        _impl_class = Implementation

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass  # a folder that cannot be written raises here, not in the middle of a launch
    return Cache(function)
