"""Make the companion wheel warpwell-driver: ``python -m tools.driver_wheel FOLDER``.

The wheel provides the layer, worker, relay, pass-through driver and CUDA runtimes for machines without a C compiler.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import platform
import re
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from warpwell.driver import build
from warpwell.replacing import replacing

OLDEST = 17
"""Minor version of the oldest glibc that the wheel runs with if ziglang compiles it."""


def wheel(folder: Path) -> Path:
    """Write the companion wheel warpwell-driver into a folder, and return its path.

    It has the native parts and the CUDA runtimes and no Python code, so one wheel serves all versions of Python. If the
    package ziglang is installed, the wheel runs with glibc 2.17 and newer; else with the glibc of this machine, which
    its name contains.
    """
    with tempfile.TemporaryDirectory() as made:
        if build.has_ziglang():
            target = f"{platform.machine()}-linux-gnu.2.{OLDEST}"
            command = [sys.executable, "-m", "ziglang", "cc", "-target", target]
            command += ["-Wl,--strip-all", "-fno-sanitize=undefined"]
            build.make_parts(Path(made), command)
            built = build.find_parts(Path(made))
        else:
            built = build.build()
        files = [built.layer, built.worker, built.relay, built.passthrough]
        files += [built.layer.parent / part.output for part in build.RUNTIMES]
        content = {path.name: path.read_bytes() for path in files}
    glibc = max([OLDEST, *(int(found) for text in content.values() for found in re.findall(rb"GLIBC_2\.(\d+)", text))])
    tag = f"py3-none-manylinux_2_{glibc}_{platform.machine()}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{build.COMPANION}-{metadata.version('warpwell')}-{tag}.whl"
    with replacing(path) as part:
        _pack(part, content, tag)
    return path


def _pack(path: Path, content: dict[str, bytes], tag: str) -> None:
    version = metadata.version("warpwell")
    info = f"{build.COMPANION}-{version}.dist-info"
    files = {f"{build.COMPANION}/{name}": data for name, data in content.items()}
    files[f"{build.COMPANION}/sources"] = build.sources_hash().encode()
    files[f"{build.COMPANION}/__init__.py"] = b'"""Native parts of Warpwell\'s layer for unmodified CUDA programs."""\n'
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
            entry = zipfile.ZipInfo(name)  # dated 1980, so that equal sources produce equal wheels
            entry.external_attr = (0o100755 if name.endswith(build.WORKER.output) else 0o100644) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


def main() -> None:
    """Write the companion wheel into a folder."""
    parser = argparse.ArgumentParser(prog="python -m tools.driver_wheel", description=main.__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    print(wheel(parser.parse_args().folder))


if __name__ == "__main__":
    main()
