"""Environment of a program on this machine's own driver, with the pass-through driver in front of it."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import DeviceNotFoundError
from . import build
from .environment import NAMES, drop_path, without_layer

FOLDER = "WARPWELL_PASSTHROUGH"
"""Variable with the folder of the pass-through driver. This folder is the first in ``LD_LIBRARY_PATH``."""


class _SymbolInfo(ctypes.Structure):
    """Dl_info."""

    _fields_ = (
        ("path", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def machine_driver(name: str = "libcuda.so.1") -> Path:
    """Return the path of the machine's CUDA driver, as the dynamic linker finds it.

    Raises
    ------
    DeviceNotFoundError
        The machine has no driver, or the linker finds one of Warpwell's own libraries.
    """
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise DeviceNotFoundError(
            f"no CUDA driver on this machine ({error}): install NVIDIA's driver, or run on a host with a GPU",
            device="cuda",
        ) from None
    if hasattr(library, "ww_layer") or hasattr(library, "ww_passthrough"):
        raise DeviceNotFoundError(
            "this process uses a CUDA driver library of Warpwell; start the program from a shell without it",
            device="cuda",
        )
    info = _SymbolInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(library.cuInit, ctypes.c_void_p), ctypes.byref(info))
    return Path(os.fsdecode(info.path or name.encode())).resolve()


def uses_driver_directly(process: int, driver: Path) -> bool | None:
    """Return True if a process has loaded a driver without the pass-through driver; None if it has not loaded any."""
    try:
        maps = Path(f"/proc/{process}/maps").read_bytes()
    except OSError:
        return None
    if os.fsencode(driver) not in maps:
        return None
    return os.fsencode(build.parts().passthrough.resolve()) not in maps


def passthrough_folder(driver: Path) -> Path:
    """Return a folder of the cache with the pass-through driver and a driver; create the folder if necessary."""
    library = build.parts().passthrough
    name = hashlib.sha256(f"pass-through {library} {driver}".encode()).hexdigest()[:20]

    def make(folder: Path) -> None:
        for link in NAMES:
            (folder / link).symlink_to(library)
        (folder / build.MACHINE).symlink_to(driver)

    return build.cached_folder(name, make)


def passthrough_environ(environ: Mapping[str, str], driver: Path | None = None) -> dict[str, str]:
    """Return the environment of a program that uses the pass-through driver.

    Parameters
    ----------
    environ : mapping
        Source of the variables. ``NUMBA_CUDA_DRIVER`` and the variables of the pool's driver layer are dropped.
    driver : path, optional
        By default, the machine's driver.
    """
    found = without_passthrough(environ)
    folder = str(passthrough_folder(driver or machine_driver()))
    found[FOLDER] = folder
    found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (folder, found.get("LD_LIBRARY_PATH"))))
    found.pop("NUMBA_CUDA_DRIVER", None)
    return found


def without_passthrough(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which programs use the machine's driver directly."""
    found = without_layer(environ)
    drop_path(found, "LD_LIBRARY_PATH", found.pop(FOLDER, None))
    return found
