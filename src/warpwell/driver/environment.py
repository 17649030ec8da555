"""Environment of a client, in which the dynamic linker finds the layer under the driver's name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from . import hook

FOLDER = "WARPWELL_CUDA"
"""Variable with the folder of the sockets ``device-0``, ``device-1``, .. and of ``lib``."""
NAMES = ("libcuda.so.1", "libcuda.so")
"""Names of the driver. Programs load either; both must be one file, or a process would load it twice."""
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "NUMBA_CUDA_DRIVER")
"""Variables about local GPUs and the local driver."""
_SHARED = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "USER")
_SHARED_PREFIXES = ("CUDA_", "NVIDIA_", "FAKE_", "LC_", "XDG_")


def make_library_folder(folder: Path, layer: Path) -> Path:
    """Make ``lib`` in the folder, with driver and CUDA runtimes, and ``python`` with `hook`; return ``lib``."""
    library, python = folder / "lib", folder / "python"
    python.mkdir(mode=0o700, exist_ok=True)
    (python / "sitecustomize.py").symlink_to(Path(hook.__file__).resolve())
    library.mkdir(mode=0o700, exist_ok=True)
    for name in NAMES:
        (library / name).symlink_to(layer)
    for runtime in layer.parent.glob("libcudart.so.*"):
        (library / runtime.name).symlink_to(runtime)
    return library


def changes(folder: str | Path) -> dict[str, str | None]:
    """Return the variables of a program whose CUDA calls go to the sockets of a folder; None: unset the variable.

    The caller appends the previous folders of ``LD_LIBRARY_PATH`` and ``PYTHONPATH``.
    """
    library = str(Path(folder) / "lib")
    return {
        FOLDER: str(folder),
        "LD_LIBRARY_PATH": library,
        "PYTHONPATH": str(Path(folder) / "python"),
        "TRITON_LIBCUDA_PATH": library,  # else Triton calls ldconfig first
        "OMPI_MCA_accelerator": "null",  # such a process's MPI would use pointers of the pool as its own
        **dict.fromkeys(_HIDDEN),
    }


def without_layer(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which programs use the local CUDA driver again."""
    found = dict(environ)
    folder = found.pop(FOLDER, None)
    if folder is None:
        return found
    library = str(Path(folder) / "lib")
    drop_path(found, "LD_LIBRARY_PATH", library)
    drop_path(found, "PYTHONPATH", str(Path(folder) / "python"))
    if found.get("TRITON_LIBCUDA_PATH") == library:
        del found["TRITON_LIBCUDA_PATH"]
    return found


def drop_path(environ: dict[str, str], name: str, path: str | None) -> None:
    """Remove a folder from a variable that lists folders. If no other folder is left, remove the variable."""
    paths = [each for each in environ.pop(name, "").split(os.pathsep) if each and each != path]
    if paths:
        environ[name] = os.pathsep.join(paths)


def worker_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a worker, without the variables about MPI, jobs and their tokens."""
    found = without_layer(environ)
    return {name: value for name, value in found.items() if name in _SHARED or name.startswith(_SHARED_PREFIXES)}
