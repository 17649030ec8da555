"""The control record of a `BlockLaunch`: words of device memory that its workers and the host share.

A worker claims its next block by adding to `CURSOR`: `cuda.claim` on a GPU, the driver of `cpu.py` on the CPU. What
workers only look at lies in one sector of 32 bytes, what they change in another.

The host reads the record by a copy. To be told of progress without one, it gives workers the address of a word of its
own memory (`mirror_word`), where they write how many blocks have ended, now and then. Stores of different workers
arrive in any order: the host keeps the largest number that it has seen.
"""

from __future__ import annotations

from ... import errors

STOP = 0
"""Word of the control record: workers with a smaller number are to leave at the end of their block (`NEVER`: all)."""
TARGET = 1
"""Workers with this number or a larger one are to leave."""
FLOOR = 2
"""The same. On a GPU a stream sets `STOP`, and the host this word: neither takes the other's back.

The oldest are a GPU's first choice for what it issues next: they end their blocks soon, where the youngest of a kernel
that keeps it busy may not for as long as the others run."""
MIRROR = 3
"""Where progress is told (see `mirror_word`), 0 for nowhere."""
CURSOR = 4
"""The next block to claim; larger than the number of blocks when none is left."""
DONE = 5
"""Blocks that have ended."""
BEGUN = 6
"""Workers that have begun, ever."""
LEFT = 7
"""Workers that have left, ever."""
CONTROL_WORDS = 8

PINNED_BYTES = 64
"""Between the words of two records where progress is told."""

NEVER = 1 << 62
"""`TARGET` where no number reaches it."""

_OFTEN = 64
"""Times that progress is written in a launch, at least (if it has as many blocks); at most twice as often."""


def mirror_word(address: int, blocks: int) -> int:
    """Return `MIRROR` for a word at an address, a multiple of 64, and a launch of so many blocks.

    The lowest six bits are k where progress is written as `DONE` passes multiples of 2^k.
    """
    if address & 63:
        raise errors.ArgumentError(f"progress is told at {address:#x}: give an address that is a multiple of 64")
    return address + max(0, (blocks // _OFTEN).bit_length() - 1)


def fresh(cursor: int = 0, floor: int = 0, mirror: int = 0, target: int = NEVER) -> list[int]:
    """Return the words of a record whose workers are to begin with block `cursor`.

    The first `DONE` of them are those that a launch which goes on sets anew.
    """
    return [0, target, floor, mirror, cursor, *[0] * (CONTROL_WORDS - DONE)]
