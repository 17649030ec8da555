"""Arrays and launches without a device of their own go to `current_device`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.gate_file import gate_file, wait_for_file
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu
from warpwell.pool import devices as found
from warpwell.pool.devices import Devices
from warpwell.remote import RemoteArray


@ww.kernel
def total(items, out):
    i = gpu.grid(1)
    if i < items.size:
        gpu.atomic_add(out, 0, items[i])


@pytest.fixture
def pool() -> Iterator[Devices]:
    with Devices(targets=["cpu", "cpu"]) as made:
        found.use(made)
        yield made
        found.use(None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(100))
    return tmp_path / "a.npy"


def launches(pool: Devices) -> list[int]:
    return [device.trace().get("LAUNCH", (0, 0, 0.0))[0] for device in pool]


def test_launches_outside_of_blocks_are_the_first_devices(pool: Devices) -> None:
    out = np.zeros(1, np.int64)
    total[10](np.arange(10), out)
    assert out[0] == 45 and launches(pool) == [1, 0]
    assert ww.current_device() is ww.to_device(out).device is ww.zeros(3).device is ww.empty_like(out).device is pool[0]
    with pool[1]:
        total[10](np.arange(10), out)
    assert out[0] == 90 and launches(pool) == [1, 1]
    total[10](np.arange(10), out, device="cpu")  # in this process, as requested
    assert out[0] == 135 and launches(pool) == [1, 1]


def test_each_thread_has_a_current_device_of_its_own(pool: Devices) -> None:
    both, results = threading.Barrier(2, timeout=HANG_SECONDS), []

    def work(device: Any) -> None:
        with device:
            both.wait()
            out = np.zeros(1, np.int64)
            total[10](np.arange(10), out)
            both.wait()
            results.append((ww.current_device() is device, ww.zeros(1).device is device, out[0]))

    run_threads(work, [(device,) for device in pool])
    assert results == [(True, True, 45)] * 2 and launches(pool) == [1, 1]
    assert ww.current_device() is pool[0]


def test_files_are_opened_and_made_there(pool: Devices, path: Path, tmp_path: Path) -> None:
    out = np.zeros(1, np.int64)
    with ww.open(path, cache="64KiB") as array:
        assert isinstance(array, RemoteArray) and array.device is pool[0]
        total[100](array, out)
    with pool[1], ww.create(tmp_path / "new.npy", 10, np.int64) as made:
        assert isinstance(made, RemoteArray) and made.device is pool[1]
        made[3] = 5
    assert out[0] == 4950 and launches(pool) == [1, 0] and np.load(tmp_path / "new.npy")[3] == 5


def test_what_is_of_this_process_stays_in_it(pool: Devices, path: Path) -> None:
    out = np.zeros(1, np.int64)
    with ww.open(path, device="cpu") as array:
        total[100](array, out)
        with pool[1]:
            total[100](array, out)
            assert array[np.array([7, 5])].tolist() == [7, 5]
    cache = ww.Cache("64KiB", device="cpu")
    with pool[1], ww.open(path, cache=cache) as array:
        assert isinstance(array, ww.Array)
    cache.close()
    assert out[0] == 2 * 4950 and launches(pool) == [0, 0]


def test_files_that_cannot_be_opened_there_raise_what_they_raise_here(pool: Devices, path: Path) -> None:
    with pytest.raises(errors.MissingFileError, match="does not exist"):
        ww.open(path.with_name("nothing.npy"))
    with pytest.raises(errors.ArgumentError, match="exists: open it"):
        ww.create(path, 10)
    with pytest.raises(errors.ArgumentError, match="no option 'speed'"):
        ww.open(path, speed=3)
    pool[0].synchronize()


def test_a_program_of_one_process_stays_in_it(path: Path) -> None:
    device, out = ww.devices()[0], np.zeros(1, np.int64)
    before = launches(ww.devices())
    total[10](np.arange(10), out)
    with ww.open(path) as array:
        assert isinstance(array, ww.Array)
    assert out[0] == 45 and launches(ww.devices()) == before and ww.current_device() is device


def test_a_forked_child_is_told_which_device_it_used(pool: Devices, tmp_path: Path) -> None:
    with gate_file(tmp_path) as gate:
        buffers = [device.zeros(3) for device in pool]
        waiting = [device.call(wait_for_file, str(gate)) for device in pool]
        reading, writing = os.pipe()
        if not (child := os.fork()):
            devices_named = []
            for use in (*(b.copy_to_host for b in buffers), *(w.get for w in waiting)):
                try:
                    use()
                except errors.ForkError as error:
                    devices_named.append(str(error).partition(" (")[0])
            os.write(writing, repr((devices_named, found.joined())).encode())  # it is no part of the pool
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as report:
            assert report.read() == repr((["device 0", "device 1"] * 2, False))
        assert os.waitpid(child, 0)[1] == 0
    for result in waiting:
        result.get(HANG_SECONDS)
