"""Build the native parts of `warpwell.driver` and the fake driver; ``python -m lab.driver.build`` prints the paths."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from warpwell.driver import build as parts
from warpwell.driver import generate

SOURCES = Path(__file__).parent
"""Folder of the C sources."""
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
    product = parts.build()
    return Built(product.layer, product.worker, product.relay, build_fake())


def build_fake() -> Path:
    """Return the path of the fake driver; compile it if the cache folder does not contain it."""
    return parts.build_library("libfakecuda.so", SOURCES, {"gen_fake.c": generated_source()})


def generated_source() -> str:
    """Return the C code of the fake driver that follows from the table of calls."""
    return generate.exported_symbols("fake.h", "return fake_absent({0});", weak=lambda call: True)


def main() -> None:
    """Build everything and print one path a line."""
    built = build()
    for field in fields(built):
        print(f"{field.name}: {getattr(built, field.name)}")


if __name__ == "__main__":
    main()
