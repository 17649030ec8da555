"""Kernels of key-value commands and stores compile to PTX without a GPU, and order what they read and write."""

import re

import numpy as np
import pytest
from tests.harness import kv_device as load
from tests.harness.key_value_load import keep_all_busy, retrieve_checked

from warpwell.kv import Schema
from warpwell.kv.device import kernel_view, requests
from warpwell.kv.device.device_cache import look_up
from warpwell.kv.device.kernel_view import KernelStore
from warpwell.targets import kernel
from warpwell.targets.compiler import run_cuda
from warpwell.targets.compiler.hooks import intrinsics_for
from warpwell.targets.device import linked_functions
from warpwell.targets.primitives import activemask, element_address, grid, lane_id

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
    code = statements(text)
    found = 0
    for k, line in enumerate(code):
        m = re.match(r"ld\.relaxed\.sys\.global\.u64\s+(%\w+), ", line)
        # The load of dw0 and dw1 is the only load from shared memory whose result is stored in device memory.
        if m and any(
            re.match(rf"st\.relaxed\.gpu\.global\.u64 \[%\w+\], {m[1]};", following) for following in code[k:]
        ):
            assert {code[j].split(".global")[0] for j in loads_before(code, k)} == {"ld.acquire.sys"}
            found += 1
    assert found >= 1


def loads_before(code: list[str], k: int) -> set[int]:
    """Return the last loads of system scope on each way to line `k`; the line "{" for a way without one."""
    jumps: dict[str, list[int]] = {}
    for j, line in enumerate(code):
        if m := re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line):
            jumps.setdefault(m[1], []).append(j)
    found, visited, pending = set(), set(), [k - 1]
    while pending:
        j = pending.pop()
        while j not in visited:
            visited.add(j)
            line = code[j] if j >= 0 else "{"
            if re.match(r"ld\.\w+\.sys", line) or line == "{":
                found.add(j)
                break
            if line.endswith(":"):
                pending += jumps.get(line[:-1], [])
            j -= 1
            if j >= 0 and re.match(r"(bra|ret|exit|trap)\b", code[j]):
                break  # the previous instruction does not fall through
    return found


def test_the_search_for_loads_follows_branches() -> None:
    code = [
        "{",
        "ld.acquire.sys.global.u64 a;",
        "@%p1 bra $L2;",
        "ret;",
        "$L1:",
        "ld.relaxed.sys.global.u64 b;",
        "bra.uni $L3;",
        "$L2:",
        "add;",
        "$L3:",
        "here",
        "bra $L1;",
    ]
    assert loads_before(code, 8) == {1} and loads_before(code, 10) == {1, 5} and loads_before(code, 1) == {0}


# -- stores ------------------------------------------------------------------------------------------------------

STORE = KernelStore(None, {"core": 0})
INT64S = np.zeros(4, np.int64)
ROWS = np.zeros((4, 16), np.uint8)


def linked(name: str) -> str:
    intrinsics_for("cuda")
    from warpwell.targets.compiler.cuda_lowerings import CudaIntrinsics

    function = next(f for f in linked_functions() if f is getattr(kernel_view, name))
    with run_cuda.without_gpu((9, 0)):
        return CudaIntrinsics.ptx_of(function, (9, 0))


def statements(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def before(code: list[str], k: int, starts: tuple[str, ...]) -> int:
    return next(i for i in range(k - 1, -1, -1) if code[i].startswith(starts))


def after(code: list[str], k: int, starts: tuple[str, ...]) -> int:
    return next(i for i in range(k + 1, len(code)) if code[i].startswith(starts))


@pytest.mark.slow
def test_the_kernel_that_drains_queues_compiles() -> None:
    assert ".visible .entry" in run_cuda.ptx(requests.drain_abandoned, (WORD,) * 3)


@pytest.mark.quick("poll_ticket")
@pytest.mark.parametrize("name", ["retrieve_for_lanes", "submit_ticket", "poll_ticket", "ticket_size", "take_ticket"])
def test_linked_functions_compile(name: str) -> None:
    text = linked(name)
    assert ".visible .func" in text
    if name in ("retrieve_for_lanes", "poll_ticket", "take_ticket"):
        for statement in ("activemask", "vote.sync.ballot", "bar.warp.sync"):
            assert statement in text


@pytest.mark.quick("retrieve_rows-")
@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (load.retrieve_rows, (STORE, INT64S, ROWS, INT64S)),
        (load.part_ways, (STORE, INT64S, ROWS, INT64S)),
        (load.retrieve_long, (STORE, np.zeros((4, 3), np.int64), ROWS, INT64S)),
        (load.exist, (STORE, INT64S, INT64S)),
        (load.hold, (STORE, INT64S, ROWS, INT64S)),
        (load.take_twice, (STORE, INT64S, ROWS, INT64S, INT64S)),
    ],
    ids=lambda k: getattr(k, "__name__", ""),
)
def test_kernels_that_use_a_store_call_and_do_no_more(kernel: object, arguments: tuple) -> None:
    text = run_cuda.ptx(kernel, arguments)
    assert "call" in text
    # only the linked functions access the rings
    assert "ld.acquire.sys" not in text and "st.release.sys" not in text


def test_fields_are_read_in_the_kernel() -> None:
    store = KernelStore(Schema(load.RAGGED), {"core": 0})
    text = run_cuda.ptx(load.reduce_fields, (store, INT64S, ROWS, INT64S, np.zeros((4, 9))))
    assert set(re.findall(r"\.extern \.func .*?(warpwell_\w+)\n", text)) == {
        "warpwell_kv_device_kernel_view_retrieve_for_lanes"
    }
    # rows may begin at any address: no load of a field is wider than a byte
    assert "ld.global.u8" in text and not re.search(r"ld\.global\.(u16|u32|f32|s16|b32)", text)


def test_a_filler_fences_between_the_barrier_and_the_first_byte() -> None:
    """Each lane learns of the odd version at the barrier, and then fences: the bytes that it writes come later."""
    code = statements(linked("retrieve_for_lanes"))
    fills = 0
    for k, line in enumerate(code):
        if not line.startswith("fence.acq_rel.gpu"):
            continue
        first = after(code, k, ("st.relaxed", "st.release", "atom.", "bar.warp.sync"))
        if "v2" not in code[first]:
            continue  # the fence before a thread takes turns in a queue
        assert code[before(code, k, ("bar.warp.sync", "st.", "atom."))].startswith("bar.warp.sync")
        fills += 1
    assert fills == 1


@kernel
def look_up_rows(cache, keys, rows, sizes):
    """Copy values out of a device cache."""
    i = grid(1)
    to = element_address(rows[i], 0)
    sizes[i] = look_up(cache, True, keys[i], 0, 8, to, rows[i].size, activemask(), lane_id())


def test_a_reader_looks_at_the_version_once_more_behind_a_fence() -> None:
    code = statements(run_cuda.ptx(look_up_rows, (WORD, INT64S, ROWS, INT64S)))
    copies = [k for k, line in enumerate(code) if line.startswith("ld.relaxed.sys.global.v2")]
    assert copies
    # Before the copies, one lane acquires the version, then a barrier synchronizes the remaining lanes.
    barrier = before(code, copies[0], ("bar.warp.sync", "ld.acquire.gpu"))
    assert code[barrier].startswith("bar.warp.sync")
    assert any(line.startswith("ld.acquire.gpu") for line in code[:barrier])
    # After the copies, each lane executes a fence, then a barrier, then the version is read again.
    fence = after(code, copies[-1], ("fence.acq_rel.gpu",))
    second = after(code, fence, ("bar.warp.sync", "ld.acquire.gpu"))
    assert code[second].startswith("bar.warp.sync")
    assert after(code, second, ("ld.acquire.gpu",)) < after(code, second, ("st.", "atom."))
