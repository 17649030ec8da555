"""Registers objects by name, so that a folder finds objects of the folders above it.

A folder imports only from folders below it. `warpwell/__init__.py` is above all of them: it registers the names of
Warpwell with their paths, so that a module is imported on first use.

========== ============================================================== ============================================
kind       name                                                           object at the path
========== ============================================================== ============================================
service    object that ``device.create(name, ...)`` creates on an agent   the callable that creates it there
stand-in   a service whose objects have a class of their own here         that class; see `warpwell.remote.stand_in`
scheduler  ``"pool"``: object that ``Scheduler(devices=...)`` returns     the class
========== ============================================================== ============================================

`on_first_use` imports the names of a folder if most of its users need only a few of them.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ArgumentError

importing = threading.RLock()
"""Held while modules of Warpwell are imported on first use: threads that import different modules could deadlock."""


def _renew() -> None:
    """Replace the lock in a forked child: the thread that held it does not exist there."""
    global importing
    importing = threading.RLock()


os.register_at_fork(after_in_child=_renew)

_paths: dict[str, dict[str, str]] = {"service": {}, "stand-in": {}, "scheduler": {}}


def register(kind: str, name: str, path: str) -> None:
    """Register a path under a name; a later path replaces an earlier one.

    Parameters
    ----------
    kind : {"service", "stand-in", "scheduler"}
    name : str
    path : str
        ``"module:attribute"``. The module is imported when the name is first used.

    Raises
    ------
    ArgumentError
        The path is not of this form.

    Examples
    --------
    >>> from warpwell import registry
    >>> registry.register("service", "zip", "zipfile:ZipFile")
    >>> registry.path_of("service", "zip")
    'zipfile:ZipFile'
    """
    if path.count(":") != 1:
        raise ArgumentError(f"{path!r}: give 'module:callable'", name="path")
    _paths[kind][name] = path


def is_registered(kind: str, name: str) -> bool:
    """Return whether a name has a path."""
    return name in _paths[kind]


def path_of(kind: str, name: str) -> str:
    """Return the path of a registered name; return a path unchanged.

    Raises
    ------
    ArgumentError
        The name is not registered.
    """
    if not isinstance(name, str) or name.count(":") > 1:
        raise ArgumentError(f"{name!r:.60}: give the name of a {kind}, or 'module:callable'", name=kind)
    if ":" in name:
        return name
    try:
        return _paths[kind][name]
    except KeyError:
        names = ", ".join(sorted(_paths[kind]))
        raise ArgumentError(f"unknown {kind} {name!r}: choose one of {names}", name=kind) from None


def load(path: str) -> Any:
    """Import the module of a path, and return the attribute."""
    module, _, name = path.partition(":")
    # A program's own module is imported without the lock: it may start threads that use Warpwell, and wait for them.
    with importing if module.startswith(f"{__package__}.") else contextlib.nullcontext():
        found: Any = importlib.import_module(module)
    for attribute in name.split("."):
        found = getattr(found, attribute)
    return found


def on_first_use(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports some names when they are first used.

    Parameters
    ----------
    package : str
        Its ``__name__``.
    homes : mapping of str to str
        Module of each name: ``"module"``, or ``"module:"`` if it has the same name there, or ``"module:other"``.
    """

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, colon, inside = homes[name].partition(":")
        with importing:
            found: Any = importlib.import_module(f"{package}.{module}")
        if colon:
            found = getattr(found, inside or name)
        vars(sys.modules[package])[name] = found
        return found

    def dir_() -> list[str]:
        module = sys.modules[package]
        # Names of built-in functions are not in __all__, because of star imports.
        built_in = homes.keys() & vars(builtins).keys()
        return sorted({*module.__all__, *built_in, *(name for name in vars(module) if name.startswith("__"))})

    return getattr_, dir_
