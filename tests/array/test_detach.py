"""An array leaves a cache that others use: no thread stays in its medium, no command stays without an answer."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.harness.arrays.kernels import PAGE, add, read

import warpwell as ww
from warpwell import errors, storage
from warpwell.queues import QueuePairs
from warpwell.storage.controller import Controller
from warpwell.storage.medium import NativeMedium
from warpwell.targets import memory_for

PER = PAGE // 8
N = 64 * PER
pytestmark = pytest.mark.timeout(120)


@ww.kernel
def ask_for(a, rows, done):
    i = ww.grid(1)
    done[i] = a.prefetch(rows[i])


class Watched(storage.RamMedium):
    """A medium that is slow to say that nothing is complete."""

    def __init__(self) -> None:
        super().__init__(np.arange(N))
        self.inside = 0
        call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)
        self._complete = call(self._nothing)

    def _nothing(self, *_: int) -> int:
        self.inside += 1
        time.sleep(0.1)
        self.inside -= 1
        return -1

    def native(self) -> NativeMedium:
        function = ctypes.cast(self._complete, ctypes.c_void_p).value or 0
        return NativeMedium(super().native().start, function, super().native().state)


def test_no_thread_is_left_in_a_medium() -> None:
    medium = Watched()
    controller = Controller(QueuePairs(memory_for("cpu"), count=1, depth=8, staging_bytes=512), threads=1)
    nsid = controller.attach(medium)
    with controller.active():
        for _ in range(3):
            end = time.monotonic() + 30
            while not medium.inside and time.monotonic() < end:
                time.sleep(0.001)
            assert medium.inside == 1
            controller.detach(nsid)
            assert medium.inside == 0
            nsid = controller.attach(medium)
    controller.close()


def opened(cache: ww.Cache, medium: Any) -> ww.Array:
    return ww.open(medium, "r", dtype="i8", device="cpu", cache=cache)


def test_commands_in_flight_are_answered_though_others_use_the_cache() -> None:
    out, done = np.zeros(1, np.int64), np.zeros(3, np.int64)
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=5.0) as cache:
        with opened(cache, storage.RamMedium(np.arange(N))) as first:  # compiles the kernels
            ask_for[3](first, np.arange(3) * PER, done)
            read[1](first, np.array([5]), out)
        stays = opened(cache, storage.Faulty(storage.RamMedium(np.arange(N)), delay_us=1_800_000))
        leaves = opened(cache, storage.Latency(storage.RamMedium(np.arange(N)), latency_us=500_000.0))
        beside = threading.Thread(target=lambda: read[1](stays, np.array([9]), out))
        beside.start()
        ask_for[3](leaves, np.arange(3) * PER, done)
        assert done.all() and cache.pairs.in_use() >= 3
        leaves.close()
        assert beside.is_alive()
        beside.join(60)
        assert out[0] == 9
        other = opened(cache, storage.RamMedium(np.arange(N)))  # waits for all commands
        assert other[7] == 7


def test_an_array_whose_drive_is_stalled_leaves_without_keeping_others_waiting() -> None:
    done, out = np.zeros(3, np.int64), np.zeros(1, np.int64)
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=3.0) as cache:
        medium = storage.Faulty(storage.RamMedium(np.arange(N)))
        stalled, well = opened(cache, medium), opened(cache, storage.RamMedium(np.arange(N)))
        ask_for[3](well, np.arange(3) * PER, done)  # compiles the kernels
        read[1](well, np.array([5]), out)
        medium.stop()
        ask_for[3](stalled, np.arange(3) * PER, done)
        assert cache.pairs.in_use() >= 3
        closing = threading.Thread(target=stalled.close)
        closing.start()
        begun, longest, launches = time.monotonic(), 0.0, 0
        while closing.is_alive() and time.monotonic() < begun + 30:
            before = time.monotonic()
            read[1](well, np.array([launches % N]), out)
            assert out[0] == launches % N
            longest, launches = max(longest, time.monotonic() - before), launches + 1
        closing.join(60)
        assert time.monotonic() - begun > 2.5, "the drive was not stalled"
        assert longest < 1.5 and launches > 3
        medium.resume()


def test_opening_an_array_raises_no_error_of_another() -> None:
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=3.0) as cache:
        first = opened(cache, storage.Latency(storage.RamMedium(np.arange(N)), latency_us=200_000.0))
        done = np.zeros(1, np.int64)
        ask_for[1](first, np.zeros(1, np.int64), done)
        assert cache.pairs.in_use()
        # as a launch in a stream leaves it
        cache._pending.append(({first._nsid}, errors.MediumError("page 3 of the first array", lba=0, status=1)))
        second = opened(cache, storage.RamMedium(np.arange(N)))
        assert second[7] == 7
        with pytest.raises(errors.MediumError, match="first array"):
            first[0]


def test_an_error_of_a_closed_array_is_not_that_of_the_next_one() -> None:
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu") as cache:
        first = opened(cache, storage.RamMedium(np.arange(N)))
        nsid = first._nsid
        # as a kernel that Warpwell did not launch leaves it, after `close` has looked
        first._part._left = list
        cache._pending.append(({nsid}, errors.MediumError("page 3 of the first array", lba=0, status=1)))
        first.close()
        second = opened(cache, storage.RamMedium(np.arange(N)))
        assert second._nsid == nsid and second[7] == 7


def test_a_forked_child_waits_for_no_prefetch() -> None:
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu") as cache:
        a = opened(cache, storage.Latency(storage.RamMedium(np.arange(N)), latency_us=1_000_000.0))
        ticket = a.prefetch()
        child = os.fork()
        if child == 0:
            try:
                ticket.wait(20)
            except errors.ForkError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert ticket.wait(20) and ticket.came == ticket.pages


def test_pinned_pages_are_written_beside_a_prefetch() -> None:
    values = np.arange(N)
    with ww.Cache(20 * (PAGE + 8), page_size=PAGE, device="cpu") as cache:
        medium = storage.Latency(storage.RamMedium(values), latency_us=(300_000.0, 0.0))
        a = ww.open(medium, "r+", dtype="i8", device="cpu", cache=cache)
        a.pin(0, PER)
        add[1](a, np.zeros(1, np.int64), np.full(1, 5))
        ticket = a.prefetch(10 * PER, 15 * PER)
        end = time.monotonic() + 30
        while not cache.bulk.commands and time.monotonic() < end:
            time.sleep(1e-3)
        a.flush()
        assert values[0] == 5 and not ticket.done
        assert ticket.wait(20)
