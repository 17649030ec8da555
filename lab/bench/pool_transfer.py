"""How fast do data get from an application to the memory of a device elsewhere, in one piece and in a pipeline?

One application and one agent, two processes of MPI over shared memory, on one machine. There is no GPU here: the
agent's device has an emulated copy engine of ``--copy`` MB/s, and the link is emulated too, where one is asked for
(``--links 0 3600``: none, and 3,600 MB/s as the source's InfiniBand). Three stages are named, and their rates are
measured each by itself: *link*, *memory* (MPI's copy from process to process) and *device* (the copy engine).

- bandwidth by size of the data and of a chunk, in a pipeline of four buffers (the source's figure 8);
- the time of one piece after the other, all of it in one chunk, beside the pipeline with its defaults (figures 9, 10);
- the fraction of the slowest stage that is reached, with the application idle; waiting while another of its threads
  is busy in Python (*busy*: its waits for the interpreter lock count); and computing itself in Python while the copy
  is timed by the device (*beside*).
"""

from __future__ import annotations

import argparse
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

from lab.bench.timing import machine, save, table

CHUNKS = tuple(1 << k for k in range(16, 22))
SIZES = tuple(1 << k for k in range(16, 29, 2))
MB = 1e6


def seconds(run: Callable[[], object], least: float = 0.25, most: int = 25) -> float:
    """Return the median time of a call that is repeated for a while."""
    run()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begun < least and len(times) < most):
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
    made.lends = False
    return EmulatedLink(made, link * MB, latency * 1e-6) if link else made


def agent(link: float, latency: float, copy: float) -> None:
    from tests.harness.emulated_device import EmulatedDevice

    from warpwell.pool.agent.agent import Agent
    from warpwell.pool.agent.runtime import CpuRuntime

    transport = transport_of(link, latency)
    Agent(transport, EmulatedDevice(copy * MB) if copy else CpuRuntime()).run()
    transport.close()


def application(link: float, latency: float, copy: float, options: argparse.Namespace) -> dict[str, Any]:
    import warpwell as ww
    from warpwell.pool.copy.plan import Tuning
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

            return seconds(run, 0.1 if options.quick else 0.25)

        found["round trip"] = seconds(device.synchronize)
        if not copy:
            found["memory"] = {size: upload(size, Tuning(1 << 20)) for size in SIZES}
            return found
        found["pipeline"] = {chunk: {size: upload(size, Tuning(chunk)) for size in SIZES} for chunk in CHUNKS}
        whole = {size: Tuning(max(size, 4096), pipelined=False) for size in SIZES}
        for name in ("idle", "busy"):
            with Busy() if name == "busy" else threading.Lock():
                found[name] = {size: (upload(size, whole[size]), upload(size, Tuning())) for size in SIZES}
        found["beside"] = {
            size: (
                beside(device, buffers[size], source[:size], whole[size], found["idle"][size][0]),
                beside(device, buffers[size], source[:size], Tuning(), found["idle"][size][1]),
            )
            for size in SIZES
        }
        before = processor_seconds(device)
        for _ in range(8):
            buffers[SIZES[-1]].copy_from(source)
        device.synchronize()
        found["processor"] = (processor_seconds(device) - before) / (8 * SIZES[-1])
    return found


def beside(device: Any, buffer: Any, source: Any, tuning: Any, expected: float) -> float:
    """Return the median time of a copy by the device's clock, while this thread computes in Python and asks nothing."""
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
    """Return the seconds of processors that application and agent have used."""
    return time.process_time() + float(device.call(time.process_time).get())


def engine(copy: float) -> float:
    """Return the rate of the copy engine by itself."""
    from tests.harness.emulated_device import EmulatedDevice

    device = EmulatedDevice(copy * MB)
    stream, data, to = device.stream(0), np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)

    def run() -> None:
        for _ in range(64):
            device.write(stream, int(to.ctypes.data), data, lent=True)
        device.synchronize(stream)

    return 64 * data.nbytes / seconds(run)


def job(options: argparse.Namespace, link: float, copy: float) -> dict[str, Any]:
    """Run the application and its agent, and return what the application found."""
    beside = Path(sys.executable).parent / "mpiexec"
    me = [
        sys.executable,
        "-m",
        "lab.bench.pool_transfer",
        "--link",
        str(link),
        "--copy",
        str(copy),
        "--latency",
        str(options.latency),
    ]
    me += ["--quick"] if options.quick else []
    command = [str(beside) if beside.exists() else "mpiexec", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    command += ["-n", "1", *me, "--role", "application", ":", "-n", "1", *me, "--role", "agent"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=os.environ | root, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    return eval(line[6:])  # our own process's dictionary, with its numbers as keys


def report(link: float, copy: float, rates: dict[str, float], found: dict[str, Any]) -> dict[str, Any]:
    title = f"link of {link:g} MB/s (emulated)" if link else "no emulated link"
    names = [f"{size >> 10} KiB" for size in SIZES]
    table(
        f"{title}, device {copy:g} MB/s: MB/s by chunk and data",
        ["chunk", *names],
        [
            [f"{chunk >> 10} KiB", *[size / s / MB for size, s in row.items()]]
            for chunk, row in found["pipeline"].items()
        ],
    )
    slowest = min(rates.values())
    stages = ", ".join(f"{name} {rate / MB:.0f}" for name, rate in rates.items())
    bound = 1 - (1 / slowest) / sum(1 / rate for rate in rates.values())
    print(f"stages, MB/s: {stages}; a pipeline can save at most {bound:.0%} of the time of one after the other")
    rows = []
    for name in ("idle", "busy", "beside"):
        for size, (whole, piped) in found[name].items():
            reached = size / piped / slowest
            rows.append([name, f"{size >> 10} KiB", 1e3 * whole, 1e3 * piped, 1 - piped / whole, reached])
    table(
        f"{title}: in one piece, and with the defaults",
        ["application", "data", "one piece ms", "pipeline ms", "saved", "of the slowest stage"],
        rows,
    )
    cores = len(os.sched_getaffinity(0))
    needed = slowest * found["processor"]
    print(f"at the slowest stage's rate both processes keep {needed:.2f} of {cores} processors busy")
    return {"link": link, "copy": copy, "rates": rates, "bound": bound, "rows": rows, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", type=float, nargs="+", default=[0, 3600], help="MB/s; 0: none")
    parser.add_argument("--copy", type=float, default=3600, help="of the emulated copy engine, MB/s")
    parser.add_argument("--latency", type=float, default=5, help="of an emulated link, microseconds")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--role", choices=("application", "agent"), help=argparse.SUPPRESS)
    parser.add_argument("--link", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "agent":
        agent(options.link, options.latency, options.copy)
        return
    if options.role == "application":
        found = application(options.link, options.latency, options.copy, options)
        print("found", repr(found), flush=True)
        return
    result: dict[str, Any] = machine("cpu") | {"jobs": []}
    memory = job(options, 0, 0)
    size = 64 << 20
    rates = {"memory": size / memory["memory"][size], "device": engine(options.copy)}
    print(
        f"round trip {1e6 * memory['round trip']:.0f} us; memory to memory, MB/s: "
        + ", ".join(f"{s >> 10} KiB {s / t / MB:.0f}" for s, t in memory["memory"].items())
    )
    for link in options.links:
        stages = rates | ({"link": link * MB} if link else {})
        result["jobs"].append(report(link, options.copy, stages, job(options, link, options.copy)))
        save(options.json, result)


if __name__ == "__main__":
    main()
