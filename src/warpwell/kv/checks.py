"""Checks of options: each names the option, what was given, and what to give."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from .. import errors
from .keys import as_utf8


def whole(name: str, value: Any, least: int | None, most: int | None = None) -> int:
    """Return a whole number in a range; raise ArgumentError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise errors.ArgumentError(f"{name} is {value!r}: give a whole number{_range(least, most)}", name=name)
    if (least is not None and value < least) or (most is not None and value > most):
        raise errors.ArgumentError(f"{name} is {value}: give {_range(least, most).removeprefix(', ')}", name=name)
    return int(value)


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Return a time; it must be finite, and more than 0 or, with `zero`, no less."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise errors.ArgumentError(f"{name} is {value!r}: give a number of seconds", name=name)
    if not (0 <= value <= _LONGEST if zero else 0 < value <= _LONGEST) or not math.isfinite(value):
        least = "0" if zero else "more than 0"
        raise errors.ArgumentError(f"{name} is {value}: give seconds, {least} to {_LONGEST:.0e}", name=name)
    return float(value)


_LONGEST = 1e9
"""Nanoseconds of it fit into a word."""


def flag(name: str, value: Any) -> bool:
    """Return True or False; raise ArgumentError for anything but these, 0 and 1."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise errors.ArgumentError(f"{name} is {value!r}: give True or False", name=name)


def share(name: str, value: Any) -> float:
    """Return a share, above 0 and at most 1."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:
        raise errors.ArgumentError(f"{name} is {value!r}: a share, above 0 and at most 1", name=name)
    return float(value)


def text(name: str, value: Any) -> bytes:
    """Return bytes, or a string's."""
    if isinstance(value, str):
        return as_utf8(value)
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise errors.ArgumentError(f"{name} is {value!r}: give bytes or str", name=name)
    return bytes(value)


def path_of(path: Any, name: str = "path") -> str:
    """Return a path as text."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise errors.ArgumentError(f"{name} is {path!r}: give a store's folder, as str or pathlib.Path", name=name)
    return text


def callback(name: str, value: Any) -> None:
    """Raise ArgumentError unless it can be called, or is None."""
    if value is not None and not callable(value):
        raise errors.ArgumentError(f"{name} is {value!r}: give a function, or leave it out", name=name)


def _range(least: int | None, most: int | None) -> str:
    if least is None:
        return ""
    return f", {least} or more" if most is None else f", {least} to {most}"
