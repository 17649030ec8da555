"""A filter as sets of keys: what a kernel compares instead of values, for every type that can be compared.

Each value has a *key*, an integer (or bytes, of strings and binary), whose order is that of the values. A set of keys
is the ascending list of its *flips*: a key belongs to it if an odd number of flips is not greater than the key. So
``3 <= x < 7`` is ``[3, 7]``, ``x != 3`` of an int8 is ``[-128, 3, 4]``, and the complement adds or removes the least
key. All operators, lists and conjunctions over a column become one such set, which one search decides.

Keys of floats are their bits in the order of IEEE 754: negative zero and zero are neighbours, which each comparison
takes or leaves together, and NaN lies outside of the infinities, so that only complements (``!=``, ``not in``) have it.
"""

from __future__ import annotations

import datetime
import decimal
import math
import numbers
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError, DTypeError
from .layout import storage_of
from .library import arrow

Key = Any
"""An int, or bytes."""
Flips = list[Key]

OPERATORS = ("=", "==", "!=", "<", ">", "<=", ">=", "in", "not in")
_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_EPOCH = datetime.date(1970, 1, 1)
_DAY = 86_400 * 10**9


@dataclass(frozen=True)
class Keys:
    """How values of a type become keys.

    Attributes
    ----------
    least : int or bytes
        The least key.
    floor, ceiling : int or bytes or None
        Flips of the set of all values that compare with others: all but NaN; no ceiling for bytes.
    of : callable
        Returns the least and the greatest key that equal a Python value; None for a value that equals nothing (NaN).
        It raises ValueError or TypeError with a reason if the type does not have the value.
    """

    least: Key
    floor: Key
    ceiling: Key | None
    of: Callable[[Any], tuple[Key, Key] | None]


def set_of(name: str, kind: Any, op: Any, literal: Any) -> Flips:
    """Return the keys of a column's values for which a comparison is true.

    Parameters
    ----------
    name : str
        The column's, for messages.
    kind : pyarrow.DataType
        Of the values; of the values of its dictionary, if it has one.
    op : {"=", "==", "!=", "<", ">", "<=", ">=", "in", "not in"}
    literal : object
        A value; a list, tuple, set or array of values for the last two.

    Raises
    ------
    ArgumentError
        The operator is unknown, or the column's type does not have the value exactly.
    DTypeError
        Columns of this type are not compared.
    """
    if op not in OPERATORS:
        raise ArgumentError(f"{op!r} is no operator: give one of {', '.join(OPERATORS)}")
    keys = keys_of(name, kind)
    if op in ("in", "not in"):
        if isinstance(literal, str | bytes) or not isinstance(literal, Iterable):
            raise ArgumentError(f"column {name!r} {op} {literal!r:.60}: give a list of values")
        found: Flips = _union(_equal(_checked(keys, name, kind, one)) for one in literal)
        return found if op == "in" else complement(found, keys.least)
    pair = _checked(keys, name, kind, literal)
    if op == "!=":
        return complement(_equal(pair), keys.least)
    if pair is None:
        return []
    low, high = pair
    if op in ("=", "=="):
        return _equal(pair)
    if op in ("<", "<="):
        end = low if op == "<" else after(high)
        return [keys.floor, end] if keys.floor < end else []
    start = after(high) if op == ">" else low
    if keys.ceiling is None:
        return [start]
    return [start, keys.ceiling] if start < keys.ceiling else []


def after(key: Key) -> Key:
    """Return the least key that is greater."""
    return key + b"\0" if isinstance(key, bytes) else key + 1


def complement(flips: Flips, least: Key) -> Flips:
    """Return the keys that are not in a set."""
    return flips[1:] if flips and flips[0] == least else [least, *flips]


def intersection(a: Flips, b: Flips) -> Flips:
    """Return the keys that are in both sets."""
    found: Flips = []
    for key in sorted({*a, *b}):
        if (has(a, key) and has(b, key)) != (len(found) % 2 == 1):
            found.append(key)
    return found


def has(flips: Flips, key: Key) -> bool:
    """Return whether a key is in a set."""
    return bisect_right(flips, key) % 2 == 1


def codes_of(name: str, kind: Any, dictionary: Any, flips: Flips, least_code: int) -> Flips:
    """Return the set of the codes whose values in a dictionary are in a set of keys.

    A null in a dictionary is in no set, and neither is a code that the dictionary does not have. `least_code` is the
    key of code 0.
    """
    keys = keys_of(name, kind)
    found: Flips = []
    for code, value in enumerate(dictionary):
        pair = _value(keys, value)
        inside = value.is_valid and (has(flips, pair[0]) if pair is not None else has(flips, keys.least))
        if inside != (len(found) % 2 == 1):
            found.append(code + least_code)
    return [*found, len(dictionary) + least_code] if len(found) % 2 else found


def _value(keys: Keys, value: Any) -> tuple[Key, Key] | None:
    """Return the keys of a value that a column has."""
    return keys.of(value.as_py() if not hasattr(value, "value") else value) if value.is_valid else None


def _equal(pair: tuple[Key, Key] | None) -> Flips:
    return [] if pair is None else [pair[0], after(pair[1])]


def _union(sets: Iterable[Flips]) -> Flips:
    """Return the keys of several intervals that overlap wholly or not at all."""
    found: Flips = []
    for low, end in sorted({tuple(one) for one in sets if one}):
        if found and found[-1] == low:
            found[-1] = end
        else:
            found += [low, end]
    return found


def _checked(keys: Keys, name: str, kind: Any, literal: Any) -> tuple[Key, Key] | None:
    """Return the keys of a literal, or raise ArgumentError."""
    reason = ""
    try:
        if isinstance(literal, arrow().Scalar):
            literal = literal.as_py()
        if literal is None:
            raise ValueError("null matches nothing: leave it out")
        if isinstance(literal, np.generic) and not isinstance(literal, np.datetime64 | np.timedelta64):
            literal = literal.item()
        return keys.of(literal)
    except (ValueError, TypeError, OverflowError, decimal.DecimalException) as error:
        reason = str(error)
    raise ArgumentError(f"column {name!r} of {kind} is compared with {literal!r:.60}: {reason}", name="filters")


# -- types ------------------------------------------------------------------------------------------------------


def keys_of(name: str, kind: Any) -> Keys:
    """Return how values of a type become keys.

    Raises
    ------
    DTypeError
        Values of the type are not compared.
    """
    types, kind = arrow().types, storage_of(kind)
    if types.is_dictionary(kind):
        kind = storage_of(kind.value_type)
    if types.is_boolean(kind):
        return Keys(0, 0, 2, _of_bool)
    if types.is_integer(kind):
        signed, half = types.is_signed_integer(kind), 1 << (kind.bit_width - 1)
        return _integers(half, lambda value: _integer(value, half, signed))
    if types.is_floating(kind):
        return _floats(kind.bit_width)
    if types.is_decimal(kind) and kind.bit_width <= 128:
        return _integers(1 << (kind.bit_width - 1), lambda value: _decimal(value, kind.precision, kind.scale))
    if (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or (types.is_fixed_size_binary(kind) and kind.byte_width)
    ):
        text = types.is_string(kind) or types.is_large_string(kind)
        return Keys(b"", b"", None, lambda value: _bytes(value, text))
    clock = _clock(types, kind)
    if clock is not None:
        half = 1 << (kind.bit_width - 1)
        return _integers(half, lambda value: _integer(clock(value), half, True))
    hint = (
        "write it with ww.table.convert"
        if types.is_string_view(kind) or types.is_binary_view(kind)
        else "filter by another column"
    )
    raise DTypeError(
        f"column {name!r} is {kind}, which filters do not compare: {hint}, or filter in Polars, with ww.table.scan"
    )


def _integers(half: int, of: Callable[[Any], int]) -> Keys:
    return Keys(-half, -half, half, lambda value: (of(value),) * 2)


def _of_bool(value: Any) -> tuple[int, int]:
    if not isinstance(value, bool):
        raise TypeError("give True or False")
    return int(value), int(value)


def _integer(value: Any, half: int, signed: bool) -> int:
    """Return the key of an integer: unsigned ones begin at the least signed one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | decimal.Decimal):
        raise TypeError("give an integer")
    exact: Any = value
    if not math.isfinite(exact) or exact != int(exact):
        raise ValueError("it has no such value: give an integer")
    number = int(exact) - (0 if signed else half)
    if not -half <= number < half:
        low, high = (-half, half - 1) if signed else (0, 2 * half - 1)
        raise ValueError(f"it has values from {low} to {high} only")
    return number


def _floats(bits: int) -> Keys:
    dtype, whole = np.dtype(f"<f{bits // 8}"), np.dtype(f"<i{bits // 8}")
    most = (1 << (bits - 1)) - 1

    def key(value: Any) -> int:
        raw = int(np.asarray(value, dtype).view(whole))
        return raw ^ most if raw < 0 else raw

    def of(value: Any) -> tuple[int, int] | None:
        if isinstance(value, bool) or not isinstance(value, numbers.Real | decimal.Decimal):
            raise TypeError("give a number")
        if value != value:
            return None
        with np.errstate(over="ignore"):
            near = dtype.type(float(value))
        if math.isfinite(value) and (not np.isfinite(near) or float(near) != value):
            raise ValueError(f"the nearest it has is {float(near)!r}: give that, such as by numpy.{dtype}(...)")
        return (-1, 0) if value == 0 else (key(near), key(near))

    return Keys(-most - 1, key(-np.inf), key(np.inf) + 1, of)


def _decimal(value: Any, precision: int, scale: int) -> int:
    if isinstance(value, bool | float) or not isinstance(value, int | decimal.Decimal | str):
        raise TypeError("give an int or a decimal.Decimal")
    with decimal.localcontext(decimal.Context(prec=200)):
        scaled = decimal.Decimal(value).scaleb(scale)
    if not scaled.is_finite() or scaled != scaled.to_integral_value():
        raise ValueError(f"it has {scale} digits behind the point")
    if abs(scaled) >= 10**precision:
        raise ValueError(f"it has {precision} digits")
    return int(scaled)


def _bytes(value: Any, text: bool) -> tuple[bytes, bytes]:
    if text and isinstance(value, str):
        value = value.encode()
    elif text or not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("give a string" if text else "give bytes")
    return bytes(value), bytes(value)


# -- dates and times --------------------------------------------------------------------------------------------


def _clock(types: Any, kind: Any) -> Callable[[Any], int] | None:
    """Return the function from a value to the integer that a type of dates or times stores."""
    if types.is_date(kind):
        step = _DAY if types.is_date32(kind) else 10**6
        return lambda value: _exact(_date(value), step, kind)
    if types.is_timestamp(kind):
        return lambda value: _exact(_instant(value, kind.tz), _UNITS[kind.unit], kind)
    if types.is_duration(kind):
        return lambda value: _exact(_duration(value), _UNITS[kind.unit], kind)
    if types.is_time(kind):
        return lambda value: _exact(_time(value), _UNITS[kind.unit], kind)
    return None


def _exact(nanoseconds: int, step: int, kind: Any) -> int:
    number, rest = divmod(nanoseconds, step)
    if rest:
        raise ValueError("it has no such instant: give a multiple of its unit")
    return number


def _date(value: Any) -> int:
    if isinstance(value, np.datetime64):
        return _numpy_nanoseconds(value)
    if hasattr(value, "value") and hasattr(value, "as_py"):  # of a dictionary; Python has no years above 9999
        return int(value.value) * (_DAY if arrow().types.is_date32(value.type) else 10**6)
    if isinstance(value, datetime.datetime) or not isinstance(value, datetime.date):
        raise TypeError("give a datetime.date")
    return (value - _EPOCH).days * _DAY


def _instant(value: Any, zone: str | None) -> int:
    if hasattr(value, "value") and hasattr(value, "as_py"):  # of pyarrow: of a dictionary
        return int(value.value) * _UNITS[value.type.unit]
    if isinstance(value, np.datetime64):
        if zone is not None:
            raise TypeError(f"it has the zone {zone}: give a datetime.datetime with a zone")
        return _numpy_nanoseconds(value)
    if not isinstance(value, datetime.datetime):
        raise TypeError("give a datetime.datetime")
    if (value.tzinfo is None) != (zone is None):
        raise TypeError(
            "it has no zone: give a datetime.datetime without one"
            if zone is None
            else f"it has the zone {zone}: give a datetime.datetime with a zone"
        )
    start = datetime.datetime(1970, 1, 1, tzinfo=None if zone is None else datetime.UTC)
    extra = int(getattr(value, "nanosecond", 0))  # of pandas
    plain = value if not hasattr(value, "to_pydatetime") else value.to_pydatetime(warn=False)
    return _nanoseconds(plain - start) + extra


def _duration(value: Any) -> int:
    if hasattr(value, "value") and hasattr(value, "as_py"):
        return int(value.value) * _UNITS[value.type.unit]
    if isinstance(value, np.timedelta64):
        return int(value.astype("m8[ns]").astype(np.int64)) if not np.isnat(value) else _not_a_time()
    if not isinstance(value, datetime.timedelta):
        raise TypeError("give a datetime.timedelta")
    return _nanoseconds(value)


def _time(value: Any) -> int:
    if hasattr(value, "value") and hasattr(value, "as_py"):
        return int(value.value) * _UNITS[value.type.unit]
    if not isinstance(value, datetime.time) or value.tzinfo is not None:
        raise TypeError("give a datetime.time without a zone")
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 10**9 + value.microsecond * 1000


def _nanoseconds(span: datetime.timedelta) -> int:
    return (span.days * 86_400 + span.seconds) * 10**9 + span.microseconds * 1000


def _numpy_nanoseconds(value: np.datetime64) -> int:
    """Return the nanoseconds since 1970, exactly: as an integer of any size."""
    if np.isnat(value):
        _not_a_time()
    unit, count = np.datetime_data(value.dtype)
    if unit in ("Y", "M"):
        value, unit, count = value.astype("M8[D]"), "D", 1
    steps = {"W": 7 * _DAY, "D": _DAY, "h": _DAY // 24, "m": 60 * 10**9, **_UNITS}
    if unit not in steps:
        raise ValueError("it is finer than a nanosecond")
    return int(value.astype(np.int64)) * count * steps[unit]


def _not_a_time() -> int:
    raise ValueError("not a time matches nothing: leave it out")


def encoded(flips: Sequence[Key], wide: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return flips as words for the kernel, and the bytes that they point into.

    Integers are a word each, or two if `wide` (high, and low with the order of signed words); bytes are a start and an
    end. Flips behind the greatest word are left out: no key reaches them.
    """
    if flips and isinstance(flips[0], bytes):
        ends = np.cumsum([len(one) for one in flips], dtype=np.int64)
        starts = ends - np.array([len(one) for one in flips], np.int64)
        pool = np.frombuffer(b"".join(flips), np.uint8)
        return np.stack([starts, ends], axis=1).reshape(-1), pool
    words = [
        word
        for flip in flips
        if -(1 << (127 if wide else 63)) <= flip < 1 << (127 if wide else 63)
        for word in ((flip >> 64, (flip & ((1 << 64) - 1)) - (1 << 63)) if wide else (flip,))
    ]
    return np.array(words, np.int64), np.zeros(0, np.uint8)
