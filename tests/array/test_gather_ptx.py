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
def test_units_are_copied_by_wide_relaxed_loads_before_the_first_store(kernel: ww.Kernel) -> None:
    wide = [line[:2] for line in lines_of(kernel) if re.match(r"(ld|st)[.]relaxed[.]gpu[.]global[.]v2[.]u64", line)]
    assert wide == ["ld", "ld", "st", "st"]


def test_rows_of_memory_are_copied_without_order() -> None:
    assert not any(re.match("call|fence|atom|ld.acquire", line) for line in lines_of(kernels.copy_from_memory))


@pytest.mark.parametrize("kernel", [kernels.copy_cached, kernels.copy_loaded], ids=lambda k: k.__name__)
def test_a_validated_read_has_one_fence_between_its_loads_and_the_page_words(kernel: ww.Kernel) -> None:
    statements = lines_of(kernel)
    fences = [k for k, line in enumerate(statements) if line.startswith("fence")]
    assert len(fences) == 1 and statements[fences[0]].startswith("fence.acq_rel.gpu")
    before, after = "\n".join(statements[: fences[0]]), "\n".join(statements[fences[0] :])
    assert before.count("ld.acquire.gpu") == 2 and "call" not in before and "v2.u64" in before
    assert before.rindex("ld.acquire.gpu") < before.index("ld.relaxed.gpu")
    assert after.index("ld.relaxed.gpu.global.u64") < after.index("v2.u64")


def test_only_a_missing_page_takes_a_call() -> None:
    assert not any(line.startswith("call") for line in lines_of(kernels.copy_cached))
