"""Names of kernels: module and function, or path, function and the SHA-256 of the file.

A kernel is code, and importing its module runs code as the user of the device process. So the service decides which
names a user may send (`is_allowed`), and the device process runs exactly the bytes whose hash the client sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import linecache
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ... import errors
from ...targets import Kernel, stamp_of
from .messages import checked

MAX_FILE_BYTES = 4 << 20
"""Maximum size of a file of kernels."""

MAX_NAME, MAX_PATH = 200, 4096
"""Maximum length of a kernel's name, and of its module or path."""

in_device_process = False
"""True in a device process, which imports files that may try to use the service."""

_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)


def reference(kernel: Any) -> dict[str, str]:
    """Return the reference by which a device process finds a kernel: module in a package, otherwise path and hash.

    Raise ArgumentError if `kernel` is not a kernel, if no other process can find it, or if its file has changed.
    """
    if not isinstance(kernel, Kernel):
        text = f"{kernel!r:.80} is not a function with @ww.kernel: submit CUDA C++ to a Scheduler of your own"
        raise errors.ArgumentError(text, name="kernel")
    name, stamp, module = kernel.function.__qualname__, kernel.stamp, sys.modules.get(kernel.function.__module__)
    if not _NAME.fullmatch(name) or module is None or getattr(module, name, None) is not kernel:
        text = (
            f"{kernel.function.__module__} has no kernel {name!r} for a service: define it at the top level of a file"
        )
        raise errors.ArgumentError(text, name="kernel")
    path = _source(module)
    digest = _hash_of_imported(path, name, stamp) if path else ""
    if module.__name__ != "__main__" and module.__spec__ is not None and module.__spec__.parent:
        return {"module": module.__name__, "name": name, "sha256": digest}
    if path is None:
        raise errors.ArgumentError(f"kernel {name!r} has no file for a service: put it into a .py file", name="kernel")
    return {"path": str(path.resolve()), "name": name, "sha256": digest}


def check(named: Any) -> dict[str, str]:
    """Return a received reference; raise ServiceError if it is invalid."""
    where = "module" if isinstance(named, dict) and "module" in named else "path"
    found = {key: checked(named, key, str) for key in ("name", "sha256", where)}
    if where == "module":
        is_valid = _MODULE.fullmatch(found["module"]) is not None
    else:
        is_valid = found["sha256"] != "" and os.path.isabs(found["path"]) and "\0" not in found["path"]
    is_valid = is_valid and len(found["name"]) <= MAX_NAME and len(found[where]) <= MAX_PATH
    if not (is_valid and _NAME.fullmatch(found["name"]) and re.fullmatch(r"[0-9a-f]{64}|", found["sha256"])):
        raise errors.ServiceError("a kernel is named by module and name, or by absolute path, name and SHA-256")
    return found


def checked_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns of modules; raise ArgumentError if a pattern is not ``pkg.mod`` or ``pkg.*``."""
    for pattern in (found := tuple(patterns)):
        if not _MODULE.fullmatch(pattern.removesuffix(".*")):
            text = f"allow={pattern!r} is not a module: expected pkg.mod, or pkg.* for the modules below pkg"
            raise errors.ArgumentError(text, name="allow")
    return found


def is_allowed(named: dict[str, str], patterns: Iterable[str]) -> bool:
    """Return True if a pattern has the module of a kernel.

    The pattern must name a ``__main__``, which runs a program, and modules below it, because their import runs it.
    """
    module = named.get("module")
    if module is None:
        return False
    below = [p[:-1] for p in patterns if p.endswith(".*") and "__main__" not in module.split(".")]
    return module in patterns or any(module.startswith(prefix) for prefix in below)


class Kernels:
    """Imported kernels. Any thread may load a kernel, and waits only for threads that import the same file."""

    def __init__(self) -> None:
        self._modules: dict[tuple[str, str], ModuleType] = {}
        self._hashes: dict[str, str] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def load(self, named: dict[str, str]) -> Kernel:
        """Return the kernel of a reference.

        Raise SchedulerError if the object cannot be imported, differs from the client's file, or is not a kernel.
        """
        module = self._import(named["module"], named) if "module" in named else self._run(named["path"], named)
        kernel = getattr(module, named["name"], None)
        # A pattern that allows a module does not allow the kernels that the module imports from another one.
        if not isinstance(kernel, Kernel) or named.get("module") not in (None, kernel.function.__module__):
            text = (
                f"{describe(named)} is not a kernel: decorate a function at the top level of its file with @ww.kernel"
            )
            raise errors.SchedulerError(text, task=named["name"])
        return kernel

    def _import(self, name: str, named: dict[str, str]) -> ModuleType:
        package, before = name.partition(".")[0], {*sys.modules}
        try:
            with _importing(named):
                module = importlib.import_module(name)
        finally:
            # The files of other modules of the package may change before a client names them.
            new = {m for m in {*sys.modules} - before if m.partition(".")[0] == package}
            for each in sorted(new | ({name} & {*sys.modules})):
                path = _source(sys.modules[each])
                self._hashes.setdefault(each, _hash(path.read_bytes()) if path else "")
        if named["sha256"] not in ("", self._hashes[name]):
            text = f"{describe(named)} differs between the device process and your program: start the service again"
            raise errors.SchedulerError(text, task=named["name"])
        return module

    def _run(self, path: str, named: dict[str, str]) -> ModuleType:
        key = path, named["sha256"]
        with self._locks[path]:
            if key not in self._modules:
                try:
                    with open(path, "rb") as stream:
                        content = stream.read(MAX_FILE_BYTES + 1)
                except OSError as error:
                    text = f"the device process cannot read {path} ({error.strerror}): change its permissions"
                    raise errors.SchedulerError(text, task=named["name"]) from None
                if len(content) > MAX_FILE_BYTES or _hash(content) != named["sha256"]:
                    text = f"{path} has changed since your program read it: start your program again"
                    raise errors.SchedulerError(text, task=named["name"])
                # Compiled code is cached under the module's name, and is valid for all kernels that did not change.
                module = ModuleType(f"warpwell_kernels_{_hash(path.encode())[:20]}")
                module.__file__ = path
                # The compiler and its messages see the lines that run, even if the file changes.
                source = content.decode(errors="replace").splitlines(keepends=True)
                linecache.cache[path] = len(content), None, source, path
                sys.modules[module.__name__] = module
                with _importing(named):
                    exec(compile(content, path, "exec"), module.__dict__)
                self._modules[key] = module
            return self._modules[key]


def describe(named: dict[str, str]) -> str:
    """Return a reference as text for messages."""
    return f"{named.get('module') or named.get('path')}:{named['name']}"


@contextlib.contextmanager
def _importing(named: dict[str, str]) -> Iterator[None]:
    """Convert an exception of an import to a `SchedulerError`."""
    try:
        yield
    except (KeyboardInterrupt, errors.ServiceError):
        raise
    except BaseException as error:  # including SystemExit of a script without a guard
        text = (
            f"the device process could not import {named.get('module') or named['path']}: {type(error).__name__}: "
            f"{error}. Install it there; a script needs if __name__ == '__main__' before the code that it runs"
        )
        raise errors.SchedulerError(text, task=named["name"]) from None


def _source(module: ModuleType) -> Path | None:
    try:
        name = inspect.getsourcefile(module)
    except TypeError:
        return None
    return Path(name) if name and os.path.isfile(name) else None


_imported_hashes: dict[tuple[Path, tuple[int, int] | None], str] = {}
"""Hashes of files as this process has imported them, by path and stamp."""


def _hash_of_imported(path: Path, name: str, stamp: tuple[int, int] | None) -> str:
    """Return the hash of a kernel's file; raise ArgumentError if the file has changed since its import."""
    current, digest = stamp_of(path), _hash(path.read_bytes())
    if stamp in (None, current):
        _imported_hashes[path, stamp] = digest
    elif _imported_hashes.get((path, stamp)) != digest:
        text = f"{path} has changed since your program imported kernel {name!r}: use importlib.reload, or start again"
        raise errors.ArgumentError(text, name="kernel")
    return digest


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
