"""Sizes, headers and dtypes as people and files write them."""

import io
import math
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpwell as ww
from warpwell import errors, gpu, storage
from warpwell._check import checked_device, checked_nbytes
from warpwell._npy import npy_header
from warpwell.array.header import Header, check_dtype
from warpwell.array.header import read_npy as read_open_npy
from warpwell.cache import format_size
from warpwell.drives.arena import DmaArena
from warpwell.graph.build import _memory
from warpwell.pool.devices import runtime_for
from warpwell.scheduler.service.service import Service
from warpwell.scheduler.task import Task
from warpwell.scheduler.tenants import Tenant

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": 2 ** (10 * k) for k, prefix in enumerate("KMGT", 1) for suffix in ("", "B", "iB", "i")
}


def _device_store(folder: Path, device: Any, **options: Any) -> ww.kv.DeviceStore:
    path = folder / "s.kv"
    if not path.exists():
        ww.kv.create(path).close()
    store = ww.kv.open(path, device=device, **options)
    assert isinstance(store, ww.kv.DeviceStore)
    return store


def read_npy(path: Path) -> Header:
    with path.open("rb") as file:
        return read_open_npy(path, file.fileno())


@given(st.integers(1, 2**62), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_whole_sizes_are_exact(n: int, unit: str, gap: str) -> None:
    assert checked_nbytes(f"{gap}{n}{gap}{unit}{gap}") == n * UNITS[unit]
    assert checked_nbytes(f"{n}{unit.lower()}") == checked_nbytes(f"{n}{unit.upper()}") == n * UNITS[unit]
    assert checked_nbytes(n) == checked_nbytes(np.int64(n)) == n


@given(st.integers(1, 10**6), st.integers(0, 999))
def test_fractions_round_down(n: int, thousandths: int) -> None:
    text = f"{n}.{thousandths:03d}"
    assert checked_nbytes(f"{text} MiB") == int(Fraction(text) * 2**20)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        "-1",
        "1e3",
        "1 PB",
        "MiB",
        "1.MiB",
        ".5",
        "1,5",
        None,
        "nan",
        "inf",
        True,
        [],
        "1 2",
        "1iB",
        4096.0,
        np.array([1]),
    ],
)
def test_what_is_no_size(bad: object) -> None:
    with pytest.raises(errors.ArgumentError, match=r"cache .* is not a size"):
        checked_nbytes(bad, "cache")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -5, "0", "0 GiB", "0.0001", "0.4B"])
def test_a_size_is_positive(bad: object) -> None:
    with pytest.raises(errors.ArgumentError, match="at least 1 bytes, got"):
        checked_nbytes(bad)  # type: ignore[arg-type]


def test_a_size_of_many_digits() -> None:
    assert checked_nbytes("9" * 400) == int("9" * 400)
    assert format_size(1536) == "1.5 KiB" and format_size(5 * 2**40) == "5.0 TiB"


@pytest.mark.parametrize(
    ("dtype", "match"),
    [
        (object, "no fixed size"),
        ([("a", "O")], "no fixed size"),
        ("S0", "no fixed size"),
        (">i4", "big-endian"),
        ([("a", "<i4"), ("b", ">f8")], "big-endian"),
        ([("a", [("b", ">u2")])], "big-endian"),
        ([("a", ">i4", (3,))], "big-endian"),
        ("nonsense", "is not a dtype"),
        (("f4", (3,)), "longer shape"),
    ],
)
def test_dtypes_that_are_refused(dtype: object, match: str) -> None:
    with pytest.raises(errors.DTypeError, match=match):
        check_dtype(dtype, "x.npy")


@pytest.mark.parametrize(
    ("version", "field"), [((1, 0), "b"), ((2, 0), "é"), ((3, 0), "b"), ((3, 0), "Ω"), ((3, 0), "\\'Ω𝔸")]
)
def test_headers_are_read(tmp_path: Path, version: tuple[int, int], field: str) -> None:
    model = np.zeros((3, 4), [("a", "<f4"), (field, "S5", (2,))])
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, model, version=version)
        origin = file.tell() - model.nbytes
    header = read_npy(tmp_path / "a.npy")
    assert (header.dtype, header.shape, header.origin, header.nbytes) == (model.dtype, (3, 4), origin, model.nbytes)


@pytest.mark.parametrize(
    "fields", [[("a", "<f4")], [("Ω", "<f4"), ("é", "<i8")], [(f"f{k:05}", "u1") for k in range(4000)]]
)
@pytest.mark.filterwarnings("ignore:Stored array in format:UserWarning")
def test_headers_that_are_written_are_those_of_numpy(fields: Any) -> None:
    dtype, file = np.dtype(fields), io.BytesIO()
    np.save(file, np.zeros((3, 4), dtype))
    header = npy_header(np.lib.format.dtype_to_descr(dtype), (3, 4))
    assert header[:8] == file.getvalue()[:8] and len(header) % 64 == 0
    items = np.load(io.BytesIO(header + bytes(12 * dtype.itemsize)), max_header_size=1 << 20)
    assert (items.dtype, items.shape) == (dtype, (3, 4))


def _file_of(shape: tuple[int, ...], fortran: bool, nbytes: int) -> bytes:
    header = npy_header("<f8", shape)
    return header.replace(b"False", b"True ") + bytes(nbytes) if fortran else header + bytes(nbytes)


@pytest.mark.parametrize("shape", [(-2, -5), (-10,), (-1, 0), (2, -5, -1)])
def test_negative_extents_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    (tmp_path / "a.npy").write_bytes(_file_of(shape, False, 8 * max(0, math.prod(shape))))
    with pytest.raises(errors.FormatError, match="negative extent"):
        ww.open(tmp_path / "a.npy", device="cpu")


@pytest.mark.parametrize("shape", [(10, 1), (1, 10), (1, 10, 1), (1, 1), (0, 3, 4), (10,), ()])
def test_fortran_order_that_is_c_order_too_is_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = np.arange(math.prod(shape), dtype="<f8").reshape(shape)
    (tmp_path / "a.npy").write_bytes(_file_of(shape, True, 0) + model.tobytes())
    with ww.open(tmp_path / "a.npy", device="cpu") as a:
        assert a.shape == shape and np.array_equal(np.asarray(a), model)


@pytest.mark.parametrize("shape", [(10, 2), (2, 1, 10)])
def test_fortran_order_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    (tmp_path / "a.npy").write_bytes(_file_of(shape, True, 160))
    with pytest.raises(errors.FormatError, match="ascontiguousarray"):
        ww.open(tmp_path / "a.npy", device="cpu")


@pytest.mark.filterwarnings("ignore:Stored array in format:UserWarning")
def test_fields_have_any_names(tmp_path: Path) -> None:
    dtype = np.dtype([("Ω", "<f8"), ("n", "<i4")])
    with ww.create(tmp_path / "a.npy", 3, dtype, device="cpu") as a:
        a["Ω"] = [1, 2, 3]
    assert np.array_equal(np.load(tmp_path / "a.npy")["Ω"], [1, 2, 3])
    with ww.open(tmp_path / "a.npy", device="cpu") as a:
        assert a.dtype == dtype and np.array_equal(a["Ω"][:], [1, 2, 3])


def _array(folder: Path, **options: Any) -> ww.Array:
    np.save(folder / "a.npy", np.zeros(1000))
    return ww.open(folder / "a.npy", **{"device": "cpu", **options})


@pytest.mark.parametrize(
    "read",
    [
        lambda size, _: ww.Cache(size, device="cpu").cache_bytes,
        lambda size, _: ww.Cache("1MiB", page_size=size, device="cpu").page_size,
        lambda size, folder: _array(folder, page_size=size).cache.page_size,
        lambda size, _: ww.open(storage.RamMedium("1m"), dtype="u1", offset=size, device="cpu")._origin,
        lambda size, _: storage.RamMedium(size).nbytes,
        lambda size, _: type("Zeros", (storage.PythonMedium,), {"read": None})(size).nbytes,
        lambda size, _: storage.Striped([storage.RamMedium("1m")] * 2, size).stripe_bytes,
        lambda size, _: DmaArena(size).nbytes,
        lambda size, _: _memory(size),
        lambda size, _: Task("a", 1, memory=size).memory,
        lambda size, _: Tenant("a", memory=size).memory,
        lambda size, _: Service(max_message=size)._settings["max_message"],
        lambda size, folder: _device_store(folder, "cpu", cache=size).options.cache,
        lambda size, folder: _device_store(folder, "cpu", value_bytes=size).options.value_bytes,
    ],
)
def test_every_option_reads_sizes_alike(read: Any, tmp_path: Path) -> None:
    assert read("64k", tmp_path) == 65536


class TorchDevice(str):
    """What `checked_device` sees of a torch.device."""

    __module__ = "torch"


@pytest.mark.parametrize("name", ["cuda", "cuda:0", TorchDevice("cuda:0"), TorchDevice("cuda")])
def test_the_first_gpu_has_several_names(name: Any) -> None:
    assert checked_device(name) == checked_device(name, every_gpu=True) == "cuda"


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "cuda0", "", 0, np.zeros(2)])
def test_unknown_devices_are_refused(name: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"unknown device .* expected one of cpu, cuda, interp"):
        checked_device(name)


def test_another_gpu_is_refused_with_the_way_to_use_it() -> None:
    with pytest.raises(errors.ArgumentError, match="start the program with CUDA_VISIBLE_DEVICES=1"):
        checked_device("cuda:1")
    assert checked_device("cuda:1", every_gpu=True) == "cuda:1"


@ww.kernel
def nothing(x: Any) -> None:
    gpu.grid(1)


@pytest.mark.parametrize("how", ["cpu:0", TorchDevice("cpu")])
@pytest.mark.parametrize(
    "use",
    [
        lambda name, folder: _array(folder, device=name),
        lambda name, folder: ww.create(folder / "new.npy", 3, device=name),
        lambda name, folder: ww.Cache("64k", device=name),
        lambda name, folder: nothing[1](np.zeros(1), device=name),
        lambda name, folder: ww.scheduler.Scheduler(name).close(),
        lambda name, folder: _device_store(folder, name).close(),
        lambda name, folder: runtime_for(name),
    ],
    ids=["open", "create", "Cache", "kernel", "Scheduler", "kv", "pool"],
)
def test_every_option_reads_devices_alike(use: Any, how: str, tmp_path: Path) -> None:
    use(how, tmp_path)
    with pytest.raises(errors.ArgumentError, match=r"unknown .*tpu"):
        use("tpu", tmp_path)


def test_an_unknown_option_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(
        errors.ArgumentError, match=r"no option 'cache_nbytes'; it has cache, depth, device, dtype, merge, mode"
    ):
        ww.open(tmp_path / "a.npy", cache_nbytes="1MiB")


def test_mmap_mode_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="mmap_mode is mode= here"):
        _array(tmp_path, mmap_mode="r")


@given(st.data())
def test_damaged_headers_are_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((4, 5), "<f4"))
    raw = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 127))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.sampled_from([len(raw), len(raw), 0, 5, 9, 60, 130]))]
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    path.write_bytes(raw)
    try:
        header = read_npy(path)
    except (errors.FormatError, errors.DTypeError):
        return
    assert header.origin + header.nbytes == len(raw), "an accepted header describes the size of the file"


@pytest.mark.parametrize(
    "text", ["(" * 5000, "{'descr': ", "[" * 90 + "]" * 90, "{'descr': 'f4', 'shape': (1,)}", "{1: '''"]
)
def test_headers_that_are_no_literals(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + b"\0" * 40)
    with pytest.raises(errors.FormatError, match=r"is not a \.npy file"):
        read_npy(tmp_path / "a.npy")
