"""Cost of a preemption for each pair of kernels, and the slowdown of the co-runner in the meantime.

Every kernel leaves while another one runs, each with half of its solo blocks: from setting the flag to
the last worker having left (the drain), and the blocks that the other one ended in that time, over those that it ended
in an equal time without a preemption (the decay). The table that is written is for ``lab sched fit FILE.csv``,
which fits the source's constants to blocks that drain, and reports how well its formula holds.

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
from warpwell.scheduler import Kind
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


def start(bench: Bench, made: Made, stream: Any) -> None:
    """Launch half of the workers that a kernel has alone."""
    bench.gpu.write_words(stream, made.control, fresh())
    made.forms.start(made.control, 0, max(1, made.resident["workers"]["resident"] // 2), stream, made.chunk)


def ended(bench: Bench, made: Made) -> int:
    return int(bench.gpu.read_words(made.control, CONTROL_WORDS)[DONE])


def measure(bench: Bench, goes: Made, stays: Made, times: int) -> tuple[list[float], float | None]:
    """Return seconds of drains, and the relative rate of the co-runner during them."""
    one, two = bench.gpu.new_stream(), bench.gpu.new_stream()
    drains: list[float] = []
    during = beside = 0
    for _ in range(times):
        start(bench, stays, one)
        start(bench, goes, two)
        last = bench.gpu.mark(two)
        other = bench.gpu.mark(one)
        bench.wait_seconds(3e-4)
        if bench.gpu.done(last) or bench.gpu.done(other):
            bench.gpu.set_word(stays.control + 8 * STOP, NEVER)
            bench.gpu.set_word(goes.control + 8 * STOP, NEVER)
            bench.wait(last)
            bench.wait(other)
            continue  # too short to be preempted
        first = ended(bench, stays)
        begun = time.perf_counter()
        bench.gpu.set_word(goes.control + 8 * STOP, NEVER)
        bench.wait(last)
        drains.append(time.perf_counter() - begun)
        during += ended(bench, stays) - first
        bench.gpu.set_word(stays.control + 8 * STOP, NEVER)
        bench.wait(other)
        # the same time again, without a preemption
        start(bench, stays, one)
        start(bench, goes, two)
        last, other = bench.gpu.mark(two), bench.gpu.mark(one)
        bench.wait_seconds(3e-4)
        first = ended(bench, stays)
        until = time.perf_counter() + drains[-1]
        while time.perf_counter() < until:
            bench.gpu.done(last)
        beside += ended(bench, stays) - first
        for made, event in ((goes, last), (stays, other)):
            bench.gpu.set_word(made.control + 8 * STOP, NEVER)
            bench.wait(event)
    for stream in (one, two):
        stream.close()
    return drains, during / beside if beside > 50 else None


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
        resident = min(made.resident["workers"]["resident"], made.blocks.blocks)
        block = seconds * resident / made.blocks.blocks
        made.chunk = max(1, min(16, int(20e-6 / block)))
        print(f"{name}: block {1e6 * block:.1f} us, {made.chunk} claimed at once")
    rows = []
    for goes, (one, _) in found.items():
        held = one.resident["workers"]
        on_each = max(1, held["resident"] // bench.gpu.processors // 2)
        nbytes = (4 * held["registers"] * held["threads"] + held["shared"]) * on_each
        for stays, (two, kind) in found.items():
            if goes == stays:
                continue
            drains, decay = measure(bench, one, two, options.times)
            if not drains:
                continue
            rows.append([goes, stays, nbytes, misses[stays], statistics.median(drains), kind.value, decay])
    with open(options.out, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["goes", "stays", "bytes", "miss_rate", "seconds", "kind", "decay"])
        writer.writerows([*row[:-1], "" if row[-1] is None else min(1.0, row[-1])] for row in rows)
    table(
        "preemption of a kernel with a co-runner",
        ["goes", "stays", "bytes", "miss rate", "us", "class", "decay"],
        [[*row[:4], 1e6 * row[4], *row[5:]] for row in rows],
    )
    for kind in Kind:
        decays = [row[-1] for row in rows if row[-1] is not None and row[-2] == kind.value]
        if decays:
            print(f"{kind.value}-intensive kernels kept {statistics.median(decays):.2f} (median of {len(decays)})")


if __name__ == "__main__":
    main()
