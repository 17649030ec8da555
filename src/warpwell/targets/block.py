"""The primitives of block kernels: the threads of a block share memory and meet at barriers.

``@kernel(block=128)`` makes such a kernel; it is launched over a number of blocks. On `cuda` a block has that many
threads. On `cpu` and `interp` it has one, so loops should stride by `block_threads`: then they run anywhere.

As in `atomics`, one thread calls a primitive by itself unless the docstring says *all threads of the block*.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .atomics import SYSTEM, current, grid, load_relaxed
from .device import device


def block_index() -> int:
    """Return the index of the calling thread's block in the launch."""
    return int(current().grid(1))


def thread_index() -> int:
    """Return the index of the calling thread in its block."""
    current()  # raises outside of a launch
    return 0


def block_threads() -> int:
    """Return the number of threads of a block."""
    current()
    return 1


def barrier() -> None:
    """Wait until all threads of the block have called it. All threads of the block call it.

    Accesses of these threads before it are ordered before accesses of all of them after it. A kernel in which a
    thread may return before a barrier that others reach cannot be stopped between blocks: a scheduler
    runs it whole.
    """
    current()


def shared_array(shape: Any, dtype: Any) -> Any:
    """Return an array that the threads of a block share. All threads of the block call it.

    `shape` and `dtype` are constants. The items are not set, and are lost when the block ends.
    """
    current()
    return np.empty(shape, dtype)


# -- for generated launch code alone ---------------------------------------------------------------------------


def virtual_grid(ndim: int) -> Any:
    """Return `grid` of the block that the workers of a launch have claimed."""
    return grid(ndim)


def virtual_block_index() -> int:
    """Return `block_index` of the block that the workers of a launch have claimed."""
    return block_index()


def set_virtual(x: int, y: int, z: int) -> None:
    """Make (x, y, z) the block's index for the calling warp. All lanes of the warp call it, together.

    Each warp keeps its own index, so no warp waits for another.
    """
    raise RuntimeError("set_virtual is compiled launch code")


def set_flag(address: int) -> None:
    """Set the address of the launch's flag. All threads of the block call it, with the same address."""
    raise RuntimeError("set_flag is compiled launch code")


def own_flag() -> int:
    """Return the address of the launch's flag, in a kernel on a GPU that began with `set_flag`."""
    raise RuntimeError("own_flag is compiled launch code")


@device
def launch_failed() -> bool:
    """What `failed` is in a kernel that Warpwell launches on a GPU (see `virtual.launch_copy`)."""
    return load_relaxed(own_flag(), SYSTEM) != 0


def has_sizes(value: Any) -> None:
    """Let the compiler know that the lengths of an array are not negative; of other values it learns nothing.

    An index that is computed of them is then known not to be negative, and is not looked at for it.
    """
    raise RuntimeError("has_sizes is compiled launch code")


def opaque(value: Any, turn: int) -> Any:
    """Return a value of which the compiler knows nothing more, and which may be another at each `turn` of a loop.

    Around a kernel's floating-point arguments in a loop over blocks: expressions of them alone would otherwise be
    moved out of the loop, and a product that is computed there is not fused with the sum that it belongs to. Then
    the loop would round otherwise than the plain kernel.
    """
    raise RuntimeError("opaque is compiled launch code")


def div_short(a: int, b: int) -> int:
    """Return ``a // b`` of numbers from 0 to 2^32 - 1, in a third of the instructions of a division of words."""
    raise RuntimeError("div_short is compiled launch code")


def own_block() -> int:
    """Return the hardware's index of the block."""
    raise RuntimeError("own_block is compiled launch code")


def put_claim(value: int) -> None:
    """Leave a word for the block. One thread calls it, and a barrier must follow."""
    raise RuntimeError("put_claim is compiled launch code")


def get_claim() -> int:
    """Return the word that `put_claim` left, after a barrier."""
    raise RuntimeError("get_claim is compiled launch code")


def add_relaxed(address: int, value: int) -> int:
    """Add `value` to the word at `address` and return the word that was there. Relaxed, device scope."""
    raise RuntimeError("add_relaxed is compiled launch code")
