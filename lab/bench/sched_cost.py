"""Cost of a preemption for each pair of kernels, and the slowdown of the co-runner in the meantime.

Each kernel is preempted while another one runs, each with half of its solo blocks. The drain is the time from setting
the flag until the last worker has left. The decay is the number of blocks that the co-runner completed in that time,
relative to an equal time without a preemption. ``lab sched fit FILE.csv`` fits the source's constants to the written
table, and reports how well its formula holds.

Rates of second-level misses come from results/sched_counts_h200.json, of the largest size that was counted there.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.sched_forms import Bench, Made
from lab.bench.sched_share import kernels
from lab.bench.timing import table
from warpwell.scheduler.extend import Kind
from warpwell.targets.blocks.control import CONTROL_WORDS, DONE, NEVER, STOP, fresh

COUNTS = Path(__file__).parents[1] / "results/h200/sched/sched_counts_h200.json"
MISSES = {"stream": 1.0, "logistic": 0.0}
"""For kernels without counts: the first reads each byte once, the second holds its items in registers."""


def miss_rates() -> dict[str, float]:
    """Return second-level miss rates by kernel, clipped to 0..1 (counters of single launches are noisy)."""
    largest: dict[str, tuple[float, float]] = {}
    for row in json.loads(COUNTS.read_text())["rows"]:
        if row["memory"] >= largest.get(row["kernel"], (-1.0, 0.0))[0]:
            largest[row["kernel"]] = row["memory"], row["miss_rate"]
    return MISSES | {name: float(np.clip(miss, 0, 1)) for name, (_, miss) in largest.items()}


def start_pair(bench: Bench, victim: Made, co_runner: Made, streams: tuple[Any, Any]) -> tuple[Any, Any]:
    """Launch half of the workers that each kernel has solo; return the events of their ends, the victim's first."""
    for made, stream in zip((co_runner, victim), streams, strict=True):
        bench.gpu.write_words(stream, made.control, fresh())
        made.forms.start(made.control, 0, max(1, made.resident["workers"]["resident"] // 2), stream, made.chunk)
    co_runner_end, victim_end = (bench.gpu.mark(stream) for stream in streams)
    bench.wait_seconds(3e-4)
    return victim_end, co_runner_end


def count_done(bench: Bench, made: Made) -> int:
    return int(bench.gpu.read_words(made.control, CONTROL_WORDS)[DONE])


def stop(bench: Bench, made: Made, event: Any) -> None:
    """Make the workers of a kernel leave, and wait for the event of their end."""
    bench.gpu.set_word(made.control + 8 * STOP, NEVER)
    bench.wait(event)


def measure(bench: Bench, victim: Made, co_runner: Made, times: int) -> tuple[list[float], float | None]:
    """Return seconds of drains, and the relative rate of the co-runner during them."""
    streams = bench.gpu.new_stream(), bench.gpu.new_stream()
    drains: list[float] = []
    blocks_draining = blocks_steady = 0
    for _ in range(times):
        victim_end, co_runner_end = start_pair(bench, victim, co_runner, streams)
        if bench.gpu.done(victim_end) or bench.gpu.done(co_runner_end):  # too short to be preempted
            stop(bench, victim, victim_end)
            stop(bench, co_runner, co_runner_end)
            continue
        done = count_done(bench, co_runner)
        start = time.perf_counter()
        stop(bench, victim, victim_end)
        drains.append(time.perf_counter() - start)
        blocks_draining += count_done(bench, co_runner) - done
        stop(bench, co_runner, co_runner_end)
        # the same time again, without a preemption
        victim_end, co_runner_end = start_pair(bench, victim, co_runner, streams)
        done = count_done(bench, co_runner)
        until = time.perf_counter() + drains[-1]
        while time.perf_counter() < until:
            bench.gpu.done(victim_end)
        blocks_steady += count_done(bench, co_runner) - done
        stop(bench, victim, victim_end)
        stop(bench, co_runner, co_runner_end)
    for stream in streams:
        stream.close()
    return drains, blocks_draining / blocks_steady if blocks_steady > 50 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=12, help="preemptions of each pair")
    parser.add_argument("--out", default="preemptions.csv", metavar="FILE.csv")
    options = parser.parse_args()
    bench = Bench()
    misses = miss_rates()
    found = {
        name: (Made(bench, launch, arguments), kind)
        for name, (launch, arguments, kind) in kernels("cuda", False).items()
    }
    for name, (made, _) in found.items():
        seconds = min(bench.seconds(made.forms.start_plain) for _ in range(3))
        made.chunk = made.chunk_for(seconds)
        print(f"{name}: {1e3 * seconds:.3f} ms, {made.chunk} blocks claimed at once")
    rows = []
    for victim, (leaving, _) in found.items():
        held = leaving.resident["workers"]
        on_each = max(1, held["resident"] // bench.gpu.processors // 2)
        nbytes = (4 * held["registers"] * held["threads"] + held["shared"]) * on_each
        for co_runner, (staying, kind) in found.items():
            if victim == co_runner:
                continue
            drains, decay = measure(bench, leaving, staying, options.times)
            if not drains:
                continue
            cost = nbytes, misses[co_runner], statistics.median(drains)
            rows.append([victim, co_runner, *cost, kind.value, decay])
    with open(options.out, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["victim", "co_runner", "bytes", "miss_rate", "seconds", "kind", "decay"])
        writer.writerows([*row[:-1], "" if row[-1] is None else min(1.0, row[-1])] for row in rows)
    table(
        "preemption of a kernel with a co-runner",
        ["victim", "co-runner", "bytes", "miss rate", "us", "class", "decay"],
        [[*row[:4], 1e6 * row[4], *row[5:]] for row in rows],
    )
    for kind in Kind:
        decays = [row[-1] for row in rows if row[-1] is not None and row[-2] == kind.value]
        if decays:
            print(f"{kind.value}-intensive kernels kept {statistics.median(decays):.2f} (median of {len(decays)})")


if __name__ == "__main__":
    main()
