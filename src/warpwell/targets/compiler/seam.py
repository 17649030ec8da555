"""The one place that registers Warpwell's own types and functions with a Numba target.

Numba's CPU target and numba-cuda have the same extension hooks under two module trees, each with its own
registries. A `Seam` holds the hooks of one of them, so that everything above is written once.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.errors import TypingError

from ... import errors
from ..struct import DeviceStruct
from .checked_arrays import CheckedArray, item_address


class StructType(types.Type):
    """The Numba type of a `DeviceStruct` class with its static parameters."""

    def __init__(self, cls: type[DeviceStruct], static: Any) -> None:
        self.cls = cls
        self.static = static
        super().__init__(name=f"{cls.__name__}{static!r}")

    @property
    def members(self) -> list[tuple[str, types.Type]]:
        out: list[tuple[str, types.Type]] = []
        for name, count in self.cls.layout(self.static):
            out.append((name, types.int64 if count is None else types.UniTuple(types.int64, count)))
        return out


class StructModel(models.StructModel):
    """Plain struct of the members, passed by value."""

    def __init__(self, dmm: Any, fe_type: StructType) -> None:
        super().__init__(dmm, fe_type, fe_type.members)


class Seam:
    """Extension hooks of one Numba target (`cpu` or `cuda`)."""

    def __init__(self, *, extending: Any, templates: Any, register_model: Any, typeof_impl: Any) -> None:
        self._extending = extending
        self._templates = templates
        register_model(StructType)(StructModel)

        @typeof_impl.register(DeviceStruct)
        def _typeof_struct(value: DeviceStruct, context: Any) -> StructType:
            return StructType(type(value), value.static)

        self._register_struct()

    # -- functions ------------------------------------------------------------------------------------------

    def device(self, function: Callable[..., Any]) -> None:
        """Let compiled code call the plain Python `function`."""

        def implementation(*args: Any, **kwargs: Any) -> Any:
            return function

        self._extending.overload(function, strict=False)(implementation)

    def overload(self, stub: Callable[..., Any], **options: Any) -> Any:
        """Give a stub a body in Python, chosen by the types of its arguments (Numba's `overload`)."""
        return self._extending.overload(stub, strict=False, prefer_literal=True, **options)

    def primitive(self, stub: Callable[..., Any]) -> Callable[..., Any]:
        """Give a stub its compiled body: a decorator for ``(typingctx, *types) -> (signature, codegen)``."""

        def wrap(definition: Callable[..., Any]) -> Callable[..., Any]:
            if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(definition).parameters.values()):
                _name_parameters(definition, list(inspect.signature(stub).parameters))
            template = self._templates.make_intrinsic_template(
                stub, definition, stub.__name__, prefer_literal=True, kwargs={}
            )
            self._extending.infer(template)
            self._templates.infer_global(stub, types.Function(template))
            return definition

        return wrap

    def linked(self, function: Callable[..., int]) -> None:
        """Let compiled code call a function of words that is compiled once, by itself (see `device.linked`)."""
        words = len(inspect.signature(function).parameters)

        def definition(typingctx: Any, *args: Any) -> Any:
            def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                name = self.link(context, function)
                signature = ir.FunctionType(I64, [I64] * words)
                return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)

            return types.int64(*([types.int64] * words)), codegen

        self.primitive(function)(definition)

    def link(self, context: Any, function: Callable[..., int]) -> str:
        """Make the compiled `function` known to what is being compiled; return its symbol (C convention)."""
        raise NotImplementedError

    def cold_call(self, stub: Callable[..., Any]) -> None:
        """Give ``stub(function, *args)`` a body that calls `function` and keeps LLVM from inlining it."""

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

        self.primitive(stub)(definition)

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

        for name, operation in (("getitem", operator.getitem), ("setitem", operator.setitem), ("len", len)):
            self._operation(name, operation)

    def _operation(self, name: str, operation: Any) -> None:
        def implementation(*args: Any) -> Any:
            return _resolve(args[0], name, *args[1:])

        self._extending.overload(operation, strict=False)(implementation)

    def method(self, name: str, parameters: tuple[str, ...]) -> None:
        """Make ``struct.name(...)`` callable in device code for every struct class that implements it."""

        def implementation(*args: Any) -> Any:
            return _resolve(args[0], name, *args[1:])

        # Numba binds a method's arguments by the signature of this function
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        implementation.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(p, kind) for p in parameters]
        )
        self._extending.overload_method(StructType, name, strict=False)(implementation)

    def function(self, stub: Callable[..., Any], name: str, other: Callable[..., Any]) -> None:
        """Make ``stub(struct, ...)`` call the struct's implementation of `name`, and `other` for arrays."""

        def implementation(*args: Any) -> Any:
            if isinstance(args[0], types.Array):
                return other
            return _resolve(args[0], name, *args[1:])

        self._extending.overload(stub, strict=False)(implementation)

    def element_address(self, stub: Callable[..., Any]) -> None:
        """Give the stub for the address of an array's item its body."""

        def definition(typingctx: Any, array: Any, index: Any) -> Any:
            if not isinstance(array, types.Array):
                return None
            indices = types.UniTuple(types.int64, array.ndim)
            if isinstance(index, types.BaseTuple):
                if len(index) != array.ndim:
                    return None
            elif array.ndim != 1:
                return None
            else:
                indices = types.int64

            def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                struct = context.make_array(array)(context, builder, value=args[0])
                position = [args[1]] if array.ndim == 1 and indices is types.int64 else cgutils.unpack_tuple(
                    builder, args[1], array.ndim)  # fmt: skip
                if isinstance(array, CheckedArray):
                    return item_address(context, builder, array, struct, position)
                pointer = cgutils.get_item_pointer(context, builder, array, struct, position)
                return builder.ptrtoint(pointer, I64)

            return types.int64(array, indices), codegen

        self.primitive(stub)(definition)


def _resolve(struct: Any, name: str, *args: Any) -> Any:
    """Ask the struct's class for the plain Python function that implements `name`."""
    if not isinstance(struct, StructType):
        return None
    index = args[0] if args else None
    try:
        return struct.cls.implementation(name, struct.static, _dimensions(index))
    except errors.DTypeError as error:
        raise TypingError(str(error)) from error


def _dimensions(index: Any) -> int | None:
    """Number of integers in an index type; None where it is no integer index."""
    if isinstance(index, (types.Integer, types.IntegerLiteral, types.Boolean)):
        return 1
    if isinstance(index, types.BaseTuple) and all(isinstance(t, types.Integer) for t in index):
        return len(index)
    return None


def symbol_of(function: Callable[..., Any]) -> str:
    """Return the linker symbol of a linked function."""
    return f"{function.__module__}.{function.__qualname__}".replace(".", "_")


def _drop_zero_fill(added: list[Any]) -> None:
    """Remove the stores with which Numba clears a result slot when the function is entered.

    The slot is cleared once more before the call. Inlined into a loop, the first store would run in every
    round of it, call or no call.
    """
    slots = {id(i) for i in added if isinstance(i, ir.AllocaInstr)}
    for instruction in added:
        if isinstance(instruction, ir.StoreInstr) and id(instruction.operands[1]) in slots:
            instruction.parent.instructions.remove(instruction)
            slots.remove(id(instruction.operands[1]))


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


def literal(value: Any) -> int | None:
    """The value of an integer literal type, else None."""
    return int(value.literal_value) if isinstance(value, types.IntegerLiteral) else None
