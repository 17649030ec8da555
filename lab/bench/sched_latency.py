"""Cost of the scheduler per task: CPU time in Python, and on a GPU the time between kernels.

Without a GPU (``cpu/...``): the CPU time per task of `submit`, of `result` and of the scheduler's thread, with a clock
instead of the GPU, and without native waits: of launches that are submitted alone, of *prepared* ones, and of one
*batch*.

On a GPU, *decision* is the time from the completion that the scheduler detected (on an idle device, from the call of
`submit`) to the return of the driver's launch; negative if the next kernel was launched behind the running kernel.
*Batch* is the time per kernel of many short ones, in one call of `submit_many`, compared with plain launches in one
stream.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lab.bench.runner import Record, Setting, benchmark
from lab.bench.sched_forms import Bench, Made, spin
from warpwell.scheduler import Profile, Scheduler
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.executors.launch_queues import LaunchQueue, LaunchQueues
from warpwell.scheduler.extend import Decision, Kind, Launch, View
from warpwell.scheduler.policies.order import FirstCome
from warpwell.targets import zeros

BLOCKS = 132


def rounds_for(bench: Bench, x: Any, seconds: float) -> int:
    """Return the rounds of `spin` that take this time."""
    rounds = 1000
    for _ in range(4):
        made = Made(bench, spin[256 * BLOCKS], (x, rounds))
        rounds = max(1, int(rounds * seconds / min(bench.seconds(made.forms.start_plain) for _ in range(5))))
    return rounds


def plain_seconds(bench: Bench, x: Any, rounds: int, count: int) -> float:
    """Return the seconds of launches in one stream, from the first launch to the end of the last."""
    made = Made(bench, spin[256 * BLOCKS], (x, rounds))
    start = time.perf_counter()
    for _ in range(count):
        made.forms.start_plain(bench.stream)
    bench.gpu.synchronize(bench.stream)
    return time.perf_counter() - start


def scheduled_seconds(scheduler: Scheduler, x: Any, rounds: int, count: int, profile: Profile | None) -> float:
    """Return the seconds of as many tasks, from the first `submit` to the end of the last."""
    launch = spin[256 * BLOCKS]
    start = time.perf_counter()
    handles = [scheduler.submit(launch, x, rounds, profile=profile, order="none") for _ in range(count)]
    for handle in handles:
        handle.result(60)
    return time.perf_counter() - start


def batch_seconds(scheduler: Scheduler, x: Any, rounds: int, count: int, profile: Profile) -> float:
    """Return the seconds of as many launches in one request."""
    start = time.perf_counter()
    scheduler.submit_many([(spin[256 * BLOCKS], x, rounds)] * count, profile=profile).result(60)
    return time.perf_counter() - start


class Workers(FirstCome):
    """One kernel at a time, as workers."""

    def decide(self, view: View) -> list[Decision]:
        return [Launch(found.job) for found in super().decide(view) if isinstance(found, Launch)]


class Watch:
    """Times at which launches returned and ends were detected, by number (`time.perf_counter`)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.launched: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        executor = scheduler._executor
        launch, poll, reap = executor.launch, executor.poll, LaunchQueue.poll_completions

        def launches(job: Any, placement: Any) -> None:
            launch(job, placement)
            self.launched.setdefault(job.number, time.perf_counter())

        def polls() -> list[Any]:
            events = poll()
            for event in events:
                self.ended.setdefault(event.job.number, executor._began + event.time)
            return events

        def reaps(line: Any) -> list[Any]:
            found = reap(line)
            for run, _, start, ended in found:
                self.launched[run.job.number], self.ended[run.job.number] = start, ended
            return found

        executor.launch, executor.poll, LaunchQueue.poll_completions = launches, polls, reaps  # type: ignore[method-assign]
        self._reap = reap

    def close(self) -> None:
        """Stop recording."""
        LaunchQueue.poll_completions = self._reap  # type: ignore[method-assign]


def decisions(policy: Any, x: Any, rounds: int, seconds: float, count: int) -> list[float]:
    """Return the seconds from each detected end to the return of the next launch, for a backlog."""
    profile = Profile(kind=Kind.COMPUTE, seconds=seconds, source="measured")
    with Scheduler("cuda", policy, limit=1) as scheduler:
        scheduled_seconds(scheduler, x, rounds, 4, profile)
        watch = Watch(scheduler)
        scheduled_seconds(scheduler, x, rounds, count, profile)
        watch.close()
    numbers = sorted(watch.launched)
    return [watch.launched[n] - watch.ended[n - 1] for n in numbers if n - 1 in watch.ended]


def arrivals(x: Any, rounds: int, seconds: float, pause: float, count: int) -> list[float]:
    """Return seconds from the call of `submit` to the launch having returned, on an idle device."""
    profile = Profile(kind=Kind.COMPUTE, seconds=seconds, source="measured")
    launch, called = spin[256 * BLOCKS], {}
    with Scheduler("cuda", "lanes") as scheduler:
        scheduled_seconds(scheduler, x, rounds, 4, profile)
        watch = Watch(scheduler)
        for _ in range(count):
            time.sleep(pause)
            start = time.perf_counter()
            handle = scheduler.submit(launch, x, rounds, profile=profile)
            handle.result(60)
            called[handle.task.number] = start
        watch.close()
    return [watch.launched[number] - start for number, start in called.items()]


@contextmanager
def native_seconds() -> Iterator[list[float]]:
    """Yield a list with the CPU seconds of native waits, which do not hold the interpreter lock."""
    watch, total = LaunchQueues.watch, [0.0]

    def timed(self: Any, *args: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return watch(self, *args, **options)
        finally:
            total[0] += time.thread_time() - start

    LaunchQueues.watch = timed  # type: ignore[method-assign]
    try:
        yield total
    finally:
        LaunchQueues.watch = watch  # type: ignore[method-assign]


def python_seconds(count: int, seconds: float, how: str) -> dict[str, float]:
    """Return CPU seconds per task in Python, with a clock instead of the GPU."""
    from lab.testing.clock_gpu import ClockArray, ClockGpu

    launch, x = spin[256 * BLOCKS], np.zeros(BLOCKS, np.int32).view(ClockArray)
    with (
        native_seconds() as native,
        Scheduler("cpu", "lanes", executor=CudaExecutor(gpu=ClockGpu(seconds))) as scheduler,
    ):
        for _ in range(8):
            scheduler.submit(launch, x, 1).result(60)
        gc.collect()
        gc.disable()
        native[0] = 0.0
        thread, start = scheduler.inspect(lambda core: time.thread_time()), time.thread_time()
        if how == "batch":
            handles: list[Any] = [scheduler.submit_many([(launch, x, 1)] * count)]
        elif how == "prepared":
            prepared = scheduler.prepare(launch, x, 1, order="none")
            handles = [scheduler.submit(prepared) for _ in range(count)]
        else:
            handles = [scheduler.submit(launch, x, 1, order="none") for _ in range(count)]
        submitted = time.thread_time()
        for handle in handles:
            handle.result(120)
        ended = time.thread_time()
        thread = scheduler.inspect(lambda core: time.thread_time()) - thread - native[0]
        gc.enable()
    return {"submit": (submitted - start) / count, "result": (ended - submitted) / count, "thread": thread / count}


def on_cpu(setting: Setting, record: Record) -> None:
    """Measure CPU time in Python, the variants in turn."""
    count = setting.pick((2000, 10_000), (2000, 10_000), "count")
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name in ("alone", "prepared", "batch"):
            for part, seconds in python_seconds(count, 50e-6, name).items():
                found.setdefault(f"cpu/{name}/{part}", []).append(seconds)
    for name, values in found.items():
        record(name, values, "s/task", better="lower")


@benchmark("sched-latency", figures=["cpu", "decision", "batch"])
def run(setting: Setting, record: Record) -> None:
    """Measure CPU time, and on a GPU decisions and batches."""
    on_cpu(setting, record)
    if not setting.on_gpu:
        return
    bench, x = Bench(), zeros("cuda", BLOCKS, np.int32)
    rounds, longer = rounds_for(bench, x, 50e-6), rounds_for(bench, x, 2e-3)
    many = setting.pick((0, 0), (500, 2000))
    for name, times in {
        "first-come/2 ms": decisions("first-come", x, longer, 2e-3, 200),
        "first-come/50 us": decisions("first-come", x, rounds, 50e-6, many),
        "lanes/2 ms": decisions("lanes", x, longer, 2e-3, 200),
        "lanes/50 us": decisions("lanes", x, rounds, 50e-6, many),
        "workers/2 ms": decisions(Workers(), x, longer, 2e-3, 200),
        "idle for 0.2 ms": arrivals(x, rounds, 50e-6, 2e-4, 200),
        "idle for 5 ms": arrivals(x, rounds, 50e-6, 5e-3, 100),
    }.items():
        record(f"decision/{name}/p50", float(np.median(times)), "s", better="lower")
        record(f"decision/{name}/p99", float(np.quantile(times, 0.99)), "s", better="lower")
    count = setting.pick((0, 0), (5000, 20_000))
    found: dict[str, list[float]] = {}
    for _ in range(3):
        found.setdefault("plain", []).append(plain_seconds(bench, x, rounds, count) / count)
        for policy in ("left-over", "lanes"):
            with Scheduler("cuda", policy) as scheduler:
                profile = Profile(kind=Kind.COMPUTE, seconds=50e-6, source="measured")
                batch_seconds(scheduler, x, rounds, 8, profile)
                found.setdefault(policy, []).append(batch_seconds(scheduler, x, rounds, count, profile) / count)
    plain = record("batch/plain", found.pop("plain"), "s/kernel", better="lower")
    for name, values in found.items():
        record(f"batch/{name}", values, "s/kernel", better="lower", ceiling=("plain launches", plain))
