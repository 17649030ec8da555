"""CRC-32C as compiled host code: the processor's instruction in three streams, or a table of bytes."""

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


def _has_instruction() -> bool:
    """Return True if the processor that code is compiled for has the CRC-32C instruction of x86-64."""
    if config.CPU_NAME is not None:
        return "+sse4.2" in (config.CPU_FEATURES or "").split(",")
    return bool(host_features().get("sse4.2"))


@extending.intrinsic
def _step(typingctx: Any, register: Any, word: Any) -> Any:
    """Return the register after eight more bytes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64, I64])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse42.crc32.64.64")
        return builder.call(instruction, args)

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


def _with_instruction(address: int, nbytes: int, seed: int) -> int:
    end = address + nbytes
    at, register = _three_streams(address, end, (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF, LONG, PAST_LONG)
    at, register = _three_streams(at, end, register, SHORT, PAST_SHORT)
    while end - at >= 8:
        register = _step(register, a.load_weak_as(at, I8))
        at += 8
    return _by_table(at, end, register) ^ 0xFFFFFFFF


def _without_instruction(address: int, nbytes: int, seed: int) -> int:
    return _by_table(address, address + nbytes, (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF) ^ 0xFFFFFFFF


def define_checksum(target: Any) -> None:
    """Register `crc32c` with the intrinsics of a host target."""
    body = _with_instruction if _has_instruction() else _without_instruction

    @target.primitive(a.crc32c)
    def crc32c(typingctx: Any, address: Any, nbytes: Any, seed: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return context.compile_internal(builder, body, sig, args)

        return types.int64(types.int64, types.int64, types.int64), codegen
