"""Compile device code into functions that Python calls often.

`compiled` releases Python's global interpreter lock, and is called 0.4 us faster than a ctypes function. Functions that
make Python objects keep the lock (`method`), and are called in about 0.1 us.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..targets import private_memory
from ..targets.compiler import intrinsics_for

INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)
UINT16 = np.dtype(np.uint16)
UINT32 = np.dtype(np.uint32)
"""Types of words in memory, for `load_weak_as` and `store_weak_as`: device code cannot create them."""

_word_at = ctypes.c_ssize_t.from_address
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
LIST_ITEMS = object.__basicsize__ + 8
"""Offset of the address of the items of a list."""
TUPLE_ITEMS = tuple.__basicsize__
"""Offset of the items of a tuple."""
ARRAY_DATA = object.__basicsize__
"""Offset of the address of the contents of a NumPy array."""
_METH_FASTCALL_KEYWORDS = 0x82
_keep: list[Any] = []


class _MethodDefinition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@functools.cache
def python_function(name: str) -> int:
    """Return the C address of a function of Python's C API."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


def _has_known_layout() -> bool:
    """Return True if objects have the layout that the offsets above describe."""
    at, array = id(sample := b"contents"), np.empty(1)
    listed, single = [sample], (sample,)
    return (
        sys.implementation.name == "cpython"
        and ctypes.string_at(at + CONTENTS, 9) == b"contents\0"
        and ctypes.c_ssize_t.from_address(at + SIZE).value == len(sample)
        and ctypes.c_void_p.from_address(at + TYPE).value == id(bytes)
        and _word_at(id(array) + ARRAY_DATA).value == array.ctypes.data
        and _word_at(items_of(listed)).value == at == _word_at(id(single) + TUPLE_ITEMS).value
    )


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array's contents; `ndarray.ctypes` takes eight times as long."""
    return _word_at(id(array) + ARRAY_DATA).value


def huge_words(nbytes: int) -> NDArray[np.int64]:
    """Return zeroed memory that no other process shares, in huge pages if the system has them."""
    raw = private_memory(nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        raw.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(raw, np.int64, nbytes // 8)


def items_of(values: list[Any]) -> int:
    """Return the address of the addresses of a list's items, which is valid until the list changes."""
    return _word_at(id(values) + LIST_ITEMS).value


def method(function: Any, name: str, data: bytes, keep: Any) -> Callable[..., Any]:
    """Return a Python function, as a C extension would define it.

    Parameters
    ----------
    function : native function
        Receives the addresses of `data` (a bytes object) and of the arguments, the number of positional arguments, and
        the address of the names of keyword arguments or 0. Keeps the interpreter lock. Returns the address of a new
        reference, or 0 if a Python exception is set.
    keep : object
        An object to keep alive as long as the result.
    """
    definition = _MethodDefinition(name.encode(), function.address, _METH_FASTCALL_KEYWORDS, None)
    _keep.append(definition)
    create = ctypes.pythonapi.PyCFunction_NewEx
    create.restype = ctypes.py_object
    found: Callable[..., Any] = create(ctypes.byref(definition), ctypes.py_object(data), ctypes.py_object(keep))
    return found


if not _has_known_layout():
    raise ImportError("objects of this Python have an unknown layout: use a release build of CPython with the GIL")
