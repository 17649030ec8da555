"""Compile the native functions of the package to object files and PTX, for the wheel.

``python tools/build_native.py FOLDER`` writes the files that `warpwell.targets.shipped` loads. ``--check`` verifies
that the installed package has an object file for every native function, and PTX if it was compiled. The package is
imported from the Python path.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from numba.core import config

import warpwell
from warpwell import errors
from warpwell.targets import shipped
from warpwell.targets.compiler import machine_code
from warpwell.targets.compiler.code_cache import sources_digest, write_kept
from warpwell.targets.device import linked_functions
from warpwell.targets.native import compile_for, native_roots

SKIPPED = ("warpwell.testing", "warpwell.cli")
"""Packages without native functions of the library: conformance suites, which need pytest, and commands."""


def import_all() -> None:
    """Import all modules of the package that can be imported here: native functions register themselves."""
    for module in pkgutil.walk_packages(warpwell.__path__, "warpwell."):
        if not module.name.startswith(SKIPPED) and not module.name.endswith("main"):
            try:
                importlib.import_module(module.name)
            except (ImportError, errors.ArgumentError) as error:
                cause = error if isinstance(error, ImportError) else error.__cause__
                if not isinstance(cause, ImportError) or (cause.name or "warpwell").startswith("warpwell"):
                    raise  # not an optional dependency


def functions() -> Iterator[Callable[..., int]]:
    """Yield all device functions of the package that are compiled by themselves."""
    found = [*linked_functions(), *(each.function for each in native_roots())]
    for function in dict.fromkeys(found):
        if function.__module__.startswith("warpwell.") and not function.__module__.startswith(SKIPPED):
            yield function


def build(folder: Path) -> int:
    """Write all object files, PTX and the manifest; return the number of files."""
    # Checksums choose their instructions by this processor, and not by the processor of the build.
    config.CPU_NAME, config.CPU_FEATURES = shipped.PROCESSOR, "+sse4.2,+pclmul"
    import_all()
    objects = folder / shipped.PROCESSOR
    objects.mkdir(parents=True)
    processor = machine_code.Processor(shipped.PROCESSOR, "+pclmul")
    for function in functions():
        name = machine_code.object_name(function)
        if name is not None:
            write_kept(objects / f"{name}.o", machine_code.object_file(function, processor, compile_for))
    nvvm = build_ptx(folder / "ptx")
    manifest = {
        "sources": sources_digest(),
        "processor": shipped.PROCESSOR,
        "features": shipped.FEATURES,
        "nvvm": nvvm,
    }
    (folder / shipped.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return sum(path.is_file() for path in folder.rglob("*"))


def build_ptx(folder: Path) -> tuple[int, ...] | None:
    """Write the PTX of all linked functions; return the version of NVVM, or None without numba-cuda."""
    version = shipped.version_pair("nvidia-nvvm")
    try:
        from warpwell.targets.compiler.cuda_lowerings import intrinsics
        from warpwell.targets.compiler.run_cuda import without_gpu
    except ImportError:
        version = ()
    if not version:
        print("without PTX: numba-cuda and nvidia-nvvm are not installed", file=sys.stderr)
        return None
    for capability in shipped.CAPABILITIES:
        cc = divmod(capability, 10)
        (folder / str(capability)).mkdir(parents=True)
        for function in linked_functions():
            if function.__module__.startswith("warpwell."):
                with without_gpu(cc):
                    text = intrinsics.compressed_ptx(function, cc)
                write_kept(folder / str(capability) / f"{machine_code.object_name(function)}.ptx.z", text)
    return version


def check() -> list[str]:
    """Return the names of native functions for which the installed package lacks compiled code."""
    import_all()
    named = [(machine_code.object_name(function), function) for function in functions()]
    missing = [str(name) for name, _ in named if name is not None and shipped.find_object(name) is None]
    linked = set(linked_functions())
    ptx = [str(name) for name, function in named if function in linked]
    return missing + [f"{name} (PTX)" for name in ptx if name and shipped.find_ptx(name, 90) is None]


def main(arguments: list[str]) -> int:
    """Build into a folder, or check the installed package; return the exit status."""
    if arguments == ["--check"]:
        missing = check()
        if missing:
            print(f"the wheel has no compiled code of {', '.join(missing)}", file=sys.stderr)
        return len(missing) > 0
    started = time.monotonic()
    count = build(Path(arguments[0]))
    print(f"compiled {count} files of native code in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
