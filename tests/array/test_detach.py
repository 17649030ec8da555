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
from tests.harness.clock import time_passes
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab import media
from lab.media.gated import GatedMedium
from warpwell import errors, gpu, storage
from warpwell.queues import QueuePairs
from warpwell.storage.controller import Controller
from warpwell.storage.medium import NativeMedium
from warpwell.targets import memory_for

PER = PAGE // 8
N = 64 * PER
TIMEOUT = 1000.0
"""Timeout in seconds on the clock of the test, not in real time."""


@ww.kernel
def ask_for(a, rows, done):
    i = gpu.grid(1)
    done[i] = a.prefetch(rows[i])


class Watched(storage.RamMedium):
    """A medium that is slow to say that nothing is complete."""

    def __init__(self) -> None:
        super().__init__(np.arange(N))
        self.inside = 0
        call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 2)
        self._complete = call(self._nothing)

    def _nothing(self, *_: int) -> int:
        self.inside += 1
        time.sleep(0.01)
        self.inside -= 1
        return 0

    def native(self) -> NativeMedium:
        function = ctypes.cast(self._complete, ctypes.c_void_p).value or 0
        return NativeMedium(super().native().start, function, super().native().state)


def test_no_thread_is_left_in_a_medium() -> None:
    medium = Watched()
    controller = Controller(QueuePairs(memory_for("cpu"), count=1, depth=8, staging_bytes=512), threads=1)
    nsid = controller.attach(medium)
    with controller.active():
        for _ in range(3):
            assert until(lambda: medium.inside == 1)
            controller.detach(nsid)
            assert medium.inside == 0
            nsid = controller.attach(medium)
    controller.close()


def opened(cache: ww.Cache, medium: Any) -> ww.Array:
    return ww.open(medium, "r", dtype="i8", device="cpu", cache=cache)


def test_commands_in_flight_are_answered_though_others_use_the_cache() -> None:
    out, done = np.zeros(1, np.int64), np.zeros(3, np.int64)
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=TIMEOUT) as cache:
        gates = [GatedMedium(storage.RamMedium(np.arange(N))) for _ in range(2)]
        remaining, closed = (opened(cache, gate) for gate in gates)
        for gate in gates:
            gate.hold()
        reader = threading.Thread(target=lambda: read[1](remaining, np.array([9]), out))
        reader.start()
        ask_for[3](closed, np.arange(3) * PER, done)
        assert done.all() and until(lambda: gates[0].held == 1 and gates[1].held >= 1)
        closing = threading.Thread(target=closed.close)
        closing.start()
        gates[1].release()
        closing.join(HANG_SECONDS)
        assert not closing.is_alive() and reader.is_alive() and gates[0].held == 1
        gates[0].release()
        reader.join(HANG_SECONDS)
        assert out[0] == 9
        third = opened(cache, storage.RamMedium(np.arange(N)))  # opening it waits for all commands
        assert third[7] == 7


def test_an_array_whose_drive_is_stalled_leaves_without_keeping_others_waiting() -> None:
    done, out = np.zeros(3, np.int64), np.zeros(1, np.int64)
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=TIMEOUT) as cache:
        medium = GatedMedium(storage.RamMedium(np.arange(N)))
        stalled, well = opened(cache, medium), opened(cache, storage.RamMedium(np.arange(N)))
        medium.hold()
        ask_for[3](stalled, np.arange(3) * PER, done)
        assert until(lambda: medium.held >= 1)
        closing = threading.Thread(target=stalled.close)
        closing.start()
        # The timeout of the stalled drive has not started to pass when these launches end.
        for k in range(5):
            read[1](well, np.array([k * PER]), out)
            assert out[0] == k * PER
        assert closing.is_alive()
        with time_passes(TIMEOUT):
            closing.join(HANG_SECONDS)
        assert not closing.is_alive()
        medium.release()


def test_opening_an_array_raises_no_error_of_another() -> None:
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=TIMEOUT) as cache:
        medium = GatedMedium(storage.RamMedium(np.arange(N)))
        first = opened(cache, medium)
        medium.hold()
        done = np.zeros(1, np.int64)
        ask_for[1](first, np.zeros(1, np.int64), done)
        assert cache.pairs.in_use()
        # an error as a launch in a stream leaves it
        cache._pending.append(({first._nsid}, errors.MediumError("page 3 of the first array", lba=0, status=1)))
        threading.Timer(0.1, medium.release).start()  # releases the command while `opened` waits for it
        second = opened(cache, storage.RamMedium(np.arange(N)))
        assert second[7] == 7
        with pytest.raises(errors.MediumError, match="first array"):
            first[0]


def test_an_error_of_a_closed_array_is_not_that_of_the_next_one() -> None:
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu") as cache:
        first = opened(cache, storage.RamMedium(np.arange(N)))
        nsid = first._nsid
        # an error as another library's kernel leaves it, after `close` has looked for errors
        first._part._take_stream_errors = list
        cache._pending.append(({nsid}, errors.MediumError("page 3 of the first array", lba=0, status=1)))
        first.close()
        second = opened(cache, storage.RamMedium(np.arange(N)))
        assert second._nsid == nsid and second[7] == 7


def test_a_forked_child_waits_for_no_prefetch() -> None:
    with ww.Cache(100 * (PAGE + 8), page_size=PAGE, device="cpu") as cache:
        medium = GatedMedium(storage.RamMedium(np.arange(N)))
        a = opened(cache, medium)
        medium.hold()
        future = a.prefetch()
        child = os.fork()
        if child == 0:
            try:
                future.result(HANG_SECONDS)
            except errors.ForkError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        medium.release()
        counts = future.result(HANG_SECONDS)
        assert counts.loaded == counts.pages > 0


def test_pinned_pages_are_written_beside_a_prefetch() -> None:
    values = np.arange(N)
    with ww.Cache(20 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=1e6) as cache:
        medium = media.Latency(storage.RamMedium(values), latency_us=(0.1 * TIMEOUT * 1e6, 0.0))  # of reads, of writes
        a = ww.open(medium, "r+", dtype="i8", device="cpu", cache=cache)
        with time_passes(0.1 * TIMEOUT):
            a.pin(0, PER)
        add[1](a, np.zeros(1, np.int64), np.full(1, 5))
        future = a.prefetch(10 * PER, 15 * PER)
        assert until(lambda: cache.bulk.commands)
        a.flush()
        assert values[0] == 5 and not future.done()
        with time_passes(0.1 * TIMEOUT):
            assert until(lambda: future.done())
