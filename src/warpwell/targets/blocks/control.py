"""The control record of a `BlockLaunch`: words of device memory that its workers and the host share.

A worker claims its next block by adding to `CURSOR`: `cuda.claim` on a GPU, the driver of `cpu.py` on the CPU. Words
that workers only read are in one sector of 32 bytes, words that they change in another one.

The host reads the record by a copy. To observe progress without a copy, the host passes workers the address of a word
of host memory (`mirror_word`), to which they write the number of ended blocks from time to time. Stores of different
workers arrive in any order: the host keeps the largest number that it has seen.
"""

from __future__ import annotations

from ... import errors

STOP = 0
"""Word of the control record: workers with a smaller number must leave at the end of their block (`NEVER`: all).

A GPU issues instructions of the oldest workers first, so they end their blocks soon. The youngest workers of a kernel
that keeps the GPU busy may not end theirs as long as older ones run."""
TARGET = 1
"""Workers with this number or a larger one must leave."""
MIRROR = 2
"""Address of the word for progress (see `mirror_word`), or 0."""
CURSOR = 4
"""The next block to claim; larger than the number of blocks when none is left."""
DONE = 5
"""Blocks that have ended."""
BEGUN = 6
"""Number of workers that have started."""
LEFT = 7
"""Number of workers that have left."""
CONTROL_WORDS = 8

PINNED_BYTES = 64
"""Distance in bytes between the progress words of two records."""

NEVER = 1 << 62
"""Value of `TARGET` that no worker number reaches."""

_MIN_REPORTS = 64
"""Minimum number of progress writes in a launch of at least as many blocks; the maximum is twice this number."""


def mirror_word(address: int, blocks: int) -> int:
    """Return `MIRROR` for a word at an address, a multiple of 64, and a launch of `blocks` blocks.

    The lowest six bits are k: progress is written when `DONE` passes multiples of 2^k.
    """
    if address & 63:
        raise errors.ArgumentError(f"the progress word must be 64-byte aligned, got address {address:#x}")
    return address + max(0, (blocks // _MIN_REPORTS).bit_length() - 1)


def fresh(cursor: int = 0, mirror: int = 0, target: int = NEVER) -> list[int]:
    """Return the words of a record whose workers start with block `cursor`.

    To continue a launch, set the first `DONE` words again.
    """
    return [0, target, mirror, 0, cursor, *[0] * (CONTROL_WORDS - DONE)]
