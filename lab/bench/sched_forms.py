"""Cost of the preemptible forms of a kernel, and latency of its preemption.

*Forms*: the plain kernel, and workers that claim blocks, in turn, in one run; registers and resident blocks
of each; whether the results are the same bit for bit. *Block length*: the same for blocks of a chosen time.
*Latency*: from setting the flag to the last worker having left, idle and under host-to-device copies, by block length.
*Shrink and resume*: half of the workers leave, and come back, and every block has run once.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.timing import machine, save, table
from lab.sched.workloads import WORKLOADS, make
from warpwell import gpu
from warpwell.scheduler.executors.gpu import Gpu
from warpwell.targets import memory_for, to_host, zeros
from warpwell.targets.blocks.control import CONTROL_WORDS, CURSOR, DONE, LEFT, NEVER, STOP, fresh
from warpwell.targets.blocks.cuda import Forms
from warpwell.targets.blocks.launch import BlockLaunch

PROGRAMS = ("gemm", "atax", "conv2d", "spmv", "triad")
COPY_BYTES = 64 << 20
"""Size of one host-to-device copy in bytes."""


@ww.kernel
def spin(x, rounds):
    """Compute for a time that `rounds` sets; the first item of every block counts its executions."""
    i = gpu.grid(1)
    value = np.float32(1.0)
    for _ in range(rounds):
        for _ in range(16):  # unrolled, so that arithmetic dominates the loop overhead
            value = value * np.float32(1.0001) + np.float32(1e-9)
    if i & 255 == 0 or value == 0:
        x[i >> 8] += 1


class Bench:
    """A GPU, and launches on it."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.gpu.enter()
        self.stream = self.gpu.new_stream()
        self.rounds: dict[float, int] = {}
        self.delay: Any = None

    def seconds(self, start: Any) -> float:
        """Return the GPU's time of the launches of `start(stream)`, all queued before the first event is reached."""
        if self.delay is None:
            self.delay = Made(self, spin[256 * 132], (zeros("cuda", 132, np.int32), 5000))
        self.delay.forms.start_plain(self.stream)
        first = self.gpu.mark(self.stream, timing=True)
        start(self.stream)
        last = self.gpu.mark(self.stream, timing=True)
        self.wait(last)
        return self.gpu.elapsed(first, last)

    def wait_seconds(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    def wait(self, event: Any) -> None:
        while not self.gpu.done(event):
            pass


class Made:
    """A launch with its forms and a control record."""

    def __init__(self, bench: Bench, launch: Any, arguments: Any) -> None:
        self.bench = bench
        self.blocks = BlockLaunch(launch, arguments, "cuda")
        self.blocks.begin()
        self.forms = Forms(self.blocks)
        self.chunk = 1
        self.records = [self.blocks.new_control()]
        self.control = self.records[0].address
        self.alone = 0.0  # solo run time in seconds, set after the measurement
        self.resident = {f: self.forms.resources(f) for f in ("plain", "workers")}

    def reset(self, stream: Any) -> None:
        self.bench.gpu.write_words(stream, self.control, fresh())

    def workers(self, stream: Any, chunk: int = 1) -> None:
        self.reset(stream)
        self.workers_only(stream, chunk)

    def workers_only(self, stream: Any, chunk: int) -> None:
        count = min(self.resident["workers"]["resident"], -(-self.blocks.blocks // chunk))
        self.forms.start(self.control, 0, count, stream, chunk)

    def chunk_for(self, seconds: float) -> int:
        """Return the blocks that a worker claims at once, about 20 us of work, if the plain kernel takes `seconds`."""
        block = seconds * min(self.resident["workers"]["resident"], self.blocks.blocks) / self.blocks.blocks
        return max(1, min(16, int(20e-6 / block)))


@contextmanager
def copies(is_copying: bool) -> Iterator[list[int]]:
    """Copy 64 MiB from pinned memory to the GPU over and over in another thread; yield a list with the count."""
    count, stop, ready = [0], threading.Event(), threading.Event()

    def copy() -> None:
        gpu = Gpu()
        gpu.enter()
        stream = gpu.new_stream()
        host, device = memory_for("cuda").allocate_shared(COPY_BYTES), memory_for("cuda").allocate(COPY_BYTES)
        ready.set()
        while not stop.is_set():
            for _ in range(4):
                gpu.driver.cuMemcpyHtoDAsync(device.address, host.address, COPY_BYTES, int(stream.handle))
            gpu.synchronize(stream)
            count[0] += 4

    thread = threading.Thread(target=copy)
    if is_copying:
        thread.start()
    try:
        if is_copying and not ready.wait(60):
            raise SystemExit("the thread that copies to the GPU did not start")
        yield count
    finally:
        stop.set()
        if is_copying:
            thread.join()


def compare(bench: Bench, made: Made, runs: int) -> tuple[float, float, int]:
    """Return seconds of plain and workers (medians, taken in turn), and the chunk."""
    for form in (made.forms.start_plain, made.workers):
        bench.seconds(form)
    chunk = made.chunk_for(min(bench.seconds(made.forms.start_plain) for _ in range(3)))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        times[0].append(bench.seconds(made.forms.start_plain))
        made.reset(bench.stream)
        times[1].append(bench.seconds(lambda s: made.workers_only(s, chunk)))
    plain, workers = (statistics.median(t) for t in times)
    return plain, workers, chunk


def overhead(bench: Bench, runs: int, sizes: dict[str, int]) -> list[list[Any]]:
    rows = []
    for name in PROGRAMS:
        size = sizes.get(name, WORKLOADS[name].large)
        apps = [make(name, size, "cuda") for _ in range(2)]
        # First compare the results: each application runs each of its steps once, in different forms.
        for step in apps[0]:
            bench.seconds(Made(bench, step.launch, step.arguments).forms.start_plain)
        cuts = [Made(bench, step.launch, step.arguments) for step in apps[1]]
        for cut in cuts:
            bench.seconds(cut.workers)
        equal = all(
            a.tobytes() == b.tobytes()
            for a, b in zip(apps[0].results().values(), apps[1].results().values(), strict=True)
        )
        for step, cut in zip(apps[1], cuts, strict=True):
            plain, workers, chunk = compare(bench, cut, runs)
            r = cut.resident
            rows.append(
                [
                    f"{name}.{step.name}",
                    cut.blocks.blocks,
                    1e3 * plain,
                    workers / plain - 1,
                    chunk,
                    f"{r['plain']['registers']}/{r['workers']['registers']}",
                    f"{r['plain']['local']}/{r['workers']['local']}",
                    f"{r['plain']['resident']}/{r['workers']['resident']}",
                    "yes" if equal else "NO",
                ]
            )
            print(*rows[-1], flush=True)
        del apps
    return rows


def rounds_for(bench: Bench, seconds: float) -> int:
    """Return the rounds that make one block of `spin` take about `seconds` when the GPU is full of them."""
    if seconds in bench.rounds:
        return bench.rounds[seconds]
    indices = 256 * bench.gpu.processors * 8
    made = Made(bench, spin[indices], (zeros("cuda", indices // 256, np.int32), 4000))
    bench.seconds(made.forms.start_plain)
    each = min(bench.seconds(made.forms.start_plain) for _ in range(3)) / 4000
    bench.rounds[seconds] = max(1, int(seconds / each))
    return bench.rounds[seconds]


def by_block_length(bench: Bench, runs: int) -> list[list[Any]]:
    rows = []
    for length in (2e-6, 5e-6, 10e-6, 20e-6, 50e-6, 100e-6, 1e-3):
        rounds = rounds_for(bench, length)
        blocks = int(max(4, min(400, 20e-3 / length))) * bench.gpu.processors * 8
        made = Made(bench, spin[256 * blocks], (zeros("cuda", blocks, np.int32), rounds))
        plain, workers, chunk = compare(bench, made, runs)
        block = plain * made.resident["workers"]["resident"] / blocks
        rows.append([1e6 * length, 1e6 * block, workers / plain - 1, chunk])
        print(*rows[-1], flush=True)
    return rows


def latency(bench: Bench, name: str, counts: dict[float, int]) -> list[list[Any]]:
    """Return p50 and p99 of the time from setting the flag to all workers having left, less one block.

    `name` is the first field of each row: whether copies run.
    """
    rng = np.random.default_rng(0)
    rows = []
    for length, count in counts.items():
        rounds = rounds_for(bench, length)
        blocks = int(3 * count * (2 * length + 0.7e-3) / length) * 8 * bench.gpu.processors + 100_000
        array = zeros("cuda", blocks, np.int32)
        made = Made(bench, spin[256 * blocks], (array, rounds))
        resident = made.resident["workers"]["resident"]
        made.reset(bench.stream)
        times, done = [], 0
        lengths = []
        for _ in range(count):
            bench.gpu.write_words(bench.stream, made.control, fresh(done)[:DONE])
            made.forms.start(made.control, 0, resident, bench.stream, 1)
            event = bench.gpu.mark(bench.stream)
            bench.wait_seconds(2 * length + float(rng.uniform(0.1e-3, 0.4e-3)))
            if len(lengths) < 20 and length < 5e-3:  # measure without a change: other kernels may slow the kernel
                before, at = bench.gpu.read_words(made.control, CONTROL_WORDS)[DONE], time.perf_counter()
                bench.wait_seconds(max(5 * length, 0.3e-3))
                after = bench.gpu.read_words(made.control, CONTROL_WORDS)[DONE]
                lengths.append((time.perf_counter() - at) * resident / (after - before))
            start = time.perf_counter()
            bench.gpu.set_word(made.control + 8 * STOP, NEVER)
            bench.wait(event)
            times.append(time.perf_counter() - start)
            control = bench.gpu.read_words(made.control, CONTROL_WORDS)
            if control[CURSOR] != control[DONE] or control[CURSOR] >= blocks:
                raise SystemExit(f"cursor {control[CURSOR]} and done {control[DONE]} of {blocks}")
            done = int(control[CURSOR])
        ran = to_host(array)
        if not ((ran[:done] == 1).all() and not ran[done:].any()):
            raise SystemExit("a block did not run exactly once")
        p50, p99 = np.quantile(times, (0.5, 0.99))
        block = statistics.median(lengths) if lengths else length
        over = 1e6 * (p50 - block), 1e6 * (p99 - block)
        rows.append([name, 1e6 * block, count, 1e6 * p50, 1e6 * p99, *over])
        print(*rows[-1], flush=True)
    return rows


def shrink_and_resume(bench: Bench) -> list[Any]:
    """Return microseconds until half have left and until they are back; every block must have run once."""
    rounds = rounds_for(bench, 50e-6)
    blocks = 8 * bench.gpu.processors * 2500
    array = zeros("cuda", blocks, np.int32)
    made = Made(bench, spin[256 * blocks], (array, rounds))
    resident = made.resident["workers"]["resident"]
    half = resident // 2
    side = bench.gpu.new_stream()
    made.workers(bench.stream)
    leave_times, return_times = [], []
    left, top = 0, resident
    event = bench.gpu.mark(bench.stream)
    grown: list[Any] = []
    rate = []
    time.sleep(2e-3)
    for _ in range(5):
        first = bench.gpu.read_words(made.control, CONTROL_WORDS)
        at = time.perf_counter()
        time.sleep(2e-3)
        second = bench.gpu.read_words(made.control, CONTROL_WORDS)
        full = (second[DONE] - first[DONE]) / (time.perf_counter() - at)
        start = time.perf_counter()
        bench.gpu.set_word(made.control + 8 * STOP, top - half)
        while int(bench.gpu.read_words(made.control, CONTROL_WORDS)[LEFT]) - left < resident - half:
            pass
        leave_times.append(time.perf_counter() - start)
        left += resident - half
        first = bench.gpu.read_words(made.control, CONTROL_WORDS)
        at = time.perf_counter()
        time.sleep(2e-3)
        second = bench.gpu.read_words(made.control, CONTROL_WORDS)
        rate.append((second[DONE] - first[DONE]) / (time.perf_counter() - at) / full)
        start = time.perf_counter()
        made.forms.start(made.control, top, resident - half, side, 1)
        top += resident - half
        grown.append(bench.gpu.mark(side))
        return_times.append(time.perf_counter() - start)
    for e in [event, *grown]:
        bench.wait(e)
    ran = to_host(array)
    middle = statistics.median
    return [1e6 * middle(leave_times), middle(rate), 1e6 * middle(return_times), bool((ran == 1).all())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=SIZE")
    parser.add_argument("--parts", nargs="+", default=["shrink", "latency", "length", "forms"])
    options = parser.parse_args()
    sizes = {k: int(v) for k, v in (s.split("=") for s in options.size)}
    bench = Bench()
    result: dict[str, Any] = machine("cuda")
    if "shrink" in options.parts:
        result["shrink"] = shrink_and_resume(bench)
        table(
            "shrink to half and grow again, blocks of 50 us",
            ["left after us", "rate", "launched again us", "each once"],
            [result["shrink"]],
        )
        save(options.json, result)
    if "latency" in options.parts:
        counts = {10e-6: 400, 100e-6: 400, 1e-3: 200, 10e-3: 40}
        result["latency"] = latency(bench, "no", counts)
        with copies(True):
            result["latency"] += latency(bench, "yes", counts)
        table(
            "from the flag to the last worker having left",
            ["copies", "block us", "times", "p50 us", "p99 us", "p50 - block", "p99 - block"],
            result["latency"],
        )
        save(options.json, result)
    if "length" in options.parts:
        result["length"] = by_block_length(bench, options.runs)
        table("cost by block length", ["block us", "measured us", "workers", "chunk"], result["length"])
        save(options.json, result)
    if "forms" in options.parts:
        result["forms"] = overhead(bench, options.runs, sizes)
        table(
            "plain, workers",
            ["kernel", "blocks", "plain ms", "workers", "chunk", "registers", "local", "resident", "equal"],
            result["forms"],
        )
        costs = sorted(row[3] for row in result["forms"])
        print(f"workers: median {statistics.median(costs):+.3f}, worst {costs[-1]:+.3f}")
        save(options.json, result)


if __name__ == "__main__":
    main()
