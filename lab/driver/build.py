"""Build the native parts of `warpwell.driver` and the fake driver; ``python -m lab.driver.build`` prints the paths."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from warpwell.driver import build as parts
from warpwell.driver import generate, make_library_folder

SOURCES = Path(__file__).parent
"""Folder of the C sources."""
FAKE = "libfakecuda.so"
IMAGE = SOURCES / "kernels.ptx"
"""Kernels of the test programs, for the fake driver and for GPUs."""


@dataclass(frozen=True)
class Built(parts.Built):
    """Paths of the native parts and of the fake driver."""

    fake: Path = Path()


def build() -> Built:
    """Return the native parts and the fake driver; compile what the cache folder does not contain.

    Raises
    ------
    DriverBuildError
        If there is no compiler, if it fails, or if the cache folder cannot be written.
    """
    return Built(**asdict(parts.build()), fake=build_fake())


def build_fake() -> Path:
    """Return the path of the fake driver; compile it if the cache folder does not contain it."""
    command, generated = parts.compiler(), generated_source()
    digest = hashlib.sha256((parts.build_hash(command) + generated).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())

    def make(folder: Path) -> None:
        for name, text in (generate.sources() | {"gen_fake.c": generated}).items():
            (folder / name).write_text(text)
        part = parts.Part(FAKE, (), (*parts.SHARED, f"-Wl,-soname,{FAKE}", f"-I{SOURCES}"))
        parts.compile_files(folder, command, [(part, [*sorted(SOURCES.glob("*.c")), folder / "gen_fake.c"])])

    return parts.cached_folder(digest.hexdigest()[:20], make) / FAKE


def library_folder() -> Path:
    """Return a folder with ``libcuda.so.1`` (the layer) and the CUDA runtimes ``libcudart.so.12`` and ``.13``."""
    layer = parts.parts().layer
    name = hashlib.sha256(f"library folder {layer}".encode()).hexdigest()[:20]
    return parts.cached_folder(name, lambda folder: make_library_folder(folder, layer)) / "lib"


def generated_source() -> str:
    """Return the C code of the fake driver that is generated from the table of calls."""
    return generate.exported_symbols("fake.h", "return fake_absent({0});", weak=lambda call: True)


def main() -> None:
    """Build everything and print one path per line."""
    built = build()
    for field in fields(built):
        print(f"{field.name}: {getattr(built, field.name)}")


if __name__ == "__main__":
    main()
