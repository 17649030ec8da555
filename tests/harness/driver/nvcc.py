"""NVIDIA's compiler, if it is installed, and programs that it builds against Warpwell's CUDA runtime.

``make nvcc`` installs it from the packages in ``requirements-nvcc.lock``. With them, or with a CUDA toolkit in
``/usr/local/cuda*`` or on ``PATH``, tests compile the programs of ``tests/data/runtime``. Nothing of it is shipped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from lab.driver import build as lab_build
from warpwell._settings import settings

PROGRAMS = Path(__file__).parents[2] / "data" / "runtime"
RELEASE = "13.0"
"""Release of the compiler that the tests are written for."""
MISSING = f"nvcc {RELEASE} is not installed: run make nvcc"
_FLAGS = ("-cudart", "shared", "-arch=sm_90", "-Xfatbin", "-compress=false")


def find() -> Path | None:
    """Return the path of nvcc, or None if the release is not installed."""
    packages = Path(__file__).parents[3] / "build" / "nvcc" / "nvidia" / "cu13" / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    for path in (packages, *sorted(Path("/usr/local").glob("cuda*/bin/nvcc")), Path(on_path or "nvcc")):
        if path.is_file():
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            if f"release {RELEASE}," in text:
                return path
    return None


def include() -> Path | None:
    """Return the folder of the headers of CUDA, or None."""
    found = find()
    return found.parents[1] / "include" if found else None


def compiled(name: str, *sources: str, flags: tuple[str, ...] = ()) -> Path:
    """Return the path of a program; compile it if the cache does not have it. Skip the test without nvcc.

    Parameters
    ----------
    name : str
        Name of the program.
    sources : str
        Files of ``tests/data/runtime``.
    flags : tuple of str
        Options of nvcc.
    """
    nvcc = find()
    if nvcc is None:
        pytest.skip(MISSING)
    digest = hashlib.sha256(repr((str(nvcc), name, sources, flags, _FLAGS)).encode())
    for path in sorted(PROGRAMS.iterdir()):
        digest.update(path.read_bytes())
    folder = settings.cache_root / "warpwell" / "nvcc" / digest.hexdigest()[:20]
    program = folder / name
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    libraries = folder / f"lib-{os.getpid()}"
    libraries.mkdir()
    part = libraries / name
    try:
        (libraries / "libcudart.so").symlink_to(lab_build.library_folder() / "libcudart.so.13")
        files = [str(PROGRAMS / source) for source in sources]
        # nvcc from packages looks for its libraries in a folder that they do not have.
        paths = [f"-L{libraries}", f"-L{nvcc.parents[1] / 'lib'}"]
        command = [str(nvcc), *_FLAGS, *flags, *paths, "-Xlinker", "--allow-shlib-undefined", "-o", str(part), *files]
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=5 * HANG_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        part.replace(program)
    finally:
        shutil.rmtree(libraries)
    return program
