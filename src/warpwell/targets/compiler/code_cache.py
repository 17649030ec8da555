"""Compiled code on disk: `cache_folder`, the folder, and `cache_key`, the key of a function's code.

If the folder cannot be written, it is only read. Damaged files are detected (`read_kept`, `write_kept`).

Of several processes that need the same code, `file_lock` lets one compile it while the others wait.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from ..._os import file_lock
from ..._settings import settings
from .bytecode import ABSENT, VERSIONED, attributes, names_of, value_in

_DIGEST = 32  # size of the digest before the data


def read_kept(path: pathlib.Path) -> bytes | None:
    """Return the data of a file of `write_kept`; None if it is absent or damaged: LLVM would crash."""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
            return data[_DIGEST:]
    return None


def write_kept(path: pathlib.Path, data: bytes) -> None:
    """Write a file that appears whole, or, after a loss of power, damaged; others may read it if the user lets them."""
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_bytes(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_or_make(path: pathlib.Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of a cache file, or make and write it; of several processes, one makes it.

    The content is returned even if the cache cannot be written. `make` takes Numba's lock, and a thread that compiles
    calls this while it holds that lock. So no thread waits for Numba's lock while it holds the lock of the file.
    """
    if (found := read_kept(path)) is not None:
        return found
    from numba.core.compiler_lock import global_compiler_lock  # half a second, if Numba is not imported yet

    with global_compiler_lock, file_lock(path.with_suffix(".lock")):
        if (found := read_kept(path)) is None:
            found = make()
            with contextlib.suppress(OSError):
                write_kept(path, found)
    return found


def cache_folder() -> pathlib.Path:
    """Return the folder of compiled code for these very sources and versions."""
    return settings.cache_root / "warpwell" / _sources_hash()


@functools.cache
def sources_digest() -> str:
    """Return a digest of all Python sources of this package."""
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _sources_hash() -> str:
    digest = hashlib.sha256(sources_digest().encode())
    for found in (sys.version, *map(metadata.version, ("numba", "llvmlite", "numpy"))):
        digest.update(found.encode())
    return digest.hexdigest()[:20]


def cache_key(function: Callable[..., Any], salt: str = "") -> str | None:
    """Return a key of a function with every Python helper and constant that it names; None for no caching.

    Numba's own key does not see a changed helper in another file. Functions without a file (a notebook's) and functions
    that close over or name objects that cannot be hashed are compiled each time.
    """
    content = _Content()
    content.put(salt)
    try:
        content.take(function)
    except _UnknownContentError:
        return None
    return content.digest.hexdigest()[:24]


class _UnknownContentError(Exception):
    """A function names something that cannot be hashed."""


class _Content:
    """The digest of the content of a function. Its methods raise `_UnknownContentError`."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._numbers: dict[Any, int] = {}

    def put(self, *texts: object) -> None:
        """Add texts with their lengths: so two texts cannot be confused with another pair."""
        for text in texts:
            data = text if isinstance(text, bytes) else str(text).encode(errors="surrogatepass")
            self.digest.update(b"%d:" % len(data) + data)

    def take(self, value: Any, names: tuple[str, ...] = ()) -> None:
        """Add a value that is named by code, which also contains `names`."""
        if (target := getattr(value, "py_func", None)) is not None:
            self.put("compiled", repr(getattr(value, "targetoptions", None)))
            value = target
        if isinstance(value, types.FunctionType):
            if self._is_new(id(value)):
                self._function(value)
        elif isinstance(value, types.ModuleType):
            if self._is_new((id(value), names)):
                self._module(value, names)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, tuple):
            self.put("tuple", type(value).__qualname__, len(value))
            for item in value:
                self.take(item, names)
        elif isinstance(value, types.BuiltinFunctionType | np.ufunc):
            self.put("builtin", getattr(value, "__module__", ""), value.__name__)
        elif value is None or isinstance(value, int | float | complex | str | bytes | np.generic | np.dtype):
            self.put(type(value).__qualname__, repr(value))
        elif (inside := getattr(value, "function", None)) is not None:
            self.take(inside)
        else:
            raise _UnknownContentError

    def _is_new(self, identity: Any) -> bool:
        """Return True for the first time that an object is added; later add a reference."""
        number = self._numbers.get(identity)
        if number is None:
            self._numbers[identity] = len(self._numbers)
            return True
        self.put("again", number)
        return False

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self.put("function", function.__module__)  # Numba imports it when it loads what it kept
        is_own = (function.__module__ or "").startswith("warpwell.")
        names = () if is_own else names_of(code)
        if is_own:
            self.put(function.__qualname__)
        elif os.path.exists(code.co_filename):
            self._code(code)
        else:
            raise _UnknownContentError
        for name in names:
            if name in function.__globals__:
                self.put("global", name)
                self.take(function.__globals__[name], names)
        for cell in function.__closure__ or ():
            if (value := value_in(cell)) is ABSENT:  # Numba would not compile it either
                raise _UnknownContentError
            self.put("cell")
            self.take(value, names)
        if not is_own:
            self.take(function.__defaults__ or ())
            self.take(tuple((function.__kwdefaults__ or {}).items()))

    def _code(self, code: types.CodeType) -> None:
        self.put(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.put(repr(constant))

    def _module(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Add the values of `names` in a module, because the compiler looks them up there."""
        self.put("module", module.__name__)
        if module.__name__.partition(".")[0] not in VERSIONED:
            for name, value in attributes(module, names).items():
                self.put("attribute", name)
                self.take(value, names)

    def _class(self, value: type) -> None:
        self.put("class", value.__module__, value.__qualname__)
        if value.__module__.partition(".")[0] not in VERSIONED:
            if not issubclass(value, enum.Enum):
                raise _UnknownContentError  # its meaning is unknown
            for name, member in value.__members__.items():
                self.take((name, member.value))
