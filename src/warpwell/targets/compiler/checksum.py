"""CRC-32C as compiled host code, by the best instructions that the processor has.

Long buffers: carry-less multiplication of 64 bytes (VPCLMULQDQ) or 16 bytes (PCLMULQDQ), or the CRC-32C instruction in
three streams. The rest: the instruction, or a table of bytes. 8 KiB in the cache take 0.15 us by 64 bytes and 0.29 us
in three streams (AMD EPYC, Zen 4), 0.83 us by 16 bytes and 1.38 us in three streams (Zen 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils, config, types

from .. import primitives as a
from ..checksum import TABLE
from ..shipped import host_features

I64 = ir.IntType(64)
I8 = np.dtype(np.int64)
U1 = np.dtype(np.uint8)
BYTE_TABLE = np.array(TABLE, np.uint32)


def _tables_past_zeros(nbytes: int) -> np.ndarray[Any, Any]:
    """Return tables that move a CRC register past `nbytes` zero bytes, one for each of its four bytes."""
    registers = np.arange(256, dtype=np.uint32) << 8 * np.arange(4, dtype=np.uint32)[:, None]
    for _ in range(nbytes):
        registers = BYTE_TABLE[registers & 255] ^ (registers >> 8)
    return registers


# The instruction takes three cycles and one can start in each: three streams keep it busy. Joining them costs about
# 10 ns, so long values have long streams.
LONG = 1024
SHORT = 128
PAST_LONG = _tables_past_zeros(LONG)
PAST_SHORT = _tables_past_zeros(SHORT)


# The bytes are folded into four accumulators, and these into 64 bytes at the end. With VPCLMULQDQ an accumulator has 64
# bytes, of a stream in a quarter of the bytes: loads from four places keep more of the memory busy than a copy by the C
# library (10 KiB take 1.0 us, and 1.2 us by memcpy). With PCLMULQDQ the four have the 16-byte columns of one stream,
# because the multiplications take longer than the loads.
MAX_STRIDE = 8192
"""Maximum size of a stream in bytes."""
MIN_FOLDED = 256
"""Minimum number of bytes that are folded."""


def _fold_constants(max_nbytes: int) -> np.ndarray[Any, Any]:
    """Return the two constants that fold 64 bytes into those ``64 * k`` bytes later, for each k."""
    remainder, powers = 1, []
    for _ in range(8 * max_nbytes + 32):
        powers.append(int(f"{remainder:032b}"[::-1], 2))
        remainder = (remainder << 1) ^ (0x11EDC6F41 if remainder >> 31 else 0)
    distances = range(512, 8 * max_nbytes + 1, 512)
    return np.array([(0, 0), *((powers[n + 31], powers[n - 33]) for n in distances)], np.int64)


FOLD = _fold_constants(MAX_STRIDE)


def has_features(*features: str) -> bool:
    """Return True if the processor that code is compiled for has all of these features, in LLVM's names."""
    if config.CPU_NAME is not None:
        return {f"+{name}" for name in features} <= set((config.CPU_FEATURES or "").split(","))
    return all(host_features().get(name) for name in features)


@extending.intrinsic
def _step(typingctx: Any, register: Any, word: Any) -> Any:
    """Return the register after eight more bytes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64, I64])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse42.crc32.64.64")
        return builder.call(instruction, args)

    return types.int64(types.int64, types.int64), codegen


def has_wide_multiplication() -> bool:
    """Return True if the processor that code is compiled for multiplies 64 bytes by one instruction."""
    return has_features("avx512f", "vpclmulqdq")


def _fold_code(builder: Any, args: Any, copies: bool) -> Any:
    """Generate code that folds one or four times `stride` bytes after a register into the 64 bytes at `residue`."""
    source, target, stride, register, low, high, residue = args
    is_wide, half = has_wide_multiplication(), ir.IntType(8)
    vector = ir.VectorType(I64, 8 if is_wide else 2)
    kind = ir.FunctionType(vector, [vector, vector, half])
    suffix = ".512" if is_wide else ""
    multiply = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.pclmulqdq{suffix}")

    def pair(first: Any, second: Any) -> Any:
        constants = ir.Constant(vector, [I64(0)] * vector.count)
        for k in range(vector.count):
            constants = builder.insert_element(constants, second if k & 1 else first, I64(k))
        return constants

    def folded(value: Any, constants: Any, following: Any) -> Any:
        products = [builder.call(multiply, [value, constants, half(halves)]) for halves in (0x00, 0x11)]
        return builder.xor(builder.xor(*products), following)

    def pointer(address: Any, *offsets: Any) -> Any:
        for offset in offsets:
            address = builder.add(address, offset)
        return builder.inttoptr(address, vector.as_pointer())

    def load(offset: Any, k: int) -> Any:
        start = builder.mul(stride, I64(k)) if is_wide else I64(16 * k)
        loaded = builder.load(pointer(source, offset, start), align=1)
        if copies:
            builder.store(loaded, pointer(target, offset, start), align=1)
        return loaded

    step = pair(I64(int(FOLD[1, 0])), I64(int(FOLD[1, 1])))
    first = [load(I64(0), k) for k in range(4)]
    zeros = ir.Constant(vector, [I64(0)] * vector.count)
    first[0] = builder.xor(first[0], builder.insert_element(zeros, register, I64(0)))
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned(">", stride, I64(64)), loop, after)
    builder.position_at_end(loop)
    offset, *values = (builder.phi(kind) for kind in (I64, *[vector] * 4))
    folds = [folded(value, step, load(offset, k)) for k, value in enumerate(values)]
    next_offset = builder.add(offset, I64(64))
    for phi, initial, following in zip((offset, *values), (I64(64), *first), (next_offset, *folds), strict=True):
        phi.add_incoming(initial, before)
        phi.add_incoming(following, loop)
    builder.cbranch(builder.icmp_unsigned("<", next_offset, stride), loop, after)
    builder.position_at_end(after)
    results = [builder.phi(vector) for _ in range(4)]
    for phi, initial, following in zip(results, first, folds, strict=True):
        phi.add_incoming(initial, before)
        phi.add_incoming(following, loop)
    if is_wide:
        while len(results) > 1:
            results[:2] = [folded(results[0], pair(low, high), results[1])]
    for k, result in enumerate(results):
        builder.store(result, pointer(residue, I64(16 * k)), align=1)
    return I64(0)


@extending.intrinsic
def _fold(
    typingctx: Any, source: Any, target: Any, stride: Any, register: Any, low: Any, high: Any, residue: Any
) -> Any:
    """Fold bytes at `source`; `target` is ignored. See `_fold_code`."""
    return types.int64(*[types.int64] * 7), lambda _, builder, sig, args: _fold_code(builder, args, copies=False)


@extending.intrinsic
def _fold_and_copy(
    typingctx: Any, source: Any, target: Any, stride: Any, register: Any, low: Any, high: Any, residue: Any
) -> Any:
    """Fold bytes at `source`, and copy them to `target`."""
    return types.int64(*[types.int64] * 7), lambda _, builder, sig, args: _fold_code(builder, args, copies=True)


@extending.register_jitable
def _past(table: Any, register: int) -> int:
    return types.int64(
        table[0, register & 255]
        ^ table[1, (register >> 8) & 255]
        ^ table[2, (register >> 16) & 255]
        ^ table[3, (register >> 24) & 255]
    )


@extending.register_jitable
def _three_streams(at: int, end: int, register: int, nbytes: int, past: Any) -> tuple[int, int]:
    """Return the address and the register after all groups of three blocks of `nbytes` bytes."""
    while end - at >= 3 * nbytes:
        second = 0
        third = 0
        for k in range(at, at + nbytes, 8):
            register = _step(register, a.load_weak_as(k, I8))
            second = _step(second, a.load_weak_as(k + nbytes, I8))
            third = _step(third, a.load_weak_as(k + 2 * nbytes, I8))
        register = _past(past, _past(past, register) ^ second) ^ third
        at += 3 * nbytes
    return at, register


@extending.register_jitable
def _by_table(at: int, end: int, register: int) -> int:
    while at < end:
        register = types.int64(BYTE_TABLE[(register ^ a.load_weak_as(at, U1)) & 255]) ^ (register >> 8)
        at += 1
    return register


@extending.register_jitable
def _by_words(at: int, end: int, register: int) -> int:
    while end - at >= 8:
        register = _step(register, a.load_weak_as(at, I8))
        at += 8
    return _by_table(at, end, register)


def _with_multiplication(streams: int) -> tuple[Any, Any]:
    """Return the functions that compute, and that copy and compute, with one stream or four."""
    group = 64 * streams

    def compute(address: int, nbytes: int, seed: int) -> int:
        register = (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF
        residue = a.scratch(64)
        end = address + nbytes
        if nbytes >= 1024:
            aligned = (address + 63) & -64  # loads across two lines of the cache take twice as long
            register = _by_words(address, aligned, register)
            address = aligned
        while end - address >= MIN_FOLDED:
            width = min((end - address) // group, MAX_STRIDE // 64)
            _fold(address, 0, 64 * width, register, FOLD[width, 0], FOLD[width, 1], residue)
            register = _by_words(residue, residue + 64, 0)
            address += group * width
        return _by_words(address, end, register) ^ 0xFFFFFFFF

    def copy(target: int, source: int, nbytes: int, seed: int) -> int:
        register = (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF
        residue = a.scratch(64)
        done = 0
        while nbytes - done >= MIN_FOLDED:
            width = min((nbytes - done) // group, MAX_STRIDE // 64)
            _fold_and_copy(source + done, target + done, 64 * width, register, FOLD[width, 0], FOLD[width, 1], residue)
            register = _by_words(residue, residue + 64, 0)
            done += group * width
        a.copy_bytes(target + done, source + done, nbytes - done)
        return _by_words(target + done, target + nbytes, register) ^ 0xFFFFFFFF

    return compute, copy


def _with_instruction(address: int, nbytes: int, seed: int) -> int:
    end = address + nbytes
    at, register = _three_streams(address, end, (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF, LONG, PAST_LONG)
    at, register = _three_streams(at, end, register, SHORT, PAST_SHORT)
    return _by_words(at, end, register) ^ 0xFFFFFFFF


def _without_instruction(address: int, nbytes: int, seed: int) -> int:
    return _by_table(address, address + nbytes, (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF) ^ 0xFFFFFFFF


def define_checksum(target: Any) -> None:
    """Register `crc32c` with the intrinsics of a host target."""
    body, copy_body = _without_instruction, None
    if has_features("sse4.2"):
        body = _with_instruction
    if has_features("sse4.2", "pclmul"):
        body, copy_body = _with_multiplication(4 if has_wide_multiplication() else 1)

    @target.primitive(a.crc32c)
    def crc32c(typingctx: Any, address: Any, nbytes: Any, seed: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return context.compile_internal(builder, body, sig, args)

        return types.int64(types.int64, types.int64, types.int64), codegen

    @target.primitive(a.copy_crc32c)
    def copy_crc32c(typingctx: Any, to: Any, source: Any, nbytes: Any, seed: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return context.compile_internal(builder, copy_body or copy_plainly, sig, args)

        return types.int64(*[types.int64] * 4), codegen

    def copy_plainly(to: int, source: int, nbytes: int, seed: int) -> int:
        a.copy_bytes(to, source, nbytes)
        return a.crc32c(to, nbytes, seed)
