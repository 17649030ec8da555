"""Faults become exceptions with advice, in bounded time, and never wrong data."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.arrays.kernels import add, read, write
from tests.harness.clock import time_passes
from tests.harness.descriptors import Descriptors, open_descriptors
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab import media
from lab.media.gated import GatedMedium
from warpwell import errors, storage
from warpwell.storage import io_threads
from warpwell.targets import has_cuda

PAGE = 512
N = 400 * PAGE // 8
TIMEOUT = 1000.0
"""Timeout in seconds on the clock of the test, not in real time."""


def faulty(data: Any = None, **faults: Any) -> media.Faulty:
    return media.Faulty(storage.RamMedium(np.arange(N) if data is None else data), **faults)


def open_on(medium: Any, mode: str = "r", **options: Any) -> ww.Array:
    options = {"cache": 8 * (PAGE + 8), "page_size": PAGE, "name": "numbers", **options}
    if not isinstance(options["cache"], ww.Cache):
        options.setdefault("timeout", TIMEOUT)
    return ww.open(medium, mode, dtype="i8", device="cpu", **options)


def read_all(a: ww.Array, rows: Any) -> Any:
    out = np.full(len(rows), -7)
    read[len(rows)](a, rows, out)
    return out


# -- media that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["storage"])
def test_every_hundredth_read_fails(tier: str) -> None:
    """Each launch either names the page that failed, or is right; with retries all of it is read in the end."""
    medium = faulty(fail_every=100)
    rng = np.random.default_rng(1)
    failures = 0
    with open_on(medium, tier=tier) as a:
        for _ in range(12):
            rows = rng.integers(0, N, 64)
            try:
                np.testing.assert_array_equal(read_all(a, rows), rows)
            except errors.MediumError as error:
                failures += 1
                assert error.array == "numbers" and error.errno == errno.EIO and error.status
                assert f"page {error.page} (LBA {error.lba})" in str(error) and "unrecovered read error" in str(error)
                assert error.page in rows // (PAGE // 8)
        assert failures >= 2 and medium.injected >= failures
        medium.configure()
        rows = np.arange(N)
        np.testing.assert_array_equal(read_all(a, rows), rows)
        assert a.cache.pairs.in_use() == 0


def test_a_bad_block_is_named_and_others_are_read() -> None:
    medium = faulty(fail_ranges=[(5 * PAGE, 6 * PAGE)])
    with open_on(medium) as a:
        good = np.array([r for r in range(20 * 64) if r // 64 != 5])
        np.testing.assert_array_equal(read_all(a, good), good)
        for use in (lambda: read_all(a, np.array([5 * 64])), lambda: a[5 * 64 + 3], lambda: a.pin(4 * 64, 7 * 64)):
            with pytest.raises(errors.MediumError) as caught:
                use()
            assert (caught.value.page, caught.value.lba, caught.value.array) == (5, 5, "numbers")
        a.evict()  # the pages that a failed pin had brought in are not held
        a.prefetch(0, 7 * 64)  # a failed prefetch raises no error: no reader has requested the data
        np.testing.assert_array_equal(read_all(a, good[:300]), good[:300])
        with pytest.raises(errors.MediumError):
            a[5 * 64]


def test_a_medium_that_stops_answering() -> None:
    medium = faulty()
    with open_on(medium, timeout=TIMEOUT) as a:
        assert a[3] == 3
        a.pin(0, 1)
        medium.stop()
        for use in (
            lambda: read_all(a, np.arange(2000, 2600)),
            lambda: a[N - 1],
            lambda: a.pin(1000, 1001),
            lambda: a[::100],
        ):
            with time_passes(TIMEOUT), pytest.raises(errors.StallError, match="numbers") as caught:
                use()
            assert caught.value.array == "numbers" and caught.value.errno == errno.ETIMEDOUT
            assert "LBA" in str(caught.value)
        assert a[3] == 3, "cached pages can still be read"
        medium.resume()  # frames of commands that were given up come back with their completions
        rows = np.arange(0, N, 50)
        np.testing.assert_array_equal(read_all(a, rows), rows)
        a.cache._process_completions()
        assert a.cache.pairs.in_use() == 0


def test_closing_after_silence_is_bounded() -> None:
    medium = faulty()
    a = open_on(medium, "r+", timeout=TIMEOUT)
    a[3] = 9
    medium.stop()
    with time_passes(TIMEOUT), pytest.raises(errors.StallError):
        a.close()
    with pytest.raises(errors.ClosedError):
        a[3]


def test_a_failed_write_back_keeps_the_data() -> None:
    data = np.arange(N)
    medium = faulty(data)
    with open_on(medium, "r+", cache=PAGE + 8) as a:
        a[3] = 77
        medium.configure(fail_writes=True)
        for use in (a.flush, lambda: a[5000], a.evict):
            with pytest.raises(errors.MediumError, match=r"write fault.*call flush"):
                use()
        assert data[3] == 3
        assert a[3] == 77
        medium.configure()
        a.flush()
        assert data[3] == 77
        a[64] = 78
        medium.configure(torn_writes=True)
        with pytest.raises(errors.MediumError):
            a.flush()
        medium.configure()
        a.flush()
        assert data[64] == 78
        np.testing.assert_array_equal(np.delete(data, [3, 64]), np.delete(np.arange(N), [3, 64]))


def test_a_write_back_that_was_never_answered_is_repeated() -> None:
    data = np.arange(N)
    medium = faulty(data)
    with open_on(medium, "r+", cache=2 * (PAGE + 8), timeout=TIMEOUT) as a:
        rows = np.arange(64)
        add[64](a, rows, rows)
        medium.stop()
        for _ in range(2):
            with time_passes(TIMEOUT), pytest.raises(errors.StallError):
                a.flush()
        medium.resume()
        a.flush()
        np.testing.assert_array_equal(data[:65], [*(2 * rows), 64])


def test_a_close_that_fails_spares_the_others_of_a_cache() -> None:
    bad, good = faulty(), np.arange(N)
    with ww.Cache(8 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=TIMEOUT) as cache:
        a = open_on(bad, "r+", cache=cache)
        b = open_on(storage.RamMedium(good), "r+", cache=cache, name="b")
        a[3] = 7
        b[4] = 44
        bad.configure(fail_writes=True)
        with pytest.raises(errors.MediumError, match="numbers"):
            a.close()
        b[5] = 55
        c = open_on(storage.RamMedium(np.arange(N)), cache=cache)
        np.testing.assert_array_equal(b[:7], [0, 1, 2, 3, 44, 55, 6])
        assert c[N - 1] == N - 1
        b.close()
        c.close()
    assert good[4] == 44 and good[5] == 55


def test_frames_move_only_when_no_command_is_in_flight() -> None:
    """A prefetch that came after another array was opened must not put its pages into that one's frames."""
    slow = faulty(np.arange(N) + 10**6, delay_us=50_000)
    with ww.Cache(8 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=TIMEOUT) as cache:
        a = open_on(slow, cache=cache)
        a.prefetch(0, 8 * 64)
        b = open_on(storage.RamMedium(np.arange(N)), cache=cache)
        for _ in range(3):
            rows = np.arange(0, 16 * 64)
            np.testing.assert_array_equal(read_all(b, rows), rows)
            np.testing.assert_array_equal(read_all(a, rows[:512]), rows[:512] + 10**6)
        a.prefetch(0, 8 * 64)
        a.close()
        np.testing.assert_array_equal(read_all(b, rows), rows)
        b.prefetch(0, 64)
        b.evict()
        b.close()


def test_closing_a_neighbor_leaves_a_running_kernel_alone() -> None:
    slow = GatedMedium(storage.RamMedium(np.arange(N)))
    with ww.Cache(8 * (PAGE + 8), page_size=PAGE, device="cpu", timeout=TIMEOUT) as cache:
        a = open_on(slow, cache=cache)
        b = open_on(storage.RamMedium(np.arange(N)), cache=cache)
        assert b[1] == 1 and a[1] == 1
        results: list[Any] = []
        rows = np.arange(500, 3000, 64)
        slow.hold()
        thread = threading.Thread(target=lambda: results.append(read_all(a, rows)))
        thread.start()
        assert until(lambda: slow.held > 0)
        b.close()
        with pytest.raises(errors.SharingError, match="wait for"):
            open_on(storage.RamMedium(np.arange(N)), cache=cache)
        with pytest.raises(errors.SharingError, match="wait for"):
            cache.close()
        slow.release()
        thread.join()
        np.testing.assert_array_equal(results[0], rows)
        a.close()


# -- files and options that cannot be -------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    np.save(tmp_path / "good.npy", np.arange(1000.0))
    return tmp_path / "good.npy"


def state() -> tuple[Descriptors, int]:
    """Open files of this process, and its service threads that serve a controller."""
    return open_descriptors(), io_threads.current().active_threads


def leaves_nothing(before: tuple[Descriptors, int]) -> bool:
    """Return True if no file and thread is new: those of earlier tests may end meanwhile."""
    files, threads = state()
    return files <= before[0] and threads <= before[1]


BAD_FILES = {
    "truncated": (lambda p, x: (np.save(p, x), os.truncate(p, 600)), errors.FormatError, "truncated: 600 bytes"),
    "longer": (
        lambda p, x: (np.save(p, x), p.write_bytes(p.read_bytes() + b"x")),
        errors.FormatError,
        "longer than its header",
    ),
    "text": (lambda p, x: p.write_text("0 1\n"), errors.FormatError, r"not a \.npy file"),
    "empty": (lambda p, x: p.write_bytes(b""), errors.FormatError, r"not a \.npy file"),
    "big-endian": (lambda p, x: np.save(p, x.astype(">f8")), errors.DTypeError, "big-endian: save"),
    "objects": (lambda p, x: np.save(p, np.array([None, {}])), errors.DTypeError, "no fixed size"),
    "fortran": (lambda p, x: np.save(p, np.asfortranarray(x.reshape(20, 50))), errors.FormatError, "ascontiguousarray"),
    "missing": (lambda p, x: None, errors.MissingFileError, "does not exist: check the path"),
    "folder": (lambda p, x: p.mkdir(), errors.FormatError, "is not a file"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_files_that_cannot_be_opened(tmp_path: Path, kind: str, mode: str) -> None:
    make, error, match = BAD_FILES[kind]
    made: Any = make(tmp_path / "a.npy", np.arange(1000.0))
    del made
    before = state()
    for _ in range(3):
        with pytest.raises(error, match=match) as caught:
            ww.open(tmp_path / "a.npy", mode, device="cpu")
        assert "a.npy" in str(caught.value)
    until(lambda: leaves_nothing(before))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        *[({"page_size": p}, errors.ArgumentError, "page_size must be 512 to") for p in (0, 256, 2**30, -4096)],
        ({"page_size": 513}, errors.ArgumentError, "power of two"),
        ({"page_size": 4096.0}, errors.ArgumentError, "page_size 4096.0 is not a size"),
        ({"page_size": True}, errors.ArgumentError, "page_size True is not a size"),
        ({"cache": 4095}, errors.ArgumentError, "smaller than one page"),
        ({"cache": "1KiB"}, errors.ArgumentError, "smaller than one page of 4096"),
        ({"cache": "lots"}, errors.ArgumentError, "is not a size"),
        ({"cache": 0}, errors.ArgumentError, "cache must be at least 1"),
        ({"tier": "gpu"}, errors.ArgumentError, "tier 'gpu' is unknown: choose one of auto, mapped, storage"),
        ({"device": "tpu"}, errors.ArgumentError, "unknown device 'tpu'"),
        ({"mode": "w"}, errors.ArgumentError, 'mode is "r" or'),
        ({"mode": "rb"}, errors.ArgumentError, "create"),
        ({"stats": "all"}, errors.ArgumentError, "stats"),
        ({"timeout": 0}, errors.ArgumentError, "timeout"),
        ({"timeout": -1.0}, errors.ArgumentError, "timeout"),
        ({"merge": 3}, errors.ArgumentError, "merge"),
        ({"depth": 3}, errors.ArgumentError, "power of two"),
        ({"share": 2.0}, errors.ArgumentError, "share"),
        ({"shape": 5}, errors.ArgumentError, "pass dtype"),
        ({"dtype": "i8", "shape": 5000}, errors.FormatError, "too few for shape"),
        ({"dtype": "i8", "shape": -1}, errors.ArgumentError, "shape is -1: give an integer, 0 or more"),
        ({"dtype": "i8", "offset": -1}, errors.ArgumentError, "offset must be at least 0 bytes, got -1"),
        ({"dtype": "i8", "offset": 10**6}, errors.ArgumentError, "outside"),
        ({"dtype": "i8", "offset": 3}, errors.FormatError, "not a whole number"),
        ({"dtype": "S3x"}, errors.DTypeError, "not a dtype"),
    ],
)
def test_options_that_cannot_be(good: Path, options: dict[str, Any], error: type, match: str) -> None:
    before = state()
    for mode in ("r", "r+"):
        with pytest.raises(error, match=match):
            ww.open(good, **{"mode": mode, "device": "cpu", **options})
    until(lambda: leaves_nothing(before))
    with ww.open(good, "r+", device="cpu", cache="64KiB") as a:
        assert a[999] == 999, "nothing of the failed ones is left"


def test_no_gpu_is_a_clear_message(good: Path, tmp_path: Path) -> None:
    if has_cuda():
        pytest.skip("there is a GPU")
    for use in (
        lambda: ww.open(good, device="cuda"),
        lambda: ww.create(tmp_path / "new.npy", 5, device="cuda"),
    ):
        with pytest.raises(errors.DeviceNotFoundError, match="no GPU is usable here"):
            use()
    assert not (tmp_path / "new.npy").exists()


def test_arrays_that_are_opened_and_closed_leave_nothing(good: Path) -> None:
    with ww.open(good, device="cpu", cache="64KiB") as a:
        assert a[5] == 5
    before = state()
    for tier in ("storage", "host-cached", "host", "device"):
        with ww.open(good, "r+", device="cpu", cache="64KiB", tier=tier) as a:
            a[5] = 5
    dropped = ww.open(good, "r+", device="cpu", cache="64KiB")
    assert dropped[5] == 5
    del dropped
    until(lambda: leaves_nothing(before))


def test_create_refuses_what_is_there(good: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="exists: open it"):
        ww.create(good, 5, device="cpu")
    with pytest.raises(errors.MissingFileError, match="folder"):
        ww.create(tmp_path / "no" / "a.npy", 5, device="cpu")
    for options, error in (
        ({"shape": -1}, errors.ArgumentError),
        ({"shape": 5, "dtype": object}, errors.DTypeError),
        ({"shape": 5, "page_size": 3}, errors.ArgumentError),
        ({"shape": 5, "tier": "x"}, errors.ArgumentError),
    ):
        with pytest.raises(error):
            ww.create(tmp_path / "new.npy", device="cpu", **options)  # type: ignore[arg-type]
        assert not (tmp_path / "new.npy").exists()
    assert np.load(good)[999] == 999


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        with pytest.raises(errors.StorageFullError, match="no room for 8000000 bytes"):
            ww.create(tmp_path / "new.npy", 10**6, device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_others_cut_short(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(N))
    with ww.open(tmp_path / "a.npy", device="cpu", cache=8 * (PAGE + 8), page_size=PAGE) as a:
        assert a[3] == 3
        os.truncate(tmp_path / "a.npy", 40 * PAGE)
        with pytest.raises(errors.MediumError, match=r"a\.npy"):
            read_all(a, np.arange(200 * 64, 210 * 64))
        np.testing.assert_array_equal(read_all(a, np.arange(20 * 64)), np.arange(20 * 64))


# -- Ctrl-C ---------------------------------------------------------------------------------------------------

STUCK = """
import os, signal, sys, threading, time
import numpy as np
import warpwell as ww
from lab import media
from warpwell import storage
from tests.harness.arrays.kernels import read

@ww.kernel
def spin(a, out):
    i = ww.gpu.grid(1)
    while not ww.gpu.failed():
        out[0] = a[i]

medium = media.Faulty(storage.RamMedium(np.arange(4096)))
a = ww.open(medium, "r+", dtype="i8", device="cpu", cache=4096, page_size=512, timeout=600.0)
out = np.zeros(64, np.int64)
read[64](a, np.zeros(64, np.int64), out)
a[0] = 0
medium.stop() if sys.argv[1] != "spin" else None
out[:] = -1

def interrupt():
    while sys.argv[1] == "spin" and out[0] < 0:  # its 64 threads use all processors
        time.sleep(0.01)
    time.sleep(0.2 if sys.argv[1] == "spin" else 1.5)
    print("interrupt", flush=True)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    if sys.argv[1] == "read":
        read[64](a, np.arange(64) * 64, out)
    elif sys.argv[1] == "spin":
        spin[64](a, out)
    else:
        a.flush()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    if sys.argv[1] == "spin":
        print("and usable", int(a[5]), flush=True)
    os._exit(3)
"""


@pytest.mark.quick("spin")
@pytest.mark.parametrize("program", ["read", "spin", "flush"])
def test_ctrl_c_ends_a_stuck_kernel(tmp_path: Path, program: str) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(textwrap.dedent(STUCK))
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, str(script), program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as process:
        try:
            assert process.stdout is not None
            # Before, the program compiles kernels. A busy machine may need minutes for that.
            started = process.stdout.readline()
            out, err = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    assert (started, process.returncode) == ("interrupt\n", 3), started + out + err
    assert "interrupted" in out
    if program == "spin":
        assert "and usable 5" in out


def test_write_is_a_kernel() -> None:
    """The shared kernels are what these tests take them for."""
    out = np.zeros(3)
    write[3](out, np.array([2, 1, 0]), np.array([1.0, 2.0, 3.0]), device="cpu")
    assert out.tolist() == [3, 2, 1]
