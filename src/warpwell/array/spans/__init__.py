"""Spans in kernels: runs of items, whose pages are looked up once each.

- calls.py    `fold`, `map` and `fill`, as kernels call them; which form takes which arrays
- words.py    the form of `cuda` and `interp`: the look at a page, words in registers
- buffers.py  the form of `cpu`: parts of pages that a thread copies and then computes from
"""

from .calls import (
    fill,
    fill_block,
    fill_warp,
    fold,
    fold_block,
    fold_indexed_warp,
    fold_warp,
    map,
    map_block,
    map_warp,
)

__all__ = [
    "fill",
    "fill_block",
    "fill_warp",
    "fold",
    "fold_block",
    "fold_indexed_warp",
    "fold_warp",
    "map",
    "map_block",
    "map_warp",
]
