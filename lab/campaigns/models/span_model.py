"""Span scenario: the frame scenario whose readers fold runs of items instead of subscripting single items.

In-place scenario: the cache scenario, in which two threads also change runs of items that they own.

Even seeds read groups of words into registers, as on a GPU; odd seeds copy to buffers, as on a CPU.
"""

from __future__ import annotations

import operator
from random import Random

from warpwell import gpu
from warpwell.array.spans import calls

from .adversary import Violation
from .cache_model import ITEMS, CacheModel, Focus, base_value
from .frame_model import FrameModel


class SpanModel(FrameModel):
    """One run of the span scenario; `seed` and `trace` as for `CacheModel`."""

    def _look(self, seed: int) -> None:
        random, page = Random(seed), self.pages[0]

        def look(item: int, value: int) -> int:
            if value != base_value(page, item):
                raise Violation(f"page {page}, item {item}: a span returned {value:#x}, page {(value >> 40) - 1}'s")
            return item + 1

        for _ in range(40):
            first = random.randrange(4)
            gpu.fold(look, first, self.view, page * ITEMS + first, page * ITEMS + first + random.choice((2, 8, 12)))
            # The second check of the page must discard all earlier values: the sum covers all items, or is 0.
            total = gpu.fold(operator.add, 0, self.view, page * ITEMS, page * ITEMS + 8)
            if total not in (0, sum(base_value(page, k) for k in range(8))):
                part = [sum(base_value(page, k) for k in range(n)) for n in range(8)]
                if total not in part:
                    raise Violation(f"page {page}: the sum of a span is {total:#x}")

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation`."""
        before, calls.BUFFERED = calls.BUFFERED, {"interp"} if self.seed & 1 else set()
        try:
            return super().check()
        finally:
            calls.BUFFERED = before


RUNS, RUN = 48, 8
"""Threads 0 and 1 own these runs of items of each page: four groups, which one pin covers."""


def changed(item: int, number: int) -> int:
    """Return the new value of an item that is changed in place."""
    return item + number


def numbered(i: int, page: int, version: int) -> int:
    """Return the value of item i of a page in a version."""
    return base_value(page, i - page * ITEMS) + version


class InPlaceModel(CacheModel):
    """One run of the in-place scenario; `seed` and `trace` as for `CacheModel`."""

    def __init__(self, seed: int, trace: int = 0, focus: Focus | None = None) -> None:
        random = Random(~seed)
        super().__init__(seed, trace, focus or Focus(frames=random.choice((1, 1, 2))))

    def _read(self, thread: int, page: int, item: int, observed: dict[tuple[int, int], int]) -> None:
        super()._read(thread, page, item, observed)
        super()._read(thread, page, RUNS + (item + thread) % (2 * RUN), observed)

    def _write(self, thread: int, page: int, observed: dict[tuple[int, int], int]) -> None:
        owner = thread - self.readers
        if owner not in (0, 1):
            super()._write(thread, page, observed)
            return
        first = RUNS + RUN * owner
        for item in range(first, first + RUN):
            self.started[page, item] += 1
            observed[page, item] = self.started[page, item]
        lo = page * ITEMS + first
        if owner == 0:
            gpu.map(changed, self.view, self.view, lo, lo + RUN, 1)
        else:
            gpu.fill(numbered, self.view, lo, lo + RUN, page, self.started[page, first])
