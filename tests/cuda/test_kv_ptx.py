"""Device code of key-value loaders compiles to PTX without a GPU."""

import numpy as np
import pytest

import warpwell as ww
from warpwell.kv.permutation import permuted
from warpwell.targets import run_cuda

pytestmark = pytest.mark.ptx


@ww.kernel
def shuffled_keys(first, words, keys, out):
    i = ww.grid(1)
    if i < out.size:
        out[i] = keys[permuted(first + i, words)]


def test_an_order_is_computed_by_the_gpu() -> None:
    words = np.zeros(1, np.int64)
    text = run_cuda.ptx(shuffled_keys, (0, words, words, words))
    assert ".visible .entry" in text and "sm_90" in text
    assert str(0x7FEB352D) in text, "the round function is not in the kernel"
