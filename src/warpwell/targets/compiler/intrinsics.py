"""The one place that registers Warpwell's own types and functions with a Numba target.

Numba's CPU target and numba-cuda have the same extension hooks under two module trees, each with its own
registries. `Intrinsics` holds the hooks of one of them, so that everything above is written once.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.errors import TypingError

from ... import errors
from .. import primitives as a
from ..device import ArrayKind, StructKind
from ..struct import DeviceStruct
from .checked_arrays import CheckedArray, install, item_address
from .reasons import index_problem, type_names


class StructType(types.Type):
    """The Numba type of a `DeviceStruct` class with its static parameters."""

    def __init__(self, cls: type[DeviceStruct], static: Any) -> None:
        self.cls = cls
        self.static = static
        super().__init__(name=f"{cls.__name__}{static!r}")
        dtype, ndim = getattr(static, "dtype", ""), getattr(static, "ndim", None)
        type_names[self.name] = f"storage array({dtype}, {ndim}d)" if ndim else cls.__name__

    @property
    def members(self) -> list[tuple[str, types.Type]]:
        layout = self.cls.layout(self.static)
        return [(name, types.int64 if n is None else types.UniTuple(types.int64, n)) for name, n in layout]


class StructModel(models.StructModel):
    """Plain struct of the members, passed by value."""

    def __init__(self, dmm: Any, fe_type: StructType) -> None:
        super().__init__(dmm, fe_type, fe_type.members)


class Intrinsics:
    """Extension hooks of one Numba target (`cpu` or `cuda`)."""

    target: str
    options: ClassVar[dict[str, Any]] = {}
    """Options with which device functions are compiled."""

    def __init__(self, *, extending: Any, templates: Any, register_model: Any, typeof_impl: Any, arrays: Any) -> None:
        self._extending = extending
        self._templates = templates
        self._arrays = arrays
        register_model(StructType)(StructModel)

        @typeof_impl.register(DeviceStruct)
        def _typeof_struct(value: DeviceStruct, context: Any) -> StructType:
            return StructType(type(value), value.static)

        self._register_struct()
        self._define_arithmetic()
        self._define_cold_call()
        self._define_items()
        install(self, extending, register_model, arrays)

    # -- functions ------------------------------------------------------------------------------------------

    def device(self, function: Callable[..., Any]) -> None:
        """Let compiled code call the plain Python `function`."""
        self._extending.overload(function, self.options, strict=False)(lambda *args, **kwargs: function)

    def overload(self, stub: Callable[..., Any], **options: Any) -> Any:
        """Give a stub a body in Python, chosen by the types of its arguments (Numba's `overload`)."""
        return self._extending.overload(stub, self.options, strict=False, prefer_literal=True, **options)

    def primitive(self, stub: Callable[..., Any]) -> Callable[..., Any]:
        """Give a stub its compiled body: a decorator for ``(typingctx, *types) -> (signature, codegen)``."""

        def wrap(definition: Callable[..., Any]) -> Callable[..., Any]:
            if _has_star(definition):
                _name_parameters(definition, list(inspect.signature(stub).parameters))
            checked = definition if _has_star(stub) else _check_call(stub, definition)
            template = self._templates.make_intrinsic_template(
                stub, checked, stub.__name__, prefer_literal=True, kwargs={}
            )
            self._extending.infer(template)
            self._templates.infer_global(stub, types.Function(template))
            return definition

        return wrap

    def linked(self, function: Callable[..., int]) -> None:
        """Let compiled code call a function of words that is compiled once, by itself (see `device.linked`)."""
        count = len(inspect.signature(function).parameters)

        def definition(typingctx: Any, *args: Any) -> Any:
            def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                name = self.link(context, function)
                signature = ir.FunctionType(I64, [I64] * count)
                return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)

            return types.int64(*([types.int64] * count)), codegen

        self.primitive(function)(definition)

    def link(self, context: Any, function: Callable[..., int]) -> str:
        """Link the compiled `function` to the code that is being compiled; return its symbol (C convention)."""
        raise NotImplementedError

    def _define_cold_call(self) -> None:
        """Define a call that LLVM does not inline."""

        def definition(typingctx: Any, function: Any, *args: Any) -> Any:
            resolved = typingctx.resolve_function_type(function, args, {})
            if resolved is None:
                return None
            _name_parameters(definition, ["function", *(f"argument{k}" for k in range(len(args)))])

            def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                call = context.get_function(function, resolved)
                entry = builder.function.entry_basic_block
                calls, prologue = _calls(builder), set(entry.instructions)
                out = call(builder, values[1:])
                for made in _calls(builder) - calls:
                    made.attributes.add("noinline")
                _drop_zero_fill([i for i in entry.instructions if i not in prologue])
                return out

            return resolved.return_type(function, *resolved.args), codegen

        self.primitive(a.call_cold)(definition)

    # -- primitives -----------------------------------------------------------------------------------------

    def define(
        self, stub: Callable[..., Any], lower: Callable[..., Any], accepts: Callable[[Any], bool] = lambda _: True
    ) -> None:
        """Give a stub its code for arguments of the types that it is annotated with.

        A parameter `scope` is a constant. `Any` stands for the scalar that a parameter `dtype` names, and without one
        for the type of the argument; code handles it as an integer of the same width.

        Parameters
        ----------
        stub : callable
        lower : callable
            ``(builder, values)`` to the result, which is ignored for `None`. The constant scope, or the type of the
            scalar, is a third argument.
        accepts : callable
            Whether there is code for a scalar type.
        """
        names = {name: str(p.annotation) for name, p in inspect.signature(stub).parameters.items()}
        result = str(inspect.signature(stub).return_annotation)
        is_scalar = {name: kind == "Any" and name != "dtype" for name, kind in names.items()}
        is_constant = {"scope", "dtype"}

        def definition(typingctx: Any, *args: Any) -> Any:
            if len(args) != len(names):
                return None
            found, constants, scalar = dict(zip(names, args, strict=True)), [], None
            if "scope" in found:
                constants = [literal(found["scope"])]
                if constants[0] not in (0, 1, 2):
                    return None
            elif "Any" in (*names.values(), result):
                scalar = scalar_of(found["dtype"]) if "dtype" in found else number_of(found["value"])
                if scalar is None or not accepts(scalar):
                    return None
                constants = [scalar]

            def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                flat = [
                    to_bits(context, builder, scalar, value) if is_scalar[name] else value
                    for name, value in zip(names, values, strict=True)
                    if name not in is_constant
                ]
                out = lower(builder, flat, *constants)
                if result == "None":
                    return context.get_dummy_value()
                return from_bits(context, builder, scalar, out) if result == "Any" else out

            parameters = [
                found[name] if name in is_constant else scalar if is_scalar[name] else _TYPES[kind]
                for name, kind in names.items()
            ]
            returned: Any = scalar if result == "Any" else _TYPES[result]
            return returned(*parameters), codegen

        self.primitive(stub)(definition)

    def define_grid(self, stub: Callable[..., Any], indices: Callable[[Any, int], list[Any]]) -> None:
        """Give ``stub(ndim)``, an integer or a tuple, its code: ``indices(builder, ndim)``."""

        @self.primitive(stub)
        def definition(typingctx: Any, ndim: Any) -> Any:
            dims = literal(ndim)
            if dims not in (1, 2, 3):
                return None

            def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                found = indices(builder, dims)
                return found[0] if dims == 1 else cgutils.pack_array(builder, found)

            return (types.int64 if dims == 1 else types.UniTuple(types.int64, dims))(ndim), codegen

    def _define_arithmetic(self) -> None:
        """Define the primitives whose code is the same on every compiled target."""
        self.define(a.rem, lambda builder, v: builder.urem(*v))
        self.define(a.div, lambda builder, v: builder.udiv(*v))
        self.define(a.i64, lambda builder, v: v[0])
        self.define(a.popc, lambda builder, v: builder.ctpop(v[0]))
        self.define(a.bits_as, lambda builder, v, scalar: resize(builder, v[0], item_bits(scalar)))
        self.define(a.as_bits, lambda builder, v, scalar: resize(builder, v[0], 64))

        def ffs(builder: Any, values: Any) -> Any:
            position = builder.add(builder.cttz(values[0], ir.IntType(1)(0)), I64(1))
            return builder.select(builder.icmp_signed("==", values[0], I64(0)), I64(0), position)

        self.define(a.ffs, ffs)

    # -- structs --------------------------------------------------------------------------------------------

    def _register_struct(self) -> None:
        extending = self._extending

        # members differ from class to class, so attributes are resolved by name
        @extending.infer_getattr
        class StructAttributes(self._templates.AttributeTemplate):  # type: ignore[name-defined]
            key = StructType

            def generic_resolve(self, typ: StructType, attr: str) -> types.Type | None:
                return dict(typ.members).get(attr)

        @extending.lower_getattr_generic(StructType)
        def lower_member(context: Any, builder: Any, typ: StructType, value: Any, attr: str) -> Any:
            model = context.data_model_manager[typ]
            return model.get(builder, value, attr)

        self._register_parts()
        for name, operation in (("getitem", operator.getitem), ("setitem", operator.setitem), ("len", len)):
            extending.overload(operation, self.options, strict=False)(_resolver(name))

    def _register_parts(self) -> None:
        """Register ``struct["name"]`` (see `DeviceStruct.part`)."""
        extending, signature = self._extending, self._templates.signature

        @extending.infer
        class StructPart(self._templates.AbstractTemplate):  # type: ignore[name-defined]
            key = "static_getitem"

            def generic(self, args: Any, kws: Any) -> Any:
                struct, name = args
                if not isinstance(struct, StructType) or not isinstance(name, str):
                    return None
                try:
                    part = struct.cls.part(struct.static, name)
                except errors.DTypeError as error:
                    raise TypingError(str(error)) from error
                return signature(StructType(struct.cls, part.static), struct, types.literal(name))

        @extending.lower_builtin("static_getitem", StructType, types.StringLiteral)
        def lower_part(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            struct = sig.args[0]
            part = struct.cls.part(struct.static, args[1])
            models = context.data_model_manager
            out = ir.Constant(models[sig.return_type].get_value_type(), ir.Undefined)
            for name, typ in sig.return_type.members:
                value = models[struct].get(builder, args[0], name)
                if name in part.more:
                    items = cgutils.unpack_tuple(builder, value)
                    value = context.make_tuple(builder, typ, [*items, *map(I64, part.more[name])])
                elif not isinstance(typ, types.BaseTuple):
                    value = builder.mul(value, I64(part.times.get(name, 1)))
                    value = builder.add(value, I64(part.plus.get(name, 0)))
                out = models[sig.return_type].set(builder, out, value, name)
            return out

    def method(self, name: str, parameters: tuple[str, ...]) -> None:
        """Make ``struct.name(...)`` callable in device code for every struct class that implements it."""

        implementation = _resolver(name)
        # Numba binds a method's arguments by the signature of this function
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        implementation.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(p, kind) for p in parameters]
        )
        options: dict[str, Any] = {"jit_options": self.options, "strict": False}
        if "name" in parameters:  # inlined, because a function on a GPU cannot return a new array
            options |= {"prefer_literal": True, "inline": "always"}
        self._extending.overload_method(StructType, name, **options)(implementation)

    def function(self, stub: Callable[..., Any], name: str, other: Callable[..., Any]) -> None:
        """Make ``stub(struct, ...)`` call the struct's implementation of `name`, and `other`, a store, for arrays."""

        resolve = _resolver(name)

        def implementation(*args: Any) -> Any:
            if isinstance(args[0], types.Array) and not args[0].mutable:
                raise TypingError(f"{name} to a read-only array")
            return other if isinstance(args[0], types.Array) else resolve(*args)

        self._extending.overload(stub, self.options, strict=False)(implementation)

    def chosen(self, stub: Callable[..., Any], choose: Callable[..., Any]) -> None:
        """Make `stub` call the function that a chooser returns for kinds of arguments (see `device.chosen`)."""

        def implementation(*args: Any) -> Any:
            _bind(stub, args, {})
            try:
                return choose(self.target, *map(kind_of, args))
            except errors.DTypeError as error:
                raise TypingError(str(error)) from error

        self._extending.overload(stub, self.options, strict=False)(implementation)

    def _define_items(self) -> None:
        """Define items of memory, or of an array, as an array, and the address of an array's item."""
        arrays = self._arrays

        def view(context: Any, builder: Any, typ: Any, data: Any, shape: list[Any], size: Any) -> Any:
            struct = context.make_array(typ)(context, builder)
            strides = [size]
            for extent in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], extent))
            arrays.populate_array(struct, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
            return struct._getvalue()

        @self.primitive(a.items_at)
        def items_at(typingctx: Any, address: Any, count: Any, dtype: Any) -> Any:
            scalar = scalar_of(dtype)
            if scalar is None:
                return None
            shape = types.UniTuple(types.int64, len(count)) if isinstance(count, types.BaseTuple) else types.int64
            array = types.Array(scalar, len(count) if isinstance(count, types.BaseTuple) else 1, "C", aligned=False)

            def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                data = builder.inttoptr(args[0], context.get_data_type(scalar).as_pointer())
                extents = [args[1]] if shape is types.int64 else cgutils.unpack_tuple(builder, args[1])
                return view(context, builder, array, data, extents, I64(item_bits(scalar) // 8))

            return array(types.int64, shape, dtype), codegen

        @self.primitive(a.items_of_array)
        def items_of_array(typingctx: Any, array: Any, first: Any, count: Any) -> Any:
            if not isinstance(array, types.Array) or array.layout != "C":
                return None
            flat = types.Array(array.dtype, 1, "C", readonly=not array.mutable, aligned=array.aligned)

            def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                whole = context.make_array(array)(context, builder, args[0])
                return view(context, builder, flat, builder.gep(whole.data, [args[1]]), [args[2]], whole.itemsize)

            return flat(array, types.int64, types.int64), codegen

        @self.primitive(a.element_address)
        def element_address(typingctx: Any, array: Any, index: Any) -> Any:
            if not isinstance(array, types.Array):
                return None
            is_tuple = isinstance(index, types.BaseTuple)
            if array.ndim != (len(index) if is_tuple else 1):
                return None

            def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                struct = context.make_array(array)(context, builder, value=args[0])
                position = cgutils.unpack_tuple(builder, args[1], array.ndim) if is_tuple else [args[1]]
                if isinstance(array, CheckedArray):
                    return item_address(context, builder, array, struct, position)
                pointer = cgutils.get_item_pointer(context, builder, array, struct, position)
                return builder.ptrtoint(pointer, I64)

            return types.int64(array, types.UniTuple(types.int64, array.ndim) if is_tuple else types.int64), codegen


def _resolver(name: str) -> Callable[..., Any]:
    """Return a function that gets the plain Python function that implements `name` from a struct's class."""

    def resolve(*args: Any) -> Any:
        struct, *rest = args
        if not isinstance(struct, StructType):
            return None
        try:
            function = struct.cls.implementation(name, struct.static, _key_of(rest))
        except errors.DTypeError as error:
            raise TypingError(str(error)) from error
        if function is None and name in ("getitem", "setitem"):
            raise TypingError(index_problem(str(rest[0])))
        return function

    return resolve


def kind_of(typ: Any) -> Any:
    """Return the kind of an argument of a type, for a chooser (see `device.chosen`)."""
    if isinstance(typ, StructType):
        return StructKind(typ.cls, typ.static)
    if isinstance(typ, types.Array):
        return ArrayKind(typ.ndim, typ.layout == "C" and not isinstance(typ, CheckedArray))
    if isinstance(typ, types.BaseTuple):
        return tuple(map(kind_of, typ))
    if isinstance(typ, types.Function):
        return typ.typing_key
    if isinstance(typ, types.Dispatcher):
        return typ.dispatcher.py_func
    return None


def _key_of(arguments: list[Any]) -> int | str | None:
    """Return the `key` of `DeviceStruct.implementation` for the types of arguments."""
    index, *_ = arguments or [None]
    if arguments and isinstance(arguments[-1], types.StringLiteral):
        return str(arguments[-1].literal_value)
    if isinstance(index, (types.Integer, types.IntegerLiteral, types.Boolean)):
        return 1
    if isinstance(index, types.BaseTuple) and all(isinstance(t, types.Integer) for t in index):
        return len(index)
    return None


def _drop_zero_fill(added: list[Any]) -> None:
    """Remove the stores with which Numba clears a result slot when the function is entered.

    The slot is cleared once more before the call. Inlined into a loop, the first store would run in every iteration,
    even without a call.
    """
    slots = {id(i) for i in added if isinstance(i, ir.AllocaInstr)}
    for instruction in added:
        if isinstance(instruction, ir.StoreInstr) and id(instruction.operands[1]) in slots:
            instruction.parent.instructions.remove(instruction)
            slots.remove(id(instruction.operands[1]))


def _check_call(stub: Callable[..., Any], definition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a definition that reports a call with wrong arguments as an error of the user's code."""

    @functools.wraps(definition)
    def checked(typingctx: Any, *args: Any, **kwargs: Any) -> Any:
        _bind(stub, args, kwargs)
        return definition(typingctx, *args, **kwargs)

    return checked


def _has_star(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values())


def _bind(stub: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypingError if a function does not take these arguments."""
    signature = inspect.signature(stub)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        raise TypingError(f"{error} for a function with the parameters ({names})") from None


def _name_parameters(definition: Callable[..., Any], names: list[str]) -> None:
    """Numba would fold ``*args`` into one tuple: show it as many parameters as the call has."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ["typingctx", *names]]
    definition.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def _calls(builder: Any) -> set[Any]:
    blocks = builder.function.blocks
    return {i for block in blocks for i in block.instructions if isinstance(i, ir.CallInstr)}


# -- helpers that both targets' bodies share ----------------------------------------------------------------

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))

_TYPES = {
    "int": types.int64,
    "bool": types.boolean,
    "None": types.void,
    "tuple[int, int]": types.UniTuple(types.int64, 2),
}
"""Numba types of the annotations of stubs."""


def scalar_of(dtype_type: Any) -> types.Type | None:
    """The Numba scalar of a dtype argument; None for anything but a supported NumPy scalar dtype."""
    if not isinstance(dtype_type, types.DType):
        return None
    scalar = dtype_type.dtype
    if isinstance(scalar, (types.Integer, types.Float, types.Boolean)) and item_bits(scalar) in (8, 16, 32, 64):
        return scalar
    return None


def item_bits(scalar: Any) -> int:
    return 8 if isinstance(scalar, types.Boolean) else int(scalar.bitwidth)


def from_bits(context: Any, builder: Any, scalar: Any, bits: Any) -> Any:
    """An integer of the item's width as a value of the scalar type."""
    if isinstance(scalar, types.Boolean):
        return builder.icmp_unsigned("!=", bits, bits.type(0))
    llvm_type = context.get_value_type(scalar)
    return bits if bits.type == llvm_type else builder.bitcast(bits, llvm_type)


def to_bits(context: Any, builder: Any, scalar: Any, value: Any) -> Any:
    """A value of the scalar type as an integer of the item's width."""
    width = ir.IntType(item_bits(scalar))
    if isinstance(scalar, types.Boolean):
        return builder.zext(value, width) if value.type.width < width.width else value
    return value if value.type == width else builder.bitcast(value, width)


def number_of(typ: Any) -> types.Type | None:
    """Return the Numba scalar of a value; None for anything but a number or a truth value."""
    scalar = types.unliteral(typ)
    return scalar if isinstance(scalar, types.Integer | types.Float | types.Boolean) else None


def is_wide(scalar: Any) -> bool:
    """Return True for numbers of 4 or 8 bytes, which have atomic updates."""
    return not isinstance(scalar, types.Boolean) and item_bits(scalar) >= 32


def is_wide_integer(scalar: Any) -> bool:
    """Return True for integers of 4 or 8 bytes."""
    return isinstance(scalar, types.Integer) and is_wide(scalar)


def resize(builder: Any, bits: Any, width: int) -> Any:
    """Return an integer truncated or zero-extended to a number of bits."""
    target = ir.IntType(width)
    if bits.type.width == width:
        return bits
    return builder.trunc(bits, target) if bits.type.width > width else builder.zext(bits, target)


def literal(value: Any) -> int | None:
    """The value of an integer literal type, else None."""
    return int(value.literal_value) if isinstance(value, types.IntegerLiteral) else None
