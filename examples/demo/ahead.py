"""Compile native functions of the demo in advance, in a process of its own: a second core has nothing else to do.

Each function is compiled once, by the process that needs it first: the other one waits for the file of its code.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FUNCTIONS = (
    "cache.access:access",
    "kv.log.checksum:crc_one",
    "targets.bus_error:on_bus_error",
    "storage.ram:ram_start",
    "array.gather.fetch:copy_pieces",
    "array.gather.host:absent_rows",
    "array.gather.host:copy_rows",
)
"""Functions below ``warpwell``. The first one takes as long to compile as all that the demo compiles before it."""
MODULES = ("scipy.sparse.csgraph", "matplotlib.pyplot", "pyarrow")
"""Modules that the demo imports late. The first import of a module compiles it to bytecode."""


@contextmanager
def compiling(device: str) -> Iterator[None]:
    """Compile in a child process during the block, if kernels run on the CPU and no compiled code is cached."""
    from warpwell.targets.compiler.code_cache import cache_folder

    if device != "cpu" or cache_folder().exists():
        yield
        return
    quiet = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, __file__], stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            yield
        finally:
            process.terminate()


def main() -> None:
    """Compile `FUNCTIONS` into the disk cache, and import `MODULES` after the first one."""
    from warpwell.targets.compiler.machine_code import host_processor, object_file
    from warpwell.targets.native import compile_for

    for name in FUNCTIONS:
        module, _, attribute = name.partition(":")
        function = getattr(importlib.import_module(f"warpwell.{module}"), attribute)
        object_file(getattr(function, "function", function), host_processor(), compile_for)
        if name == FUNCTIONS[0]:
            for late_module in MODULES:
                importlib.import_module(late_module)


if __name__ == "__main__":
    main()
