"""Checks of options that are numbers: one way to refuse 2.5, NaN and infinity, wherever an option is read."""

from __future__ import annotations

import math
import operator
from typing import Any

from .general import ArgumentError


def checked_integer(value: Any, name: str, *, least: int = 1, most: int | None = None) -> int:
    """Return an option that counts something as an int.

    Parameters
    ----------
    value : int or numpy integer
        What the caller gave. Booleans and floats are refused, whole ones included.
    name : str
        The option, for the message.
    least, most : int, optional
        Bounds, both allowed values.

    Raises
    ------
    ArgumentError
        Not an integer, or outside of the bounds.
    """
    bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} is an integer {bounds}, not {value!r:.60}", name=name) from None
    if number < least or (most is not None and number > most):
        raise ArgumentError(f"{name} is an integer {bounds}, not {number}", name=name)
    return number


def checked_seconds(value: Any, name: str, *, most: float = 1e9) -> float:
    """Return an option that is a time as a float: above 0, and at most `most` seconds.

    Raises
    ------
    ArgumentError
        No number, not above 0, NaN, infinite or above `most`: every wait has a bound.
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= most:
        raise ArgumentError(f"{name} is a number of seconds above 0 and up to {most:g}, not {value!r:.60}", name=name)
    return number
