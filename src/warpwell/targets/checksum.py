"""CRC-32C (Castagnoli) in plain Python, for the ``interp`` target and for a few bytes on the host."""

from __future__ import annotations

_POLYNOMIAL = 0x82F63B78  # reflected: bit 0 stands for the highest power


def _table() -> tuple[int, ...]:
    out = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
        out.append(register)
    return tuple(out)


TABLE = _table()


def crc32c_of(data: bytes, seed: int = 0) -> int:
    """Return the CRC-32C of `data`; `seed` is the CRC of the data before it."""
    register = (seed & 0xFFFFFFFF) ^ 0xFFFFFFFF
    for byte in data:
        register = TABLE[(register ^ byte) & 255] ^ (register >> 8)
    return register ^ 0xFFFFFFFF
