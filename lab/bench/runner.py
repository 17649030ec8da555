"""Define benchmarks and run them in fresh processes.

A benchmark is a function ``run(setting, record)`` with the decorator `benchmark`. It measures what `setting` describes
and calls `record` for each figure. `measure` runs it once or several times, each time in a process of its own, and
returns one result with medians.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import BENCHMARKS, machine, schema

ROOT = machine.ROOT


class CannotRunError(Exception):
    """A benchmark cannot run on this machine; the message states the reason."""


def _needs_gpu() -> str | None:
    return None if machine.gpus() else "needs a GPU"


def _needs_package(name: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(name) else f"needs the package {name}"


def _needs_mpi() -> str | None:
    bundled = Path(sys.executable).parent / "mpiexec"
    found = importlib.util.find_spec("mpi4py") and (bundled.exists() or shutil.which("mpiexec"))
    return None if found else "needs mpi4py and mpiexec"


NEEDS: dict[str, Callable[[], str | None]] = {
    "gpu": _needs_gpu,
    "mpi": _needs_mpi,
    "lmdb": _needs_package("lmdb"),
    "torch": _needs_package("torch"),
    "pyarrow": _needs_package("pyarrow"),
    "polars": _needs_package("polars"),
}
"""Requirements of benchmarks; each function returns the reason if its requirement is missing."""


@dataclass(frozen=True)
class Setting:
    """How to run a benchmark.

    Attributes
    ----------
    device : {"cpu", "cuda"}
    quick : bool
        Whether to use little data.
    options : dict of str to str
        Options of the benchmark by name (``-o NAME=VALUE``).
    """

    device: str
    quick: bool = False
    options: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Return True if the device is a GPU."""
        return self.device == "cuda"

    def pick(self, cpu: tuple[Any, Any], cuda: tuple[Any, Any], name: str = "") -> Any:
        """Return the value for the device and size; each pair is (quick, full). An option `name` takes precedence."""
        value = (cuda if self.on_gpu else cpu)[not self.quick]
        return self.option(name, value) if name else value

    def option(self, name: str, default: Any) -> Any:
        """Return an option, converted to the type of its default; the items of a list are separated by commas."""
        text = self.options.get(name)
        if text is None:
            return default
        if isinstance(default, list | tuple):
            item = type(default[0]) if default else str
            return [item(part) for part in text.split(",") if part]
        return type(default)(text) if default is not None else text


class Record:
    """Collects the figures of one run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.figures: list[dict[str, Any]] = []
        self.emulated: set[str] = set()

    def __call__(
        self,
        figure: str,
        values: float | Iterable[float],
        unit: str,
        *,
        better: str = "higher",
        goal: float | None = None,
        ceiling: tuple[str, float] | None = None,
        peers: Iterable[tuple[str, str, float]] = (),
    ) -> float:
        """Add a figure and return its value, the median.

        Parameters
        ----------
        figure : str
            Its name, without the prefix of the benchmark's name and a slash.
        values : float or iterable of float
            The value, or the values of repeated measurements.
        unit : str
        better : {"higher", "lower"}
        goal : float, optional
        ceiling : (str, float), optional
            A value of the same run that bounds this one, with its name.
        peers : iterable of (str, str, float)
            Name, version and value of other systems in the same run.
        """
        runs = [float(v) for v in (values if isinstance(values, Iterable) else [values])]
        entry: dict[str, Any] = {
            "id": f"{self._name}/{figure}",
            "value": statistics.median(runs),
            "unit": unit,
            "better": better,
            "runs": runs,
        }
        if goal is not None:
            entry["goal"] = goal
        if ceiling is not None:
            entry["ceiling"] = {"id": ceiling[0], "value": float(ceiling[1])}
        peers = list(peers)
        if peers:
            entry["peers"] = [{"name": n, "version": v, "value": float(x)} for n, v, x in peers]
        self.figures.append(entry)
        print(f"{entry['id']}: {entry['value']:.4g} {unit}", file=sys.stderr, flush=True)
        return float(entry["value"])


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its function, its requirements, and patterns of its figures."""

    name: str
    run: Callable[[Setting, Record], None]
    needs: frozenset[str]
    figures: tuple[str, ...]

    def missing(self) -> str | None:
        """Return the reason why the benchmark cannot run here, or None."""
        return next((reason for need in sorted(self.needs) if (reason := NEEDS[need]())), None)


def benchmark(
    name: str, *, needs: Iterable[str] = (), figures: Sequence[str] = ()
) -> Callable[[Callable[[Setting, Record], None]], Benchmark]:
    """Return a decorator that makes a benchmark of a function ``run(setting, record)``.

    Parameters
    ----------
    name : str
        As in `BENCHMARKS`.
    needs : iterable of str
        Keys of `NEEDS`.
    figures : sequence of str
        The first parts of the names of its figures, for readers.
    """
    return lambda run: Benchmark(name, run, frozenset(needs), tuple(figures))


def load(name: str) -> Benchmark:
    """Import a benchmark."""
    found = importlib.import_module(f"lab.bench.{BENCHMARKS[name][0]}").run
    assert isinstance(found, Benchmark) and found.name == name
    return found


def child(argv: list[str]) -> int:
    """Run a benchmark once in this process and write its figures: ``NAME SETTING OUT``, a setting as JSON."""
    name, text, out = argv
    setting = Setting(**json.loads(text))
    found, record = load(name), Record(name)
    reason = found.missing()
    if reason is None:
        try:
            found.run(setting, record)
        except CannotRunError as error:
            reason = str(error)
    answer = {"reason": reason, "figures": record.figures, "emulated": sorted(record.emulated)}
    Path(out).write_text(json.dumps(answer), encoding="utf-8")
    return 0


def run_once(name: str, setting: Setting, root: Path = ROOT, timeout: float = 900) -> dict[str, Any]:
    """Run a benchmark of a checkout in a fresh process and return its figures.

    Raises
    ------
    CannotRunError
        The machine lacks a requirement, or the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="warpwell-bench-") as folder:
        out = Path(folder) / "figures.json"
        text = json.dumps({"device": setting.device, "quick": setting.quick, "options": setting.options})
        paths = [str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [
            sys.executable,
            "-c",
            "import sys; from lab.bench import runner; sys.exit(runner.child(sys.argv[1:]))",
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run([*command, name, text, str(out)], cwd=root, env=environment, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CannotRunError(f"{name} did not complete within {timeout:g} s") from None
        if done.returncode or not out.exists():
            raise CannotRunError(f"{name} failed with exit status {done.returncode}")
        answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if answer["reason"]:
        raise CannotRunError(answer["reason"])
    return answer


def merge(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the figures of several runs: medians, and the values of all runs.

    With several runs, each contributes its median; a single run contributes all of its values.
    """
    merged: dict[str, dict[str, Any]] = {}
    for figures in runs:
        for figure in figures:
            entry = merged.setdefault(figure["id"], figure | {"runs": [], "_extra": []})
            entry["runs"] += [figure["value"]] if len(runs) > 1 else figure["runs"]
            entry["_extra"].append(figure)
    for entry in merged.values():
        entry["value"] = statistics.median(entry["runs"])
        extra = entry.pop("_extra")
        if "ceiling" in entry:
            values = [each["ceiling"]["value"] for each in extra if "ceiling" in each]
            entry["ceiling"] = entry["ceiling"] | {"value": statistics.median(values)}
        for k, peer in enumerate(entry.get("peers", [])):
            values = [each["peers"][k]["value"] for each in extra if len(each.get("peers", [])) > k]
            entry["peers"][k] = peer | {"value": statistics.median(values)}
    return list(merged.values())


def result_of(
    name: str, setting: Setting, answers: Sequence[dict[str, Any]], *, busy: bool, seconds: float, root: Path = ROOT
) -> schema.Result:
    """Return the result of several runs."""
    commit, dirty = machine.commit(root)
    found = machine.facts()
    found["emulated"] = sorted({each for answer in answers for each in answer["emulated"]})
    return schema.validate(
        {
            "schema": schema.SCHEMA,
            "benchmark": name,
            "commit": commit,
            "dirty": dirty,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "busy": busy,
            "seconds": round(seconds, 1),
            "machine": found,
            "options": {"device": setting.device, "quick": setting.quick, **setting.options},
            "figures": merge([answer["figures"] for answer in answers]),
        }
    )


def measure(name: str, setting: Setting, repeat: int = 1, *, loaded: bool | None = None) -> schema.Result:
    """Run a benchmark `repeat` times and return its result.

    Parameters
    ----------
    name : str
    setting : Setting
    repeat : int
        Number of processes.
    loaded : bool, optional
        Whether the machine was busy before the first benchmark of a series; by default that is determined here.

    Raises
    ------
    CannotRunError
    """
    busy = machine.is_loaded() if loaded is None else loaded
    start = time.perf_counter()
    with machine.Load() as load:
        answers = [run_once(name, setting) for _ in range(repeat)]
    return result_of(name, setting, answers, busy=busy or load.busy, seconds=time.perf_counter() - start)


def default_device() -> str:
    """Return "cuda" on a machine with a GPU, otherwise "cpu"."""
    return "cuda" if machine.gpus() else "cpu"


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options from which `setting_of` makes a setting."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda if there is a GPU")
    parser.add_argument("--quick", action="store_true", help="use little data")
    parser.add_argument(
        "-o", dest="option", action="append", default=[], metavar="NAME=VALUE", help="set an option of the benchmark"
    )


def setting_of(arguments: argparse.Namespace) -> Setting:
    """Return the setting that the arguments describe."""
    wrong = [text for text in arguments.option if "=" not in text]
    if wrong:
        raise SystemExit(f"option must have the form NAME=VALUE, got {wrong[0]!r}")
    options = dict(text.split("=", 1) for text in arguments.option)
    return Setting(arguments.device or default_device(), arguments.quick, options)
