"""Build the native parts: once, into the cache folder, named by a hash of sources and compiler.

The companion wheel warpwell-driver (``make driver-wheel``) contains the built parts for machines without a compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .._os import file_lock
from .._settings import settings
from ..errors import DriverBuildError
from ..replacing import replacing
from . import generate, runtime

FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-fvisibility=hidden", "-D_GNU_SOURCE", "-pthread")
SHARED = ("-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs")
COMPANION = "warpwell_driver"
"""Package of the companion wheel."""
COMPILE_SECONDS = 300.0
"""Time limit for the compiler."""


@dataclass(frozen=True)
class Built:
    """Paths of the native parts."""

    layer: Path
    worker: Path
    relay: Path
    passthrough: Path


@dataclass(frozen=True)
class Part:
    """A file that the build makes from all sources whose names begin with one of `names`."""

    output: str
    names: tuple[str, ...]
    flags: tuple[str, ...]

    def sources(self, native: Path) -> list[Path]:
        """Return the sources of this part, sorted."""
        return sorted(path for name in self.names for path in native.glob(name))


LAYER = Part("_driver.so", ("layer*.c",), (*SHARED, "-Wl,-soname,libcuda.so.1", "-Wl,-z,nodelete"))
WORKER = Part("ww_worker", ("worker*.c", "gate*.c"), ("-fPIE", "-pie"))
RELAY = Part("_relay.so", ("relay*.c",), (*SHARED,))
MACHINE = "libcuda-machine.so.1"
"""Name of the machine's own driver in the folder of the pass-through driver, which loads it by this name."""
PASSTHROUGH = Part(
    "_passthrough.so",
    ("passthrough*.c", "gate*.c"),
    (*SHARED, "-Wl,-soname,libcuda.so.1", "-Wl,-z,nodelete", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"),
)
PARTS = (LAYER, WORKER, RELAY, PASSTHROUGH)
GENERATED = {LAYER: "gen_layer.c", WORKER: "gen_worker.c", PASSTHROUGH: "gen_passthrough.c"}
RUNTIMES = tuple(
    Part(
        f"libcudart.so.{release}",
        ("runtime*.c",),
        (
            *SHARED,
            f"-DCUDART_MAJOR={release}",
            f"-Wl,-soname,libcudart.so.{release}",
            "-Wl,-z,lazy",  # an older driver lacks functions that few programs need
        ),
    )
    for release in runtime.RELEASES
)
"""The CUDA runtime of each release. It is linked to the layer, which has the soname of every driver."""


def compiler() -> list[str]:
    """Return the command of a C compiler: ``CC``, ``cc``, or the compiler of the package ziglang."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        program, *options = name.split()
        if found := shutil.which(program):
            return [found, *options]
    if has_ziglang():
        return [sys.executable, "-m", "ziglang", "cc"]
    note = " (the installed package warpwell-driver was built from other sources)" if _companion() else ""
    raise DriverBuildError(
        "a C compiler must build the driver layer for unmodified CUDA programs: install gcc or clang, or the package"
        f" ziglang (pip install ziglang), or set CC{note}"
    )


def has_ziglang() -> bool:
    """Return True if the package ziglang is installed, which has a C compiler."""
    return importlib.util.find_spec("ziglang") is not None


def build() -> Built:
    """Return the native parts; compile them if the cache does not have them for these sources.

    The variables ``CC`` and ``CFLAGS`` apply.

    Returns
    -------
    Built
        Files of a folder in the cache (``WARPWELL_CACHE_DIR``, ``XDG_CACHE_HOME``, ``~/.cache``). Of several
        processes, one builds.

    Raises
    ------
    DriverBuildError
        There is no compiler, or it failed (the message has its output), or the cache cannot be written.
    """
    command = compiler()
    return find_parts(cached_folder(build_hash(command), lambda folder: make_parts(folder, command)))


def cached_folder(name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of the cache; call `make` with an empty folder to fill it if it does not exist."""
    folder = _cache() / name
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(folder.parent / "lock", COMPILE_SECONDS):  # one process builds; the others use its folder
                if not folder.is_dir():
                    with replacing(folder) as part:
                        part.mkdir()
                        make(part)
    except OSError as error:
        raise DriverBuildError(
            f"the driver layer cannot be built in {folder}: {error.strerror or error}; set WARPWELL_CACHE_DIR to"
            " a folder that can be written"
        ) from error
    return folder


def parts() -> Built:
    """Return the native parts, from the companion wheel if it is installed for these sources, else from `build`."""
    folder = _companion()
    if folder and (folder / "sources").read_text() == sources_hash():
        return find_parts(folder)
    return build()


def _companion() -> Path | None:
    spec = importlib.util.find_spec(COMPANION)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / "sources").is_file():
            return Path(folder)
    return None


def sources_hash() -> str:
    """Return a hash of all native sources, written and generated."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(generate.NATIVE.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    for name, text in (generate.sources() | runtime.sources()).items():
        digest.update(name.encode() + text.encode())
    return digest.hexdigest()[:20]


def _cache() -> Path:
    return settings.cache_root / "warpwell" / "driver"


def build_hash(command: Sequence[str]) -> str:
    """Return a hash of all native sources and of the compiler's command."""
    return hashlib.sha256(f"{sources_hash()} {' '.join([*command, *_more_flags()])}".encode()).hexdigest()[:20]


def _more_flags() -> list[str]:
    return os.environ.get("CFLAGS", "").split()  # tests set -Werror in CFLAGS; a newer compiler has more warnings


def find_parts(folder: Path) -> Built:
    """Return the parts in a folder."""
    return Built(*(folder / part.output for part in PARTS))


def make_parts(folder: Path, command: Sequence[str]) -> None:
    """Compile the parts into a folder, then the runtimes, which are linked to the layer."""
    for name, text in (generate.sources() | runtime.sources()).items():
        (folder / name).write_text(text)
    machine = folder / MACHINE  # the linker needs only the name of this library
    (folder / "gen_machine.c").touch()
    soname = Part(MACHINE, (), (*SHARED, f"-Wl,-soname,{MACHINE}"))
    compile_files(folder, command, [(soname, [folder / "gen_machine.c"])])
    jobs = []
    for part in PARTS:
        more = [folder / GENERATED[part]] if part in GENERATED else []
        jobs.append((part, [*part.sources(generate.NATIVE), *more, *([machine] if part is PASSTHROUGH else [])]))
    compile_files(folder, command, jobs)
    machine.unlink()
    jobs = []
    for release, part in zip(runtime.RELEASES, RUNTIMES, strict=True):
        generated = folder / f"gen_runtime_{release}.c"
        script = f"-Wl,--version-script={generated.with_suffix('.map')}"
        files = [*part.sources(generate.NATIVE), generated, folder / LAYER.output]
        jobs.append((replace(part, flags=(*part.flags, script)), files))
    compile_files(folder, command, jobs)


def compile_files(folder: Path, command: Sequence[str], jobs: Sequence[tuple[Part, Sequence[Path]]]) -> None:
    """Compile parts at the same time, each from its files, into the folder with the generated sources."""
    running: list[subprocess.Popen[str]] = []
    try:
        for part, files in jobs:
            arguments = [*FLAGS, *_more_flags(), *part.flags, f"-I{generate.NATIVE}", f"-I{folder}", *map(str, files)]
            arguments += ["-ldl", "-o", str(folder / part.output)]
            running.append(
                subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        for process in running:
            _finish(process)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _finish(process: subprocess.Popen[str]) -> None:
    try:
        output, _ = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise DriverBuildError(f"the C compiler did not end within {COMPILE_SECONDS:g} s: {process.args!r}") from None
    if process.returncode:
        raise DriverBuildError(f"the C compiler failed on the driver layer: {process.args!r}\n{output}")
