"""``warpwell pool notebook``: a kernel for Jupyter whose devices are those of a pool."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, MissingFileError, PoolError
from ...replacing import replacing
from ..output import Output
from .arguments import NOTEBOOK, placing
from .run import options

_FILE = "kernel.json"
_RUN = ["-m", "warpwell", "run"]
_KERNEL = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]
_NAME = re.compile(r"(?=.*[a-z0-9])[a-z0-9._-]+", re.ASCII | re.IGNORECASE)
"""What Jupyter allows, but for names of folders that have another meaning."""
_NEEDED = {"ipykernel": "ipykernel", "mpi4py": "-e '.[mpi]'"}
"""Modules that a kernel imports, and what to install for each, in a checkout."""


def run(arguments: argparse.Namespace) -> int:
    """Write the kernel specification, or remove it."""
    spec = KernelSpec(arguments.name, kernels_folder(arguments.prefix, os.environ))
    output = Output(arguments.json)
    values = {"command": "notebook", "name": spec.name, "folder": str(spec.path)}
    if arguments.remove:
        spec.remove()
        output.result("Removed", {**values, "removed": True})
        return 0
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        where = " (Warpwell's extra [mpi]), in a checkout with" if "mpi4py" in missing else ":"
        raise PoolError(
            f"notebooks need {' and '.join(missing)} where Warpwell is{where} {sys.executable} -m pip install "
            + " ".join(_NEEDED[module] for module in missing)
        )
    agents = options(arguments).agents
    anywhere = arguments.agents is None and arguments.hosts is None and arguments.hostfile is None
    size = "all GPUs" if anywhere else f"{agents} agent{'s' * (agents > 1)}"
    title = f"Warpwell{'' if spec.name == NOTEBOOK else ' ' + spec.name} ({size})"
    content = spec.write(_words(arguments), title)
    output.result(
        "Choose the kernel in Jupyter by its display name",
        {**values, **content}
        if arguments.json
        else {"display name": title, "name": spec.name, "folder": str(spec.path)},
    )
    return 0


def _words(arguments: argparse.Namespace) -> list[str]:
    """Return the options for `run` that were given, with absolute paths: the kernel starts in another folder."""
    parser = argparse.ArgumentParser()
    placing(parser)
    found: list[str] = []
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(arguments, name)
        if value == default:
            continue
        found.append(f"--{name.replace('_', '-')}")
        if name == "hostfile" or (name == "mpiexec" and os.sep in value):
            found.append(os.path.abspath(value))
        elif value is not True:
            found.append(str(value))
    return found


class KernelSpec:
    """A kernel specification of Jupyter, in a folder of its own, whose kernel is started by ``warpwell run``.

    Parameters
    ----------
    name : str
        What programs know the kernel by: letters, digits, ``-``, ``.`` and ``_``, of which Jupyter ignores the case.
    folder : Path
        Where Jupyter looks for kernels; see `kernels_folder`.

    Raises
    ------
    ArgumentError
        The name is not allowed.
    """

    def __init__(self, name: str, folder: Path) -> None:
        if not _NAME.fullmatch(name):
            raise ArgumentError(
                f"--name {name!r}: the name of a kernel has ASCII letters, digits, '-', '.' and '_' alone", name="name"
            )
        self.name = name.lower()
        self.path = folder / self.name

    def write(self, options: Sequence[str], title: str) -> dict[str, Any]:
        """Write the specification, in place of an older one of this name; return its content.

        Parameters
        ----------
        options : sequence of str
            Of ``warpwell run``.
        title : str
            What people choose the kernel by.

        Raises
        ------
        ArgumentError
            Another program has made a kernel of this name.
        """
        if self._others():
            raise ArgumentError(f"{self.path} is a kernel of another program: give another --name", name="name")
        content = {
            "argv": [sys.executable, *_RUN, "--notebook", *options, *_KERNEL],
            "display_name": title,
            "language": "python",
            "interrupt_mode": "signal",
        }
        made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(self.path / _FILE) as part:
                part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError:
            if made:
                self.path.rmdir()
            raise
        return content

    def remove(self) -> None:
        """Remove it.

        Raises
        ------
        MissingFileError
            There is none.
        ArgumentError
            Another program has made it.
        """
        if not (self.path / _FILE).exists():
            raise MissingFileError(
                f"{self.path} is not a kernel: `jupyter kernelspec list` lists the kernels", path=self.path
            )
        if self._others():
            raise ArgumentError(
                f"{self.path} is a kernel of another program: `jupyter kernelspec remove {self.name}` removes it",
                name="name",
            )
        if self.path.is_symlink():
            self.path.unlink()
        else:
            shutil.rmtree(self.path)

    def _others(self) -> bool:
        try:
            found = json.loads((self.path / _FILE).read_text(encoding="utf-8"))
            return bool(found["argv"][1:4] != _RUN)
        except FileNotFoundError:
            return False
        except (ValueError, LookupError, TypeError):
            return True


def kernels_folder(prefix: str | None, environ: Mapping[str, str]) -> Path:
    """Return the folder in which Jupyter looks for kernels: below `prefix`, or else the user's.

    Parameters
    ----------
    prefix : str, optional
        Of an installation, such as `sys.prefix`.
    environ : mapping
        May have ``JUPYTER_DATA_DIR`` and ``XDG_DATA_HOME``.
    """
    if prefix is not None:
        data = Path(prefix).absolute() / "share" / "jupyter"
    elif environ.get("JUPYTER_DATA_DIR"):
        data = Path(environ["JUPYTER_DATA_DIR"]).absolute()
    else:
        data = Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share").absolute() / "jupyter"
    return data / "kernels"
