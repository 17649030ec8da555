"""GPU sharing without a scheduler: the traces of `sched_share.py` by time slicing, MPS and green contexts.

Each class has a tenant, which launches its unmodified kernels in order of arrival into one stream: a process each
(time slicing; MPS, without and with a percentage of the threads), or one process with a green context each. A tenant
does not wait for its kernels before it launches the next ones. `sched_share.py --peers` runs them between its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

SIDES = ("memory", "compute")
PEERS = ("time slicing", "MPS", "MPS 50 %", "green contexts")
PATIENCE = 60.0
"""Timeout of a kernel in seconds."""

Item = tuple[str, str, float]
"""Of a trace: kernel, class, arrival."""

Played = tuple[str, float, float]
"""Kernel, arrival, end."""


def play(bench: Any, made: Any, items: Sequence[Item], streams: dict[str, Any], began: float) -> list[Played]:
    """Launch kernels when they arrive, each class in its stream; return the end of each kernel."""
    coming, running = deque(items), {kind: deque[tuple[str, float, Any]]() for kind in streams}
    found: list[Played] = []
    latest = 0.0
    while coming or any(running.values()):
        now = time.perf_counter() - began
        if coming and coming[0][2] <= now:
            name, kind, at = coming.popleft()
            made[name].forms.start_plain(streams[kind])
            running[kind].append((name, at, bench.gpu.mark(streams[kind])))
            latest = now
            continue
        for line in running.values():
            if line and bench.gpu.done(line[0][2]):
                name, at, _ = line.popleft()
                latest = time.perf_counter() - began
                found.append((name, at, latest))
        if now > latest + PATIENCE:
            raise SystemExit("a kernel has not ended within its timeout")
    return found


def worker(kind: str, dry: bool) -> None:
    """Run as the tenant of one class: play the requested items, one per line, and answer with the times."""
    from lab.bench import sched_share
    from lab.bench.sched_forms import Bench, Made

    sys.stdin.readline()  # memory is allocated after the previous tenants have freed theirs
    found = sched_share.kernels("cpu" if dry else "cuda", dry, kind)
    bench: Any = None
    made: dict[str, Any] = {}
    if not dry:
        bench = Bench()
        made = {name: Made(bench, launch, arguments) for name, (launch, arguments, _) in found.items()}
        for prepared in made.values():
            for _ in range(2):
                bench.seconds(prepared.forms.start_plain)
    print(json.dumps("ready"), flush=True)
    for text in sys.stdin:
        order = json.loads(text)
        if dry:
            answer = [(name, at, at + 2e-3) for name, _, at in order["items"]]
        else:
            while time.perf_counter() < order["begun"]:
                pass
            answer = play(bench, made, order["items"], {kind: bench.stream}, order["begun"])
        print(json.dumps(answer), flush=True)


class Tenants:
    """Two processes, one for each class."""

    def __init__(self, dry: bool, **variables: str) -> None:
        environment = {**os.environ, **variables}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "lab.bench.sched_peers", kind, *(["--dry"] if dry else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for kind in SIDES
        ]

    def _send(self, orders: Sequence[str]) -> list[Any]:
        for process, line in zip(self._processes, orders, strict=True):
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            while not (text := process.stdout.readline()).startswith(("[", '"ready"')):
                if not text:
                    raise SystemExit(f"a tenant ended with code {process.wait()}")
            answers.append(json.loads(text))
        return answers

    def load(self) -> None:
        """Let both processes create their arrays and compile."""
        self._send(["load", "load"])

    def play(self, items: Sequence[Item]) -> list[Played]:
        """Play a trace; see `play`."""
        began = time.perf_counter() + 0.02  # all processes of the machine share this clock
        orders = [json.dumps({"begun": began, "items": [item for item in items if item[1] == kind]}) for kind in SIDES]
        first, second = self._send(orders)
        return [*first, *second]

    def close(self) -> None:
        """End both processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def peer(name: str, bench: Any, made: Any, dry: bool) -> Iterator[Any]:
    """Yield a function that plays a trace under one of `PEERS`."""
    if name == "green contexts":
        if dry:
            yield lambda items: [(name, at, at + 2e-3) for name, _, at in items]
            return
        from lab.bench.sched_pairs import green_contexts

        streams, _, contexts = green_contexts(bench.gpu.processors // 2)
        sides = dict(zip(SIDES, streams, strict=True))
        yield lambda items: play(bench, made, items, sides, time.perf_counter())
        del contexts
        return
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        if name.startswith("MPS") and not dry:
            from lab.bench.sched_torch import mps

            variables = dict(stack.enter_context(mps()))
            if name != "MPS":
                variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = name.split()[1]
        tenants = Tenants(dry, **variables)
        stack.callback(tenants.close)
        tenants.load()
        yield tenants.play


def figures(times: Sequence[Played], seconds: dict[str, float]) -> list[float]:
    """Return STP and ANTT, as `lab/sched/metrics.py` has them, from the seconds of each kernel alone."""
    makespan = max(end for _, _, end in times) - min(at for _, at, _ in times)
    ratios = [(end - at) / seconds[name] for name, at, end in times]
    return [sum(seconds[name] for name, _, _ in times) / makespan, sum(ratios) / len(ratios)]


def measure(
    bench: Any, made: Any, traces: dict[str, list[list[Item]]], seconds: dict[str, float], dry: bool, until: float
) -> list[list[Any]]:
    """Return trace, peer and figures a seed of all peers; begin no trace after a time of `time.perf_counter`."""
    rows: list[list[Any]] = []
    for name in PEERS:
        if time.perf_counter() > until:
            print(f"no time is left for {name}", flush=True)
            continue
        began = time.perf_counter()
        with peer(name, bench, made, dry) as plays:
            loaded = time.perf_counter()
            for title, seeds in traces.items():
                found = [figures(plays(items), seconds) for items in seeds if time.perf_counter() < until]
                rows.append([title, name, found])
        print(f"{name}: {loaded - began:.1f} s to begin, {time.perf_counter() - loaded:.1f} s", flush=True)
    return rows


def main() -> None:
    worker(sys.argv[1], "--dry" in sys.argv)


if __name__ == "__main__":
    main()
