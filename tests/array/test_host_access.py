"""The host reads and writes the file, or the memory that holds it, and kernels see the same items."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors, gpu, storage
from warpwell.array import host_access

PAGE = 512
PER = PAGE // 8
N = 40 * PER
TIERS = ["mapped", "storage", "host-cached", "host", "device"]
CACHED = ["storage", "host-cached"]


@ww.kernel
def add(a: Any, value: Any) -> None:
    i = gpu.grid(1)
    a[i] = a[i] + value


@ww.kernel
def hold(a: Any, held: Any) -> None:
    held[0] = a.pin(0)


@ww.kernel
def unpin_all(a: Any) -> None:
    a.unpin(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(N))
    return tmp_path / "a.npy"


def opened(path: Any, tier: str, **options: Any) -> ww.Array:
    if tier != "mapped":
        options = {"cache": 20 * (PAGE + 8), "page_size": PAGE, **options}
    return ww.open(path, "r+", tier=tier, **{"device": "cpu", **options})


def on_file(path: Path) -> Any:
    return np.load(path, mmap_mode="r")


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the host launched a kernel")

    monkeypatch.setattr(host_access, "_copy_by_kernel", refuse)
    return


@pytest.mark.parametrize("tier", TIERS)
def test_the_host_needs_no_kernel(tier: str, path: Path, no_kernel: None) -> None:
    model = np.arange(N)
    with opened(path, tier) as a:
        every = np.arange(0, N, 3)
        for index in (3, slice(None), slice(5, 900, 7), every, [4, 4, -1], ...):
            np.testing.assert_array_equal(a[index], model[index])
        for value, index in enumerate((3, slice(700, 800), slice(5, 900, 7), every, [4, 4, -1])):
            a[index] = model[index] = -value
            np.testing.assert_array_equal(a[...], model)
        add[N](a, 1000)
        np.testing.assert_array_equal(np.asarray(a), model + 1000)
        a[every] = 7
        add[N](a, 1000)
        model[:] += 2000
        model[every] = 1007
        np.testing.assert_array_equal(a[...], model)
    np.testing.assert_array_equal(np.load(path), model)


def test_memory_that_is_a_medium_needs_no_kernel(no_kernel: None) -> None:
    items = np.arange(N)
    with opened(storage.RamMedium(items), "storage", dtype="i8") as a:
        add[N](a, 1)
        a[5:50:2] = -1
        assert (a[:] == items).all() and (items[5:50:2] == -1).all() and items[6] == 7


@pytest.mark.parametrize("tier", CACHED)
@pytest.mark.parametrize("index", [3, slice(2, 5), slice(None, None, 9), np.arange(0, N, 5)], ids=str)
def test_kernels_see_what_the_host_writes_to_cached_pages(tier: str, index: Any, path: Path) -> None:
    model = np.arange(N)
    with opened(path, tier, cache=60 * (PAGE + 8)) as a:
        for round in range(3):
            add[N](a, 1)  # loads all pages, and leaves them dirty
            model += 1
            a[index] = model[index] = -round
            np.testing.assert_array_equal(a[...], model)
    np.testing.assert_array_equal(np.load(path), model)


def test_only_the_pages_of_the_items_leave_the_cache(path: Path) -> None:
    with opened(path, "storage", cache=60 * (PAGE + 8)) as a:
        add[N](a, 0)
        misses = a.stats.misses
        a[10 * PER : 12 * PER - 16] = 5  # pages 10 and 11: the header is in front of the items
        add[N](a, 0)
        assert a.stats.misses - misses <= 2 and a.stats.evictions == 2


def test_items_of_another_writer_in_the_same_page_stay(path: Path) -> None:
    with opened(path, "storage") as a:
        assert a[3] == 3
        out = np.load(path, mmap_mode="r+")
        for k in range(4):
            out[2 * k] = -k
            a[2 * k + 1] = 100 + k
        out.flush()
    assert np.load(path)[:9].tolist() == [0, 100, -1, 101, -2, 102, -3, 103, 8]


@pytest.mark.parametrize("tier", CACHED)
def test_pinned_pages_are_written_in_the_cache(tier: str, path: Path) -> None:
    with opened(path, tier) as a:
        a.pin(0, 10)
        a[3] = 5
        assert a[3] == 5 and a.cache._count_pinned(a._nsid) == 1
        add[10](a, 1)
        assert a[3] == 6
        a.unpin(0, 10)
        a[3] = 7
        held = np.zeros(1, np.int64)
        hold[1](a, held)
        assert held[0] == 1
        a[4] = 9  # a kernel, not the host, pins the page
        add[10](a, 1)
        assert a[3:5].tolist() == [8, 10]
        unpin_all[1](a)
    assert np.load(path)[3:5].tolist() == [8, 10]


def test_a_page_that_a_prefetch_reads_is_written_in_the_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, "storage") as a:
        monkeypatch.setattr(a.cache.bulk, "reads", lambda nsid: True)
        a[3] = 5
        assert np.load(path)[3] == 3 and a[3] == 5  # the read of a[3] writes the page back
        assert np.load(path)[3] == 5


def test_what_cannot_be_written_back_is_read_in_the_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(nsid: int) -> None:
        raise errors.StorageFullError("no room")

    with opened(path, "storage") as a:
        add[N](a, 1)
        monkeypatch.setattr(a.cache, "write_back", fail)
        assert a[3] == 4 and a[[5, 6]].tolist() == [6, 7]
        monkeypatch.undo()
        assert a[3] == 4


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_is_cut_is_an_error_for_many_short_runs(mode: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(64 * mmap.PAGESIZE // 8))
    with ww.open(tmp_path / "a.npy", mode, device="cpu", cache="64KiB") as a:
        expected = np.arange(0, 1000, 7)
        np.testing.assert_array_equal(a[0:1000:7], expected)
        os.truncate(tmp_path / "a.npy", 8 * mmap.PAGESIZE)
        with pytest.raises(errors.MediumError, match=r"truncated from .* to 32768 bytes"):
            a[::7]
        with pytest.raises(errors.MediumError, match="close the array and open it again"):
            a[0:1000:7]
        if mode == "r+":
            np.save(tmp_path / "a.npy", np.arange(64 * mmap.PAGESIZE // 8))


@pytest.mark.parametrize("tier", ["mapped", "storage"])
def test_closing_beside_a_read_leaves_its_memory(tier: str, path: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    a = opened(path, tier)
    memory = a._part.host_memory(np.arange(128, 228, 2), 1)
    a.close()
    assert memory is not None and memory[128:].view(np.int64)[5] == 5 and mappings() == 1
    del memory
    assert mappings() == 0


def test_a_file_system_that_maps_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, no_kernel: None) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no mappings here")

    model = np.arange(N)
    with opened(path, "storage") as a:
        monkeypatch.setattr("warpwell.array.attachment.Mapping", refuse)
        np.testing.assert_array_equal(a[::3], model[::3])
        a[::3] = model[::3] = 5
        np.testing.assert_array_equal(a[...], model)


@pytest.mark.parametrize("tier", TIERS)
def test_what_only_the_host_wrote_is_durable_after_flush(
    tier: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), real(fd))[1])
    with opened(path, tier) as a:
        a[3] = 5
        a.flush()
        assert synced and on_file(path)[3] == 5


def test_the_interpreter_shares_items_with_the_host(path: Path, no_kernel: None) -> None:
    with opened(path, "storage", device="interp") as a:
        add[4](a, 1)
        assert a[:5].tolist() == [1, 2, 3, 4, 4]
        a[1] = 50
        add[4](a, 1)
        assert a[:5].tolist() == [2, 51, 4, 5, 4]
