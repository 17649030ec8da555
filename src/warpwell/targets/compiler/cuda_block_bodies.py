"""Compiled bodies of what `block` declares, for the `cuda` target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.core import cgutils, types

from .. import block as b
from .cuda_bodies import VOID, WHOLE, _asm, _define, _word, seam
from .seam import I32, I64, literal


def _special(builder: Any, name: str) -> Any:
    """Read a register that never changes: an intrinsic, so that loops around it read it once."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(I32, []), f"llvm.nvvm.read.ptx.sreg.{name}"
    )
    return builder.zext(builder.call(function, []), I64)


WARPS = 32
"""Warps of a block, at most."""


def _shared(builder: Any, name: str, kind: Any) -> Any:
    """Return a variable of the block, one for a whole linked kernel, whichever of its modules asks."""
    module = builder.module
    found = module.globals.get(name)
    if found is None:
        found = ir.GlobalVariable(module, kind, name, addrspace=3)
        found.linkage = "linkonce_odr"
        found.initializer = ir.Constant(kind, ir.Undefined)
        found.align = 16
    return found


def _place(builder: Any, k: int) -> Any:
    """Return where the calling warp keeps a coordinate of its virtual block."""
    words = _shared(builder, "warpwell_virtual_block", ir.ArrayType(ir.ArrayType(I32, 4), WARPS))
    warp = builder.trunc(builder.lshr(_tid(builder), I64(5)), I32)
    return builder.gep(words, [I32(0), warp, I32(k)], inbounds=True)


def _coordinate(builder: Any, k: int) -> Any:
    return builder.zext(builder.load(_place(builder, k)), I64)


def _claimed(builder: Any) -> Any:
    return _shared(builder, "warpwell_claimed_block", I64)


def _flag(builder: Any) -> Any:
    return _shared(builder, "warpwell_launch_flag", I64)


def _tid(builder: Any) -> Any:
    def name(prefix: str, axis: str) -> Any:
        return _special(builder, f"{prefix}.{axis}")

    rows = builder.add(name("tid", "y"), builder.mul(name("ntid", "y"), name("tid", "z")))
    return builder.add(name("tid", "x"), builder.mul(name("ntid", "x"), rows))


def _threads(builder: Any) -> Any:
    product = builder.mul(_special(builder, "ntid.x"), _special(builder, "ntid.y"))
    return builder.mul(product, _special(builder, "ntid.z"))


_word(b.thread_index, 0, lambda builder, _: _tid(builder))
_word(b.block_threads, 0, lambda builder, _: _threads(builder))
_word(b.block_index, 0, lambda builder, _: _special(builder, "ctaid.x"))
_word(b.own_block, 0, lambda builder, _: _special(builder, "ctaid.x"))
_word(b.virtual_block_index, 0, lambda builder, _: _coordinate(builder, 0))
_word(b.get_claim, 0, lambda builder, _: builder.load(_claimed(builder)))
_word(b.own_flag, 0, lambda builder, _: builder.load(_flag(builder)))
# by every thread, the same value: none waits for another to read what it has stored itself
_word(b.set_flag, 1, lambda builder, v: builder.store(v[0], _flag(builder)), void=True)
_word(b.barrier, 0, lambda builder, _: _asm(builder, VOID, "bar.sync 0;", "~{memory}", []), void=True)
_define(b.add_relaxed, types.int64, 2, "atom.relaxed.gpu.global.add.u64 $0, [$1], $2;", "=l,l,l,~{memory}", scope=False)


def _set_virtual(builder: Any, values: Any) -> None:
    for k in range(3):
        builder.store(builder.trunc(values[k], I32), _place(builder, k))


def _div_short(builder: Any, values: Any) -> Any:
    short = [builder.trunc(v, I32) for v in values]
    return builder.zext(builder.udiv(*short), I64)


_word(b.set_virtual, 3, _set_virtual, void=True)
_word(b.div_short, 2, _div_short)
_word(b.put_claim, 1, lambda builder, v: builder.store(v[0], _claimed(builder)), void=True)


@seam.primitive(b.opaque)
def _opaque(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        register = {"float": "f", "double": "d"}.get(str(args[0].type))
        if register is None:
            return args[0]
        bits = 32 if register == "f" else 64
        return _asm(builder, args[0].type, f"mov.f{bits} $0, $1;", f"={register},{register}", [args[0]])

    return value(value), codegen


@seam.primitive(b.virtual_grid)
def _virtual_grid(typingctx: Any, ndim: Any) -> Any:
    dims = literal(ndim)
    if dims not in (1, 2, 3):
        return None
    result = types.int64 if dims == 1 else types.UniTuple(types.int64, dims)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def axis(k: int, name: str) -> Any:
            start = builder.mul(_coordinate(builder, k), _special(builder, f"ntid.{name}"), flags=WHOLE)
            return builder.add(start, _special(builder, f"tid.{name}"), flags=WHOLE)

        parts = [axis("xyz".index(name), name) for name in "zyx"[3 - dims :]]
        return parts[0] if dims == 1 else cgutils.pack_array(builder, parts)

    return result(ndim), codegen


def _shared_array(shape: Any, dtype: Any) -> Callable[..., Any] | None:
    parts = shape.types if isinstance(shape, types.BaseTuple) else (shape,)
    extents = tuple(literal(part) for part in parts)
    if None in extents:
        return None
    constant: Any = extents if isinstance(shape, types.BaseTuple) else extents[0]

    def implementation(shape: Any, dtype: Any) -> Any:
        return cuda.shared.array(constant, dtype)

    return implementation


# inlined, because numba-cuda lets no function return an array that it has made
seam.overload(b.shared_array, inline="always")(_shared_array)
