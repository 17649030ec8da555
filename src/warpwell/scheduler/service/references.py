"""How a kernel is named to a service: ``module:function``, or a file, a name and the hash of the file's content.

A kernel is code. Whoever may name any module or file can run any code as the owner's user, because importing runs a
module. So the service decides who may name what (`allowed`), and the owner runs exactly the bytes that the client saw:
a file is hashed after it was read, and exactly the hashed bytes run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ... import errors
from ...targets import Kernel, Launch, stamp_of
from .protocol import checked

MAX_FILE = 4 << 20
"""Bytes of a file of kernels at most."""

MAX_NAME, MAX_PATH = 200, 4096
"""Letters of a kernel's name, and of its module or path."""

in_owner = False
"""Whether this process is a service's owner (which imports files that may try to use the service)."""

_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)


def reference(kernel: Any) -> dict[str, str]:
    """Return how a service's owner finds a kernel.

    Kernels of a package are named by module, those of a script or of a single file by path and hash.

    Raises
    ------
    ArgumentError
        It is not a kernel, or lies where no other process finds it, or in a file that has changed since.
    """
    if isinstance(kernel, Launch):
        raise errors.ArgumentError("this is a launch with its arguments left out: pass kernel[n]", name="kernel")
    if not isinstance(kernel, Kernel):
        raise errors.ArgumentError(
            f"{kernel!r:.80} is not a function with @ww.kernel, and a service takes nothing else: CUDA C++ is for a "
            "Scheduler of your own",
            name="kernel",
        )
    function, stamp = kernel.function, kernel.stamp
    name, module = function.__qualname__, sys.modules.get(function.__module__)
    if not _NAME.fullmatch(name) or module is None or getattr(module, name, None) is not kernel:
        raise errors.ArgumentError(
            f"kernel {name!r} is not found by its name in {function.__module__}: a service imports it, so define it at "
            "the top level of a module or script, under its own name",
            name="kernel",
        )
    path = _source(module)
    spec = module.__spec__
    if module.__name__ != "__main__" and spec is not None and spec.parent:
        return {"module": module.__name__, "name": name, "sha256": _hash_of(path, name, stamp) if path else ""}
    if path is None:
        raise errors.ArgumentError(
            f"kernel {name!r} has no file that a service could read (a notebook, or python -c): put it into a .py file",
            name="kernel",
        )
    return {"path": str(path.resolve()), "name": name, "sha256": _hash_of(path, name, stamp)}


def check(named: dict[str, Any]) -> dict[str, str]:
    """Return a reference that came from a peer; raise ServiceError unless it is well-formed."""
    found = {key: checked(named, key, str) for key in ("name", "sha256")}
    where = "module" if "module" in named else "path"
    found[where] = checked(named, where, str)
    if len(found["name"]) > MAX_NAME or len(found[where]) > MAX_PATH:
        raise errors.ServiceError(f"a kernel has a name of over {MAX_NAME} letters, or a path of over {MAX_PATH}")
    good = bool(_NAME.fullmatch(found["name"]) and re.fullmatch(r"[0-9a-f]{64}|", found["sha256"]))
    if where == "module":
        good = good and _MODULE.fullmatch(found["module"]) is not None
    else:
        good = good and found["sha256"] != "" and os.path.isabs(found["path"]) and "\0" not in found["path"]
    if not good:
        raise errors.ServiceError("a kernel is named by module and name, or by absolute path, name and SHA-256")
    return found


def checked_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return what may be launched by others: modules (``pkg.mod``), and ``pkg.*`` for all modules below a package.

    Raise ArgumentError if one is neither.
    """
    found = tuple(patterns)
    for pattern in found:
        if not _MODULE.fullmatch(pattern.removesuffix(".*")):
            raise errors.ArgumentError(
                f"allow={pattern!r} names no module: give pkg.mod for one module, and pkg.* for those below pkg",
                name="allow",
            )
    return found


def allowed(named: dict[str, str], patterns: Iterable[str]) -> bool:
    """Tell whether a reference names a kernel of one of these modules; of ``pkg.*``, modules below `pkg`.

    A ``__main__`` must be named itself: importing it runs a program.
    """
    module = named.get("module")
    if module is None:
        return False
    below = [p[:-1] for p in patterns if p.endswith(".*") and module.rpartition(".")[2] != "__main__"]
    return module in patterns or any(module.startswith(prefix) for prefix in below)


def told(named: dict[str, str]) -> str:
    """Return a reference for people."""
    return f"{named.get('module') or named.get('path')}:{named['name']}"


class Kernels:
    """Imported kernels. Any thread may load one, and waits only for threads that import the same file.

    Parameters
    ----------
    spool : Path
        A folder of this user alone for copies of files, so that the hashed bytes run, and the compiler finds the source
        even if the original changes.
    """

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._copies: dict[str, str] = {}  # and what each is a copy of
        self._modules: dict[tuple[str, str], ModuleType] = {}
        self._hashes: dict[str, str] = {}
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def load(self, named: dict[str, str]) -> Kernel:
        """Return the kernel of a reference.

        Raise SchedulerError if it cannot be imported, differs from the client's file, or is not a kernel.
        """
        module = self._module(named) if "module" in named else self._file(named)
        kernel = getattr(module, named["name"], None)
        if isinstance(kernel, Kernel) and named.get("module") not in (None, kernel.function.__module__):
            # allowing a module does not allow kernels that it imports from another one
            kernel = None
        if not isinstance(kernel, Kernel):
            raise errors.SchedulerError(
                f"{told(named)} is not a kernel for the service's owner: decorate the function with @ww.kernel, at the "
                "top level of its file",
                task=named["name"],
            )
        return kernel

    def _module(self, named: dict[str, str]) -> ModuleType:
        name = named["module"]
        package, before = name.partition(".")[0], {*sys.modules}
        try:
            with _importing(named):
                module = importlib.import_module(name)
        finally:
            # with all that it imported of its package: their files may have changed when they are named themselves
            self._note({m for m in {*sys.modules} - before if m.partition(".")[0] == package})
        self._note([name])
        if named["sha256"] not in ("", self._hashes[name]):
            raise errors.SchedulerError(
                f"{told(named)} is another one for the service's owner than for you: its file has changed, or it is "
                "installed twice. Start the service again",
                task=named["name"],
            )
        return module

    def _note(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._hashes and name in sys.modules:
                path = _source(sys.modules[name])
                self._hashes[name] = _hash(path) if path else ""

    def _file(self, named: dict[str, str]) -> ModuleType:
        key = (named["path"], named["sha256"])
        with self._lock:
            lock = self._locks.setdefault(named["path"], threading.Lock())
        with lock:
            if key not in self._modules:
                self._modules[key] = self._import(named)
            return self._modules[key]

    def _import(self, named: dict[str, str]) -> ModuleType:
        copy = self._copy(named)
        # named by path: compiled code is kept under the module's name, and good for all kernels that did not change
        name = f"warpwell_kernels_{hashlib.sha256(named['path'].encode()).hexdigest()[:20]}"
        spec = importlib.util.spec_from_file_location(name, copy)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            with _importing(named):
                spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module

    def _copy(self, named: dict[str, str]) -> Path:
        path = Path(named["path"])
        try:
            with open(path, "rb") as stream:
                content = stream.read(MAX_FILE + 1)
        except OSError as error:
            raise errors.SchedulerError(
                f"the service's owner cannot read {path}: {error.strerror}. Put the kernel where it can",
                task=named["name"],
            ) from None
        if len(content) > MAX_FILE or hashlib.sha256(content).hexdigest() != named["sha256"]:
            raise errors.SchedulerError(
                f"{path} is not the file that you have: it has changed since your program read it. Start it again",
                task=named["name"],
            )
        folder = self._spool / named["sha256"][:20]
        folder.mkdir(mode=0o700, exist_ok=True)
        copy = folder / f"{path.stem}.py"
        copy.write_bytes(content)
        self._copies[str(copy)] = named["path"]
        return copy

    def told(self, text: str) -> str:
        """Return a text for people with the files that they have in place of our copies."""
        for copy, path in list(self._copies.items()):
            text = text.replace(copy, path)
        return text


@contextlib.contextmanager
def _importing(named: dict[str, str]) -> Iterator[None]:
    """Turn what an import raises into a `SchedulerError`."""
    try:
        yield
    except (KeyboardInterrupt, errors.ServiceError):
        raise
    except BaseException as error:  # SystemExit of a script without a guard is among them
        raise errors.SchedulerError(
            f"the service's owner could not import {named.get('module') or named.get('path')}: "
            f"{type(error).__name__}: {error}. It must be installed where the owner runs, or be a single file; what a "
            "script runs belongs under if __name__ == '__main__'",
            task=named["name"],
        ) from None


def _source(module: ModuleType) -> Path | None:
    try:
        name = inspect.getsourcefile(module)
    except TypeError:
        return None
    return Path(name) if name and os.path.isfile(name) else None


_read: dict[tuple[Path, tuple[int, int] | None], str] = {}
"""Hashes of files as this process has imported them, by path and stamp."""


def _hash_of(path: Path, name: str, stamp: tuple[int, int] | None) -> str:
    """Return the hash of a kernel's file, which must be the one that was imported: the owner runs what is there now."""
    now, found = stamp_of(path), _hash(path)
    if stamp in (None, now):
        _read[path, stamp] = found
    elif _read.get((path, stamp)) != found:
        raise errors.ArgumentError(
            f"{path} has changed since your program imported kernel {name!r}, and the service would run the new one: "
            "start your program again, or reload the module (importlib.reload) and take the kernel from it anew",
            name="kernel",
        )
    return found


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
