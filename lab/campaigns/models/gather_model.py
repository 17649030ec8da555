"""Gather and launches scenarios: the frame scenario whose readers copy rows as the kernels of `ww.gather` do.

Those of a GPU copy rows by three launches; between two launches of a stream there is a fence of all threads.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from warpwell.array.gather.kernels import copy_part
from warpwell.array.gather.waves import take_row
from warpwell.cache import READABLE, frame_address, frame_of, load_word, validate_read, word_address
from warpwell.targets import DEVICE, fence, load_weak_as

from .adversary import Violation
from .cache_model import ITEMS, base_value
from .frame_model import FrameModel


class GatherModel(FrameModel):
    """One run of the gather scenario; `seed` and `trace` as for `CacheModel`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rows: list[Any] = []

    def _look(self, seed: int) -> None:
        random, page = Random(seed), self.pages[0]
        row = np.zeros(8, np.int64)
        self.rows.append(row)  # its memory stays: another's would show what was stored here
        self.run.announce(row.ctypes.data, row.nbytes)
        before = [0] * 8
        for _ in range(60):
            first, items = random.randrange(4), random.choice((1, 2, 8))
            at = 8 * (page * ITEMS + first)
            took = take_row(self.cache.core, self.view.space, at, 8 * items, row.ctypes.data, 0, 0)
            got = [load_weak_as(row.ctypes.data + 8 * k, row.dtype) for k in range(8)]
            if took:
                before[:items] = [base_value(page, first + k) for k in range(items)]
            if got != before:  # a row that is not there changes nothing
                raise Violation(f"page {page}, item {first}: a row is {[hex(n) for n in got]}")


class LaunchesModel(GatherModel):
    """One run of the launches scenario; `seed` and `trace` as for `CacheModel`."""

    def _look(self, seed: int) -> None:
        random, page, core = Random(seed), self.pages[0], self.cache.core
        row = np.zeros(8, np.int64)
        self.rows.append(row)  # its memory stays: another's would show what was stored here
        self.run.announce(row.ctypes.data, row.nbytes)
        for _ in range(60):
            first, items = random.randrange(0, 4, 2), random.choice((2, 4, 6))
            unit = random.choice((8, 16))
            word = word_address(core, page)
            found = load_word(word)
            fence(DEVICE)
            if found & READABLE == 0:
                continue
            source = frame_address(core, frame_of(found)) + 8 * first
            for lane in range(2):
                copy_part(row.ctypes.data, source, 8 * items, unit, lane, 2)
            fence(DEVICE)
            got = [load_weak_as(row.ctypes.data + 8 * k, row.dtype) for k in range(items)]
            if validate_read(word_address(core, page), found) and got != [
                base_value(page, first + k) for k in range(items)
            ]:
                raise Violation(f"page {page}, item {first}: a row is {[hex(n) for n in got]}")
