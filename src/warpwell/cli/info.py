"""``warpwell info``: devices, versions, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from typing import Any

from .._check import extra
from ..storage.ring import allowed
from ..targets import default_device
from ..targets.compiler.code_cache import cache_folder
from ..targets.gpu.device import gpus
from .output import Output

_PACKAGES = {
    "numpy": None,
    "numba": None,
    "rich": None,
    "greenlet": None,
    "numba-cuda": "cuda",
    "scipy": "demo",
    "matplotlib": "demo",
    "lmdb": "lmdb",
    "datasets": "datasets",
    "mpi4py": "mpi",
    "cloudpickle": "mpi",
}
"""Packages, and the extra of Warpwell that brings each."""


def run(arguments: argparse.Namespace) -> int:
    """Print devices and versions, and how to install what is missing."""
    found = gpus()
    versions: dict[str, str | None] = {name: _version(name) for name in _PACKAGES}
    advice = [
        f"{name}: install {extra(brings)}"
        for name, version in versions.items()
        if version is None and (brings := _PACKAGES[name]) is not None
    ]
    if not found and versions["numba-cuda"] is not None:
        advice.append("GPU: none is seen; check the driver with nvidia-smi. Everything runs on device cpu too")
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
        "file_transfers": "io_uring" if (refused := allowed()) is None else f"pread, pwrite (no io_uring: {refused})",
        "missing": advice,
    }
    output = Output(arguments.json)
    if not arguments.json:
        values["devices"] = ", ".join(values["devices"])
        values["gpus"] = (
            "\n".join(
                f"{g['name']}, compute capability {g['compute_capability']}, {g['memory'] >> 30} GiB" for g in found
            )
            or "none"
        )
        values["media"] = ", ".join(values["media"])
        values["missing"] = "\n".join(advice) or "nothing"
    output.result("Warpwell", values)
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
