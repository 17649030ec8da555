"""BaM's protocol, as `python -m lab bench` has it: reads and writes with few slots, and over frames that are full."""

from __future__ import annotations

import numpy as np
import pytest

import warpwell as ww
from lab.bench.micro import kernels
from lab.bench.micro.bam import BamCache
from warpwell.errors import WarpwellError
from warpwell.storage import RamMedium

ITEMS, THREADS = 64 * 512, 64


def opened(data, **options):
    return ww.open(RamMedium(data), dtype=np.int64, device="cpu", tier="storage", threads=1, **options)


def picked(a, cache, order):
    sums = np.array([0, THREADS])
    kernels.pick("BaM")[THREADS](a, 0, cache.address, order, 1, sums)
    return sums[0]


@pytest.mark.slow
@pytest.mark.parametrize("slots", [64, 65, 40])
def test_reads_with_few_slots(slots: int) -> None:
    # a thread references one page at a time, and there are up to 64 threads
    data = np.random.default_rng(slots).integers(0, 1 << 40, ITEMS)
    order = np.random.default_rng(1).integers(0, ITEMS, 20_000)
    with opened(data, cache="64KiB") as a:
        cache = BamCache(a, slots * 4096)
        assert picked(a, cache, order) == data[order].sum()
        assert picked(a, cache, order) == data[order].sum()
        cache.check()
        assert cache.misses == 64 if slots >= 64 else cache.misses > 64


@pytest.mark.slow
@pytest.mark.parametrize("slots", [64, 33])
def test_writes_come_back(slots: int) -> None:
    data = np.arange(ITEMS)
    target = np.zeros(ITEMS, np.int64)
    with opened(data, cache="64KiB") as a, opened(target, mode="r+", cache="64KiB") as c:
        from_, to = BamCache(a, 64 * 4096), BamCache(c, slots * 4096)
        kernels.vectors("BaM", 1)[THREADS](
            c, 0, to.address, a, 0, from_.address, a, 0, from_.address, ITEMS, ITEMS // THREADS, THREADS
        )
        to.flush()
        to.check()
        assert np.array_equal(target, data)


@pytest.mark.slow
def test_frames_that_hold_everything() -> None:
    data = np.random.default_rng(0).integers(0, 1 << 40, ITEMS)
    order = np.random.default_rng(1).integers(0, ITEMS, 20_000)
    with opened(data, cache="1MiB") as a:
        with pytest.raises(WarpwellError, match="not all pages"):
            BamCache.resident(a)
        a.pin()
        cache = BamCache.resident(a)
        assert picked(a, cache, order) == data[order].sum() and cache.misses == 0
