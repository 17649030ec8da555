"""Shared set-up of all test folders: skips for missing hardware, and repeatable random tests."""

import ctypes
import faulthandler
import gc
import importlib.util
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from tests import cost
from tests.harness.examples import examples
from tests.harness.until import HANG_SECONDS

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 touches it at the first compile; NumPy 2.5 lacks it
    np.row_stack = np.vstack  # noqa: NPY201 - the old name is the point

# Compiling takes seconds on the first example, so a deadline would only measure the compiler.
settings.register_profile("warpwell", deadline=None, derandomize=True, print_blob=True, max_examples=examples(100))
settings.load_profile("warpwell")

# A shell lets background processes ignore Ctrl-C, and so would the programs that tests interrupt; nohup
# does the same with hang-ups.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

FOLDER = Path(__file__).parent

# Tests ignore the user's settings: devices, checks, the socket of a running service.
for name in [name for name in os.environ if name.startswith("WARPWELL_") and name != "WARPWELL_CACHE_DIR"]:
    del os.environ[name]
# Programs that tests start must not warn that a compilation takes long; they may log errors.
os.environ["WARPWELL_LOG_LEVEL"] = "ERROR"
# A process of a pool may be silent for seconds because it gets no core: on a busy machine, it is not lost.
os.environ["WARPWELL_POOL_TIMEOUT"] = f"{HANG_SECONDS:g}"

# The clock of timeouts can be advanced (tests/harness/clock.py), also in programs that a test starts. It is
# eleven days ahead from the start, so that code that mixes it with the clock of the system fails in every test.
_clock = tempfile.NamedTemporaryFile(prefix="warpwell-clock-")
_clock.write((10**15).to_bytes(8, sys.byteorder))
_clock.flush()
os.environ["WARPWELL_TEST_CLOCK"] = _clock.name

# Do not write to the home folder: compiled code stays in the checkout, and the schedulers' history is deleted.
if not os.environ.get("WARPWELL_CACHE_DIR"):
    os.environ["WARPWELL_CACHE_DIR"] = str(FOLDER.parent / "build" / "cache")  # for workers and programs, too
    shutil.rmtree(FOLDER.parent / "build" / "cache" / "warpwell" / "scheduler", ignore_errors=True)

# Test processes share no state of the machine: each one has its own temporary folder, with the boards of turns, the GPU
# claims of jobs and the sockets of services in it. pytest keeps the folders of failed tests where it always does.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
PRIVATE = tempfile.mkdtemp(prefix="ww-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
os.environ["TMPDIR"] = tempfile.tempdir = PRIVATE
os.environ["WARPWELL_TURNS"] = f"{PRIVATE}/turns"
os.environ["WARPWELL_GPU_LOCKS"] = f"{PRIVATE}/gpus"
os.environ.pop("XDG_RUNTIME_DIR", None)
OWNER = os.getpid()

# A warning in the driver layer fails the tests. Users' builds tolerate warnings, because compilers differ.
os.environ["CFLAGS"] = f"{os.environ.get('CFLAGS', '')} -Werror".strip()

# Compilation creates millions of long-lived objects. Python's default thresholds waste 5 % of its time on collections.
gc.set_threshold(100_000, 20, 50)

# Workers begin at equal distances along this list. Rooms whose tests compile little come first, so that one worker
# compiles what all kernels need while the others have enough to do until they can load it.
ORDER = [
    "system", "nvme", "programs", "pool", "scheduler", "cli", "lab", "kv", "storage", "drives", "driver",
    "graph", "table", "train", "queues", "array", "cache", "targets",
]  # fmt: skip

NEEDS = {"cuda": "gpu", "interp": "interp", "mpi": "mpi"}
"""Suffix of a test file -> the marker that its tests get."""

NATIVE = ("test_driver_", "test_run_cuda_program")
"""How the names of files begin whose tests build the driver layer."""
WITHOUT_COMPILER = ("test_driver_hook", "test_driver_table")


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Freeze existing objects: compiled code is millions of objects, and a collection takes half a second."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(scope="module", autouse=True)
def forgotten_tasks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Report background tasks that a module leaves, and keep them from failing the tests of the next module.

    In some runs from an empty code cache, a task never ends. The report shows what the task and its threads wait for.
    """
    yield
    tasks = sys.modules.get("warpwell.array.gather.tasks")
    deadline = time.monotonic() + 20
    while tasks is not None and tasks._running and time.monotonic() < deadline:
        time.sleep(0.01)
    if tasks is not None and tasks._running:
        found = [{name: repr(value) for name, value in vars(task).items()} for task in tasks._running]
        print(f"\n{request.node.nodeid} leaves background tasks: {found}", file=sys.__stderr__, flush=True)
        faulthandler.dump_traceback(sys.__stderr__)
        tasks._running.clear()


_hanging: list[str] = []
"""The test after which the closing thread hung, if any: no later test waits for it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait until the objects that the test and its fixtures dropped are closed.

    The next test may replace functions that closing calls, and count their calls.
    """
    result = yield
    closing = sys.modules.get("warpwell.closing")
    if closing is not None and not _hanging and not closing.wait_until_closed(HANG_SECONDS):
        _hanging.append(item.nodeid)
        print(f"\n{item.nodeid} dropped objects that were not closed within {HANG_SECONDS:g} s", file=sys.__stderr__)
        faulthandler.dump_traceback(sys.__stderr__)
    return result


@pytest.fixture(autouse=True)
def cpu_by_default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests of the CPU run there on a machine with a GPU, too, and so the programs that they start."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("WARPWELL_DEVICE", "cpu")


_tests = itertools.count()


@pytest.fixture(autouse=True)
def own_history(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start each test with an empty scheduler history; programs have their own cache folder."""
    history = sys.modules.get("warpwell.scheduler.predict.history")
    if history is not None:
        folder = tmp_path_factory.getbasetemp() / f"history{next(_tests)}"
        monkeypatch.setattr(history, "default_path", lambda device: folder / "device.json")


@cache
def gpu_count() -> int:
    """Ask the driver itself, so that tests without a GPU never load a CUDA package."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@cache
def can_compile() -> bool:
    """Return whether the driver layer can be built here."""
    from warpwell.driver import build  # imported for the tests that need it
    from warpwell.errors import DriverBuildError

    try:
        return bool(build.compiler())
    except DriverBuildError:
        return False


@cache
def mpi_missing() -> str | None:
    """Return what has to be installed before MPI jobs can run, or None."""
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py: pip install -e '.[mpi]'"
    beside_python = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    return None if beside_python or shutil.which("mpiexec") else "needs mpiexec: pip install -e '.[mpi]'"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("warpwell")
    group.addoption("--cost", metavar="FILE", help="write the CPU time of each test to FILE and check the budgets")
    group.addoption("--covered", action="store_true", help="measure the coverage of src/warpwell")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.covered:
        from tests import covered  # needs the package coverage

        config.pluginmanager.register(covered.Coverage())
    if config.option.cost:
        config.pluginmanager.register(cost.Recorder(config.option.cost))


def pytest_unconfigure() -> None:
    if os.getpid() == OWNER:
        shutil.rmtree(PRIVATE, ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only the files that mark timing tests if only these run."""
    timing = config.option.markexpr == "timing" and collection_path.suffix == ".py"
    return True if timing and b"pytest.mark.timing" not in collection_path.read_bytes() else None


def position(item: pytest.Item) -> tuple[bool, int]:
    """Return the sort key of a test: interpreted ones, which are the shortest, come last."""
    return item.path.stem.endswith("_interp"), ORDER.index(item.path.relative_to(FOLDER).parts[0])


def is_quick(item: pytest.Item) -> bool:
    """Return False if `make test` leaves out this case of a parametrized test.

    The marker `quick` names the cases that run, or `QUICK` of a class that inherits its tests: test -> cases.
    """
    marker = item.get_closest_marker("quick")
    cases = marker.args if marker else getattr(getattr(item, "cls", None), "QUICK", {}).get(item.originalname)
    return cases is None or (hasattr(item, "callspec") and item.callspec.id in cases)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each worker start at another room: it finds the others' bytecode of most modules, which pytest compiles."""
    report = yield
    if report.result and collector.path == FOLDER:
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        first = worker * len(report.result) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=position)
    for item in items:
        stem = item.path.stem
        need = NEEDS.get(stem.rpartition("_")[2])
        if need is not None and not item.get_closest_marker("ptx"):
            item.add_marker(getattr(pytest.mark, need))
        if not is_quick(item):
            item.add_marker(pytest.mark.slow)
        if stem.startswith(NATIVE) and stem not in WITHOUT_COMPILER and not can_compile():
            item.add_marker(pytest.mark.skip(reason="needs a C compiler"))
        if need == "gpu" and item.get_closest_marker("gpu") and gpu_count() == 0:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if need == "mpi" and (reason := mpi_missing()):
            item.add_marker(pytest.mark.skip(reason=reason))
