"""`cache_folder`: where compiled code is kept on disk."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import sys
from importlib import import_module, metadata


def cache_folder() -> pathlib.Path:
    """Return the folder of compiled code for these very sources and versions."""
    root = os.environ.get("WARPWELL_CACHE_DIR")
    base = pathlib.Path(root) if root else pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return base / "warpwell" / _sources_hash()


@functools.cache
def _sources_hash() -> str:
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    for found in (sys.version, *map(_version, ("numba", "llvmlite", "numpy"))):
        digest.update(found.encode())
    return digest.hexdigest()[:20]


def _version(name: str) -> str:
    try:
        return metadata.version(name)  # without importing it
    except metadata.PackageNotFoundError:  # it was installed in some other way
        return str(import_module(name).__version__)
