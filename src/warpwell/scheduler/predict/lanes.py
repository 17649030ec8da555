"""Lanes: the values of PTX registers for many threads at once, as NumPy arrays, where they are known.

Integers are kept as int64 in two's complement, floats as float64 (rounded to float32 where the type says so). What
cannot be known without running the kernel, such as data in device memory, is marked unknown, and so is what follows
from it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ptx import Statement

Array = NDArray[Any]
_REGION = 40
"""Bits of an address within one argument's memory."""

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
    "equ": operator.eq, "neu": operator.ne, "ltu": operator.lt, "leu": operator.le, "gtu": operator.gt,
    "geu": operator.ge,
}  # fmt: skip
_FLOATS = ("f32", "f64", "f16")


class Value:
    """A register's value in each lane: `known` tells where it may be relied on (None: everywhere)."""

    __slots__ = ("data", "known")

    def __init__(self, data: Array, known: Array | None = None) -> None:
        self.data = data
        self.known = known


def base_address(argument: int) -> int:
    """Return the address that stands for the start of an argument's memory."""
    return (argument + 1) << _REGION


class Lanes:
    """Registers of some threads.

    Parameters
    ----------
    count : int
        Threads.
    parameters : mapping
        Value of each kernel parameter by name; one that is not there is unknown.
    special : mapping
        Array of each special register: "%tid.x".
    memory : mapping
        Host arrays, by the argument's number, that loads may read.
    """

    def __init__(
        self,
        count: int,
        parameters: Mapping[str, int | float],
        special: Mapping[str, Array],
        memory: Mapping[int, Array],
    ) -> None:
        self.count = count
        self.parameters = parameters
        self.special = special
        self.memory = {k: np.ascontiguousarray(a).reshape(-1).view(np.uint8) for k, a in memory.items()}
        self.registers: dict[str, Value] = {}
        self._literals: dict[tuple[str, str], Value] = {}
        self.unknown = Value(np.zeros(count, np.int64), np.zeros(count, bool))

    def operand(self, text: str, kind: str) -> Value:
        """Return what an operand holds, as the type `kind` sees it."""
        if text[0] == "%":
            value = self.registers.get(text)
            if value is None:
                special = self.special.get(text)
                if special is None:
                    return self.unknown
                value = Value(special)
            return Value(as_type(value.data, kind), value.known)
        value = self._literals.get((text, kind))
        if value is None:
            dtype = np.float64 if kind in _FLOATS else np.bool_ if kind == "pred" else np.int64
            value = self._literals[text, kind] = Value(np.full(self.count, literal(text), dtype))
        return value

    def run(self, statement: Statement, mask: Array | None) -> None:
        """Execute a statement in the lanes of `mask` (None: in all)."""
        if not statement.writes:
            return
        with np.errstate(all="ignore"):
            value = self._result(statement)
        if statement.guard is not None:
            held = self.operand(statement.guard, "pred")
            taken = held.data.astype(bool) ^ statement.negated
            if held.known is not None:
                value = self.unknown  # whether it was written is not known
            else:
                mask = taken if mask is None else mask & taken
        for name in statement.writes:
            old = self.registers.get(name)
            if mask is None or old is None:
                self.registers[name] = value
            else:
                self.registers[name] = _merge(mask, value, old)

    def _result(self, statement: Statement) -> Value:
        function = _OPERATIONS.get(statement.parts[0])
        if function is None or len(statement.writes) != 1:
            return self.unknown
        return function(self, statement)

    def address(self, text: str) -> Value:
        """Return the address of a memory operand: "[%rd3+4]"."""
        inner = text.strip("[]")
        found = re.match(r"(%[\w$]+)\s*(?:\+\s*(-?\d+))?$", inner)
        if found is None:
            return self.unknown
        value = self.operand(found[1], "s64")
        return Value(value.data + int(found[2] or 0), value.known)

    def load(self, statement: Statement) -> Value:
        """Read host arrays; what lies elsewhere is unknown."""
        address = self.address(statement.operands[1])
        if statement.parts[1] != "global" and "global" not in statement.parts:
            return self.unknown
        kind, size = statement.type, statement.bits // 8
        region, offset = address.data >> _REGION, address.data & ((1 << _REGION) - 1)
        data = np.zeros(self.count, np.float64 if kind in _FLOATS else np.int64)
        known = np.zeros(self.count, bool)
        for number, raw in self.memory.items():
            here = (region == number + 1) & (offset + size <= raw.size) & (offset % size == 0)
            if address.known is not None:
                here &= address.known
            if here.any():
                items = raw[: raw.size // size * size].view(_DTYPES[kind])
                data[here] = items[offset[here] // size]
                known |= here
        return Value(data, None if known.all() else known)


def _merge(mask: Array, new: Value, old: Value) -> Value:
    if new.known is None and old.known is None:
        return Value(np.where(mask, new.data, old.data))
    first = np.True_ if new.known is None else new.known
    second = np.True_ if old.known is None else old.known
    return Value(np.where(mask, new.data, old.data), np.where(mask, first, second))


_DTYPES = {
    "u8": "u1", "s8": "i1", "b8": "u1", "u16": "u2", "s16": "i2", "b16": "u2", "u32": "u4", "s32": "i4", "b32": "i4",
    "u64": "i8", "s64": "i8", "b64": "i8", "f32": "f4", "f64": "f8",
}  # fmt: skip


def literal(text: str) -> int | float:
    """Return the number of a PTX literal; 0 for what is none (the name of a variable)."""
    if text[:2] in ("0f", "0d"):
        raw = bytes.fromhex(text[2:])
        return float(np.frombuffer(raw, ">f4" if text[1] == "f" else ">f8")[0])
    try:
        return _wrapped(int(text.rstrip("U"), 0))
    except ValueError:
        return 0


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def as_type(data: Array, kind: str) -> Array:
    """Return values as a type sees their bits: 32 bits of a number, signed or not."""
    if kind == "pred":
        return data if data.dtype == np.bool_ else data.astype(bool)
    if data.dtype == np.float64:
        if kind in _FLOATS:
            return data
        return data.astype(np.float32).view(np.int32).astype(np.int64) if kind[1:] == "32" else data.view(np.int64)
    if kind in _FLOATS:
        return data.astype(np.int32).view(np.float32).astype(np.float64) if kind == "f32" else data.view(np.float64)
    if kind == "s32":
        return data.astype(np.int32).astype(np.int64)
    if kind in ("u32", "b32"):
        return data & 0xFFFFFFFF
    if kind in ("u16", "b16"):
        return data & 0xFFFF
    if kind == "s16":
        return data.astype(np.int16).astype(np.int64)
    return data


def _known(*values: Value) -> Array | None:
    found = [v.known for v in values if v.known is not None]
    if not found:
        return None
    return np.logical_and.reduce(found) if len(found) > 1 else found[0]


def _rounded(data: Array, kind: str) -> Array:
    if kind == "f32":
        return data.astype(np.float32).astype(np.float64)
    return data if kind in _FLOATS or kind == "pred" else as_type(data.astype(np.int64), kind)


Operation = Callable[[Lanes, Statement], Value]


def _plain(function: Callable[..., Any]) -> Operation:
    """Make an operation of a function of arrays, all of the statement's last type."""

    def run(lanes: Lanes, statement: Statement) -> Value:
        kind = statement.type
        sources = [lanes.operand(text, kind) for text in statement.operands[1:]]
        return Value(_rounded(function(*(s.data for s in sources)), kind), _known(*sources))

    return run


def _divide(a: Array, b: Array) -> Array:
    if a.dtype == np.float64:
        return np.asarray(a / b)
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.asarray(np.where((a < 0) != (b < 0), -quotient, quotient))


def _multiply(lanes: Lanes, statement: Statement) -> Value:
    kind, wide = statement.type, "wide" in statement.parts
    sources = [lanes.operand(text, kind) for text in statement.operands[1:3]]
    data = sources[0].data * sources[1].data
    if "hi" in statement.parts:
        if statement.bits != 32:
            return lanes.unknown
        data = data >> 32
    data = data if wide else _rounded(data, kind)
    if statement.parts[0] in ("mad", "fma"):
        addend = lanes.operand(statement.operands[3], kind[0] + "64" if wide else kind)
        data, sources = data + addend.data, [*sources, addend]
        data = data if wide else _rounded(data, kind)
    return Value(data, _known(*sources))


def _shift(lanes: Lanes, statement: Statement) -> Value:
    value = lanes.operand(statement.operands[1], statement.type)
    amount = lanes.operand(statement.operands[2], "u32")
    by = np.minimum(amount.data, 63)
    if statement.parts[0] == "shl":
        data = np.where(amount.data > 63, 0, value.data << by)
    elif statement.type == "u64":
        data = np.where(amount.data > 63, 0, (value.data.view(np.uint64) >> by.view(np.uint64)).view(np.int64))
    else:
        data = value.data >> by
    return Value(as_type(data, statement.type), _known(value, amount))


def _setp(lanes: Lanes, statement: Statement) -> Value:
    kind, names = statement.type, statement.parts
    compare = _COMPARE.get(names[1])
    a, b = (lanes.operand(text, kind) for text in statement.operands[1:3])
    if compare is None:
        return lanes.unknown
    left, right = a.data, b.data
    if kind == "u64":
        left, right = left.view(np.uint64), right.view(np.uint64)
    data, sources = compare(left, right), [a, b]
    if len(names) > 3 and names[2] in ("and", "or", "xor"):
        text = statement.operands[3]
        other = lanes.operand(text.lstrip("!"), "pred")
        bits = other.data.astype(bool) ^ text.startswith("!")
        data = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[names[2]](data, bits)
        sources.append(other)
    return Value(data, _known(*sources))


def _select(lanes: Lanes, statement: Statement) -> Value:
    kind = statement.type
    a, b = (lanes.operand(text, kind) for text in statement.operands[1:3])
    chosen = lanes.operand(statement.operands[3], "pred")
    held = chosen.data.astype(bool)
    known = _known(chosen)
    if a.known is not None or b.known is not None:
        picked = np.where(held, np.True_ if a.known is None else a.known, np.True_ if b.known is None else b.known)
        known = picked if known is None else known & picked
    return Value(np.where(held, a.data, b.data), known)


def _convert(lanes: Lanes, statement: Statement) -> Value:
    types = [p for p in statement.parts if p in _DTYPES]
    source = lanes.operand(statement.operands[1], types[-1])
    data = source.data
    if types[0] not in _FLOATS and data.dtype == np.float64:
        rounding = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
        data = next((rounding[p] for p in statement.parts if p in rounding), np.trunc)(data).astype(np.int64)
    elif types[0] in _FLOATS:
        data = data.astype(np.float64)
    if "sat" in statement.parts and types[0] in _FLOATS:
        data = np.clip(data, 0, 1)
    return Value(_rounded(data, types[0]), source.known)


def _move(lanes: Lanes, statement: Statement) -> Value:
    if statement.operands[1][0] == "{":
        return lanes.unknown
    return lanes.operand(statement.operands[1], statement.type)


def _load(lanes: Lanes, statement: Statement) -> Value:
    if "param" not in statement.parts:
        return lanes.load(statement)
    value = lanes.parameters.get(statement.operands[1].strip("[]").split("+")[0])
    if value is None:
        return lanes.unknown
    return Value(np.full(lanes.count, value, np.float64 if isinstance(value, float) else np.int64))


_OPERATIONS: dict[str, Operation] = {
    "mov": _move, "cvta": _move, "cvt": _convert, "ld": _load, "setp": _setp, "selp": _select,
    "add": _plain(operator.add), "sub": _plain(operator.sub), "and": _plain(operator.and_), "or": _plain(operator.or_),
    "xor": _plain(operator.xor), "not": _plain(operator.invert), "neg": _plain(operator.neg), "abs": _plain(np.abs),
    "min": _plain(np.minimum), "max": _plain(np.maximum), "div": _plain(_divide),
    "rem": _plain(lambda a, b: a - _divide(a, b) * b), "sqrt": _plain(np.sqrt),
    "mul": _multiply, "mad": _multiply, "fma": _multiply, "shl": _shift, "shr": _shift,
}  # fmt: skip
