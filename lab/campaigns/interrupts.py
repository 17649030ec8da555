"""Ctrl-C at random moments: an interrupted program must end within a second, and leave no files or processes.

Run as ``python -m lab campaign interrupts --what kernel --times 200 --seed 1``. A program of `PROGRAMS` runs in its own
process group, in an empty folder. It prints READY before the part that may be interrupted. A program that continues
prints OUT when it has caught the interrupt, and DONE when it has checked that its objects still work. Any other program
must end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import interrupts_pool

CHECKOUT = Path(__file__).parents[2]

LIMIT = 1.0
"""Maximum time from the signal to the reaction, in seconds."""

PATIENCE = 150.0
"""Timeout of all other waits for a program, in seconds."""

KERNEL = """
import random, sys, tempfile
import numpy as np
import warpwell as ww

seed, rounds = int(sys.argv[1]), int(sys.argv[2])
choose = random.Random(seed)

@ww.kernel
def read(a, out):
    i = ww.gpu.grid(1)
    out[i & 63] = a[(i * 5003) % a.size]

@ww.kernel
def add(a, index):
    i = ww.gpu.grid(1)
    ww.gpu.atomic_add(a, index[i & 1023], 1)

def whole(a, out):
    read[1 << 40](a, out)

def gather(a, out):
    while True:
        a[np.random.default_rng(seed).integers(0, a.size, 5000)]

def host(a, out):
    while True:
        a.prefetch(0, 3000)
        a[:2000]
        a.evict(0, 100)

def written(a, out):
    while True:
        add[4096](b, index)
        b.flush()

items = 400_000
np.save("a.npy", np.arange(items))
index = np.arange(1024) * 300
with (
    ww.open("a.npy", device="cpu", cache="64KiB") as a,
    ww.create("b.npy", items, np.int64, device="cpu", cache="64KiB") as b,
):
    out = np.zeros(64, np.int64)
    read[64](a, out)
    add[1](b, index)
    a.prefetch(0, 10); a.evict(0, 10); b.flush(); a[:5]; a[index]
    for _ in range(rounds):
        work = choose.choice((whole, gather, host, written))
        try:
            print("READY", flush=True)
            work(a, out)
        except KeyboardInterrupt:
            print("OUT", flush=True)
        out[:] = 0
        read[64](a, out)
        assert out.tolist() == [(k * 5003) % items for k in range(64)], out
        assert a[7] == 7 and a.stats.misses > 0
        before = b[index].sum()
        add[1024](b, index)
        b.flush()
        assert b[index].sum() == before + 1024
        print("DONE", flush=True)
"""

LOAD = """
import sys
import numpy as np
from warpwell.cli import main

rows = 1_000_000
np.savez("rows.npz", keys=np.arange(rows), x=np.arange(4 * rows).reshape(rows, 4))
print("READY", flush=True)
sys.exit(main(["kv", "load", "rows.npz", "rows.kv"]))
"""

LOADED = """
from pathlib import Path
import numpy as np
import warpwell as ww

if Path("rows.kv").exists():  # else the interrupt came before it
    with ww.kv.open("rows.kv", "r+") as store:
        assert store.verify().sound
        keys = np.asarray(list(store.keys()), np.int64)
        assert np.array_equal(np.sort(keys), np.arange(len(store))), "records up to a commit, without a hole"
        for first in range(0, len(keys), 65536):
            part = keys[first : first + 65536]
            values, found = store.get_many(part)
            assert found.all() and np.array_equal(values["x"], 4 * part[:, None] + np.arange(4))
        store.put(-1, {"x": np.arange(4)})
"""


@dataclass(frozen=True)
class Program:
    """A program to interrupt.

    Attributes
    ----------
    command : sequence of str
        Arguments of Python; "{seed}" and "{times}" stand for numbers, "{source}" for the file with `source`.
    together : int
        Number of interrupts for one process; with 1 it ends at the interrupt.
    delays : (float, float)
        Shortest and longest time from READY to the interrupt, in seconds.
    ready : bool
        Whether the program prints READY; otherwise the time counts from its start.
    check : str
        A program that checks the files afterwards.
    """

    command: Sequence[str]
    source: str = ""
    together: int = 1
    delays: tuple[float, float] = (0.0, 0.2)
    ready: bool = True
    check: str = ""


_POLICIES = "first-come,left-over,source,lanes"

PROGRAMS = {
    "kernel": Program(("{source}", "{seed}", "{times}"), KERNEL, together=20),
    "load": Program(("{source}",), LOAD, delays=(0.0, 1.5), check=LOADED),
    "simulate": Program(("-m", "lab", "sched", "simulate", "--policy", _POLICIES), delays=(0.0, 4.0), ready=False),
    "pool": Program(interrupts_pool.COMMAND, interrupts_pool.POOL, delays=(0.0, 0.5)),
}
"""The programs by the names that ``--what`` accepts."""


@dataclass
class Outcome:
    """The result of a number of interrupts."""

    times: int = 0
    worst: float = 0.0
    faults: list[str] = field(default_factory=list)


def run(name: str, times: int, seed: int) -> Outcome:
    """Interrupt a program `times` times; return the result."""
    program, out = PROGRAMS[name], Outcome()
    chosen = random.Random(seed)
    while out.times < times and not out.faults:
        rounds = min(program.together, times - out.times)
        with tempfile.TemporaryDirectory(prefix="warpwell-interrupts-") as folder:
            _process(program, rounds, chosen, Path(folder), out)
            if program.check and (wrong := _wrong(program.check, Path(folder))):
                out.faults.append(f"the remaining files cannot be used: {wrong}")
            left = [p.name for p in Path(folder).rglob("*") if p.name.startswith((".", "tmp")) or p.suffix == ".part"]
            left += interrupts_pool.left(Path(folder))
        if left:
            out.faults.append(f"files or processes were left: {left}")
    return out


def _process(program: Program, rounds: int, chosen: random.Random, folder: Path, out: Outcome) -> None:
    source = folder / "program.py"
    source.write_text(program.source)
    numbers = {"seed": str(chosen.randrange(1 << 30)), "times": str(rounds), "source": str(source)}
    command = [sys.executable, *(numbers.get(word.strip("{}"), word) for word in program.command)]
    environment = {**os.environ, "TMPDIR": str(folder), "WARPWELL_LOG_LEVEL": "ERROR", "PYTHONPATH": str(CHECKOUT)}
    with open(folder.with_suffix(".err"), "w+b") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            preexec_fn=_listen,
        )
        try:
            for _ in range(rounds):
                if program.ready and not _line(process, "READY", PATIENCE):
                    out.faults.append(_with_errors(f"the program was not ready after {PATIENCE:g} s", process, errors))
                    return
                time.sleep(chosen.uniform(*program.delays))
                since = time.monotonic()
                os.killpg(process.pid, signal.SIGINT)
                answered = _ended(process) if program.together == 1 else _line(process, "OUT", PATIENCE)
                reaction_seconds = time.monotonic() - since
                out.times += 1
                out.worst = max(out.worst, reaction_seconds)
                if not answered or reaction_seconds > LIMIT:
                    out.faults.append(_with_errors(f"Ctrl-C took {reaction_seconds:.2f} s", process, errors))
                    return
                if program.together > 1 and not _line(process, "DONE", PATIENCE):
                    out.faults.append(_with_errors("its objects no longer work", process, errors))
                    return
            if not _ended(process) or (program.together > 1 and process.returncode != 0):
                out.faults.append(_with_errors("the program did not end with status 0", process, errors))
        finally:
            if process.poll() is not None and not _becomes_true(lambda: not _living(process.pid)):
                out.faults.append("processes are left")
            if process.poll() is not None and not _becomes_true(lambda: not _shared_memory(process.pid)):
                out.faults.append(f"shared memory was left: {_shared_memory(process.pid)}")
            _kill(process)
            os.unlink(errors.name)


def _wrong(check: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return done.stderr[-2000:] if done.returncode else ""


def _listen() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _line(process: subprocess.Popen[bytes], expected: str, seconds: float) -> bool:
    """Read lines until one equals `expected`; return whether it arrived in time."""
    assert process.stdout is not None
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = b""
        while selector.select(max(0.0, end - time.monotonic())):
            byte = os.read(process.stdout.fileno(), 1)
            if not byte:
                return False
            line += byte
            if byte == b"\n":
                if line.strip() == expected.encode():
                    return True
                line = b""
    return False


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return False
    return True


def _with_errors(fault: str, process: subprocess.Popen[bytes], errors: object) -> str:
    errors.seek(0)  # type: ignore[attr-defined]
    text = errors.read().decode(errors="replace")[-2000:]  # type: ignore[attr-defined]
    return f"{fault} (status {process.poll()})\n{text}"


def _becomes_true(condition: Callable[[], bool]) -> bool:
    """Wait until a condition is true, at most `LIMIT` seconds; return whether it is."""
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _living(group: int) -> bool:
    """Return True if a process of a group runs; zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _group(group: int) -> bool:
    """Return True if a group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    if _group(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _shared_memory(pid: int) -> list[str]:
    """Return the names in shared memory that contain the id of a process."""
    return [path.name for path in Path("/dev/shm").glob("warpwell*") if re.search(rf"-{pid}[0-9a-f]{{8}}$", path.name)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return 1 if it found a fault."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign interrupts", description=__doc__)
    parser.add_argument("--what", choices=sorted(PROGRAMS), default="kernel")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.times < 1:
        parser.error("--times must be at least 1")
    since = time.monotonic()
    found = run(options.what, options.times, options.seed)
    print(
        f"{options.what}: {found.times} interrupts, worst {found.worst:.3f} s, {len(found.faults)} faults "
        f"({time.monotonic() - since:.0f} s, seed {options.seed})"
    )
    for fault in found.faults:
        print(fault, file=sys.stderr)
    return 1 if found.faults else 0
