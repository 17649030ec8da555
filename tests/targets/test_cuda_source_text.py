"""CUDA C++ source as text: what is found in it, what is refused, and arguments converted to their parameters."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.scheduler.executor import Capacity, Machine
from warpwell.scheduler.predict.learner import Learner
from warpwell.scheduler.task import Task
from warpwell.targets.gpu.prepared import pack


def source(body: str, parameters: str = "float *x, int n", before: str = "", **options: Any) -> ww.CudaSource:
    return ww.CudaSource(f'{before}\nextern "C" __global__ void k({parameters})\n{{\n{body}\n}}\n', "k", **options)


KERNELS = r"""
// extern "C" __global__ void commented(int *x) {
/* __global__ void blocked(int *x) { */
const char *text = "__global__ void quoted(int *x) {";
extern "C" __global__ void declared(int *x);
extern "C" { __global__ void __launch_bounds__(256, 2) bounded(int *x) { x[0] = 1; } }
__global__ __maxnreg__(64) void plain(int *x, /* , int y */ int n = 3) { }
extern "C" __global__ void
declared(int *x) { }
"""


def test_kernels_that_are_there() -> None:
    for name in ("bounded", "plain", "declared"):
        assert ww.CudaSource(KERNELS, name).preemptible
    for name in ("commented", "blocked", "quoted", "missing"):
        with pytest.raises(errors.TransformError, match="it has: bounded, plain, declared") as caught:
            ww.CudaSource(KERNELS, name)
        assert caught.value.construct == "kernel"


def test_types_of_parameters() -> None:
    before = "#define REAL double\ntypedef unsigned int word;\nusing bytes = const unsigned char *;\n"
    found = source(
        "",
        "const float *__restrict__ a, REAL b, const word c, bytes d, struct point *e, int f[], long long unsigned g, "
        "std::size_t h, SIZE i, void *j, float **k, const __grid_constant__ bool l, int const * const m",
        before,
        options=["-DSIZE=short"],
    ).parameters
    assert [p.name for p in found] == list("abcdefghijklm")
    kinds = [p.dtype and p.dtype.str.lstrip("<|=") for p in found]
    assert kinds == ["f4", "f8", "u4", "u1", None, "i4", "u8", "u8", "i2", None, None, "b1", "i4"]
    assert [p.name for p in found if p.pointer] == list("adefjkm")
    assert [p.name for p in found if p.pointer and p.constant] == ["a", "d", "m"]


@pytest.mark.parametrize(
    ("code", "construct", "line"),
    [
        ("template <int N>\n__global__ void k(int *x) { }", "template", 2),
        ('extern "C" __global__ void k(int *x)\n{\n  other<<<1, 32>>>(x);\n}', "dynamic parallelism", 3),
        ("struct p { int x; };\n__global__ void k(p q) { }", "parameter", 2),
        ("__global__ void k(const int &x) { }", "parameter", 1),
        ("__global__ void k(float *) { }", "parameter", 1),
        ("__global__ void k(int (*f)(int)) { }", "parameter", 1),
        ("__global__ void k(int *x) { }\n__global__ void k(float *x) { }", "overload", 2),
    ],
)
def test_what_can_run_in_no_form(code: str, construct: str, line: int) -> None:
    with pytest.raises(errors.TransformError) as caught:
        ww.CudaSource(code, "k")
    assert (caught.value.construct, caught.value.line) == (construct, line)
    assert f"line {line}" in str(caught.value) and "'k'" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "before", "construct", "line"),
    [
        ("auto g = cooperative_groups::this_grid();\ng.sync();", "", "grid-wide synchronization", 4),
        ("auto c = cg::this_cluster();", "", "cluster", 4),
        ('asm("mov.u32 %0, %ctaid.x;" : "=r"(n));', "", "asm", 4),
        ("atomicAdd(&total, 1);", "__device__ int total;", "__device__ variable", 1),
        ("buffer[0] = 1;", "__device__ __align__(16) float buffer[4];", "__device__ variable", 1),
        ("static int calls;", "", "static variable", 4),
    ],
)
def test_what_runs_whole(body: str, before: str, construct: str, line: int) -> None:
    found = source(body, before=before)
    assert not found.preemptible
    assert isinstance(found.reason, errors.TransformError) and "runs whole" in str(found.reason)
    assert (found.reason.construct, found.reason.line) == (construct, line)
    assert found.text.cooperative == (construct == "grid-wide synchronization")


def test_what_only_looks_so_is_preempted() -> None:
    before = "__device__ const float table[2] = {1, 2};\n__device__ float f(float a) { return a; }\n"
    before += "struct s { __device__ s &operator=(const s &o) { return *this; } };\n// __device__ int total;"
    found = source('printf("this_grid %ctaid");\nstatic const int four = 4; /* this_grid() */', before=before)
    assert found.preemptible and found.reason is None


HELPERS = """
__device__ float sum(float v) { __syncthreads(); return v; }
__device__ float outer(float v) { return sum(v); }
#define GUARD(i) if (i >= n) return
#define MEET __syncthreads()
struct guard { __device__ ~guard() { __syncthreads(); } };
struct op { __device__ float operator()(float v) { __syncthreads(); return v; } };
__device__ void meet() { asm volatile("bar.sync 0;"); }
"""


@pytest.mark.parametrize(
    "body",
    [
        "if (threadIdx.x >= n) return;\n__syncthreads();",
        "if (n) return;\nif (__syncthreads_count(1)) x[0] = 1;",
        "GUARD(threadIdx.x);\nx[0] = sum(1);",
        "if (n) return;\nx[0] = outer(1);",
        "if (n) return;\nMEET;",
        "if (n) return;\nmeet();",
        "if (n) return;\nop f;\nx[0] = f(1);",
        "guard g;\nif (n) return;\nx[0] = 1;",
        'if (n) return;\nasm volatile("bar.sync 0;");',
        "for (int i = 0; i < n; ++i) {\n__syncthreads();\nif (x[i]) return;\n}",
        "while (true)\n  for (;;) {\n__syncthreads();\nif (x[0]) return;\n}",
        "do { __syncthreads(); if (x[0]) return; } while (n--);",
        "auto f = [&] { __syncthreads(); };\nif (n) return;\nf();",
        "again: __syncthreads();\nif (n--) goto again; if (n) return; x[0] = 1;",
        "if (n) return;\nauto b = cg::this_thread_block();\nb.sync();",
        'if (n) asm volatile("exit;");\nx[0] = 1;',
    ],
)
def test_a_thread_that_leaves_before_a_barrier_has_it_run_whole(body: str) -> None:
    found = source(body, before=HELPERS)
    assert not found.preemptible
    assert isinstance(found.reason, errors.TransformError)
    assert found.reason.construct in ("return before barrier", "asm") and (found.reason.line or 0) > 9
    assert "runs whole" in str(found.reason)


@pytest.mark.parametrize(
    "body",
    [
        "if (threadIdx.x >= n) return;\nx[0] = 1;",
        "__syncthreads();\nif (threadIdx.x) return;\nx[0] = 1;",
        "for (int i = 0; i < n; ++i) { __syncthreads(); }\nif (n) return;\nx[0] = 1;",
        "x[0] = sum(1);\nreturn;",
        "if (n) { __syncthreads(); }\n// return; __syncthreads();",
        "if (n) return;\n__syncwarp();\nx[0] = 2;",
    ],
)
def test_other_returns_are_no_matter(body: str) -> None:
    assert source(body, before=HELPERS).preemptible


def test_headers_that_may_hide_a_barrier() -> None:
    body = "if (n) return;\nx[0] = reduce(n);"
    assert source(body, before="#include <cuda_fp16.h>").preemptible
    hidden = source(body, before="#include <cub/cub.cuh>")
    assert not hidden.preemptible
    assert source("x[0] = reduce(n);", before="#include <cub/cub.cuh>").preemptible


def test_options_may_hide_a_barrier() -> None:
    body = "if (n) return;\nMEET;\nx[0] = 1;"
    assert source(body).preemptible
    assert not source(body, options=["-DMEET=__syncthreads()"]).preemptible
    assert not source(body, options=["--pre-include=mine.h"]).preemptible


SCALARS = source("", "signed char a, unsigned b, float c, bool d, double e, const int *f, int *g, void *h")


def cut(**given: Any) -> Any:
    arrays: dict[str, Any] = {"f": np.zeros(3, np.int32), "g": np.zeros(3, np.int32), "h": np.zeros(3, np.complex64)}
    values = {"a": 1, "b": 2, "c": 0.5, "d": True, "e": 3, **arrays, **given}
    return SCALARS[4, 32].cut([values[p.name] for p in SCALARS.parameters])


def test_arguments_become_what_parameters_are() -> None:
    blocks = cut(a=np.int64(-3), b=7.0, c=np.float64(0.1), d=1, e=2)
    assert [v.dtype.str.lstrip("<|") for v in blocks._converted[:5]] == ["i1", "u4", "f4", "b1", "f8"]
    assert [v.item() for v in blocks._converted[:5]] == [-3, 7, np.float32(0.1).item(), True, 2.0]
    places, addresses = pack([np.int64(9), *blocks._converted[:5]])
    assert (np.diff(addresses.astype(np.int64)) == 8).all() and addresses[0] == places.ctypes.data
    raw = places.tobytes()
    assert raw[8:9] == b"\xfd" and raw[16:20] == (7).to_bytes(4, "little")
    assert np.frombuffer(raw[24:28], np.float32)[0] == np.float32(0.1) and raw[32] == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": 128}, "holds -128 to 127"),
        ({"b": -1}, "holds 0"),
        ({"b": 0.5}, "takes integers"),
        ({"b": float("nan")}, "takes integers"),
        ({"c": 1e300}, "too large"),
        ({"c": "1"}, "pass a number"),
        ({"c": 1j}, "pass a number"),
        ({"c": None}, "pass a number"),
        ({"c": np.zeros(1, np.float32)}, "pass a number"),
        ({"f": 4096}, "pass a NumPy array"),
        ({"f": np.zeros(3)}, "items of float64"),
        ({"f": np.zeros(3, np.float32)}, "items of float32"),
        ({"f": np.zeros((4, 4), np.int32)[:, ::2]}, "gaps"),
        ({"h": np.array([object()])}, "Python objects"),
        ({"g": np.frombuffer(b"\0" * 12, np.int32)}, "cannot be written"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.ArgumentError, match=says) as caught:
        cut(**given)
    assert next(iter(given)) in str(caught.value)


def test_arrays_that_fit() -> None:
    cut(f=np.frombuffer(b"\0" * 12, np.int32))  # which is only read
    cut(f=np.zeros(3, np.uint32), g=np.zeros((2, 2), np.int32, order="F"))


def test_grids() -> None:
    one = source("")
    blocks = one[(3, 4, 5), (8, 4)].cut((np.zeros(1, np.float32), 1))
    assert (blocks.blocks, blocks.threads, blocks.preemptible, blocks.name) == (60, 32, True, "k")
    assert one[7, 128, 4096].shared == 4096
    wrong: list[Any] = [7, (7,), (0, 32), (7, 0), (7, 1025), (7, (32, 33)), ((1, 70000), 32), (7, (1, 1, 65))]
    for bad in [*wrong, (7.5, 32), ("7", 32), (7, 32, -1), (7, 32, "a"), (7, 32, 0, 0), ((1, 1, 1, 1), 32), (True, 32)]:
        with pytest.raises(errors.ArgumentError):
            one[bad]
    with pytest.raises(errors.ArgumentError, match="grid"):
        one(1)
    with pytest.raises(errors.ArgumentError, match=r"2 arguments \(float \*x, int n\), and was given 1"):
        one[1, 32].cut((1,))
    with pytest.raises(errors.ArgumentError, match="2\\^31"):
        one[(1 << 30, 4), 32].cut((np.zeros(1, np.float32), 1))


def test_what_is_no_source() -> None:
    for code, name, options in (("", 3, ()), (b"", "k", ()), ("", "a b", ()), ("", "k", "-DN"), ("", "k", [1])):
        with pytest.raises(errors.ArgumentError):
            ww.CudaSource(code, name, options=options)  # type: ignore[arg-type]


def test_another_device_is_refused() -> None:
    x = np.zeros(1, np.float32)
    with pytest.raises(errors.ArgumentError, match="expected one of cuda"):
        source("")[1, 32](x, 1, device="cpu")
    with ww.scheduler.Scheduler("cpu") as scheduler, pytest.raises(errors.ArgumentError, match="expected one of cuda"):
        scheduler.submit(source("")[1, 32], x, 1)


class OnStorage:
    device = "cuda"
    kernel_struct = launch_begins = launch_ended = launch_continues = abort = lambda *_: None


def test_an_array_on_storage_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="on storage"):
        source("")[1, 32].cut((OnStorage(), 1))


def test_a_learner_knows_its_shape() -> None:
    task = Task("k", 16, launch=source("")[(8, 2), 256], arguments=(np.zeros(1, np.float32), 4096))
    learner = Learner()
    learner.meets(Capacity(), Machine)
    profile = learner(task)
    assert profile.threads == 256 and profile.registers == 32 * 4 * 256
    assert task.known.sample.warps == 8 * 2 * 8


class There:
    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False)}
        self.brought: list[Any] = []

    def copy_to_host(self, array: Any, stream: Any = 0) -> None:
        self.brought.append(array)


def test_what_a_launch_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words before the arguments, in the order in which the program's text has them, without a GPU."""
    from types import SimpleNamespace

    from warpwell.targets.gpu import copies
    from warpwell.targets.source.forms import SourceForms
    from warpwell.targets.source.program import around

    one = source("", "const float *x, float *y, float a, int n, const float *z")
    x, y = np.zeros(4, np.float32), np.zeros(4, np.float32)
    blocks: Any = one[(3, 2), (64, 2), 16].cut((x, y, 2, 5, x))
    made: list[There] = []

    def to_gpu(arrays: list[Any]) -> Any:
        made.extend(There(4096 * (k + 1)) for k in range(len(arrays)))
        return list(made), list(zip(arrays, made, strict=True))

    monkeypatch.setattr(copies, "to_gpu", to_gpu)
    blocks.begin()
    assert len(made) == 2 and not blocks.ends_at_once

    called: list[Any] = []

    def launched(function: str, *where: Any) -> tuple[int]:
        count = where[-2]
        place = ctypes.cast(count, ctypes.POINTER(ctypes.c_void_p))
        words = [ctypes.cast(place[k], ctypes.POINTER(ctypes.c_int64))[0] for k in range(expected[function])]
        called.append((function, where[:8], words))
        return (0,)

    forms: Any = object.__new__(SourceForms)
    forms._driver = SimpleNamespace(cuLaunchKernel=launched)
    forms._prepared = {}
    forms._blocks, forms._source = blocks, one
    forms._grid, forms._threads, forms._shared = (3, 2, 1), (64, 2, 1), 16
    forms._forms = {name: (name, {}) for name in ("plain", "workers")}
    expected = {"plain": 5, "workers": 13}
    forms.start_plain(None)
    forms.start(1 << 40, 7, 9, SimpleNamespace(handle=99), 3, rounds=2)
    two = int(np.float32(2).view(np.int32))
    arguments = [4096, 8192, two, 5, 4096]
    assert called == [
        ("plain", (3, 2, 1, 64, 2, 1, 16, 0), arguments),
        ("workers", (9, 1, 1, 64, 2, 1, 16, 99), [1 << 40, 7, 3, 12, 6, 3, 2, 1, *arguments]),
    ]
    text = " ".join(around(one).split())
    words = [f"ww_{name}" for name in "control base chunk blocks period x y z".split()]
    assert f"{', long long '.join(words)}, const float *x, float *y, float a, int n, const float *z)" in text
    assert one.code in around(one), "the user's own text is as it was"

    blocks.end()
    assert [len(there.brought) for there in made] == [0, 1] and made[1].brought[0] is y
    with pytest.raises(errors.ArgumentError, match="not begun"):
        blocks.values  # noqa: B018 - it raises


def test_an_executor_is_given_the_forms_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    from warpwell.targets.gpu.gpu import Gpu
    from warpwell.targets.source.forms import SourceForms

    prepared: list[Any] = []
    monkeypatch.setattr(SourceForms, "__init__", lambda self, blocks: None)
    monkeypatch.setattr(SourceForms, "prepare", lambda self: prepared.append(self))
    x = np.zeros(4, np.float32)
    gpu: Any = object.__new__(Gpu)
    gpu.ordinal = 0
    forms = gpu.forms(source("", "const float *x")[3, 64].cut((x,)))
    assert type(forms) is SourceForms and prepared == [forms]
