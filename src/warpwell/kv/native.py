"""Compile device code into functions that Python calls often.

`compiled` releases Python's global interpreter lock, and is called 0.4 us faster than a ctypes function. Functions that
make Python objects keep the lock: `with_objects` for batches, `method` for calls of about 0.1 us.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from ..targets.compiler import intrinsics_for

_compiled: dict[Any, Any] = {}


def compiled(function: Any) -> Any:
    """Return device code compiled for any number of words; compiled or loaded once a process.

    The function runs without Python's global interpreter lock.
    """
    found = _compiled.get(function)
    if found is None:
        from ..targets.compiler import dispatcher

        intrinsics_for("cpu")
        found = _compiled[function] = dispatcher(function)
    return found


CONTENTS = bytes.__basicsize__ - 1
"""Offset of the contents of a bytes object in CPython, in bytes."""
SIZE = CONTENTS - 16
"""Offset of the size of a bytes object."""
TYPE = object.__basicsize__ - 8
"""Offset of the type of an object."""
_METH_O = 8
_keep: list[Any] = []


class _MethodDefinition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def python_function(name: str) -> int:
    """Return the C address of a function of Python's C API."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


def has_known_layout() -> bool:
    """Return True if objects have the layout that `CONTENTS`, `SIZE` and `TYPE` describe."""
    at = id(sample := b"contents")
    return (
        sys.implementation.name == "cpython"
        and ctypes.string_at(at + CONTENTS, 9) == b"contents\0"
        and ctypes.c_ssize_t.from_address(at + SIZE).value == len(sample)
        and ctypes.c_void_p.from_address(at + TYPE).value == id(bytes)
    )


def with_objects(function: Any, *types: Any) -> Callable[..., int]:
    """Return a native function that keeps the interpreter lock and may set a Python exception."""
    call: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int64, *types)(function.address)
    return call


def method(function: Any, name: str, data: bytes, keep: Any) -> Callable[[Any], Any]:
    """Return a Python function of one argument, as a C extension would define it.

    Parameters
    ----------
    function : native function
        Receives the addresses of `data` (a bytes object) and of the argument, and returns the address of a new
        reference; 0 if a Python exception is set.
    keep : object
        Lives as long as the result.
    """
    definition = _MethodDefinition(name.encode(), function.address, _METH_O, None)
    _keep.append(definition)
    create = ctypes.pythonapi.PyCFunction_NewEx
    create.restype = ctypes.py_object
    found: Callable[[Any], Any] = create(ctypes.byref(definition), ctypes.py_object(data), ctypes.py_object(keep))
    return found
