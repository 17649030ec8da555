"""The kernel of filters compiles for a GPU, whatever holds the words of a table."""

from __future__ import annotations

import numpy as np
import pytest

from warpwell.array.view import ArrayView, ViewStatic
from warpwell.table.selecting import select, select_whole
from warpwell.targets.compiler import run_cuda

pytestmark = pytest.mark.ptx


@pytest.mark.quick("False")
@pytest.mark.parametrize("cached", [True, False])
def test_filters_compile(cached):
    kind = ViewStatic("<i8", 1, cached, writable=False, full=False, aligned=True, stride=8, packed=True)
    words = ArrayView(kind, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(kind)})
    numbers, bytes_ = np.zeros(1, np.int64), np.zeros(1, np.uint8)
    given = (words, words, words, numbers, numbers, bytes_, 0, 3, 0, 0, 0, numbers, numbers, numbers, numbers)
    assert "shfl.sync" in run_cuda.ptx(select, given)
    text = run_cuda.ptx(select_whole, (words, words, numbers, numbers, 3, 0, 0, 0, numbers, numbers, numbers, 0))
    assert "vote.sync.ballot" in text
    assert ("ld.relaxed.gpu.global.v2.u64" in text) == cached  # spans of words
