"""Instruction counts of compiled kernels: sizes, shapes and data; a GPU is not needed."""

import numpy as np
import pytest

import warpwell as ww
from warpwell.scheduler.predict.counting import count
from warpwell.study.workloads import make

pytestmark = pytest.mark.ptx


@ww.kernel
def add_up(a, out, rounds):
    i = ww.grid(1)
    total = 0
    for k in range(rounds):
        total += a[i + k]
    out[i] = total


@ww.kernel
def touch(out):
    i, j = ww.grid(2)
    out[i, j] = i + j


def of(rounds, n=512):
    a, out = np.zeros(n + rounds, np.int64), np.zeros(n, np.int64)
    return count(add_up[n], (a, out, rounds))


def test_a_loop_counts_as_often_as_it_runs():
    few, many = of(400).instructions, of(800).instructions
    more = of(1200).instructions
    assert many - few == pytest.approx(more - many, rel=1e-9)
    assert 2 * 400 * 16 < many - few < 40 * 400 * 16  # 16 warps, some instructions a round
    assert not of(800).assumed and not of(800).cut


def test_warps_outside_of_the_shape_only_look():
    inside, over = of(64, n=256), of(64, n=257)
    assert (inside.warps, over.warps) == (8, 16)
    one = inside.instructions / 8
    assert over.instructions - inside.instructions < 2 * one


@pytest.mark.parametrize("shape", [(8, 32), (9, 33), (100, 70), (1, 1), (300, 5)])
def test_warps_of_two_dimensions(shape):
    counts = count(touch[shape], (np.zeros(shape, np.int64),), warps=1 << 20)
    sampled = count(touch[shape], (np.zeros(shape, np.int64),), warps=24)
    assert counts.warps == -(-shape[0] // 8) * -(-shape[1] // 32) * 8
    assert sampled.warps == counts.warps
    assert sampled.instructions == pytest.approx(counts.instructions, rel=0.02)


@pytest.mark.parametrize("name", ["correlation", "bicg", "fdtd", "bfs", "black_scholes", "nbody"])
def test_workloads_are_counted(name):
    app = make(name)
    for step in app:
        counts = count(step.launch, step.arguments)
        assert counts.instructions > 10 * counts.warps, step.name
        assert sum(counts.mix.values()) == pytest.approx(counts.instructions)
        assert counts.footprint <= app.memory
        assert counts.read > 0 and not counts.cut
        assert not counts.assumed, step.name  # all data is in host memory


def test_a_gemm_needs_a_cube_and_a_triad_reads_two_thirds():
    small, large = (count(step.launch, step.arguments) for n in (128, 256) for step in make("gemm", n))
    assert 7.5 < large.instructions / small.instructions < 8.5
    (step,) = make("triad", 1 << 14)
    counts = count(step.launch, step.arguments)
    assert counts.read == pytest.approx(2 * 4 * (1 << 14)) and counts.written == pytest.approx(4 * (1 << 14))


def test_rows_that_may_not_be_read_are_assumed():
    (step,) = make("spmv", 4096)
    seen, blind = count(step.launch, step.arguments), count(step.launch, step.arguments, data=False)
    assert not seen.assumed and blind.assumed
    pointers = step.arguments[0]
    longest = np.diff(pointers).reshape(-1, 32).max(axis=1).mean()
    # about as many rounds a warp as its longest row has items
    assert 0.7 * longest < seen.instructions / seen.warps / 40 < 1.4 * longest
