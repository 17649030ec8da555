"""Each pin belongs to its owner: a kernel, the host through one array, or a group that stores at the moment."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu
from warpwell.cache.word import PINS

PAGE = 512
ITEMS = PAGE // 8

DEVICES = ["cpu", "interp"]


@ww.kernel
def add_and_unpin(a, n, also):
    i = gpu.grid(1)
    for k in range(n):
        j = (i * 2654435761 + k * 40503) % a.size
        gpu.atomic_add(a, j, 1)
        if also:
            a.unpin(j)


@ww.kernel
def pin_often(a, n, got):
    i = gpu.grid(1)
    for _ in range(n):
        got[i] += a.pin(0)


@ww.kernel
def unpin_often(a, n):
    for _ in range(n[gpu.grid(1)]):
        a.unpin(0)


@ww.kernel
def fill(a):
    a[gpu.grid(1)] = 1.0


@ww.kernel
def total(b, out):
    gpu.atomic_add(out, 0, b[gpu.grid(1)])


def pins_left(a: ww.Array) -> int:
    return int(((a.cache.page_words(a._nsid) & PINS) != 0).sum()) + a.cache._count_pinned(a._nsid)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_cannot_give_back_the_pins_under_which_others_store(tmp_path: Path, device: str) -> None:
    pages, threads, rounds = (64, 64, 16) if device == "cpu" else (6, 4, 8)
    with ww.create(
        tmp_path / "a.npy", pages * ITEMS, np.int64, cache=PAGE * 3, page_size=PAGE, timeout=HANG_SECONDS, device=device
    ) as a:
        with pytest.raises(
            errors.KernelError, match=r"unpinned page \d+ of array .*, which no kernel has pinned"
        ) as caught:
            add_and_unpin[threads](a, rounds, 1)
        assert caught.value.array == a.name
        assert pins_left(a) == 0
        before = int(a[:].sum())
        add_and_unpin[threads](a, rounds, 0)
        assert int(a[:].sum()) == before + threads * rounds
        a.evict()


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_and_the_host_give_back_their_own_pins_alone(tmp_path: Path, device: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros(20 * ITEMS))
    with ww.open(tmp_path / "a.npy", cache=PAGE * 8, page_size=PAGE, device=device) as a:
        got = np.zeros(1, np.int64)
        a.pin(0, 1)
        with pytest.raises(errors.KernelError, match="no kernel has pinned"):
            unpin_often[1](a, np.array([1]))
        with pytest.raises(errors.KernelError, match="unpin them first"):
            a.evict()
        pin_often[1](a, 3, got)  # a pin may outlive its launch
        assert got[0] == 3 and a.cache._count_pinned(a._nsid) == 1  # the page counts once
        a.unpin(0, 1)
        with pytest.raises(errors.KernelError, match="is not pinned"):
            a.unpin(0, 1)
        with pytest.raises(errors.KernelError, match="unpin them first"):
            a.evict()
        unpin_often[1](a, got)
        assert pins_left(a) == 0
        a.evict()


def test_a_page_has_more_holders_than_its_word_could_count(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(20 * ITEMS))
    with ww.open(tmp_path / "a.npy", "r+", cache=PAGE * 8, page_size=PAGE, timeout=HANG_SECONDS, device="cpu") as a:
        got = np.zeros(64, np.int64)
        pin_often[64](a, 200, got)
        assert got.sum() == 64 * 200
        fill[20 * ITEMS](a)  # each storing thread can still pin the page
        unpin_often[64](a, got)
        assert pins_left(a) == 0
        for _ in range(5000):
            a.pin(0, 1)
        for _ in range(5000):
            a.unpin(0, 1)
        assert pins_left(a) == 0


def test_the_pages_of_a_field_end_with_its_last_item(tmp_path: Path) -> None:
    dtype = np.dtype([("a", "<i4"), ("b", "<i4", (3,))])
    records = np.zeros(8 * PAGE // dtype.itemsize, dtype)
    records["b"] = np.arange(records.size)[:, np.newaxis]
    records.tofile(tmp_path / "r.bin")
    with ww.Cache("1MiB", page_size=PAGE, device="cpu") as cache:
        with ww.open(tmp_path / "r.bin", dtype=dtype, cache=cache) as r:
            with ww.open(tmp_path / "r.bin", dtype=dtype, cache=cache, name="other") as neighbor:
                assert all(part._residency(None, None) == (0, 8) for part in (r, r["a"], r["b"]))
                neighbor.pin(0, 1)  # the page after the last of `r`
                r["b"].evict()
                r["b"].pin()
                r["b"].unpin()
                neighbor.unpin(0, 1)
                neighbor.evict()
        with ww.open(tmp_path / "r.bin", dtype=dtype, cache=cache) as r:
            r["b"].pin(-4, None)
            r["b"].unpin(-4, None)


def test_a_closed_array_leaves_no_frame_that_nobody_can_write(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(4096))
    np.save(tmp_path / "b.npy", np.arange(8192.0))
    with ww.Cache(4096 * 6, page_size=4096, device="cpu") as cache:
        a, b = ww.open(tmp_path / "a.npy", "r+", cache=cache), ww.open(tmp_path / "b.npy", cache=cache)
        b.pin(0, 10)  # keeps the pages of b in their frames
        got = np.zeros(1, np.int64)
        pin_often[1](a, 2, got)  # a pin that is never released
        fill[4096](a)
        os.truncate(tmp_path / "a.npy", 512)
        with pytest.raises(errors.MediumError):
            a.close()
        assert cache._count_pinned(b._nsid) == 1
        for _ in range(3):
            out = np.zeros(1)
            total[8192](b, out)
            assert out[0] == 8192 * 8191 / 2
        b.unpin(0, 10)
        b.close()


@pytest.mark.parametrize("tier", ["storage", "host-cached"])
def test_what_was_written_to_held_pages_is_flushed(tmp_path: Path, tier: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros(10 * ITEMS))
    with ww.open(tmp_path / "a.npy", "r+", tier=tier, cache=PAGE * 8, page_size=PAGE, device="cpu") as a:
        a.pin(0, 2 * ITEMS)
        fill[2 * ITEMS](a)
        a.flush()
        assert np.load(tmp_path / "a.npy").sum() == 2 * ITEMS
        a[0] = 5
    assert np.load(tmp_path / "a.npy")[0] == 5


def test_two_threads_pin_pages_of_two_arrays_of_one_cache(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros(16384))
    with ww.Cache("4MiB", device="cpu") as cache:
        arrays = [ww.open(tmp_path / f"{name}.npy", cache=cache) for name in "ab"]

        def work(a: ww.Array) -> None:
            for _ in range(25):
                a.pin(0, 8192)
                a.pin(4096, 10000)
                a.unpin(0, 8192)
                a.unpin(4096, 10000)

        arrays[0].pin(0, 1)
        arrays[0].unpin(0, 1)
        run_threads(work, [(arrays[k % 2],) for k in range(4)])
        assert [pins_left(a) for a in arrays] == [0, 0]
        for a in arrays:
            a.close()


def test_maintenance_goes_on_while_fewer_pages_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with ww.Cache("64KiB", device="cpu") as cache:
        left = iter(range(200, -1, -1))
        monkeypatch.setattr(cache, "run", lambda *_, **__: next(left))
        cache._until_none(None, 1, 1, (), "flushing 'a'")
        runs = []
        monkeypatch.setattr(cache, "run", lambda *_, **__: runs.append(1) or 7)
        with pytest.raises(errors.KernelError, match="7 pages are pinned or in use"):
            cache._until_none(None, 1, 1, (), "flushing 'a'")
        assert len(runs) == 64
        monkeypatch.undo()
