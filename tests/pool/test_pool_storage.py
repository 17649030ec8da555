"""Arrays and key-value stores that a device of a pool opens: their data are read where the device is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.harness.until import until

import warpwell as ww
from warpwell import errors, gpu
from warpwell.pool.devices import Devices
from warpwell.remote import RemoteArray, RemoteStore


@ww.kernel
def total(edges, out):
    i = gpu.grid(1)
    if i < edges.size:
        gpu.atomic_add(out, 0, edges[i])


@ww.kernel
def double(array):
    i = gpu.grid(1)
    array[i] = array[i] * 2


@ww.kernel
def look(kv, keys, rows, sizes):
    i = gpu.grid(1)
    sizes[i] = kv.retrieve(keys[i], rows[i])


@ww.kernel
def hold(array, words):
    """Count in the first word what was read, and wait until the second one is set."""
    gpu.atomic_add(words, 0, array[7])
    while gpu.atomic_add(words, 1, 0) == 0:
        pass


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(targets=["cpu", "cpu"]) as found:
        yield found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(100_000))
    return tmp_path / "a.npy"


def test_a_kernel_reads_an_array_where_its_device_is(devices: Devices, path: Path) -> None:
    with devices[1].open(path, cache="64KiB", stats="full") as array:
        assert isinstance(array, RemoteArray)
        assert (array.shape, array.dtype, array.size, array.nbytes) == ((100_000,), np.int64, 100_000, 800_000)
        out = devices[1].zeros(1, np.int64)
        total[array.size](array, out)
        assert out.copy_to_host()[0] == np.arange(100_000).sum()
        assert array.stats.misses > 0 and array.stats.bytes_wanted == 800_000
        assert "RemoteArray 'a.npy' (100000,) int64 on device 1" in repr(array)


def test_the_application_looks_into_an_array(devices: Devices, path: Path) -> None:
    values = np.arange(100_000)
    with devices[0].open(path, cache="1MiB") as array:
        assert array[7] == 7 and array[-1] == 99_999 and len(array) == 100_000
        assert np.array_equal(array[10:20], values[10:20])
        assert np.array_equal(array[np.array([5, 3, 5])], [5, 3, 5])
        assert np.array_equal(np.asarray(array), values)
        assert np.array_equal(array.reshape(1000, 100)[3], values[300:400])
        array.prefetch(0, 1000)
        array.pin(0, 10)
        array.unpin(0, 10)
        with pytest.raises(errors.RemoteError, match="is not pinned") as caught:
            array.unpin(0, 10)
        assert isinstance(caught.value.__cause__, errors.KernelError)


def test_what_kernels_write_is_in_the_file(devices: Devices, path: Path) -> None:
    with devices[0].open(path, "r+") as array:
        double[array.size](array)
        array[0] = -1
        array.flush()
        assert np.load(path)[0] == -1 and np.load(path)[3] == 6
        array[1] = -2
    assert np.load(path)[1] == -2


def test_a_field_of_records(devices: Devices, tmp_path: Path) -> None:
    records = np.zeros(100, [("x", "f8"), ("n", "i4")])
    records["n"] = np.arange(100)
    np.save(tmp_path / "r.npy", records)
    with devices[0].open(tmp_path / "r.npy") as array:
        n = array["n"]
        out = devices[0].zeros(1, np.int64)
        total[100](n, out)
        assert out.copy_to_host()[0] == 4950


def test_arrays_share_a_cache_of_the_agent(devices: Devices, path: Path) -> None:
    cache = devices[0].create("cache", "256KiB", device="cpu")
    with devices[0].open(path, cache=cache) as first, devices[0].open(path, cache=cache) as two:
        assert first[3] == 3 and two[4] == 4
        assert first.stats == two.stats and first.stats.host_reads == 1
        # The two counts are of reads of the file, not of the cache.
        assert cache.attribute("stats") == replace(first.stats, host_reads=0, host_bytes=0)
    cache.call("close").get()
    foreign_cache = devices[1].create("cache", "256KiB", device="cpu")
    with pytest.raises(errors.ArgumentError, match="is on device 1"):
        devices[0].open(path, cache=foreign_cache)


def test_an_array_that_cannot_be_opened(devices: Devices, tmp_path: Path) -> None:
    with pytest.raises(errors.RemoteError, match="MissingFileError") as caught:
        devices[1].open(tmp_path / "nothing.npy")
    assert isinstance(caught.value.__cause__, errors.MissingFileError)
    assert "open_array" in caught.value.remote_traceback
    devices[1].synchronize()  # no further error is raised


def test_an_array_of_another_device_is_refused(devices: Devices, path: Path) -> None:
    with devices[0].open(path) as array:
        with pytest.raises(errors.ArgumentError, match="but the call is for device 0"):
            total[1](array, devices[1].zeros(1, np.int64))
    with ww.open(path, device="cpu") as local, pytest.raises(errors.ArgumentError, match="open it on device 0"):
        devices[0].launch(total[1], local, devices[0].zeros(1, np.int64))


def test_an_array_twice_on_one_agent(devices: Devices, path: Path) -> None:
    with devices[0].open(path) as first, devices[0].open(path) as two:
        assert first[5] == two[5]
    with devices[0].open(path, "r+"), pytest.raises(errors.RemoteError, match="SharingError"):
        devices[0].open(path, "r+")
    devices[0].open(path, "r+").close()


def test_a_closed_array_takes_no_launches(devices: Devices, path: Path) -> None:
    array = devices[0].open(path)
    out = devices[0].zeros(1, np.int64)
    total[array.size](array, out)
    array.close()  # queued after the launch
    assert out.copy_to_host()[0] == np.arange(100_000).sum()
    array.close()
    with pytest.raises(errors.ClosedError, match="on device 0 is closed"):
        total[1](array, out)
    with pytest.raises(errors.ClosedError):
        array[0]


def test_closing_beside_a_launch_of_another_stream(devices: Devices, path: Path) -> None:
    array = devices[0].open(path)
    words = devices[0].zeros(2, np.int64)
    stream = devices[0].stream()
    devices[0].synchronize()
    hold[1, stream](array, words)
    until(lambda: words.copy_to_host()[0] == 7)
    try:
        with pytest.raises(errors.RemoteError) as caught:
            array.close()
        assert isinstance(caught.value.__cause__, errors.WarpwellError)
        assert not array.closed
    finally:
        words[1:].fill(1)
    stream.synchronize()
    array.close()


def test_dropped_arrays_are_released(devices: Devices, path: Path) -> None:
    array = devices[1].open(path, "r+")
    del array
    gc.collect()

    def is_released() -> bool:  # a separate thread releases the array
        try:
            devices[1].open(path, "r+").close()
        except errors.RemoteError:
            return False
        return True

    until(is_released)


def test_an_array_outlives_its_device(path: Path) -> None:
    pool = Devices(targets=["cpu"])
    array = pool[0].open(path)
    out = pool[0].zeros(1, np.int64)
    pool.close()
    with pytest.raises(errors.DeviceLostError):
        total[1](array, out)
    array.close()
    assert array.closed
    del array, out


def test_a_store_on_a_device(devices: Devices, tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv", schema={"x": ("int64", (4,))}) as writer:
        writer.put_many(np.arange(100), {"x": np.arange(400).reshape(100, 4)})
    with devices[1].open_store(tmp_path / "s.kv") as store:
        assert isinstance(store, RemoteStore) and len(store) == 100 and not store.writable
        assert np.array_equal(store[3]["x"], [12, 13, 14, 15])
        assert 5 in store and 500 not in store and store.get(500, "none") == "none"
        batch, found = store.get_many(np.array([1, 200]))
        assert found.tolist() == [True, False] and np.array_equal(batch["x"][0], [4, 5, 6, 7])
        with pytest.raises(errors.KeyMissingError):
            store[500]
        with pytest.raises(errors.RemoteError, match="ReadOnlyError"):
            store.put(1, {"x": np.zeros(4, np.int64)})
        assert store.stats.records == 100
        rows, sizes = devices[1].zeros((3, 32), np.uint8), devices[1].zeros(3, np.int64)
        look[3](store, devices[1].to_device(np.array([2, 300, 99])), rows, sizes)
        assert sizes.copy_to_host().tolist() == [32, -1, 32]
        assert np.array_equal(rows.copy_to_host().view(np.int64)[2], [396, 397, 398, 399])
        assert store.device_stats["commands"] > 0
        assert store.schema is not None


def test_a_store_is_written_on_a_device(devices: Devices, tmp_path: Path) -> None:
    ww.kv.create(tmp_path / "s.kv").close()
    with devices[0].open_store(tmp_path / "s.kv", "r+") as store:
        store.put("a", b"1")
        store.put_many([b"b", b"c"], [b"2", b"3"])
        assert store.delete("c") and store.delete_many(["c", "d"]) == 0
        assert store.commit() > 0
        assert store.list() == [b"a", b"b"]
        with pytest.raises(errors.RemoteError, match="SharingError"):
            devices[0].open_store(tmp_path / "s.kv", "r+")
    with ww.kv.open(tmp_path / "s.kv") as local:
        assert dict(local) == {b"a": b"1", b"b": b"2"}
    with pytest.raises(ZeroDivisionError), devices[0].open_store(tmp_path / "s.kv", "r+") as store:
        store.put("z", b"9")
        raise ZeroDivisionError
    with ww.kv.open(tmp_path / "s.kv") as local:
        assert "z" not in local
