"""Block kernels: device functions that every thread of a block runs, with memory and barriers of the block.

``@kernel(block=128)`` makes one; it is launched over a number of blocks. On `cuda` a block has that many threads; on
`cpu` and `interp` it has one, so write loops that stride by `block_threads`: they run anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .atomics import SYSTEM, current, grid, load_relaxed
from .device import device


def block_index() -> int:
    """Return the index of the calling thread's block in the launch (any thread)."""
    return int(current().grid(1))


def thread_index() -> int:
    """Return the index of the calling thread in its block (any thread)."""
    current()  # raises outside of a launch
    return 0


def block_threads() -> int:
    """Return the number of threads of a block (any thread)."""
    current()
    return 1


def barrier() -> None:
    """Wait until every thread of the block has come here (all threads of the block).

    Orders what they did before with what they do after. A kernel in which some thread returns before a barrier that
    others reach cannot be preempted at block ends: it runs in slices.
    """
    current()


def shared_array(shape: Any, dtype: Any) -> Any:
    """Return an array that the threads of a block share (all threads; `shape` and `dtype` are constants).

    Its items are not set, and are lost at the end of the block.
    """
    current()
    return np.empty(shape, dtype)


# -- for generated code: an index that does not come from the hardware ---------------------------------------


def virtual_grid(ndim: int) -> Any:
    """Return `grid` of the block that the workers of a launch have claimed."""
    return grid(ndim)


def virtual_block_index() -> int:
    """Return `block_index` of the block that the workers of a launch have claimed."""
    return block_index()


def set_virtual(x: int, y: int, z: int) -> None:
    """Make (x, y, z) the block's index for the calling warp (all of its lanes, together).

    Each warp has its own place for it, so nothing need be waited for.
    """
    raise RuntimeError("set_virtual is compiled launch code")


def set_flag(address: int) -> None:
    """Make `address` that of the launch's flag (every thread of the block, the same)."""
    raise RuntimeError("set_flag is compiled launch code")


def own_flag() -> int:
    """Return the address of the launch's flag in a kernel on a GPU that began with `set_flag` (any thread)."""
    raise RuntimeError("own_flag is compiled launch code")


@device
def launch_failed() -> bool:
    """What `failed` is in a kernel that Warpwell launches on a GPU (see `virtual.launch_copy`)."""
    return load_relaxed(own_flag(), SYSTEM) != 0


def opaque(value: Any) -> Any:
    """Return a value of which the compiler knows nothing more (any thread).

    Around a kernel's floating-point arguments in a loop over blocks: what is computed of them alone would otherwise be
    taken out of the loop, and a product that is computed there is not fused with the sum that it belongs to. Then the
    loop would round otherwise than the plain kernel.
    """
    raise RuntimeError("opaque is compiled launch code")


def div_short(a: int, b: int) -> int:
    """Return ``a // b`` of numbers from 0 to 2^32 - 1: a third of the instructions of a division of words."""
    raise RuntimeError("div_short is compiled launch code")


def own_block() -> int:
    """Return the hardware's index of the block (any thread)."""
    raise RuntimeError("own_block is compiled launch code")


def put_claim(value: int) -> None:
    """Leave a word for the block (one thread; a barrier must follow)."""
    raise RuntimeError("put_claim is compiled launch code")


def get_claim() -> int:
    """Return the word that `put_claim` left (any thread, after a barrier)."""
    raise RuntimeError("get_claim is compiled launch code")


def add_relaxed(address: int, value: int) -> int:
    """Add to a word and return what it was (thread; device scope, orders nothing)."""
    raise RuntimeError("add_relaxed is compiled launch code")
