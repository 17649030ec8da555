"""Does one relief keep a memory-intensive kernel's rate beside a compute-intensive one that came first?

The hardware issues the oldest warps first. Workers of *logistic* that are relieved by others, when *stream* comes, are
younger than those of *stream*. Rates of both in a common window, over those of the plain kernels alone; then a row of
short memory-intensive kernels; then that every block ran once, and the bits.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from measure import machine, save, table
from sched_forms import Bench, Made, spin
from sched_share import logistic, ramp, stream

from warpwell.targets.arrays import to_host, zeros
from warpwell.targets.blocks.control import CONTROL_WORDS, CURSOR, DONE, FLOOR, NEVER, STOP, fresh

ROUNDS = 4000
SHARES = ((0.75, 0.25), (0.5, 0.5), (0.625, 0.375))


class Side:
    """A launch that is measured: its forms, its rate alone, its workers."""

    def __init__(self, bench: Bench, launch: Any, arguments: Any) -> None:
        self.bench, self.made = bench, Made(bench, launch, arguments)
        for _ in range(2):
            bench.seconds(self.made.forms.start_plain)
        self.alone = min(bench.seconds(self.made.forms.start_plain) for _ in range(4))
        self.blocks = self.made.blocks.blocks
        self.rate = self.blocks / self.alone
        self.full = min(self.made.resident["workers"]["resident"], self.blocks)
        self.chunk = max(1, min(16, int(20e-6 * self.blocks / (self.alone * self.full))))

    def reset(self, stream: Any) -> None:
        self.bench.gpu.write_words(stream, self.made.control, fresh())

    def start(self, stream: Any, share: float, rounds: int = ROUNDS, base: int = 0) -> int:
        """Launch workers, numbered from `base`; return how many there are."""
        count = max(1, int(share * self.full))
        if not base:
            self.reset(stream)
        self.made.forms.start(self.made.control, base, count, stream, self.chunk, rounds)
        return count

    def done(self) -> int:
        return int(self.bench.gpu.read_words(self.made.control, CONTROL_WORDS)[DONE])

    def stop(self) -> None:
        self.bench.gpu.set_word(self.made.control + 8 * STOP, NEVER)


def window(bench: Bench, sides: tuple[Side, Side], seconds: float = 25e-3) -> list[float]:
    was, at = [], []
    for side in sides:
        was.append(side.done())
        at.append(time.perf_counter())
    bench.wait_seconds(seconds)
    found = []
    for k, side in enumerate(sides):
        found.append((side.done() - was[k]) / (time.perf_counter() - at[k]) / side.rate)
    return found


def together(bench: Bench, m: Side, c: Side, streams: Any, shares: Any, first: str, relieved: bool) -> list[float]:
    """Return normalized rates of memory and compute in a window that both fill."""
    gpu = bench.gpu
    if first == "memory":
        m.start(streams[0], shares[0])
        bench.wait_seconds(1e-3)
        c.start(streams[1], shares[1])
    else:
        count = c.start(streams[1], shares[1])
        if relieved:
            c.start(streams[1], shares[1], base=count)
        bench.wait_seconds(3e-3)
        m.start(streams[0], shares[0])
        if relieved:
            gpu.set_word(c.made.control + 8 * FLOOR, count)
    bench.wait_seconds(10e-3)
    found = window(bench, (m, c))
    m.stop()
    c.stop()
    for s in streams:
        bench.wait(gpu.mark(s))
    return found


def row(bench: Bench, m: Side, c: Side, streams: Any, shares: Any, relieve: bool) -> list[float]:
    """The same where memory-intensive kernels come one after the other, queued; with `relieve`, the host sees to it."""
    gpu = bench.gpu
    kernels = max(4, int(40e-3 / m.alone))
    count = c.start(streams[1], shares[1])
    for k in range(kernels if relieve else 0):
        c.start(streams[1], shares[1], base=(k + 1) * count)
    bench.wait_seconds(3e-3)
    was, begun = c.done(), time.perf_counter()
    ends = []
    for k in range(kernels):
        m.start(streams[0], shares[0], 1)
        ends.append(gpu.mark(streams[0]))
        if relieve:
            if k:
                bench.wait(ends[k - 1])
            gpu.set_word(c.made.control + 8 * FLOOR, (k + 1) * count)
    bench.wait(ends[-1])
    seconds = time.perf_counter() - begun
    found = [kernels * m.alone / seconds, (c.done() - was) / seconds / c.rate]
    c.stop()
    bench.wait(gpu.mark(streams[1]))
    return found


def exact(bench: Bench, m: Side, c: Side, x: Any, a: Any, streams: Any) -> str:
    """Run both once beside each other, compute relieved many times; compare with the plain kernels."""

    def plain(side: Side) -> None:
        side.made.forms.start_plain(streams[0])
        bench.wait(bench.gpu.mark(streams[0]))

    def relieved(side: Side, times: int, pause: float) -> None:
        count = side.start(streams[1], 0.25, 1)
        for k in range(times):
            side.start(streams[1], 0.25, 1, (k + 1) * count)
        for k in range(times):
            bench.wait_seconds(pause)
            bench.gpu.set_word(side.made.control + 8 * FLOOR, (k + 1) * count)

    growth = np.float32(0.0007)
    ramp[x.size](x, growth)
    plain(c)
    wanted = to_host(x).tobytes()
    plain(m)
    theirs = to_host(a)
    ramp[x.size](x, growth)
    ramp[a.size](a, 0.0)
    m.start(streams[0], 0.75, 1)
    relieved(c, 20, 0.3e-3)
    for s in streams:
        bench.wait(bench.gpu.mark(s))
    words = [bench.gpu.read_words(side.made.control, CONTROL_WORDS) for side in (m, c)]
    same = to_host(x).tobytes() == wanted, np.array_equal(to_host(a), theirs)
    counts = [int(w[DONE]) == side.blocks <= int(w[CURSOR]) for w, side in zip(words, (m, c), strict=True)]
    ones = zeros("cuda", 200_000, np.int32)
    s = Side(bench, spin[256 * ones.size], (ones, 40))
    before = to_host(ones).copy()
    relieved(s, 40, 20e-6)
    bench.wait(bench.gpu.mark(streams[1]))
    once = bool((to_host(ones) - before == 1).all())
    return f"bits of compute, memory {same}; blocks ended {counts}; every block once through reliefs {once}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=31, help="logarithm of stream's items")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    begun = time.perf_counter()
    result: dict[str, Any] = machine("cuda")
    bench = Bench()
    gpu = bench.gpu
    streams = (gpu.stream(), gpu.stream())
    n = 1 << options.items
    a, b, c = (zeros("cuda", n, np.float64) for _ in range(3))
    ramp[n](b, 1.0)
    ramp[n](c, 0.5)
    memory = Side(bench, stream[n // 4], (a, b, c, 3.0))
    short = Side(bench, stream[n // 48], (a, b, c, 3.0))
    rows: list[list[Any]] = []
    for dtype, items, steps in ((np.float32, 26, 450), (np.float64, 25, 450)):
        x = zeros("cuda", 1 << items, dtype)
        ramp[x.size](x, dtype(0.0007))
        compute = Side(bench, logistic[x.size // 4], (x, dtype(3.7), steps))
        kind = np.dtype(dtype).name
        print(
            f"stream {1e3 * memory.alone:.2f} ms, logistic {kind} {1e3 * compute.alone:.2f} ms, workers "
            f"{memory.full} {compute.full}, claims of {memory.chunk} {compute.chunk}",
            flush=True,
        )
        if dtype is np.float32:
            few = [zeros("cuda", 1 << 27, np.float64) for _ in range(3)]
            ramp[few[0].size](few[1], 1.0)
            ramp[few[0].size](few[2], 0.5)
            small = Side(bench, stream[few[0].size // 4], (*few, 3.0))
            print(exact(bench, small, compute, x, few[0], streams), flush=True)
        for shares in SHARES:
            for first, relieved in (("memory", False), ("compute", False), ("compute", True)):
                if time.perf_counter() - begun > options.seconds:
                    break
                found = max(
                    (together(bench, memory, compute, streams, shares, first, relieved) for _ in range(options.runs)),
                    key=sum,
                )
                how = "relieved once" if relieved else "as they are"
                rows.append([kind, str(shares), f"{first} first", how, sum(found), *found])
        for name, side in (("row of long", memory), ("row of short", short)):
            for relieve in (False, True):
                found = row(bench, side, compute, streams, SHARES[0], relieve)
                how = "relieved each time" if relieve else "as they are"
                rows.append([kind, str(SHARES[0]), name, how, sum(found), *found])
        whole = bench.seconds(lambda s, compute=compute: compute.start(s, 1.0, 1))
        rows.append([kind, "alone", "", "workers", compute.alone / whole, 0.0, 0.0])
    whole = bench.seconds(lambda s: memory.start(s, 1.0, 1))
    rows.append(["", "alone", "stream", "workers", memory.alone / whole, 0.0, 0.0])
    table("pairs", ["compute", "shares", "order", "how", "STP", "memory", "compute"], rows)
    result["rows"] = rows
    save(options.json, result)


if __name__ == "__main__":
    main()
