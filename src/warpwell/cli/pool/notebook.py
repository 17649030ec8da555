"""``warpwell pool notebook``: a kernel for Jupyter whose devices are those of a pool."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from ...errors import PoolError
from ...pool.launch.kernel_spec import KernelSpec, kernels_folder
from ..output import Output
from .arguments import NOTEBOOK, placing
from .run import options

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
    output.result("Choose the kernel in Jupyter by its display name", {**values, **content} if arguments.json else
                  {"display name": title, "name": spec.name, "folder": str(spec.path)})  # fmt: skip
    return 0


def _words(arguments: argparse.Namespace) -> list[str]:
    """Return what was given of the options that `run` takes, too; the kernel starts in another folder."""
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
