"""The control record of a `BlockLaunch`: eight words of device memory that its workers and the host share.

A worker claims its next block by adding to `CURSOR`: `cuda.claim` on a GPU, the driver of `cpu.py` on the CPU.
"""

STOP = 0
"""Word of the control record: not 0 when all workers are to leave at the end of their block."""
TARGET = 1
"""Workers with this number or a larger one are to leave."""
CURSOR = 2
"""The next block to claim; larger than the number of blocks when none is left."""
DONE = 3
"""Blocks that have ended."""
LIVE = 4
"""Workers that have begun and not left."""
LEFT = 5
"""Workers that have left, ever."""
FLOOR = 6
"""Workers with a smaller number are to leave. The oldest are a GPU's first choice for what it issues next: they end
their blocks soon, where the youngest of a kernel that keeps it busy may not for as long as the others run."""
BEGUN = 7
"""Workers that have begun, ever."""
CONTROL_WORDS = 8

NEVER = 1 << 62
"""`TARGET`, and the end of a shift, where no number reaches it."""
