"""Build layer, worker and fake driver: once, into the cache folder, named by a hash of sources and compiler.

``python -m warpwell.driver.build`` prints their paths. A companion wheel brings them to machines without a compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import DriverBuildError
from ..replacing import replacing
from . import generate

FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-D_GNU_SOURCE", "-pthread")
SHARED = ("-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs")
COMPANION = "warpwell_driver"
"""Package of the companion wheel."""
SECONDS = 300.0
"""A compiler that takes longer is ended."""


@dataclass(frozen=True)
class Built:
    """Paths of the native parts; None: its sources are not there."""

    layer: Path | None
    worker: Path | None
    fake: Path | None


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
FAKE = Part("libfakecuda.so", ("fake*.c",), (*SHARED, "-Wl,-soname,libfakecuda.so"))
GENERATED = {LAYER: "gen_layer.c", WORKER: "gen_worker.c", FAKE: "gen_fake.c"}


def compiler() -> list[str]:
    """Return the command of a C compiler: ``CC``, ``cc``, or that of the package ziglang."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        words = name.split()
        if found := shutil.which(words[0]):
            return [found, *words[1:]]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise DriverBuildError(
        "the driver layer for unmodified CUDA programs needs a C compiler once: install gcc or clang, or the package"
        " ziglang (pip install ziglang), or set CC"
    )


def build() -> Built:
    """Return layer, worker and fake driver, built for these very sources where they are not yet.

    Returns
    -------
    Built
        Files of a folder in the cache (``WARPWELL_CACHE_DIR``, ``XDG_CACHE_HOME``, ``~/.cache``), which processes that
        build at one time share.

    Raises
    ------
    DriverBuildError
        There is no compiler, or it failed; the message has what it said.
    """
    command = compiler()
    folder = _cache() / _hash(command)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder) as part:
            part.mkdir()
            _make(part, command, (LAYER, WORKER, FAKE))
    return _found(folder)


def parts() -> Built:
    """Return layer and worker: those of the companion wheel where it is installed for these sources, else `build`."""
    spec = importlib.util.find_spec(COMPANION)
    if spec and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations)))
        if (folder / "sources").is_file() and (folder / "sources").read_text() == sources_hash():
            return _found(folder)
    return build()


def sources_hash() -> str:
    """Return a hash of all native sources, written and generated."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(generate.NATIVE.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    for name, text in generate.sources().items():
        digest.update(name.encode() + text.encode())
    return digest.hexdigest()[:20]


def _cache() -> Path:
    root = os.environ.get("WARPWELL_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "warpwell" / "driver"


def _hash(command: Sequence[str]) -> str:
    return hashlib.sha256(f"{sources_hash()} {' '.join(command)}".encode()).hexdigest()[:20]


def _found(folder: Path) -> Built:
    files = [folder / part.output for part in (LAYER, WORKER, FAKE)]
    return Built(*(path if path.exists() else None for path in files))


def _make(folder: Path, command: Sequence[str], wanted: Sequence[Part]) -> None:
    for name, text in generate.sources().items():
        (folder / name).write_text(text)
    running = []
    try:
        for part in wanted:
            own = part.sources(generate.NATIVE)
            if own:
                running.append(_start(folder, command, part, own))
        for process in running:
            _finish(process)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _start(folder: Path, command: Sequence[str], part: Part, own: Sequence[Path]) -> subprocess.Popen[str]:
    files = [*map(str, own), str(folder / GENERATED[part])]
    words = [*command, *FLAGS, *part.flags, f"-I{generate.NATIVE}", f"-I{folder}", *files, "-ldl"]
    words += ["-o", str(folder / part.output)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise DriverBuildError(f"the C compiler did not end within {SECONDS:g} s: {process.args!r}") from None
    if process.returncode:
        raise DriverBuildError(f"the C compiler failed on the driver layer: {process.args!r}\n{said}")


def main() -> None:
    """Build, and print the paths."""
    argparse.ArgumentParser(prog="python -m warpwell.driver.build", description=main.__doc__).parse_args()
    built = build()
    for name in ("layer", "worker", "fake"):
        print(f"{name}: {getattr(built, name) or 'no sources'}")


if __name__ == "__main__":
    main()
