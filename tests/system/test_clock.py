"""The clock of timeouts: an advance reaches waits, other processes and compiled code; without a test it is `time`'s."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tools import house

import warpwell as ww
from warpwell import gpu
from warpwell._os import clock

HOUR = 3600.0
DIRECT = Path(__file__).parent / "direct_time.txt"
"""Modules that call the system's clock themselves. The list may only get shorter."""


@ww.kernel
def read_clock(out):
    out[gpu.grid(1)] = ww.targets.primitives.clock_ns()


def test_advance_is_seen_by_host_and_compiled_code() -> None:
    before, out = clock.monotonic_ns(), np.zeros(1, np.int64)
    clock.advance(HOUR)
    assert clock.monotonic_ns() - before >= HOUR * 1e9
    assert abs(clock.monotonic() - clock.monotonic_ns() * 1e-9) < HOUR / 2
    read_clock[1](out, device="cpu")
    assert before + HOUR * 1e9 <= out[0] <= clock.monotonic_ns()


@pytest.mark.parametrize("wait", [clock.sleep, lambda seconds: clock.wait(threading.Event(), seconds)])
def test_advance_ends_waits(wait) -> None:
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        wait(100 * HOUR)
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert began.wait(120) and not ended.wait(0.05)
    while not ended.wait(0.01):
        clock.advance(100 * HOUR)


def test_wait_returns_when_the_event_is_set() -> None:
    event = threading.Event()
    threading.Timer(0.02, event.set).start()
    assert clock.wait(event) and clock.wait(event, HOUR)
    assert not clock.wait(threading.Event(), 0)


def test_advance_reaches_forked_and_other_processes() -> None:
    for child in (
        "while clock.monotonic() < {until}: clock.sleep(1e-3)",
        "pid = os.fork()\nwhile clock.monotonic() < {until}: clock.sleep(1e-3)\npid and os.waitpid(pid, 0)",
    ):
        text = "import os\nfrom warpwell._os import clock\nprint(flush=True)\n" + child.format(
            until=clock.monotonic() + HOUR
        )
        with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            clock.advance(HOUR)
            assert process.wait(120) == 0


def test_without_a_test_it_is_the_clock_of_the_system() -> None:
    text = """
import time
from warpwell._os import clock
assert (clock.monotonic, clock.monotonic_ns) == (time.monotonic, time.monotonic_ns)
assert clock.at_most(1e6) == 1e6
try:
    clock.advance(1)
except RuntimeError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "WARPWELL_TEST_CLOCK"}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=120)
    assert "WARPWELL_TEST_CLOCK" in done.stdout, done.stderr


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="negative"):
        clock.advance(-1)


def test_modules_wait_by_the_clock() -> None:
    direct = sorted(
        module.path.relative_to(house.ROOT).as_posix()
        for module in house.modules()
        if re.search(r"\btime\.(monotonic|monotonic_ns|sleep|clock_gettime_ns)\(", module.path.read_text())
    )
    direct.remove("_os/clock.py")
    rooms, allowed = (Counter(name.split("/")[0] for name in names) for names in (direct, DIRECT.read_text().split()))
    # by room, so that a module may be renamed
    new = sorted(set(direct) - set(DIRECT.read_text().split()))
    assert rooms <= allowed, f"use warpwell._os.clock instead of time in {new}"
    assert time.monotonic() < clock.monotonic() + 1
