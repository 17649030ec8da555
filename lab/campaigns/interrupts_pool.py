"""A program with two agents for `lab.campaigns.interrupts --what pool`, and a check for remains of its job.

The program interrupts itself in copies, calls, launches and waits, and checks each time that all devices work. Then it
prints READY, and works until the campaign interrupts it, which ends it.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from lab.campaigns.marked import command_of

POOL = """
import os, random, signal, sys, threading, time
import numpy as np
import warpwell as ww

choose = random.Random(int(sys.argv[1]))

@ww.kernel
def add(x, y):
    i = ww.gpu.grid(1)
    if i < y.size:
        y[i] += x[i]

devices = ww.devices()
items = np.arange(3_000_000.0)
there = [device.to_device(items) for device in devices]
first, other = devices

def copies():
    first.to_device(items)

def back():
    there[0].copy_to_host()

def across():
    other.to_device(there[0]).copy_to_host()

def calls():
    first.call(np.sum, items).get()
    other.call(np.ones, 1_000_000).get()

def launches():
    add[1000](items[:1000], np.zeros(1000))
    with other:
        add[1000](there[1], other.zeros(1000))

def waits():
    other.call(time.sleep, 0.01)
    with other.stream() as stream:
        other.default_stream.wait(stream.record())
    other.synchronize()

ways = (copies, back, across, calls, launches, waits)
for way in ways:
    way()
for _ in range(10):
    way = choose.choice(ways)
    timer = threading.Timer(choose.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            way()
    except KeyboardInterrupt:
        timer.join()
    for device, x in zip(devices, there):
        device.synchronize(30)
        assert device.zeros(3).copy_to_host().tolist() == [0, 0, 0] and np.array_equal(x.copy_to_host(), items), way
print("READY", flush=True)
while True:
    choose.choice(ways)()
"""

COMMAND = ("-m", "warpwell", "run", "--agents", "2", "--target", "cpu", "{source}", "{seed}")


def left(folder: Path, seconds: float = 1.0) -> list[str]:
    """Return the processes and files that a job with this temporary folder has not removed after `seconds`."""
    end = time.monotonic() + seconds
    while (found := [*_processes(folder), *_files(folder)]) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def _processes(folder: Path) -> list[str]:
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in environment.read_bytes().split(b"\0"):
                found.append(command_of(int(environment.parent.name)))
    return found


def _files(folder: Path) -> list[str]:
    jobs = [str(path) for base in folder.glob("warpwell-pool-*") for path in base.iterdir()]
    return jobs + [str(path) for path in folder.iterdir() if path.name.startswith(("ompi", "prte", "pmix"))]
