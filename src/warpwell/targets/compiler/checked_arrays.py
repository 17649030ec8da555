"""Checked arrays: the types of NumPy and device arrays in a launch with bounds checks.

A `CheckedArray` differs from an array in two respects: its subscripts check their indices, and its rows are checked
arrays. It has the layout of an array. The member `parent`, which device code does not use, holds the address of the
launch's `Record`.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.imputils import impl_ret_borrowed

from .. import bounds

I64 = ir.IntType(64)


class CheckedArray(types.Array):
    """The Numba type of an array whose subscripts are checked; `number` is the number of the kernel's argument."""

    def __init__(self, number: int, dtype: Any, ndim: int, layout: str, **options: Any) -> None:
        self.number = number
        plain = types.Array(dtype, ndim, layout, **options)
        super().__init__(dtype, ndim, layout, name=f"checked {number} {plain.name}", **options)

    @classmethod
    def of(cls, array: types.Array, number: int) -> CheckedArray:
        """Return the checked type of an array."""
        return cls(number, array.dtype, array.ndim, array.layout, readonly=not array.mutable, aligned=array.aligned)

    def copy(self, *args: Any, **options: Any) -> CheckedArray:
        """Return the type of the array's rows and fields."""
        return self.of(super().copy(*args, **options), self.number)

    @property
    def key(self) -> Any:
        """The identity of the type."""
        return (self.number, *super().key)

    @property
    def mangling_args(self) -> Any:
        """The identity of the type in names of functions."""
        name, args = super().mangling_args
        return name, [*args, self.number]

    def unify(self, typingctx: Any, second: Any) -> Any:
        """Return the type of a variable that is this array or another one: checked, as this one, if both are checked.

        An array that the kernel has created has no record.
        """
        plain = super().unify(typingctx, second)
        return self.of(plain, self.number) if plain and isinstance(second, CheckedArray) else plain


def install(intrinsics: Any, extending: Any, register_model: Any, arrays: Any) -> None:
    """Register checked arrays with a target. The module `arrays` has the target's implementations of subscripts."""
    register_model(CheckedArray)(models.ArrayModel)

    @intrinsics.primitive(bounds.checked)
    def checked(typingctx: Any, value: Any, record: Any, number: Any) -> Any:
        if not isinstance(value, types.Array) or not isinstance(number, types.IntegerLiteral):

            def same(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                return impl_ret_borrowed(context, builder, sig.return_type, args[0])

            return value(value, types.int64, number), same

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            array = context.make_array(sig.args[0])(context, builder, args[0])
            array.parent = builder.inttoptr(args[1], array.parent.type)
            return impl_ret_borrowed(context, builder, sig.return_type, array._getvalue())

        return CheckedArray.of(value, number.literal_value)(value, types.int64, number), codegen

    def getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        indices = _indices(builder, sig.args[1], args[1])
        plain = arrays.getitem_array_tuple if isinstance(sig.args[1], types.BaseTuple) else arrays.getitem_arraynd_intp
        array = context.make_array(sig.args[0])(context, builder, args[0])
        inside = _inside(context, builder, arrays, sig.args[0], array, indices)
        out = cgutils.alloca_once_value(builder, _nothing(context, builder, sig.return_type, array))
        with builder.if_then(inside, likely=True):
            found = plain(context, builder, sig, args)
            builder.store(found, out)
        return builder.load(out)

    def setitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        indices = _indices(builder, sig.args[1], args[1])
        array = context.make_array(sig.args[0])(context, builder, args[0])
        with builder.if_then(_inside(context, builder, arrays, sig.args[0], array, indices), likely=True):
            arrays.setitem_array(context, builder, sig, args)

    # a variable that is one array or another
    extending.lower_cast(CheckedArray, types.Array)(lambda context, builder, source, target, value: value)
    for index in (types.Integer, types.BaseTuple):
        extending.lower_builtin(operator.getitem, CheckedArray, index)(getitem)
    extending.lower_builtin(operator.setitem, CheckedArray, types.Any, types.Any)(setitem)


def item_address(context: Any, builder: Any, typ: Any, array: Any, position: list[Any]) -> Any:
    """Return the address of an item, or of the sink in the record if an index is out of range."""
    extents = cgutils.unpack_tuple(builder, array.shape, typ.ndim)
    out = cgutils.alloca_once_value(builder, builder.add(builder.ptrtoint(array.parent, I64), I64(bounds.SINK)))
    inside = _compare(context, builder, typ, array, list(zip(position, position, extents, strict=True)))
    with builder.if_then(inside, likely=True):
        pointer = cgutils.get_item_pointer(context, builder, typ, array, position)
        builder.store(builder.ptrtoint(pointer, I64), out)
    return builder.load(out)


def _compare(context: Any, builder: Any, typ: Any, array: Any, indices: list[tuple[Any, Any, Any]]) -> Any:
    """Return whether indices are in range; record the first that is not. Each has the user's index, and an extent."""
    all_inside = cgutils.true_bit
    for index, raw, extent in indices:
        inside = builder.icmp_unsigned("<", index, extent)
        with builder.if_then(builder.and_(all_inside, builder.not_(inside)), likely=False):
            note(context, builder, typ, array, raw, extent)
        all_inside = builder.and_(all_inside, inside)
    return all_inside


def _indices(builder: Any, typ: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return types and values of an index."""
    if isinstance(typ, types.BaseTuple):
        return list(zip(typ.types, cgutils.unpack_tuple(builder, value, len(typ)), strict=True))
    return [(typ, value)]


def _inside(context: Any, builder: Any, arrays: Any, typ: Any, array: Any, indices: list[tuple[Any, Any]]) -> Any:
    """Return whether the integers among the indices are in range; record the first that is not."""
    extents = cgutils.unpack_tuple(builder, array.shape, typ.ndim)
    given_count = sum(not (t is types.ellipsis or isinstance(t, types.NoneType)) for t, _ in indices)
    found, axis = [], 0
    for index_type, index in indices:
        if index_type is types.ellipsis:
            axis += typ.ndim - given_count
        elif isinstance(index_type, types.Integer):
            at = arrays.fix_integer_index(context, builder, index_type, index, extents[axis])
            found.append((at, context.cast(builder, index, index_type, types.int64), extents[axis]))
            axis += 1
        elif not isinstance(index_type, types.NoneType):
            axis += 1
    return _compare(context, builder, typ, array, found)


def note(context: Any, builder: Any, typ: CheckedArray, array: Any, index: Any, extent: Any) -> None:
    """Call `bounds.note`."""
    function = context.typing_context.resolve_value_type(bounds.note)
    sig = function.get_call_type(context.typing_context, (types.int64,) * 4, {})
    record = builder.ptrtoint(array.parent, I64)
    context.get_function(function, sig)(builder, [record, I64(typ.number), index, extent])


def _nothing(context: Any, builder: Any, typ: Any, array: Any) -> Any:
    """Return the value of a subscript out of range: zero. A NumPy record is a pointer, to zeros of the caller."""
    kind = context.get_value_type(typ)
    if isinstance(typ, types.Record):
        zeros = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(ir.IntType(8), typ.size), None))
        return builder.bitcast(zeros, kind)
    zero = ir.Constant(kind, None)
    if isinstance(typ, CheckedArray):  # A row without items: its own subscripts are out of range.
        row = context.make_array(typ)(context, builder, zero)
        row.parent = array.parent
        return row._getvalue()
    return zero
