"""Build layer, worker, relay and CUDA runtime: once, into the cache folder, named by a hash of sources and compiler.

``python -m warpwell.driver.build`` prints their paths; with ``--wheel FOLDER`` it makes the companion wheel
warpwell-driver, which brings them to machines without a compiler.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from .._settings import settings
from ..errors import DriverBuildError
from ..replacing import replacing
from . import generate, runtime
from .environment import link_libraries

FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-fvisibility=hidden", "-D_GNU_SOURCE", "-pthread")
SHARED = ("-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs")
COMPANION = "warpwell_driver"
"""Package of the companion wheel."""
OLDEST = 17
"""Minor version of the oldest glibc that the companion wheel runs with if ziglang compiles it."""
SECONDS = 300.0
"""Longest time of a compiler, which is ended afterwards."""


@dataclass(frozen=True)
class Built:
    """Paths of the native parts; None: its sources are not there."""

    layer: Path | None
    worker: Path | None
    relay: Path | None


@dataclass(frozen=True)
class Part:
    """A file that the build makes: its sources are all that begin with its names."""

    output: str
    names: tuple[str, ...]
    flags: tuple[str, ...]

    def sources(self, native: Path) -> list[Path]:
        """Return its own sources, sorted."""
        return sorted(path for name in self.names for path in native.glob(name))


LAYER = Part("_driver.so", ("layer*.c",), (*SHARED, "-Wl,-soname,libcuda.so.1", "-Wl,-z,nodelete"))
WORKER = Part("ww_worker", ("worker*.c",), ("-fPIE", "-pie"))
RELAY = Part("_relay.so", ("relay*.c",), (*SHARED,))
PARTS = (LAYER, WORKER, RELAY)
GENERATED = {LAYER: "gen_layer.c", WORKER: "gen_worker.c"}
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
    if _ziglang():
        return [sys.executable, "-m", "ziglang", "cc"]
    note = " (the package warpwell-driver is installed, but for other sources)" if _companion() else ""
    raise DriverBuildError(
        "the driver layer for unmodified CUDA programs needs a C compiler once: install gcc or clang, or the package"
        f" ziglang (pip install ziglang), or set CC{note}"
    )


def _ziglang() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def build() -> Built:
    """Return layer, worker and relay; compile them if the cache does not have them for these sources.

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
    return _found(_cached_folder(_hash(command), lambda folder: _make(folder, command, PARTS)))


def build_library(output: str, sources: Path, generated: dict[str, str]) -> Path:
    """Compile C files into a shared library in the cache folder, with the flags and headers of the driver's parts.

    Parameters
    ----------
    output : str
        Name of the library.
    sources : Path
        Folder whose ``*.c`` files are compiled.
    generated : dict
        Name and text of C files that are compiled as well.

    Returns
    -------
    Path

    Raises
    ------
    DriverBuildError
        See `build`.
    """
    command = compiler()
    digest = hashlib.sha256(_hash(command).encode())
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    for name, text in generated.items():
        digest.update(name.encode() + text.encode())

    def make(folder: Path) -> None:
        for name, text in (generate.sources() | generated).items():
            (folder / name).write_text(text)
        flags = (*SHARED, f"-Wl,-soname,{output}", f"-I{sources}")
        files = [*sorted(sources.glob("*.c")), *(folder / name for name in generated)]
        process = _start(folder, command, Part(output, (), flags), files)
        try:
            _finish(process)
        finally:
            process.kill()
            process.communicate()

    return _cached_folder(digest.hexdigest()[:20], make) / output


def _cached_folder(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; call `make` with an empty folder to fill it if it does not exist."""
    folder = _cache() / name
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone(folder.parent / "lock"):
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


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process build at a time: the others then find what it built. After `SECONDS` they build themselves."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without such locks
                break
        yield
    finally:
        os.close(descriptor)


def parts() -> Built:
    """Return layer and worker, from the companion wheel if it is installed for these sources, else from `build`."""
    folder = _companion()
    if folder and (folder / "sources").read_text() == sources_hash():
        return _found(folder)
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


def library_folder() -> Path:
    """Return a folder with ``libcuda.so.1`` (the layer) and the CUDA runtimes ``libcudart.so.12`` and ``.13``.

    Raises
    ------
    DriverBuildError
        See `build`.
    """
    layer = parts().layer
    if layer is None:
        raise DriverBuildError("the driver layer for unmodified CUDA programs is not in this installation")
    name = hashlib.sha256(f"libraries {layer}".encode()).hexdigest()[:20]
    return _cached_folder(name, lambda folder: link_libraries(folder, layer))


def _cache() -> Path:
    return settings.cache_root / "warpwell" / "driver"


def _hash(command: Sequence[str]) -> str:
    return hashlib.sha256(f"{sources_hash()} {' '.join([*command, *_more_flags()])}".encode()).hexdigest()[:20]


def _more_flags() -> list[str]:
    return os.environ.get("CFLAGS", "").split()  # tests make warnings errors by it; a newer compiler warns of more


def _found(folder: Path) -> Built:
    files = [folder / part.output for part in PARTS]
    return Built(*(path if path.exists() else None for path in files))


def _make(folder: Path, command: Sequence[str], parts: Sequence[Part]) -> None:
    for name, text in (generate.sources() | runtime.sources()).items():
        (folder / name).write_text(text)
    _compile(folder, command, parts)
    if LAYER in parts:
        _compile(folder, command, RUNTIMES)


def _compile(folder: Path, command: Sequence[str], parts: Sequence[Part]) -> None:
    """Compile parts at the same time."""
    running = []
    try:
        for part in parts:
            own = part.sources(generate.NATIVE)
            if own:
                if part in GENERATED:
                    own.append(folder / GENERATED[part])
                if part in RUNTIMES:
                    generated = folder / f"gen_runtime_{runtime.RELEASES[RUNTIMES.index(part)]}.c"
                    script = f"-Wl,--version-script={generated.with_suffix('.map')}"
                    own += [generated, folder / LAYER.output]
                    part = replace(part, flags=(*part.flags, script))
                running.append(_start(folder, command, part, own))
        for process in running:
            _finish(process)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _start(folder: Path, command: Sequence[str], part: Part, own: Sequence[Path]) -> subprocess.Popen[str]:
    files = [str(path) for path in own]
    arguments = [*FLAGS, *_more_flags(), *part.flags, f"-I{generate.NATIVE}", f"-I{folder}", *files, "-ldl"]
    arguments += ["-o", str(folder / part.output)]
    return subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise DriverBuildError(f"the C compiler did not end within {SECONDS:g} s: {process.args!r}") from None
    if process.returncode:
        raise DriverBuildError(f"the C compiler failed on the driver layer: {process.args!r}\n{output}")


# -- the companion wheel -----------------------------------------------------------------------------------------------


def wheel(folder: Path) -> Path:
    """Write the companion wheel warpwell-driver into a folder, and return its path.

    It has layer, worker, relay and CUDA runtimes and no Python code, so one wheel serves all versions of Python. If the
    package ziglang is installed, the wheel runs with glibc 2.17 and newer; else with the glibc of this machine, which
    its name contains.
    """
    with tempfile.TemporaryDirectory() as made:
        if _ziglang():
            target = f"{platform.machine()}-linux-gnu.2.{OLDEST}"
            command = [sys.executable, "-m", "ziglang", "cc", "-target", target]
            command += ["-Wl,--strip-all", "-fno-sanitize=undefined"]
            _make(Path(made), command, (LAYER, WORKER, RELAY))
            built = _found(Path(made))
        else:
            built = build()
        if not built.layer or not built.worker or not built.relay:
            raise DriverBuildError("the sources of layer, worker or relay are missing: nothing to put into a wheel")
        files = [built.layer, built.worker, built.relay, *(built.layer.parent / part.output for part in RUNTIMES)]
        content = {path.name: path.read_bytes() for path in files}
    glibc = max([OLDEST, *(int(found) for text in content.values() for found in re.findall(rb"GLIBC_2\.(\d+)", text))])
    tag = f"py3-none-manylinux_2_{glibc}_{platform.machine()}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{COMPANION}-{metadata.version('warpwell')}-{tag}.whl"
    with replacing(path) as part:
        _pack(part, content, tag)
    return path


def _pack(path: Path, content: dict[str, bytes], tag: str) -> None:
    version = metadata.version("warpwell")
    info = f"{COMPANION}-{version}.dist-info"
    files = {f"{COMPANION}/{name}": data for name, data in content.items()}
    files[f"{COMPANION}/sources"] = sources_hash().encode()
    files[f"{COMPANION}/__init__.py"] = b'"""Native parts of Warpwell\'s layer for unmodified CUDA programs."""\n'
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: warpwell-driver\nVersion: {version}\nLicense-Expression: Apache-2.0\n"
        "Summary: Native parts of Warpwell's layer for unmodified CUDA programs, for machines without a compiler\n"
    ).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: warpwell\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980: the same sources give the same wheel
            entry.external_attr = (0o100755 if name.endswith(WORKER.output) else 0o100644) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


def main() -> None:
    """Build layer, worker and relay, and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m warpwell.driver.build", description=main.__doc__)
    parser.add_argument("--wheel", type=Path, metavar="FOLDER", help="make the companion wheel there instead")
    folder = parser.parse_args().wheel
    if folder:
        print(wheel(folder))
        return
    built = build()
    for name in ("layer", "worker", "relay"):
        print(f"{name}: {getattr(built, name) or 'no sources'}")


if __name__ == "__main__":
    main()
