"""What the kernels of `ww.gather` compile to for a GPU."""

from __future__ import annotations

import inspect
import re

import pytest

import warpwell as ww
from warpwell.array.gather import kernels
from warpwell.targets.compiler import run_cuda

pytestmark = pytest.mark.ptx


def text_of(kernel: ww.Kernel) -> str:
    text = run_cuda.ptx(kernel, (0,) * len(inspect.signature(kernel.function).parameters))
    return text[text.index(".visible .entry") :]


@pytest.mark.parametrize("kernel", [kernels.copy_listed, kernels.copy_seen], ids=lambda k: k.__name__)
def test_rows_are_copied_by_wide_relaxed_loads_four_in_flight(kernel: ww.Kernel) -> None:
    lines = [line.strip() for line in text_of(kernel).splitlines()]
    wide = [line[:2] for line in lines if re.match(r"(ld|st)[.]relaxed[.]gpu[.]global[.]v2[.]u64", line)]
    assert "ldldldldstststst" in "".join(wide), "all four loads are issued before the first store"
    assert not any(re.match("call|fence|atom|ld.acquire|div|rem", line) for line in lines), "no row pays for an order"


def test_the_look_acquires_the_word_before_it_records_it() -> None:
    lines = [line.strip() for line in text_of(kernels.look_pages).splitlines()]
    acquire = next(k for k, line in enumerate(lines) if line.startswith("ld.acquire.gpu"))
    assert any(line.startswith("st.relaxed.gpu") for line in lines[acquire:])


@pytest.mark.quick("settle_rows")
@pytest.mark.parametrize("kernel", [kernels.settle_rows, kernels.take_missing], ids=lambda k: k.__name__)
def test_the_others_compile(kernel: ww.Kernel) -> None:
    assert text_of(kernel)
