"""Compiled bodies of the primitives for the `cpu` target (Numba, native atomics)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.core.typing import templates
from numba.np import arrayobj

from .. import primitives as a
from ..device import subscribe
from ..fault import FLAG
from .checksum import define_checksum
from .compiled import compile_native
from .intrinsics import I8, I32, I64, Intrinsics, StructType, is_wide, is_wide_integer, item_bits, literal
from .machine_code import load_symbol
from .numba_patches import CalleeCompiler
from .symbols import CLOCK_OFFSET, COPY, GUARDED_RANGES, SEAT_KEY, TLS_KEY


class CpuIntrinsics(Intrinsics):
    """The hooks of the `cpu` target."""

    target = "cpu"
    options: ClassVar[dict[str, Any]] = {"no_cfunc_wrapper": True, "pipeline_class": CalleeCompiler}

    def link(self, context: Any, function: Callable[..., int]) -> str:
        """Compile or load `function`; return its symbol."""
        return load_symbol(function, compile_native)


intrinsics = CpuIntrinsics(
    extending=extending,
    templates=templates,
    register_model=extending.register_model,
    typeof_impl=extending.typeof_impl,
    arrays=arrayobj,
)
PTR, VOID = I8.as_pointer(), ir.VoidType()


def _pointer(builder: Any, address: Any, bits: int = 64) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _load(order: str) -> Any:
    return lambda builder, v, scope: builder.load_atomic(_pointer(builder, v[0]), order, 8)


def _store(order: str) -> Any:
    return lambda builder, v, scope: builder.store_atomic(v[1], _pointer(builder, v[0]), order, 8)


def _rmw(operation: str) -> Any:
    return lambda builder, v, scope: builder.atomic_rmw(operation, _pointer(builder, v[0]), v[1], "acq_rel")


def _compare_exchange(order: str) -> Any:
    def exchange(builder: Any, values: Any, scope: int) -> Any:
        pair = builder.cmpxchg(_pointer(builder, values[0]), values[1], values[2], order, "acquire")
        return builder.extract_value(pair, 0)

    return exchange


intrinsics.define(a.load_relaxed, _load("monotonic"))
intrinsics.define(a.load_acquire, _load("acquire"))
intrinsics.define(a.store_relaxed, _store("monotonic"))
intrinsics.define(a.store_release, _store("release"))
intrinsics.define(a.exchange, _rmw("xchg"))
intrinsics.define(a.fetch_add, _rmw("add"))
intrinsics.define(a.fetch_or, _rmw("or"))
intrinsics.define(a.fetch_and, _rmw("and"))
intrinsics.define(a.compare_exchange, _compare_exchange("acq_rel"))
intrinsics.define(a.compare_exchange_acquire, _compare_exchange("acquire"))
intrinsics.define(a.fence, lambda builder, v, scope: builder.fence("acq_rel"))
intrinsics.device(a.load_pair)
intrinsics.device(a.store_pair)


# -- items --------------------------------------------------------------------------------------------------


def _item(builder: Any, address: Any, scalar: Any) -> Any:
    return _pointer(builder, address, item_bits(scalar))


def _load_item(order: str) -> Any:
    return lambda b, v, scalar: b.load_atomic(_item(b, v[0], scalar), order, item_bits(scalar) // 8)


def _store_item(builder: Any, values: Any, scalar: Any) -> Any:
    builder.store_atomic(values[1], _item(builder, values[0], scalar), "monotonic", item_bits(scalar) // 8)


def _rmw_item(builder: Any, operation: str, values: Any, scalar: Any) -> Any:
    return builder.atomic_rmw(operation, _item(builder, values[0], scalar), values[1], "monotonic")


def _add_item(builder: Any, values: Any, scalar: Any) -> Any:
    if isinstance(scalar, types.Integer):
        return _rmw_item(builder, "add", values, scalar)
    # x86 has no atomic float add: retry a compare-and-swap until no other thread interferes.
    bits = item_bits(scalar)
    pointer, number = _item(builder, values[0], scalar), ir.FloatType() if bits == 32 else ir.DoubleType()
    old = cgutils.alloca_once_value(builder, builder.load_atomic(pointer, "monotonic", bits // 8))
    loop = builder.append_basic_block("add")
    done = builder.append_basic_block("added")
    builder.branch(loop)
    builder.position_at_end(loop)
    before = builder.load(old)
    total = builder.fadd(builder.bitcast(before, number), builder.bitcast(values[1], number))
    pair = builder.cmpxchg(pointer, before, builder.bitcast(total, before.type), "monotonic", "monotonic")
    builder.store(builder.extract_value(pair, 0), old)
    builder.cbranch(builder.extract_value(pair, 1), done, loop)
    builder.position_at_end(done)
    return builder.load(old)


def _min_item(builder: Any, values: Any, scalar: Any) -> Any:
    # floats that are not negative are in the order of their bits
    signed = isinstance(scalar, types.Float) or scalar.signed
    return _rmw_item(builder, "min" if signed else "umin", values, scalar)


intrinsics.define(a.load_relaxed_as, _load_item("monotonic"))
intrinsics.define(a.load_acquire_as, _load_item("acquire"))
intrinsics.define(a.load_passing_as, _load_item("acquire"))
intrinsics.define(a.load_weak_as, lambda b, v, scalar: b.load(_item(b, v[0], scalar), align=1))
intrinsics.define(a.store_relaxed_as, _store_item)
intrinsics.define(a.store_weak_as, lambda b, v, scalar: b.store(v[1], _item(b, v[0], scalar), align=1))
intrinsics.define(a.fetch_add_as, _add_item, is_wide)
intrinsics.define(a.fetch_min_as, _min_item, is_wide)
intrinsics.define(a.fetch_or_as, lambda b, v, scalar: _rmw_item(b, "or", v, scalar), is_wide_integer)
define_checksum(intrinsics)


# -- warps and blocks, which have one thread ----------------------------------------------------------------


for _stub, _number in (
    (a.lane_id, 0),
    (a.warp_size, 1),
    (a.activemask, 1),
    (a.match_any, 1),
    (a.thread_index, 0),
    (a.block_threads, 1),
):
    intrinsics.define(_stub, lambda builder, v, number=_number: I64(number))
intrinsics.define(a.syncwarp, lambda builder, v: None)
intrinsics.define(a.barrier, lambda builder, v: None)
intrinsics.define(a.shfl, lambda builder, v: v[1])
intrinsics.define(a.shfl_as, lambda builder, v, scalar: v[1])
intrinsics.define(a.ballot, lambda builder, v: builder.zext(v[1], I64))
intrinsics.define(a.any_sync, lambda builder, v: v[1])
intrinsics.define(a.block_index, lambda builder, v: builder.load(_thread_context(builder)))


def _shared_array(shape: Any, dtype: Any) -> Callable[..., Any]:
    def implementation(shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype)

    return implementation


# only for this target: numba-cuda adopts overloads that have no target
intrinsics.overload(a.shared_array, target="cpu")(_shared_array)


# -- where and when -----------------------------------------------------------------------------------------


def _variable(builder: Any, kind: Any, name: str) -> Any:
    """Return a variable that compiled code finds by its name (see `symbols`)."""
    found = builder.module.globals.get(name) or cgutils.add_global_variable(builder.module, kind, name)
    found.linkage = "external"
    return found


def _call(builder: Any, name: str, result: Any, kinds: tuple[Any, ...], values: Any) -> Any:
    """Call a C function, with each value converted to its type."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    arguments = []
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, ir.PointerType) and isinstance(value.type, ir.IntType):
            value = builder.inttoptr(value, kind)
        arguments.append(value if value.type == kind else builder.trunc(value, kind))
    return builder.call(function, arguments)


def _own(builder: Any, name: str) -> Any:
    """Return the pointer that the calling thread keeps under a key, initially null."""
    return _call(builder, "pthread_getspecific", PTR, (I32,), [builder.load(_variable(builder, I32, name))])


def _keep_own(builder: Any, name: str, value: Any) -> None:
    _call(builder, "pthread_setspecific", I32, (I32, PTR), [builder.load(_variable(builder, I32, name)), value])


def _thread_context(builder: Any) -> Any:
    return builder.bitcast(_own(builder, TLS_KEY), I64.as_pointer())


def _grid(builder: Any, dims: int) -> list[Any]:
    base = _thread_context(builder)

    def word(k: int) -> Any:
        return builder.load(cgutils.gep_inbounds(builder, base, k))

    index, parts = word(0), []
    for k in range(dims, 1, -1):  # word k is extent k - 1 of the launch
        extent = word(k)
        parts.append(builder.urem(index, extent))
        index = builder.udiv(index, extent)
    return [index, *reversed(parts)]


intrinsics.define_grid(a.grid, _grid)


def _launch_flag(builder: Any, values: Any) -> Any:
    return builder.load(cgutils.gep_inbounds(builder, _thread_context(builder), FLAG))


def _interrupted(builder: Any, values: Any) -> Any:
    # atomic: the host stores to it concurrently, and the compiler must not treat it as a constant in loops
    address = builder.add(_launch_flag(builder, values), I64(8))
    return builder.load_atomic(_pointer(builder, address), "monotonic", 8)


def _own_launch_flag(builder: Any, values: Any) -> Any:
    base = _thread_context(builder)
    found = cgutils.alloca_once_value(builder, I64(0))
    with builder.if_then(cgutils.is_not_null(builder, base)):
        builder.store(builder.load(cgutils.gep_inbounds(builder, base, FLAG)), found)
    return builder.load(found)


def set_context(address: int) -> None:
    """Make `address` the calling thread's context, and 0 none (stub; native launch code only).

    A thread must not have a freed context: if a file is truncated later, while this thread reads it, the handler would
    set the flag of a past launch, in memory that other code uses.
    """
    raise RuntimeError("set_context is compiled launch code")


def _clock_ns(builder: Any, values: Any) -> Any:
    pair = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    first = builder.bitcast(pair, I64.as_pointer())
    _call(builder, "clock_gettime", I32, (I32, I64.as_pointer()), [I32(1), first])  # CLOCK_MONOTONIC
    seconds = builder.load(first)
    time = builder.add(builder.mul(seconds, I64(10**9)), builder.load(cgutils.gep_inbounds(builder, first, 1)))
    return builder.add(time, builder.load_atomic(_variable(builder, I64, CLOCK_OFFSET), "monotonic", 8))


def _backoff(builder: Any, values: Any) -> None:
    attempt = values[0]
    with builder.if_else(builder.icmp_signed("<", attempt, I64(24))) as (short, long):
        with short:
            _call(builder, "sched_yield", I32, (), [])
        with long:
            grown = builder.mul(builder.sub(attempt, I64(20)), I64(10))
            capped = builder.select(builder.icmp_signed(">", grown, I64(1000)), I64(1000), grown)
            _call(builder, "usleep", I32, (I32,), [capped])


intrinsics.define(a.launch_flag, _launch_flag)
intrinsics.define(a.interrupted, _interrupted)
intrinsics.define(a.own_launch_flag, _own_launch_flag)
intrinsics.define(set_context, lambda b, v: _keep_own(b, TLS_KEY, v[0]))
intrinsics.define(a.take_seat, lambda b, v: _keep_own(b, SEAT_KEY, v[0]))
intrinsics.define(a.seat, lambda b, _: b.ptrtoint(_own(b, SEAT_KEY), I64))
intrinsics.define(a.clock_ns, _clock_ns)
intrinsics.define(a.backoff, _backoff)
intrinsics.define(a.guarded_ranges, lambda b, _: b.ptrtoint(_variable(b, I64, GUARDED_RANGES), I64))


# -- bulk copies and host services --------------------------------------------------------------------------


def _copy_wide(builder: Any, values: Any) -> None:
    dst, src, stride, count = values
    with cgutils.for_range(builder, count) as loop:
        offset = builder.mul(loop.index, stride)
        for half in (0, 8):
            at = builder.add(offset, I64(half))
            word = builder.load_atomic(_pointer(builder, builder.add(src, at)), "monotonic", 8)
            builder.store_atomic(word, _pointer(builder, builder.add(dst, at)), "monotonic", 8)


def _transfer(name: str) -> Any:
    def lower(builder: Any, values: Any) -> Any:
        done = _call(builder, name, I64, (I32, PTR, I64, I64), values)
        errno = builder.load(_call(builder, "__errno_location", I32.as_pointer(), (), []))
        failed = builder.icmp_signed("<", done, I64(0))
        return builder.select(failed, builder.neg(builder.sext(errno, I64)), done)

    return lower


def _call_address(builder: Any, values: Any) -> Any:
    function = ir.FunctionType(I64, [I64] * (len(values) - 1))
    return builder.call(builder.inttoptr(values[0], function.as_pointer()), values[1:])


_PREFETCH = PTR, I32, I32, I32
intrinsics.define(a.copy_wide, _copy_wide)
intrinsics.define(a.copy_bytes, lambda b, v: _call(b, "memcpy", PTR, (PTR, PTR, I64), v))
intrinsics.define(a.copy_foreign, lambda b, v: _call(b, COPY, VOID, (I64, I64, I64), v))
intrinsics.define(
    a.prefetch, lambda b, v: _call(b, "llvm.prefetch.p0", VOID, _PREFETCH, [v[0], I32(0), I32(3), I32(1)])
)
intrinsics.define(a.pread, _transfer("pread"))
intrinsics.define(a.pwrite, _transfer("pwrite"))
intrinsics.define(a.call_native, _call_address)
intrinsics.define(a.call_foreign, _call_address)


@intrinsics.primitive(a.scratch)
def _scratch(typingctx: Any, nbytes: Any) -> Any:
    size = literal(nbytes)
    if size is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        with builder.goto_entry_block():  # not by alloca_once, which clears it: thousands of stores to optimize
            memory = builder.alloca(ir.ArrayType(I8, size))
        memory.align = 16
        return builder.ptrtoint(memory, I64)

    return types.int64(nbytes), codegen


# -- arguments ----------------------------------------------------------------------------------------------


@extending.unbox(StructType)
def _unbox_struct(typ: StructType, obj: Any, c: Any) -> Any:
    """Read the struct from the flat words that the host object keeps at `address`, unless the attribute raises."""
    nothing = cgutils.global_constant(c.builder, "warpwell_nothing", ir.Constant(ir.ArrayType(I64, 256), None))
    address = cgutils.alloca_once_value(c.builder, c.builder.ptrtoint(nothing, I64))
    boxed = c.pyapi.object_getattr_string(obj, "address")
    with c.builder.if_then(cgutils.is_not_null(c.builder, boxed)):
        c.builder.store(c.pyapi.long_as_longlong(boxed), address)
        c.pyapi.decref(boxed)
    model = c.context.data_model_manager[typ]
    base = c.builder.inttoptr(c.builder.load(address), model.get_data_type().as_pointer())
    value = model.load_from_data_pointer(c.builder, base, 8)
    return extending.NativeValue(value, is_error=cgutils.is_null(c.builder, boxed))


subscribe(intrinsics)
