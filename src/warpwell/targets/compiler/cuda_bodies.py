"""Compiled bodies of the primitives for the `cuda` target, as PTX with the orders of its memory model.

Every access names its order and scope (PTX ISA, memory consistency model): plain loads and stores of NVVM
would be weak, and weak accesses synchronize nothing.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
from llvmlite import ir
from numba import cuda
from numba.core import cgutils, types
from numba.cuda import compiler, extending
from numba.cuda.models import register_model
from numba.cuda.np import arrayobj
from numba.cuda.typing import templates
from numba.cuda.typing.typeof import typeof_impl

from .. import atomics as a
from .. import block
from ..device import subscribe
from ..fault import FAULT_PAGE
from ..shipped import find_ptx
from .checked_arrays import install
from .code_cache import cache_folder, read_or_make, version
from .machine_code import object_name, symbol_of
from .seam import I16, I32, I64, Seam, from_bits, item_bits, literal, to_bits


class CudaSeam(Seam):
    """The hooks of the `cuda` target."""

    target = "cuda"

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self._objects: dict[tuple[str, Any], Any] = {}

    def link(self, context: Any, function: Callable[..., int]) -> str:
        """Compile `function` to PTX once for a compute capability, and have the kernel link it."""
        name = symbol_of(function)
        cc = compiler.get_current_device().compute_capability
        key = name, cc
        if key not in self._objects:
            self._objects[key] = cuda.PTXSource(self.stored_ptx(function, cc), name=f"{name}.ptx")
        context.active_code_library.add_linking_file(self._objects[key])
        return name

    @classmethod
    def stored_ptx(cls, function: Callable[..., int], cc: Any) -> bytes:
        """Return the PTX of a linked function: from the wheel, from the disk cache, or compiled."""
        major, minor = cc
        name = object_name(function)
        found = None if name is None else find_ptx(name, 10 * major + minor)
        return zlib.decompress(cls.cached_ptx(function, cc) if found is None else found)

    @classmethod
    def cached_ptx(cls, function: Callable[..., int], cc: Any) -> bytes:
        """Return the compressed PTX of a linked function from the disk cache, or compiled."""

        def make() -> bytes:
            return zlib.compress(cls.ptx_of(function, cc).encode())

        name, compiler = object_name(function), _compiler_digest()
        if name is None or compiler is None:
            return make()
        major, minor = cc
        return read_or_make(cache_folder() / f"{name}.{compiler}.sm_{major}{minor}.ptx.z", make)

    @staticmethod
    def ptx_of(function: Callable[..., int], cc: Any) -> str:
        """Return the PTX of a linked function."""
        count = len(inspect.signature(function).parameters)
        text, _ = cuda.compile(
            function,
            types.int64(*([types.int64] * count)),
            cc=tuple(cc),
            device=True,
            abi="c",
            abi_info={"abi_name": symbol_of(function)},
        )
        return str(text)


@functools.cache
def _compiler_digest() -> str | None:
    """Return a digest of the versions of numba-cuda and NVVM, or None if NVVM cannot be found by its name."""
    try:
        path = pathlib.Path(load_nvidia_dynamic_lib("nvvm").abs_path).resolve()
        status = path.stat()
    except (DynamicLibNotFoundError, OSError):
        return None
    content = f"{version('numba-cuda')} {path} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(content.encode()).hexdigest()[:8]


seam = CudaSeam(extending=extending, templates=templates, register_model=register_model, typeof_impl=typeof_impl)

SCOPES = ("cta", "gpu", "sys")
VOID = ir.VoidType()


def _asm(builder: Any, result: Any, text: str, constraints: str, args: list[Any]) -> Any:
    """Emit one statement; convergent, so that the optimizer moves it into no branch and out of none."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    builder.function.attributes.add("convergent")  # or calls of the function could be moved
    return builder.call(ir.InlineAsm(signature, text, constraints, side_effect=True), args, attrs=("convergent",))


def _define(stub: Any, result: types.Type, count: int, text: str, constraints: str, *, scope: bool = True) -> None:
    """Register one PTX statement over words; ``{s}`` stands for the scope."""
    register = VOID if result is types.void else I64

    def codegen(builder: Any, values: Any, chosen: int = 0) -> Any:
        return _asm(builder, register, text.replace("{s}", SCOPES[chosen]), constraints, values)

    seam.word(stub, count, codegen, result=result, scope=scope)


_MEMORY = ",~{memory}"
_define(a.load_relaxed, types.int64, 1, "ld.relaxed.{s}.global.u64 $0, [$1];", "=l,l" + _MEMORY)
_define(a.load_acquire, types.int64, 1, "ld.acquire.{s}.global.u64 $0, [$1];", "=l,l" + _MEMORY)
_define(a.store_relaxed, types.void, 2, "st.relaxed.{s}.global.u64 [$0], $1;", "l,l" + _MEMORY)
_define(a.store_release, types.void, 2, "st.release.{s}.global.u64 [$0], $1;", "l,l" + _MEMORY)
for _stub, _operation in (
    (a.exchange, "exch.b64"),
    (a.fetch_add, "add.u64"),
    (a.fetch_or, "or.b64"),
    (a.fetch_and, "and.b64"),
):
    _define(_stub, types.int64, 2, f"atom.acq_rel.{{s}}.global.{_operation} $0, [$1], $2;", "=l,l,l" + _MEMORY)
_define(a.compare_exchange, types.int64, 3, "atom.acq_rel.{s}.global.cas.b64 $0, [$1], $2, $3;", "=l,l,l,l" + _MEMORY)
_define(
    a.compare_exchange_acquire,
    types.int64,
    3,
    "atom.acquire.{s}.global.cas.b64 $0, [$1], $2, $3;",
    "=l,l,l,l" + _MEMORY,
)
_define(a.fence, types.void, 0, "fence.acq_rel.{s};", "~{memory}")


# -- items --------------------------------------------------------------------------------------------------

# PTX has no 8-bit register: a byte travels in a 16-bit one
_REGISTER = {8: (I16, "h"), 16: (I16, "h"), 32: (I32, "r"), 64: (I64, "l")}


_FIRST_OUT = "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
"""The policy of lines that leave L2 before others; a constant of the instruction in machine code."""


def _load_item(instruction: str, *, passing: bool = False) -> Any:
    def load(builder: Any, address: Any, bits: int) -> Any:
        register, letter = _REGISTER[bits]
        text = f"{instruction}.u{bits} $0, [$1];"
        if passing:
            text = f"{{ .reg .b64 policy; {_FIRST_OUT} {instruction}.L2::cache_hint.u{bits} $0, [$1], policy; }}"
        loaded = _asm(builder, register, text, f"={letter},l{_MEMORY}", [address])
        return loaded if register.width == bits else builder.trunc(loaded, ir.IntType(bits))

    return load


def _store_item(instruction: str) -> Any:
    def store(builder: Any, address: Any, value: Any) -> None:
        bits = value.type.width
        register, letter = _REGISTER[bits]
        stored = value if register.width == bits else builder.zext(value, register)
        _asm(builder, VOID, f"{instruction}.u{bits} [$0], $1;", f"l,{letter}{_MEMORY}", [address, stored])

    return store


def _add_item(context: Any, builder: Any, scalar: Any, address: Any, value: Any) -> Any:
    bits = item_bits(scalar)
    register, letter = _REGISTER[bits]
    kind = f"u{bits}"
    if isinstance(scalar, types.Float):
        register, letter, kind = context.get_value_type(scalar), "f" if bits == 32 else "d", f"f{bits}"
    text = f"atom.relaxed.gpu.global.add.{kind} $0, [$1], $2;"
    return _asm(builder, register, text, f"={letter},l,{letter}{_MEMORY}", [address, value])


def _update_bits(operation: str, kind: str, context: Any, builder: Any, scalar: Any, address: Any, value: Any) -> Any:
    bits = item_bits(scalar)
    register, letter = _REGISTER[bits]
    text = f"atom.relaxed.gpu.global.{operation}.{kind}{bits} $0, [$1], $2;"
    operand = to_bits(context, builder, scalar, value)
    old = _asm(builder, register, text, f"={letter},l,{letter}{_MEMORY}", [address, operand])
    return from_bits(context, builder, scalar, old)


def _min_item(context: Any, builder: Any, scalar: Any, address: Any, value: Any) -> Any:
    # floats that are not negative are in the order of their bits
    kind = "s" if isinstance(scalar, types.Float) or scalar.signed else "u"
    return _update_bits("min", kind, context, builder, scalar, address, value)


def _or_item(context: Any, builder: Any, scalar: Any, address: Any, value: Any) -> Any:
    return _update_bits("or", "b", context, builder, scalar, address, value)


seam.item_load(a.load_relaxed_as, _load_item("ld.relaxed.gpu.global"))
seam.item_load(a.load_acquire_as, _load_item("ld.acquire.gpu.global"))
seam.item_load(a.load_passing_as, _load_item("ld.acquire.gpu.global", passing=True))
seam.item_load(a.load_weak_as, _load_item("ld.global"))
seam.item_store(a.store_relaxed_as, _store_item("st.relaxed.gpu.global"))
seam.item_store(a.store_weak_as, _store_item("st.global"))
seam.item_update(a.fetch_add_as, _add_item)
seam.item_update(a.fetch_min_as, _min_item)
seam.item_update(a.fetch_or_as, _or_item, floats=False)


def _copy_wide(builder: Any, values: Any) -> None:
    """Emit up to four 16-byte loads in flight, then the stores."""
    dst, src, stride, count = values
    pair = ir.LiteralStructType([I64, I64])

    def copy(offsets: list[Any]) -> None:
        loaded = [
            _asm(
                builder,
                pair,
                "ld.relaxed.sys.global.v2.u64 {$0, $1}, [$2];",
                "=l,=l,l" + _MEMORY,
                [builder.add(src, offset)],
            )
            for offset in offsets
        ]
        for value, offset in zip(loaded, offsets, strict=True):
            halves = [builder.extract_value(value, k) for k in (0, 1)]
            _asm(
                builder,
                VOID,
                "st.relaxed.sys.global.v2.u64 [$0], {$1, $2};",
                "l,l,l" + _MEMORY,
                [builder.add(dst, offset), *halves],
            )

    with builder.if_else(builder.icmp_signed("==", count, I64(4))) as (four, fewer):
        with four:
            copy([builder.mul(stride, I64(k)) for k in range(4)])
        with fewer, cgutils.for_range(builder, count) as loop:
            copy([builder.mul(loop.index, stride)])


seam.word(a.copy_wide, 4, _copy_wide, result=types.void)


def _copy_foreign(builder: Any, values: Any) -> None:
    """Copy words one by one: a thread of a GPU copies no more than a few."""
    dst, src, nbytes = values
    with cgutils.for_range(builder, builder.lshr(nbytes, I64(3))) as loop:
        offset = builder.shl(loop.index, I64(3))
        word = _asm(builder, I64, "ld.relaxed.gpu.global.u64 $0, [$1];", "=l,l" + _MEMORY, [builder.add(src, offset)])
        _asm(builder, VOID, "st.relaxed.gpu.global.u64 [$0], $1;", "l,l" + _MEMORY, [builder.add(dst, offset), word])


seam.word(a.copy_foreign, 3, _copy_foreign, result=types.void)
_PAIR = ir.LiteralStructType([I64, I64])


def _load_pair(builder: Any, values: Any) -> Any:
    text = "ld.relaxed.gpu.global.v2.u64 {$0, $1}, [$2];"
    both = _asm(builder, _PAIR, text, "=l,=l,l" + _MEMORY, values)
    return cgutils.pack_array(builder, [builder.extract_value(both, k) for k in (0, 1)])


seam.word(a.load_pair, 1, _load_pair, result=types.UniTuple(types.int64, 2))
_define(a.store_pair, types.void, 3, "st.relaxed.gpu.global.v2.u64 [$0], {$1, $2};", "l,l,l" + _MEMORY, scope=False)
seam.items(a.items_at, arrayobj)
seam.array_items(a.items_of_array, arrayobj)


# -- warps --------------------------------------------------------------------------------------------------


def _widen(builder: Any, value: Any) -> Any:
    return builder.zext(value, I64)


def _narrow(builder: Any, value: Any) -> Any:
    return builder.trunc(value, I32)


seam.word(a.lane_id, 0, lambda b, _: _widen(b, _asm(b, I32, "mov.u32 $0, %laneid;", "=r", [])))
seam.word(a.warp_size, 0, lambda b, _: I64(32))
# ptxas takes the result of activemask for the same in all lanes wherever they meet again, and so lets two groups
# that meet in a called function (seen with its release 13.0 on an H200) vote and shuffle as if they were one.
# Adding laneid / 32, which is zero, hides where the mask comes from; then it keeps the groups apart.
_ACTIVEMASK = "{ .reg .b32 m, z; activemask.b32 m; mov.u32 z, %laneid; shr.u32 z, z, 5; add.u32 $0, m, z; }"
seam.word(a.activemask, 0, lambda b, _: _widen(b, _asm(b, I32, _ACTIVEMASK, "=r" + _MEMORY, [])))
seam.word(
    a.syncwarp,
    1,
    lambda b, v: _asm(b, VOID, "bar.warp.sync $0;", "r" + _MEMORY, [_narrow(b, v[0])]),
    result=types.void,
)


def _match_any(builder: Any, values: Any) -> Any:
    mask = _narrow(builder, values[0])
    text = "match.any.sync.b64 $0, $1, $2;"
    found = _asm(builder, I32, text, "=r,l,r" + _MEMORY, [values[1], mask])
    return _widen(builder, builder.and_(found, mask))


seam.word(a.match_any, 2, _match_any)


def _shfl(builder: Any, values: Any) -> Any:
    mask, value, lane = _narrow(builder, values[0]), values[1], _narrow(builder, values[2])
    halves = []
    for half in (builder.trunc(value, I32), builder.trunc(builder.lshr(value, I64(32)), I32)):
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, $3;"
        halves.append(_widen(builder, _asm(builder, I32, text, "=r,r,r,r" + _MEMORY, [half, lane, mask])))
    return builder.or_(halves[0], builder.shl(halves[1], I64(32)))


seam.word(a.shfl, 3, _shfl)
seam.item_shuffle(a.shfl_as, _shfl)


def _vote(builder: Any, mask: Any, predicate: Any) -> Any:
    """Vote among the lanes of `mask`.

    Two groups of a warp that happen to be converged vote in one instruction, and each gets the bits of
    both (seen on an H200): a vote counts only within the mask.
    """
    text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; vote.sync.ballot.b32 $0, p, $1; }"
    wide, narrow = builder.zext(predicate, I32), _narrow(builder, mask)
    found = _asm(builder, I32, text, "=r,r,r" + _MEMORY, [narrow, wide])
    return _widen(builder, builder.and_(found, narrow))


_PREDICATE = types.int64, types.boolean
seam.word(a.ballot, _PREDICATE, lambda b, v: _vote(b, *v))
seam.word(a.any_sync, _PREDICATE, lambda b, v: b.icmp_unsigned("!=", _vote(b, *v), I64(0)), result=types.boolean)


# -- where and when -----------------------------------------------------------------------------------------


def _special(builder: Any, name: str) -> Any:
    return _widen(builder, _asm(builder, I32, f"mov.u32 $0, %{name};", "=r", []))


def _constant_special(builder: Any, name: str) -> Any:
    """Read a register that never changes: an intrinsic, so that loops around it read it once."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(I32, []), f"llvm.nvvm.read.ptx.sreg.{name}"
    )
    return builder.zext(builder.call(function, []), I64)


NO_WRAP = ("nuw", "nsw")


def _define_grid(stub: Any, index: Callable[..., Any], special: Callable[..., Any]) -> None:
    """Register a stub for the index in the launch, where ``index(builder, axis)`` is the block's."""

    @seam.primitive(stub)
    def definition(typingctx: Any, ndim: Any) -> Any:
        dims = literal(ndim)
        if dims not in (1, 2, 3):
            return None
        result = types.int64 if dims == 1 else types.UniTuple(types.int64, dims)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            def axis(name: str) -> Any:
                # flagged as unable to wrap: then an index is known not to be negative, and is not looked at for it
                start = builder.mul(index(builder, name), special(builder, f"ntid.{name}"), flags=NO_WRAP)
                return builder.add(start, special(builder, f"tid.{name}"), flags=NO_WRAP)

            # the last axis of the shape is CUDA's x, so that neighbours in memory are neighbours in a warp
            parts = [axis(name) for name in "zyx"[3 - dims :]]
            return parts[0] if dims == 1 else cgutils.pack_array(builder, parts)

        return result(ndim), codegen


_define_grid(a.grid, lambda builder, axis: _constant_special(builder, f"ctaid.{axis}"), _constant_special)
seam.word(a.interrupted, 0, lambda b, _: I64(0))
seam.word(a.launch_flag, 0, lambda b, _: I64(FAULT_PAGE))
seam.word(a.clock_ns, 0, lambda b, _: _asm(b, I64, "mov.u64 $0, %globaltimer;", "=l" + _MEMORY, []))


def _backoff(builder: Any, values: Any) -> Any:
    doubled = builder.mul(values[0], I64(64))
    capped = builder.select(builder.icmp_signed(">", doubled, I64(2000)), I64(2000), doubled)
    return _asm(builder, VOID, "nanosleep.u32 $0;", "r" + _MEMORY, [_narrow(builder, capped)])


seam.word(a.backoff, 1, _backoff, result=types.void)


# -- blocks -------------------------------------------------------------------------------------------------


WARPS = 32
"""Maximum number of warps of a block."""


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


def _coordinate_pointer(builder: Any, k: int) -> Any:
    """Return where the calling warp keeps a coordinate of its virtual block."""
    blocks = _shared(builder, "warpwell_virtual_block", ir.ArrayType(ir.ArrayType(I32, 4), WARPS))
    warp = builder.trunc(builder.lshr(_tid(builder), I64(5)), I32)
    return builder.gep(blocks, [I32(0), warp, I32(k)], inbounds=True)


def _coordinate(builder: Any, k: int) -> Any:
    return builder.zext(builder.load(_coordinate_pointer(builder, k)), I64)


def _claimed(builder: Any) -> Any:
    return _shared(builder, "warpwell_claimed_block", I64)


def _flag(builder: Any) -> Any:
    return _shared(builder, "warpwell_launch_flag", I64)


def _tid(builder: Any) -> Any:
    def name(prefix: str, axis: str) -> Any:
        return _constant_special(builder, f"{prefix}.{axis}")

    rows = builder.add(name("tid", "y"), builder.mul(name("ntid", "y"), name("tid", "z")))
    return builder.add(name("tid", "x"), builder.mul(name("ntid", "x"), rows))


def _threads(builder: Any) -> Any:
    product = builder.mul(_constant_special(builder, "ntid.x"), _constant_special(builder, "ntid.y"))
    return builder.mul(product, _constant_special(builder, "ntid.z"))


seam.word(block.thread_index, 0, lambda builder, _: _tid(builder))
seam.word(block.block_threads, 0, lambda builder, _: _threads(builder))
seam.word(block.block_index, 0, lambda builder, _: _constant_special(builder, "ctaid.x"))
seam.word(block.own_block, 0, lambda builder, _: _constant_special(builder, "ctaid.x"))
seam.word(block.virtual_block_index, 0, lambda builder, _: _coordinate(builder, 0))
seam.word(block.get_claim, 0, lambda builder, _: builder.load(_claimed(builder)))
seam.word(block.own_flag, 0, lambda builder, _: builder.load(_flag(builder)))
# by every thread, the same value: none waits for another to read what it has stored itself
seam.word(block.set_flag, 1, lambda builder, v: builder.store(v[0], _flag(builder)), result=types.void)
seam.word(block.barrier, 0, lambda builder, _: _asm(builder, VOID, "bar.sync 0;", "~{memory}", []), result=types.void)
_define(
    block.add_relaxed, types.int64, 2, "atom.relaxed.gpu.global.add.u64 $0, [$1], $2;", "=l,l,l" + _MEMORY, scope=False
)


def _set_virtual(builder: Any, values: Any) -> None:
    for k in range(3):
        builder.store(builder.trunc(values[k], I32), _coordinate_pointer(builder, k))


def _div_short(builder: Any, values: Any) -> Any:
    short = [builder.trunc(v, I32) for v in values]
    return builder.zext(builder.udiv(*short), I64)


seam.word(block.set_virtual, 3, _set_virtual, result=types.void)
seam.word(block.div_short, 2, _div_short)
seam.word(block.put_claim, 1, lambda builder, v: builder.store(v[0], _claimed(builder)), result=types.void)


_LONGEST = 1 << 47
"""Upper bound of the items of an array: the address space has 47 bits, unless the array repeats items."""


@seam.primitive(block.has_sizes)
def _has_sizes(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if isinstance(value, types.Array):
            array = context.make_array(value)(context, builder, args[0])
            truth = ir.FunctionType(VOID, [ir.IntType(1)])
            assume = cgutils.get_or_insert_function(builder.module, truth, "llvm.assume")
            for size in (array.nitems, *cgutils.unpack_tuple(builder, array.shape, value.ndim)):
                builder.call(assume, [builder.icmp_unsigned("<", size, I64(_LONGEST))])
        return context.get_dummy_value()

    return types.void(value), codegen


@seam.primitive(block.opaque)
def _opaque(typingctx: Any, value: Any, turn: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        register = {"float": "f", "double": "d"}.get(str(args[0].type))
        if register is None:
            return args[0]
        bits = 32 if register == "f" else 64
        kind = ir.FunctionType(args[0].type, [args[0].type, I64])
        move = ir.InlineAsm(kind, f"mov.f{bits} $0, $1;", f"={register},{register},l")
        return builder.call(move, args)

    return value(value, types.int64), codegen


_define_grid(block.virtual_grid, lambda builder, axis: _coordinate(builder, "xyz".index(axis)), _constant_special)


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
seam.overload(block.shared_array, inline="always")(_shared_array)

install(seam, extending, register_model, arrayobj)
subscribe(seam)
