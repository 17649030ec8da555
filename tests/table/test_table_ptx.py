"""The kernel of filters compiles for a GPU for each kind of array of words."""

from __future__ import annotations

import numpy as np
import pytest

from warpwell.array.view import ArrayView, ViewStatic
from warpwell.table.selecting import select
from warpwell.targets.compiler import run_cuda

pytestmark = pytest.mark.ptx


@pytest.mark.quick("False")
@pytest.mark.parametrize("cached", [True, False])
def test_filters_compile(cached):
    kind = ViewStatic("<i8", 1, cached, writable=False, full=False, aligned=True, stride=8, packed=True)
    view = ArrayView(kind, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(kind)})
    numbers = np.zeros(1, np.int64)
    text = run_cuda.ptx(select, (view, numbers, numbers, 3, 0, 0, 0, numbers))
    assert "atom.relaxed.gpu.global.or.b64" in text
    assert ("ld.relaxed.gpu.global.v2.u64" in text) == cached  # spans of words
