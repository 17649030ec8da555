"""What does the scheduler cost a task: a decision with its launch, and short kernels one after the other?

*Decision*: from the end that was noticed (or, on an idle device, from the call of `submit`) to the driver's launch
having returned; negative where the next kernel was launched behind the one that ran. As it is: `first-come`, one
kernel at a time; as workers: the same with workers in place of the plain kernel. Besides, what the GPU idles between
two of them. *Train*: many short kernels by a loop of `submit` and a wait for all, beside plain launches in one
stream, in turn, in one run.

``--parts`` needs no GPU: it measures what a task of a train takes of a processor in Python, part by part, with a clock
in the GPU's place (run as ``PYTHONPATH=src:. python benchmarks/sched_rate.py --parts``).
"""

from __future__ import annotations

import argparse
import collections
import gc
import statistics
import threading
import time
from typing import Any

import numpy as np

from lab.bench.sched_forms import Bench, Made, spin
from lab.bench.timing import machine, save, table
from warpwell.scheduler import Decision, Kind, Launch, Profile, Scheduler, View
from warpwell.scheduler.core import Core
from warpwell.scheduler.dispatcher import Dispatcher
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.policies.lanes import Lanes
from warpwell.scheduler.policies.order import FirstCome
from warpwell.targets.arrays import zeros
from warpwell.targets.gpu.lines import Line, Lines

BLOCKS = 132


def rounds_for(bench: Bench, x: Any, seconds: float) -> int:
    """Return the rounds of `spin` that take so long."""
    rounds = 1000
    for _ in range(4):
        made = Made(bench, spin[256 * BLOCKS], (x, rounds))
        rounds = max(1, int(rounds * seconds / min(bench.seconds(made.forms.start_plain) for _ in range(5))))
    return rounds


def plain_seconds(bench: Bench, x: Any, rounds: int, count: int) -> float:
    """Return the seconds of launches in one stream, from the first one to the end of the last."""
    made = Made(bench, spin[256 * BLOCKS], (x, rounds))
    begun = time.perf_counter()
    for _ in range(count):
        made.forms.start_plain(bench.stream)
    bench.gpu.synchronize(bench.stream)
    return time.perf_counter() - begun


def scheduled_seconds(scheduler: Scheduler, x: Any, rounds: int, count: int, profile: Profile | None) -> float:
    """Return the seconds of as many tasks, from the first `submit` to the end of the last."""
    launch = spin[256 * BLOCKS]
    begun = time.perf_counter()
    handles = [scheduler.submit(launch, x, rounds, profile=profile) for _ in range(count)]
    submitted = time.perf_counter() - begun
    for handle in handles:
        handle.result(60)
    took = time.perf_counter() - begun
    if count > 100:
        print(f"    submit {1e6 * submitted / count:.1f} us, all {1e6 * took / count:.1f} us a task")
    return took


class Workers(FirstCome):
    """One kernel at a time, as workers."""

    def decide(self, view: View) -> list[Decision]:
        return [Launch(found.job) for found in super().decide(view) if isinstance(found, Launch)]


class Watch:
    """When launches had returned and when ends were noticed, by number (`time.perf_counter`)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.launched: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        executor = scheduler._executor
        launch, poll, reap = executor.launch, executor.poll, Line.reap

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
            told: dict[Any, int] = {}
            for run, _, begun, ended in found:
                job = run.job
                if run.jobs is not None:  # of a train
                    told[run] = told.get(run, run.ended - 1) + 1
                    job = run.jobs[told[run]]
                self.launched[job.number], self.ended[job.number] = begun, ended
            return found

        executor.launch, executor.poll, Line.reap = launches, polls, reaps  # type: ignore[method-assign]
        self._reap = reap

    def close(self) -> None:
        """Look no more."""
        Line.reap = self._reap  # type: ignore[method-assign]


def decisions(policy: Any, x: Any, rounds: int, seconds: float, count: int) -> list[float]:
    """Return seconds from an end that was noticed to the next launch having returned, of a backlog."""
    profile = Profile(kind=Kind.COMPUTE, seconds=seconds, source="measured")
    with Scheduler("cuda", policy, limit=1) as scheduler:
        scheduled_seconds(scheduler, x, rounds, 4, profile)
        watch = Watch(scheduler)
        taken = scheduled_seconds(scheduler, x, rounds, count, profile)
        watch.close()
    print(f"    {1e6 * (taken / count - seconds):.1f} us a task beside the kernel")
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
            begun = time.perf_counter()
            handle = scheduler.submit(launch, x, rounds, profile=profile)
            handle.result(60)
            called[handle.task.number] = begun
        watch.close()
    return [watch.launched[number] - begun for number, begun in called.items()]


class Parts:
    """Seconds of a processor in functions of the scheduler, without those that they call which are measured, too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._inner = threading.local()
        for kind, names in (
            (Dispatcher, ("_answer", "_settle")),
            (Core, ("submit_alike", "step", "_happened", "_launch_behind")),
            (CudaExecutor, ("launch_train", "poll", "_reap", "wait")),
            (Line, ("push_alike", "reap")),
            (Lines, ("watch",)),
            (Lanes, ("decide",)),
        ):
            for name in names:
                setattr(kind, name, self._measured(f"{kind.__name__}.{name}", getattr(kind, name)))
        gc.callbacks.append(self._collects)

    def _begin(self) -> float:
        self._inner.__dict__.setdefault("stack", []).append(0.0)
        return time.thread_time()

    def _end(self, name: str, since: float) -> None:
        took, stack = time.thread_time() - since, self._inner.stack
        self.seconds[name] += took - stack.pop()
        if stack:
            stack[-1] += took

    def _measured(self, name: str, function: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            since = self._begin()
            try:
                return function(*args, **options)
            finally:
                self._end(name, since)

        return called

    def _collects(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._inner.since = self._begin()
        else:
            self._end("collector", self._inner.since)


def parts(count: int, seconds: float, rounds: int) -> list[list[Any]]:
    """Return rows of the processor's microseconds a task, without a GPU."""
    from tests.harness.clock_gpu import ClockArray, ClockGpu

    measured, launch = Parts(), spin[256 * BLOCKS]
    x, rows = np.zeros(BLOCKS, np.int32).view(ClockArray), []
    for _ in range(rounds):
        with Scheduler("cpu", "lanes", executor=CudaExecutor(gpu=ClockGpu(seconds))) as scheduler:
            for _ in range(8):
                scheduler.submit(launch, x, 1).result(60)
            gc.collect()
            measured.seconds.clear()
            thread = scheduler.inspect(lambda core: time.thread_time())
            begun = time.thread_time()
            handles = [scheduler.submit(launch, x, 1) for _ in range(count)]
            submitted = time.thread_time()
            for handle in handles:
                handle.result(60)
            ended = time.thread_time()
            thread = scheduler.inspect(lambda core: time.thread_time()) - thread
            found = dict(measured.seconds)
        thread -= found.pop("Lines.watch", 0.0)  # native: it holds no interpreter lock
        total = {"all": ended - begun + thread, "submit": submitted - begun, "result": ended - submitted}
        for name, took in {**total, "scheduler's thread": thread, **found}.items():
            rows.append([name, 1e6 * took / count])
    names = dict.fromkeys(name for name, _ in rows)
    return [[name, *sorted(took for its, took in rows if its == name)] for name in names]


def row(name: str, times: list[float]) -> list[Any]:
    times = sorted(times)
    return [name, len(times), 1e6 * statistics.median(times), 1e6 * times[int(0.99 * len(times))], 1e6 * times[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=50e-6)
    parser.add_argument("--rounds", type=int, default=2, help="times that all of it is measured")
    parser.add_argument("--parts", action="store_true", help="processor time in Python, without a GPU")
    parser.add_argument("--policies", default="left-over,lanes")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    if options.parts:
        rows = parts(options.count, options.seconds, options.rounds)
        columns = ["part", *["us a task"] * options.rounds]
        table(f"{options.count} kernels of {1e6 * options.seconds:g} us: a processor's time in Python", columns, rows)
        save(options.json, {"machine": machine("cpu"), "parts": rows})
        return
    bench = Bench()
    x = zeros("cuda", BLOCKS, np.int32)
    rounds, longer = rounds_for(bench, x, options.seconds), rounds_for(bench, x, 2e-3)
    rows = [
        row("as it is, 2 ms", decisions("first-come", x, longer, 2e-3, 300)),
        row("as it is, 50 us", decisions("first-come", x, rounds, 50e-6, 2000)),
        row("lanes, 2 ms", decisions("lanes", x, longer, 2e-3, 300)),
        row("lanes, 50 us", decisions("lanes", x, rounds, 50e-6, 2000)),
        row("workers, 2 ms", decisions(Workers(), x, longer, 2e-3, 300)),
        row("idle for 0.2 ms", arrivals(x, rounds, 50e-6, 2e-4, 300)),
        row("idle for 5 ms", arrivals(x, rounds, 50e-6, 5e-3, 100)),
    ]
    table("a decision with its launch", ["what", "launches", "median us", "p99 us", "most us"], rows)
    trains: list[list[Any]] = []
    for _ in range(options.rounds):
        plain = plain_seconds(bench, x, rounds, options.count)
        trains.append(["plain", 1e6 * plain / options.count, 1.0])
        for policy in options.policies.split(","):
            for frozen in (False, True):
                if frozen:
                    gc.collect()
                    gc.freeze()  # what the program has so far is looked at no more
                with Scheduler("cuda", policy) as scheduler:
                    scheduled_seconds(scheduler, x, rounds, 8, None)
                    took = scheduled_seconds(scheduler, x, rounds, options.count, None)
                gc.unfreeze()
                trains.append([policy + (", gc.freeze()" if frozen else ""), 1e6 * took / options.count, plain / took])
    table(f"{options.count} kernels", ["what", "us a kernel", "of plain"], trains)
    save(options.json, {"machine": machine("cuda"), "decisions": rows, "trains": trains})


if __name__ == "__main__":
    main()
