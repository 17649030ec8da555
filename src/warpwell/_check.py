"""Checks of options: each message names the option, its value and the expected value.

`checked_integer`, `checked_number`, `checked_seconds`, `checked_timeout`, `checked_share` read numbers, and refuse
2.5 blocks, NaN and infinity; `checked_nbytes` reads sizes such as "4KiB", `checked_device` devices such as "cuda:0";
`checked_flag`, `checked_bytes`, `checked_path`, `checked_callable`, `checked_shape` and `checked_dtype` read the rest.
Each takes the value and the option's name, and returns the value in its plain type.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import operator
import os
import re
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, DTypeError

if TYPE_CHECKING:
    import numpy as np

LONGEST = 1e9
"""The longest time-out in seconds: in nanoseconds it fits into 64 bits."""


def extra(name: str) -> str:
    """Return how to install an extra of Warpwell, for messages: its name, and the command in a checkout."""
    return f"Warpwell's extra [{name}] (in a checkout: pip install -e '.[{name}]')"


def imported(module: str, needs: str = "") -> Any:
    """Return a module of another package.

    Parameters
    ----------
    module : str
    needs : str
        The extra of Warpwell that installs the package, if one does.

    Raises
    ------
    ArgumentError
        The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        source = extra(needs) if needs else f"it (pip install {package})"
        raise ArgumentError(f"this needs the package {package}: install {source}") from error


def checked_integer(
    value: Any, name: str, *, minimum: int | None = 1, maximum: int | None = None, of: str | None = None
) -> int:
    """Return an option that counts something as an int.

    Parameters
    ----------
    value : int or numpy integer
        The caller's value. Booleans and floats are refused, even whole numbers.
    name : str
        The option, for the message.
    minimum, maximum : int, optional
        Bounds, both allowed values.
    of : str, optional
        Owner of the option, for the message: "task 'a'".

    Raises
    ------
    ArgumentError
        The value is not an integer, or outside of the bounds.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise _refused(value, name, of, f"an integer{_bounds(minimum, maximum)}") from None
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise _refused(number, name, of, f"an integer{_bounds(minimum, maximum)}")
    return number


_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:B|([KMGT])i?B?)?\s*", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def checked_nbytes(
    value: Any, name: str = "size", *, minimum: int = 1, maximum: int | None = None, of: str | None = None
) -> int:
    """Return an option that is a size in bytes as an int.

    Parameters
    ----------
    value : int or str
        Bytes, or a text such as "4k", "4K", "4KB", "4KiB" (all are 4096), "256MiB", "1.5 GB" or "4096". K, M, G and T
        are powers of 1024 in every spelling.
    name : str
        The option, for the message.
    minimum, maximum : int, optional
        Bounds, both allowed values.
    of : str, optional
        Owner of the option, for the message: "task 'a'".

    Raises
    ------
    ArgumentError
        The value is not a size, or outside of the bounds.
    """
    nbytes = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is not None:
            from fractions import Fraction  # exact for any number of digits; imported only for text

            nbytes = int(Fraction(match[1]) * _UNITS[(match[2] or "").lower()])
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            nbytes = operator.index(value)
    title = name if of is None else f"{name} of {of}"
    if nbytes is None:
        raise ArgumentError(f'{title} {shown(value)} is not a size: pass bytes, or a text such as "256MiB"', name=name)
    if nbytes < minimum or (maximum is not None and nbytes > maximum):
        limits = f"at least {minimum:,}" if maximum is None else f"{minimum:,} to {maximum:,}"
        raise ArgumentError(f"{title} must be {limits} bytes, got {shown(value)}", name=name)
    return nbytes


def checked_device(
    value: Any, name: str = "device", *, among: Sequence[str] = ("cpu", "cuda", "interp"), every_gpu: bool = False
) -> str:
    """Return an option that is a device as one of `among`.

    Parameters
    ----------
    value : str or torch.device
        "cuda:0" means "cuda", and "cpu:0" means "cpu", as PyTorch writes them.
    name : str
        The option, for the message.
    among : sequence of str
        Devices that are allowed.
    every_gpu : bool
        Also return "cuda:1" and so on.

    Raises
    ------
    ArgumentError
        The value is not a device, or is another GPU than the first and `every_gpu` is False.
    """
    if type(value) is str and value in among:
        return value
    text = str(value) if isinstance(value, str) or type(value).__module__.partition(".")[0] == "torch" else ""
    match = re.fullmatch(r"(cpu|cuda):([0-9]{1,9})", text)
    if match is not None and match[1] in among:
        ordinal = int(match[2])
        if not ordinal:
            return match[1]
        if match[1] == "cuda" and every_gpu:
            return f"cuda:{ordinal}"
        if match[1] == "cuda":
            raise ArgumentError(
                f'{name} {text!r} is not available: the only GPU here is "cuda", the first GPU that the process sees; '
                f"to use GPU {ordinal}, start the program with CUDA_VISIBLE_DEVICES={ordinal}",
                name=name,
            )
    if text in among:
        return text
    expected = [*among, *(["cuda:1"] if every_gpu else [])]
    raise ArgumentError(f"unknown {name} {shown(value)}; expected one of {', '.join(expected)}", name=name)


def checked_number(value: Any, name: str, *, maximum: float, of: str | None = None) -> int | float:
    """Return an amount, from 0 to `maximum`, as an int or float. Integers of any size are compared, not converted.

    Raises
    ------
    ArgumentError
        The value is not a real number, is NaN, or is outside of the bounds.
    """
    number: Any = value if isinstance(value, Real) else math.nan
    if not 0 <= number <= maximum:
        raise _refused(value, name, of, f"a number from 0 to {maximum:g}")
    return number if type(number) in (int, float) else float(number)


def checked_seconds(value: Any, name: str, *, zero: bool = False) -> float:
    """Return an option that is a time as a float: above 0 (or, with `zero`, not below), and at most `LONGEST` seconds.

    Raises
    ------
    ArgumentError
        The value is not a number, is NaN or infinite, or is outside of the bounds: every wait has a bound.
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (0 <= number <= LONGEST if zero else 0 < number <= LONGEST):
        raise _refused(value, name, None, f"seconds, {'0 or more' if zero else 'more than 0'}, up to {LONGEST:g}")
    return number


def checked_timeout(value: Any, name: str = "timeout") -> float | None:
    """Return a timeout, 0 or more seconds, or None if none was given.

    Raises
    ------
    ArgumentError
    """
    return None if value is None else checked_seconds(value, name, zero=True)


def checked_share(value: Any, name: str) -> float:
    """Return a share, above 0 and at most 1.

    Raises
    ------
    ArgumentError
    """
    number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Real) else value
    if not 0 < number <= 1:
        raise _refused(value, name, None, "a share, above 0 and at most 1")
    return float(number)


def checked_flag(value: Any, name: str) -> bool:
    """Return True or False; 0 and 1 are accepted.

    Raises
    ------
    ArgumentError
    """
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    import numpy as np  # here, because the command line checks options without NumPy

    if isinstance(value, np.bool_):
        return bool(value)
    raise _refused(value, name, None, "True or False")


def checked_bytes(value: Any, name: str) -> bytes:
    """Return bytes, or a string in UTF-8.

    Raises
    ------
    ArgumentError
        The value is not bytes or a string, or is a string with surrogates.
    """
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise ArgumentError(
                f"{name} {value!r:.60} has characters that UTF-8 cannot encode (surrogates): pass its bytes, as "
                "os.fsencode gives those of a file's name",
                name=name,
            ) from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise _refused(value, name, None, "bytes or str")


def checked_path(value: Any, name: str = "path") -> str:
    """Return a path as text.

    Raises
    ------
    ArgumentError
        The value is not a path, is a path of bytes, or is empty.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise _refused(value, name, None, "a path, as str or pathlib.Path")
    return text


def checked_callable(value: Any, name: str) -> None:
    """Raise ArgumentError unless the value is None or can be called."""
    if value is not None and not callable(value):
        raise _refused(value, name, None, "a function, or leave it out")


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape of an array as a tuple of integers.

    Raises
    ------
    ArgumentError
        The value is not an integer or a tuple of integers, or one is negative.
    MemoryError
        No device has memory for that number of items.
    """
    extents = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, str | bytes) else (shape,)
    try:
        found = tuple(operator.index(n) for n in extents)
    except TypeError:
        raise _refused(shape, "shape", None, "an integer, or a tuple of them") from None
    if any(n < 0 for n in found):
        raise ArgumentError(f"shape {shape} has a negative extent", name="shape")
    if math.prod(found) >= 1 << 59:
        raise MemoryError(f"shape {shape} has more items than any device has room for")
    return found


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of items that can be on a device.

    Raises
    ------
    DTypeError
        The value is not a dtype, or is a dtype of Python objects.
    """
    import numpy as np  # here, because the command line checks options without NumPy

    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(f"dtype {dtype!r:.60}: {error}") from None
    if kind.hasobject:
        raise DTypeError(f"{kind} holds Python objects, which exist in one process only")
    return kind


def shown(value: Any) -> str:
    """Return a value for messages, truncated to 60 characters; Python refuses to print very long integers."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.60}"


def _refused(value: Any, name: str, of: str | None, expected: str) -> ArgumentError:
    owner = "" if of is None else f" of {of}"
    return ArgumentError(f"{name}{owner} is {shown(value)}: give {expected}", name=name)


def _bounds(minimum: int | None, maximum: int | None) -> str:
    if minimum is None:
        return "" if maximum is None else f", up to {maximum}"
    return f" from {minimum} to {maximum}" if maximum is not None else f", {minimum} or more"
