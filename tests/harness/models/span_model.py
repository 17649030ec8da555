"""Span scenario: the frame scenario whose readers fold runs of items instead of subscripting single ones.

Even seeds read groups of words into registers, as on a GPU; odd ones copy to buffers, as on a CPU.
"""

from __future__ import annotations

from random import Random

import warpwell as ww
from warpwell.array.spans import calls

from .adversary import Violation
from .cache_model import ITEMS, base_value
from .frame_model import FrameModel


class SpanModel(FrameModel):
    """One run of the span scenario; `seed` and `trace` as for `CacheModel`."""

    def _look(self, seed: int) -> None:
        random, page = Random(seed), self.pages[0]

        def look(item: int, value: int) -> int:
            if value != base_value(page, item):
                raise Violation(f"page {page}, item {item}: a span gave {value:#x}, page {(value >> 40) - 1}'s")
            return item + 1

        for _ in range(40):
            first = random.randrange(4)
            ww.fold(look, first, self.view, page * ITEMS + first, page * ITEMS + first + random.choice((2, 8, 12)))
            # whatever it was given before the second look, the sum is that of the page's items, or of none
            total = ww.fold(ww.add, 0, self.view, page * ITEMS, page * ITEMS + 8)
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
