"""Latency of a task of top priority while both lanes are full and copies of 64 MiB run.

Two kernels of about 12 ms keep both lanes busy, more kernels wait, and a thread copies 64 MiB to the device without a
pause. At random times a short task of higher priority is submitted, of the class of one lane or of the other. Its first
block writes the GPU's clock to pinned memory. The result is the time from before `submit` to then, with the times of
the arrival, the preemption, its end and the launch in the log. The `Scheduler` has its default options; each
kernel runs solo a few times first, which are measured.

The clocks are compared before and after, by a kernel of one thread that answers the host with its clock: the clock was
read between the host's question and its receipt of the answer, so the narrowest of many intervals bounds the offset.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import warpwell as ww
from lab.bench.sched_forms import COPY_BYTES, copies
from lab.bench.sched_share import logistic, stream
from lab.bench.timing import machine, save, table
from warpwell.scheduler import Scheduler
from warpwell.scheduler.extend import Log
from warpwell.targets import memory_for, zeros
from warpwell.targets.primitives import SYSTEM, clock_ns, load_acquire, store_relaxed

PATIENCE = 20.0
"""Timeout of a task's start in seconds."""
ALONE = 5
"""Solo runs of each kernel before the measurement."""


@ww.kernel
def answer(fields, times):
    """Answer each question of the host, 1 to `times`, with the clock; stop after two seconds."""
    question = 1
    start = clock_ns()
    while question <= times and clock_ns() - start < 2_000_000_000:
        if load_acquire(fields + 8, SYSTEM) == question:
            store_relaxed(fields, clock_ns(), SYSTEM)
            question += 1


@ww.kernel
def urgent_compute(x, growth, steps, address):
    """Compute for a few hundred microseconds; first write the time of the start."""
    i = ww.gpu.grid(1)
    if i == 0:
        store_relaxed(address, clock_ns(), SYSTEM)
    value = x[i]
    for _ in range(steps):
        value = growth * value * (np.float32(1) - value)
    x[i] = value


@ww.kernel
def urgent_memory(a, b, factor, address):
    """Move about 300 MB; first write the time of the start."""
    i = ww.gpu.grid(1)
    if i == 0:
        store_relaxed(address, clock_ns(), SYSTEM)
    a[i] = a[i] + factor * b[i]


class Clocks:
    """The GPU's clock compared with the host's.

    Attributes
    ----------
    points : list of (float, float, float)
        Host's seconds, GPU's less host's seconds, and half of the interval in which that lies.
    """

    def __init__(self, device: str, fields: Any, address: int) -> None:
        self._device, self._fields, self._address = device, fields, address
        self.points: list[tuple[float, float, float]] = []
        answer[1](address, 0, device=device)  # compiled here, so that the first answer is not late

    def compare(self, times: int = 1000) -> None:
        """Add a point."""
        fields = self._fields
        fields[:2] = 0
        best = (0.0, 0.0, 1.0)
        kernel = threading.Thread(target=lambda: answer[1](self._address, times, device=self._device))
        kernel.start()
        limit = time.perf_counter() + PATIENCE
        for question in range(1, times + 1):
            if question > 1 and time.perf_counter() > limit:
                break  # the machine is busy; the kernel ends by itself
            fields[0] = 0
            start = time.perf_counter()
            fields[1] = question
            while not fields[0]:
                if time.perf_counter() > start + PATIENCE:
                    raise SystemExit("the clock kernel did not answer within its timeout")
            answered = time.perf_counter()
            limit = answered + 1.0 if question == 1 else limit
            offset = 1e-9 * int(fields[0]) - (start + answered) / 2
            best = min(best, (start, offset, (answered - start) / 2), key=lambda point: point[2])
        kernel.join()
        self.points.append(best)

    def host(self, nanoseconds: int) -> float:
        """Return the host's seconds for a time of the GPU."""
        (t0, o0, _), (t1, o1, _) = self.points[0], self.points[-1]
        at = 1e-9 * nanoseconds - o0
        return at - (o1 - o0) * (at - t0) / (t1 - t0)


@contextmanager
def busy(scheduler: Scheduler, kinds: list[tuple[Any, tuple[Any, ...]]], depth: int = 3) -> Iterator[list[int]]:
    """Keep `depth` tasks of each kernel waiting or running; yield a list that counts the ended tasks."""
    stop, ended = threading.Event(), [0] * len(kinds)

    def feed(k: int) -> None:
        launch, arguments = kinds[k]
        waiting = deque(scheduler.submit(launch, *arguments) for _ in range(depth))
        while not stop.is_set():
            waiting.popleft().result(timeout=PATIENCE)
            ended[k] += 1
            waiting.append(scheduler.submit(launch, *arguments))
        for handle in waiting:
            handle.cancel()

    threads = [threading.Thread(target=feed, args=(k,)) for k in range(len(kinds))]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def starts(scheduler: Scheduler, launch: Any, arguments: tuple[Any, ...], fields: Any, times: int) -> list[Any]:
    """Return, for each of `times` tasks, the host's time of its submission and the GPU's of its start."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(times):
        time.sleep(float(rng.uniform(3e-3, 9e-3)))
        fields[0] = 0
        start = time.perf_counter()
        scheduler.submit(launch, *arguments, priority=8).result(timeout=PATIENCE)
        found.append((start, int(fields[0])))
    return found


STEPS = ("arrive", "preempt", "stop", "launch")


def steps(scheduler: Scheduler, name: str, start: list[float]) -> list[float]:
    """Return the median microseconds from submission to each of `STEPS`, by the log; 0 without such an event."""
    # The scheduler's clock is read after the host's, so the largest difference is the most accurate one.
    offset = max(time.perf_counter() - scheduler.inspect(lambda core: core.executor.now()) for _ in range(50))
    events = list(scheduler.log)
    tasks = [event.task for event in events if event.kind == "arrive" and event.name == name][-len(start) :]
    times: dict[str, list[float]] = {step: [] for step in STEPS}
    for task, since in zip(tasks, start, strict=False):
        victims = [e.task for e in events if e.kind == "preempt" and e.why.get("newcomer") == task]
        for event in events:
            is_own = event.task == task and event.kind in ("arrive", "launch")
            is_victim = event.kind in ("preempt", "stop") and event.task in victims and event.time + offset > since
            if is_own or (is_victim and len(times[event.kind]) < len(times["arrive"])):
                times[event.kind].append(1e6 * (event.time + offset - since))
    return [float(np.median(found)) if found else 0.0 for found in times.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=40, help="start no case after this time")
    parser.add_argument("--policies", nargs="+", default=["lanes"])
    parser.add_argument("--json", default=None, metavar="FILE")
    parser.add_argument("--log", default=None, metavar="FILE", help="write the scheduler's log of the last policy")
    parser.add_argument("--dry", action="store_true", help="run on the CPU, only to test the script")
    options = parser.parse_args()
    start = time.perf_counter()
    device = "cpu" if options.dry else "cuda"
    small = options.dry
    pinned = memory_for(device).allocate_shared(64)
    fields, address = pinned.words, pinned.address
    n, m = 1 << (14 if small else 31), 1 << (14 if small else 26)
    a, b, c = (zeros(device, n, np.float64) for _ in range(3))
    x = zeros(device, m, np.float32)
    operands = [zeros(device, 1 << (12 if small else 24), np.float64) for _ in range(2)]
    y = zeros(device, 1 << (12 if small else 19), np.float32)
    growth = np.float32(3.7)
    lanes = [(stream[n // 4], (a, b, c, 3.0)), (logistic[m // 4], (x, growth, 4 if small else 450))]
    urgent = {
        "compute": (urgent_compute[y.size], (y, growth, 20 if small else 3000, address)),
        "memory": (urgent_memory[operands[0].size], (*operands, 3.0, address)),
    }
    clocks = Clocks(device, fields, address)
    result: dict[str, Any] = machine(device)
    rows: list[list[Any]] = []
    raw: list[tuple[list[Any], list[Any], list[float]]] = []
    clocks.compare()
    for name in options.policies:
        with Scheduler(device, name, log=Log()) as scheduler:
            for launch, arguments in [*lanes, *urgent.values()] * ALONE:
                scheduler.submit(launch, *arguments).result(timeout=PATIENCE)
            for copying in (False, True):
                for kind, (launch, arguments) in urgent.items():
                    if time.perf_counter() - start > options.seconds:
                        break
                    with copies(copying and device == "cuda") as copied, busy(scheduler, lanes) as ended:
                        time.sleep(0.1)
                        since = time.perf_counter()
                        found = starts(scheduler, launch, arguments, fields, options.times)
                        took = time.perf_counter() - since
                        speed = 1e-9 * copied[0] * COPY_BYTES / took
                        how = f"{speed:.0f} GB/s" if copying else "no"
                        step_times = steps(scheduler, launch.kernel.__name__, [since for since, _ in found])
                        raw.append(([name, f"{kind} lane", how, sum(ended)], found, step_times))
            offset = max(time.perf_counter() - scheduler.inspect(lambda core: core.executor.now()) for _ in range(50))
            if options.log:
                with open(options.log, "w", encoding="utf-8") as file:
                    scheduler.log.write(file)
    clocks.compare()
    for head, found, step_times in raw:
        times = 1e6 * np.array([clocks.host(gpu_time) - host_time for host_time, gpu_time in found])
        p50, p99 = np.quantile(times, (0.5, 0.99))
        rows.append([*head, len(times), float(p50), float(p99), float(times.max()), *step_times])
    widths = [f"{1e6 * half:.1f}" for _, _, half in clocks.points]
    drift = 1e6 * (clocks.points[-1][1] - clocks.points[0][1])
    print(f"clocks: known to {' and '.join(widths)} us, drifted {drift:.1f} us in the run")
    table(
        "from submit to the start of a task of top priority, us",
        ["policy", "takes its place in", "copies", "kernels ended", "times", "p50", "p99", "worst", *STEPS],
        rows,
    )
    result["rows"] = rows
    # seconds of the log's clock: submitted, begun
    result["times"] = [
        [*head, [[host_time - offset, clocks.host(gpu_time) - offset] for host_time, gpu_time in found]]
        for head, found, _ in raw
    ]
    save(options.json, result)


if __name__ == "__main__":
    main()
