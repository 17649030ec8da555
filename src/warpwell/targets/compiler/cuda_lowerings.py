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
from collections.abc import Callable, Sequence
from importlib import metadata
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

from .. import primitives as a
from ..device import subscribe
from ..fault import FAULT_PAGE
from ..shipped import find_ptx
from .intrinsics import I32, I64, Intrinsics, is_wide, is_wide_integer, item_bits, literal, resize
from .machine_code import stored_code, symbol_of


class CudaIntrinsics(Intrinsics):
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
            self._objects[key] = cuda.PTXSource(zlib.decompress(self.compressed_ptx(function, cc)), name=f"{name}.ptx")
        context.active_code_library.add_linking_file(self._objects[key])
        return name

    @classmethod
    def compressed_ptx(cls, function: Callable[..., int], cc: Any) -> bytes:
        """Return the PTX of a linked function, compressed: from the wheel, from the disk cache, or compiled."""
        compiler = _compiler_digest()
        return stored_code(
            function,
            lambda name: find_ptx(name, 10 * cc[0] + cc[1]),
            None if compiler is None else f"{compiler}.sm_{cc[0]}{cc[1]}.ptx.z",
            lambda: zlib.compress(cls.ptx_of(function, cc).encode()),
        )

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
    content = f"{metadata.version('numba-cuda')} {path} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(content.encode()).hexdigest()[:8]


intrinsics = CudaIntrinsics(
    extending=extending,
    templates=templates,
    register_model=register_model,
    typeof_impl=typeof_impl,
    arrays=arrayobj,
)

SCOPES = ("cta", "gpu", "sys")
VOID = ir.VoidType()
PAIR = ir.LiteralStructType([I64, I64])
_LETTERS = {"void": "", "i16": "=h", "i32": "=r", "i64": "=l", "float": "=f", "double": "=d", str(PAIR): "=l,=l"}
"""Registers of results in constraints of PTX, by LLVM type."""


def _asm(builder: Any, result: Any, text: str, values: Sequence[Any] = (), *, memory: bool = True) -> Any:
    """Emit one statement; convergent, so that the optimizer does not move it into or out of a branch."""
    signature = ir.FunctionType(result, [value.type for value in values])
    registers = [_LETTERS[str(result)], *(_LETTERS[str(value.type)][1:] for value in values)]
    constraints = ",".join(filter(None, [*registers, "~{memory}" * memory]))
    builder.function.attributes.add("convergent")  # otherwise the optimizer could move calls of the function
    return builder.call(ir.InlineAsm(signature, text, constraints, side_effect=True), values, attrs=("convergent",))


def _define(stub: Any, text: str) -> None:
    """Define a stub as one PTX statement over 64-bit integers; ``{s}`` stands for the scope."""
    result = VOID if text.startswith(("st.", "fence.", "bar.")) else I64

    def lower(builder: Any, values: Any, scope: int = 0) -> Any:
        return _asm(builder, result, text.replace("{s}", SCOPES[scope]), values)

    intrinsics.define(stub, lower)


_define(a.load_relaxed, "ld.relaxed.{s}.global.u64 $0, [$1];")
_define(a.load_acquire, "ld.acquire.{s}.global.u64 $0, [$1];")
_define(a.store_relaxed, "st.relaxed.{s}.global.u64 [$0], $1;")
_define(a.store_release, "st.release.{s}.global.u64 [$0], $1;")
_define(a.exchange, "atom.acq_rel.{s}.global.exch.b64 $0, [$1], $2;")
_define(a.fetch_add, "atom.acq_rel.{s}.global.add.u64 $0, [$1], $2;")
_define(a.fetch_or, "atom.acq_rel.{s}.global.or.b64 $0, [$1], $2;")
_define(a.fetch_and, "atom.acq_rel.{s}.global.and.b64 $0, [$1], $2;")
_define(a.compare_exchange, "atom.acq_rel.{s}.global.cas.b64 $0, [$1], $2, $3;")
_define(a.compare_exchange_acquire, "atom.acquire.{s}.global.cas.b64 $0, [$1], $2, $3;")
_define(a.fence, "fence.acq_rel.{s};")
_define(a.store_pair, "st.relaxed.gpu.global.v2.u64 [$0], {$1, $2};")
_define(a.clock_ns, "mov.u64 $0, %globaltimer;")
_define(a.barrier, "bar.sync 0;")


# -- items --------------------------------------------------------------------------------------------------


_FIRST_OUT = "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
"""The policy of lines that are evicted from L2 first; a constant of the instruction in machine code."""


def _register(scalar: Any) -> Any:
    """Return the type of the register for an item: PTX has no 8-bit register, so a byte has one of 16 bits."""
    return ir.IntType(max(16, item_bits(scalar)))


def _define_load(stub: Any, instruction: str, *, passing: bool = False) -> None:
    def lower(builder: Any, values: Any, scalar: Any) -> Any:
        bits = item_bits(scalar)
        text = f"{instruction}.u{bits} $0, [$1];"
        if passing:
            text = f"{{ .reg .b64 policy; {_FIRST_OUT} {instruction}.L2::cache_hint.u{bits} $0, [$1], policy; }}"
        return resize(builder, _asm(builder, _register(scalar), text, values), bits)

    intrinsics.define(stub, lower)


def _define_store(stub: Any, instruction: str) -> None:
    def lower(builder: Any, values: Any, scalar: Any) -> None:
        stored = resize(builder, values[1], _register(scalar).width)
        _asm(builder, VOID, f"{instruction}.u{item_bits(scalar)} [$0], $1;", [values[0], stored])

    intrinsics.define(stub, lower)


def _update(builder: Any, operation: str, values: Any) -> Any:
    return _asm(builder, values[1].type, f"atom.relaxed.gpu.global.{operation} $0, [$1], $2;", values)


def _add_item(builder: Any, values: Any, scalar: Any) -> Any:
    bits = item_bits(scalar)
    if isinstance(scalar, types.Integer):
        return _update(builder, f"add.u{bits}", values)
    number = builder.bitcast(values[1], ir.FloatType() if bits == 32 else ir.DoubleType())
    return builder.bitcast(_update(builder, f"add.f{bits}", [values[0], number]), values[1].type)


def _min_item(builder: Any, values: Any, scalar: Any) -> Any:
    # floats that are not negative are in the order of their bits
    kind = "s" if isinstance(scalar, types.Float) or scalar.signed else "u"
    return _update(builder, f"min.{kind}{item_bits(scalar)}", values)


_define_load(a.load_relaxed_as, "ld.relaxed.gpu.global")
_define_load(a.load_acquire_as, "ld.acquire.gpu.global")
_define_load(a.load_passing_as, "ld.acquire.gpu.global", passing=True)
_define_load(a.load_weak_as, "ld.global")
_define_store(a.store_relaxed_as, "st.relaxed.gpu.global")
_define_store(a.store_weak_as, "st.global")
intrinsics.define(a.fetch_add_as, _add_item, is_wide)
intrinsics.define(a.fetch_min_as, _min_item, is_wide)
intrinsics.define(a.fetch_or_as, lambda b, v, scalar: _update(b, f"or.b{item_bits(scalar)}", v), is_wide_integer)


def _copy_wide(builder: Any, values: Any) -> None:
    """Emit up to four 16-byte loads in flight, then the stores."""
    dst, src, stride, count = values

    def copy(offsets: list[Any]) -> None:
        load, store = "ld.relaxed.sys.global.v2.u64 {$0, $1}, [$2];", "st.relaxed.sys.global.v2.u64 [$0], {$1, $2};"
        loaded = [_asm(builder, PAIR, load, [builder.add(src, offset)]) for offset in offsets]
        for value, offset in zip(loaded, offsets, strict=True):
            halves = [builder.extract_value(value, k) for k in (0, 1)]
            _asm(builder, VOID, store, [builder.add(dst, offset), *halves])

    with builder.if_else(builder.icmp_signed("==", count, I64(4))) as (four, fewer):
        with four:
            copy([builder.mul(stride, I64(k)) for k in range(4)])
        with fewer, cgutils.for_range(builder, count) as loop:
            copy([builder.mul(loop.index, stride)])


def _copy_foreign(builder: Any, values: Any) -> None:
    """Copy words one by one: a thread of a GPU copies no more than a few."""
    dst, src, nbytes = values
    with cgutils.for_range(builder, builder.lshr(nbytes, I64(3))) as loop:
        offset = builder.shl(loop.index, I64(3))
        word = _asm(builder, I64, "ld.relaxed.gpu.global.u64 $0, [$1];", [builder.add(src, offset)])
        _asm(builder, VOID, "st.relaxed.gpu.global.u64 [$0], $1;", [builder.add(dst, offset), word])


def _load_pair(builder: Any, values: Any) -> Any:
    both = _asm(builder, PAIR, "ld.relaxed.gpu.global.v2.u64 {$0, $1}, [$2];", values)
    return cgutils.pack_array(builder, [builder.extract_value(both, k) for k in (0, 1)])


intrinsics.define(a.copy_wide, _copy_wide)
intrinsics.define(a.copy_foreign, _copy_foreign)
intrinsics.define(a.load_pair, _load_pair)


# -- warps --------------------------------------------------------------------------------------------------


def _widen(builder: Any, value: Any) -> Any:
    return builder.zext(value, I64)


def _narrow(builder: Any, value: Any) -> Any:
    return builder.trunc(value, I32)


# ptxas assumes that the result of activemask is the same in all lanes that reconverge. So it lets two groups that
# reconverge in a called function vote and shuffle as one (seen with release 13.0 on an H200). Adding laneid / 32, which
# is zero, hides the origin of the mask; then ptxas keeps the groups apart.
_ACTIVEMASK = "{ .reg .b32 m, z; activemask.b32 m; mov.u32 z, %laneid; shr.u32 z, z, 5; add.u32 $0, m, z; }"


def _match_any(builder: Any, values: Any) -> Any:
    mask = _narrow(builder, values[0])
    found = _asm(builder, I32, "match.any.sync.b64 $0, $1, $2;", [values[1], mask])
    return _widen(builder, builder.and_(found, mask))


def _shfl(builder: Any, values: Any, scalar: Any = types.int64) -> Any:
    mask, value, lane = _narrow(builder, values[0]), resize(builder, values[1], 64), _narrow(builder, values[2])
    halves = []
    for half in (builder.trunc(value, I32), builder.trunc(builder.lshr(value, I64(32)), I32)):
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, $3;"
        halves.append(_widen(builder, _asm(builder, I32, text, [half, lane, mask])))
    return resize(builder, builder.or_(halves[0], builder.shl(halves[1], I64(32))), item_bits(scalar))


def _vote(builder: Any, values: Any) -> Any:
    """Vote among the lanes of a mask.

    Two groups of a warp that happen to be converged vote in one instruction, and each gets the bits of
    both (seen on an H200): a vote counts only within the mask.
    """
    text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; vote.sync.ballot.b32 $0, p, $1; }"
    wide, narrow = builder.zext(values[1], I32), _narrow(builder, values[0])
    return _widen(builder, builder.and_(_asm(builder, I32, text, [narrow, wide]), narrow))


intrinsics.define(a.lane_id, lambda b, _: _widen(b, _asm(b, I32, "mov.u32 $0, %laneid;", memory=False)))
intrinsics.define(a.warp_size, lambda b, _: I64(32))
intrinsics.define(a.activemask, lambda b, _: _widen(b, _asm(b, I32, _ACTIVEMASK)))
intrinsics.define(a.syncwarp, lambda b, v: _asm(b, VOID, "bar.warp.sync $0;", [_narrow(b, v[0])]))
intrinsics.define(a.match_any, _match_any)
intrinsics.define(a.shfl, _shfl)
intrinsics.define(a.shfl_as, _shfl)
intrinsics.define(a.ballot, _vote)
intrinsics.define(a.any_sync, lambda b, v: b.icmp_unsigned("!=", _vote(b, v), I64(0)))


# -- where and when -----------------------------------------------------------------------------------------


def _special(builder: Any, name: str) -> Any:
    """Read a register that never changes: an intrinsic, so that loops around it read it once."""
    kind = ir.FunctionType(I32, [])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.nvvm.read.ptx.sreg.{name}")
    return _widen(builder, builder.call(function, []))


NO_WRAP = ("nuw", "nsw")


def _define_grid(stub: Any, block_index: Callable[..., Any]) -> None:
    def axis(builder: Any, name: str) -> Any:
        # flagged as unable to wrap: then the compiler knows that an index is not negative, and omits the check
        start = builder.mul(block_index(builder, name), _special(builder, f"ntid.{name}"), flags=NO_WRAP)
        return builder.add(start, _special(builder, f"tid.{name}"), flags=NO_WRAP)

    # the last axis of the shape is CUDA's x, so that neighbors in memory are neighbors in a warp
    intrinsics.define_grid(stub, lambda builder, dims: [axis(builder, name) for name in "zyx"[3 - dims :]])


def _backoff(builder: Any, values: Any) -> Any:
    doubled = builder.mul(values[0], I64(64))
    capped = builder.select(builder.icmp_signed(">", doubled, I64(2000)), I64(2000), doubled)
    return _asm(builder, VOID, "nanosleep.u32 $0;", [_narrow(builder, capped)])


_define_grid(a.grid, lambda builder, axis: _special(builder, f"ctaid.{axis}"))
intrinsics.define(a.interrupted, lambda b, _: I64(0))
intrinsics.define(a.launch_flag, lambda b, _: I64(FAULT_PAGE))
intrinsics.define(a.backoff, _backoff)


# -- blocks -------------------------------------------------------------------------------------------------


WARPS = 32
"""Maximum number of warps of a block."""


def _shared(builder: Any, name: str, kind: Any) -> Any:
    """Return a variable of the block, which is the same for all modules of a linked kernel."""
    module = builder.module
    found = module.globals.get(name)
    if found is None:
        found = ir.GlobalVariable(module, kind, name, addrspace=3)
        found.linkage = "linkonce_odr"
        found.initializer = ir.Constant(kind, ir.Undefined)
        found.align = 16
    return found


def _coordinate_pointer(builder: Any, k: int) -> Any:
    """Return the address of a coordinate of the calling warp's virtual block."""
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
        return _special(builder, f"{prefix}.{axis}")

    rows = builder.add(name("tid", "y"), builder.mul(name("ntid", "y"), name("tid", "z")))
    return builder.add(name("tid", "x"), builder.mul(name("ntid", "x"), rows))


def _threads(builder: Any) -> Any:
    product = builder.mul(_special(builder, "ntid.x"), _special(builder, "ntid.y"))
    return builder.mul(product, _special(builder, "ntid.z"))


def _set_virtual(builder: Any, values: Any) -> None:
    for k in range(3):
        builder.store(_narrow(builder, values[k]), _coordinate_pointer(builder, k))


_define_grid(a.virtual_grid, lambda builder, axis: _coordinate(builder, "xyz".index(axis)))
intrinsics.define(a.thread_index, lambda b, _: _tid(b))
intrinsics.define(a.block_threads, lambda b, _: _threads(b))
intrinsics.define(a.block_index, lambda b, _: _special(b, "ctaid.x"))
intrinsics.define(a.virtual_block_index, lambda b, _: _coordinate(b, 0))
intrinsics.define(a.set_virtual, _set_virtual)
intrinsics.define(a.div_short, lambda b, v: _widen(b, b.udiv(_narrow(b, v[0]), _narrow(b, v[1]))))
intrinsics.define(a.get_claim, lambda b, _: b.load(_claimed(b)))
intrinsics.define(a.put_claim, lambda b, v: b.store(v[0], _claimed(b)))
intrinsics.define(a.own_flag, lambda b, _: b.load(_flag(b)))
# every thread stores the same value, so that no thread waits for the store of another thread
intrinsics.define(a.set_flag, lambda b, v: b.store(v[0], _flag(b)))


_LONGEST = 1 << 47
"""Upper bound of the items of an array: the address space has 47 bits, unless the array repeats items."""


@intrinsics.primitive(a.has_sizes)
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


@intrinsics.primitive(a.opaque)
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


def _shared_array(shape: Any, dtype: Any) -> Callable[..., Any] | None:
    parts = shape.types if isinstance(shape, types.BaseTuple) else (shape,)
    extents = tuple(literal(part) for part in parts)
    if None in extents:
        return None
    constant: Any = extents if isinstance(shape, types.BaseTuple) else extents[0]

    def implementation(shape: Any, dtype: Any) -> Any:
        return cuda.shared.array(constant, dtype)

    return implementation


# inlined, because numba-cuda does not let a function return an array that it has created
intrinsics.overload(a.shared_array, inline="always")(_shared_array)

subscribe(intrinsics)
