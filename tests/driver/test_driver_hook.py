"""The start-up hook of programs redirects functions of NVIDIA's runtime to the driver, and changes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from warpwell.driver import hook

DRIVER = """
calls = []
def _made(name, *results):
    def call(*arguments):
        calls.append((name, arguments))
        return (0, *results)
    return call
class CUresult:
    CUDA_SUCCESS = 0
CUdevice_attribute = int
cuInit, cuCtxSynchronize = _made("cuInit"), _made("cuCtxSynchronize")
cuCtxGetCurrent, cuCtxGetDevice = _made("cuCtxGetCurrent", 77), _made("cuCtxGetDevice", 1)
cuDeviceGetPCIBusId, cuDeviceGetCount = _made("cuDeviceGetPCIBusId", b"0:1"), _made("cuDeviceGetCount", 2)
cuDeviceGetAttribute = _made("cuDeviceGetAttribute", 90)
"""
RUNTIME = """
import enum
class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorNotReady = 600
    cudaErrorUnknown = 999
def cudaDeviceSynchronize():
    return "own"
cudaDeviceGetPCIBusId = cudaDeviceGetAttribute = cudaGetDeviceCount = cudaGetDevice = cudaDeviceSynchronize
def cudaMalloc(size):
    return "own"
"""
ASKS = """
from cuda.bindings import runtime
from cuda.bindings import driver
print(runtime.cudaGetDeviceCount() == (0, 2), runtime.cudaGetDevice() == (0, 1), runtime.cudaMalloc(1))
print(runtime.cudaDeviceGetAttribute(75, 1) == (0, 90), driver.calls[-1] == ("cuDeviceGetAttribute", (75, 1)))
print(runtime.cudaDeviceSynchronize(), driver.calls[-1][0], type(runtime.cudaDeviceSynchronize()[0]).__name__)
"""
ANSWERED = [
    "True True own",
    "True True",
    "(<cudaError_t.cudaSuccess: 0>,) cuCtxSynchronize cudaError_t",
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder with bindings of the driver and of the runtime that print each call."""
    folder = tmp_path / "site"
    bindings = folder / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    for path in (folder / "cuda" / "__init__.py", bindings / "__init__.py"):
        path.write_text("")
    (bindings / "driver.py").write_text(DRIVER)
    (bindings / "runtime.py").write_text(RUNTIME)
    return folder


def output_of(tmp_path: Path, program: str, *paths: Path, layer: bool = True, hooked: bool = True) -> list[str]:
    """Run a program as the layer's environment does; return what it says."""
    folder = tmp_path / "python"
    folder.mkdir(exist_ok=True)
    if not (folder / "sitecustomize.py").exists():
        (folder / "sitecustomize.py").symlink_to(Path(hook.__file__).resolve())
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, (folder, *paths)[not hooked :]))}
    if layer:
        environ["WARPWELL_CUDA"] = str(tmp_path)
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, timeout=HANG_SECONDS, stdout=-1, stderr=-2, text=True, check=False
    )
    return done.stdout.splitlines()


def test_the_driver_answers_for_the_runtime(tmp_path: Path, package: Path) -> None:
    assert output_of(tmp_path, ASKS, package) == ANSWERED
    own = "from cuda.bindings import runtime; print(runtime.cudaDeviceSynchronize())"
    assert output_of(tmp_path, own, package, layer=False) == ["own"]


def test_a_runtime_that_was_imported_before_is_changed_too(tmp_path: Path, package: Path) -> None:
    (package / "sitecustomize.py").write_text("")  # hides the hook, which runs later
    preloaded = f"import cuda.bindings.runtime, runpy\nrunpy.run_path({hook.__file__!r}, run_name='sitecustomize')\n"
    assert output_of(tmp_path, preloaded + ASKS, package, hooked=False) == ANSWERED


def test_codes_of_the_driver_become_the_runtimes(tmp_path: Path, package: Path) -> None:
    program = """
from cuda.bindings import driver, runtime
for code in (1, 600, 719):
    driver.cuDeviceGetCount = lambda: (code, 5)
    print(repr(runtime.cudaGetDeviceCount()))
driver.cuInit = lambda flags: (600,)
print(repr(runtime.cudaGetDevice()))
print(repr(runtime.cudaGetDeviceCount()), repr(runtime.cudaDeviceSynchronize()))
driver.cuInit, driver.cuCtxGetCurrent = lambda flags: (0,), lambda: (0, 0)
driver.calls.clear()
print(runtime.cudaGetDevice(), runtime.cudaDeviceSynchronize(), driver.calls)
"""
    assert output_of(tmp_path, program, package) == [
        "(<cudaError_t.cudaErrorInvalidValue: 1>, None)",
        "(<cudaError_t.cudaErrorNotReady: 600>, None)",
        "(<cudaError_t.cudaErrorUnknown: 999>, None)",
        "(<cudaError_t.cudaErrorNotReady: 600>, None)",
        "(<cudaError_t.cudaErrorNotReady: 600>, None) (<cudaError_t.cudaErrorNotReady: 600>,)",
        "(<cudaError_t.cudaSuccess: 0>, 0) (<cudaError_t.cudaSuccess: 0>,) []",
    ]


def test_programs_without_the_bindings_notice_nothing(tmp_path: Path, package: Path) -> None:
    program = """
import sys, warnings
print([path for path in sys.path if path.endswith("/python")], "cuda" in sys.modules)
for name in ("cuda.bindings.runtime", "cuda.nothing"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error.name)
"""
    without_runtime = tmp_path / "none"
    (without_runtime / "cuda").mkdir(parents=True)
    (without_runtime / "cuda" / "__init__.py").write_text("")
    assert output_of(tmp_path, program, without_runtime) == ["[] False", "cuda.bindings", "cuda.nothing"]
    (package / "cuda" / "bindings" / "runtime.py").unlink()
    assert output_of(tmp_path, program, package) == ["[] False", "cuda.bindings.runtime", "cuda.nothing"]


def test_bindings_of_another_version_are_left_as_they_are(tmp_path: Path, package: Path) -> None:
    bindings = package / "cuda" / "bindings"
    program = """
from cuda.bindings import runtime
print(runtime.cudaMalloc(1), runtime.cudaDeviceSynchronize(), hasattr(runtime, "cudaGetDevice"))
"""
    (bindings / "runtime.py").write_text("def cudaMalloc(size): return 'own'\ncudaDeviceSynchronize = lambda: 'own'\n")
    assert output_of(tmp_path, program, package) == ["own own False"]  # its errors have no such name
    (bindings / "runtime.py").write_text(RUNTIME)
    (bindings / "driver.py").unlink()
    assert output_of(tmp_path, program, package) == ["own own True"]


def test_a_sitecustomize_of_the_program_runs_too(tmp_path: Path, package: Path) -> None:
    (package / "sitecustomize.py").write_text("print('own', __name__)\nfrom cuda.bindings import runtime\n")
    output = output_of(tmp_path, "import sys\nprint(sys.modules['sitecustomize'].__file__)" + ASKS, package)
    assert output == ["own sitecustomize", str(package / "sitecustomize.py"), *ANSWERED]
