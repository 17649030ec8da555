"""Ctrl-C in launches: they end within a second, and everything can be used afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab import media
from lab.campaigns import interrupts
from warpwell import errors, gpu, storage

MANY = 1 << 40
"""Number of indices of a launch that cannot complete in the time of a test."""


handled: list[int] = []
"""The interrupts that `raise_interrupt` has handled."""


def raise_interrupt(number: int, _: object) -> None:
    handled.append(number)
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, raise_interrupt)  # workers of pytest may ignore SIGINT
    yield
    signal.signal(signal.SIGINT, before)


def in_launch() -> bool:
    """Return True if the main thread is in a launch, which handles Ctrl-C itself."""
    return signal.getsignal(signal.SIGINT) is not raise_interrupt


@contextlib.contextmanager
def interrupted(times: int = 1, *, begun: Callable[[], object] = in_launch) -> Iterator[None]:
    """Press Ctrl-C in the block, which must end with it, within 20 s: only the campaign measures the time.

    The first time comes 0.2 s after `begun` has returned True, each later one 0.2 s after the earlier one was handled:
    the system merges two signals that no handler has run between.
    """
    pressed: list[float] = []

    def press() -> None:
        until(begun)
        for _ in range(times):
            time.sleep(0.2)
            pressed.append(time.monotonic())
            count = len(handled)
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: len(handled) > count)

    presser = threading.Thread(target=press, daemon=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            presser.start()
            yield
        assert time.monotonic() - pressed[-1] < 20
    finally:
        # If the block has failed: a late Ctrl-C must not reach another test.
        with contextlib.suppress(KeyboardInterrupt):
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
def spin(x):
    gpu.atomic_add(x, 2, 1)
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
    """The launch does not wait for reads of the medium that are in flight."""
    gate = threading.Event()
    gate.set()

    class Blocking(storage.RamMedium):
        def native(self) -> None:
            return None

        def read(self, offset: int, nbytes: int) -> np.ndarray:
            gate.wait(HANG_SECONDS)
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
            call()  # compiles the native code
            usable(a)
            begun = threading.Event()
            with interrupted(begun=begun.is_set):
                while True:
                    begun.set()
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

        launcher = threading.Thread(target=launch)
        launcher.start()
        try:
            with interrupted():
                read[MANY](a, out)
        finally:
            over.set()
            launcher.join(HANG_SECONDS)
        assert rounds and sums[0] == rounds * (100_000 * 99_999 // 2)
        usable(a)


def test_a_handler_that_does_not_raise_stops_nothing(path: Path) -> None:
    signals: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    sums = np.zeros(1, np.int64)
    with ww.open(path, device="cpu", cache="64KiB") as a:
        count[1](a, sums)
        sums[:] = 0
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        rounds = 0
        while not signals:
            count[1](a, sums)
            rounds += 1
        assert sums[0] == rounds * (100_000 * 99_999 // 2)


def test_a_handler_that_puts_another_in_its_place_keeps_it() -> None:
    """As programs do that stop softly at the first Ctrl-C, and at once at the second."""

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    gate = np.zeros(3, np.int64)

    def press() -> None:
        until(lambda: signal.getsignal(signal.SIGINT) is not first)  # the launch has started, and installed its handler
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        gate[0] = 1

    spin[1](np.ones(3, np.int64))  # compile it first, because a compiler holds interrupts back until it has finished
    signal.signal(signal.SIGINT, first)
    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    spin[1](gate)
    presser.join()
    assert gate[1] == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_leaves_a_kernel_behind_that_stays_in_one_index() -> None:
    x, y = np.zeros(3, np.int64), np.zeros(3, np.int64)
    spin[1](np.array([1, 0, 0]))
    with interrupted(times=2, begun=lambda: x[2] == 4):
        spin[4](x)
    assert x[1] == 0  # the kernel ran to its end
    y[0] = 1
    spin[4](y)
    assert y[1] == 4
    x[0] = 1
    until(lambda: x[1] == 4)


def test_what_was_left_behind_on_an_array_ends_its_launch_when_it_ends(path: Path) -> None:
    gate, out = np.zeros(3, np.int64), np.zeros(1, np.int64)

    @ww.kernel
    def stay_on(a, x, out):
        gpu.atomic_add(x, 2, 1)
        while gpu.atomic_add(x, 0, 0) == 0:
            pass
        out[0] = a[0] + 1
        gpu.atomic_add(x, 1, 1)

    a = ww.open(path, device="cpu", cache="64KiB")
    stay_on[1](a, np.array([1, 0, 0]), out)
    with interrupted(times=2, begun=lambda: gate[2] == 1):
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
        ww.gpu.atomic_add(x, i, 1.0)
        while x[i] >= 0:
            x[i] += 1

    def report_ready():
        while x[0] == 0:
            time.sleep(0.01)
        print("READY", flush=True)

    f[4](np.full(4, -2.0))
    x = np.zeros(1)
    threading.Thread(target=report_ready).start()
    f[1](x)
"""


def test_two_end_a_program_whose_kernel_is_endless(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "READY\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        message = "kernel 'f' still runs one index: press Ctrl-C again to abandon it"
        assert any(message in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in stderr
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
    slow, wrong = begin + "time.sleep(1.2)", begin + "print('OUT')"
    monkeypatch.setitem(interrupts.PROGRAMS, "late", interrupts.Program(("-c", slow)))
    monkeypatch.setitem(interrupts.PROGRAMS, "wrong", interrupts.Program(("-c", wrong), together=2))
    assert "answered after" in interrupts.run("late", 1, 1).faults[0]
    assert "cannot be used" in interrupts.run("wrong", 1, 1).faults[0]
