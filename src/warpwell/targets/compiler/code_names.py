"""`names_of`: the names that code says; `attributes`: what they mean in a module."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any


def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of variables and attributes that code says, that of functions within included, each once."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(names_of(constant)))
    return tuple(found)


def attributes(module: types.ModuleType, names: Iterable[str]) -> dict[str, Any]:
    """Return those of `names` that a module has, in the order of the alphabet.

    It is asked for them: a module may import them no sooner, as `warpwell` itself does.
    """
    there = {*vars(module), *dir(module)}
    return {name: getattr(module, name, None) for name in sorted(there.intersection(names))}
