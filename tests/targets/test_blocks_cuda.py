"""Launches cut into blocks: PTX of their forms without a GPU; on one, each block once whatever stops them."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from tests.harness.blocks import OnGpu, plane, reverse

import warpwell as ww
from warpwell import errors, gpu
from warpwell.targets.blocks import control as at
from warpwell.targets.blocks.control import DONE, STOP, fresh
from warpwell.targets.blocks.launch import BlockLaunch
from warpwell.targets.primitives import barrier, block_index, thread_index

ptx = pytest.mark.ptx


@gpu.function
def global_index():
    return gpu.grid(1)


@ww.kernel
def count_and_spin(ran, rounds):
    i = global_index()
    value = 1.0
    for _ in range(rounds):
        value = value * 1.0000001 + 1e-9
    ran[i] += 1.0 + 0.0 * value


@ww.kernel
def reads_index_late(ran, out):
    """Asks for its place when its lanes have parted."""
    i = gpu.grid(1)
    steps = (i * 7919) % 61
    value = 0
    for k in range(steps):
        value += k & 3
    ran[i] += 1
    out[gpu.grid(1)] += value + i


@ww.kernel(block=64)
def returns_before_barrier(x, n):
    if thread_index() >= n:
        return
    barrier()
    x[block_index()] = 1


CASES: dict[str, Any] = {
    "grid": (count_and_spin[1000], (np.zeros(1000), 3)),
    "plane": (plane[30, 50], (np.zeros((30, 50)),)),
    "late": (reads_index_late[5000], (np.zeros(5000), np.zeros(5000))),
    "block": (reverse[5], (np.zeros(1280), np.zeros(1280))),
}


@ptx
@pytest.mark.parametrize("case", CASES)
def test_ptx(case: str) -> None:
    from warpwell.targets.blocks.cuda import ptx as text_of

    launch, arguments = CASES[case]
    text = text_of(BlockLaunch(launch, arguments, "cuda"), arguments)
    assert ".shared" in text and "warpwell_virtual_block" in text
    # The kernel reads its index from the words that the claim has written, not from the hardware.
    body = text[text.index(".entry") :]
    assert body.count("%ctaid") == 1, "only the worker's own number"
    assert "atom.relaxed.gpu.global.add.u64" in body


@ww.kernel
def fused(y, x, a, b):
    i = gpu.grid(1)
    y[i] = a * b + x[i]


@ptx
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_form_rounds_otherwise(dtype: Any) -> None:
    from warpwell.targets.blocks.cuda import ptx as text_of
    from warpwell.targets.compiler.run_cuda import ptx as plain_of

    x = np.zeros(8, dtype)
    arguments = (x, x, dtype(3), dtype(5))
    blocks = BlockLaunch(fused[8], arguments, "cuda")
    bits = 8 * x.itemsize
    for text in (plain_of(fused, arguments), text_of(blocks, arguments)):
        body = text[text.index(".entry") :]
        # the compiler may duplicate the loop over blocks
        assert f"fma.rn.f{bits}" in body and f"mul.f{bits}" not in body and f"add.f{bits}" not in body


@ww.kernel
def halves(a, b, factor):
    i = gpu.grid(1)
    n = a.size >> 1
    a[i] = factor * b[i] + b[i + n]
    a[i + n] = factor * b[i + n]


@ptx
def test_no_form_looks_at_what_is_known_of_indices() -> None:
    from warpwell.targets.blocks.cuda import ptx as text_of
    from warpwell.targets.compiler.run_cuda import ptx as plain_of

    arguments = (np.zeros(8), np.zeros(8), 3.0)
    blocks = BlockLaunch(halves[4], arguments, "cuda")
    for text in (plain_of(halves, arguments), text_of(blocks, arguments)):
        body = text[text.index(".entry") :]
        # Neither a sign test of an index computed from an array's length, nor a read of the worker's recorded block.
        assert not re.search(r"shr\.s64 \t?%rd\d+, %rd\d+, 63;", body) and "ld.shared.u32" not in body


@ptx
def test_a_kernel_that_asks_the_hardware_runs_whole() -> None:
    from numba import cuda

    @ww.kernel
    def asks(x):
        x[cuda.blockIdx.x] = 1

    blocks = BlockLaunch(asks[5], (np.zeros(5),), "cuda")
    assert not blocks.preemptible
    assert isinstance(blocks.reason, errors.TransformError)
    assert blocks.reason.construct == "cuda.blockIdx" and blocks.reason.line


@ptx
def test_a_return_before_a_barrier_has_a_kernel_run_whole() -> None:
    blocks = BlockLaunch(returns_before_barrier[5], (np.zeros(5), 3), "cuda")
    assert not blocks.preemptible
    assert blocks.reason is not None and blocks.reason.construct == "return before barrier"
    assert BlockLaunch(reverse[5], CASES["block"][1], "cuda").preemptible


@ptx
def test_registers_that_keep_the_plain_kernel_resident() -> None:
    from warpwell.targets.blocks.cuda import registers_for

    assert registers_for(15, 256) == 32 and registers_for(32, 256) == 32
    assert registers_for(40, 256) == 40 and registers_for(46, 256) == 48 and registers_for(54, 256) == 64
    assert registers_for(255, 1024) == 64 and registers_for(20, 64) == 32


class KernelOnGpu(OnGpu):
    def __init__(self, launch: Any, arguments: Any) -> None:
        from warpwell.targets.blocks.cuda import Forms

        super().__init__()
        self.blocks = BlockLaunch(launch, arguments, "cuda")
        self.blocks.begin()
        self.forms = Forms(self.blocks)
        self.record = self.blocks.new_control()
        self.control = self.record.address


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_forms_do_what_the_kernel_does(case: str, chunk: int) -> None:
    launch, arguments = CASES[case]
    rng = np.random.default_rng(0)
    inputs = [rng.random(a.shape) if isinstance(a, np.ndarray) else a for a in arguments]
    results = []
    for form in ("plain", "workers"):
        outputs = [a.copy() if isinstance(a, np.ndarray) else a for a in inputs]
        on = KernelOnGpu(launch, outputs)
        if form == "plain":
            on.forms.start_plain(on.stream)
        else:
            on.forms.start(on.control, 0, 2, on.stream, chunk)
        on.wait(on.gpu.mark(on.stream))
        if form == "workers":
            assert on.control_words()[DONE] == on.blocks.blocks
        on.blocks.end()
        results.append([a.tobytes() for a in outputs if isinstance(a, np.ndarray)])
    assert results[0] == results[1]


@ptx
def test_a_claim_looks_at_one_sector_and_tells_the_host_little() -> None:
    from warpwell.targets.blocks.cuda import ptx as text_of

    assert at.STOP % 4 == 0 and {at.STOP, at.TARGET, at.MIRROR} == set(range(at.STOP, at.STOP + 3))
    assert at.CURSOR // 4 > at.MIRROR // 4, "workers change words in another sector"
    launch, arguments = CASES["grid"]
    body = text_of(BlockLaunch(launch, arguments, "cuda"), arguments)
    body = body[body.index(".entry") :]
    assert body.count("ld.relaxed.gpu.global.v2.u64") == 1 and body.count("ld.relaxed.gpu.global.u64") == 1
    # Four atomic additions: begun, done, claim, left. One store: progress.
    assert body.count("atom.relaxed.gpu.global.add.u64") == 4 and body.count("st.relaxed.sys.global.u64") == 1
    assert body.count("fence.acq_rel.sys") == 0 and body.count("bar.sync") == 2


@pytest.mark.parametrize("launches", [1, 4])
def test_the_host_is_told_of_progress(launches: int) -> None:
    from warpwell.targets.arrays import to_host, zeros
    from warpwell.targets.memory import memory_for

    count = 20_000
    ran = zeros("cuda", 256 * count, np.float32)
    on = KernelOnGpu(count_and_spin[256 * count], (ran, 3000))
    pinned = memory_for("cuda").allocate_shared(at.PINNED_BYTES)
    progress = pinned.words
    initial = fresh(mirror=at.mirror_word(pinned.address, count))
    resident = on.forms.resources("workers")["resident"] // 2
    most_steps = 0
    for _ in range(3):
        progress[:] = 0
        on.gpu.write_words(on.stream, on.control, initial)
        for k in range(launches):  # each launch is re-issued by the next one, except the last one
            on.forms.start(on.control, k * resident, resident, on.stream)
            if k:
                on.gpu.set_word(on.control + 8 * STOP, k * resident)
        event = on.gpu.mark(on.stream)
        limit, last, steps = time.monotonic() + 30, 0, 0
        while not on.gpu.done(event):
            assert time.monotonic() < limit
            now = int(progress[0])
            steps, last = steps + (now > last), max(now, last)
        last = max(last, int(progress[0]))
        found = on.control_words()
        assert found[DONE] == count and found[at.BEGUN] == found[at.LEFT] == launches * resident
        assert 0 < last <= count and last % 256 == 0
        most_steps = max(most_steps, steps)
    # The host samples the progress and may be descheduled for a whole launch: one of three launches shows it.
    assert most_steps > 3
    assert (to_host(ran) == 3).all()
    on.blocks.end()


@pytest.mark.parametrize("seed", range(3))
def test_each_block_runs_once_through_drains_and_shrinks(seed: int) -> None:
    from warpwell.targets.arrays import to_host, zeros

    count = 400_000
    ran = zeros("cuda", 256 * count, np.float32)
    on = KernelOnGpu(count_and_spin[256 * count], (ran, 6000))
    stops = len(list(on.drains(seed, count)))
    assert stops > 1  # other programs use this GPU: a flag may be delayed by a time slice
    assert (to_host(ran) == 1).all()
    on.blocks.end()
