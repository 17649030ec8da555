"""QEMU in a folder, for a machine without QEMU and network: the program, its libraries and the files that they load.

    python -m lab.drives.qemu_pack build/qemu
    WARPWELL_QEMU=build/qemu/qemu-system-x86_64 python ...        # there; any Linux on x86-64 with /bin/sh

The folder does not depend on the machine: its own loader starts the program with its own libraries. Only the firmware
that QEMU loads without a guest is packed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

BINARY = "qemu-system-x86_64"
MODULES = ("accel-tcg-x86_64.so",)
FIRMWARE = ("bios-256k.bin", "kvmvapic.bin")
"""Firmware that QEMU loads for `QemuDrive`. The machine of `QemuDrive` has no display, network or boot disk."""

_START = """#!/bin/sh
here=${0%/*}
export QEMU_MODULE_DIR="$here/modules"
exec "$here/lib/LOADER" --library-path "$here/lib" "$here/bin/qemu" -L "$here/firmware" "$@"
"""


def pack(folder: Path, binary: str = BINARY) -> Path:
    """Copy an installed QEMU to `folder`, which must be new or empty; return the path of the program there.

    Raises
    ------
    SystemExit
        QEMU or one of its files is not at the path of Debian and Ubuntu.
    """
    found = shutil.which(binary)
    if found is None:
        raise SystemExit(f"{binary} is not installed: apt-get install qemu-system-x86")
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: pass another folder, or remove it")
    for name in ("bin", "lib", "modules", "firmware"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    program = Path(found).resolve()
    shutil.copy(program, folder / "bin" / "qemu")
    modules = [path for name in MODULES for path in Path("/usr/lib").glob(f"*/qemu/{name}")]
    for module in modules:
        shutil.copy(module, folder / "modules")
    loader = ""
    for library in {library for file in (program, *modules) for library in libraries(file)}:
        shutil.copy(library.resolve(), folder / "lib" / library.name)
        if library.name.startswith("ld-linux"):
            loader = library.name
    for name in FIRMWARE:
        found_folders = [
            path for package in ("qemu", "seabios") if (path := Path("/usr/share") / package / name).exists()
        ]
        if not found_folders:
            raise SystemExit(f"QEMU's firmware {name} is not in /usr/share/qemu or /usr/share/seabios")
        shutil.copy(found_folders[0], folder / "firmware")
    start = folder / BINARY
    start.write_text(_START.replace("LOADER", loader))
    start.chmod(0o755)
    return start


def libraries(file: Path) -> list[Path]:
    """Return the shared libraries that a program or library loads, and the loader."""
    printed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True).stdout
    return [Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", printed, re.MULTILINE)]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.drives.qemu_pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    start = pack(options.folder)
    nbytes = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    sys.stdout.write(f"{nbytes >> 20} MiB; export WARPWELL_QEMU={start.resolve()}\n")


if __name__ == "__main__":
    main()
