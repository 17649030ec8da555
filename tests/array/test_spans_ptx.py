"""PTX of spans: the order and width of the loads, and compilation for every kind of cache."""

from __future__ import annotations

import operator
import re

import numpy as np
import pytest

import warpwell as ww
from warpwell import gpu
from warpwell.array.view import ArrayView, ViewStatic
from warpwell.targets.compiler import run_cuda

pytestmark = pytest.mark.ptx


def view(dtype: str = "<i8", ndim: int = 1, cached: bool = True, **static: object) -> ArrayView:
    kind = ViewStatic(
        dtype,
        ndim,
        cached,
        **{  # type: ignore[arg-type]
            "writable": True,
            "full": False,
            "aligned": True,
            "stride": np.dtype(dtype).itemsize,
            "packed": True,
            **static,
        },
    )
    return ArrayView(kind, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(kind)})


@gpu.function
def mix(total, item):
    return (total ^ item) + item


@ww.kernel
def fold_all(a, out):
    out[0] = gpu.fold(mix, 0, a, out[1], out[2])


@ww.kernel
def sum_all(a, out):
    out[0] = gpu.fold(operator.add, 0, a, out[1], out[2])


@gpu.function
def looked_up(total, item, table, numbers):
    return total + table[item] * numbers[item]


@ww.kernel
def by_tables(a, table, numbers, out):
    out[0] = gpu.fold(looked_up, 0, a, out[1], out[2], table, numbers)
    gpu.map_warp(plus, a, a, out[1], out[2], numbers)
    gpu.fill_warp(plus, a, out[1], out[2], table)


@gpu.function
def plus(item, table):
    return item + table[item]


@ww.kernel
def rows(a, out):
    n = a.shape[1]
    out[0] = gpu.fold(operator.add, 0, a, out[1] * n, out[2] * n)


@ww.kernel
def extremes(a, out):
    out[0] = gpu.fold(min, out[1], a, 0, a.size)
    out[1] = gpu.fold_warp(max, out[0], a, 0, a.size)
    out[2] = gpu.reduce_warp(operator.add, gpu.reduce_warp(max, out[1]))


@pytest.mark.parametrize("dtype", ["<i8", "<f4"])
def test_built_in_functions_are_folds(dtype: str) -> None:
    """`operator.add`, `min` and `max` compile into the kernel, with no call."""
    text = run_cuda.ptx(extremes, (view(dtype), np.zeros(4, dtype)))
    body = text[text.index(".visible .entry") :]
    instructions = ("min.s64", "max.s64") if dtype == "<i8" else ("setp.lt", "setp.gt")
    assert "shfl.sync" in body
    for instruction in instructions:
        assert instruction in body, instruction


@pytest.mark.quick("{}-own")
@pytest.mark.parametrize("fold", [fold_all, sum_all], ids=["own", "add"])
@pytest.mark.parametrize("static", [{}, {"direct_mapped": True}, {"shift": 9}], ids=str)
def test_the_look_acquires_then_loads_then_fences_then_reloads(static: dict[str, object], fold: ww.Kernel) -> None:
    text = run_cuda.ptx(fold, (view(**static), np.zeros(4, np.int64)))
    statements = [line.strip() for line in text[text.index(".visible .entry") :].splitlines()]
    fences = [k for k, line in enumerate(statements) if line.startswith("fence.acq_rel.gpu")]
    assert len(fences) == 2, "one for four rows, one for a row alone"
    rows = []
    for fence in fences:
        reload = next(k for k in range(fence, len(statements)) if statements[k].startswith("ld.relaxed.gpu.global.u64"))
        assert not any(re.match("call|st[.]|atom|ld[.]", line) for line in statements[fence + 1 : reload])
        word = re.search(r"\[(%\w+)\]", statements[reload])[1]
        acquire = max(
            k for k in range(fence) if statements[k].startswith("ld.acquire.gpu") and f"[{word}]" in statements[k]
        )
        between = statements[acquire + 1 : fence]
        loads = [line for line in between if line.startswith("ld.relaxed.gpu.global.v2.u64")]
        assert not any(re.match("call|st[.]|atom", line) for line in between)
        rows.append(len(loads))
    assert sorted(rows) == [1, 4]


@ww.kernel
def fold_together(a, out):
    out[0] = gpu.fold_block(mix, 0, a, out[1], out[2])


def test_a_warp_looks_at_four_small_pages_with_one_acquire() -> None:
    text = run_cuda.ptx(fold_together, (view(shift=9), np.zeros(4, np.int64)))
    statements = [line.strip() for line in text[text.index(".visible .entry") :].splitlines()]
    steps = {
        "acquire": "ld.acquire.gpu",
        "data": "ld.relaxed.gpu.global.v2.u64",
        "fence": "fence.acq_rel.gpu",
        "barrier": "bar.warp.sync",
        "look": "ld.relaxed.gpu.global.u64",
    }
    activemask_at = next(k for k, line in enumerate(statements) if "activemask" in line)
    executed = [name for line in statements[activemask_at:] for name, text in steps.items() if text in line]
    assert executed[:9] == ["acquire", "barrier", *4 * ["data"], "fence", "barrier", "look"]


@gpu.function
def following(item):
    return item + 1


@ww.kernel
def change_together(a, out):
    gpu.map_block(following, a, a, out[1], out[2])


@pytest.mark.quick("9")
@pytest.mark.parametrize("shift", [9, 12])
def test_a_warp_stores_four_rows_between_two_fences(shift: int) -> None:
    text = run_cuda.ptx(change_together, (view(shift=shift), np.zeros(4, np.int64)))
    statements = [line.strip() for line in text[text.index(".visible .entry") :].splitlines()]
    steps = {
        "pin": "atom.acquire.gpu.global.cas",
        "barrier": "bar.warp.sync",
        "fence": "fence.acq_rel.gpu",
        "store": "st.relaxed.gpu.global.v2.u64",
        "unpin": "atom.relaxed.gpu.global.add",
    }
    pinned = next(k for k, line in enumerate(statements) if steps["pin"] in line)
    executed = [name for line in statements[pinned:] for name, text in steps.items() if text in line]
    assert executed[:10] == ["pin", "barrier", "fence", *4 * ["store"], "barrier", "fence", "unpin"]


def test_kernels_with_spans_may_use_more_registers() -> None:
    @ww.kernel
    def reads(a, out):
        out[0] = a[0]

    assert [run_cuda.max_registers(k) for k in (fold_all, by_tables, fold_together, reads)] == [64, 64, 64, 32]
    assert run_cuda.max_registers(ww.kernel(fold_all.function, max_registers=40)) == 40


@pytest.mark.quick("table1")
@pytest.mark.parametrize("table", [np.zeros(4, np.int64), view(cached=False)])
def test_arrays_among_the_arguments_compile(table: object) -> None:
    assert run_cuda.ptx(by_tables, (view(), table, np.zeros(4), np.zeros(4, np.int64)))


@pytest.mark.quick("numpy")
@pytest.mark.parametrize("a", [view("<f4", 2, cached=False), np.zeros((3, 4), np.float32)], ids=["storage", "numpy"])
def test_spans_in_memory_load_flat(a: object) -> None:
    text = run_cuda.ptx(rows, (a, np.zeros(4, np.int64)))
    text = text[text.index(".visible .entry") :]
    assert re.search("ld.global[.](f32|u32|b32)", text), "weak, of global memory, a whole item"
    # (an unrolled loop divides, unsigned, to count its rounds: once)
    assert not re.search("div[.]s64|rem[.]|ld[.](f32|u32|b32|u8)|ld.global.u8", text)
