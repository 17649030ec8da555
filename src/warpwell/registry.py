"""Services and stand-ins by name, so that a folder finds objects of the folders above it; imports on first use.

A folder imports only from folders below it. The paths here are text, so that a module is imported when an object is
first used. `on_first_use` imports the names of a folder if most of its users need only a few of them.
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

services: dict[str, str] = {}
"""Paths of the callables that ``device.create(name, ...)`` calls on an agent; `warpwell` fills this table and
`stand_ins`."""
stand_ins: dict[str, str] = {}
"""Paths of the classes of proxies for objects on agents, by service; default: ``warpwell.pool.Remote``."""


def path_of(service: str) -> str:
    """Return the path of a service; return a path unchanged.

    Raises
    ------
    ArgumentError
        There is no service of this name.
    """
    if not isinstance(service, str) or service.count(":") > 1:
        raise ArgumentError(f"{service!r:.60}: give the name of a service, or 'module:callable'", name="service")
    if ":" not in service and service not in services:
        names = ", ".join(sorted(services))
        raise ArgumentError(f"unknown service {service!r}: choose one of {names}", name="service")
    return services.get(service, service)


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
        Module of each name: ``"module"``, or ``"module:"`` if it has the same name there, or ``"module:other"``. A path
        that starts with a point is of the folder that contains `package`.
    """

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, colon, inside = homes[name].partition(":")
        with importing:
            found: Any = importlib.import_module(f".{module}", package)
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
