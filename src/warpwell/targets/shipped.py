"""Object files and PTX that are part of the wheel, for processes that need no compiler.

`tools/build_native.py` writes them when the wheel is built. They are used if they were compiled from exactly the
sources of this package, and if the processor has the instructions. They do not depend on the versions of Python, Numba
and NumPy.
"""

from __future__ import annotations

import functools
import json
import pathlib
from importlib import metadata
from typing import Any

import llvmlite.binding as llvm

from .compiler.code_cache import read_kept, sources_digest

FOLDER = pathlib.Path(__file__).parents[1] / "_native"
"""The folder in an installed wheel; absent from a checkout."""
MANIFEST = "manifest.json"
PROCESSOR = "x86-64-v3"
"""LLVM's name of the oldest processors that the object files are compiled for."""
FEATURES = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "pclmul")
"""Additions of x86-64-v3 to x86-64-v2 in LLVM's names, and carry-less multiplication, which these processors have."""
CAPABILITIES = (75, 80, 90)
"""Compute capabilities that PTX is compiled for, ascending. PTX also runs on every newer GPU."""


def find_object(name: str) -> bytes | None:
    """Return the shipped object file of a native function, or None if it is absent or not for this processor."""
    manifest = _manifest(FOLDER)
    if manifest is None or not all(host_features().get(name) for name in manifest["features"]):
        return None
    return read_kept(FOLDER / manifest["processor"] / f"{name}.o")


def find_ptx(name: str, capability: int) -> bytes | None:
    """Return the shipped compressed PTX of a linked function, or None if it is absent or not for this GPU.

    PTX that is newer than the installed NVVM is not used, because the linker may not know its PTX version.
    """
    manifest = _manifest(FOLDER)
    usable = [number for number in CAPABILITIES if number <= capability]
    if manifest is None or not usable or manifest["nvvm"] is None or _nvvm_version() < tuple(manifest["nvvm"]):
        return None
    return read_kept(FOLDER / "ptx" / str(usable[-1]) / f"{name}.ptx.z")


@functools.cache
def _manifest(folder: pathlib.Path) -> dict[str, Any] | None:
    """Return the manifest of compiled code, or None if it is absent or for other sources."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return found if found["sources"] == sources_digest() else None


@functools.cache
def host_features() -> llvm.FeatureMap:
    """Return the features of this processor, or none if LLVM cannot query it."""
    try:
        return llvm.get_host_cpu_features()
    except RuntimeError:
        return llvm.FeatureMap()


@functools.cache
def _nvvm_version() -> tuple[int, ...]:
    """Return the major and minor version of the package of NVVM, or () if a CUDA toolkit provides it."""
    return version_pair("nvidia-nvvm")


def version_pair(package: str) -> tuple[int, ...]:
    """Return the major and minor version of an installed package, or ()."""
    try:
        return tuple(int(part) for part in metadata.version(package).split(".")[:2])
    except metadata.PackageNotFoundError:
        return ()
