"""Compiled bodies of what `block` declares, for the `cuda` target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.core import cgutils, types

from . import block as b
from ._cuda import VOID, _asm, _define, _special, _word, seam
from ._seam import I32, I64, literal

WORDS = 4
"""Words of shared memory that tell a block its index, and what it has claimed."""


def _shared(builder: Any) -> Any:
    """Return the words, one set for a whole linked kernel, whichever of its modules asks."""
    module = builder.module
    name = "warpwell_virtual_block"
    found = module.globals.get(name)
    if found is None:
        found = ir.GlobalVariable(module, ir.ArrayType(I64, WORDS), name, addrspace=3)
        found.linkage = "linkonce_odr"
        found.initializer = ir.Constant(found.value_type, ir.Undefined)
        found.align = 16
    return found


def _word_at(builder: Any, k: int) -> Any:
    return builder.gep(_shared(builder), [I32(0), I32(k)], inbounds=True)


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
_word(b.virtual_block_index, 0, lambda builder, _: builder.load(_word_at(builder, 0)))
_word(b.get_claim, 0, lambda builder, _: builder.load(_word_at(builder, 3)))
_word(b.barrier, 0, lambda builder, _: _asm(builder, VOID, "bar.sync 0;", "~{memory}", []), void=True)
_define(b.add_relaxed, types.int64, 2, "atom.relaxed.gpu.global.add.u64 $0, [$1], $2;", "=l,l,l,~{memory}", scope=False)


def _set_virtual(builder: Any, values: Any) -> None:
    for k in range(3):
        builder.store(values[k], _word_at(builder, k))


_word(b.set_virtual, 3, _set_virtual, void=True)
_word(b.put_claim, 1, lambda builder, v: builder.store(v[0], _word_at(builder, 3)), void=True)


@seam.primitive(b.virtual_grid)
def _virtual_grid(typingctx: Any, ndim: Any) -> Any:
    dims = literal(ndim)
    if dims not in (1, 2, 3):
        return None
    result = types.int64 if dims == 1 else types.UniTuple(types.int64, dims)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def axis(k: int, name: str) -> Any:
            start = builder.mul(builder.load(_word_at(builder, k)), _special(builder, f"ntid.{name}"))
            return builder.add(start, _special(builder, f"tid.{name}"))

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
