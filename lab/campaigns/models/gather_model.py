"""Gather and units scenarios: the frame scenario with readers that copy rows as the kernels of `ww.gather` do.

On a GPU a thread copies two units of rows, by validated reads with one fence.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from warpwell.array.gather.kernels import read_units
from warpwell.array.gather.page_batches import take_row
from warpwell.targets.primitives import load_weak_as

from .adversary import Violation
from .cache_model import ITEMS, base_value
from .frame_model import FrameModel


class GatherModel(FrameModel):
    """One run of the gather scenario; `seed` and `trace` as for `CacheModel`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rows: list[Any] = []

    def _look(self, seed: int) -> None:
        random, page = Random(seed), self.pages[0]
        row = np.zeros(8, np.int64)
        self.rows.append(row)  # keeps the memory: a later row at its address would show these stores
        self.run.announce(row.ctypes.data, row.nbytes)
        before = [0] * 8
        for _ in range(60):
            first, items = random.randrange(4), random.choice((1, 2, 8))
            at = 8 * (page * ITEMS + first)
            took = take_row(self.cache._core_address, self.view.space, at, 8 * items, row.ctypes.data, 0, 0)
            got = [load_weak_as(row.ctypes.data + 8 * k, row.dtype) for k in range(8)]
            if took:
                before[:items] = [base_value(page, first + k) for k in range(items)]
            if got != before:  # a row that is not cached must not be copied
                raise Violation(f"page {page}, item {first}: a row is {[hex(n) for n in got]}")


class UnitsModel(GatherModel):
    """One run of the units scenario; `seed` and `trace` as for `CacheModel`."""

    def _look(self, seed: int) -> None:
        random, core = Random(seed), self.cache._core_address
        for _ in range(60):
            positions = [(random.choice(self.pages), random.randrange(0, 8, 2)) for _ in range(2)]
            offsets = [8 * (page * ITEMS + item) for page, item in positions]
            unit = random.choice((8, 16))
            a, b, c, d, *valid = read_units(core, self.view.space, *offsets, unit, 0)
            for (page, item), values, is_valid in zip(positions, ((a, b), (c, d)), valid, strict=True):
                for k in range(unit // 8):
                    if is_valid and values[k] != base_value(page, item + k):
                        raise Violation(f"page {page}, item {item + k}: a unit has {values[k]:#x}")
