"""Unmodified CUDA programs through a worker, compared with the same programs on this machine's driver.

``python -m lab bench driver-calls`` measures the cost of calls with a C program and with numba-cuda. With
``--seconds S``, it also runs three whole programs that work for about S seconds after their start, and compares their
output. The two sides run in turn, and swap their order with each program and turn. With ``--devices 2``, both sides run
at the same time on a GPU each, and then swap GPUs. ``--library lupine=FOLDER`` also measures the ``libcuda.so.1`` of a
folder. ``--driver`` names the driver to serve, for example the stub driver of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.bench.timing import save, table
from lab.driver.serve import serve
from warpwell.driver import build

CLIENTS = Path(__file__).with_name("cuda_clients")
PROGRAMS = {"mandelbrot": (100, 800), "monte_carlo": (100, 4000), "matrix_product": (5, 50)}
"""Programs, and two amounts of work that determine the time of a unit of work."""
MIN_DIFFERENCE = 1.0
"""Minimum difference of the two run times in seconds; if it is smaller, the larger amount grows."""

Environs = Mapping[str, dict[str, str]]


def compiled(folder: Path) -> Path:
    """Return the C program, compiled."""
    program = folder / "costs"
    command = [*build.compiler(), "-O2", "-std=gnu11", "-o", str(program), str(CLIENTS / "costs.c"), "-ldl"]
    subprocess.run(command, check=True)
    return program


def client_figures(command: list[str], environ: dict[str, str], limit: float) -> dict[str, float]:
    """Return the figures in the last line of a client's output; if it fails, print why and return an empty dict."""
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{command} took more than {limit} s", flush=True)
        return {}
    if done.returncode or not done.stdout.strip():
        print(f"{command} ended with {done.returncode}: {done.stderr.strip()[-400:]}", flush=True)
        return {}
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def costs(options: argparse.Namespace, environs: Environs, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return figures by name and by side, of the turns."""
    max_mib = str(options.max_copy)
    client = [str(compiled(folder)), "fake" if options.driver else "gpu", str(options.rounds), max_mib]
    numba = [sys.executable, str(CLIENTS / "launches.py"), str(options.rounds)]
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.turns):
        for side, environ in environs.items():
            is_compared = side in ("native", "worker")
            if turn and not is_compared:
                continue
            figures = client_figures(client, environ, options.limit)
            if is_compared and not options.without_numba:
                figures |= client_figures(numba, environ, options.limit)
            for name, value in figures.items():
                found.setdefault(name, {}).setdefault(side, []).append(value)
    return found


def better(name: str, values: list[float]) -> float:
    """Return the best of some turns: the highest rate, or the shortest time."""
    return max(values) if name.startswith(("in ", "out ")) else min(values)


def show_costs(found: Mapping[str, Mapping[str, list[float]]], sides: list[str]) -> None:
    rows = []
    for name, by_side in found.items():
        values = {side: better(name, by_side[side]) for side in sides if side in by_side}
        ratio: float | str = ""
        if values.get("worker") and values.get("native"):
            ratio = values["worker"] / values["native"]
        rows.append([name, *(values.get(side, "") for side in sides), ratio])
    table("best of the turns: us, GB/s where a name begins with in or out", ["", *sides, "worker / native"], rows)


def calibrated(program: str, environ: dict[str, str], limit: float) -> tuple[float, float]:
    """Return seconds of a unit of a program's work, and of its start, native."""
    less, more = PROGRAMS[program]
    run({"": (program, less, environ)}, limit)  # the first run reads libraries from the disk
    first_seconds = run({"": (program, less, environ)}, limit)[""][0]
    for _ in range(3):
        seconds = run({"": (program, more, environ)}, limit)[""][0]
        if seconds - first_seconds >= MIN_DIFFERENCE:
            break
        more *= 4
    a_unit = (seconds - first_seconds) / (more - less)
    return a_unit, first_seconds - less * a_unit


def run(programs: Mapping[str, tuple[str, int, dict[str, str]]], limit: float) -> dict[str, tuple[float, str]]:
    """Run programs at the same time; return the run time in seconds and the output of each.

    A program that fails, or takes longer than the limit, ends the benchmark.
    """
    clients, out = {}, {}
    start = time.perf_counter()
    for side, (program, work, environ) in programs.items():
        command = [sys.executable, str(CLIENTS / f"{program}.py"), "--work", str(work)]
        clients[side] = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        while len(out) < len(clients):
            for side, client in clients.items():
                if side in out or client.poll() is None:
                    continue
                took = time.perf_counter() - start
                output = client.communicate()[0]
                if client.returncode:
                    sys.exit(f"{client.args} of the side {side!r} ended with {client.returncode}")
                out[side] = (took, output)
            if time.perf_counter() - start > limit:
                sys.exit(f"{next(iter(programs.values()))[:2]} took more than {limit} s")
            time.sleep(0.002)
    finally:
        for side in clients.keys() - out.keys():
            clients[side].kill()
            clients[side].communicate()
    return out


def on_device(environ: dict[str, str], device: int, devices: int) -> dict[str, str]:
    return environ | {"CUDA_VISIBLE_DEVICES": str(device)} if devices > 1 else environ


def compare_programs(options: argparse.Namespace, environs: Environs) -> list[dict[str, Any]]:
    """Run the programs; return run times in seconds, and whether all outputs are the same."""
    out = []
    for number, program in enumerate(options.programs):
        a_unit, start = calibrated(program, environs["native"], options.limit)
        if a_unit <= 0:
            print(f"{program}: more work takes no longer, so the program is skipped", flush=True)
            continue
        work = round(options.seconds / a_unit)
        times: dict[str, list[float]] = {side: [] for side in environs}
        texts = set()
        for turn in range(options.program_turns):
            sides = list(environs)
            in_turn = sides[::-1] if (number + turn) % 2 else sides
            together = [sides] if options.devices > 1 else [[side] for side in in_turn]
            for running in together:
                programs = {}
                for k, side in enumerate(running):
                    device = (k + turn) % options.devices
                    programs[side] = (program, work, on_device(environs[side], device, options.devices))
                for side, (took, text) in run(programs, options.limit).items():
                    times[side].append(took)
                    texts.add(text)
        row = {
            "program": program,
            "work": work,
            "start": start,
            "first": list(environs)[number % 2],
            "seconds": times,
            "same": len(texts) == 1,
            "said": sorted(texts),
        }
        print(json.dumps(row), flush=True)
        out.append(row)
    return out


def show_programs(rows: list[dict[str, Any]], sides: list[str], devices: int) -> None:
    shown = []
    for row in rows:
        means = [sum(row["seconds"][side]) / len(row["seconds"][side]) for side in sides]
        ratio = means[sides.index("worker")] / means[sides.index("native")]
        shown.append([row["program"], row["work"], *means, ratio, "same" if row["same"] else "DIFFERENT"])
    how = "one after another" if devices == 1 else f"at the same time on {devices} GPUs, turns swapped"
    table(f"whole programs, s, {how}", ["", "work", *sides, "worker / native", "output"], shown)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2, help="turns of measuring costs")
    parser.add_argument("--rounds", type=int, default=200, help="measurements of each cost in a turn")
    parser.add_argument("--max-copy", type=int, default=1024, help="MiB of the largest copy")
    parser.add_argument("--seconds", type=float, default=0, help="duration of each whole program; 0: no programs")
    parser.add_argument("--program-turns", type=int, default=2)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--devices", type=int, default=1, choices=(1, 2))
    parser.add_argument("--no-costs", action="store_true")
    parser.add_argument("--without-numba", action="store_true")
    parser.add_argument("--driver", default=None, metavar="FILE")
    parser.add_argument("--limit", type=float, default=600, help="timeout of a client, in seconds")
    parser.add_argument("--library", default=None, metavar="NAME=FOLDER")
    parser.add_argument("--quick", action="store_true", help="few measurements, only to test the benchmark")
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.turns, options.rounds, options.max_copy = 1, 4, 4
    return options


def main() -> None:
    """Run from the command line."""
    options = parse()
    with tempfile.TemporaryDirectory() as name, serve(options.devices, driver=options.driver) as server:
        folder = Path(name)
        native = dict(os.environ)
        if options.driver:
            (folder / "libcuda.so.1").symlink_to(Path(options.driver).resolve())
            native["LD_LIBRARY_PATH"] = str(folder)
        environs = {"native": native, "worker": server.environ()}
        if options.library:
            side, _, library_folder = options.library.partition("=")
            environs[side] = dict(os.environ) | {"LD_LIBRARY_PATH": str(Path(library_folder).resolve())}
        result: dict[str, Any] = {"benchmark": "cuda_programs", "options": vars(options)}
        if not options.no_costs:
            result["costs"] = costs(options, environs, folder)
            show_costs(result["costs"], list(environs))
        if options.seconds:
            sides = {side: environs[side] for side in ("native", "worker")}
            result["programs"] = compare_programs(options, sides)
            show_programs(result["programs"], list(sides), options.devices)
        save(options.json, result)


if __name__ == "__main__":
    main()
