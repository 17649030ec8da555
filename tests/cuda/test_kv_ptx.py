"""Kernels that submit key-value commands compile to PTX without a GPU, and read dw0 after the phase word."""

import re

import numpy as np
import pytest

from warpwell.targets import run_cuda
from warpwell.testing.key_value_load import keep_all_busy, retrieve_checked

pytestmark = pytest.mark.ptx

WORD = np.int64(0)
COUNTS = np.zeros(6, np.int64)


@pytest.fixture(scope="module")
def text() -> str:
    return run_cuda.ptx(retrieve_checked, (WORD,) * 6 + (COUNTS,) * 2)


def test_kernels_compile_to_ptx(text: str) -> None:
    assert ".visible .entry" in text
    assert ".visible .entry" in run_cuda.ptx(keep_all_busy, (WORD,) * 5 + (COUNTS,))


def test_dw0_is_read_after_the_phase_word_was_acquired(text: str) -> None:
    lines = [line.strip() for line in text.splitlines() if ".sys." in line or "st.relaxed.gpu" in line]
    found = 0
    for k, line in enumerate(lines):
        m = re.match(r"ld\.relaxed\.sys\.global\.u64\s+(%\w+), ", line)
        # dw0 and dw1 are the one load of shared memory that is kept in device memory
        if m and any(re.match(rf"st\.relaxed\.gpu\.global\.u64 \[%\w+\], {m[1]};", other) for other in lines[k:]):
            assert lines[k - 1].startswith("ld.acquire.sys")
            found += 1
    assert found >= 1
