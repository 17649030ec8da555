"""Workloads: results compared with NumPy on the CPU and in the interpreter, launches and their block form."""

import numpy as np
import pytest

import warpwell as ww
from lab.sched.workloads import WORKLOADS, Step, make
from warpwell import errors, gpu
from warpwell.scheduler.extend import Kind
from warpwell.targets.blocks.launch import BlockLaunch


@pytest.mark.quick("gemm", "spmv")
@pytest.mark.parametrize("name", WORKLOADS)
def test_results_are_numpys(name):
    app = make(name)
    app.run()
    app.check()
    again = make(name)
    again.run()
    for key, values in app.results().items():
        assert np.array_equal(values, again.results()[key])  # bit for bit


@pytest.mark.parametrize("name", ["gemm", "atax", "conv2d", "spmv", "black_scholes"])
def test_the_interpreter_agrees(name):
    app = make(name, {"spmv": 120, "black_scholes": 60}.get(name, 12), "interp")
    app.run()
    app.check()


@pytest.mark.parametrize("name", ["gemm", "conv2d", "triad", "spmv"])
def test_a_wrong_result_is_found(name):
    app = make(name)
    app.run()
    first = next(iter(app.built.outputs.values()))
    first.flat[first.size // 2] += 1
    with pytest.raises(AssertionError, match=name):
        app.check()


def test_names_classes_and_sizes():
    kernels = [name for w in WORKLOADS.values() for name in w.kinds]
    assert len(kernels) == len(set(kernels))
    assert {kind for w in WORKLOADS.values() for kind in w.kinds.values()} == set(Kind)
    for workload in WORKLOADS.values():
        app = make(workload.name)
        assert {step.name for step in app} == set(workload.kinds)
        assert app.memory > 0


def test_steps_are_launch_arguments_and_size():
    shapes = {(20, 32): 4, (20,): 3, (1, 20): 4}
    for launch, arguments, size in make("atax", 20):
        assert len(arguments) == shapes[launch.shape] and size == {"n": 20}


@pytest.mark.parametrize(("name", "size"), [("sorting", 4), ("gemm", 0), ("gemm", -3)])
def test_unknown_workloads_and_sizes_are_refused(name, size):
    with pytest.raises(errors.ArgumentError):
        make(name, size)


@ww.kernel
def line(x):
    x[gpu.grid(1)] = 1


@ww.kernel
def plane(x):
    i, j = gpu.grid(2)
    x[i, j] = 1


@ww.kernel
def space(x):
    i, j, k = gpu.grid(3)
    x[i, j, k] = 1


@pytest.mark.parametrize("shape", [(1,), (256,), (257,), (100, 70), (3, 4, 70)])
def test_blocks_of_a_shape(shape):
    launch = (line, plane, space)[len(shape) - 1][shape]
    step = Step(launch, (np.zeros(shape),), {})
    assert step.blocks("cpu") == BlockLaunch(launch, step.arguments, device="cpu").blocks
    inner = {1: 256, 2: 32, 3: 32}[len(shape)]
    assert step.blocks() >= -(-shape[-1] // inner)


def test_a_seed_decides_the_input():
    first, same, different = (make("spmv", 100, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first[0].arguments[2], same[0].arguments[2])
    assert not np.array_equal(first[0].arguments[0], different[0].arguments[0])


def test_every_workload_can_be_cut_into_blocks():
    for name in WORKLOADS:
        for step in make(name):
            assert BlockLaunch(step.launch, step.arguments, device="cpu").preemptible, step.name
