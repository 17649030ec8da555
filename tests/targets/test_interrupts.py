"""Ctrl-C in launches: they end within a second, and everything can be used afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.until import Stopwatch, until

import warpwell as ww
from lab import media
from lab.campaigns import interrupts
from warpwell import errors, gpu, storage

MANY = 1 << 40
"""Indices that nobody waits for."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest may ignore it
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupted(times: int = 1) -> Iterator[None]:
    """Press Ctrl-C in the block, which must end with it, within a second."""
    pressed: list[Stopwatch] = []

    def press() -> None:
        for _ in range(times):
            time.sleep(0.2)
            pressed.append(Stopwatch())
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            presser.start()
            yield
        assert pressed[-1].seconds < 1
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # where the block failed before: no other test's
            presser.join()


@ww.kernel
def read(a, out):
    i = gpu.grid(1)
    out[i & 63] = a[(i * 5003) % a.size]


@ww.kernel
def hits(a, out):
    i = gpu.grid(1)
    for k in range(1000):
        out[i & 63] += a[k & 31]


@ww.kernel
def plain(x, out):
    i = gpu.grid(1)
    for k in range(1000):
        out[i & 63] += x[k & 31]


@ww.kernel
def count(a, out):
    i = gpu.grid(1)
    for k in range(a.size):
        out[i] += a[k]


@ww.kernel
def stay(x):
    while gpu.atomic_add(x, 0, 0) == 0:
        pass
    gpu.atomic_add(x, 1, 1)


def usable(a: ww.Array) -> None:
    out = np.zeros(64, np.int64)
    read[64](a, out)
    assert out.tolist() == [(k * 5003) % a.size for k in range(64)]
    assert a[3] == 3 and a[10:12].tolist() == [10, 11] and a.stats.misses >= 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(100_000))
    return tmp_path / "a.npy"


@pytest.mark.quick("misses-storage", "hits-storage", "hits-mapped")
@pytest.mark.parametrize("tier", ["storage", "host-cached", "host", "mapped"])
@pytest.mark.parametrize("kernel", [read, hits], ids=["misses", "hits"])
def test_a_kernel_over_storage(path: Path, kernel: ww.targets.Kernel, tier: str) -> None:
    out = np.zeros(64, np.int64)
    options = {} if tier == "mapped" else {"cache": "64KiB"}
    with ww.open(path, device="cpu", tier=tier, **options) as a:
        kernel[1](a, out)
        with interrupted():
            kernel[MANY](a, out)
        usable(a)


def test_a_kernel_over_numpy_arrays() -> None:
    x, out = np.ones(32), np.zeros(64)
    plain[1](x, out)
    with interrupted():
        plain[MANY](x, out)
    out[:] = 0
    plain[1](x, out)
    assert out[0] == 1000


@pytest.mark.parametrize("medium", ["slow", "python"])
def test_a_medium_that_takes_long(medium: str) -> None:
    """The launch does not wait for what the medium still does."""
    gate = threading.Event()
    gate.set()

    class Blocking(storage.RamMedium):
        def native(self) -> None:
            return None

        def read(self, offset: int, nbytes: int) -> np.ndarray:
            gate.wait(30)
            return super().read(offset, nbytes)

    base = np.arange(100_000)
    chosen = media.Latency(storage.RamMedium(base), latency_us=50_000) if medium == "slow" else Blocking(base)
    out = np.zeros(64, np.int64)
    with ww.open(chosen, dtype="i8", device="cpu", cache="64KiB", timeout=120) as a:
        read[1](a, out)
        gate.clear()
        with interrupted():
            read[MANY](a, out)
        gate.set()
        usable(a)


def test_calls_of_the_host(path: Path) -> None:
    index = np.random.default_rng(1).integers(0, 100_000, 5000)
    with ww.open(path, "r+", device="cpu", cache="64KiB") as a:

        def written() -> None:
            a[:512] = np.arange(512)
            a.flush()

        for call in (lambda: a[:], lambda: a[index], lambda: a.prefetch(0, 9000), lambda: a.evict(), written):
            call()  # which compiles
            usable(a)
            with interrupted():
                while True:
                    call()
            usable(a)


def test_a_launch_of_another_thread_goes_on(path: Path) -> None:
    sums, out = np.zeros(1, np.int64), np.zeros(64, np.int64)
    with ww.open(path, device="cpu", cache="64KiB") as a:
        count[1](a, sums)
        read[1](a, out)
        sums[:] = 0
        over, rounds = threading.Event(), 0

        def launch() -> None:
            nonlocal rounds
            while not over.is_set():
                count[1](a, sums)
                rounds += 1

        beside = threading.Thread(target=launch)
        beside.start()
        try:
            with interrupted():
                read[MANY](a, out)
        finally:
            over.set()
            beside.join(60)
        assert rounds and sums[0] == rounds * (100_000 * 99_999 // 2)
        usable(a)


def test_a_handler_that_does_not_raise_stops_nothing(path: Path) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    sums = np.zeros(1, np.int64)
    with ww.open(path, device="cpu", cache="64KiB") as a:
        count[1](a, sums)
        sums[:] = 0
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        rounds = 0
        while not seen:
            count[1](a, sums)
            rounds += 1
        assert sums[0] == rounds * (100_000 * 99_999 // 2)


def test_a_handler_that_puts_another_in_its_place_keeps_it() -> None:
    """As programs do that stop softly at the first Ctrl-C, and at once at the second."""

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    gate = np.zeros(2, np.int64)

    def press() -> None:
        until(lambda: signal.getsignal(signal.SIGINT) is not first)  # the launch has begun
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        gate[0] = 1

    stay[1](np.ones(2, np.int64))  # compiled before: a compiler keeps interrupts until it is done
    signal.signal(signal.SIGINT, first)
    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    stay[1](gate)
    presser.join()
    assert gate[1] == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_leaves_a_kernel_behind_that_stays_in_one_index() -> None:
    x, y = np.zeros(2, np.int64), np.zeros(2, np.int64)
    stay[1](np.array([1, 0]))
    with interrupted(times=2):
        stay[4](x)
    assert x[1] == 0  # it goes on
    y[0] = 1
    stay[4](y)
    assert y[1] == 4
    x[0] = 1
    until(lambda: x[1] == 4)


def test_what_was_left_behind_on_an_array_ends_its_launch_when_it_ends(path: Path) -> None:
    gate, out = np.zeros(2, np.int64), np.zeros(1, np.int64)

    @ww.kernel
    def stay_on(a, x, out):
        while gpu.atomic_add(x, 0, 0) == 0:
            pass
        out[0] = a[0] + 1
        gpu.atomic_add(x, 1, 1)

    a = ww.open(path, device="cpu", cache="64KiB")
    stay_on[1](a, np.array([1, 0]), out)
    with interrupted(times=2):
        stay_on[1](a, gate, out)
    usable(a)
    gate[0] = 1
    until(lambda: gate[1] == 1)
    until(lambda: not a.cache.reap() and a.cache._in_flight == 0)
    a.close()
    with pytest.raises(errors.ClosedError):
        a[0]


ENDLESS = """
    import sys, threading, time
    import numpy as np
    import warpwell as ww

    @ww.kernel
    def f(x):
        i = ww.gpu.grid(1)
        while x[i] >= 0:
            x[i] += 1

    f[4](-np.ones(4))
    print("READY", flush=True)
    f[1](np.zeros(1))
"""


def test_two_end_a_program_whose_kernel_is_endless(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "READY\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=1.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        assert "kernel 'f' does not leave one index: press Ctrl-C again to abandon it" in said
        assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in said
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_campaign(capsys: pytest.CaptureFixture[str]) -> None:
    assert interrupts.main(["--times", "3", "--seed", "5"]) == 0, capsys.readouterr().err
    assert "3 interrupts" in capsys.readouterr().out


@pytest.mark.slow
def test_the_campaign_finds_what_is_late_and_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = "import time\ntry:\n  print('READY', flush=True); time.sleep(9)\nexcept KeyboardInterrupt:\n  "
    late, wrong = begin + "time.sleep(1.2)", begin + "print('OUT')"
    monkeypatch.setitem(interrupts.PROGRAMS, "late", interrupts.Program(("-c", late)))
    monkeypatch.setitem(interrupts.PROGRAMS, "wrong", interrupts.Program(("-c", wrong), together=2))
    assert "answered after" in interrupts.run("late", 1, 1).faults[0]
    assert "cannot be used" in interrupts.run("wrong", 1, 1).faults[0]
