"""What `is_valid` compiles to, over bits in memory of the device, and of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import warpwell as ww
from warpwell import gpu
from warpwell.array.view import ArrayView, ViewStatic
from warpwell.targets.compiler import run_cuda

pytestmark = pytest.mark.ptx


def view(dtype: str) -> ArrayView:
    kind = ViewStatic(
        dtype,
        1,
        False,
        writable=False,
        full=False,
        aligned=True,
        stride=np.dtype(dtype).itemsize,
        packed=True,
    )
    return ArrayView(kind, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(kind)})


@ww.kernel
def total(values, valid, out):
    i = gpu.grid(1)
    if i < values.size and ww.table.is_valid(valid, i):
        gpu.atomic_add(out, 0, values[i])


def test_validity_compiles() -> None:
    text = run_cuda.ptx(total, (view("<f8"), view("|u1"), np.zeros(1)))
    assert ".visible .entry" in text and "atom" in text


def test_bits_of_numpy_are_one_load_of_a_byte() -> None:
    text = run_cuda.ptx(total, (np.zeros(8), np.zeros(1, np.uint8), np.zeros(1)))
    assert text.count("ld.global.u8") == 1 and "div" not in text
