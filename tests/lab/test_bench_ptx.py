"""The kernels of `python -m lab bench` compile to PTX. A hit in BaM's kernel needs two atomic additions."""

from __future__ import annotations

import numpy as np
import pytest

from lab.bench.micro import bam, commands, kernels
from warpwell.array.view import ArrayView, ViewStatic
from warpwell.targets.compiler import run_cuda

pytestmark = pytest.mark.ptx

ORDER = SUMS = np.zeros(2, np.int64)


def view(*, writable=False):
    static = ViewStatic("<i8", 1, True, False, writable, False, True, 8)
    return ArrayView(static, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(static)})


A, C = (view(), 0, 0), (view(writable=True), 0, 0)
KERNELS = {
    **{f"walk {m}": (kernels.walk, (m,), (*A, 0, 0, 0, SUMS)) for m in ("raw", "subscript", "span", "BaM")},
    **{f"pick {m}": (kernels.pick, (m,), (*A, ORDER, 0, SUMS)) for m in ("raw", "subscript", "BaM")},
    **{f"pages {m}": (kernels.pages, (m,), (*A, ORDER, 0, 0, SUMS)) for m in ("subscript", "span")},
    **{f"vectors {m}": (kernels.vectors, (m, 2), (*C, *A, *A, 0, 0, 0)) for m in ("raw", "subscript", "span", "BaM")},
    "block_sums": (kernels.block_sums, ("subscript",), (*A, 0, 0, SUMS, 0)),
    "block_scans": (kernels.block_scans, ("BaM",), (*C, *A, 0, 0, SUMS, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str) -> None:
    make, means, arguments = KERNELS[name]
    assert ".visible .entry" in run_cuda.ptx(make(*means), arguments)


@pytest.mark.slow
def test_a_read_by_bam_adds_to_a_count_twice() -> None:
    text = run_cuda.ptx(kernels.pick("BaM"), (*A, ORDER, 0, SUMS))
    assert text.count("atom.acq_rel.gpu.global.add.u64") == 2 and "bam_miss" in text


@pytest.mark.slow
def test_commands_and_flush_compile() -> None:
    assert run_cuda.ptx(commands._commands, (view(), ORDER, 0, 0, 0, 0, 0))
    assert run_cuda.ptx(bam._flush, (view(writable=True), 0))
