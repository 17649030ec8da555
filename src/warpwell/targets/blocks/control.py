"""The control record of a `BlockLaunch`: words of device memory that its workers and the host share.

A worker claims its next block by adding to `CURSOR`: `cuda.claim` on a GPU, the driver of `cpu.py` on the CPU. What
workers only look at lies in one sector of 32 bytes, what they change in another.

The host reads the record by a copy. To be told without one, it gives workers a *pinned record* of its own memory
(`mirror_word`). They write there how many blocks have ended, now and then, and for each launch when it began and when
its last worker left. Each launch in flight has a slot of its own, because stores of different workers arrive in any
order: a word that is written once cannot be overwritten by an older one.
"""

from __future__ import annotations

from ... import errors

STOP = 0
"""Word of the control record: not 0 when all workers are to leave at the end of their block."""
TARGET = 1
"""Workers with this number or a larger one are to leave."""
FLOOR = 2
"""Workers with a smaller number are to leave. The oldest are a GPU's first choice for what it issues next: they end
their blocks soon, where the youngest of a kernel that keeps it busy may not for as long as the others run."""
MIRROR = 3
"""Where the pinned record is (see `mirror_word`), 0 for none."""
CURSOR = 4
"""The next block to claim; larger than the number of blocks when none is left."""
DONE = 5
"""Blocks that have ended."""
BEGUN = 6
"""Workers that have begun, ever."""
LEFT = 7
"""Workers that have left, ever."""
LEAVING = 8
"""The first of `SLOTS` words: workers of the launch in this slot that have left; 0 again when all have."""
SLOTS = 8
"""Launches of one record that may be in flight together, if their ends are to be told."""
CONTROL_WORDS = LEAVING + SLOTS

PROGRESS = 0
"""Word of the pinned record: blocks that had ended at some time. The host keeps the largest that it has seen."""
BEGAN = 8
"""The first of `SLOTS` words: when the first worker of the launch began, in nanoseconds of the GPU's clock."""
ENDED = 16
"""The first of `SLOTS` words: when the last worker of the launch had left. Nothing of the launch, its results
included, is written after it. The host sets it to 0 before a launch."""
PINNED_WORDS = 24

NEVER = 1 << 62
"""`TARGET` where no number reaches it."""

_OFTEN = 64
"""Times that progress is written in a launch, at least (if it has as many blocks); at most twice as often."""


def mirror_word(address: int, blocks: int) -> int:
    """Return `MIRROR` for a pinned record at an address, a multiple of 64, and a launch of so many blocks.

    The lowest six bits are k where progress is written as `DONE` passes multiples of 2^k.
    """
    if address & 63:
        raise errors.ArgumentError(f"a pinned record at {address:#x}: give an address that is a multiple of 64")
    return address + max(0, (blocks // _OFTEN).bit_length() - 1)


def fresh(cursor: int = 0, floor: int = 0, mirror: int = 0, target: int = NEVER) -> list[int]:
    """Return the words of a record whose workers are to begin with block `cursor`.

    The first `DONE` of them are those that a launch which goes on sets anew.
    """
    return [0, target, floor, mirror, cursor, *[0] * (CONTROL_WORDS - DONE)]
