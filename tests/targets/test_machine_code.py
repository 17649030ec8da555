"""Device functions as C functions that a process loads without a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

from warpwell import errors
from warpwell.cache.access import access
from warpwell.pool.transport import mpi_loop
from warpwell.targets import native
from warpwell.targets.compiler.machine_code import load_symbol
from warpwell.targets.native import compile_for
from warpwell.targets.primitives import SYSTEM, load_relaxed

UMASK = os.umask(0o022)
os.umask(UMASK)

LOADS = """
import sys
import numpy as np
from warpwell.pool.transport import mpi_loop
from warpwell.targets import native
words = np.array([7, -3])
assert native(mpi_loop.word)(words.ctypes.data + 8) == -3
print("warpwell.targets.compiler.compiled" in sys.modules, "numba" in sys.modules)
"""


COMPILED, LOADED = "True True", "False False"
"""What `LOADS` prints of the compiler and of Numba."""


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOADS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "WARPWELL_CACHE_DIR": str(folder)},
    )


TWO_THREADS = """
import sys, threading
from pathlib import Path
from warpwell.targets.compiler import code_cache

path, holding, waiting = Path(sys.argv[1]) / "code.o", threading.Event(), threading.Event()
results = []

def compile_another():
    from numba.core.compiler_lock import global_compiler_lock
    with global_compiler_lock:
        holding.set()
        waiting.wait(0.3)  # until the main thread waits for a lock
        results.append(code_cache.read_or_make(path, lambda: b"code"))

def make():
    from numba.core.compiler_lock import global_compiler_lock
    with global_compiler_lock:
        return b"code"

assert "numba.core.compiler_lock" not in sys.modules
other = threading.Thread(target=compile_another)
other.start()
holding.wait()
results.append(code_cache.read_or_make(path, make))
other.join()
print(results)
"""


def output_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, err
    return out.strip()


def test_it_does_what_the_function_does() -> None:
    values = np.array([1, 2**62, -5])
    read = native(mpi_loop.word)
    assert [read(values.ctypes.data + 8 * k) for k in range(3)] == values.tolist()
    assert native(mpi_loop.word) is read


def test_a_thread_that_compiles_and_one_that_needs_its_code_do_not_wait_for_each_other(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", TWO_THREADS, tmp_path], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert process.stdout == "[b'code', b'code']\n", process.stderr


def test_one_process_compiles_and_the_others_load(tmp_path: Path) -> None:
    """Processes that start while it compiles wait for its code; later ones do not import Numba."""
    together = [start(tmp_path) for _ in range(3)]
    assert sorted(output_of(process).split()[0] for process in together) == ["False", "False", "True"]
    assert output_of(start(tmp_path)) == LOADED
    (object_file,) = tmp_path.rglob("*.o")
    assert object_file.stat().st_size < 10_000
    assert {path.suffix for path in object_file.parent.iterdir()} == {".o", ".lock"}


@pytest.mark.quick("half")
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b"", marks=pytest.mark.slow, id="empty"),
        pytest.param(b"\0" * 5000, marks=pytest.mark.slow, id="zeros"),
        pytest.param(None, id="half"),
    ],
)
def test_a_damaged_file_is_compiled_again(tmp_path: Path, damage: bytes | None) -> None:
    assert output_of(start(tmp_path)) == COMPILED
    (object_file,) = tmp_path.rglob("*.o")
    content = object_file.read_bytes()
    object_file.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert output_of(start(tmp_path)) == COMPILED
    assert object_file.read_bytes() == content and output_of(start(tmp_path)) == LOADED
    assert object_file.stat().st_mode & 0o777 == 0o666 & ~UMASK


@pytest.mark.quick("file")
@pytest.mark.parametrize("obstacle", ["file", "unwritable"])
def test_a_cache_that_cannot_be_written(tmp_path: Path, obstacle: str) -> None:
    folder = tmp_path / "cache"
    if obstacle == "file":
        folder.write_text("in the way")
    else:
        folder = Path("/proc/nothing")
    assert output_of(start(folder)) == COMPILED


@native
def is_positive(value):
    return value > 0


@native
def return_nothing(address):
    load_relaxed(address, SYSTEM)


@native
def half(value):
    return value / 2


def test_booleans_and_none_become_integers_and_other_results_are_refused() -> None:
    content = np.array([1])
    assert [is_positive(value) for value in (-1, 0, 7)] == [0, 0, 1]
    assert return_nothing(content.ctypes.data) == 0
    with pytest.raises(errors.CompileError, match="must return a 64-bit integer, a boolean or None, got float64"):
        half.load()


def test_a_kernel_and_the_host_call_the_same_code() -> None:
    symbol = load_symbol(access, compile_for)
    assert symbol == "warpwell_cache_access_access"
    assert llvm.address_of_symbol(symbol) == native(access).address
