"""Seconds of transfers from an application to the memory of a device in another process, whole and pipelined.

One application and one agent, two processes of MPI over shared memory on one machine. The agent's device has an
emulated copy engine of ``-o copy=3600`` MB/s, and ``-o links=0,3600`` repeats all measurements with a link of 3600
MB/s. Three stages are measured separately: *link*, *memory* (MPI's copy between processes) and *device* (copy engine).

- *pipeline*: bandwidth by size of the data and of a chunk, with four buffers (figure 8 of the source);
- *whole* and *piped*: all data in one chunk, and the defaults (figures 9 and 10), with the application idle, *busy*
  (another of its threads computes in Python), and *computing* (it computes itself, and the device times the copy).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.runner import Record, Setting, benchmark

CHUNKS = tuple(1 << k for k in range(16, 22))
SIZES = tuple(1 << k for k in range(16, 29, 2))
MB = 1e6


def seconds(run: Callable[[], object], min_seconds: float = 0.25, max_runs: int = 25) -> float:
    """Return the median time of a call that is repeated for a while."""
    run()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - started < min_seconds and len(times) < max_runs):
        at = time.perf_counter()
        run()
        times.append(time.perf_counter() - at)
    return statistics.median(times)


class Busy:
    """A thread that computes in Python for a block."""

    def __enter__(self) -> None:
        self._on = True
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        k = 0
        while self._on:
            k += 1

    def __exit__(self, *_: object) -> None:
        self._on = False
        self._thread.join()


def transport_of(link: float, latency: float) -> Any:
    from lab.link import EmulatedLink
    from warpwell.pool.transport.mpi_transport import MpiTransport

    made: Any = MpiTransport()
    made.can_share_memory = False
    return EmulatedLink(made, link * MB, latency * 1e-6) if link else made


def agent(link: float, latency: float, copy: float) -> None:
    from lab.emulated_device import EmulatedDevice
    from warpwell.pool.agent.agent import Agent
    from warpwell.pool.agent.runtime import Runtime

    transport = transport_of(link, latency)
    Agent(transport, EmulatedDevice(copy * MB) if copy else Runtime()).run()
    transport.close()


def application(link: float, latency: float, copy: float, quick: bool) -> dict[str, Any]:
    import warpwell as ww
    from warpwell.pool import Tuning
    from warpwell.pool.devices import Devices

    found: dict[str, Any] = {}
    with Devices(transport_of(link, latency)) as devices:
        device = devices[0]
        source = ww.pinned_empty(SIZES[-1], np.uint8)
        source[:] = 1
        buffers = {size: device.empty(size, np.uint8) for size in SIZES}

        def upload(size: int, tuning: Tuning) -> float:
            device.transfers = tuning
            buffer = buffers[size]

            def run() -> None:
                buffer.copy_from(source[:size])
                device.synchronize()

            return seconds(run, 0.05 if quick else 0.25)

        found["round trip"] = seconds(device.synchronize)
        if not copy:
            found["memory"] = {size: upload(size, Tuning(1 << 20)) for size in SIZES}
            return found
        found["pipeline"] = {chunk: {size: upload(size, Tuning(chunk)) for size in SIZES} for chunk in CHUNKS}
        one_chunk = {size: Tuning(max(size, 4096), pipelined=False) for size in SIZES}
        for name in ("idle", "busy"):
            with Busy() if name == "busy" else threading.Lock():
                found[name] = {size: (upload(size, one_chunk[size]), upload(size, Tuning())) for size in SIZES}
        found["computing"] = {
            size: (
                copy_while_computing(device, buffers[size], source[:size], one_chunk[size], found["idle"][size][0]),
                copy_while_computing(device, buffers[size], source[:size], Tuning(), found["idle"][size][1]),
            )
            for size in SIZES
        }
        before = processor_seconds(device)
        for _ in range(8):
            buffers[SIZES[-1]].copy_from(source)
        device.synchronize()
        found["processor"] = (processor_seconds(device) - before) / (8 * SIZES[-1])
    return found


def copy_while_computing(device: Any, buffer: Any, source: Any, tuning: Any, expected: float) -> float:
    """Return the median time of a copy by the device's clock, while this thread only computes in Python."""
    device.transfers = tuning
    times = []
    for _ in range(7):
        first, last = device.event(), device.event()
        first.record()
        buffer.copy_from(source)
        last.record()
        until = time.perf_counter() + 3 * expected + 2e-3
        while time.perf_counter() < until:
            pass
        times.append(last.elapsed(first))
    return statistics.median(times)


def processor_seconds(device: Any) -> float:
    """Return the CPU seconds that application and agent have used."""
    return time.process_time() + float(device.call(time.process_time).get())


def engine(copy: float) -> float:
    """Return the rate of the copy engine by itself."""
    from lab.emulated_device import EmulatedDevice

    device = EmulatedDevice(copy * MB)
    stream, data, to = device.stream(0), np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)

    def run() -> None:
        for _ in range(64):
            device.write(stream, int(to.ctypes.data), data)
        device.synchronize(stream)

    return 64 * data.nbytes / seconds(run)


def job(link: float, copy: float, latency: float, quick: bool) -> dict[str, Any]:
    """Run the application and its agent, and return the application's measurements."""
    bundled = Path(sys.executable).parent / "mpiexec"
    code = "import sys; from lab.bench import pool_transfer; pool_transfer.rank(*sys.argv[1:])"
    numbers = [str(link), str(latency), str(copy), str(int(quick))]
    me = [sys.executable, "-c", code]
    command = [str(bundled) if bundled.exists() else "mpiexec", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    command += ["-n", "1", *me, "application", *numbers, ":", "-n", "1", *me, "agent", *numbers]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=os.environ | root, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    return eval(line[6:])  # a dictionary that this module printed, with numbers as keys


def rank(role: str, link: str, latency: str, copy: str, quick: str) -> None:
    """Run as the application or the agent."""
    if role == "agent":
        agent(float(link), float(latency), float(copy))
    else:
        found = application(float(link), float(latency), float(copy), quick == "1")
        print("found", repr(found), flush=True)


def report(name: str, stages: dict[str, float], found: dict[str, Any], record: Record) -> None:
    """Record the figures of a job."""
    slowest = min(stages, key=lambda stage: stages[stage])
    for chunk, row in found["pipeline"].items():
        size = max(row)
        record(f"{name}/chunk {chunk >> 10} KiB", size / row[size], "B/s", ceiling=(slowest, stages[slowest]))
    for state in ("idle", "busy", "computing"):
        for size, (one_chunk, piped) in found[state].items():
            if size >= 1 << 20 or state == "idle":
                peers = [("no pipeline", "", one_chunk)]
                record(f"{name}/{state}/{size >> 10} KiB", piped, "s", better="lower", peers=peers)
    record(f"{name}/cpu", found["processor"], "s/B", better="lower")


@benchmark("pool-transfer", needs={"mpi"}, figures=["round trip", "memory", "device", "none", "3600"])
def run(setting: Setting, record: Record) -> None:
    """Measure without and with an emulated link."""
    copy, latency = setting.option("copy", 3600.0), setting.option("latency", 5.0)
    memory, size = job(0, 0, latency, setting.quick), 64 << 20
    record("round trip", memory["round trip"], "s", better="lower")
    stages = {"memory": record("memory", size / memory["memory"][size], "B/s"), "device": engine(copy)}
    record.emulated |= {"copy engine", "link"}
    for link in setting.option("links", [0.0] if setting.quick else [0.0, 3600.0]):
        limits = stages | ({"link": link * MB} if link else {})
        report(f"{link:g}" if link else "none", limits, job(link, copy, latency, setting.quick), record)
