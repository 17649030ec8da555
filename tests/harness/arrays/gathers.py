"""GatherConformance: what `ww.gather` and `ww.rows` promise where rows are gathered in the order of a stream."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.harness.arrays.kernels import write

import warpwell as ww
from lab.media import Faulty
from warpwell import errors
from warpwell.array.gather import gpu, gpu_cached
from warpwell.storage import RamMedium
from warpwell.targets.arrays import to_host

PAGE = 512
TIERS: dict[str, dict[str, Any]] = {
    "device": {"tier": "device"},
    "host": {"tier": "host"},
    "host-cached": {"tier": "host-cached", "cache": "64KiB", "page_size": PAGE},
    "storage": {"tier": "storage", "cache": "1MiB", "page_size": PAGE},
    "frames": {"tier": "storage", "cache": "16KiB", "page_size": PAGE},
    "two frames": {"tier": "storage", "cache": 2 * (PAGE + 8), "page_size": PAGE},
}


class GatherConformance:
    """Tests for any device; a subclass copies arrays to its memory."""

    DEVICE: ClassVar[str]
    ROWS: ClassVar[int] = 300

    def near(self, host: Any) -> Any:
        """Return an array in the device's memory."""
        raise NotImplementedError

    def far(self, array: Any) -> Any:
        """Return it in host memory."""
        return to_host(array)

    def open(self, path: Any, mode: str = "r", **options: Any) -> Any:
        return ww.open(path, mode, device=self.DEVICE, **options)

    def saved(self, tmp_path: Path, model: Any) -> Path:
        np.save(tmp_path / "a.npy", model)
        return tmp_path / "a.npy"

    def same(self, a: Any, model: Any, rows: Any, **more: Any) -> None:
        expected = model[np.asarray(rows)]
        got = self.far(ww.gather(a, rows, **more).result(60))
        assert got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("tier", list(TIERS))
    @pytest.mark.parametrize("row", [(), (3,), (32, 4), (50, 9)], ids=str)
    def test_rows_are_those_that_numpy_has(self, tmp_path: Path, tier: str, row: tuple[int, ...]) -> None:
        rng = np.random.default_rng(len(row))
        model = rng.integers(0, 255, (self.ROWS, *row, 2), np.uint8).view("<i2").reshape(self.ROWS, *row)
        path = self.saved(tmp_path, model)
        for mode in ("r", "r+"):
            with self.open(path, mode, **TIERS[tier]) as a:
                shuffled = rng.integers(0, self.ROWS, self.ROWS)
                for rows in (
                    shuffled,
                    np.arange(self.ROWS)[::-1],
                    np.zeros((2, 0, 3), "i8"),
                    shuffled[:10].reshape(5, 2),
                    shuffled.astype("i4"),
                    [self.ROWS - 1],
                ):
                    self.same(a, model, rows)
                for kind in ("i4", "i8"):
                    rows = rng.integers(0, self.ROWS, 12).astype(kind)
                    out = self.near(np.zeros((12, *row), "<i2"))
                    assert ww.gather(a, self.near(rows), out=out).result(60) is out
                    assert (self.far(out) == model[rows]).all()
                bad = np.array([0, 1, self.ROWS, 2, -1])
                for rows in (bad, self.near(bad)):
                    with pytest.raises(errors.IndexRangeError, match=f"row {self.ROWS} at position 2"):
                        ww.gather(a, rows).result(60)
                self.same(a, model, [0])
            assert not gpu._running

    @pytest.mark.parametrize("nbytes", [1, 6, 36, 100, 1024, 1040])
    def test_rows_of_host_memory_are_copied_past_the_cache(self, nbytes: int, monkeypatch: Any) -> None:
        model = np.random.default_rng(3).integers(0, 255, (self.ROWS, nbytes), np.uint8)
        called: list[int] = []
        copy_from_host = gpu_cached.GpuCachedRows._copy_from_host
        monkeypatch.setattr(
            gpu_cached.GpuCachedRows,
            "_copy_from_host",
            lambda self, rows, *more: (called.append(len(rows)), copy_from_host(self, rows, *more)),
        )
        monkeypatch.setitem(gpu_cached.CHUNK_BYTES, self.DEVICE, 600)
        monkeypatch.setattr(gpu_cached, "SLOT_CHUNKS", 2)
        monkeypatch.setattr(gpu_cached, "MAX_LISTED_ROWS", 128)
        rows = np.random.default_rng(4).integers(0, self.ROWS, 5 * self.ROWS)
        medium = RamMedium(model, writable=False)
        with self.open(medium, dtype="u1", shape=model.shape, cache=2 * (PAGE + 8), page_size=PAGE) as a:
            self.same(a, model, rows)
            assert sum(called) > len(rows) - 4 * PAGE / nbytes * 5
            a.prefetch(0, 1).result()
            self.same(a, model, rows.reshape(5, -1))
            for got in ww.rows(a, [rows.astype("i4")]):
                assert (self.far(got) == model[rows]).all()
            with pytest.raises(errors.IndexRangeError, match="row -1 at position 0"):
                ww.gather(a, [-1, 0]).result(60)
        model = model.copy()
        called.clear()
        with self.open(
            RamMedium(model), "r+", dtype="u1", shape=model.shape, cache=2 * (PAGE + 8), page_size=PAGE
        ) as a:
            self.same(a, model, rows[:50])
            assert not called, "of an array that is written pages may be newer than the medium"

    @pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="/dev/shm cannot be written")
    def test_a_file_in_memory_is_copied_past_the_cache_and_may_be_cut(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(gpu_cached.GpuCachedRows, "_launch", None)  # not used
        model = np.arange(128 * self.ROWS).reshape(-1, 128)
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="warpwell-", suffix=".npy") as file:
            np.save(file, model)
            file.flush()
            with self.open(file.name, **TIERS["two frames"]) as a:
                self.same(a, model, np.arange(self.ROWS)[::-3])
                os.truncate(file.name, 4096)
                with pytest.raises(errors.MediumError, match="truncated"):
                    ww.gather(a, [self.ROWS - 1]).result(60)

    @pytest.mark.parametrize("tier", list(TIERS))
    def test_what_kernels_have_changed_is_seen(self, tmp_path: Path, tier: str) -> None:
        model = np.arange(3 * self.ROWS).reshape(-1, 3)
        with self.open(self.saved(tmp_path, model), "r+", **TIERS[tier]) as a:
            index = np.arange(0, 3 * self.ROWS, 7)
            write[len(index)](a.reshape(-1), index, -index - 1, device=self.DEVICE)
            model.reshape(-1)[index] = -index - 1
            self.same(a, model, np.arange(self.ROWS))
            self.same(a, model, [0, 7, 7])

    def test_a_cache_that_holds_all_is_read_as_memory(self, tmp_path: Path, monkeypatch: Any) -> None:
        model = np.arange(4 * self.ROWS).reshape(-1, 4)
        with self.open(self.saved(tmp_path, model), **TIERS["storage"]) as a:
            a.prefetch().result()
            self.same(a, model, [5, 6])
            self.same(a, model, [5, 6])
            monkeypatch.setattr(gpu_cached.GpuCachedRows, "run", None)  # not used any more
            self.same(a, model, np.arange(self.ROWS))
            monkeypatch.undo()
            a.evict()
            self.same(a, model, np.arange(self.ROWS))
            assert a.cache._in_flight == 0

    def test_a_read_that_fails_is_told(self, tmp_path: Path) -> None:
        model = np.arange(64 * self.ROWS).reshape(-1, 64)
        medium = Faulty(RamMedium(model), fail_ranges=[(PAGE, 2 * PAGE)])
        with self.open(medium, dtype="i8", shape=model.shape, cache="16KiB", page_size=PAGE) as a:
            with pytest.raises(errors.MediumError):
                ww.gather(a, np.arange(self.ROWS)).result(60)
            medium.configure()
            self.same(a, model, np.arange(self.ROWS))

    def test_batches_come_in_their_order(self, tmp_path: Path) -> None:
        model = np.arange(4 * self.ROWS).reshape(-1, 4)
        lists: list[Any] = [[3, 1, 3], self.near(np.array([9, 9, 0])), np.zeros(0, int), [[5, 6]], np.arange(self.ROWS)]
        for tier in TIERS.values():
            with self.open(self.saved(tmp_path, model), **tier) as a, ww.rows(a, lists) as batches:
                for rows, got in zip(lists, batches, strict=True):
                    assert (self.far(got) == model[self.far(rows)]).all()
                with pytest.raises(errors.IndexRangeError):
                    list(ww.rows(a, [[0], [self.ROWS]]))

    def test_several_threads_gather_and_close_waits(self, tmp_path: Path) -> None:
        model = np.arange(16 * self.ROWS).reshape(-1, 16)
        a = self.open(self.saved(tmp_path, model), **TIERS["frames"])
        wrong: list[int] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(4):
                rows = rng.integers(0, self.ROWS, 150)
                if not (self.far(ww.gather(a, rows).result(60)) == model[rows]).all():
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(1 if self.DEVICE == "interp" else 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = ww.gather(a, np.arange(self.ROWS))
        a.close()
        assert last.done() and not wrong
        with pytest.raises(errors.ClosedError):
            ww.gather(a, [0])

    def test_what_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        with self.open(self.saved(tmp_path, np.zeros((self.ROWS, 6), "f4")), tier="device") as a:
            for out, message in (
                (np.zeros((3, 6), "f4"), "shape"),
                (np.zeros((2, 6), "f8"), "float64|64-bit"),
                (np.zeros((6, 2), "f4").T, "C order|shape"),
            ):
                with pytest.raises((errors.ArgumentError, errors.DTypeError), match=message):
                    ww.gather(a, [0, 1], out=self.near(out))
            with pytest.raises(errors.DTypeError, match="int32 or int64"):
                ww.gather(a, self.near(np.zeros(3, "u1")))
            with pytest.raises(errors.ArgumentError, match="host memory"):
                ww.gather(a, [0, 1], out=np.zeros((2, 6), "f4"))
            if self.DEVICE == "cuda":
                with pytest.raises(errors.ArgumentError, match="not a stream"):
                    ww.gather(a, [0], stream="default")
