"""Parameters of a CUDA C++ kernel: their types, read from its text, and arguments converted to them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors

_QUALIFIERS = r"\b(?:const|volatile|struct|class|enum|register|__restrict__|__restrict|restrict|__grid_constant__)\b"
_FIXED = {
    "float": "f4",
    "double": "f8",
    "bool": "?",
    "_Bool": "?",
    "__half": "f2",
    "half": "f2",
    "size_t": "u8",
    "ssize_t": "i8",
    "ptrdiff_t": "i8",
    "intptr_t": "i8",
    "uintptr_t": "u8",
    "uint": "u4",
    "ulong": "u8",
    "ushort": "u2",
    "uchar": "u1",
    **{f"int{8 * n}_t": f"i{n}" for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}_t": f"u{n}" for n in (1, 2, 4, 8)},
}


@dataclass
class Parameter:
    """A parameter of a kernel.

    Attributes
    ----------
    text : str
        Its declaration.
    name : str
    pointer : bool
    dtype : numpy dtype or None
        Of the number, or of what the pointer points to; None where it points to something else than numbers.
    constant : bool
        Whether the kernel only reads what it points to.
    """

    text: str
    name: str
    pointer: bool
    dtype: np.dtype[Any] | None
    constant: bool


def parameters(text: str, known: dict[str, str], kernel: str, line: int) -> list[Parameter]:
    """Return the parameters of a list without its brackets; `known` has the names that stand for types.

    Raises
    ------
    TransformError
        One of them cannot be passed from Python.
    """
    pieces = [] if text.strip() in ("", "void") else _split(text)
    return [_parameter(" ".join(piece.split()), known, kernel, line) for piece in pieces]


def _split(text: str) -> list[str]:
    pieces, depth, first = [], 0, 0
    for k, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            pieces.append(text[first:k])
            first = k + 1
    return [*pieces, text[first:]]


def _parameter(text: str, known: dict[str, str], kernel: str, line: int) -> Parameter:
    def refuse(what: str) -> errors.TransformError:
        return errors.TransformError(
            f"CUDA kernel {kernel!r}, line {line}: parameter {text!r} {what}", construct="parameter", line=line
        )

    declared = text.split("=")[0].strip()
    found = re.search(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)$", declared)
    if "(" in declared or "&" in declared or "..." in declared:
        raise refuse("is a function, a reference or a pack: pass pointers and numbers")
    kind = _resolve(declared[: found.start(1)], known) if found else ""
    if not found or not re.sub(_QUALIFIERS, "", kind).strip(" *"):
        raise refuse("has no name: name it")
    pointer = "*" in kind or bool(found[2])
    base = kind.split("*")[0]
    dtype = _dtype(base) if kind.count("*") + found[2].count("[") <= 1 else None
    if dtype is None and not pointer:
        raise refuse("is passed by value and is not a number: pass a pointer to it")
    return Parameter(declared, found[1], pointer, dtype, bool(re.search(r"\bconst\b", base)))


def _resolve(kind: str, known: dict[str, str]) -> str:
    for _ in range(16):
        new = re.sub(r"[A-Za-z_]\w*", lambda m: known.get(m[0], m[0]), kind)
        if new == kind:
            break
        kind = new
    return kind


def _dtype(kind: str) -> np.dtype[Any] | None:
    """Return the dtype of a C type's name, None where it is no number."""
    words = re.sub(_QUALIFIERS, " ", re.sub(r"\b(?:cuda\s*::\s*)?std\s*::", " ", kind)).split()
    if len(words) == 1 and words[0] in _FIXED:
        return np.dtype(_FIXED[words[0]])
    if not words or not set(words) <= {"unsigned", "signed", "char", "short", "int", "long"}:
        return None
    size = 1 if "char" in words else 2 if "short" in words else 8 if "long" in words else 4
    return np.dtype(f"{'u' if 'unsigned' in words else 'i'}{size}")


def aliases(text: str, options: Sequence[str]) -> dict[str, str]:
    """Return names that stand for types: macros, those of the compiler's options too, and typedefs."""
    found = dict(re.findall(r"^[ \t]*#[ \t]*define[ \t]+([A-Za-z_]\w*)[ \t]+([\w \t*:]+?)[ \t]*$", text, re.MULTILINE))
    found |= {new: old for old, new in re.findall(r"\btypedef\s+([\w\s*:]+?)\s*\b(\w+)\s*;", text)}
    found |= dict(re.findall(r"\busing\s+(\w+)\s*=\s*([\w\s*:]+?)\s*;", text))
    for option in options:
        macro = re.match(r"(?:-D|--define-macro=)\s*([A-Za-z_]\w*)=(.*)$", option)
        if macro:
            found[macro[1]] = macro[2]
    return {new: old for new, old in found.items() if not re.search(rf"\b{new}\b", old)}


def converted(value: Any, parameter: Parameter, kernel: str) -> Any:
    """Return an argument as the parameter's type: a NumPy scalar, or the array itself for a pointer.

    Raises
    ------
    ArgumentError
        It is no number, does not fit, or would lose its fraction; an array has other items.
    """
    where = f"argument {parameter.name!r} of CUDA kernel {kernel!r}"
    if parameter.pointer:
        return _array(value, parameter, where)
    dtype = parameter.dtype
    assert dtype is not None
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, bool | int | float):
        what = f"{where} is {value!r:.60}: pass a number for {parameter.text!r}"
        raise errors.ArgumentError(what, name=parameter.name)
    if dtype.kind == "f":
        return _real(number, dtype, where, parameter)
    if isinstance(number, float) and not (math.isfinite(number) and number.is_integer()):
        raise errors.ArgumentError(f"{where} is {value!r}: {parameter.text!r} takes integers", name=parameter.name)
    number = int(number)
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not least <= number <= most:
        raise errors.ArgumentError(
            f"{where} is {number}: {parameter.text!r} holds {least} to {most}", name=parameter.name
        )
    return dtype.type(number)


def _real(number: float, dtype: np.dtype[Any], where: str, parameter: Parameter) -> Any:
    try:
        with np.errstate(over="ignore"):
            result = dtype.type(number)
    except OverflowError:
        result = dtype.type(np.inf)
    if np.isinf(result) and not (isinstance(number, float) and math.isinf(number)):
        raise errors.ArgumentError(f"{where} is {number}: too large for {parameter.text!r}", name=parameter.name)
    return result


def _array(value: Any, parameter: Parameter, where: str) -> Any:
    if isinstance(value, np.ndarray):
        dtype = value.dtype
        if not (value.flags.c_contiguous or value.flags.f_contiguous):
            raise errors.ArgumentError(
                f"{where} has gaps between its items: pass numpy.ascontiguousarray of it", name=parameter.name
            )
        if not (value.flags.writeable or parameter.constant):
            raise errors.ArgumentError(
                f"{where} cannot be written: pass a copy, or declare {parameter.text!r} const", name=parameter.name
            )
    elif hasattr(value, "__cuda_array_interface__"):
        dtype = np.dtype(value.__cuda_array_interface__["typestr"])
    else:
        raise errors.ArgumentError(
            f"{where} is {value!r:.60}: pass a NumPy array or one in device memory for {parameter.text!r}",
            name=parameter.name,
        )
    wanted = parameter.dtype
    if dtype.hasobject:
        raise errors.ArgumentError(f"{where} holds Python objects: pass an array of numbers", name=parameter.name)
    if wanted is not None and (dtype.itemsize != wanted.itemsize or _sort(dtype) != _sort(wanted)):
        raise errors.ArgumentError(
            f"{where} has items of {dtype}: {parameter.text!r} wants {wanted}; use .astype or .view",
            name=parameter.name,
        )
    return value


def _sort(dtype: np.dtype[Any]) -> str:
    return "integer" if dtype.kind in "iub" else dtype.kind
