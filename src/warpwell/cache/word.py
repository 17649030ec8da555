"""The page word: one 64-bit word a page, touched only through these helpers.

====== ======== ==============================================================================
bits   field    meaning
====== ======== ==============================================================================
0-1    state    INVALID, BUSY, VALID, WRITEBACK
2      DIRTY    the frame has bytes that storage lacks
3      REF      used since the clock hand last passed
4-15   pins     groups that write or hold the page (a warp's group counts as one)
16-35  gen      generation; each eviction makes the next one
36-63  frame    index of the frame that stores the page
====== ======== ==============================================================================

Everything is signed 64-bit: the frame's top bit is the sign, so it is masked after the shift. The two
readable states share bit 1, and a reader compares frame and generation only.
"""

from __future__ import annotations

from warpwell.targets import device
from warpwell.targets.primitives import i64

INVALID = 0
BUSY = 1
VALID = 2
WRITEBACK = 3
STATE = 3
READABLE = 2
"""The bit that is set in VALID and in WRITEBACK."""
DIRTY = 4
REF = 8
PIN = 16
"""One pin."""
PINS_SHIFT = 4
PINS_MAX = 0xFFF
PINS = PINS_MAX << PINS_SHIFT
GEN_SHIFT = 16
GEN_MAX = 0xFFFFF
FRAME_SHIFT = 36
FRAME_MAX = 0xFFFFFFF
IDENTITY = -(1 << GEN_SHIFT)
"""Mask of generation and frame, which must not change during a read."""


@device
def pack(frame, generation, state):
    """Return a word without pins, DIRTY and REF (thread)."""
    return i64((frame << FRAME_SHIFT) | (generation << GEN_SHIFT) | state)


@device
def state_of(word):
    """Return the state (thread)."""
    return word & STATE


@device
def pins_of(word):
    """Return the number of pins (thread)."""
    return (word >> PINS_SHIFT) & PINS_MAX


@device
def frame_of(word):
    """Return the frame (thread)."""
    return (word >> FRAME_SHIFT) & FRAME_MAX


@device
def generation_of(word):
    """Return the generation (thread)."""
    return (word >> GEN_SHIFT) & GEN_MAX


@device
def with_state(word, state):
    """Return the word with another state (thread)."""
    return (word & ~STATE) | state


@device
def evicted(word):
    """Return the INVALID word of the next generation (thread)."""
    return pack(0, (generation_of(word) + 1) & GEN_MAX, INVALID)


@device
def loaded(word, frame, pins):
    """Return the VALID word of a page that was BUSY as `word`, with `pins` pins (thread)."""
    return pack(frame, generation_of(word), VALID) | (pins << PINS_SHIFT)
