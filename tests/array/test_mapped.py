"""Tier "mapped": kernels on the CPU read a mapping of the file. Each test changes the file from outside."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu
from warpwell.targets import bus_error

PAGE = mmap.PAGESIZE
N = 64 * PAGE // 8


@ww.kernel
def copy(a: Any, out: Any) -> None:
    i = gpu.grid(1)
    out[i] = a[i]


@ww.kernel
def fill(a: Any, value: Any) -> None:
    i = gpu.grid(1)
    a[i] = value


@ww.kernel
def until_failed(a: Any, results: Any) -> None:
    i = gpu.grid(1)
    while not gpu.failed():
        results[i] = a[a.size - 1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(N))
    return tmp_path / "a.npy"


@contextlib.contextmanager
def small_disk(nbytes: int) -> Iterator[Path]:
    """Mount a separate small file system, which fills up; skip the test if the mount fails."""
    at = Path(f"/tmp/warpwell-small-{os.getpid()}")
    at.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(at)], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("mounting needs root")
        try:
            yield at
        finally:
            subprocess.run(["umount", "-l", str(at)], check=True)
    finally:
        at.rmdir()


def test_the_default_on_the_cpu_is_a_mapping(path: Path) -> None:
    with ww.open(path, device="cpu") as a:
        assert a.tier == "mapped" and "tier mapped" in repr(a)
        out = np.zeros(N, np.int64)
        copy[N](a, out)
        np.testing.assert_array_equal(out, np.arange(N))
        assert a.stats.misses == 0 and a.stats.hits is None


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "64KiB"},
        {"page_size": 512},
        {"stats": "full"},
        {"stats": "basic"},
        {"read_once": True},
        {"share": 0.5},
        {"timeout": 5.0},
        {"threads": 2},
        {"queues": 1},
        {"depth": 8},
        {"merge": 1},
    ],
)
def test_an_option_of_a_cache_asks_for_a_cache(path: Path, options: dict[str, Any]) -> None:
    with ww.open(path, device="cpu", **options) as a:
        assert a.tier == "storage"
    with pytest.raises(errors.ArgumentError, match="has no cache of its own: leave cache=, page_size="):
        ww.open(path, device="cpu", tier="mapped", **options)


def test_other_devices_and_media_have_a_cache(path: Path) -> None:
    with ww.open(path, device="interp") as a:
        assert a.tier == "storage"
    with ww.open(ww.storage.RamMedium(np.arange(8)), dtype="i8", device="cpu") as a:
        assert a.tier == "storage"
    with pytest.raises(errors.ArgumentError, match="kernels on 'interp' cannot read a mapping"):
        ww.open(path, device="interp", tier="mapped")
    with pytest.raises(errors.ArgumentError, match="a Medium is not a file"):
        ww.open(ww.storage.RamMedium(np.arange(8)), dtype="i8", device="cpu", tier="mapped")


def test_a_file_system_without_mappings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_error, "map_guarded", lambda *_: None)
    with ww.open(path, device="cpu") as a:
        assert a.tier == "storage" and a[5] == 5
    with pytest.raises(errors.ArgumentError, match=r'cannot be mapped.*tier="storage"'):
        ww.open(path, device="cpu", tier="mapped")


def test_what_kernels_and_the_host_write_is_seen_by_both_and_in_the_file(path: Path) -> None:
    with ww.open(path, "r+", device="cpu") as a:
        fill[10](a, 7)
        a[3] = 8
        assert list(a[[2, 3, 10]]) == [7, 8, 10]
        out = np.zeros(N, np.int64)
        copy[N](a, out)
        assert list(out[[2, 3, 10]]) == [7, 8, 10]
        a.flush()
        assert list(np.load(path)[[2, 3, 10]]) == [7, 8, 10]
        fill[1](a, 9)
    assert np.load(path)[0] == 9


def test_a_read_only_mapping_refuses_stores(path: Path) -> None:
    path.chmod(0o444)
    with ww.open(path, device="cpu") as a:
        with pytest.raises(errors.ReadOnlyError, match=r"a kernel wrote to array 'a\.npy'"):
            fill[10](a, 7)
        with pytest.raises(errors.ReadOnlyError):
            a[0] = 1
        assert a[0] == 0


def test_an_index_out_of_range_touches_nothing(path: Path) -> None:
    before = path.read_bytes()
    with ww.open(path, "r+", device="cpu") as a:
        with pytest.raises(errors.IndexRangeError) as caught:
            fill[N + 5](a, 1)
        assert caught.value.size == N
        with pytest.raises(errors.IndexRangeError):
            copy[N + 1](a, np.zeros(N + 1, np.int64))
        assert a[N - 1] == 1
    assert path.read_bytes()[:128] == before[:128] and path.stat().st_size == len(before)


# -- speed: the compiled code ----------------------------------------------------------------------


@ww.kernel
def total_of(a: Any, out: Any) -> None:
    total = 0
    for j in range(a.shape[0]):
        total += a[j]
    out[0] = total


@ww.kernel
def walk(a: Any, start: Any, stop: Any, step: Any, out: Any) -> None:
    for i in range(start, stop, step):
        out[0] += a[i] + 1
        out[1] += 1


def test_the_check_of_an_index_that_is_in_range_is_dropped(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A new folder, because code that an earlier run compiled cannot be inspected.
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    with ww.open(path, device="cpu") as a:
        out = np.zeros(1, np.int64)
        total_of[1](a, out)
        assert out[0] == N * (N - 1) // 2
    driver = total_of.compiled["cpu", 2]
    code = driver.inspect_llvm(driver.signatures[0])
    assert "load i64" in code and "latch_index" not in code


def test_other_code_of_numba_is_compiled_as_ever() -> None:
    @numba.njit
    def count(a: Any) -> Any:
        total = 0
        for j in range(a.shape[0]):
            total += a[j]
        return total

    assert count(np.arange(5)) == 10
    assert "llvm.assume" not in count.inspect_llvm(count.signatures[0])


def test_ranges_of_any_step_stay_what_they_are(path: Path) -> None:
    with ww.open(path, device="cpu") as a:
        for start, stop, step in [
            (0, 9, 1),
            (0, 9, 2),
            (9, 0, -1),
            (9, -1, -3),
            (5, 5, 1),
            (5, 2, 1),
            (2, 5, -1),
            (7, 8, 9),
        ]:
            out = np.zeros(2, np.int64)
            walk[1](a, start, stop, step, out)
            assert out.tolist() == [
                sum(range(start, stop, step)) + len(range(start, stop, step)),
                len(range(start, stop, step)),
            ]
        with pytest.raises(errors.IndexRangeError, match="index -1 of"):
            walk[1](a, 3, -2, -1, np.zeros(2, np.int64))
        with pytest.raises(errors.IndexRangeError, match=f"index {N} of"):
            walk[1](a, N - 2, N + 2, 1, np.zeros(2, np.int64))


# -- a file that changes under it -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_is_cut(path: Path, mode: str) -> None:
    a = ww.open(path, mode, device="cpu")
    cut = 10 * PAGE
    os.truncate(path, cut)
    out = np.full(N, -1)
    with pytest.raises(errors.MediumError, match=rf"truncated from .* to {cut} bytes") as cause:
        copy[N](a, out)
    # The byte that a thread reached first, which is not always the first byte behind the cut.
    assert cut <= int(str(cause.value).split("reading byte ")[1].split()[0]) < 128 + 8 * N
    np.testing.assert_array_equal(out[: (cut - 128) // 8], np.arange((cut - 128) // 8))
    assert not out[cut // 8 :].any()
    # The array is poisoned: every kind of access fails, also to pages that still exist.
    for use in (lambda: copy[1](a, out), lambda: a[0], lambda: np.asarray(a), lambda: a[[1, 2]]):
        with pytest.raises(errors.MediumError, match="close the array and open it again"):
            use()
    if mode == "r":
        a.close()
    else:
        with pytest.raises((errors.MediumError, errors.FormatError), match="truncated"):
            a.close()
    np.save(path, np.arange(N))
    with ww.open(path, mode, device="cpu") as a:
        copy[N](a, out)
        np.testing.assert_array_equal(out, np.arange(N))


def test_stores_behind_the_cut_raise_and_do_not_kill(path: Path) -> None:
    a = ww.open(path, "r+", device="cpu")
    os.truncate(path, 10 * PAGE)
    with pytest.raises(errors.MediumError, match=r"truncated.*items that kernels stored from that byte on are lost"):
        fill[N](a, 5)
    with pytest.raises((errors.MediumError, errors.FormatError)):
        a.close()
    assert path.stat().st_size == 10 * PAGE
    assert (np.fromfile(path, np.int64)[16:] == 5).all()


def test_a_kernel_that_waits_is_told(path: Path) -> None:
    with ww.open(path, device="cpu") as a:
        os.truncate(path, 10 * PAGE)
        with pytest.raises(errors.MediumError, match="truncated"):
            until_failed[4](a, np.zeros(4, np.int64))


def test_arrays_beside_it_are_not_poisoned(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(N))
    with ww.open(path, device="cpu") as a, ww.open(tmp_path / "b.npy", device="cpu") as b:
        os.truncate(path, 10 * PAGE)
        out = np.zeros(N, np.int64)
        with pytest.raises(errors.MediumError):
            copy[N](a, out)
        copy[N](b, out)
        np.testing.assert_array_equal(out, np.arange(N))


def test_another_handler_of_the_signal_is_no_harm(path: Path) -> None:
    with ww.open(path, device="cpu") as a:
        faulthandler.disable()
        try:
            faulthandler.enable()
            os.truncate(path, 10 * PAGE)
            with pytest.raises(errors.MediumError, match="truncated"):
                copy[N](a, np.zeros(N, np.int64))
        finally:
            faulthandler.enable()


FOREIGN = """
import faulthandler, mmap, os, sys
import numpy as np
import warpwell as ww
if "-X" in sys.argv: faulthandler.enable()
a = ww.open("a.npy", device="cpu")
a[[1, 2]]
if "after" in sys.argv: faulthandler.enable()
file = open("b.bin", "w+b"); file.truncate(8192)
other = mmap.mmap(file.fileno(), 8192)
file.truncate(0)
other[4096]
"""


@pytest.mark.parametrize("arguments", [[], ["-X"], ["after"], ["-X", "after"]])
def test_a_foreign_mapping_that_fails_ends_the_process(path: Path, arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FOREIGN, *arguments],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == -signal.SIGBUS
    assert ended.stderr.count("Fatal Python error") <= 1


def test_a_file_that_was_replaced(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "new.npy", np.zeros(N, np.int64))
    with ww.open(path, device="cpu") as a:
        os.replace(tmp_path / "new.npy", path)
        assert a[5] == 5  # header, mapping and reads belong to the same file
        out = np.zeros(N, np.int64)
        copy[N](a, out)
        assert out[5] == 5
    np.save(tmp_path / "new.npy", np.zeros(N, np.int64))
    b = ww.open(path, "r+", device="cpu")
    fill[4](b, 3)
    os.replace(tmp_path / "new.npy", path)
    with pytest.raises(errors.FormatError, match="was replaced by another file while it was open"):
        b.close()


def test_a_full_disk() -> None:
    with small_disk(1 << 20) as disk:
        file = disk / "sparse.bin"
        with file.open("wb") as f:
            f.truncate(4 << 20)  # larger than the disk
        a = ww.open(file, "r+", dtype="i8", device="cpu")
        with pytest.raises(errors.StorageFullError, match=r"writing byte .*no space is left.*close the array and open"):
            fill[a.size](a, 3)
        with pytest.raises(errors.StorageFullError):
            copy[4](a, np.zeros(4, np.int64))
        with pytest.raises(errors.StorageFullError):
            a.close()
        with pytest.raises(errors.StorageFullError, match="there is no room"):
            ww.create(disk / "b.npy", 1 << 20, device="cpu")


def test_a_failed_sync_poisons(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = ww.open(path, "r+", device="cpu")
    fill[4](a, 3)

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(errors.MediumError, match="Input/output error"):
            a.flush()
    for use in (lambda: copy[1](a, np.zeros(1, np.int64)), a.flush, lambda: a[0]):
        with pytest.raises(errors.MediumError, match="may be lost"):  # a second fdatasync() would report success
            use()
    with pytest.raises(errors.MediumError, match="may be lost"):
        a.close()


# -- life -----------------------------------------------------------------------------------------------------


def mappings(path: Path) -> int:
    return pathlib.Path("/proc/self/maps").read_text().count(str(path))


def test_closing_with_views_alive(path: Path) -> None:
    a = ww.open(path, device="cpu")
    part, view = a.reshape(2, -1), a.view()
    a.close()
    with pytest.raises(errors.ClosedError):
        np.asarray(part)
    with pytest.raises(errors.ClosedError, match="the view is outdated"):
        view.address  # noqa: B018
    assert mappings(path) == 1  # the view keeps it, because a launch that is running would still read it
    del view
    assert mappings(path) == 0


def test_nothing_is_left(path: Path) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    ww.open(path, device="cpu").close()
    gc.collect()
    before, guarded = files(), len(bus_error._slots)
    for _ in range(20):
        with ww.open(path, "r+", device="cpu") as a:
            fill[2](a, 1)
        with pytest.raises(errors.SharingError), ww.open(path, "r+", device="cpu"):
            ww.open(path, "r+", device="cpu")
    assert (files(), len(bus_error._slots), mappings(path)) == (before, guarded, 0)


def test_threads_side_by_side(path: Path) -> None:
    def use() -> None:
        for _ in range(10):
            with ww.open(path, device="cpu") as a:
                out = np.zeros(N, np.int64)
                copy[N](a, out)
                assert (out == np.arange(N)).all() and a[7] == 7

    run_threads(use, [()] * 4)


def _total(path: Path, queue: Any) -> None:
    with ww.open(path, device="cpu") as a:
        out = np.zeros(N, np.int64)
        copy[N](a, out)
        queue.put(int(out.sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_opens_it(path: Path, method: str) -> None:
    with ww.open(path, device="cpu") as a:
        copy[4](a, np.zeros(4, np.int64))
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        worker = context.Process(target=_total, args=(path, queue))
        worker.start()
        assert queue.get(timeout=120) == N * (N - 1) // 2
        worker.join(HANG_SECONDS)
        assert worker.exitcode == 0 and a[3] == 3


_parents: list[ww.Array] = []


def _read_of_the_parent(seed: int) -> str:
    a = _parents[0]
    rows = np.random.default_rng(seed).integers(0, N, 1000)
    assert a[seed] == seed and a[10:20].sum() == 145 and (a[rows] == rows).all() and a.reshape(N // 2, 2)[1, 1] == 3
    assert (np.asarray(a) == np.arange(N)).all() and (a[5:9].read() == np.arange(5, 9)).all()
    with pytest.raises(errors.ForkError, match=r"open it again here, by its path$"):
        copy[4](a, np.zeros(4, np.int64))
    return a.tier


def test_forked_workers_read_an_array_of_the_parent(path: Path) -> None:
    """The workers of a DataLoader do so if its data set holds the array."""
    with ww.open(path, device="cpu") as a:
        copy[4](a, np.zeros(4, np.int64))
        _parents.append(a)
        try:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(_read_of_the_parent, range(8), chunksize=1) == ["mapped"] * 8
        finally:
            _parents.clear()
        out = np.zeros(N, np.int64)
        copy[N](a, out)
        assert (out == np.arange(N)).all()


@pytest.mark.parametrize("options", [{"mode": "r+"}, {"cache": "1MiB"}])
def test_an_array_with_a_cache_or_for_writing_is_the_parents(path: Path, options: dict[str, Any]) -> None:
    with ww.open(path, device="cpu", **options) as a:
        child = os.fork()
        if not child:
            try:
                a[3]
            except errors.ForkError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert a[3] == 3


def test_a_huge_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 40) - 8)
        file.write(np.int64(42).tobytes())
    with ww.open(path, "r+", dtype="i8", device="cpu") as a:
        assert a.tier == "mapped" and a[a.size - 1] == 42 and a[a.size // 2] == 0
        fill[100](a, 1)
        a.prefetch(0, 1000)
        a.evict(0, 1000)
        assert a[99] == 1 and a[100] == 0
    assert path.stat().st_blocks * 512 < 1 << 20


def test_empty_arrays_and_those_without_dimensions(tmp_path: Path) -> None:
    for k, items in enumerate((np.zeros((0, 3)), np.array(5.0))):
        np.save(tmp_path / f"{k}.npy", items)
        with ww.open(tmp_path / f"{k}.npy", device="cpu") as a:
            assert a.tier == "mapped"
            np.testing.assert_array_equal(np.asarray(a), items)


def test_residency_is_the_systems(path: Path) -> None:
    with ww.open(path, device="cpu") as a:
        a.prefetch(0, 100)
        a.pin(0, 100)
        a.unpin(0, 100)
        a.evict()
        out = np.zeros(N, np.int64)
        copy[N](a, out)
        assert out[-1] == N - 1


@pytest.mark.parametrize("tier", ["mapped", "storage"])
def test_a_relative_path_is_that_of_the_folder_where_it_was_opened(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", np.zeros(10))
    monkeypatch.chdir(tmp_path / "one")
    with ww.open("a.npy", "r+", device="cpu", tier=tier) as a:
        a[0] = 1
        monkeypatch.chdir(tmp_path / "two")  # a folder in which another file has this name
    assert np.load(tmp_path / "one" / "a.npy")[0] == 1
    monkeypatch.chdir(tmp_path / "one")
    a = ww.open("a.npy", "r+", device="cpu", tier=tier)
    monkeypatch.chdir(tmp_path)  # a folder without a file of this name
    (tmp_path / "two" / "a.npy").replace(tmp_path / "one" / "a.npy")
    with pytest.raises(errors.FormatError, match="replaced by another file"):
        a.close()
