"""Errors and `failed` belong to a launch, also if launches share an array, a cache or a scheduler."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.arrays.kernels import write
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.media import Faulty
from warpwell import errors, gpu
from warpwell.cache.launches import CacheLaunch
from warpwell.scheduler import Scheduler
from warpwell.storage import RamMedium
from warpwell.targets.fault import LaunchFlag
from warpwell.targets.primitives import backoff

WAITING, OPEN = 0, 1


@ww.kernel
def beyond(a, distance, gate, out):
    """Fail, and stay until the gate opens."""
    i = gpu.grid(1)
    out[i] = a[a.size + distance]
    gpu.atomic_add(gate, WAITING, 1)
    while gpu.atomic_add(gate, OPEN, 0) == 0:
        backoff(100)


@ww.kernel
def overwrite(a, gate, out):
    """Write to an array that is read-only, and stay."""
    i = gpu.grid(1)
    a[i] = 1
    gpu.atomic_add(gate, WAITING, 1)
    while gpu.atomic_add(gate, OPEN, 0) == 0:
        backoff(100)


@ww.kernel
def total(a, out):
    """Add all items up, unless the launch failed."""
    i = gpu.grid(1)
    for k in range(a.size):
        if gpu.failed():
            return
        out[i] += a[k]


class LaunchThread(threading.Thread):
    """A launch in a thread, which keeps what it raises."""

    def __init__(self, launch: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self._launch = launch
        self.start()

    def run(self) -> None:
        try:
            self._launch()
        except Exception as error:
            self.error = error


def compiled(a: ww.Array, gate: np.ndarray, out: np.ndarray) -> None:
    """Compile what is launched, with the gate open."""
    gate[OPEN] = 1
    with pytest.raises(errors.IndexRangeError):
        beyond[1](a, 1, gate, out)
    with pytest.raises(errors.ReadOnlyError):
        overwrite[1](a, gate, out)
    total[1](a, out)
    gate[:] = 0
    out[:] = 0


def fail_in_stream(a: ww.Array, distance: int = 1, is_done: Callable[[], bool] = lambda: True) -> None:
    """Model a stream of a GPU by hand: the launch continues after its call returns, and fails unless distance is 0."""
    flag = LaunchFlag("cpu")
    a.launch_begins(flag)
    if distance:
        gate, out = np.ones(2, np.int64), np.zeros(1, np.int64)
        beyond[1](a.kernel_struct(flag), distance, gate, out, device="cpu", flag=flag)
    a.launch_continues(flag, is_done)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(4096))
    return tmp_path / "a.npy"


def test_three_launches_side_by_side_raise_their_own(path: Path) -> None:
    gate, out = np.zeros(2, np.int64), np.zeros(2, np.int64)
    with ww.open(path, device="cpu", cache=8192) as a:
        compiled(a, gate, out)
        far = LaunchThread(lambda: beyond[1](a, 7, gate, out))
        write = LaunchThread(lambda: overwrite[1](a, gate, out))
        until(lambda: gate[WAITING] == 2)
        sums = np.zeros(2, np.int64)
        total[2](a, sums)
        assert sums.tolist() == [4096 * 4095 // 2] * 2
        assert a[5] == 5 and a[4000:4002].tolist() == [4000, 4001]
        gate[OPEN] = 1
        for thread in (far, write):
            thread.join(HANG_SECONDS)
        assert isinstance(far.error, errors.IndexRangeError) and far.error.index == 4103
        assert isinstance(write.error, errors.ReadOnlyError)
        total[2](a, np.zeros(2, np.int64))


def test_a_launch_on_another_array_of_the_cache_is_not_told(path: Path) -> None:
    gate, out = np.zeros(2, np.int64), np.zeros(2, np.int64)
    with ww.Cache(16384, device="cpu") as cache:
        a, b = ww.open(path, cache=cache), ww.open(path, cache=cache)
        compiled(a, gate, out)
        far = LaunchThread(lambda: beyond[1](a, 1, gate, out))
        until(lambda: gate[WAITING] == 1)
        sums = np.zeros(1, np.int64)
        total[1](b, sums)
        b.prefetch(0, 100)
        b.evict()
        gate[OPEN] = 1
        far.join(HANG_SECONDS)
        assert sums[0] == 4096 * 4095 // 2 and isinstance(far.error, errors.IndexRangeError)
        a.close()
        b.close()


def test_the_scheduler_tells_the_task_that_failed(path: Path) -> None:
    gate, out = np.zeros(2, np.int64), np.zeros(2, np.int64)
    with ww.open(path, device="cpu", cache=8192) as a:
        compiled(a, gate, out)
        sums = np.zeros(2, np.int64)
        with Scheduler(device="cpu", policy="left-over") as scheduler:
            failing = scheduler.submit(beyond[1], a, 3, gate, out, tenant="one")
            until(lambda: gate[WAITING] == 1)
            fine = scheduler.submit(total[2], a, sums, tenant="other")
            fine.result(timeout=HANG_SECONDS)
            gate[OPEN] = 1
            with pytest.raises(errors.IndexRangeError):
                failing.result(timeout=HANG_SECONDS)
        assert sums.tolist() == [4096 * 4095 // 2] * 2


def test_many_launches_at_once_have_records_of_their_own(path: Path) -> None:
    """More than are made at a time."""
    gate, out = np.zeros(2, np.int64), np.zeros(64, np.int64)
    with ww.open(path, device="cpu", cache=8192) as a:
        compiled(a, gate, out)
        launches = [LaunchThread(lambda k=k: beyond[1](a, k, gate, out)) for k in range(40)]
        until(lambda: gate[WAITING] == 40)
        gate[OPEN] = 1
        for k, thread in enumerate(launches):
            thread.join(HANG_SECONDS)
            assert isinstance(thread.error, errors.IndexRangeError) and thread.error.index == 4096 + k


def test_launches_in_streams_are_told_one_by_one_to_operations_on_their_array(path: Path) -> None:
    with ww.Cache(16384, device="cpu") as cache:
        a, b = ww.open(path, cache=cache), ww.open(path, cache=cache)
        done = []
        for distance in (1, 2, 0):
            fail_in_stream(a, distance, lambda: bool(done))
        assert b[3] == 3 and a[3] == 3  # the launch still runs: its error is not known yet
        done.append(True)
        assert b[3] == 3  # the error belongs to `a`, not to `b`
        for index in (4097, 4098):
            with pytest.raises(errors.IndexRangeError) as caught:
                a[3]
            assert caught.value.index == index
        assert a[3] == 3
        a.close()
        b.close()


def test_what_a_stream_left_is_told_by_closing_at_the_latest(path: Path) -> None:
    a = ww.open(path, device="cpu", cache=8192)
    fail_in_stream(a)
    with pytest.raises(errors.IndexRangeError):
        a.close()
    a.close()


@pytest.mark.parametrize("closes", ["array", "shared array", "cache"])
def test_closing_writes_what_changed_whatever_streams_left(path: Path, closes: str) -> None:
    """Two launches in streams failed: each operation raises one of their errors, and closing is one operation."""
    cache = None if closes == "array" else ww.Cache(65536, device="cpu")
    a = ww.open(path, "r+", device="cpu", cache=cache or 65536)
    write[8](a, np.arange(8), np.full(8, -1))
    done: list[bool] = []
    for distance in (1, 2):
        fail_in_stream(a, distance, lambda: bool(done))
    done.append(True)
    with pytest.raises(errors.IndexRangeError, match="4097"):
        (cache if cache and closes == "cache" else a).close()
    a.close()
    if cache:
        cache.close()
    assert np.load(path)[:9].tolist() == [-1] * 8 + [8]


def test_opening_and_closing_another_array_keep_what_a_stream_left(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(512))
    with ww.Cache(65536, device="cpu") as cache:
        a = ww.open(path, "r+", cache=cache)
        b = ww.open(tmp_path / "b.npy", cache=cache)
        for change in (b.close, lambda: ww.open(tmp_path / "b.npy", cache=cache).close()):
            write[8](a, np.arange(8), np.full(8, -1))
            fail_in_stream(a)
            change()
            with pytest.raises(errors.IndexRangeError):
                a[3]
        a.close()


def test_closing_gives_pins_back_whatever_a_stream_left(path: Path) -> None:
    with ww.Cache(65536, device="cpu") as cache:
        a = ww.open(path, cache=cache)
        a.pin(0, 512)
        fail_in_stream(a)
        with pytest.raises(errors.IndexRangeError):
            a.close()
        with ww.open(path, cache=cache) as b:
            assert b[7] == 7


def test_an_interrupt_at_the_end_of_a_launch_ends_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the two lines that take the launch's error and give its records to the next one."""
    with ww.open(path, device="cpu", cache=8192) as a:
        take = CacheLaunch.take_error

        def interrupted(launch: CacheLaunch) -> tuple[int, int, int, int]:
            latched = take(launch)
            a.abort(launch.flag)
            return latched

        with monkeypatch.context() as patched:
            patched.setattr(CacheLaunch, "take_error", interrupted)
            total[1](a, np.zeros(1, np.int64))
        sums = np.zeros(1, np.int64)
        total[1](a, sums)
        assert sums[0] == 4096 * 4095 // 2


def test_a_block_of_plain_kernels_that_cannot_begin_leaves_no_launch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = ww.open(path, device="cpu", cache=8192)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(ww.Array, "kernel_struct", fail)
        with pytest.raises(MemoryError), a.active():
            pass
    a.close()


def test_a_write_that_fails_is_told_to_the_launch_that_needed_the_frame() -> None:
    medium = Faulty(RamMedium(np.zeros(4096, np.int64)))
    with ww.Cache(8192, page_size=4096, device="cpu") as cache:
        a = ww.open(medium, "r+", dtype="i8", cache=cache)
        write[2](a, np.arange(2), np.array([5, 6]))
        medium.configure(fail_writes=True)
        with pytest.raises(errors.MediumError, match="writing"):
            np.asarray(a)
        medium.configure()
        assert a[:3].tolist() == [5, 6, 0]
        a.close()


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_failed_is_false_again_in_the_next_launch(path: Path, device: str) -> None:
    gate, out = np.array([0, 1]), np.zeros(1, np.int64)
    np.arange(20).tofile(path)
    with ww.open(path, device=device, cache=8192, dtype="i8") as a:
        with pytest.raises(errors.IndexRangeError):
            beyond[1](a, 1, gate, out)
        sums = np.zeros(1, np.int64)
        total[1](a, sums)
        assert sums[0] == 190


class Refuses:
    """A tensor that PyTorch does not export: it has a gradient, or items that NumPy does not know."""

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")


def test_an_array_that_its_library_does_not_give_is_named() -> None:
    out = np.zeros(1, np.int64)
    with pytest.raises(errors.ArgumentError, match=r"argument 'a' of kernel 'total' .*Use tensor\.detach"):
        total[1](Refuses(), out)
    with Scheduler("cpu") as scheduler:
        with pytest.raises(errors.ArgumentError, match=r"argument 'out' of kernel 'total' .*Use tensor\.detach"):
            scheduler.submit(total[1], np.ones(1, np.int64), Refuses()).result(HANG_SECONDS)
        scheduler.submit(total[1], np.ones(1, np.int64), out).result(HANG_SECONDS)
    assert out[0] == 1
