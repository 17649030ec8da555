"""Cluster GPU virtualization: transfers by size of chunks, pipelined or not; tables of matrix products and FFTs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import shapes
from .experiment import Document, Experiment, Outcome, Setting, Unavailable

QUICK: dict[str, Any] = {
    "runs": 7,
    "size": 16 << 20,
    "chunks": [1 << k for k in range(16, 22)],
    "sizes": [1 << 20, 4 << 20, 16 << 20],
    "matrices": [128, 256, 512, 1024],
    "ffts": [1, 8, 64, 512, 2048],
}
FULL = QUICK | {"runs": 15, "size": 64 << 20, "sizes": [1 << 20, 4 << 20, 16 << 20, 64 << 20]}
FULL = FULL | {"matrices": [256, 512, 1024, 2048], "ffts": [1, 8, 64, 512, 2048, 8192]}
LINK = 3600e6 / 8
EMULATED = "link and copy engine emulated, 1/8"
TIMEOUT_SECONDS = 300


def measured(quick: bool) -> dict[str, Any]:
    """Run the two processes under MPI and return the measurements of the application."""
    if importlib.util.find_spec("mpi4py") is None:
        raise Unavailable("needs MPI (the extra `mpi`)")
    installed = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(installed) if installed.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise Unavailable("needs mpiexec (the extra `mpi`)")
    me = [sys.executable, "-m", "lab.paper.cluster_job"]
    command = [mpiexec, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", "1", *me, "application"]
    command += [json.dumps(QUICK if quick else FULL), ":", "-n", "1", *me, "agent"]
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("measured "))
    found: dict[str, Any] = json.loads(line[len("measured ") :])
    return found


class Job:
    """The measurements of one job, which four experiments share; an experiment that is repeated gets new ones."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._used: set[str] = set()

    def measurements(self, name: str, setting: Setting) -> Any:
        """Return the measurements of an experiment."""
        if not self._found or name in self._used:
            self._found, self._used = measured(setting.quick), set()
        self._used.add(name)
        return self._found[name]


_job = Job()


def chunks(setting: Setting, document: Document) -> Outcome:
    """Copy to a device over the link in chunks of more and more bytes."""
    rates = _job.measurements("chunks", setting)
    sizes = _options(setting)["chunks"]
    part = max(rates) / LINK
    checks = [
        shapes.saturates("saturates at 1 MiB", sizes, rates, at=document.numbers["saturation"], factor=4),
        shapes.rises("larger chunks are faster up to there", rates[:4], 0.1),
        shapes.ratio("bandwidth at saturation, of the link's", part, document.numbers["part"], 1.25),
    ]
    point = int(shapes.saturation(sizes, rates)) >> 10
    megabytes = " ".join(f"{rate / 1e6:.0f}" for rate in rates)
    text = f"{megabytes} MB/s for 64 KiB to 2 MiB of {LINK / 1e6:.0f}, flat from {point} KiB ({EMULATED})"
    return Outcome(text, checks, {"chunks": sizes, "bytes_per_second": rates})


def pipeline(setting: Setting, document: Document) -> Outcome:
    """Copy data to a device in a pipeline, and in one piece."""
    found, sizes = _job.measurements("copies", setting), _options(setting)["sizes"]
    left = [row["pipeline"] / row["one piece"] for row in found]
    low, high = (1 - saved for saved in reversed(document.numbers["saved"]))
    checks = [
        shapes.between("time in a pipeline over one piece, large data", left[-1], low / 1.25, high * 1.25),
        shapes.falls("the larger the data, the more is saved", [left[0], left[-1]], 0.1),
    ]
    saved = ", ".join(f"{size >> 20} MiB {1 - part:.0%}" for size, part in zip(sizes, left, strict=True))
    return Outcome(f"saves {saved} ({EMULATED})", checks, {"bytes": sizes, "seconds": found})


def matrices(setting: Setting, document: Document) -> Outcome:
    """Multiply matrices: operands to the device, product, result back."""
    found, sizes = _job.measurements("matrices", setting), _options(setting)["matrices"]
    piped, unpipelined = _over_local(found, "pipeline"), _over_local(found, "one piece")
    rows = document.numbers["rows"]  # local, pipeline, one piece
    checks = [
        shapes.ratio("pipeline over local, largest", piped[-1], rows[-1][2] / rows[-1][1], 1.5),
        shapes.falls("the larger, the less the link costs", [unpipelined[0], unpipelined[-1]]),
        shapes.between("one piece is slower than the pipeline", unpipelined[-1] / piped[-1], 1.0),
    ]
    return Outcome(_table(sizes, piped, unpipelined), checks, {"sizes": sizes, "seconds": found})


def ffts(setting: Setting, document: Document) -> Outcome:
    """Transform the rows of a matrix, which moves more than it computes."""
    found, sizes = _job.measurements("ffts", setting), _options(setting)["ffts"]
    piped, unpipelined = _over_local(found, "pipeline"), _over_local(found, "one piece")
    rows = document.numbers["rows"]
    checks = [
        shapes.ratio("pipeline over local, largest", piped[-1], rows[-1][2] / rows[-1][1], 1.75),
        shapes.ratio("one piece over local, largest", unpipelined[-1], rows[-1][3] / rows[-1][1], 1.75),
        shapes.falls("the larger, the less the link costs in a pipeline", [piped[0], piped[-1]]),
        shapes.crosses("the pipeline is faster than one piece from some size on", sizes, piped, unpipelined, sizes[-2]),
    ]
    return Outcome(_table(sizes, piped, unpipelined), checks, {"rows": sizes, "seconds": found})


def cupy_tables(setting: Setting, document: Document) -> Outcome:
    """Report that the tables on GPUs of several nodes cannot run."""
    raise Unavailable("CuPy and the GPUs of four nodes are missing; NumPy on an emulated device replaces them")


def _options(setting: Setting) -> dict[str, Any]:
    return QUICK if setting.quick else FULL


def _over_local(found: list[dict[str, float]], method: str) -> list[float]:
    return [row[method] / row["local"] for row in found]


def _table(sizes: list[int], piped: list[float], unpipelined: list[float]) -> str:
    cells = ", ".join(f"n={n} {p:.2f}x / {w:.2f}x" for n, p, w in zip(sizes, piped, unpipelined, strict=True))
    return f"pipeline / one piece over local: {cells} ({EMULATED})"


EXPERIMENTS = [
    Experiment("cluster/chunks", chunks),
    Experiment("cluster/pipeline", pipeline),
    Experiment("cluster/matrices", matrices),
    Experiment("cluster/ffts", ffts),
    Experiment("cluster/gpus", cupy_tables),
]
