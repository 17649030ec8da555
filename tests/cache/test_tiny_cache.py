"""Caches of one frame, of two and of few: 64 OS threads come to the end, and the result is NumPy's."""

import re
from pathlib import Path

import numpy as np
import pytest

import warpwell as ww
from lab import media
from warpwell import errors, gpu, storage
from warpwell.cache.access import access
from warpwell.targets.compiler.compiled import lower
from warpwell.targets.compiler.hooks import intrinsics_for
from warpwell.targets.compiler.run_cpu import THREADS

PAGE = 512
ITEMS = 40 * PAGE // 8


@ww.kernel
def mixed(a, index, amount, sums):
    """Thread i writes and reads items that are its own, and adds to items that are everybody's."""
    i = gpu.grid(1)
    for k in range(index.shape[1]):
        own = 2 * (i + sums.size * (index[i, k] % (a.size // 2 // sums.size)))
        a[own] = a[own] + k + 1
        gpu.atomic_add(a, 2 * (index[i, k] % (a.size // 2)) + 1, amount[i, k])
        sums[i] += a[own]


@ww.kernel
def spread(a, out):
    i = gpu.grid(1)
    out[i] = a[(i * 64 * 7) % a.size]


@ww.kernel
def crowd(a, rounds, out):
    """All but one hammer one page; that one must still get its turns."""
    i = gpu.grid(1)
    if i == 5:
        for k in range(50):
            out[i] += a[64 * (1 + k % 7)]
    else:
        for _ in range(rounds):
            gpu.atomic_add(a, 0, 1)


def model_of(start, index, amount):
    """What `mixed` leaves: the order of threads makes no difference."""
    threads = index.shape[0]
    a, sums = start.copy(), np.zeros(threads, np.int64)
    for i in range(threads):
        for k in range(index.shape[1]):
            own = 2 * (i + threads * (index[i, k] % (a.size // 2 // threads)))
            a[own] += k + 1
            sums[i] += a[own]
    np.add.at(a, 2 * (index % (a.size // 2)) + 1, amount)
    return a, sums


@pytest.mark.quick("0-1-storage")
@pytest.mark.parametrize("tier", ["storage", "host-cached"])
@pytest.mark.parametrize("frames", [1, *(pytest.param(few, marks=pytest.mark.slow) for few in (2, 3)), 7])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_many_threads_and_few_frames(tmp_path: Path, frames: int, tier: str, seed: int) -> None:
    assert THREADS >= 64
    rng = np.random.default_rng(seed)
    start = rng.integers(-1000, 1000, ITEMS)
    rounds = 60 if frames > 1 else 10  # 64 threads take turns at a single frame for each access
    index = rng.integers(0, 1 << 40, (64, rounds))
    amount = rng.integers(-99, 99, (64, rounds))
    expected, expected_sums = model_of(start, index, amount)
    np.save(tmp_path / "a.npy", start)
    with ww.open(tmp_path / "a.npy", "r+", device="cpu", tier=tier, cache=frames * (PAGE + 8), page_size=PAGE) as a:
        assert a.cache.frames == frames
        sums = np.zeros(64, np.int64)
        mixed[64](a, index, amount, sums)
        np.testing.assert_array_equal(sums, expected_sums)
        np.testing.assert_array_equal(a[:], expected)
        s = a.stats
        assert s.evictions >= 100 and s.misses >= s.evictions
        assert s.writebacks > 0
        if tier == "storage":
            assert s.bytes_read >= s.misses * PAGE and s.write_commands >= s.writebacks
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected)


def test_a_page_table_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    small, large = np.arange(64 * 8), storage.RamMedium(np.zeros(64 * 8300, np.int64))
    np.save(tmp_path / "a.npy", small)
    with ww.Cache("64KiB", page_size=PAGE, device="cpu") as cache:
        a = ww.open(tmp_path / "a.npy", cache=cache)
        with pytest.raises(errors.ArgumentError, match="choose a larger page_size"):
            ww.open(large, dtype="i8", cache=cache)
        assert np.array_equal(a[:], small), "the cache serves its other arrays as before"
    with pytest.raises(errors.ArgumentError, match="at least") as refused:
        ww.open(large, dtype="i8", device="cpu", cache="64KiB", page_size=PAGE)
    advised = int(str(refused.value).split()[-2])
    with pytest.raises(errors.ArgumentError, match="at least"):
        ww.open(large, dtype="i8", device="cpu", cache=f"{advised - 1}KiB", page_size=PAGE)
    with ww.open(large, dtype="i8", device="cpu", cache=f"{advised}KiB", page_size=PAGE) as b:
        assert not b[::640].any()
    with ww.open(large, dtype="i8", device="cpu", cache="64KiB", page_size=2 * PAGE) as b:
        assert not b[::640].any()
    with ww.open(large, dtype="i8", device="cpu", cache="160KiB", page_size=PAGE) as b:
        assert not b[::640].any() and 8 * b.cache.space(b._nsid).pages > 64 << 10


def test_one_thread_gets_its_page_beside_a_crowd() -> None:
    medium = storage.RamMedium(np.zeros(64 * 10, np.int64))
    with ww.open(medium, "r+", dtype="i8", device="cpu", cache=PAGE + 8, page_size=PAGE) as a:
        out = np.zeros(64, np.int64)
        crowd[64](a, 20_000, out)
        assert a[0] == 63 * 20_000


@ww.kernel
def ask_for(a):
    a.prefetch(64 * 8 * gpu.grid(1))


@pytest.mark.parametrize("frames", [1, 2])
def test_prefetches_that_hold_all_frames_do_not_stop_a_miss(frames: int) -> None:
    """The frames belong to other queues than the miss, and no thread waits for them."""
    data = np.arange(64 * 64)
    medium = media.Faulty(storage.RamMedium(data), delay_us=50_000)
    options = {"dtype": "i8", "device": "cpu", "page_size": PAGE, "timeout": 5.0}
    with ww.open(medium, cache=frames * (PAGE + 8), **options) as a:
        ask_for[frames](a)
        assert a.stats.prefetched == frames
        out = np.zeros(8, np.int64)
        spread[8](a, out)
        np.testing.assert_array_equal(out, np.arange(8) * 64 * 7 % data.size)


@ww.kernel
def stroll(a, index, out):
    i = gpu.grid(1)
    for k in range(index.shape[1]):
        out[i] += a[64 * index[i, k]]


@pytest.mark.parametrize("tier", ["storage", "host-cached"])
def test_a_cache_as_large_as_its_data_comes_to_rest(tier):
    """Frames that many threads win for one page and give back are used before any resident page is evicted."""
    pages = 256
    index = np.random.default_rng(1).integers(0, pages, (THREADS, 400))
    with ww.open(
        storage.RamMedium(np.zeros(64 * pages, np.int64)), dtype=np.int64, page_size=PAGE, cache="1MiB", tier=tier
    ) as a:
        assert a.cache.frames == pages
        for _ in range(3):
            stroll[THREADS](a, index, np.zeros(THREADS, np.int64))
        a.cache.pin(a._nsid, 0, pages)
        a.cache.unpin(a._nsid, 0, pages)
        before = a.stats
        stroll[THREADS](a, index, np.zeros(THREADS, np.int64))
        assert a.stats.misses == before.misses
        assert a.stats.evictions == before.evictions


def test_who_stores_under_a_pin_acquires_the_word_then_executes_one_fence() -> None:
    """In the code that the compiler made of it: on x86 only the compiler could move the store."""
    intrinsics_for("cpu")
    text = lower(access).library.get_llvm_str()
    body = re.search(r"^define [^\n]*cache6access6access.*?^}", text, re.M | re.S)[0]
    steps = re.findall(r"load atomic i64, [^\n]* acquire|fence acq_rel|store atomic|atomicrmw f?add", body)
    kinds = [step.split(",")[0] for step in steps]
    assert kinds == ["load atomic i64", "fence acq_rel", *["store atomic"] * 4, *["atomicrmw add"] * 2]
