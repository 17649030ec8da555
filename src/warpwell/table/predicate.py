"""`Condition`: the rows that a query selects, as intervals of column values.

Each value has an *order key*: an integer, or bytes for strings and binary, that compares as the values do. Keys of
floats are their bits in the order of IEEE 754: the two zeros are neighbors, and NaN is outside the infinities. A
condition is a disjunction of conjunctions, each with one `IntervalSet` of keys per column. It is made from the lists
that pyarrow calls ``filters=``, or from the serialized form of a Polars expression. Unknown parts of an expression may
match any row.
"""

from __future__ import annotations

import decimal
import functools
import io
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._check import shown
from ..errors import ArgumentError, DTypeError
from . import arrow as pa
from .column import Column
from .layout import FAMILIES, family_of, layout_of, storage_of
from .library import polars
from .reading import Ranges
from .zones import BLOCK_ROWS, ZoneMap

Key = Any
"""An int or bytes."""
TypeOf = Callable[[str], Any]
"""Returns the Arrow type of a column by its name, or raises ArgumentError."""

OPERATORS = ("=", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "is null", "is not null")
MAX_COMPARED_EDGES = 8
"""Maximum number of edges of a set with which keys are compared one by one; more edges are searched."""
SLICE_ROWS = 1 << 16
"""Maximum number of rows in a slice, whose keys stay in the processor's cache while they are compared."""
MAX_CONJUNCTIONS = 64
"""Maximum number of conjunctions of a Polars expression: a part that needs more is not used to skip blocks."""
_NUMBERS = ("integer", "float", "decimal")


# -- sets of keys -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IntervalSet:
    """A set of order keys, and whether null belongs to it.

    Attributes
    ----------
    edges : tuple of int or bytes
        Ascending keys; at each of them, intervals begin or end.
    from_start : bool
        Whether keys below the first edge are in the set.
    nulls : bool
        Whether null is in the set.
    """

    edges: tuple[Key, ...] = ()
    from_start: bool = False
    nulls: bool = False

    def __invert__(self) -> IntervalSet:
        """Return the keys that are not in the set; null is in neither."""
        return IntervalSet(self.edges, not self.from_start)

    def __and__(self, right: IntervalSet) -> IntervalSet:
        start = inside = self.from_start and right.from_start
        edges = []
        for edge in sorted({*self.edges, *right.edges}):
            if (self._contains_key(edge) and right._contains_key(edge)) != inside:
                edges.append(edge)
                inside = not inside
        return IntervalSet(tuple(edges), start, self.nulls and right.nulls)

    def _contains_key(self, key: Key) -> bool:
        return (bisect_right(self.edges, key) + self.from_start) % 2 == 1

    def matches(self, values: Any, of_dictionary: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """Return which values of a `pyarrow.Array` are in the set.

        Parameters
        ----------
        values : pyarrow.Array
            Of a type that `compare` takes, unless the set has all keys or none.
        of_dictionary : ndarray of bool, optional
            The result for the dictionary of `values`, if it is known.
        """
        values = values.storage if isinstance(values, pa.ExtensionArray) else values
        if pa.types.is_dictionary(values.type):
            inside = self.matches(values.dictionary) if of_dictionary is None else of_dictionary
            values = values.indices
            if (inside == self.from_start).all():  # codes are neither read nor, in `where`, checked
                matches = np.full(len(values), self.from_start)
            else:
                matches = np.append(inside, False)[values.fill_null(0).to_numpy()]
        elif not self.edges:
            matches = np.full(len(values), self.from_start)
        elif isinstance(self.edges[0], bytes) or pa.types.is_decimal128(values.type):
            matches = self._matches_wide(values)
        else:
            slices = [values.slice(start, SLICE_ROWS) for start in range(0, len(values), SLICE_ROWS)]
            matches = np.concatenate([np.zeros(0, np.bool_), *(self.contains(order_keys(part)) for part in slices)])
        if values.null_count:
            matches = np.where(values.is_valid().to_numpy(zero_copy_only=False), matches, self.nulls)
        return np.asarray(matches)

    def _matches_wide(self, values: Any) -> NDArray[np.bool_]:
        """Return which values of strings, binary and 128-bit decimals have keys in the set."""
        kind = values.type
        if pa.types.is_decimal(kind):
            words = b"".join(edge.to_bytes(16, "little", signed=True) for edge in self.edges)
            edges = pa.Array.from_buffers(kind, len(self.edges), [None, pa.py_buffer(words)])
        else:
            is_short = pa.types.is_string(kind) or pa.types.is_binary(kind)  # the large types may have more than 2 GiB
            values = values.cast(pa.binary() if is_short else pa.large_binary())
            edges = pa.array(self.edges, values.type)
        points = [k for k in range(0, len(edges) - 1, 2) if self.edges[k + 1] == _next_key(self.edges[k])]
        bounds = sorted({*range(len(edges))} - {*points, *(k + 1 for k in points)})
        tests = [pa.compute.greater_equal(values, edges[k]) for k in bounds]
        if points:
            tests.append(pa.compute.is_in(values, value_set=edges.take(pa.array(points))))
        matches = np.full(len(values), self.from_start)
        for test in tests:
            matches ^= test.fill_null(False).to_numpy(zero_copy_only=False)
        return matches

    def contains(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which keys are in the set."""
        edges = self._edges_like(keys)
        if len(edges) > MAX_COMPARED_EDGES:
            return np.asarray((np.searchsorted(edges, keys, "right") + self.from_start) % 2 == 1)
        inside = np.full(len(keys), self.from_start)
        for edge in edges:
            inside ^= keys >= edge
        return inside

    def overlaps(self, low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.bool_]:
        """Return for which ranges ``[low[k], high[k]]`` a key is in the set."""
        below = np.searchsorted(self._edges_like(low), low, "right")
        has_edge = np.searchsorted(self._edges_like(high), high, "right") > below
        return np.asarray(((below + self.from_start) % 2 == 1) | has_edge)

    def _edges_like(self, keys: NDArray[Any]) -> NDArray[Any]:
        edges = self.edges if keys.dtype == object else [edge for edge in self.edges if edge < 1 << 63]
        return np.array(edges, keys.dtype)


NOTHING, EVERYTHING = IntervalSet(), IntervalSet((), True)
ONLY_NULL = IntervalSet(nulls=True)


def order_keys(values: Any) -> NDArray[Any]:
    """Return the keys of a `pyarrow.Array` of values in storage, int64 or objects; a null has any key."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return order_keys(values.cast(pa.int8()))
    family = family_of(kind)
    if family in ("string", "binary"):
        keys = np.empty(len(values), object)
        keys[:] = [b"" if value is None else value for value in values.cast(pa.large_binary()).to_pylist()]
        return keys
    layout = layout_of(kind)
    assert layout.dtype is not None
    data, width = values.buffers()[1], max(1, *layout.inner, 1)
    items = np.zeros(len(values) * width, layout.dtype)
    if data is not None and len(values):
        items = np.frombuffer(data, layout.dtype, len(items), values.offset * width * layout.dtype.itemsize)
    if width == 2:  # 128 bits, the low word first
        pairs = items.reshape(-1, 2).astype(object)
        return np.asarray(pairs[:, 1] * (1 << 64) + pairs[:, 0] % (1 << 64), object)
    bits = 8 * layout.dtype.itemsize
    if layout.dtype.kind == "u":
        return items.view(np.int64) ^ np.int64(-(1 << 63)) if bits == 64 else items.astype(np.int64) - (1 << bits - 1)
    raw = items.view(f"<i{layout.dtype.itemsize}").astype(np.int64, copy=False)
    return raw ^ ((raw >> 63) & ((1 << bits - 1) - 1)) if layout.dtype.kind == "f" else raw


# -- comparisons ------------------------------------------------------------------------------------------------------


def compare(name: str, kind: Any, op: str, value: Any, *, nan_is_greatest: bool = False) -> IntervalSet:
    """Return the keys of a column's values for which a comparison is true.

    Parameters
    ----------
    name : str
        The column's, for messages.
    kind : pyarrow.DataType
        Of the values; of the values of its dictionary, if it has one.
    op : str
        One of `OPERATORS`.
    value : object
        A list, tuple, set or array of values for "in" and "not in"; not used for "is null" and "is not null".
    nan_is_greatest : bool
        Whether NaN is equal to itself and greater than all numbers, as in Polars; otherwise as in IEEE 754.

    Raises
    ------
    ArgumentError
        The operator is unknown, or the column's type cannot represent the value exactly.
    DTypeError
        Columns of this type are not compared.
    """
    if op not in OPERATORS:
        raise ArgumentError(f"unknown operator {op!r}; expected one of {', '.join(OPERATORS)}", name="filters")
    if op.startswith("is"):
        return ONLY_NULL if op == "is null" else EVERYTHING
    kind = storage_of(kind)
    kind = storage_of(kind.value_type) if pa.types.is_dictionary(kind) else kind
    if not family_of(kind):
        hint = " (ww.table.convert stores it as string or binary)" if "view" in str(kind) else ""
        raise DTypeError(
            f"column {name!r} is {kind}, which filters cannot compare{hint}: filter by another column, or with Polars, "
            "by ww.table.scan"
        )
    numbers = EVERYTHING
    if pa.types.is_floating(kind):
        low, high = order_keys(pa.array(np.array([-np.inf, np.inf], f"f{kind.bit_width // 8}"))).tolist()
        numbers = IntervalSet((low, high + 1))
    if op in ("in", "not in") and (isinstance(value, str | bytes) or not isinstance(value, Iterable)):
        raise ArgumentError(f"column {name!r} {op} {shown(value)}: expected a list of values", name="filters")
    literals = [_literal(name, kind, item) for item in (value if op in ("in", "not in") else [value])]
    key_type = pa.large_binary() if family_of(kind) == "binary" else kind
    keys = order_keys(pa.array([literal for literal in literals if literal is not None], key_type)).tolist()
    has_nan = nan_is_greatest and None in literals
    if op in ("=", "==", "in", "!=", "not in"):
        matches = _equal_to(keys, numbers)
        matches = ~(~matches & numbers) if has_nan else matches
        return ~matches if op in ("!=", "not in") else matches
    if not keys:  # compared with NaN
        below, up_to = (numbers, EVERYTHING) if nan_is_greatest else (NOTHING, NOTHING)
    else:
        equal = _equal_to(keys, numbers).edges
        below, up_to = IntervalSet(equal[:1], True) & numbers, IntervalSet(equal[1:], True) & numbers
    if op in ("<", "<="):
        return below if op == "<" else up_to
    return ~(up_to if op == ">" else below) & (EVERYTHING if nan_is_greatest else numbers if keys else NOTHING)


def _equal_to(keys: Iterable[Key], numbers: IntervalSet) -> IntervalSet:
    """Return the keys that are equal to one of some keys; zeros of floats have two."""
    edges: list[Key] = []
    is_float = numbers is not EVERYTHING
    for key in sorted({-1 if is_float and key == 0 else key for key in keys}):
        end = 1 if is_float and key == -1 else _next_key(key)
        if edges and edges[-1] == key:
            edges[-1] = end
        else:
            edges += [key, end]
    return IntervalSet(tuple(edges))


def _next_key(key: Key) -> Key:
    return key + b"\0" if isinstance(key, bytes) else key + 1


def _literal(name: str, kind: Any, value: Any) -> Any:
    """Return a value as a `pyarrow.Scalar` of a column's type, or None for NaN; raise ArgumentError if impossible."""
    family = family_of(kind)
    try:
        scalar = value
        if isinstance(scalar, np.datetime64 | np.timedelta64):
            unit = np.datetime_data(scalar.dtype)[0]
            scalar = scalar if unit in ("s", "ms", "us", "ns") else scalar.astype(f"{scalar.dtype.kind}8[s]")
            if family == "date" and scalar == scalar.astype("M8[D]"):
                scalar = scalar.astype("M8[D]").item()
        scalar = scalar if isinstance(scalar, pa.Scalar) else _scalar(scalar)
        if pa.types.is_dictionary(scalar.type):
            scalar = scalar.value
        if not scalar.is_valid:
            raise ValueError('null matches nothing: leave it out, or compare by "is null"')
        scalar_family = family_of(scalar.type)
        numeric = family in _NUMBERS and scalar_family in _NUMBERS and (family, scalar_family) != ("decimal", "float")
        if (scalar_family != family and not numeric) or (family == "time" and getattr(value, "tzinfo", None)):
            raise TypeError(f"expected {FAMILIES[family][0]}")
        if family == "binary":
            return scalar.cast(pa.large_binary())
        if not numeric:
            return scalar.cast(kind)
        number = scalar.as_py()
        if family == "float" and number != number:
            return None
        if family == "integer":
            low = -(1 << kind.bit_width - 1) if pa.types.is_signed_integer(kind) else 0
            high = low + (1 << kind.bit_width) - 1
            if number < low or number > high:
                raise ValueError(f"not in range: {low} to {high}")
            if number != int(number):
                raise ValueError("expected an integer")
        plain = {"integer": int, "float": float, "decimal": decimal.Decimal}[family](number)
        cast = _scalar(plain).cast(kind)
        if cast.as_py() != number:
            raise ValueError(f"the nearest value is {cast.as_py()!r}: pass numpy.float{kind.bit_width}(...) to use it")
        return cast
    except (ValueError, TypeError, ArithmeticError, pa.ArrowException) as error:
        reason = str(error).split("\n")[0]
    raise ArgumentError(f"cannot compare column {name!r} of {kind} with {shown(value)}: {reason}", name="filters")


def _scalar(value: Any) -> Any:
    """Return a `pyarrow.Scalar`; integers beyond 64 bits as decimals."""
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return pa.scalar(value, pa.uint64()) if 0 < value < 1 << 64 else pa.scalar(decimal.Decimal(value))
    return pa.scalar(value)


# -- conditions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A disjunction of conjunctions.

    Attributes
    ----------
    conjunctions : list of dict of str to IntervalSet
        Sets of keys by column name, none of them empty. A row matches if each column's value is in its set.
    is_exact : bool
        Whether each row that matches a conjunction is selected; otherwise it may be selected.
    """

    conjunctions: Sequence[Mapping[str, IntervalSet]]
    is_exact: bool = True

    @classmethod
    def from_filters(cls, filters: Any, type_of: TypeOf) -> Condition:
        """Return the condition of pyarrow's ``filters=``.

        Raises
        ------
        ArgumentError, DTypeError
            See `compare`.
        """
        example = 'expected [("a", ">", 3), ("b", "is null")], or a list of such lists, of which one must match'
        alternatives = list(filters) if isinstance(filters, list | tuple) else []
        if alternatives and all(map(_is_clause, alternatives)):
            alternatives = [alternatives]
        for clauses in alternatives or [None]:
            if not isinstance(clauses, list | tuple) or not clauses or not all(map(_is_clause, clauses)):
                raise ArgumentError(f"invalid filters {filters!r:.60}; {example}", name="filters")
        condition = cls([])
        for clauses in alternatives:
            part = cls([{}])
            for name, op, *value in clauses:
                lower_op = op.lower() if isinstance(op, str) else repr(op)
                if not value and not lower_op.startswith("is"):
                    raise ArgumentError(f"filters: column {name!r} {op} needs a value; {example}", name="filters")
                part = _conjoin(part, cls([{name: compare(name, type_of(name), lower_op, *(value or [None]))}]))
            condition = _disjoin(condition, part)
        return condition

    @classmethod
    def from_polars(cls, expression: Any, type_of: TypeOf) -> Condition:
        """Return the condition of an expression of Polars, in which NaN is the greatest number."""
        try:
            return _condition_of(json.loads(expression.meta.serialize(format="json")), type_of, negated=False)
        except (polars().exceptions.PolarsError, ValueError, RecursionError):
            return MAY_MATCH

    def candidate_rows(self, columns: Mapping[str, Column]) -> Ranges:
        """Return the rows of the blocks that may have a matching row; `columns` are the condition's."""
        ranges: Ranges = []
        for parts in zip(*(column.zones for column in columns.values()), strict=True):
            first, rows, _ = parts[0]
            zones = {name: part.zones for name, part in zip(columns, parts, strict=True) if part.zones is not None}
            blocks = np.zeros(-(-rows // BLOCK_ROWS), np.bool_)
            for sets in self.conjunctions:
                candidates = np.ones(len(blocks), np.bool_)
                for name in sets.keys() & zones.keys():
                    candidates &= _blocks_of(sets[name], zones[name])
                blocks |= candidates
            edges = np.flatnonzero(np.diff(blocks, prepend=False, append=False)) * BLOCK_ROWS
            for start, end in edges.reshape(-1, 2).tolist():
                start, end = first + start, first + min(end, rows)
                if ranges and ranges[-1][1] == start:
                    start, _ = ranges.pop()
                ranges.append((start, end))
        return ranges


MAY_MATCH = Condition([{}], is_exact=False)


def _is_clause(clause: Any) -> bool:
    return isinstance(clause, list | tuple) and len(clause) in (2, 3) and all(isinstance(x, str) for x in clause[:2])


def _conjoin(a: Condition, b: Condition) -> Condition:
    """Return the rows that match two conditions."""
    if len(a.conjunctions) * len(b.conjunctions) > MAX_CONJUNCTIONS:
        return Condition(a.conjunctions, is_exact=False)
    merged = [
        {**x, **y, **{name: x[name] & y[name] for name in x.keys() & y.keys()}}
        for x in a.conjunctions
        for y in b.conjunctions
    ]
    conjunctions = [sets for sets in merged if NOTHING not in sets.values()]
    return Condition(conjunctions, a.is_exact and b.is_exact)


def _disjoin(a: Condition, b: Condition) -> Condition:
    """Return the rows that match one of two conditions; alternatives for one column become one set."""
    if len(a.conjunctions) == len(b.conjunctions) == 1:
        x, y = a.conjunctions[0], b.conjunctions[0]
        if len(x) == 1 and x.keys() == y.keys():
            [(name, left)], [right] = x.items(), y.values()
            if not (left.nulls or right.nulls):
                return Condition([{name: ~(~left & ~right)}], a.is_exact and b.is_exact)
    return Condition([*a.conjunctions, *b.conjunctions], a.is_exact and b.is_exact)


def _blocks_of(values: IntervalSet, zone: ZoneMap) -> NDArray[np.bool_]:
    """Return which blocks of a column may have a value that is in a set."""
    low, high = order_keys(zone.minimum), order_keys(zone.maximum)
    valid = zone.minimum.is_valid().to_numpy(zero_copy_only=False)
    candidates = values.overlaps(low, high) & valid
    if values.nulls:
        candidates |= zone.null_counts > 0
    if low.dtype != object:  # NaN is below and above all numbers
        limit = np.iinfo(np.int64)
        candidates |= zone.has_nan & values.contains(np.array([limit.min, limit.max])).any()
    return np.asarray(candidates)


# -- expressions of Polars --------------------------------------------------------------------------------------------

_OPERATORS = {"Eq": "==", "NotEq": "!=", "Lt": "<", "LtEq": "<=", "Gt": ">", "GtEq": ">=", "IsIn": "in"}
_MIRRORED = {"Lt": "Gt", "Gt": "Lt", "LtEq": "GtEq", "GtEq": "LtEq"}
_CLOSED = {"Both": (">=", "<="), "Left": (">=", "<"), "Right": (">", "<="), "None": (">", "<")}
_UNORDERED = {"Eq", "NotEq", "EqValidity", "NotEqValidity", "IsIn", "IsNull", "IsNotNull"}
_SQL_OPERATOR = re.compile(r'\{"Sql":(?:"\w+"|\{(?:[^{}]|\{[^{}]*\})*\})\}')


def _condition_of(node: Any, type_of: TypeOf, *, negated: bool) -> Condition:
    """Return the condition of a node of a serialized expression, or of its negation."""
    match node:
        case {"Literal": {"Scalar": {"Boolean": bool(value)}}}:
            return Condition([{}] if value != negated else [])
    try:
        op, inputs, options = _operation_of(node)
        if op == "Not":
            return _condition_of(inputs[0], type_of, negated=not negated)
        if op in ("And", "LogicalAnd", "Or", "LogicalOr"):
            a, b = (_condition_of(operand, type_of, negated=negated) for operand in inputs)
            return _conjoin(a, b) if ("And" in op) != negated else _disjoin(a, b)
        if "Literal" in inputs[0]:
            op, inputs = _MIRRORED.get(op, op), inputs[::-1]
        name = inputs[0]["Column"]
        sets, negated_sets = _values_of(name, type_of(name), op, inputs[1:], options)
    except (ArgumentError, DTypeError, LookupError, TypeError, ValueError, NotImplementedError):
        return MAY_MATCH
    conditions = [
        Condition([{name: values}] if values != NOTHING else []) for values in (negated_sets if negated else sets)
    ]
    return functools.reduce(_disjoin, conditions)


def _operation_of(node: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """Return a node's operation, its operands, and its options."""
    match node:
        case {"Alias": [inner, _]}:
            return _operation_of(inner)
        case {"Column": _}:
            return "Eq", [node, {"Literal": {"Scalar": {"Boolean": True}}}], {}
        case {"BinaryExpr": {"left": left, "op": str(op), "right": right}}:
            return op, [left, right], {}
        case {"Function": {"input": inputs, "function": {"Boolean": str(op)}}}:
            return op, inputs, {}
        case {"Function": {"input": inputs, "function": {"Boolean": dict(function)}}}:
            [(op, options)] = function.items()
            return op, inputs, options
    raise NotImplementedError


def _values_of(
    name: str, kind: Any, op: str, inputs: Sequence[Any], options: dict[str, Any]
) -> tuple[Sequence[IntervalSet], Sequence[IntervalSet]]:
    """Return for which values of a column a comparison is true, and for which its negation is."""
    compare_values = functools.partial(compare, name, kind, nan_is_greatest=True)
    if pa.types.is_dictionary(storage_of(kind)) and op not in _UNORDERED:  # Polars may order categories otherwise
        raise NotImplementedError
    if op in ("IsNull", "IsNotNull"):
        return ([ONLY_NULL], [EVERYTHING]) if op == "IsNull" else ([EVERYTHING], [ONLY_NULL])
    if op in ("IsNan", "IsNotNan"):
        matches = compare_values("==" if op == "IsNan" else "!=", np.nan)
    elif op == "IsBetween":
        low, high = map(_value_of, inputs)
        ops = _CLOSED[options["closed"]]
        matches = compare_values(ops[0], low) & compare_values(ops[1], high)
    elif op in ("EqValidity", "NotEqValidity"):
        matches = compare_values("==", _value_of(inputs[0]))
        sets = [matches], [~matches, ONLY_NULL]
        return sets if op == "EqValidity" else sets[::-1]
    elif options.get("nulls_equal"):
        raise NotImplementedError
    else:
        matches = compare_values(_OPERATORS[op], _value_of(inputs[0]))
    return [matches], [~matches]


def _value_of(node: Any) -> Any:
    """Return the value of a literal, or the list of its values, exactly. JSON cannot represent NaN and infinities."""
    match node["Literal"]:
        case {"Scalar": {"Float64": value}}:
            return float(value)
        case {"Scalar": {"Float32": value}}:
            return np.float32(float(value))
        case {"Scalar": _} | {"Series": _}:
            pl = polars()
            series = pl.select(pl.Expr.deserialize(io.StringIO(json.dumps(node)), format="json")).to_series()
            values = list((series.explode() if series.dtype == pl.List else series).to_arrow())
            values = [value.as_py() if "view" in str(value.type) else value for value in values]
            return values if series.dtype == pl.List or "Series" in node["Literal"] else values[0]
    raise NotImplementedError


def pushed_down(expression: Any, schema: Any, type_of: TypeOf) -> Condition:
    """Return the condition of an expression in the form that Polars passes to a source: typed, constants folded.

    Parameters
    ----------
    expression : polars.Expr
    schema : polars.Schema
        Of the columns that it names.
    type_of : callable
        See `Condition.from_polars`.

    Raises
    ------
    ArgumentError
        Polars refuses the expression, or does not compute it row by row.
    """
    pl = polars()
    handed: list[Any] = []

    def source(names: list[str] | None, predicate: Any, *_: Any) -> Iterator[Any]:
        handed.append(predicate)
        yield pl.DataFrame(schema=schema if names is None else {name: schema[name] for name in names})

    from polars.io.plugins import register_io_source  # Polars is loaded on first use

    try:
        if not _is_row_by_row(expression):
            raise ArgumentError(f"{expression!s:.200} is not computed row by row; use ww.table.scan", name="filters")
        if not len(schema):
            return Condition([{}] if pl.select(expression).item() is True else [])
        lazy = register_io_source(source, schema=schema, is_pure=True).filter(expression)
        plan = lazy.explain()
        lazy.collect()
    except pl.exceptions.PolarsError as error:
        raise ArgumentError(f"Polars refuses the expression: {error!s:.300}", name="filters") from None
    if len(handed) != 1 or handed[0] is None:
        return MAY_MATCH
    condition = Condition.from_polars(handed[0], type_of)
    # Polars keeps parts that may fail in a filter of its own
    return Condition(condition.conjunctions, condition.is_exact and "FILTER" not in plan)


def _is_row_by_row(expression: Any) -> bool:
    pl = polars()
    try:
        expression.meta.is_row_separable()
    except pl.exceptions.ColumnNotFoundError:  # operators of `polars.sql_expr` have no types yet; they are row by row
        text = _SQL_OPERATOR.sub('{"Boolean":"AllHorizontal"}', expression.meta.serialize(format="json"))
        expression = pl.Expr.deserialize(io.StringIO(text), format="json")
    parts = [expression]
    while parts:
        meta = parts.pop().meta
        if not meta.is_row_separable() or not (meta.is_length_preserving() or not meta.root_names()):
            return False
        parts += meta.pop()
    return True


def mask_of(frame: Any, predicate: Any) -> Any:
    """Return for which rows of a frame a predicate is true, as a `polars.Series` without nulls."""
    name = "predicate" + "_" * (1 + max(map(len, frame.columns), default=0))
    mask = frame.select(predicate.alias(name)).get_column(name)
    mask = mask.fill_null(False) if mask.null_count() else mask
    return mask if len(mask) == len(frame) else frame.with_columns(mask).get_column(name)  # an expression of constants
