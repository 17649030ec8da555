"""Devices of a pool whose agents are threads of this process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.gate_file import gate_file, wait_for_file
from tests.harness.pool_programs import run
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors, gpu
from warpwell.pool.devices import Devices


@gpu.function
def twice(v):
    return 2 * v


@ww.kernel
def scale(x, y, factor):
    i = gpu.grid(1)
    y[i] = twice(x[i]) * factor


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(targets=["cpu", "cpu", "cpu"]) as found:
        yield found


def test_a_kernel_runs_where_the_block_says(devices: Devices) -> None:
    a = np.arange(1000.0)
    with devices[1]:
        x = ww.to_device(a)
        y = ww.empty_like(x)
        scale[x.size](x, y, 2.0)
        assert y.device is devices[1]
        out = y.copy_to_host()
    assert np.array_equal(out, 4 * a)


def test_a_kernel_runs_where_its_buffers_are(devices: Devices) -> None:
    a = np.arange(50, dtype=np.float32)
    x = devices[2].to_device(a)
    y = ww.empty_like(x)
    with devices[0]:
        scale[50](x, y, np.float32(3))
    assert np.array_equal(np.asarray(y), 6 * a)


def test_numpy_arrays_go_there_and_back(devices: Devices) -> None:
    a, b = np.arange(20.0), np.zeros(40)
    with devices[0]:
        scale[20](a, b[::2], 1.0)
    assert np.array_equal(b[::2], 2 * a) and not b[1::2].any()


def test_a_buffer_of_another_device_is_refused(devices: Devices) -> None:
    x, y = devices[0].zeros(4), devices[1].zeros(4)
    with pytest.raises(errors.ArgumentError, match="on device 1, but the call is for device 0: copy it"):
        scale[4](x, y, 1.0)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [0, 1, 3, 8191, 8193, 100_001, 1_200_001])
def test_copies_of_all_sizes_there_across_and_back(devices: Devices, items: int) -> None:
    a = np.random.default_rng(items).random(items)
    x = devices[0].to_device(a)
    y = devices[1].to_device(x)
    z = ww.empty_like(y)
    z.copy_from(y)
    assert np.array_equal(z.copy_to_host(), a)


def test_unaligned_parts_and_odd_items(devices: Devices) -> None:
    kind = np.dtype([("a", "u1"), ("b", "<u2")])
    a = np.zeros(50_000, kind)
    a["a"], a["b"] = np.arange(50_000) % 251, np.arange(50_000) % 65_521
    x = devices[0].to_device(a)
    y = devices[2].zeros(50_000, kind)
    y[1:40_002].copy_from(x[3:40_004])
    expected = np.zeros_like(a)
    expected[1:40_002] = a[3:40_004]
    assert np.array_equal(y.copy_to_host(), expected)


def test_arrays_that_are_not_contiguous(devices: Devices) -> None:
    a = np.random.default_rng(0).random((300, 200))
    x = devices[0].to_device(a.T)
    out = np.zeros((400, 300))[::2]
    assert np.array_equal(x.copy_to_host(out), a.T)
    assert np.array_equal(out, a.T)


def test_a_source_may_change_as_soon_as_a_copy_returns(devices: Devices) -> None:
    for items in (100, 20_000, 2_000_000):
        a = np.ones(items)
        x = devices[0].to_device(a)
        a[:] = 7
        assert (x.copy_to_host() == 1).all()


def test_pinned_memory_is_lent(devices: Devices) -> None:
    a = ww.pinned_empty((500, 1000), np.float32)
    a[:] = np.arange(1000)
    x = devices[0].to_device(a)
    devices[0].synchronize(30)
    a[:] = 0
    assert np.array_equal(x.copy_to_host(), np.broadcast_to(np.arange(1000, dtype=np.float32), (500, 1000)))


def test_views_share_memory(devices: Devices) -> None:
    x = devices[0].zeros((4, 5), np.int32)
    x[1:3] = 7
    x[-1] = np.arange(5, dtype=np.int32)
    first = x[0]
    x.free()
    assert first.copy_to_host().tolist() == [0] * 5
    with pytest.raises(errors.ClosedError):
        x.copy_to_host()
    x.free()


def test_wrong_sizes_and_kinds(devices: Devices) -> None:
    x, y = devices[0].zeros(4), devices[1].zeros(5)
    for wrong in (np.zeros(5), np.zeros(4, np.float32), y):
        with pytest.raises(errors.ArgumentError, match="must have the dtype and shape of the buffer"):
            x.copy_from(wrong)
    with pytest.raises(errors.ArgumentError, match="must have the dtype and shape of the buffer"):
        x.copy_to_host(np.zeros(3))
    with pytest.raises(errors.ArgumentError, match="overlaps"):
        x[:3].copy_from(x[1:])
    with pytest.raises(errors.DTypeError):
        devices[0].empty(3, object)
    with pytest.raises(IndexError):
        x[4]
    with pytest.raises(errors.ArgumentError, match="slice of step 1"):
        x[::2]
    with pytest.raises(errors.ArgumentError, match="belongs to device 1"):
        x.copy_to_host(stream=devices[1].stream())


def test_opposite_copies_by_two_threads_do_not_wait_for_each_other(devices: Devices) -> None:
    a, b = (devices[0].full(100_000, float(k)) for k in range(2))
    c, d = (devices[1].full(100_000, float(k)) for k in range(2, 4))

    def copy(destination: ww.pool.device.Buffer, source: ww.pool.device.Buffer) -> None:
        for _ in range(50):
            destination.copy_from(source)

    run_threads(copy, [(c, a), (b, d), (d, a), (a, c)])
    devices.synchronize(60)


# -- errors ------------------------------------------------------------------------------------------------------------


class Odd(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("odd")
        self.lock = threading.Lock()


def fail(kind: str) -> None:
    if kind == "odd":
        raise Odd
    raise KeyError(kind)


@ww.kernel
def wrong(x):
    i = gpu.grid(1)
    x[i] = x.no_such_thing


def test_a_failure_is_raised_once_by_the_next_synchronization(devices: Devices) -> None:
    device = devices[0]
    x = device.zeros(4)
    wrong[4](x)
    x.fill(3.0)  # later calls still run
    with pytest.raises(errors.RemoteError, match="launch of 'wrong' failed on device 0") as caught:
        x.copy_to_host()
    assert caught.value.call == "launch of 'wrong'"
    assert "no_such_thing" in str(caught.value.remote_traceback)
    assert x.copy_to_host().tolist() == [3.0] * 4
    device.synchronize(30)


def test_failures_belong_to_their_stream(devices: Devices) -> None:
    failing, healthy = devices[0].stream(), devices[0].stream()
    x = devices[0].zeros(4, stream=failing)
    wrong[4, failing](x)
    wrong[4, failing](x)
    healthy.synchronize(30)
    devices[0].default_stream.synchronize(30)
    with pytest.raises(errors.RemoteError, match="wrong") as caught:
        devices[0].synchronize(30)
    assert any(note.startswith("then: launch of 'wrong'") for note in caught.value.__notes__)
    devices[0].synchronize(30)


def test_a_function_that_raises(devices: Devices) -> None:
    result = devices[1].call(fail, "there")
    with pytest.raises(errors.RemoteError, match="call of 'fail'") as caught:
        result.get(30)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fail" in str(caught.value.remote_traceback)
    devices[1].synchronize(30)  # the error is not raised a second time
    odd = devices[1].call(fail, "odd")
    with pytest.raises(errors.RemoteError, match="Odd: odd"):
        devices[1].synchronize(30)
    with pytest.raises(errors.RemoteError):
        odd.get(30)


def test_no_room(devices: Devices) -> None:
    x = devices[0].empty(1 << 50, np.uint8)
    y = devices[0].zeros(4)
    x[:4].fill(0)
    scale[4](x[:4], y, 1.0)
    y.fill(5.0)
    devices[1].empty(4, np.uint8).copy_from(x[:4])
    with pytest.raises(errors.RemoteError, match=r"allocation failed on device 0.*has no memory for") as caught:
        devices[0].synchronize(30)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert y.copy_to_host().tolist() == [5.0] * 4
    with pytest.raises(errors.RemoteError, match="has no memory for"):
        devices[1].synchronize(30)
    with pytest.raises(errors.RemoteError, match="has no memory for"):
        x[:4].copy_to_host()


def test_arguments_that_cannot_be_sent(devices: Devices) -> None:
    lock = threading.Lock()

    def held() -> None:
        lock.acquire()

    with pytest.raises(errors.CodeError, match="'held' cannot be sent to a device: 'lock'"):
        devices[0].call(held)
    with devices[0], pytest.raises(errors.ArgumentError, match="cannot be an argument"):
        scale[4](devices[0].zeros(4), "text", 1.0)
    with pytest.raises(errors.ArgumentError, match="omit device="):
        scale[4](devices[0].zeros(4), devices[0].zeros(4), 1.0, device="cpu")


def test_cuda_source_needs_a_gpu(devices: Devices) -> None:
    source = ww.CudaSource('extern "C" __global__ void nothing(float *x) {}', "nothing", {"x": "float32*"})
    with pytest.raises(errors.DeviceNotFoundError):
        source[1, 1](devices[0].zeros(4, np.float32))


# -- streams and events ------------------------------------------------------------------------------------------------


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_a_stream_that_waits_holds_up_no_other(devices: Devices, tmp_path: Path) -> None:
    slow = devices[0].stream()
    with gate_file(tmp_path) as gate:
        result = devices[0].call(wait_for_file, str(gate), stream=slow)
        devices[0].zeros(3).copy_to_host()
        assert not result.done
    assert result.get(HANG_SECONDS)


def test_events_across_devices(devices: Devices, tmp_path: Path) -> None:
    source, target = devices[0].stream(), devices[1].stream()
    with gate_file(tmp_path) as gate:
        devices[0].call(wait_for_file, str(gate), stream=source)
        x = devices[0].full(4, 1.0, stream=source)
        event = source.record()
        assert not event.done
        target.wait(event)
        assert not target.record().done
        y = devices[1].empty(4, stream=target)
        y.copy_from(x, target)
    assert y.copy_to_host(stream=target).tolist() == [1.0] * 4
    assert event.done
    event.synchronize(HANG_SECONDS)


def test_an_event_that_was_not_recorded_is_waited_for_by_nobody(devices: Devices) -> None:
    event = devices[0].event()
    devices[1].default_stream.wait(event)
    assert event.done
    devices[1].synchronize(HANG_SECONDS)
    with pytest.raises(errors.ArgumentError):
        event.elapsed(event)


def test_elapsed_time(devices: Devices) -> None:
    stream, began = devices[0].default_stream, time.monotonic()
    first = stream.record()
    devices[0].call(nap, 0.05)
    last = stream.record()
    devices[0].synchronize(HANG_SECONDS)
    assert 0.04 < last.elapsed(first) <= time.monotonic() - began
    assert last - first == pytest.approx(1e3 * last.elapsed(first))


def test_a_wait_is_bounded(devices: Devices, tmp_path: Path) -> None:
    with gate_file(tmp_path) as gate:
        devices[2].call(wait_for_file, str(gate))
        with pytest.raises(errors.StallError, match=r"waited 0.1 s for a stream of device 2"):
            devices[2].default_stream.synchronize(0.1)
    devices[2].synchronize(HANG_SECONDS)


# -- functions, globals, many threads --------------------------------------------------------------------------------


def test_functions_see_buffers_as_arrays(devices: Devices) -> None:
    x = devices[1].to_device(np.arange(10.0))

    def total(a, b, weight=1.0):
        return type(a).__name__, float((a * b["twice"]).sum()) * weight

    assert devices[1].call(total, x, {"twice": x[:]}, weight=2.0).get(30) == ("ndarray", 570.0)


FACTOR = 3
TABLE = np.arange(4)


@ww.kernel
def tabled(x):
    i = gpu.grid(1)
    x[i] = FACTOR * TABLE[i]


def test_global_variables(devices: Devices) -> None:
    x, y = devices[0].zeros(4), devices[1].zeros(4)
    tabled[4](x)
    devices[0].set_global(tabled, "FACTOR", 5)
    devices[0].set_global(tabled, "TABLE", np.array([1, 1, 2, 2]))
    tabled[4](y)
    assert x.copy_to_host().tolist() == [0, 3, 6, 9]
    tabled[4](x)
    assert x.copy_to_host().tolist() == [5, 5, 10, 10]
    assert y.copy_to_host().tolist() == [0, 3, 6, 9]
    devices[0].set_global(tabled, "NOTHING", 5)
    with pytest.raises(errors.RemoteError, match="does not use 'NOTHING'"):
        devices[0].synchronize(30)


def test_a_global_variable_that_changes_here_is_sent(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    x = devices[1].zeros(4)
    tabled[4](x)
    monkeypatch.setitem(globals(), "FACTOR", 7)
    tabled[4](x)
    assert x.copy_to_host().tolist() == [0, 7, 14, 21]
    monkeypatch.undo()
    tabled[4](x)
    assert x.copy_to_host().tolist() == [0, 3, 6, 9]


def test_many_threads_use_one_device(devices: Devices) -> None:
    def work(number: int) -> None:
        for k in range(30):
            a = np.full(1000 * (1 + k % 20), number + k, np.int64)
            x = devices[0].to_device(a)
            y = ww.empty_like(x)
            scale[x.size](x, y, 1)
            assert (y.copy_to_host() == 2 * (number + k)).all()

    run_threads(work, [(100 * k,) for k in range(8)])


def test_memory_goes_when_buffers_do() -> None:
    with Devices(targets=["cpu"]) as found:
        device = found[0]
        before = _held(device)
        x = device.empty(1 << 20, np.uint8)
        y = x[10:20]
        device.synchronize(30)
        assert _held(device) == before + (1 << 20)
        del x
        assert _held(device) == before + (1 << 20)
        del y
        until(lambda: _held(device) == before)  # a separate thread frees dropped arrays


def _held(device: ww.pool.device.Device) -> int:
    return int(device.query_agent()["held"])


def test_calls_under_way_are_bounded(devices: Devices) -> None:
    device = devices[0]
    stream = device.stream()
    x = device.zeros(1, stream=stream)
    device.synchronize(30)
    result = device.call(nap, 0.3, stream=stream)
    max_waiting = 0
    for _ in range(5000):
        x.fill(1.0, stream)
        max_waiting = (
            max(max_waiting, device.query_agent()["lanes"][stream.channel.number]["waiting"])
            if not max_waiting
            else max_waiting
        )
    assert result.done  # the pool takes the last fill() calls only after this call
    stream.synchronize(30)


def test_broadcast_and_services(devices: Devices) -> None:
    assert ww.broadcast(devices, lambda device: ww.zeros(3).device.index) == [0, 1, 2]
    counter = devices[1].create("collections:Counter", "abca")
    assert counter.call("most_common", 1).get(30) == [("a", 2)]
    with pytest.raises(errors.ArgumentError, match="unknown service"):
        devices[1].create("nothing")
    broken = devices[1].create("collections:Nothing")
    later = broken.call("anything")
    with pytest.raises(errors.RemoteError, match="making of 'collections:Nothing'"):
        devices[1].synchronize(30)
    with pytest.raises(errors.RemoteError):
        later.get(30)


def test_an_array_on_storage_is_opened_where_the_device_is(devices: Devices, tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5000.0))
    array = devices[0].open(tmp_path / "a.npy")
    y = devices[0].zeros(5000)
    scale[5000](array, y, 0.5)
    assert np.array_equal(y.copy_to_host(), np.arange(5000.0))
    assert array.shape == (5000,)
    array.close()


@pytest.mark.parametrize(
    ("threads", "programs"),
    [(4, 5), pytest.param(4, 100, marks=pytest.mark.slow), pytest.param(1, 25, marks=pytest.mark.slow)],
)
def test_random_programs(devices: Devices, threads: int, programs: int) -> None:
    run(devices, programs, seed=3 + threads, threads=threads)


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_device_that_is_lost_leaves_the_others(tmp_path: Path) -> None:
    with Devices(targets=["cpu", "cpu", "cpu"]) as found, gate_file(tmp_path) as gate:
        x, y = found[0].zeros(100_000), found[1].zeros(100_000)
        found.synchronize(HANG_SECONDS)
        waiting = found[1].call(wait_for_file, str(gate))
        found[0].default_stream.wait(found[1].default_stream.record())
        found._closing[1][1].close(0.1)  # closes the transport of device 1's agent
        with pytest.raises(errors.DeviceLostError, match="device 1"):
            waiting.get(HANG_SECONDS)
        for call in (y.copy_to_host, lambda: y.fill(1.0), lambda: found[1].zeros(3), lambda: scale[3](y, y, 1.0)):
            with pytest.raises(errors.DeviceLostError, match="device 1") as caught:
                call()
            assert caught.value.device == 1
        with pytest.raises(errors.RemoteError, match="wait for an event of another device"):
            found[0].synchronize(HANG_SECONDS)
        with pytest.raises(errors.DeviceLostError):
            x.copy_from(y)
        assert not x.copy_to_host().any()
        assert not found[2].zeros(3).copy_to_host().any()
        y.free()
        with found.lease(2) as leased:
            assert [d.index for d in leased] == [0, 2]
            with pytest.raises(errors.WarpwellError):
                found.lease(timeout=0)


def test_buffers_may_outlive_the_pool() -> None:
    with Devices(targets=["cpu"]) as found:
        x = found[0].zeros(3)
    with pytest.raises(errors.PoolError):
        x.copy_to_host()
    x.free()
    del x
    found.close()


def test_a_program_may_end_with_buffers_and_work_left() -> None:
    program = (
        "import time, numpy as np, warpwell as ww\n"
        "x = ww.to_device(np.arange(4.0))\n"
        "stream = ww.current_device().stream()\n"
        "ww.devices()[0].call(time.sleep, 0.2, stream=stream)\n"
        "print(x.copy_to_host().sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "6.0\n", "")
