"""Device code as compiled functions that Python calls."""

from __future__ import annotations

from typing import Any

from ..targets.compiler.hooks import seam_for

_compiled: dict[Any, Any] = {}


def compiled(function: Any) -> Any:
    """Return the compiled form of device code of any number of words (made or loaded once a process).

    It runs without the interpreter lock.
    """
    found = _compiled.get(function)
    if found is None:
        from ..targets.compiler.compiled import dispatcher  # imports the compiler: not before it is needed

        seam_for("cpu")
        found = _compiled[function] = dispatcher(function)
    return found
