"""CRC-32C as compiled host code: the processor's instruction in three streams, or tables of eight bytes."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils, config, types
from numba.extending import intrinsic

from .. import atomics as a
from ..checksum import POLYNOMIAL, TABLE

I8 = np.dtype(np.int64)
U1 = np.dtype(np.uint8)

# The instruction takes three cycles and one can start in each: three streams keep it busy. Joining them costs
# some ten nanoseconds, so long values have long streams.
LONG = 1024
SHORT = 128


def _times_zeros(nbytes: int) -> np.ndarray[Any, Any]:
    """Tables that move a CRC register past `nbytes` zero bytes, one for each of its four bytes."""
    # As a matrix over GF(2): a column is what becomes of a single bit.
    columns = [POLYNOMIAL, *(1 << k for k in range(31))]  # past one zero bit
    for _ in range(3 + nbytes.bit_length() - 1):
        columns = [_apply(columns, c) for c in columns]
    return np.array([[_apply(columns, byte << 8 * k) for byte in range(256)] for k in range(4)], np.uint32)


def _apply(columns: list[int], register: int) -> int:
    out = 0
    for k, column in enumerate(columns):
        if register >> k & 1:
            out ^= column
    return out


PAST_LONG = _times_zeros(LONG)
PAST_SHORT = _times_zeros(SHORT)


def _eight_tables() -> np.ndarray[Any, Any]:
    tables = [list(TABLE)]
    for _ in range(7):
        tables.append([(c >> 8) ^ TABLE[c & 255] for c in tables[-1]])
    return np.array(tables, np.uint32)


EIGHT = _eight_tables()


def host_instruction() -> str | None:
    """The LLVM intrinsic of this processor's CRC-32C instruction, where code is compiled for one that has it."""
    if config.CPU_NAME is not None:
        features = set((config.CPU_FEATURES or "").split(","))
    else:
        features = {f"+{name}" for name, on in llvm.get_host_cpu_features().items() if on}
    if "+sse4.2" in features:
        return "llvm.x86.sse42.crc32.64.64"
    if "+crc" in features and llvm.get_default_triple().startswith("aarch64"):
        return "llvm.aarch64.crc32cx"
    return None


_INSTRUCTION = host_instruction()


@intrinsic
def _step(typingctx: Any, register: Any, word: Any) -> Any:
    """The register after eight more bytes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        wide = _INSTRUCTION is not None and "x86" in _INSTRUCTION
        kind = i64 if wide else i32
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, i64]), str(_INSTRUCTION))
        register = args[0] if wide else builder.trunc(args[0], i32)
        out = builder.call(function, [register, args[1]])
        return out if wide else builder.zext(out, i64)

    return types.int64(types.int64, types.int64), codegen


@extending.register_jitable
def _past(table: Any, register: int) -> int:
    return types.int64(
        table[0, register & 255]
        ^ table[1, (register >> 8) & 255]
        ^ table[2, (register >> 16) & 255]
        ^ table[3, (register >> 24) & 255]
    )


@extending.register_jitable
def _remaining_bytes(at: int, end: int, register: int) -> int:
    while at < end:
        register = types.int64(EIGHT[0, (register ^ a.load_weak_as(at, U1)) & 255]) ^ (register >> 8)
        at += 1
    return register


def _with_instruction(address: int, nbytes: int, seed: int) -> int:
    register = (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF
    at = address
    end = address + nbytes
    while end - at >= 3 * LONG:
        second = 0
        third = 0
        for k in range(at, at + LONG, 8):
            register = _step(register, a.load_weak_as(k, I8))
            second = _step(second, a.load_weak_as(k + LONG, I8))
            third = _step(third, a.load_weak_as(k + 2 * LONG, I8))
        register = _past(PAST_LONG, _past(PAST_LONG, register) ^ second) ^ third
        at += 3 * LONG
    while end - at >= 3 * SHORT:
        second = 0
        third = 0
        for k in range(at, at + SHORT, 8):
            register = _step(register, a.load_weak_as(k, I8))
            second = _step(second, a.load_weak_as(k + SHORT, I8))
            third = _step(third, a.load_weak_as(k + 2 * SHORT, I8))
        register = _past(PAST_SHORT, _past(PAST_SHORT, register) ^ second) ^ third
        at += 3 * SHORT
    while end - at >= 8:
        register = _step(register, a.load_weak_as(at, I8))
        at += 8
    return _remaining_bytes(at, end, register) ^ 0xFFFFFFFF


def _with_tables(address: int, nbytes: int, seed: int) -> int:
    register = (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF
    at = address
    end = address + nbytes
    while end - at >= 8:
        word = a.load_weak_as(at, I8) ^ register
        register = types.int64(
            EIGHT[7, word & 255]
            ^ EIGHT[6, (word >> 8) & 255]
            ^ EIGHT[5, (word >> 16) & 255]
            ^ EIGHT[4, (word >> 24) & 255]
            ^ EIGHT[3, (word >> 32) & 255]
            ^ EIGHT[2, (word >> 40) & 255]
            ^ EIGHT[1, (word >> 48) & 255]
            ^ EIGHT[0, (word >> 56) & 255]
        )
        at += 8
    return _remaining_bytes(at, end, register) ^ 0xFFFFFFFF


def define_checksum(target: Any) -> None:
    """Register `crc32c` with the seam of a host target."""
    body = _with_tables if _INSTRUCTION is None else _with_instruction

    @target.primitive(a.crc32c)
    def crc32c(typingctx: Any, address: Any, nbytes: Any, seed: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return context.compile_internal(builder, body, sig, args)

        return types.int64(types.int64, types.int64, types.int64), codegen
