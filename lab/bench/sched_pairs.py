"""Speed of two kernels that run together: normalized IPC of each pair, by order of residency and quotas.

Each kernel alone, untransformed, on the whole GPU gives its rate in blocks a second. Then two of them run as workers,
the first resident before the second is launched; the blocks that each ends in a common window, over its rate alone,
are their normalized IPC. Writes a pair matrix for `lab sched simulate --matrix`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from lab.bench.sched_forms import Bench, Made
from lab.bench.timing import machine, save, table
from lab.sched.rates import Matrix, Pair
from lab.sched.workloads import WORKLOADS, make
from warpwell.targets.blocks.control import CONTROL_WORDS, DONE, NEVER, STOP, fresh

KERNELS = {
    "gemm": ("gemm", 2048),
    "black_scholes": ("black_scholes", 1 << 24),
    "triad": ("triad", 1 << 27),
    "conv2d": ("conv2d", 12288),
    "atax_rows": ("atax", 12288),
    "spmv": ("spmv", 1 << 21),
}
"""Kernel: its workload, and a size whose arrays are larger than the second-level cache where it is memory-bound."""

SHARES = ((0.25, 0.75), (0.5, 0.5), (0.75, 0.25))


class Kernel:
    def __init__(self, bench: Bench, name: str, workload: str, size: int) -> None:
        self.app = make(workload, size, "cuda")
        step = next(s for s in self.app if s.name == name)
        self.name, self.kind = name, WORKLOADS[workload].kinds[name].value
        self.made = Made(bench, step.launch, step.arguments)
        # A second copy of the launch, with its own control record.
        self.second_made = Made(bench, step.launch, step.arguments)
        for _ in range(2):
            bench.seconds(self.made.forms.start_plain)
        self.alone = min(bench.seconds(self.made.forms.start_plain) for _ in range(3))
        self.made.alone = self.second_made.alone = self.alone
        self.rate = self.made.blocks.blocks / self.alone
        self.resident = min(self.made.resident["workers"]["resident"], self.made.blocks.blocks)
        self.made.chunk = self.second_made.chunk = self.made.chunk_for(self.alone)
        self.workers = min(bench.seconds(lambda s: self.made.workers(s, self.made.chunk)) for _ in range(3))


class Repeats:
    """Launches of one kernel as persistent blocks behind one another, each with a control record of its own."""

    def __init__(self, bench: Bench, made: Made, count: int) -> None:
        self.gpu, self.made, self.at = bench.gpu, made, 0
        while len(made.records) < count:
            made.records.append(made.blocks.new_control())
        self.controls = [record.address for record in made.records[:count]]

    def start(self, workers: int, stream: Any) -> Any:
        """Launch them all and return the event of their end."""
        for control in self.controls:
            self.gpu.write_words(stream, control, fresh())
        for control in self.controls:
            self.made.forms.start(control, 0, workers, stream, self.made.chunk)
        return self.gpu.mark(stream)

    def done(self) -> int:
        """Return the number of blocks that have ended."""
        blocks = int(self.made.blocks.blocks)
        while True:
            done = int(self.gpu.read_words(self.controls[self.at], CONTROL_WORDS)[DONE])
            if done < blocks or self.at + 1 == len(self.controls):
                return self.at * blocks + done
            self.at += 1

    def stop(self) -> None:
        """Make the blocks of all launches exit."""
        for control in self.controls:
            self.gpu.set_word(control + 8 * STOP, NEVER)


def together(bench: Bench, first: Made, second: Made, workers: tuple[int, int], streams: Any, window: float) -> Any:
    """Return blocks a second of two kernels in a window that both fill."""
    settle = 0.4e-3  # seconds between the launches, and before the window
    sides = []
    for made in (first, second):  # a launch takes at least its solo time
        sides.append(Repeats(bench, made, int((4 * settle + 2 * window) / made.alone) + 2))
    events = []
    for side, count, stream in zip(sides, workers, streams, strict=True):
        events.append(side.start(count, stream))
        bench.wait_seconds(settle)
    bench.wait_seconds(settle)
    before = [(side.done(), time.perf_counter()) for side in sides]
    bench.wait_seconds(window)
    rates = []
    for side, (done, at) in zip(sides, before, strict=True):
        rates.append((side.done() - done) / (time.perf_counter() - at))
    for side in sides:
        side.stop()
    for event in events:
        bench.wait(event)
    return rates


def green_contexts(count: int) -> tuple[tuple[Any, Any], int, Any]:
    """Return streams on about `count` multiprocessors and on the rest, the first's count, and objects to keep."""
    from cuda import core

    device = core.Device(0)
    device.set_current()
    (group,), remainder = device.resources.sm.split(core.SMResourceOptions(count=count))
    contexts = [device.create_context(core.ContextOptions(resources=[part])) for part in (group, remainder)]
    options = core.StreamOptions(nonblocking=True)
    first, second = (context.create_stream(options=options) for context in contexts)
    return (first, second), int(group.sm_count), contexts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=float, default=4e-3, help="window of a measurement, in seconds")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    parser.add_argument("--matrix", default=None, metavar="FILE")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    bench = Bench()
    result: dict[str, Any] = machine("cuda")
    kernels = [Kernel(bench, name, *KERNELS[name]) for name in options.kernels]
    result["alone"] = {k.name: [k.alone, k.made.blocks.blocks, k.kind, k.resident, k.workers] for k in kernels}
    table(
        "solo kernels",
        ["kernel", "seconds", "blocks", "class", "resident", "seconds as workers"],
        [[name, *values] for name, values in result["alone"].items()],
    )
    streams = (bench.gpu.new_stream(), bench.gpu.new_stream())
    found: list[Pair] = []
    rows = []
    for i, first in enumerate(kernels):
        for j, second in enumerate(kernels):
            second_made = second.second_made if i == j else second.made
            measured = []
            for shares in SHARES:
                workers = (max(1, int(shares[0] * first.resident)), max(1, int(shares[1] * second.resident)))
                rates = together(bench, first.made, second_made, workers, streams, options.window)
                measured.append(Pair(first.name, second.name, (rates[0] / first.rate, rates[1] / second.rate), shares))
            found += measured
            best = max(measured, key=lambda pair: sum(pair.rates))
            rows.append(
                [first.name, second.name, sum(best.rates), "{:.2f} {:.2f}".format(*best.rates), f"{best.shares}"]
            )
    table("best of each pair, the first resident first", ["first", "second", "STP", "rates", "quotas"], rows)
    result["pairs"] = rows
    save(options.json, result)
    if options.matrix:
        Matrix(found, device=str(result.get("gpu", "cuda"))).write(options.matrix)


if __name__ == "__main__":
    main()
