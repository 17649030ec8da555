"""Parts of emulated and faulty media: the base class of wrappers, and the results of key-value commands.

The result of a key-value command is kept between the two calls with which a controller takes its completion. One thread
makes both calls in sequence, so there are at most as many kept results as service threads.
"""

from __future__ import annotations

from abc import abstractmethod

from warpwell.storage import Medium, NativeMedium
from warpwell.targets import (
    SYSTEM,
    Block,
    compare_exchange,
    device,
    load_acquire,
    load_relaxed,
    private_block,
    store_relaxed,
    store_release,
)

RESULT_SLOTS = 256
"""More than service threads."""


@device
def keep_result(table: int, tag: int, result: int) -> None:
    """Keep the result of a command for `take_result`; a result of 0 is not stored."""
    if result == 0:
        return
    at = tag & (RESULT_SLOTS - 1)
    while compare_exchange(table + 16 * at, 0, tag + 1, SYSTEM) != 0:
        at = (at + 1) & (RESULT_SLOTS - 1)
    store_relaxed(table + 16 * at + 8, result, SYSTEM)


@device
def take_result(table: int, tag: int) -> int:
    """Return and remove the result of a command; 0 if none was kept."""
    for k in range(RESULT_SLOTS):
        slot = table + 16 * ((tag + k) & (RESULT_SLOTS - 1))
        if load_acquire(slot, SYSTEM) == tag + 1:
            result = load_relaxed(slot + 8, SYSTEM)
            store_release(slot, 0, SYSTEM)
            return result
    return 0


def results_table() -> Block:
    """Return memory for the results of one namespace."""
    return private_block(16 * RESULT_SLOTS)


class Wrapper(Medium):
    """Base of a medium that wraps another one, for emulation and tests. Closing it closes the wrapped medium."""

    emulated = True

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.nbytes = medium.nbytes
        self.writable = medium.writable
        self.block = medium.block
        self._native: NativeMedium | None = None

    @abstractmethod
    def _over(self, inner: NativeMedium) -> NativeMedium:
        """Return native functions that call the functions of the wrapped medium."""

    def native(self) -> NativeMedium | None:
        """Return native functions that call the functions of the wrapped medium."""
        if self._native is None:
            inner = self.medium.native()
            if inner is not None:
                self._native = self._over(inner)
        return self._native

    def sync(self) -> None:
        """Sync the wrapped medium."""
        self.medium.sync()

    def close(self) -> None:
        """Close the wrapped medium."""
        self.medium.close()

    def last_error(self) -> str | None:
        """Return the wrapped medium's description of its last failure."""
        return self.medium.last_error()

    def failure(self) -> Exception | None:
        """Return why no command reaches the wrapped medium any more, or None."""
        return self.medium.failure()
