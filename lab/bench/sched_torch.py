"""Training and inference on one GPU: PyTorch in two processes, by turns, MPS or time slicing, and in one process.

A ResNet-18 for CIFAR is trained (eager, channels-last, batch 256). A transformer of 12 layers (d 1024, batch 8,
sequence 512, bfloat16) answers batches that arrive at random; the latency of a batch counts from its arrival. All sides
of a load have the same arrivals. On the side "share", `warpwell share` starts both, and their code has no turns.
Otherwise, training has a turn for each step, and pauses at residual blocks: its host waits there while inference has
the GPU. Inference has a turn for each batch, with priority. ::

    python -m lab bench sched-torch --seconds 8 --loads 0.1,0.2 --json torch.json

Needs PyTorch and a GPU; ``--pretend`` sleeps instead, to try the benchmark itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import warpwell as ww

TRAIN, SERVE = "training", "inference"
BATCH = "SCHED_TORCH_BATCH"
HOW = {"pauses": "turns, with pauses", "steps": "turns"}


class Pretend:
    """Sleeps instead of computing, to test the benchmark without a GPU."""

    def __init__(self, _: str) -> None:
        self.streams = (None, None)

    def step(self, pause: Any) -> None:
        """Train a step."""
        for _ in range(4):
            time.sleep(1e-3)
            pause()

    def answer(self) -> None:
        """Answer a batch."""
        time.sleep(2e-3)

    def sync(self) -> None:
        """Wait for the GPU."""

    def use(self, stream: Any) -> Any:
        """Enqueue in a stream from now on."""
        return contextlib.nullcontext()


class Torch:
    """The two models, and one step of each."""

    batch = int(os.environ.get(BATCH, "256"))
    """Images of a step of training."""

    def __init__(self, parts: str) -> None:
        import torch

        self.torch = torch
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(0)
        self.streams = (None, None)
        if "both" in parts:
            self.streams = (torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-5))
        self._pause: Any = lambda: None
        if TRAIN in parts or "both" in parts:
            self._train_model()
        if SERVE in parts or "both" in parts:
            self._serve_model()

    def _train_model(self) -> None:
        torch, nn = self.torch, self.torch.nn
        outer = self

        class Block(nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self, a: int, b: int, stride: int) -> None:
                super().__init__()
                self.conv1 = nn.Conv2d(a, b, 3, stride, 1, bias=False)
                self.norm = nn.BatchNorm2d(b)
                self.conv2 = nn.Conv2d(b, b, 3, 1, 1, bias=False)
                self.norm2 = nn.BatchNorm2d(b)
                self.short = None if a == b and stride == 1 else nn.Conv2d(a, b, 1, stride, bias=False)

            def forward(self, x: Any) -> Any:
                y = self.norm2(self.conv2(torch.relu(self.norm(self.conv1(x)))))
                y = torch.relu(y + (x if self.short is None else self.short(x)))
                outer._pause()
                if y.requires_grad:
                    y.register_hook(outer._paused)  # called in the backward pass, by PyTorch's own thread
                return y

        shape = [
            (64, 64, 1),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
            (128, 256, 2),
            (256, 256, 1),
            (256, 512, 2),
            (512, 512, 1),
        ]
        layers = [
            nn.Conv2d(3, 64, 3, 1, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            *[Block(*s) for s in shape],
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, 10),
        ]
        self.model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.images = torch.randn(self.batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 10, (self.batch,), device="cuda")

    def _paused(self, gradient: Any) -> None:
        self._pause()

    def _serve_model(self) -> None:
        torch, nn = self.torch, self.torch.nn
        functional = nn.functional

        class Layer(nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self, d: int) -> None:
                super().__init__()
                self.a, self.b = nn.LayerNorm(d), nn.LayerNorm(d)
                self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
                self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

            def forward(self, x: Any) -> Any:
                n, s, d = x.shape
                q, k, v = self.qkv(self.a(x)).view(n, s, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
                y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, s, d)
                x = x + self.out(y)
                return x + self.down(functional.gelu(self.up(self.b(x))))

        self.transformer = nn.Sequential(*[Layer(1024) for _ in range(12)]).cuda().bfloat16().eval()
        self.tokens = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16)

    def step(self, pause: Any) -> None:
        self._pause = pause
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        pause()
        loss.backward()
        pause()
        self.optimizer.step()

    def answer(self) -> None:
        with self.torch.inference_mode():
            self.transformer(self.tokens)
        self.torch.cuda.current_stream().synchronize()

    def sync(self) -> None:
        self.torch.cuda.synchronize()

    def use(self, stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else self.torch.cuda.stream(stream)


def nothing() -> None:
    """Do nothing at a pause."""


def train(work: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Train for a time; return steps a second."""
    steps, end = 0, order["at"] + order["seconds"]
    with work.use(work.streams[0] if order.get("streams") else None):
        while time.monotonic() < order["at"]:
            time.sleep(1e-4)
        while time.monotonic() < end:
            if order["turns"]:
                with ww.turn(TRAIN) as turn:
                    work.step(nothing if order["turns"] == "steps" else turn.pause)
            else:
                work.step(nothing)
            steps += 1
        work.sync()
    return {"steps": steps, "rate": steps / (time.monotonic() - order["at"])}


def serve(work: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Answer batches that arrive at random; return their latencies, in seconds."""
    chance = random.Random(order["seed"])
    arrivals, at = [], 0.0
    while (at := at + chance.expovariate(order["per_second"])) < order["seconds"]:
        arrivals.append(order["at"] + at)
    latencies = []
    with work.use(work.streams[1] if order.get("streams") else None):
        for arrival in arrivals:
            while (left := arrival - time.monotonic()) > 0:
                time.sleep(left if left < 1e-3 else left - 5e-4)
            if order["turns"]:
                with ww.turn(SERVE, priority=1):
                    work.answer()
            else:
                work.answer()
            latencies.append(time.monotonic() - arrival)
    return {"latencies": latencies}


def worker(parts: str, made: Any) -> None:
    """Execute orders, one per line."""
    work: Any = made(parts)
    jobs = {TRAIN: train, SERVE: serve}
    own_parts = [TRAIN, SERVE] if parts == "both" else [parts]
    began = time.monotonic()
    for _ in range(12):  # PyTorch chooses kernels and allocates memory
        for part, stream in zip((TRAIN, SERVE), work.streams, strict=True):
            if part in own_parts:
                with work.use(stream):
                    work.step(nothing) if part == TRAIN else work.answer()
    work.sync()
    ready: dict[str, Any] = {"ready": time.monotonic() - began}
    if SERVE in own_parts:
        times = []
        for _ in range(40):
            began = time.monotonic()
            work.answer()
            times.append(time.monotonic() - began)
        ready["batch"] = sorted(times)[len(times) // 2]
        with ww.turn(SERVE, priority=1):  # the first turn imports modules, and opens the board
            pass
    if TRAIN in own_parts:
        began = time.monotonic()
        for _ in range(2000):
            with ww.turn(TRAIN):
                pass
        ready["turn_us"] = (time.monotonic() - began) / 2000 * 1e6
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answers: dict[str, Any] = {}

        def carry_out(part: str, order: dict[str, Any] = order, answers: dict[str, Any] = answers) -> None:
            try:
                answers[part] = jobs[part](work, order)
            except Exception as error:
                answers[part] = {"failed": repr(error)}

        threads = [threading.Thread(target=carry_out, args=(part,)) for part in own_parts[1:]]
        for thread in threads:
            thread.start()
        carry_out(own_parts[0])
        for thread in threads:
            thread.join()
        print(json.dumps(answers), flush=True)


class Program:
    """A process with PyTorch."""

    def __init__(self, parts: str, pretend: bool, priority: int | None = None, **variables: str) -> None:
        share = [sys.executable, "-m", "warpwell", "share", "--priority", str(priority), "--tenant", parts]
        command = [
            *([] if priority is None else share),
            sys.executable,
            "-m",
            "lab.bench.sched_torch",
            "--worker",
            parts,
            *(["--pretend"] if pretend else []),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
        )
        self.ready: dict[str, Any] = {}

    def started(self) -> dict[str, Any]:
        """Wait until the process is ready."""
        self.ready = self._answer()
        return self.ready

    def send(self, order: dict[str, Any]) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with code {self.process.wait()}")
        return dict(json.loads(line))

    answer = _answer

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()


def together(programs: list[Program], order: dict[str, Any]) -> dict[str, Any]:
    """Let programs execute an order at the same time."""
    order = {**order, "at": time.monotonic() + 0.3}
    for program in programs:
        program.send(order)
    answers: dict[str, Any] = {}
    for program in programs:
        answers |= program.answer()
    return answers


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run the daemon of MPS; yield the variables of its clients."""
    folder = tempfile.mkdtemp(prefix="mps-")
    variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    environment = {**os.environ, **variables}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=20)
    try:
        yield variables
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, timeout=20, check=False)
        for log in Path(folder).glob("*.log"):
            sys.stderr.write(f"{log.name}: {log.read_text(errors='replace')[-400:]}\n")
        shutil.rmtree(folder, ignore_errors=True)


class Table:
    """The results of each side, compared with solo runs."""

    def __init__(self, seconds: float, loads: list[float], seed: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.alone: dict[float, float] = {}
        self.rate = self.batch = 0.0
        self.seconds, self.loads, self.seed = seconds, loads, seed

    def order(self, load: float, turns: str = "", **more: Any) -> dict[str, Any]:
        """Return an order."""
        return {"seconds": self.seconds, "seed": self.seed, "per_second": load / self.batch, "turns": turns, **more}

    def add(self, side: str, load: float, answers: dict[str, Any]) -> None:
        """Print a row."""
        row: dict[str, Any] = {"side": side, "load": load}
        failed = [part for part in answers.values() if "failed" in part]
        if failed:
            row["failed"] = failed[0]["failed"]
        if "rate" in answers.get(TRAIN, {}):
            row["steps_per_second"] = answers[TRAIN]["rate"]
            row["training"] = answers[TRAIN]["rate"] / self.rate if self.rate else 1.0
            row["of_ceiling"] = row["training"] / (1 - load)  # relative to the time that solo inference leaves free
        times = sorted(answers.get(SERVE, {}).get("latencies", ()))
        if times:
            row["batches"] = len(times)
            row["p50_ms"], row["p99_ms"] = times[len(times) // 2] * 1e3, times[int(0.99 * len(times))] * 1e3
            latencies = answers[SERVE]["latencies"]
            worst = sorted(range(len(latencies)), key=latencies.__getitem__)[-5:]
            row["worst"] = ", ".join(f"{1e3 * latencies[k]:.1f} ms of {k}" for k in worst)
            if load in self.alone:
                row["p99"] = row["p99_ms"] / self.alone[load]
        self.rows.append(row)
        print("  ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)

    def pair(self, side: str, programs: list[Program], turns: str = "", **more: Any) -> None:
        """Run both programs at each load."""
        for load in self.loads:
            self.add(side, load, together(programs, self.order(load, turns, **more)))


def measure(options: argparse.Namespace, rows: Table) -> None:
    """Run the sides."""
    sides = options.sides.split(",")
    two = [Program(TRAIN, options.pretend), Program(SERVE, options.pretend)]
    alone = {"seconds": rows.seconds / 2, "turns": ""}
    try:
        trains, serves = two
        print(trains.started(), serves.started(), flush=True)
        together([trains], alone)  # warms up
        rows.batch = serves.ready["batch"]
        first = together([trains], alone)
        rows.rate = first[TRAIN]["rate"]
        rows.add("training alone", 0.0, first)
        for how in HOW:
            if how in sides:
                rows.add(f"training alone, {HOW[how]}", 0.0, together([trains], {**alone, "turns": how}))
        for load in rows.loads:
            found = together([serves], rows.order(load))
            rows.add("inference alone", load, found)
            rows.alone[load] = rows.rows[-1]["p99_ms"]
        for how in HOW:
            if how in sides:
                rows.pair(HOW[how], two, how)
        if "slicing" in sides:
            rows.pair("time slicing", two)
    finally:
        for program in two:
            program.close()
    if "share" in sides:
        two = [Program(TRAIN, options.pretend, 0), Program(SERVE, options.pretend, 1)]
        try:
            for program in two:
                program.started()
            rows.add("training alone, share", 0.0, together(two[:1], alone))
            rows.pair("share", two)
        finally:
            for program in two:
                program.close()
    if "streams" in sides:
        program = Program("both", options.pretend)
        try:
            program.started()
            rows.pair("streams with priorities, one process", [program], streams=True)
        finally:
            program.close()
    if "mps" in sides:
        percent = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
        with mps() as variables:
            for side, first_, second, turns in (
                ("MPS", {}, {"CUDA_MPS_CLIENT_PRIORITY": "0"}, ("", "pauses")),
                ("MPS 70 %", {percent: "70"}, {}, ("",)),
                ("MPS, training below normal", {"CUDA_MPS_CLIENT_PRIORITY": "1"}, {}, ("",)),
            ):
                two = [
                    Program(TRAIN, options.pretend, **variables, **first_),
                    Program(SERVE, options.pretend, **variables, **second),
                ]
                try:
                    for program in two:
                        program.started()
                    for one_turns in turns:
                        rows.pair(side + (" and turns" if one_turns else ""), two, one_turns)
                finally:
                    for program in two:
                        program.close()


def main() -> None:
    """Run the benchmark, or a worker process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of a side at a load")
    parser.add_argument("--loads", default="0.1,0.2", help="loads of inference, as fractions of the GPU")
    parser.add_argument("--sides", default=",".join((*HOW, "share", "slicing", "streams", "mps")), help="sides to run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256, help="images of a training step")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--pretend", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, Pretend if options.pretend else Torch)
        return
    os.environ[BATCH] = str(options.batch)  # the worker processes read it
    rows = Table(options.seconds, [float(load) for load in options.loads.split(",")], options.seed)
    try:
        measure(options, rows)
    finally:
        if options.json:
            Path(options.json).write_text(json.dumps(rows.rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
