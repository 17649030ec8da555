"""Compiled bodies of the primitives for the `cpu` target (Numba, native atomics)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.core.typing import templates
from numba.np import arrayobj

from .. import atomics as a
from .. import block
from ..device import linked_functions, subscribe
from ..fault import FLAG
from .checked_arrays import install
from .checksum import define_checksum
from .compiled import compile_native
from .seam import I8, I32, I64, Seam, StructType, from_bits, item_bits, literal, scalar_of, symbol_of, to_bits


class CpuSeam(Seam):
    """The hooks of the `cpu` target."""

    def link(self, context: Any, function: Callable[..., int]) -> str:
        """Compile `function` (or load it) and name its address."""
        name = symbol_of(function)
        if name not in _linked:
            _linked[name] = compile_native(function)
            llvm.add_symbol(name, _linked[name].address)
        return name


_linked: dict[str, Any] = {}

seam = CpuSeam(
    extending=extending,
    templates=templates,
    register_model=extending.register_model,
    typeof_impl=extending.typeof_impl,
)

_libc = ctypes.CDLL(None, use_errno=True)
_tls_key = ctypes.c_uint32()
if _libc.pthread_key_create(ctypes.byref(_tls_key), None) != 0:
    raise OSError("pthread_key_create failed: no thread-local key is left in this process")
# By symbol, not by value: object code from the on-disk cache finds this process's own key.
llvm.add_symbol("warpwell_tls_key", ctypes.addressof(_tls_key))

Codegen = Callable[[Any, Any, Any, Any], Any]


def _pointer(builder: Any, address: Any, bits: int = 64) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _define(stub: Any, result: types.Type, count: int, codegen: Codegen, *, scope: bool = False) -> None:
    """Register a body whose arguments are `count` words, plus a literal scope where it takes one."""

    def definition(typingctx: Any, *args: Any) -> Any:
        if len(args) != count + scope or (scope and literal(args[-1]) not in (0, 1, 2)):
            return None
        return result(*([types.int64] * count), *args[count:]), codegen

    seam.primitive(stub)(definition)


def _load(order: str) -> Codegen:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), order, 8)

    return codegen


def _store(order: str) -> Codegen:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), order, 8)
        return context.get_dummy_value()

    return codegen


def _rmw(operation: str) -> Codegen:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw(operation, _pointer(builder, args[0]), args[1], "acq_rel")

    return codegen


def _compare_exchange(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    pair = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "acq_rel", "acquire")
    return builder.extract_value(pair, 0)


def _fence(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    builder.fence("acq_rel")
    return context.get_dummy_value()


_define(a.load_relaxed, types.int64, 1, _load("monotonic"), scope=True)
_define(a.load_acquire, types.int64, 1, _load("acquire"), scope=True)
_define(a.store_relaxed, types.void, 2, _store("monotonic"), scope=True)
_define(a.store_release, types.void, 2, _store("release"), scope=True)
_define(a.exchange, types.int64, 2, _rmw("xchg"), scope=True)
_define(a.fetch_add, types.int64, 2, _rmw("add"), scope=True)
_define(a.fetch_or, types.int64, 2, _rmw("or"), scope=True)
_define(a.fetch_and, types.int64, 2, _rmw("and"), scope=True)
_define(a.compare_exchange, types.int64, 3, _compare_exchange, scope=True)
_define(a.fence, types.void, 0, _fence, scope=True)


# -- items --------------------------------------------------------------------------------------------------


def _load_item(stub: Any, order: str | None) -> None:
    @seam.primitive(stub)
    def definition(typingctx: Any, addr: Any, dtype: Any) -> Any:
        scalar = scalar_of(dtype)
        if scalar is None:
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            bits = item_bits(scalar)
            pointer = _pointer(builder, args[0], bits)
            if order is None:
                loaded = builder.load(pointer, align=1)
            else:
                loaded = builder.load_atomic(pointer, order, bits // 8)
            return from_bits(context, builder, scalar, loaded)

        return scalar(types.int64, dtype), codegen


def _store_item(stub: Any, order: str | None) -> None:
    @seam.primitive(stub)
    def definition(typingctx: Any, addr: Any, value: Any, dtype: Any) -> Any:
        scalar = scalar_of(dtype)
        if scalar is None:
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            bits = item_bits(scalar)
            pointer = _pointer(builder, args[0], bits)
            stored = to_bits(context, builder, scalar, args[1])
            if order is None:
                builder.store(stored, pointer, align=1)
            else:
                builder.store_atomic(stored, pointer, order, bits // 8)
            return context.get_dummy_value()

        return types.void(types.int64, scalar, dtype), codegen


_load_item(a.load_relaxed_as, "monotonic")
_load_item(a.load_acquire_as, "acquire")
_load_item(a.load_weak_as, None)
_store_item(a.store_relaxed_as, "monotonic")
_store_item(a.store_weak_as, None)


@seam.primitive(a.fetch_add_as)
def _fetch_add_as(typingctx: Any, addr: Any, value: Any, dtype: Any) -> Any:
    scalar = scalar_of(dtype)
    if scalar is None or isinstance(scalar, types.Boolean) or item_bits(scalar) < 32:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = item_bits(scalar)
        pointer = _pointer(builder, args[0], bits)
        if isinstance(scalar, types.Integer):
            return builder.atomic_rmw("add", pointer, args[1], "monotonic")
        # no processor adds floats atomically: compare and exchange until nobody came between
        old = cgutils.alloca_once_value(builder, builder.load_atomic(pointer, "monotonic", bits // 8))
        loop = builder.append_basic_block("add")
        done = builder.append_basic_block("added")
        builder.branch(loop)
        builder.position_at_end(loop)
        before = builder.load(old)
        total = builder.fadd(from_bits(context, builder, scalar, before), args[1])
        pair = builder.cmpxchg(
            pointer, before, to_bits(context, builder, scalar, total), "monotonic", "monotonic"
        )
        builder.store(builder.extract_value(pair, 0), old)
        builder.cbranch(builder.extract_value(pair, 1), done, loop)
        builder.position_at_end(done)
        return from_bits(context, builder, scalar, builder.load(old))

    return scalar(types.int64, scalar, dtype), codegen


def define_bits(target: Seam) -> None:
    """Register `bits_as` and `as_bits`, which are the same for every compiled target."""

    @target.primitive(a.bits_as)
    def bits_as(typingctx: Any, bits: Any, dtype: Any) -> Any:
        scalar = scalar_of(dtype)
        if scalar is None:
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            width = ir.IntType(item_bits(scalar))
            low = args[0] if width.width == 64 else builder.trunc(args[0], width)
            return from_bits(context, builder, scalar, low)

        return scalar(types.int64, dtype), codegen

    @target.primitive(a.as_bits)
    def as_bits(typingctx: Any, value: Any, dtype: Any) -> Any:
        scalar = scalar_of(dtype)
        if scalar is None:
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            bits = to_bits(context, builder, scalar, args[0])
            return bits if bits.type.width == 64 else builder.zext(bits, I64)

        return types.int64(scalar, dtype), codegen


def define_arithmetic(target: Seam) -> None:
    """Register the bit and integer helpers, which are the same for every compiled target."""

    def binary(stub: Any, operation: str) -> None:
        @target.primitive(stub)
        def definition(typingctx: Any, x: Any, y: Any) -> Any:
            def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                return getattr(builder, operation)(args[0], args[1])

            return types.int64(types.int64, types.int64), codegen

    binary(a.rem, "urem")
    binary(a.div, "udiv")

    @target.primitive(a.i64)
    def i64(typingctx: Any, value: Any) -> Any:
        return types.int64(types.int64), lambda context, builder, sig, args: args[0]

    @target.primitive(a.popc)
    def popc(typingctx: Any, value: Any) -> Any:
        return types.int64(types.int64), lambda context, builder, sig, args: builder.ctpop(args[0])

    @target.primitive(a.ffs)
    def ffs(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            position = builder.add(builder.cttz(args[0], ir.IntType(1)(0)), I64(1))
            return builder.select(builder.icmp_signed("==", args[0], I64(0)), I64(0), position)

        return types.int64(types.int64), codegen


define_bits(seam)
define_arithmetic(seam)
define_checksum(seam)
seam.cold_call(a.call_cold)
seam.element_address(a.element_address)


# -- bulk copies and host services --------------------------------------------------------------------------


def _external(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _copy_wide(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    dst, src, stride, count = args
    with cgutils.for_range(builder, count) as loop:
        offset = builder.mul(loop.index, stride)
        for half in (0, 8):
            at = builder.add(offset, I64(half))
            word = builder.load_atomic(_pointer(builder, builder.add(src, at)), "monotonic", 8)
            builder.store_atomic(word, _pointer(builder, builder.add(dst, at)), "monotonic", 8)
    return context.get_dummy_value()


_define(a.copy_wide, types.void, 4, _copy_wide)


def _constant(value: int) -> Codegen:
    return lambda context, builder, sig, args: context.get_constant(sig.return_type, value)


_define(a.lane_id, types.int64, 0, _constant(0))
_define(a.warp_size, types.int64, 0, _constant(1))
_define(a.activemask, types.int64, 0, _constant(1))
_define(a.shfl, types.int64, 3, lambda context, builder, sig, args: args[1])
_define(a.match_any, types.int64, 2, _constant(1))
_define(a.syncwarp, types.void, 1, lambda context, builder, sig, args: context.get_dummy_value())


@seam.primitive(a.ballot)
def _ballot(typingctx: Any, mask: Any, predicate: Any) -> Any:
    return types.int64(types.int64, types.boolean), lambda context, builder, sig, args: builder.zext(args[1], I64)


@seam.primitive(a.any_sync)
def _any_sync(typingctx: Any, mask: Any, predicate: Any) -> Any:
    return types.boolean(types.int64, types.boolean), lambda context, builder, sig, args: args[1]


def _thread_context(builder: Any) -> Any:
    name = "warpwell_tls_key"
    key = builder.module.globals.get(name) or cgutils.add_global_variable(builder.module, I32, name)
    key.linkage = "external"
    get = _external(builder, "pthread_getspecific", I8.as_pointer(), I32)
    return builder.bitcast(builder.call(get, [builder.load(key)]), I64.as_pointer())


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


def _launch_flag(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.load(cgutils.gep_inbounds(builder, _thread_context(builder), FLAG))


def _interrupted(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    # atomic: the host stores to it meanwhile, and loops that ask must not take it for a constant
    return _load("monotonic")(context, builder, sig, [builder.add(_launch_flag(context, builder, sig, args), I64(8))])


_define(a.launch_flag, types.int64, 0, _launch_flag)
_define(a.interrupted, types.int64, 0, _interrupted)


def set_context(address: int) -> None:
    """Make `address` the calling thread's context (stub; native launch code only)."""
    raise RuntimeError("set_context is compiled launch code")


def _set_context(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    _thread_context(builder)  # declares the key
    key = builder.load(builder.module.globals["warpwell_tls_key"])
    put = _external(builder, "pthread_setspecific", I32, I32, I8.as_pointer())
    builder.call(put, [key, builder.inttoptr(args[0], I8.as_pointer())])
    return context.get_dummy_value()


_define(set_context, types.void, 1, _set_context)


def _clock_ns(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    pair = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    first = builder.bitcast(pair, I64.as_pointer())
    now = _external(builder, "clock_gettime", I32, I32, I64.as_pointer())
    builder.call(now, [I32(1), first])  # CLOCK_MONOTONIC
    seconds = builder.load(first)
    return builder.add(builder.mul(seconds, I64(10**9)), builder.load(cgutils.gep_inbounds(builder, first, 1)))


_define(a.clock_ns, types.int64, 0, _clock_ns)


def _backoff(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    attempt = args[0]
    with builder.if_else(builder.icmp_signed("<", attempt, I64(24))) as (short, long):
        with short:
            builder.call(_external(builder, "sched_yield", I32), [])
        with long:
            grown = builder.mul(builder.sub(attempt, I64(20)), I64(10))
            capped = builder.select(builder.icmp_signed(">", grown, I64(1000)), I64(1000), grown)
            builder.call(_external(builder, "usleep", I32, I32), [builder.trunc(capped, I32)])
    return context.get_dummy_value()


_define(a.backoff, types.void, 1, _backoff)


def _copy_bytes(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    copy = _external(builder, "memcpy", I8.as_pointer(), I8.as_pointer(), I8.as_pointer(), I64)
    builder.call(
        copy,
        [builder.inttoptr(args[0], I8.as_pointer()), builder.inttoptr(args[1], I8.as_pointer()), args[2]],
    )
    return context.get_dummy_value()


_define(a.copy_bytes, types.void, 3, _copy_bytes)


def _transfer(name: str) -> Codegen:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        fd, address, nbytes, offset = args
        call = _external(builder, name, I64, I32, I8.as_pointer(), I64, I64)
        done = builder.call(
            call, [builder.trunc(fd, I32), builder.inttoptr(address, I8.as_pointer()), nbytes, offset]
        )
        errno = builder.load(builder.call(_external(builder, "__errno_location", I32.as_pointer()), []))
        failed = builder.icmp_signed("<", done, I64(0))
        return builder.select(failed, builder.neg(builder.sext(errno, I64)), done)

    return codegen


_define(a.pread, types.int64, 4, _transfer("pread"))
_define(a.pwrite, types.int64, 4, _transfer("pwrite"))


def _prefetch(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    function = _external(builder, "llvm.prefetch.p0", ir.VoidType(), I8.as_pointer(), I32, I32, I32)
    builder.call(function, [builder.inttoptr(args[0], I8.as_pointer()), I32(0), I32(3), I32(1)])
    return context.get_dummy_value()


_define(a.prefetch, types.void, 1, _prefetch)


def provide_guarded_ranges(address: int) -> None:
    """Make known where the table of `bus_error` is, before what asks for it is compiled or loaded."""
    llvm.add_symbol("warpwell_guarded_ranges", address)


def _guarded_ranges(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    name = "warpwell_guarded_ranges"
    table = builder.module.globals.get(name) or cgutils.add_global_variable(builder.module, I64, name)
    table.linkage = "external"
    return builder.ptrtoint(table, I64)


_define(a.guarded_ranges, types.int64, 0, _guarded_ranges)


def _call_native(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    function = builder.inttoptr(args[0], ir.FunctionType(I64, [I64] * 6).as_pointer())
    return builder.call(function, args[1:])


_define(a.call_native, types.int64, 7, _call_native)


def _call_foreign(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    function = builder.inttoptr(args[0], ir.FunctionType(I64, [I64] * 7).as_pointer())
    return builder.call(function, args[1:])


_define(a.call_foreign, types.int64, 8, _call_foreign)


# -- arguments ----------------------------------------------------------------------------------------------


@extending.unbox(StructType)
def _unbox_struct(typ: StructType, obj: Any, c: Any) -> Any:
    """Read the struct from the flat words that the host object keeps at `address`, unless asking for it raises."""
    nothing = cgutils.alloca_once(c.builder, ir.ArrayType(I64, 256), zfill=True)
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
        words = [c.builder.load(cgutils.gep_inbounds(c.builder, base, position + k)) for k in range(count)]
        packed = words[0] if member is types.int64 else cgutils.pack_array(c.builder, words)
        value = model.set(c.builder, value, packed, name)
        position += count
    return extending.NativeValue(value, is_error=cgutils.is_null(c.builder, boxed))


def link_all() -> None:
    """Compile or load every linked function: code from the on-disk cache names them by symbol."""
    for function in linked_functions():
        seam.link(None, function)


# -- blocks, which have one thread --------------------------------------------------------------------------


def _index(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.load(_thread_context(builder))


_define(block.block_index, types.int64, 0, _index)
_define(block.thread_index, types.int64, 0, lambda *_: I64(0))
_define(block.block_threads, types.int64, 0, lambda *_: I64(1))
_define(block.barrier, types.void, 0, lambda context, *_: context.get_dummy_value())


def _shared_array(shape: Any, dtype: Any) -> Callable[..., Any]:
    def implementation(shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype)

    return implementation


# for this target alone: numba-cuda takes over what has no target
seam.overload(block.shared_array, target="cpu")(_shared_array)

install(seam, extending, extending.register_model, arrayobj)
subscribe(seam)
