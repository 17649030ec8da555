"""CUDA C++ source: its forms compiled without a GPU; on one, equal results in all forms, and preemption."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from tests.harness.blocks import OnGpu

import warpwell as ww
from warpwell import errors, gpu
from warpwell.scheduler.extend import Ended, Job, Placement, Request, Stopped, Task
from warpwell.targets.blocks.control import BEGUN, DONE, LEFT
from warpwell.targets.gpu.nvrtc import headers
from warpwell.targets.source.program import build, ptx

only_compiled = pytest.mark.ptx
with_headers = pytest.mark.skipif(len(headers()) < 2, reason="CUDA's headers (the cuda extra) are not installed")

CODE = r"""
#include <warpwell.cuh>
__device__ float twice(float v) { return gridDim.y * v + v; }

extern "C" __global__ void __launch_bounds__(256) saxpy(const float *__restrict__ x, float *y, float a, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    y[i] += a * x[i];
}

// products of numbers that do not change from block to block: a compiler would like to move them
extern "C" __global__ void products(const float *x, float *y, float a, float b, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i + 1 < n)
        y[i] = a * b + x[i] + ((float)threadIdx.x * 0.3f + x[i + 1]) * x[0] * x[1];
}

extern "C" __global__ void transpose(const float *x, float *y, int rows, int columns)
{
    __shared__ float tile[16][17];
    int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    tile[threadIdx.y][threadIdx.x] = i < rows && j < columns ? twice(x[i * columns + j]) : 0;
    __syncthreads();
    i = blockIdx.y * 16 + threadIdx.x;
    j = blockIdx.x * 16 + threadIdx.y;
    if (i < rows && j < columns)
        y[j * rows + i] += tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__ void volume(unsigned long long *out, unsigned char c)
{
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * 40 + thread] += 1000000ull * blockIdx.z + 10000ull * blockIdx.y + 100 * blockIdx.x + gridDim.z + c;
}

__global__ void rotate_kernel(int *x)
{
    extern __shared__ int place[];
    place[(threadIdx.x + 1) % blockDim.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    x[blockIdx.x * blockDim.x + threadIdx.x] += place[threadIdx.x];
}

// some lanes spin longer than others, and the places are asked for again after that
extern "C" __global__ void count(int *ran, double *out, int rounds)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    double value = 1.0;
    for (int k = 0; k < rounds + threadIdx.x % 7; ++k)
        value = value * 1.0000001 + 1e-9;
    ran[blockIdx.x * blockDim.x + threadIdx.x] += 1;
    out[i] = value;
}

extern "C" __global__ void early(int *ran, int n)
{
    if (threadIdx.x >= n)
        return;
    __syncthreads();
    atomicAdd(&ran[blockIdx.x], 1);
}
"""
PARAMETERS = {
    "saxpy": {"x": "const float32*", "y": "float32*", "a": "float32", "n": "int32"},
    "products": {"x": "const float32*", "y": "float32*", "a": "float32", "b": "float32", "n": "int32"},
    "transpose": {"x": "const float32*", "y": "float32*", "rows": "int32", "columns": "int32"},
    "volume": {"out": "uint64*", "c": "uint8"},
    "rotate_kernel": {"x": "int32*"},
    "count": {"ran": "int32*", "out": "float64*", "rounds": "int32"},
    "early": {"ran": "int32*", "n": "int32"},
}
NAMES = tuple(PARAMETERS)
SOURCES = {name: ww.CudaSource(CODE, name, PARAMETERS[name]) for name in NAMES}
# A thread of `early` may return before a barrier that other threads of its block reach: compile it without the header.
SOURCES["early"] = ww.CudaSource(CODE.replace("#include <warpwell.cuh>", ""), "early", PARAMETERS["early"])
PREEMPTIBLE = tuple(name for name in NAMES if name != "early")


def launch_and_arguments(name: str) -> tuple[Any, list[Any]]:
    """Return a launch and its arguments."""
    rng = np.random.default_rng(1)

    def floats(n: int) -> Any:
        return rng.random(n).astype(np.float32)

    n = 10_001
    arguments: dict[str, tuple[Any, list[Any]]] = {
        "saxpy": ((40, 256), [floats(n), floats(n), 1.7, n]),
        "products": ((40, 256), [floats(n), floats(n), np.float32(1.1), 0.9, np.int64(n)]),
        "transpose": (((7, 9), (16, 16)), [floats(130 * 100), floats(130 * 100), 130, 100]),
        "volume": (((5, 4, 3), (5, 4, 2)), [np.zeros(60 * 40, np.uint64), 200]),
        "rotate_kernel": ((33, 128, 512), [np.arange(33 * 128, dtype=np.int32)]),
        "count": ((50, (64, 2)), [np.zeros(50 * 128, np.int32), np.zeros(50 * 128), 20]),
        "early": ((50, 64), [np.zeros(50, np.int32), 40]),
    }
    configuration, values = arguments[name]
    return SOURCES[name][configuration], values


# -- compiled, not run -----------------------------------------------------------------------------------------------


def entries(text: str) -> dict[str, str]:
    """Return the definitions of kernels by their names."""
    parts = re.split(r"^\.(?:visible|weak) \.entry ", text, flags=re.MULTILINE)[1:]
    return {re.findall(r"\w+", part)[0]: part for part in parts if "{" in part}


@only_compiled
@pytest.mark.parametrize("name", PREEMPTIBLE)
def test_forms_compile(name: str) -> None:
    plain = build(SOURCES[name], "sm_90")
    forms = build(SOURCES[name], "sm_90", 32)
    for built in (plain, forms):
        assert built.cubin[:4] == b"\x7fELF" and len(built.cubin) > 1000
    assert "warpwell" not in plain.ptx
    kernel = entries(plain.ptx)[plain.symbol]
    found = entries(forms.ptx)
    assert set(found) == {forms.symbol}, "no other kernel is left"
    body = found[forms.symbol]
    # the kernel reads its index from shared memory, not from the hardware: a worker asks for its
    # number, and whether it is the first
    assert 1 <= body.count("%ctaid") <= 2 and "%nctaid" not in body
    assert body.count(".param .") == kernel.count(".param .") + 7
    assert re.search(r"\.shared \.align 128 \.b8 \w+\[512\]", forms.ptx)
    assert body.count("ld.relaxed.gpu.global.v2.s64") == body.count("ld.relaxed.gpu.global.s64") == 1, "in one sector"
    assert body.count("st.relaxed.sys.global.s64") == 1
    assert len(re.findall(r"atom\.global\.add\.u64", body)) == 4


@only_compiled
@pytest.mark.parametrize("name", ["products", "saxpy", "count"])
def test_no_form_rounds_otherwise(name: str) -> None:
    """A product that is moved before the loop over blocks is no longer part of a fused multiply-add."""

    def arithmetic(body: str) -> list[int]:
        kinds = (r"fma\.rn", r"mul(?:\.rn)?", r"add(?:\.rn)?")
        return [len(re.findall(rf"\b{kind}\.f(?:32|64)\b", body)) for kind in kinds]

    expected = arithmetic(entries(ptx(SOURCES[name]))[name])
    assert expected[0] > 0
    for body in entries(ptx(SOURCES[name], "forms")).values():
        assert arithmetic(body) == expected


@only_compiled
def test_registers_are_capped() -> None:
    source = ww.CudaSource(CODE, "count", PARAMETERS["count"], options=["--maxrregcount=64"])
    assert ".maxnreg" not in build(source, "sm_90", 40).ptx  # the limit is an option of the compiler, not in the PTX
    assert build(source, "sm_90", 24).cubin != build(source, "sm_90", 64).cubin


@only_compiled
def test_what_the_compiler_says_has_the_lines_of_the_source() -> None:
    code = '#include <warpwell.cuh>\nextern "C" __global__ void k(int *x)\n{\n    x[0] = missing;\n}\n'
    wrong = ww.CudaSource(code, "k", {"x": "int32*"})
    with pytest.raises(errors.ArgumentError, match=r"(?s)'k' does not compile.*k\.cu\(4\).*missing") as caught:
        build(wrong, "sm_90")
    assert not isinstance(caught.value, errors.TransformError)
    with pytest.raises(errors.TransformError, match=r"k\.cu\(4\)"):
        build(wrong, "sm_90", 64)
    with pytest.raises(errors.ArgumentError, match="gpu-architecture"):
        build(SOURCES["saxpy"], "sm_1")


@only_compiled
def test_a_source_whose_workers_do_not_compile() -> None:
    code = '#include <warpwell.cuh>\n__device__ const int warpwell = 3;\nextern "C" __global__ void k(int *x) { }'
    source = ww.CudaSource(code, "k", {"x": "int32*"})
    build(source, "sm_90")
    with pytest.raises(errors.TransformError, match=r"include warpwell\.cuh before all other text") as caught:
        build(source, "sm_90", 64)
    assert caught.value.construct == "source"


@only_compiled
@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"x": "float32*", "a": "float32", "n": "int32"}, "has 5 parameters, but 3 are declared"),
        ({"x": "float32*", "a": "float64", "n": "int32", "h": "bool", "p": "int64"}, "'a'.*4 bytes of type f32"),
        ({"x": "float32*", "a": "int32", "n": "int32", "h": "bool", "p": "int64"}, "'a'.*'int32'.*type f32"),
        ({"x": "float32*", "a": "float32", "n": "float32", "h": "bool", "p": "int64"}, "'n'.*4 bytes of type u32"),
        ({"x": "int32", "a": "float32", "n": "int32", "h": "bool", "p": "int64"}, "'x'.*8 bytes of type u64"),
        ({"x": "float32*", "a": "float32", "n": "int32", "h": "bool", "p": "int64"}, "'p'.*12 bytes"),
    ],
)
def test_declared_parameters_are_those_of_the_source(declared: dict[str, str], message: str) -> None:
    code = "struct point { float x, y, z; };\n"
    code += 'extern "C" __global__ void k(float *__restrict__ x, const float a, unsigned n, bool h, point p) { }'
    with pytest.raises(errors.ArgumentError, match=message):
        build(ww.CudaSource(code, "k", declared), "sm_90")


@pytest.mark.slow
@only_compiled
@with_headers
def test_headers_macros_and_options() -> None:
    code = r"""
    #include "warpwell.cuh"
    #include <cooperative_groups.h>
    #include <cuda_fp16.h>
    namespace cg = cooperative_groups;
    extern "C" __global__ void k(ITEM *x, const __grid_constant__ ITEM by, __half h)
    {
        auto block = cg::this_thread_block();
        block.sync();
        x[block.group_index().x] += by * ITEM(__half2float(__float2half(2.f) * h));
    }
    """
    parameters = {"x": "float64*", "by": "float64", "h": "float16"}
    source = ww.CudaSource(code, "k", parameters, options=["-DITEM=double", "--std=c++17"])
    assert source.preemptible
    ptx(source)
    (body,) = entries(ptx(source, "forms")).values()
    assert body.count("%ctaid") == 1 and ".f64" in body


@pytest.mark.slow
@only_compiled
@with_headers
def test_a_grid_that_synchronizes_compiles_whole() -> None:
    code = "#include <cooperative_groups.h>\n"
    code += 'extern "C" __global__ void k(int *x) { cooperative_groups::this_grid().sync(); x[blockIdx.x] = 1; }'
    source = ww.CudaSource(code, "k", {"x": "int32*"}, cooperative=True)
    assert not source.preemptible
    assert build(source, "sm_90").symbol == "k"


# -- on a GPU --------------------------------------------------------------------------------------------------------


class SourceOnGpu(OnGpu):
    def __init__(self, launch: Any, arguments: list[Any]) -> None:

        super().__init__()
        self.blocks = launch.cut(arguments, "cuda")
        self.blocks.begin()
        self.forms = self.gpu.forms(self.blocks)
        self.forms.prepare()
        self.record = self.blocks.new_control()
        self.control = self.record.address


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_forms_do_what_the_kernel_does(name: str, chunk: int) -> None:
    launch, arguments = launch_and_arguments(name)
    results = {}
    for form in ("plain", "workers"):
        outputs = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        on = SourceOnGpu(launch, outputs)
        if form == "workers" and not on.blocks.preemptible:
            continue
        if form == "plain":
            on.forms.start_plain(on.stream)
        else:
            on.forms.start(on.control, 0, 2, on.stream, chunk)
        on.wait(on.gpu.mark(on.stream))
        if form == "workers":
            state = on.control_words()
            assert (state[DONE], state[BEGUN], state[LEFT]) == (on.blocks.blocks, 2, 2)
        on.blocks.end()
        results[form] = [a.tobytes() for a in outputs if isinstance(a, np.ndarray)]
    assert len(results) == (1 if name == "early" else 2)
    assert results["plain"] != [a.tobytes() for a in arguments if isinstance(a, np.ndarray)]
    for form in results:
        assert results[form] == results["plain"], form


def test_plain_launches() -> None:
    launch, (x, y, a, n) = launch_and_arguments("saxpy")
    expected = (y.astype(np.float64) + np.float64(np.float32(a)) * x).astype(np.float32)
    from warpwell.targets.arrays import to_device, to_host

    on_device = to_device("cuda", y)
    launch(x, on_device, a, n)
    np.testing.assert_allclose(to_host(on_device), expected, rtol=1e-6)
    launch(x, y, a, n)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    launch, (out, c) = launch_and_arguments("volume")
    launch(out, c)
    z, b, k = np.meshgrid(np.arange(3), np.arange(4), np.arange(5), indexing="ij")
    assert (out.reshape(60, 40) == (1_000_000 * z + 10_000 * b + 100 * k + 3 + c).reshape(60, 1)).all()


def test_one_array_twice_is_one_array() -> None:
    x = np.arange(1000, dtype=np.float32)
    SOURCES["saxpy"][4, 256](x, x, 2.0, 1000)
    assert (x == 3 * np.arange(1000)).all()


@with_headers
def test_a_grid_that_synchronizes_runs() -> None:
    code = r"""
    #include <cooperative_groups.h>
    extern "C" __global__ void k(int *x, int *y)
    {
        x[blockIdx.x] = blockIdx.x + 1;
        cooperative_groups::this_grid().sync();
        y[blockIdx.x] = x[gridDim.x - 1 - blockIdx.x];
    }
    """
    x, y = np.zeros(64, np.int32), np.zeros(64, np.int32)
    launch = ww.CudaSource(code, "k", {"x": "int32*", "y": "int32*"}, cooperative=True)[64, 1]
    launch(x, y)
    assert (y == np.arange(64, 0, -1)).all()
    y[:] = 0
    with ww.scheduler.Scheduler("cuda") as scheduler:
        scheduler.submit(launch, x, y).result(60)
    assert (y == np.arange(64, 0, -1)).all()


def test_a_block_that_does_not_fit() -> None:
    x = np.zeros(32, np.int32)
    with pytest.raises(errors.ArgumentError):
        SOURCES["rotate_kernel"][1, 32, 1 << 20](x)


WORK = 2000, 20_000, 200_000
"""Iterations of a block. Other processes use this GPU, and a short kernel may end within one turn, before it sees a
flag: tests that stop a kernel try a longer one then.
"""


@pytest.mark.parametrize("seed", range(3))
def test_each_block_runs_once_through_drains_and_shrinks(seed: int) -> None:
    assert any(launches_of_drained_blocks(seed, work) > 1 for work in WORK)


def launches_of_drained_blocks(seed: int, work: int) -> int:
    """Drain a kernel again and again until all its blocks have run; return the number of launches."""
    from warpwell.targets.arrays import to_host, zeros

    count = 100_000
    ran, out = zeros("cuda", 256 * count, np.int32), zeros("cuda", 256 * count, np.float64)
    on = SourceOnGpu(SOURCES["count"][count, 256], [ran, out, work])
    stops = 0
    for state in on.drains(seed, count):
        assert state[BEGUN] == state[LEFT]
        stops += 1
    assert (to_host(ran) == 1).all()
    on.blocks.end()
    return stops


def test_an_executor_drains_and_resumes_what_can_leave() -> None:
    assert any(drains_by_executor("count", work) > 0 for work in WORK)


def test_an_executor_runs_a_source_without_the_header_whole() -> None:
    assert drains_by_executor("early", 1) == 0


def drains_by_executor(name: str, work: int) -> int:
    """Run a source by an executor that preempts it up to three times; return how often it was drained."""
    from warpwell.scheduler.executors.cuda_executor import CudaExecutor
    from warpwell.targets.arrays import to_host, zeros

    blocks = 60_000 if name == "count" else 40_000_000  # long enough to be observed while it runs
    ran = zeros("cuda", blocks * (256 if name == "count" else 1), np.int32)
    arguments = (ran, zeros("cuda", ran.size, np.float64), work) if name == "count" else (ran, work)
    launch = SOURCES[name][blocks, 256]
    executor = CudaExecutor()
    try:
        task = Task(name, blocks, launch=launch, arguments=arguments)
        job = Job(task, Request(name, [task]), 0.0)
        stops = 0
        executor.launch(job, Placement())
        events: list[Any] = []
        until = time.monotonic() + 60
        while not any(isinstance(event, Ended) for event in events):
            assert time.monotonic() < until
            if stops < 3 and 0 < executor.progress(job) < blocks:
                executor.preempt(job)
            executor.wait(executor.now() + 1e-4)
            events = executor.poll()
            if any(isinstance(event, Stopped) for event in events):
                stops += 1
                executor.launch(job, Placement(workers=100 if stops == 1 else None))
        assert next(e for e in events if isinstance(e, Ended)).error is None
        assert (to_host(ran) == 1).all()
        return stops
    finally:
        executor.close()


def test_a_scheduler_runs_sources_and_kernels_together() -> None:
    launch, arguments = launch_and_arguments("transpose")
    expected = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    launch(*expected)

    @ww.kernel
    def double(x):
        i = gpu.grid(1)
        x[i] = 2 * x[i]

    numbers = np.arange(1000)
    code = 'extern "C" __global__ void wrong(int *x) { x[0] = missing; }'
    wrong = ww.CudaSource(code, "wrong", {"x": "int32*"})
    with ww.scheduler.Scheduler("cuda") as scheduler:
        first = scheduler.submit(launch, *arguments)
        second = scheduler.submit(double[1000], numbers)
        third = scheduler.submit(wrong[1, 32], np.zeros(1, np.int32))
        first.result(60)
        second.result(60)
        with pytest.raises(errors.ArgumentError, match="missing"):
            third.result(60)
    assert arguments[1].tobytes() == expected[1].tobytes()
    assert (numbers == 2 * np.arange(1000)).all()
