"""Launches cut into blocks on the CPU: each block once whatever stops the workers, and block kernels."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types
from typing import Any

import numpy as np
import pytest
from tests.harness.blocks import plane, reverse
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu
from warpwell.targets.blocks import control as at
from warpwell.targets.blocks.control import BEGUN, CURSOR, DONE, LEFT, NEVER, STOP, TARGET
from warpwell.targets.blocks.launch import BlockLaunch
from warpwell.targets.compiler.virtual import returns_early, virtual_copy
from warpwell.targets.memory import memory_for
from warpwell.targets.native import native
from warpwell.targets.primitives import (
    barrier,
    own_launch_flag,
    virtual_grid,
)


@gpu.function
def global_index():
    return gpu.grid(1)


@ww.kernel
def add(x, n):
    i = global_index()
    if i >= n:
        return
    x[i] += 2.5 * i


def work(blocks: BlockLaunch, control: Any, workers: int) -> None:
    blocks.prepare()  # compiling may take longer than the bound below
    run_threads(blocks.work, [(control.address, k) for k in range(workers)])


@pytest.mark.parametrize("launch", [add[10_000], plane[100, 70]])
def test_workers_do_what_the_kernel_does(launch: Any) -> None:
    shape = launch.shape
    blockwise, expected = np.zeros(shape), np.zeros(shape)
    extra = (9_990,) if len(shape) == 1 else ()
    blocks = BlockLaunch(launch, (blockwise, *extra), "cpu")
    blocks.begin()
    control = blocks.new_control()
    work(blocks, control, 3)
    assert control.words[DONE] == blocks.blocks and control.words[BEGUN] == control.words[LEFT] == 3
    blocks.end()
    launch(expected, *extra, device="cpu")
    assert blockwise.tobytes() == expected.tobytes() and blockwise.any()


def test_a_worker_at_the_target_and_all_at_a_stop_leave() -> None:
    x = np.zeros(10_000)
    blocks = BlockLaunch(add[10_000], (x, 10_000), "cpu")
    blocks.begin()
    control = blocks.new_control()
    state = control.words
    state[TARGET] = 2
    blocks.work(control.address, 2)
    assert state[CURSOR] == 0 and state[LEFT] == 1
    state[STOP] = 1
    blocks.work(control.address, 0)
    assert state[CURSOR] == 0 and state[LEFT] == 2
    state[STOP] = NEVER
    blocks.work(control.address, 0)
    assert state[CURSOR] == 0 and not x.any()
    state[STOP] = 0
    state[CURSOR] = state[DONE] = blocks.blocks - 1  # as if the other blocks had been drained
    blocks.work(control.address, 1)
    assert state[DONE] == blocks.blocks and np.flatnonzero(x)[0] == 256 * (blocks.blocks - 1)
    blocks.end()


def test_the_host_is_told_of_progress() -> None:
    x = np.zeros(200_000)
    blocks = BlockLaunch(add[x.size], (x, x.size), "cpu")
    blocks.begin()
    control = blocks.new_control()
    pinned = memory_for("cpu").allocate_shared(at.PINNED_BYTES)
    state, progress = control.words, pinned.words
    state[:] = at.fresh(mirror=at.mirror_word(pinned.address, blocks.blocks))
    assert state[at.MIRROR] == pinned.address + 3, "782 blocks: every eighth"
    state[STOP] = 1
    blocks.work(control.address, 0)
    assert not progress.any()
    blocks.work(control.address, 1)
    assert state[DONE] == blocks.blocks and state[BEGUN] == state[LEFT] == 2
    assert progress[0] == blocks.blocks // 8 * 8 and np.count_nonzero(progress) == 1
    progress[:] = 0
    state[:] = at.fresh()
    blocks.work(control.address, 0)
    assert state[DONE] == blocks.blocks and not progress.any(), "no progress is reported without its address"
    blocks.end()


@pytest.mark.parametrize("blocks", [1, 63, 64, 127, 128, 1 << 20, (1 << 31) - 1])
def test_progress_is_told_some_hundred_times_at_most(blocks: int) -> None:
    shift = at.mirror_word(1 << 40, blocks) - (1 << 40)
    assert 0 <= shift < 64 and min(blocks, 64) <= blocks >> shift <= 128
    with pytest.raises(errors.ArgumentError, match="64-byte aligned"):
        at.mirror_word((1 << 40) + 8, blocks)


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_block_kernels(device: str) -> None:
    x, y = np.random.default_rng(0).random(1280), np.zeros(1280)
    reverse[5](x, y, device=device)
    assert (y.reshape(5, 256) == x.reshape(5, 256)[:, ::-1]).all()
    if device == "cpu":
        z = np.zeros(1280)
        blocks = BlockLaunch(reverse[5], (x, z), "cpu")
        blocks.begin()
        work(blocks, blocks.new_control(), 2)
        assert blocks.blocks == 5 and (y == z).all()
        blocks.end()


def test_bad_launches() -> None:
    x = np.zeros(4)
    with pytest.raises(errors.ArgumentError, match="no blocks"):
        BlockLaunch(add[0], (x, 4), "cpu")
    with pytest.raises(errors.ArgumentError, match="interp"):
        BlockLaunch(add[4], (x, 4), "interp")
    with pytest.raises(errors.ArgumentError, match="multiple of 32"):
        ww.kernel(block=100)(global_index)
    blocks = BlockLaunch(add[4], (x, 4), "cpu")
    with pytest.raises(errors.ArgumentError, match="begin"):
        blocks.values  # noqa: B018


def test_virtual_copies() -> None:
    assert virtual_copy(global_index) is not global_index

    def knows_nothing(x):
        return x + 1

    assert virtual_copy(knows_nothing) is knows_nothing
    copy = virtual_copy(add.function)
    assert copy.__code__ is add.function.__code__ and copy.__globals__["global_index"] is not global_index
    assert copy.__globals__["ww"] is ww  # globals that the function does not use are unchanged
    assert virtual_copy(plane.function).__globals__["gpu"].grid is not gpu.grid


def test_names_that_a_module_imports_when_they_are_used() -> None:
    """As `warpwell` does: whether another kernel said `gpu.grid` before must not matter."""
    lazy_module = types.ModuleType("late")

    def import_late(name: str) -> Any:
        if name != "grid":
            raise AttributeError(name)
        return gpu.grid

    vars(lazy_module).update(__getattr__=import_late, __dir__=lambda: ["grid", "never_said"])

    def where():
        return lazy_module.grid(1)

    copy = virtual_copy(where)
    assert copy is not where and copy.__closure__[0].cell_contents.grid is virtual_grid
    assert where.__closure__[0].cell_contents is lazy_module


def test_helpers_that_are_found_through_modules() -> None:
    inner, outer = types.ModuleType("inner"), types.ModuleType("outer")
    vars(inner).update(global_index=global_index, outer=outer)  # modules may name each other
    vars(outer).update(inner=inner, ww=ww)

    def near():
        return inner.global_index()

    def far():
        return outer.inner.global_index() + outer.ww.targets.primitives.grid(1)

    for function in (near, far):
        copy = virtual_copy(function)
        assert copy is not function
    found = copy.__closure__[0].cell_contents
    assert found.inner.global_index is not global_index and found.inner.global_index.__code__ is global_index.__code__
    assert found.ww.targets.primitives.grid is virtual_grid
    assert outer.inner is inner and inner.global_index is global_index


def test_the_hardware_s_grid_by_any_name() -> None:
    cuda = pytest.importorskip("numba.cuda")
    position = cuda.grid
    import numba

    def imported():
        return position(1)

    def qualified():
        return numba.cuda.blockIdx.x

    for function, name in ((imported, "cuda.grid"), (qualified, "cuda.blockIdx")):
        with pytest.raises(errors.TransformError, match=name) as caught:
            virtual_copy(function)
        assert caught.value.construct == name and caught.value.line == function.__code__.co_firstlineno + 1


def test_returns_before_a_barrier() -> None:
    def returns_late(x):
        barrier()
        if x:
            return
        x[0] = 1

    def early(x):
        if x:
            return
        barrier()

    def in_a_loop(x):
        for _ in range(3):
            barrier()
            if x:
                return

    def in_a_while(x):
        while x[0] < 3:
            barrier()
            if x[1]:
                return

    def after_a_loop(x):
        for _ in range(3):
            barrier()
            if x[0]:
                break
        if x[1]:
            return
        x[2] = 1

    meet = barrier

    def helper(x):
        meet()
        x[0] = 1

    def in_a_helper(x):
        if x:
            return
        helper(x)

    def only_a_helper(x):
        helper(x)

    assert returns_early(in_a_helper) is not None and returns_early(only_a_helper) is None
    assert returns_early(returns_late) is None and returns_early(reverse.function) is None
    assert returns_early(early) == early.__code__.co_firstlineno + 2
    assert returns_early(in_a_loop) == in_a_loop.__code__.co_firstlineno + 4
    assert returns_early(in_a_while) == in_a_while.__code__.co_firstlineno + 4
    assert returns_early(after_a_loop) is None


def test_nothing_is_copied_back_into_what_is_read_only() -> None:
    class GpuArray:
        """A GPU's array, as far as an end is concerned."""

        def copy_to_host(self, array: np.ndarray[Any, Any], stream: Any = 0) -> None:
            array[:] = 7

    out, only_read = np.zeros(4), np.zeros(4)
    only_read.flags.writeable = False
    launch = BlockLaunch(add[4], (out, 4), "cpu")
    launch._copied = [(only_read, GpuArray()), (out, GpuArray())]
    launch.end()
    assert (out == 7).all() and (only_read == 0).all()


@ww.kernel
def spin(x):
    while x[0] == 0:
        if gpu.failed():
            x[1] += 1
            return


def test_an_abort_ends_loops_that_ask_of_this_launch_alone() -> None:
    xs = [np.zeros(2, np.int64), np.zeros(2, np.int64)]
    runs = [BlockLaunch(spin[1], (x,), "cpu") for x in xs]
    for blocks in runs:
        blocks.begin()
        blocks.prepare()
    controls = [blocks.new_control() for blocks in runs]
    threads = [
        threading.Thread(target=blocks.work, args=(control.address, 0))
        for blocks, control in zip(runs, controls, strict=True)
    ]
    for thread in threads:
        thread.start()
    runs[0].abort()
    threads[0].join(HANG_SECONDS)
    assert not threads[0].is_alive()
    assert threads[1].is_alive()
    xs[1][0] = 1
    threads[1].join(HANG_SECONDS)
    for blocks in runs:
        blocks.end()
    assert [x.tolist() for x in xs] == [[0, 1], [1, 0]]


@native
def flag_of_this_thread(a, b, c, d, e, f):
    return own_launch_flag()


@ww.kernel
def refuses(x):
    if x[0] == 0:
        raise ValueError("an empty item")


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_worked_flags_no_launch_afterwards(fails: bool) -> None:
    """A file that was cut, read by this thread later, stored to a context that had been freed: a segmentation fault."""
    x = np.zeros(100)
    blocks = BlockLaunch(refuses[1] if fails else add[100], (x,) if fails else (x, 100), "cpu")
    blocks.begin()
    control = blocks.new_control()
    control.words[TARGET] = 1
    with pytest.raises(ValueError, match="empty") if fails else contextlib.nullcontext():
        blocks.work(control.address, 0)
    poll = ctypes.CFUNCTYPE(ctypes.c_int64, *6 * [ctypes.c_int64])(flag_of_this_thread.address)
    assert poll(0, 0, 0, 0, 0, 0) == 0
