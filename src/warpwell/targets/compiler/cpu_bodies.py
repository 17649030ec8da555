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

from .. import atomics as a
from .. import block
from ..device import subscribe
from ..fault import FLAG
from .checked_arrays import install
from .checksum import define_checksum
from .compiled import compile_native
from .machine_code import load_symbol
from .numba_patches import CalleeCompiler
from .seam import I8, I32, I64, Seam, StructType, from_bits, item_bits, literal, to_bits
from .symbols import CLOCK_OFFSET, COPY, GUARDED_RANGES, SEAT_KEY, TLS_KEY


class CpuSeam(Seam):
    """The hooks of the `cpu` target."""

    target = "cpu"
    options: ClassVar[dict[str, Any]] = {"no_cfunc_wrapper": True, "pipeline_class": CalleeCompiler}

    def link(self, context: Any, function: Callable[..., int]) -> str:
        """Compile or load `function`; return its symbol."""
        return load_symbol(function, compile_native)


seam = CpuSeam(
    extending=extending,
    templates=templates,
    register_model=extending.register_model,
    typeof_impl=extending.typeof_impl,
)


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


seam.word(a.load_relaxed, 1, _load("monotonic"), scope=True)
seam.word(a.load_acquire, 1, _load("acquire"), scope=True)
seam.word(a.store_relaxed, 2, _store("monotonic"), result=types.void, scope=True)
seam.word(a.store_release, 2, _store("release"), result=types.void, scope=True)
seam.word(a.exchange, 2, _rmw("xchg"), scope=True)
seam.word(a.fetch_add, 2, _rmw("add"), scope=True)
seam.word(a.fetch_or, 2, _rmw("or"), scope=True)
seam.word(a.fetch_and, 2, _rmw("and"), scope=True)
seam.word(a.compare_exchange, 3, _compare_exchange("acq_rel"), scope=True)
seam.word(a.compare_exchange_acquire, 3, _compare_exchange("acquire"), scope=True)
seam.word(a.fence, 0, lambda builder, v, scope: builder.fence("acq_rel"), result=types.void, scope=True)


# -- items --------------------------------------------------------------------------------------------------


def _load_item(order: str | None) -> Any:
    def load(builder: Any, address: Any, bits: int) -> Any:
        pointer = _pointer(builder, address, bits)
        return builder.load(pointer, align=1) if order is None else builder.load_atomic(pointer, order, bits // 8)

    return load


def _store_item(order: str | None) -> Any:
    def store(builder: Any, address: Any, value: Any) -> None:
        pointer = _pointer(builder, address, value.type.width)
        if order is None:
            builder.store(value, pointer, align=1)
        else:
            builder.store_atomic(value, pointer, order, value.type.width // 8)

    return store


def _add_item(context: Any, builder: Any, scalar: Any, address: Any, value: Any) -> Any:
    bits = item_bits(scalar)
    pointer = _pointer(builder, address, bits)
    if isinstance(scalar, types.Integer):
        return builder.atomic_rmw("add", pointer, value, "monotonic")
    # x86 has no atomic float add: retry a compare-and-swap until no other thread interferes.
    old = cgutils.alloca_once_value(builder, builder.load_atomic(pointer, "monotonic", bits // 8))
    loop = builder.append_basic_block("add")
    done = builder.append_basic_block("added")
    builder.branch(loop)
    builder.position_at_end(loop)
    before = builder.load(old)
    total = to_bits(context, builder, scalar, builder.fadd(from_bits(context, builder, scalar, before), value))
    pair = builder.cmpxchg(pointer, before, total, "monotonic", "monotonic")
    builder.store(builder.extract_value(pair, 0), old)
    builder.cbranch(builder.extract_value(pair, 1), done, loop)
    builder.position_at_end(done)
    return from_bits(context, builder, scalar, builder.load(old))


def _min_item(context: Any, builder: Any, scalar: Any, address: Any, value: Any) -> Any:
    # floats that are not negative are in the order of their bits
    signed = isinstance(scalar, types.Float) or scalar.signed
    bits = to_bits(context, builder, scalar, value)
    pointer = _pointer(builder, address, item_bits(scalar))
    old = builder.atomic_rmw("min" if signed else "umin", pointer, bits, "monotonic")
    return from_bits(context, builder, scalar, old)


def _or_item(context: Any, builder: Any, scalar: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("or", _pointer(builder, address, item_bits(scalar)), value, "monotonic")


seam.item_load(a.load_relaxed_as, _load_item("monotonic"))
seam.item_load(a.load_acquire_as, _load_item("acquire"))
seam.item_load(a.load_passing_as, _load_item("acquire"))
seam.item_load(a.load_weak_as, _load_item(None))
seam.item_store(a.store_relaxed_as, _store_item("monotonic"))
seam.item_store(a.store_weak_as, _store_item(None))
seam.item_update(a.fetch_add_as, _add_item)
seam.item_update(a.fetch_min_as, _min_item)
seam.item_update(a.fetch_or_as, _or_item, floats=False)
define_checksum(seam)


# -- bulk copies and host services --------------------------------------------------------------------------


def _external(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _copy_wide(builder: Any, args: Any) -> None:
    dst, src, stride, count = args
    with cgutils.for_range(builder, count) as loop:
        offset = builder.mul(loop.index, stride)
        for half in (0, 8):
            at = builder.add(offset, I64(half))
            word = builder.load_atomic(_pointer(builder, builder.add(src, at)), "monotonic", 8)
            builder.store_atomic(word, _pointer(builder, builder.add(dst, at)), "monotonic", 8)


seam.word(a.copy_wide, 4, _copy_wide, result=types.void)


_PREDICATE = types.int64, types.boolean
seam.word(a.lane_id, 0, lambda builder, v: I64(0))
seam.word(a.warp_size, 0, lambda builder, v: I64(1))
seam.word(a.activemask, 0, lambda builder, v: I64(1))
seam.word(a.shfl, 3, lambda builder, v: v[1])
seam.item_shuffle(a.shfl_as, lambda builder, v: v[1])
seam.word(a.match_any, 2, lambda builder, v: I64(1))
seam.word(a.syncwarp, 1, lambda builder, v: None, result=types.void)
seam.word(a.ballot, _PREDICATE, lambda builder, v: builder.zext(v[1], I64))
seam.word(a.any_sync, _PREDICATE, lambda builder, v: v[1], result=types.boolean)


def _key(builder: Any, name: str) -> Any:
    key = builder.module.globals.get(name) or cgutils.add_global_variable(builder.module, I32, name)
    key.linkage = "external"
    return builder.load(key)


def _own(builder: Any, name: str) -> Any:
    """Return the pointer that the calling thread keeps under a key, initially null."""
    get = _external(builder, "pthread_getspecific", I8.as_pointer(), I32)
    return builder.call(get, [_key(builder, name)])


def _keep_own(builder: Any, name: str, value: Any) -> None:
    put = _external(builder, "pthread_setspecific", I32, I32, I8.as_pointer())
    builder.call(put, [_key(builder, name), builder.inttoptr(value, I8.as_pointer())])


def _thread_context(builder: Any) -> Any:
    return builder.bitcast(_own(builder, TLS_KEY), I64.as_pointer())


@seam.primitive(a.grid)
def _grid(typingctx: Any, ndim: Any) -> Any:
    dims = literal(ndim)
    if dims not in (1, 2, 3):
        return None
    result = types.int64 if dims == 1 else types.UniTuple(types.int64, dims)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base = _thread_context(builder)

        def word(k: int) -> Any:
            return builder.load(cgutils.gep_inbounds(builder, base, k))

        index = word(0)
        if dims == 1:
            return index
        parts = []
        for k in range(dims - 1, 0, -1):
            extent = word(1 + k)
            parts.append(builder.urem(index, extent))
            index = builder.udiv(index, extent)
        return cgutils.pack_array(builder, [index, *reversed(parts)])

    return result(ndim), codegen


def _launch_flag(builder: Any, args: Any) -> Any:
    return builder.load(cgutils.gep_inbounds(builder, _thread_context(builder), FLAG))


def _interrupted(builder: Any, args: Any) -> Any:
    # atomic: the host stores to it meanwhile, and loops that ask must not take it for a constant
    address = builder.add(_launch_flag(builder, args), I64(8))
    return builder.load_atomic(_pointer(builder, address), "monotonic", 8)


seam.word(a.launch_flag, 0, _launch_flag)
seam.word(a.interrupted, 0, _interrupted)


def _own_launch_flag(builder: Any, args: Any) -> Any:
    base = _thread_context(builder)
    found = cgutils.alloca_once_value(builder, I64(0))
    with builder.if_then(cgutils.is_not_null(builder, base)):
        builder.store(builder.load(cgutils.gep_inbounds(builder, base, FLAG)), found)
    return builder.load(found)


seam.word(a.own_launch_flag, 0, _own_launch_flag)


def set_context(address: int) -> None:
    """Make `address` the calling thread's context, and 0 none (stub; native launch code only).

    A thread must not have a context that is freed: a file that is cut later, while this thread reads it, would flag
    a launch that is over, in memory of others.
    """
    raise RuntimeError("set_context is compiled launch code")


seam.word(set_context, 1, lambda b, v: _keep_own(b, TLS_KEY, v[0]), result=types.void)
seam.word(a.take_seat, 1, lambda b, v: _keep_own(b, SEAT_KEY, v[0]), result=types.void)
seam.word(a.seat, 0, lambda b, _: b.ptrtoint(_own(b, SEAT_KEY), I64))


def _clock_ns(builder: Any, args: Any) -> Any:
    pair = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    first = builder.bitcast(pair, I64.as_pointer())
    now = _external(builder, "clock_gettime", I32, I32, I64.as_pointer())
    builder.call(now, [I32(1), first])  # CLOCK_MONOTONIC
    seconds = builder.load(first)
    time = builder.add(builder.mul(seconds, I64(10**9)), builder.load(cgutils.gep_inbounds(builder, first, 1)))
    offset = builder.module.globals.get(CLOCK_OFFSET)
    if offset is None:
        offset = cgutils.add_global_variable(builder.module, I64, CLOCK_OFFSET)
    offset.linkage = "external"
    return builder.add(time, builder.load_atomic(offset, "monotonic", 8))


seam.word(a.clock_ns, 0, _clock_ns)


def _backoff(builder: Any, args: Any) -> None:
    attempt = args[0]
    with builder.if_else(builder.icmp_signed("<", attempt, I64(24))) as (short, long):
        with short:
            builder.call(_external(builder, "sched_yield", I32), [])
        with long:
            grown = builder.mul(builder.sub(attempt, I64(20)), I64(10))
            capped = builder.select(builder.icmp_signed(">", grown, I64(1000)), I64(1000), grown)
            builder.call(_external(builder, "usleep", I32, I32), [builder.trunc(capped, I32)])


seam.word(a.backoff, 1, _backoff, result=types.void)


def _copy_bytes(builder: Any, args: Any) -> None:
    copy = _external(builder, "memcpy", I8.as_pointer(), I8.as_pointer(), I8.as_pointer(), I64)
    builder.call(
        copy,
        [builder.inttoptr(args[0], I8.as_pointer()), builder.inttoptr(args[1], I8.as_pointer()), args[2]],
    )


seam.word(a.copy_bytes, 3, _copy_bytes, result=types.void)


def _copy_foreign(builder: Any, args: Any) -> None:
    copy = _external(builder, COPY, ir.VoidType(), I64, I64, I64)
    builder.call(copy, args)


def _load_pair(builder: Any, args: Any) -> Any:
    addresses = (args[0], builder.add(args[0], I64(8)))
    return cgutils.pack_array(builder, [builder.load_atomic(_pointer(builder, p), "monotonic", 8) for p in addresses])


def _store_pair(builder: Any, args: Any) -> None:
    for k in (0, 1):
        pointer = _pointer(builder, builder.add(args[0], I64(8 * k)))
        builder.store_atomic(args[1 + k], pointer, "monotonic", 8)


seam.word(a.copy_foreign, 3, _copy_foreign, result=types.void)
seam.word(a.load_pair, 1, _load_pair, result=types.UniTuple(types.int64, 2))
seam.word(a.store_pair, 3, _store_pair, result=types.void)
seam.items(a.items_at, arrayobj)
seam.array_items(a.items_of_array, arrayobj)


@seam.primitive(a.scratch)
def _scratch(typingctx: Any, nbytes: Any) -> Any:
    size = literal(nbytes)
    if size is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        with builder.goto_entry_block():  # not by alloca_once, which clears it: thousands of stores to optimise
            memory = builder.alloca(ir.ArrayType(I8, size))
        memory.align = 16
        return builder.ptrtoint(memory, I64)

    return types.int64(nbytes), codegen


def _transfer(name: str) -> Any:
    def codegen(builder: Any, args: Any) -> Any:
        fd, address, nbytes, offset = args
        call = _external(builder, name, I64, I32, I8.as_pointer(), I64, I64)
        done = builder.call(call, [builder.trunc(fd, I32), builder.inttoptr(address, I8.as_pointer()), nbytes, offset])
        errno = builder.load(builder.call(_external(builder, "__errno_location", I32.as_pointer()), []))
        failed = builder.icmp_signed("<", done, I64(0))
        return builder.select(failed, builder.neg(builder.sext(errno, I64)), done)

    return codegen


seam.word(a.pread, 4, _transfer("pread"))
seam.word(a.pwrite, 4, _transfer("pwrite"))


def _prefetch(builder: Any, args: Any) -> None:
    function = _external(builder, "llvm.prefetch.p0", ir.VoidType(), I8.as_pointer(), I32, I32, I32)
    builder.call(function, [builder.inttoptr(args[0], I8.as_pointer()), I32(0), I32(3), I32(1)])


seam.word(a.prefetch, 1, _prefetch, result=types.void)


def _guarded_ranges(builder: Any, args: Any) -> Any:
    name = GUARDED_RANGES
    table = builder.module.globals.get(name) or cgutils.add_global_variable(builder.module, I64, name)
    table.linkage = "external"
    return builder.ptrtoint(table, I64)


seam.word(a.guarded_ranges, 0, _guarded_ranges)


def _call_native(builder: Any, args: Any) -> Any:
    function = builder.inttoptr(args[0], ir.FunctionType(I64, [I64] * 6).as_pointer())
    return builder.call(function, args[1:])


seam.word(a.call_native, 7, _call_native)


def _call_foreign(builder: Any, args: Any) -> Any:
    function = builder.inttoptr(args[0], ir.FunctionType(I64, [I64] * 7).as_pointer())
    return builder.call(function, args[1:])


seam.word(a.call_foreign, 8, _call_foreign)


# -- arguments ----------------------------------------------------------------------------------------------


@extending.unbox(StructType)
def _unbox_struct(typ: StructType, obj: Any, c: Any) -> Any:
    """Read the struct from the flat words that the host object keeps at `address`, unless asking for it raises."""
    nothing = cgutils.global_constant(c.builder, "warpwell_nothing", ir.Constant(ir.ArrayType(I64, 256), None))
    address = cgutils.alloca_once_value(c.builder, c.builder.ptrtoint(nothing, I64))
    boxed = c.pyapi.object_getattr_string(obj, "address")
    with c.builder.if_then(cgutils.is_not_null(c.builder, boxed)):
        c.builder.store(c.pyapi.long_as_longlong(boxed), address)
        c.pyapi.decref(boxed)
    model = c.context.data_model_manager[typ]
    base = c.builder.inttoptr(c.builder.load(address), I64.as_pointer())
    value, position = ir.Constant(model.get_value_type(), ir.Undefined), 0
    for name, member in typ.members:
        count = 1 if member is types.int64 else len(member)
        items = [c.builder.load(cgutils.gep_inbounds(c.builder, base, position + k)) for k in range(count)]
        packed = items[0] if member is types.int64 else cgutils.pack_array(c.builder, items)
        value = model.set(c.builder, value, packed, name)
        position += count
    return extending.NativeValue(value, is_error=cgutils.is_null(c.builder, boxed))


# -- blocks, which have one thread --------------------------------------------------------------------------


seam.word(block.block_index, 0, lambda builder, v: builder.load(_thread_context(builder)))
seam.word(block.thread_index, 0, lambda builder, v: I64(0))
seam.word(block.block_threads, 0, lambda builder, v: I64(1))
seam.word(block.barrier, 0, lambda builder, v: None, result=types.void)


def _shared_array(shape: Any, dtype: Any) -> Callable[..., Any]:
    def implementation(shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype)

    return implementation


# for this target alone: numba-cuda takes over what has no target
seam.overload(block.shared_array, target="cpu")(_shared_array)

install(seam, extending, extending.register_model, arrayobj)
subscribe(seam)
