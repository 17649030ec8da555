"""Launches, options and errors as plain data: a client packs them, a service checks them, an owner unpacks them.

An argument travels as a pair: ``["array", k]`` is array k of the message, ``["scalar", k]`` an array of one item that
is a NumPy number, ``["int", n]``, ``["float", x]``, ``["bool", b]`` Python's numbers, and ``["buffer", n]`` an array
that an earlier call left on the device, and ``["lent", k]`` array k of those in the client's own memory on the GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...libcuda import HANDLE
from ..task import Kind, Profile
from . import references
from .protocol import ITEMS, MAX_ARRAYS, ServiceMessage, checked
from .references import MAX_NAME

MAX_TASKS = 256
"""Launches in a request at most."""

MAX_ARGUMENTS = 256
_HANDLE = re.compile(f"[0-9a-f]{{{2 * HANDLE}}}")
MAX_THREADS = 1 << 40
"""Threads of a launch at most."""

MAX_DEADLINE = 1e9
"""Seconds of a deadline at most. A deadline that is not a float would crash the owner."""

MAX_LENT = 1 << 48
"""Bytes, and items, that lent memory may have at most."""

INTS = range(-(1 << 63), 1 << 63)


def check_task(task: Any, arrays: Sequence[NDArray[Any]], lent: int = 0) -> dict[str, Any]:
    """Return a launch that came from a peer; raise ServiceError unless every part of it is well-formed."""
    if not isinstance(task, dict):
        raise errors.ServiceError("a task of a request is not an object")
    shape, arguments = checked(task, "shape", list), checked(task, "arguments", list)
    if not (1 <= len(shape) <= 3 and _integers(shape, 1)) or math.prod(shape) > MAX_THREADS:
        raise errors.ServiceError(f"launch shape {shape!r:.60} is not 1 to 3 positive integers, 2**40 threads at most")
    if len(arguments) > MAX_ARGUMENTS:
        raise errors.ServiceError(f"a launch has {len(arguments)} arguments: at most {MAX_ARGUMENTS} are taken")
    return {
        "kernel": references.check(checked(task, "kernel", dict)),
        "shape": shape,
        "arguments": [_check_argument(a, arrays, lent) for a in arguments],
    }


def _check_argument(pair: Any, arrays: Sequence[NDArray[Any]], lent: int) -> list[Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise errors.ServiceError("an argument is not a pair of a kind and a value")
    kind, value = pair
    good = False
    if kind in ("array", "scalar"):
        good = type(value) is int and 0 <= value < len(arrays) and (kind == "array" or arrays[value].shape == ())
    elif kind == "lent":
        good = type(value) is int and 0 <= value < lent
    elif kind in ("int", "buffer"):
        good = type(value) is int and value in INTS
    elif kind == "float":
        good = isinstance(value, float)
    elif kind == "bool":
        good = isinstance(value, bool)
    if not good:
        raise errors.ServiceError(f"an argument of kind {kind!r:.20} has the value {value!r:.40}, which is not valid")
    return [kind, value]


def check_lent(listed: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a peer's arrays in its own memory on the GPU; raise ServiceError unless they are well-formed.

    Their memory is not looked at.
    """
    found: list[dict[str, Any]] = []
    for one in listed:
        if not isinstance(one, dict) or len(found) == MAX_ARRAYS:
            raise errors.ServiceError(f"arrays that are lent are not up to {MAX_ARRAYS} objects")
        handle, dtype = checked(one, "handle", str), checked(one, "dtype", str)
        offset, shape = checked(one, "offset", int), checked(one, "shape", list)
        good = _HANDLE.fullmatch(handle) and dtype in ITEMS and 0 <= offset < MAX_LENT and 1 <= len(shape) <= 32
        good = good and offset % np.dtype(dtype).itemsize == 0  # a kernel would end its process otherwise
        if not (good and _integers(shape, 1)) or math.prod(shape) > MAX_LENT:
            raise errors.ServiceError("an array that is lent has no valid handle, offset, dtype or shape")
        found.append({"handle": handle, "offset": offset, "dtype": dtype, "shape": shape})
    return found


def _integers(values: Sequence[Any], least: int = INTS[0]) -> bool:
    return all(type(n) is int and least <= n <= INTS[-1] for n in values)


def lent_bytes(lent: dict[str, Any]) -> int:
    """Return the bytes of an array that is lent."""
    return int(math.prod(lent["shape"]) * np.dtype(lent["dtype"]).itemsize)


def unpack(
    arguments: Sequence[Sequence[Any]], arrays: Sequence[Any], buffers: Callable[[int], Any], lent: Sequence[Any] = ()
) -> list[Any]:
    """Return the arguments of a launch; `buffers` gives what a number stands for."""
    found: list[Any] = []
    for kind, value in arguments:
        if kind == "array":
            found.append(arrays[value])
        elif kind == "scalar":
            found.append(arrays[value][()])
        elif kind == "lent":
            found.append(lent[value])
        else:
            found.append(buffers(value) if kind == "buffer" else value)
    return found


def used(task: dict[str, Any], kind: str) -> set[int]:
    """Return which "array" (by place), "buffer" (by number) or "lent" array (by place) a launch uses."""
    return {value for its, value in task["arguments"] if its == kind}


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data: the name of its class, the message, and attributes that are plain."""
    plain = {
        key: value
        for key, value in vars(error).items()
        if isinstance(value, str | int | float | bool) and len(str(value)) <= 4096
    }
    known = type(error).__name__ if isinstance(error, errors.WarpwellError) else "SchedulerError"
    text = str(error) if known == type(error).__name__ else f"{type(error).__name__}: {error}"
    return {"class": known, "message": text[:65536], "attributes": plain}


def error_of(fields: dict[str, Any]) -> errors.WarpwellError:
    """Return the error that a peer described: always one of `warpwell.errors`, whatever the peer says."""
    name, text = checked(fields, "class", str), checked(fields, "message", str)
    cls = getattr(errors, name, None) if name in errors.__all__ else None
    error: errors.WarpwellError = (cls or errors.SchedulerError)(text)
    for key, value in checked(fields, "attributes", dict, {}).items():
        if key in error._attribute_names() and isinstance(value, str | int | float | bool):
            setattr(error, key, value)
    return error


def profile_fields(profile: Profile | None) -> dict[str, Any] | None:
    """Return a profile as plain data."""
    if profile is None:
        return None
    return {**vars(profile), "kind": None if profile.kind is None else profile.kind.value}


def profile_of(fields: dict[str, Any] | None) -> Profile | None:
    """Return the profile that a peer described; raise ServiceError if a field or a value of it is invalid."""
    if fields is None:
        return None
    try:
        kind = None if fields.get("kind") is None else Kind(fields["kind"])
        return Profile(**{**fields, "kind": kind, "source": "given"})  # whatever the peer says that it is
    except (TypeError, ValueError) as error:
        raise errors.ServiceError(f"the profile of a request is not valid: {error}") from None


def options(message: ServiceMessage) -> dict[str, Any]:
    """Return the options of a submission that came from a peer; raise ServiceError if a type or a value is wrong."""
    found = {
        "name": message.get("name", str, ""),
        "priority": message.get("priority", int, 0),
        "deadline": message.get("deadline", (int, float, type(None)), None),
        "after": message.get("after", list, []),
        "memory": message.get("memory", (int, type(None)), None),
        "size": message.get("size", dict, {}),
        "readonly": message.get("readonly", list, []),
        "profile": message.get("profile", (dict, type(None)), None),
    }
    if len(found["name"]) > MAX_NAME or found["priority"] not in INTS:
        raise errors.ServiceError(f"a request has a name of over {MAX_NAME} letters, or a priority of over 64 bits")
    profile_of(found["profile"])
    deadline = found["deadline"]
    if deadline is not None and not 0 < deadline <= MAX_DEADLINE:
        raise errors.ServiceError(f"a request has a deadline of {deadline!r:.40} s: 0 to {MAX_DEADLINE:g} are taken")
    size = found["size"]
    if len(size) > 64 or not all(type(n) in (int, float) and len(name) <= MAX_NAME for name, n in size.items()):
        raise errors.ServiceError(f"size of a request must be up to 64 names of {MAX_NAME} letters, and numbers")
    for name, most in (("after", MAX_TASKS), ("readonly", MAX_ARRAYS)):
        if len(found[name]) > most or not _integers(found[name]):
            raise errors.ServiceError(f"{name} of a request must be up to {most} numbers")
    return found
