"""PTX of the kernels of `ww.gather`."""

from __future__ import annotations

import inspect
import re

import pytest

import warpwell as ww
from warpwell.array.gather import kernels
from warpwell.targets.compiler import run_cuda

pytestmark = pytest.mark.ptx


def lines_of(kernel: ww.Kernel) -> list[str]:
    text = run_cuda.ptx(kernel, (0,) * len(inspect.signature(kernel.function).parameters))
    entry = text[text.index(".visible .entry") :]
    return [line.strip() for line in entry[: entry.index("\n}")].splitlines()]


@pytest.mark.parametrize("kernel", [kernels.copy_from_memory, kernels.copy_cached], ids=lambda k: k.__name__)
def test_rows_are_copied_by_wide_relaxed_loads_four_in_flight(kernel: ww.Kernel) -> None:
    wide = [line[:2] for line in lines_of(kernel) if re.match(r"(ld|st)[.]relaxed[.]gpu[.]global[.]v2[.]u64", line)]
    assert "ldldldldstststst" in "".join(wide), "all four loads are issued before the first store"


def test_rows_of_memory_are_copied_without_order() -> None:
    assert not any(re.match("call|fence|atom|ld.acquire|div|rem", line) for line in lines_of(kernels.copy_from_memory))


def test_a_validated_read_acquires_the_word_and_executes_a_fence_behind_the_copy() -> None:
    instructions = lines_of(kernels.copy_cached)
    text = "\n".join(instructions)
    acquire, copy, fence = (text.index(word) for word in ("ld.acquire.gpu", "v2.u64", "fence.acq_rel.gpu"))
    assert acquire < copy < fence < text.index("ld.relaxed.gpu.global.u64", fence)
    assert sum(line.startswith("call") for line in instructions) == 1, (
        "only a page that is not in the cache takes a call"
    )
