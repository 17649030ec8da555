"""Tests that need a GPU: many resident warps on a tiny cache, streams, plain kernels, DLPack, faults."""

from __future__ import annotations

import time

import numpy as np
import pytest

import warpwell as ww
from lab.media import Faulty
from warpwell import errors, gpu
from warpwell.storage import RamMedium

ITEMS = 1 << 14
THREADS = 1024


@ww.kernel
def mixed(a, order, reads, sums, rounds):
    """Read at random, write the thread's own items, add everywhere."""
    i = gpu.grid(1)
    for k in range(rounds):
        at = order[(i * 31 + k * 977) % order.size]
        reads[i] += a[at % 4096]
        a[8192 + i * 4 + (k & 3)] = i * 1000 + k
        gpu.atomic_add(a, 4096 + at % 4096, 1)
        gpu.atomic_add(sums, at % 4096, 1)


@ww.kernel
def strided(a, out, step):
    """Every lane of a warp misses another page at once."""
    i = gpu.grid(1)
    out[i] = a[i * step]


@ww.kernel
def read_all(a, out):
    i = gpu.grid(1)
    out[i] = a[i]


def medium(n=ITEMS, **faults):
    inner = RamMedium(np.arange(n, dtype=np.int64), writable=True)
    return Faulty(inner, **faults) if faults else inner


def opened(source, **options):
    options = {"page_size": 512, "cache": 512, "timeout": 20, **options}
    return ww.open(source, "r+", dtype=np.int64, device="cuda", **options)


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_1024_resident_threads_on_a_tiny_cache_equal_the_model(frames):
    from numba import cuda

    source = medium()
    rounds = 8
    order = np.random.default_rng(frames).integers(0, ITEMS, 4096)
    reads = cuda.to_device(np.zeros(THREADS, np.int64))
    sums = cuda.to_device(np.zeros(4096, np.int64))
    with opened(source, cache=frames * 520) as a:
        assert a.cache.frames == frames
        mixed[THREADS](a, cuda.to_device(order), reads, sums, rounds)
        a.flush()
        got = a[:].copy_to_host()
        assert a.stats.evictions > 0
    model = np.arange(ITEMS)
    expected = np.zeros(THREADS, np.int64)
    i = np.arange(THREADS)
    for k in range(rounds):
        at = order[(i * 31 + k * 977) % order.size]
        expected += at % 4096
        np.add.at(model, 4096 + at % 4096, 1)
        model[8192 + i * 4 + (k & 3)] = i * 1000 + k
    assert (reads.copy_to_host() == expected).all()
    assert (got == model).all()


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("merge", [1, 4])
def test_one_warp_that_misses_32_pages_with_one_frame_finishes(frames, merge):
    from numba import cuda

    out = cuda.to_device(np.zeros(32, np.int64))
    with opened(medium(), cache=frames * 520, merge=merge) as a:
        strided[32](a, out, 64)
    assert (out.copy_to_host() == np.arange(32) * 64).all()


def test_many_warps_missing_everywhere():
    from numba import cuda

    out = cuda.to_device(np.zeros(ITEMS, np.int64))
    for tier in ("storage", "host-cached", "host", "device"):
        with opened(medium(), cache="16KiB", tier=tier) as a:
            read_all[ITEMS](a, out)
            assert (out.copy_to_host() == np.arange(ITEMS)).all(), tier


def test_adjacent_pages_of_a_warp_travel_in_one_command():
    from numba import cuda

    out = cuda.to_device(np.zeros(32, np.int64))
    with opened(medium(), cache="64KiB", merge=8) as a:
        strided[32](a, out, 64)
        stats = a.stats
    assert stats.misses == 32 and stats.read_commands < 32
    assert (out.copy_to_host() == np.arange(32) * 64).all()


def test_a_medium_that_fails_every_100th_read_raises_and_names_array_and_block():
    from numba import cuda

    out = cuda.to_device(np.zeros(ITEMS, np.int64))
    with opened(medium(fail_every=100), cache="4KiB", name="faulty") as a:
        start = time.monotonic()
        with pytest.raises(errors.MediumError, match=r"faulty.*LBA"):
            read_all[ITEMS](a, out)
        assert time.monotonic() - start < 30


def test_a_medium_that_stops_answering_raises_in_bounded_time():
    from numba import cuda

    out = cuda.to_device(np.zeros(ITEMS, np.int64))
    source = medium(silent_after=20)
    with opened(source, cache="4KiB", name="silent", timeout=2) as a:
        start = time.monotonic()
        with pytest.raises(errors.StallError, match=r"silent.*LBA"):
            read_all[ITEMS](a, out)
        assert time.monotonic() - start < 30
        source.resume()
        read_all[ITEMS](a, out)  # late completions are released, and the array works again
        assert (out.copy_to_host() == np.arange(ITEMS)).all()


def test_an_index_out_of_range_raises_after_the_launch():
    from numba import cuda

    out = cuda.to_device(np.zeros(ITEMS + 32, np.int64))
    with opened(medium(), cache="64KiB", name="short") as a:
        with pytest.raises(errors.IndexRangeError, match="short"):
            read_all[ITEMS + 32](a, out)
        read_all[ITEMS](a, out)
        assert (out.copy_to_host()[:ITEMS] == np.arange(ITEMS)).all()


def test_a_plain_numba_cuda_kernel_takes_a_view():
    from numba import cuda

    @cuda.jit(extensions=[gpu.numba_cuda], max_registers=64)
    def plain(a, out):
        i = cuda.grid(1)
        if i < a.size:
            out[i] = a[i] + len(a)

    out = cuda.to_device(np.zeros(ITEMS, np.int64))
    with opened(medium(), cache="16KiB") as a:
        with a.active() as view:
            plain[-(-ITEMS // 128), 128](view, out)
        assert (out.copy_to_host() == np.arange(ITEMS) + ITEMS).all()


def test_a_stream_makes_the_launch_asynchronous():
    from numba import cuda

    stream = cuda.stream()
    out = cuda.to_device(np.zeros(ITEMS, np.int64))
    with opened(medium(), cache="16KiB") as a:
        read_all[ITEMS, stream](a, out)
        stream.synchronize()
        assert (out.copy_to_host() == np.arange(ITEMS)).all()


def test_gather_results_go_out_by_dlpack_without_a_copy():
    torch = pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    index = np.random.default_rng(0).integers(0, ITEMS, 1000)
    with opened(medium(), cache="64KiB") as a:
        rows = a[index]
        assert (torch.from_dlpack(rows).cpu().numpy() == index).all()
        assert (cupy.from_dlpack(rows).get() == index).all()
        assert (cupy.asarray(rows).get() == index).all()


def test_prefetch_pin_and_evict():
    from numba import cuda

    out = cuda.to_device(np.zeros(ITEMS, np.int64))
    with opened(medium(), cache="64KiB") as a:
        a.pin(0, 256)
        before = a.stats.misses
        read_all[256](a, out)
        assert a.stats.misses == before
        a.unpin(0, 256)
        a.evict(0, 256)
        a.prefetch(0, 256)
        read_all[ITEMS](a, out)
        assert a.stats.prefetched > 0
        assert (out.copy_to_host() == np.arange(ITEMS)).all()


@ww.kernel
def hold_all(a, out, held):
    """Every thread holds its item's page while it reads."""
    i = gpu.grid(1)
    if a.pin(i):
        out[i] = a[i]
        gpu.atomic_add(held, 0, 1)
        a.unpin(i)


def test_a_cache_that_holds_all_pages_is_read_as_memory():
    from numba import cuda

    out, held = cuda.to_device(np.zeros(ITEMS, np.int64)), cuda.to_device(np.zeros(1, np.int64))
    with opened(medium(), cache="1MiB") as a:

        def complete() -> bool:
            with a.active() as view:
                return bool(view.fully_resident)

        assert not complete()
        read_all[ITEMS](a, out)
        assert any(complete() for _ in range(64)), "the host looks again after some launches"
        misses = a.stats.misses
        for _ in range(2):
            hold_all[ITEMS](a, out, held)
        strided[ITEMS // 64](a, out, 64)
        assert a.stats.misses == misses and a.cache._count_pinned(a._nsid) == 0
        assert held.copy_to_host()[0] == 2 * ITEMS
        assert (out.copy_to_host()[: ITEMS // 64] == np.arange(0, ITEMS, 64)).all()
        a.evict(0, 128)
        assert not complete()
        read_all[ITEMS](a, out)
        assert (out.copy_to_host() == np.arange(ITEMS)).all() and a.stats.misses == misses + 2


@pytest.mark.parametrize("frames", [2, 5, 200])
def test_many_warps_hold_pages_of_few_frames(frames):
    from numba import cuda

    out, held = cuda.to_device(np.zeros(ITEMS, np.int64)), cuda.to_device(np.zeros(1, np.int64))
    with opened(medium(), cache=520 * frames) as a:
        assert a.cache.frames == frames
        for _ in range(3):
            hold_all[ITEMS](a, out, held)
            assert a.cache._count_pinned(a._nsid) == 0
        assert held.copy_to_host()[0] > 0
        a.evict()


def test_numpy_arguments_that_share_memory_share_it_on_the_gpu() -> None:
    @ww.kernel
    def step(x, y):
        if gpu.grid(1) == 0:
            for k in range(y.size):
                y[k] = x[k] + 1

    for arguments in (lambda a: (a, a[2:6]), lambda a: (a, a), lambda a: (a, a[::-1]), lambda a: (a, a[1::2])):
        expected, found, task = np.arange(12), np.arange(12), np.arange(12)
        step[1](*arguments(expected), device="cpu")
        step[1](*arguments(found), device="cuda")
        with ww.scheduler.Scheduler() as scheduler:
            scheduler.submit(step[1], *arguments(task)).result(60)
        assert found.tolist() == task.tolist() == expected.tolist()
