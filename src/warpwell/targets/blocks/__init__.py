"""Launches that workers run block by block, so that they can be stopped between two blocks.

- `launch.py`: `BlockLaunch`, the launch with its arguments, as executors start and stop it.
- `control.py`: the words of the control record that workers and host share.
- `cuda.py`: workers on a GPU, which claim blocks (`claim`; imports numba-cuda).
- `cpu.py`: workers that are host threads, which claim blocks (`_DRIVER`).
"""

from .control import (
    BEGUN,
    CONTROL_WORDS,
    CURSOR,
    DONE,
    LEFT,
    MIRROR,
    NEVER,
    PINNED_BYTES,
    STOP,
    TARGET,
    fresh,
    mirror_word,
)
from .launch import BLOCK_INDICES, BlockLaunch
