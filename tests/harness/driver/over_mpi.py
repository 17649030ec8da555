"""Random CUDA programs in a job of MPI: their devices are agents' of another host, which is this one by another name.

    python -m tests.harness.driver.over_mpi --seeds 0:500
    python -m tests.harness.driver.over_mpi --seeds 0:500 --devices 4 --threads 4 --tight

Where sources are to be changed, all processes of the job use a copy: limits that let all wait, planted faults.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.harness.driver.natives import QUICK, TIGHT, Changes, edit, merged
from tests.harness.until import HANG_SECONDS

from lab.campaigns.marked import MARK, marked
from lab.driver import build

ROOT = Path(__file__).parents[3]
HOSTS = ("--tcp", "--hosts", "localhost:1,elsewhere:3", "--target", "cpu")
"""The other host has as many ranks as this one: Open MPI mistakes two such names for one host else."""
ORDINALS = "1,2,3,0"
"""The last is of this host, and needs no communicator."""
PROGRAM = """\
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = "{}"  # of the layer's devices: those of an environment are this machine's
from tests.harness.driver.programs import main
sys.exit(main())
"""
SHELL = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done; shift; exec sh -c "$*"\n'
LIMITS: Changes = merged(
    TIGHT,
    {
        "relay.c": {"#define LOOK_NS 50000000l": "#define LOOK_NS 999000000l"},
        "layer_ring.c": {"#define WAIT_MS 50": "#define WAIT_MS 999"},
        "worker_executor.c": {"#define IDLE_NS 50000000u": "#define IDLE_NS 999000000u"},
        "warpwell/driver/build.py": {'"-O2", "-g",': "".join(f'"{flag}", ' for flag in QUICK)},
    },
)
"""`TIGHT`, and a sleep of a second without a wake-up: lost wake-ups show as programs that do not end."""
SECONDS = 300.0


def emulated(folder: Path, fake: Path) -> dict[str, str]:
    """Return what lets `HOSTS` be two hosts, with devices of the fake driver."""
    shell = folder / "ssh"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    # an agent of a busy machine may answer late: these programs do not test the detection of losses
    return {
        "WARPWELL_CUDA_DRIVER": str(fake),
        "FAKE_DEVICES": "4",
        "PRTE_MCA_plm_ssh_agent": str(shell),
        "WARPWELL_POOL_TIMEOUT": f"{HANG_SECONDS:g}",
    }


def changed(folder: Path, changes: Changes) -> tuple[Path, Path]:
    """Return the folder of the sources with changes, and their fake driver."""
    fake = build.build().fake
    if not changes:
        return ROOT / "src", fake
    for package in (ROOT / "src" / "warpwell", ROOT / "lab"):
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, pairs in changes.items():
        (path,) = folder.rglob(name)
        path.write_text(edit(path.read_text(), pairs, name))
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    made = subprocess.run(
        [sys.executable, "-m", "lab.driver.build"], cwd=folder, env=environ, check=True, capture_output=True
    )
    paths = dict(line.split(": ", 1) for line in made.stdout.decode().splitlines())
    return folder, Path(paths["fake"])


def programs(
    first: int, end: int, *more: str, devices: int = 2, changes: Changes | None = None, seconds: float = SECONDS
) -> str:
    """Run random programs in one job; return what it says.

    Raises
    ------
    subprocess.TimeoutExpired
    """
    with tempfile.TemporaryDirectory(prefix="ww-mpi-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        sources, fake = changed(folder, changes or {})
        mark = uuid.uuid4().hex
        environ = {
            **os.environ,
            **emulated(folder, fake),
            MARK: mark,
            "TMPDIR": name,
            "PYTHONPATH": f"{sources}:{ROOT}",
        }
        seeds = ["--seeds", f"{first}:{end}", "--devices", str(devices), *more]
        program = PROGRAM.format(ORDINALS[: 2 * devices - 1])
        options = ["--start-timeout", f"{HANG_SECONDS:g}", *HOSTS]
        command = ["-m", "warpwell", "run", *options, "-c", program, *seeds]
        out = subprocess.PIPE
        line = [sys.executable, *command]
        with subprocess.Popen(line, env=environ, stdout=out, stderr=subprocess.STDOUT, text=True) as job:
            try:
                output = job.communicate(timeout=seconds)[0].splitlines(keepends=True)
            finally:
                for pid in marked(mark) if job.returncode is None else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    # On busy cores PRRTE warns that a shell has started before PRRTE could set its process group.
    return "".join(line for line in output if "Warning: setpgid" not in line)


def main(arguments: list[str] | None = None) -> int:
    """Run the programs of a range of seeds; print the first that is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.driver.over_mpi", description=main.__doc__)
    parser.add_argument("--seeds", default="0:500", help="first and end")
    parser.add_argument("--devices", type=int, default=2, choices=range(1, 5), help="the fourth is of this host")
    parser.add_argument("--threads", type=int, default=1, help="threads that run programs side by side")
    parser.add_argument("--tight", action="store_true", help="with limits that let all wait for room")
    options = parser.parse_args(arguments)
    first, end = map(int, options.seeds.split(":"))
    began = time.monotonic()
    output = programs(
        first,
        end,
        "--threads",
        str(options.threads),
        devices=options.devices,
        changes=LIMITS if options.tight else None,
    )
    print(output, end="")
    print(f"{time.monotonic() - began:.0f} s")
    return output != f"{end - first} programs are right\n"


if __name__ == "__main__":
    sys.exit(main())
