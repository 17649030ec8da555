"""``warpwell info``: devices, versions, and how to install what is missing."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ._common import Commands, add_command, json_option, output_of

_PACKAGES = {
    "numpy": None,
    "numba": None,
    "rich": None,
    "greenlet": None,
    "numba-cuda": "cuda",
    "scipy": "demo",
    "matplotlib": "demo",
    "pyarrow": "graph",
    "polars": "table",
    "lmdb": "lmdb",
    "torch": "train",
    "mpi4py": "mpi",
    "cloudpickle": "mpi",
}
"""Packages, and the extra of Warpwell that installs each."""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``info``."""
    json_option(add_command(commands, "info", info, "show devices, versions, and how to install what is missing"))


def info(arguments: argparse.Namespace) -> int:
    """Print devices and versions, and how to install what is missing."""
    import platform

    from .._check import extra
    from ..storage import uring_allowed
    from ..targets import default_device
    from ..targets.compiler import cache_folder
    from ..targets.gpu import gpus

    found = gpus()
    versions = {name: _version(name) for name in _PACKAGES}
    advice = [
        f"{name}: install {extra(extra_name)}"
        for name, version in versions.items()
        if version is None and (extra_name := _PACKAGES[name]) is not None
    ]
    if not found and versions["numba-cuda"] is not None:
        advice.append("GPU: none is visible; check the driver with nvidia-smi. Everything runs on device cpu too")
    refused = uring_allowed()
    values: dict[str, Any] = {
        "warpwell": sys.modules["warpwell"].__version__,
        "python": platform.python_version(),
        **{name.replace("-", "_"): version or "not installed" for name, version in versions.items()},
        "default_device": default_device(),
        "devices": ["cuda"] * bool(found) + ["cpu", "interp"],
        "gpus": found,
        "processors": len(os.sched_getaffinity(0)),
        "compiled_code": str(cache_folder()),
        "media": ["file", "ram", "striped", "replicated"],
        "file_transfers": "io_uring" if refused is None else f"pread, pwrite (no io_uring: {refused})",
        "missing": advice,
    }
    gpu_names = [f"{g['name']}, compute capability {g['compute_capability']}, {g['memory'] >> 30} GiB" for g in found]
    shown = {
        "devices": ", ".join(values["devices"]),
        "gpus": "\n".join(gpu_names) or "none",
        "media": ", ".join(values["media"]),
        "missing": "\n".join(advice) or "nothing",
    }
    output_of(arguments).result("Warpwell", values, shown)
    return 0


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
