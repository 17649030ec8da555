"""CUDA C++ source without a GPU: declared parameters, preemptible sources, and arguments converted to parameters."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.scheduler.executor import Capacity, Machine
from warpwell.scheduler.predict.learner import Learner
from warpwell.scheduler.task import Task
from warpwell.targets.gpu.prepared import pack

KINDS = {"x": "float32*", "n": "int32"}


def source(
    parameters: dict[str, str] = KINDS, code: str = "#include <warpwell.cuh>\n", **options: Any
) -> ww.CudaSource:
    return ww.CudaSource(code, "k", parameters, **options)


def test_types_of_parameters() -> None:
    declarations = {"a": "const float32*", "b": "float64", "c": " const  uint8 * ", "d": "void*", "e": "const bool"}
    found = source(declarations).parameters
    assert [p.name for p in found] == list("abcde")
    assert [p.dtype and p.dtype.str.lstrip("<|=") for p in found] == ["f4", "f8", "u1", None, "b1"]
    assert [p.name for p in found if p.pointer] == list("acd")
    assert [p.name for p in found if p.pointer and p.constant] == ["a", "c"]
    assert str(found[0]) == "a: const float32*"


@pytest.mark.parametrize("declaration", ["float", "int", "float32**", "void", "struct point*", "float32 const", "", 3])
def test_types_that_are_unknown(declaration: Any) -> None:
    with pytest.raises(
        errors.ArgumentError, match=r"parameter 'x' of CUDA kernel 'k'.*expected one of bool, int8"
    ) as e:
        source({"x": declaration})
    assert e.value.name == "parameters"


@pytest.mark.parametrize(
    ("code", "preemptible"),
    [
        ("#include <warpwell.cuh>\n", True),
        ('\n  # include "warpwell.cuh" // for schedulers\n', True),
        ("", False),
        ("// #include <warpwell.cuh>\n", False),
        ("#include <mywarpwell.cuh>\n", False),
    ],
)
def test_a_source_that_includes_the_header_is_preemptible(code: str, preemptible: bool) -> None:
    found = source(code=code)
    assert found.preemptible == preemptible == (found.reason is None)
    if not preemptible:
        assert isinstance(found.reason, errors.TransformError) and found.reason.construct == "include"
        assert "does not include warpwell.cuh" in str(found.reason)


def test_a_cooperative_kernel_runs_whole() -> None:
    found = source(cooperative=True)
    assert not found.preemptible and found.reason is not None
    assert found.reason.construct == "cooperative"


def test_a_source_is_pickled_with_its_declarations() -> None:
    found = pickle.loads(pickle.dumps(source(cooperative=True, options=["-DN=4"])))
    assert (found.code, found.name, found.options, found.cooperative) == (source().code, "k", ("-DN=4",), True)
    assert found.parameters == source().parameters


SCALARS = source(
    {
        "a": "int8",
        "b": "uint32",
        "c": "float32",
        "d": "bool",
        "e": "float64",
        "f": "const int32*",
        "g": "int32*",
        "h": "void*",
    }
)


def cut(**changed: Any) -> Any:
    arrays: dict[str, Any] = {"f": np.zeros(3, np.int32), "g": np.zeros(3, np.int32), "h": np.zeros(3, np.complex64)}
    values = {"a": 1, "b": 2, "c": 0.5, "d": True, "e": 3, **arrays, **changed}
    return SCALARS[4, 32].cut([values[p.name] for p in SCALARS.parameters])


def test_arguments_become_what_parameters_are() -> None:
    blocks = cut(a=np.int64(-3), b=7.0, c=np.float64(0.1), d=1, e=2)
    assert [v.dtype.str.lstrip("<|") for v in blocks._converted[:5]] == ["i1", "u4", "f4", "b1", "f8"]
    assert [v.item() for v in blocks._converted[:5]] == [-3, 7, np.float32(0.1).item(), True, 2.0]
    values, addresses = pack([np.int64(9), *blocks._converted[:5]])
    assert (np.diff(addresses.astype(np.int64)) == 8).all() and addresses[0] == values.ctypes.data
    raw = values.tobytes()
    assert raw[8:9] == b"\xfd" and raw[16:20] == (7).to_bytes(4, "little")
    assert np.frombuffer(raw[24:28], np.float32)[0] == np.float32(0.1) and raw[32] == 1


@pytest.mark.parametrize(
    ("changed", "message"),
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
        ({"f": np.zeros(3)}, "items of float64, expected int32"),
        ({"f": np.zeros(3, np.float32)}, "items of float32"),
        ({"f": np.zeros((4, 4), np.int32)[:, ::2]}, "gaps"),
        ({"h": np.array([object()])}, "Python objects"),
        ({"g": np.frombuffer(b"\0" * 12, np.int32)}, "cannot be written"),
    ],
)
def test_arguments_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message) as caught:
        cut(**changed)
    assert next(iter(changed)) in str(caught.value)


def test_arrays_that_fit() -> None:
    cut(f=np.frombuffer(b"\0" * 12, np.int32))  # the array is read-only
    cut(f=np.zeros(3, np.uint32), g=np.zeros((2, 2), np.int32, order="F"))


def test_grids() -> None:
    kernel = source()
    blocks = kernel[(3, 4, 5), (8, 4)].cut((np.zeros(1, np.float32), 1))
    assert (blocks.blocks, blocks.threads, blocks.preemptible, blocks.name) == (60, 32, True, "k")
    assert kernel[7, 128, 4096].shared == 4096
    wrong: list[Any] = [7, (7,), (0, 32), (7, 0), (7, 1025), (7, (32, 33)), ((1, 70000), 32), (7, (1, 1, 65))]
    for bad in [*wrong, (7.5, 32), ("7", 32), (7, 32, -1), (7, 32, "a"), (7, 32, 0, 0), ((1, 1, 1, 1), 32), (True, 32)]:
        with pytest.raises(errors.ArgumentError):
            kernel[bad]
    with pytest.raises(errors.ArgumentError, match="grid"):
        kernel(1)
    with pytest.raises(errors.ArgumentError, match=r"2 arguments \(x: float32\*, n: int32\), got 1"):
        kernel[1, 32].cut((1,))
    with pytest.raises(errors.ArgumentError, match="2\\^31"):
        kernel[(1 << 30, 4), 32].cut((np.zeros(1, np.float32), 1))


def test_what_is_no_source() -> None:
    for code, name, options in (("", 3, ()), (b"", "k", ()), ("", "a b", ()), ("", "k", "-DN"), ("", "k", [1])):
        with pytest.raises(errors.ArgumentError):
            ww.CudaSource(code, name, {}, options=options)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="must be a dict"):
        source("float *x")  # type: ignore[arg-type]


def test_another_device_is_refused() -> None:
    x = np.zeros(1, np.float32)
    with pytest.raises(errors.ArgumentError, match="expected one of cuda"):
        source()[1, 32](x, 1, device="cpu")
    with ww.scheduler.Scheduler("cpu") as scheduler, pytest.raises(errors.ArgumentError, match="expected one of cuda"):
        scheduler.submit(source()[1, 32], x, 1)


class OnStorage:
    device = "cuda"
    kernel_struct = launch_begins = launch_ended = launch_continues = abort = lambda *_: None


def test_an_array_on_storage_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="on storage"):
        source()[1, 32].cut((OnStorage(), 1))


def test_a_learner_knows_its_shape() -> None:
    task = Task("k", 16, launch=source()[(8, 2), 256], arguments=(np.zeros(1, np.float32), 4096))
    learner = Learner()
    learner.use_device(Capacity(), Machine)
    profile = learner(task)
    assert profile.threads == 256 and profile.registers == 32 * 4 * 256
    assert task.known.warps == 8 * 2 * 8


class DeviceCopy:
    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False)}
        self.copied_back: list[Any] = []

    def copy_to_host(self, array: Any, stream: Any = 0) -> None:
        self.copied_back.append(array)


def test_what_a_launch_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words before the arguments, in the order of the parameters of `warpwell::workers`, without a GPU."""
    from types import SimpleNamespace

    from warpwell.targets.gpu import copies
    from warpwell.targets.source import forms as module

    kernel = source(
        {"x": "const float32*", "y": "float32*", "a": "float32", "n": "int32", "z": "const float32*"},
    )
    x, y = np.zeros(4, np.float32), np.zeros(4, np.float32)
    blocks: Any = kernel[(3, 2), (64, 2), 16].cut((x, y, 2, 5, x))
    made: list[DeviceCopy] = []

    def to_gpu(arrays: list[Any]) -> Any:
        made.extend(DeviceCopy(4096 * (k + 1)) for k in range(len(arrays)))
        return list(made), list(zip(arrays, made, strict=True))

    monkeypatch.setattr(copies, "to_gpu", to_gpu)
    blocks.begin()
    assert len(made) == 2 and not blocks.ends_at_once

    called: list[Any] = []

    def launched(function: str, *where: Any) -> tuple[int]:
        count = where[-2]
        pointers = ctypes.cast(count, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.cast(pointers[k], ctypes.POINTER(ctypes.c_int64))[0] for k in range(expected[function])]
        called.append((function, where[:8], values))
        return (0,)

    device = SimpleNamespace(device_id=0, properties=SimpleNamespace(multiprocessor_count=4), arch="90")
    monkeypatch.setattr(module, "current", lambda: (SimpleNamespace(cuLaunchKernel=launched), device))
    forms = module.SourceForms(blocks)
    forms._set({"plain": ("plain", {}), "workers": ("workers", {})})
    expected = {"plain": 5, "workers": 12}
    forms.start_plain(None)
    forms.start(1 << 40, 7, 9, SimpleNamespace(handle=99), 3)
    two = int(np.float32(2).view(np.int32))
    arguments = [4096, 8192, two, 5, 4096]
    assert called == [
        ("plain", (3, 2, 1, 64, 2, 1, 16, 0), arguments),
        ("workers", (9, 1, 1, 64, 2, 1, 16, 99), [1 << 40, 7, 3, 6, 3, 2, 1, *arguments]),
    ]
    blocks.end()
    assert [len(array.copied_back) for array in made] == [0, 1] and made[1].copied_back[0] is y
    with pytest.raises(errors.ArgumentError, match="has not started"):
        blocks.values  # noqa: B018 - it raises


def test_an_executor_is_given_the_forms_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    from warpwell.scheduler.executors.gpu import Gpu
    from warpwell.targets.source.forms import SourceForms

    prepared: list[Any] = []
    monkeypatch.setattr(SourceForms, "__init__", lambda self, blocks: None)
    monkeypatch.setattr(SourceForms, "prepare", lambda self: prepared.append(self))
    x = np.zeros(4, np.float32)
    gpu: Any = object.__new__(Gpu)
    gpu.ordinal = 0
    forms = gpu.forms(source({"x": "const float32*"})[3, 64].cut((x,)))
    assert type(forms) is SourceForms and prepared == [forms]
