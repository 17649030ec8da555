"""What does the scheduler cost a task: a decision with its launch, and short kernels one after the other?

*Decision*: from the end that was noticed (or, on an idle device, from the call of `submit`) to the driver's launch
having returned; negative where the next kernel was launched behind the one that ran. As it is: `first-come`, one
kernel at a time; as workers: the same with workers in place of the plain kernel. Besides, what the GPU idles between
two of them. *Train*: many short kernels by a loop of `submit` and a wait for all, beside plain launches in one
stream, in turn, in one run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import numpy as np
from measure import machine, save, table
from sched_forms import Bench, Made, spin

from warpwell.scheduler import Decision, Kind, Launch, Profile, Scheduler, View
from warpwell.scheduler.policies.order import FirstCome
from warpwell.targets.arrays import zeros
from warpwell.targets.gpu.lines import Line

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
            for run, _, begun, ended in found:
                self.launched[run.job.number], self.ended[run.job.number] = begun, ended
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


def row(name: str, times: list[float]) -> list[Any]:
    times = sorted(times)
    return [name, len(times), 1e6 * statistics.median(times), 1e6 * times[int(0.99 * len(times))], 1e6 * times[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=50e-6)
    parser.add_argument("--rounds", type=int, default=2, help="times that all of it is measured")
    parser.add_argument("--policies", default="left-over,lanes")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
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
