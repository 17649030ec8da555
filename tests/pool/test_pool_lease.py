"""Leases of devices, and calls to several devices at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors
from warpwell.pool.devices import Devices
from warpwell.scheduler import Scheduler


@pytest.fixture
def devices() -> Iterator[Devices]:
    with Devices(targets=["cpu", "cpu", "cpu"]) as found:
        yield found


def test_a_lease_is_nobody_elses(devices: Devices) -> None:
    with devices.lease(2) as two, devices.lease() as single:
        assert {d.index for d in (*two, *single)} == {0, 1, 2}
        with pytest.raises(errors.StallError, match="waited 0 s for 1 devices: 3 are leased"):
            devices.lease(timeout=0)
    again = devices.lease(3, target="cpu", memory=1, host=devices[0].host)
    assert len(again) == 3 and again[0] is devices[0] and "held" in repr(again)
    again.synchronize()
    again.release()
    again.release()
    assert again.released


def test_more_than_there_are(devices: Devices) -> None:
    with pytest.raises(errors.PoolError, match="4 devices were requested, but the pool has 3: request fewer"):
        devices.lease(4)
    with pytest.raises(errors.PoolError, match="1 devices were requested, target 'cuda', but the pool has 0"):
        devices.lease(target="cuda")
    with pytest.raises(errors.PoolError, match="memory"):
        devices.lease(memory=1 << 60)
    with pytest.raises(errors.ArgumentError):
        devices.lease(0)
    devices[0].caller.transport.lose(devices[0].connection.rank, "killed")  # type: ignore[attr-defined]
    with pytest.raises(errors.PoolError, match=r"the pool has 2 \(1 are lost\)"):
        devices.lease(3)
    assert [d.index for d in devices.lease(2)] == [1, 2]


def test_a_dropped_lease_is_given_back(devices: Devices) -> None:
    lease = devices.lease(3)
    del lease
    gc.collect()
    devices.lease(3, timeout=0).release()


def test_a_waiting_request_is_ended_by_a_loss(devices: Devices) -> None:
    held = devices.lease(1)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            devices.lease(3, timeout=HANG_SECONDS)
        except errors.PoolError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    devices[2].caller.transport.lose(devices[2].connection.rank, "killed")  # type: ignore[attr-defined]
    thread.join(HANG_SECONDS)
    assert failed and "lost" in str(failed[0])
    held.release()


def test_threads_share_fairly(devices: Devices) -> None:
    got = [0] * 4
    stop = threading.Event()

    def work(k: int, count: int) -> None:
        while not stop.is_set():
            with devices.lease(count, timeout=HANG_SECONDS) as lease:
                assert len(lease) == count
                got[k] += 1
                stop.wait(0.002)

    threads = [threading.Thread(target=work, args=(k, 3 if k == 0 else 1)) for k in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: min(got) >= 10)  # also the thread that needs all devices
    stop.set()
    for thread in threads:
        thread.join(HANG_SECONDS)


def test_a_lease_is_a_pool_for_a_scheduler(devices: Devices) -> None:
    with devices.lease(2) as lease, Scheduler(devices=lease) as scheduler:
        assert len(scheduler.inspect(lambda core: None)) == 2  # type: ignore[arg-type]


def test_a_call_to_several_devices(devices: Devices) -> None:
    buffers = ww.broadcast(devices, lambda device, k: ww.to_device(np.full(4, device.index + k)), 10)
    assert [b.device for b in buffers] == list(devices)
    sums = ww.broadcast(devices, lambda device: device.call(np.sum, buffers[device.index]))
    assert sums == [40, 44, 48]


def test_failures_of_a_call_to_several_devices(devices: Devices) -> None:
    done = []

    def call(device: ww.pool.device.Device) -> object:
        done.append(device.index)
        if device.index == 0:
            raise ValueError("here")
        return device.call(np.linalg.inv, np.zeros((2, 2))) if device.index == 2 else None

    with pytest.raises(ValueError, match="here") as caught:
        ww.broadcast(devices, call)
    assert done == [0, 1, 2]
    assert any("on device 2: RemoteError" in note for note in caught.value.__notes__)
    devices.synchronize()
