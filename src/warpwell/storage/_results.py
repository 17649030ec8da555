"""Results that wait between the two calls with which a controller takes a key-value completion.

The calls follow each other in one thread, so no more results wait than there are service threads.
"""

from __future__ import annotations

from ..targets import (
    SYSTEM,
    Block,
    compare_exchange,
    device,
    load_acquire,
    load_relaxed,
    memory_for,
    store_relaxed,
    store_release,
)

PLACES = 256
"""More than service threads."""


@device
def keep_result(table: int, tag: int, result: int) -> None:
    """Keep the result of a command for `take_result`; 0 needs no place."""
    if result == 0:
        return
    at = tag & (PLACES - 1)
    while compare_exchange(table + 16 * at, 0, tag + 1, SYSTEM) != 0:
        at = (at + 1) & (PLACES - 1)
    store_relaxed(table + 16 * at + 8, result, SYSTEM)


@device
def take_result(table: int, tag: int) -> int:
    """Return the result of a command and forget it; 0 where none was kept."""
    for k in range(PLACES):
        place = table + 16 * ((tag + k) & (PLACES - 1))
        if load_acquire(place, SYSTEM) == tag + 1:
            result = load_relaxed(place + 8, SYSTEM)
            store_release(place, 0, SYSTEM)
            return result
    return 0


def results_table() -> Block:
    """Return memory for the results of one namespace."""
    return memory_for("cpu").allocate(16 * PLACES)
