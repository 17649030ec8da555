"""What a launch says and does around device code: notices, names, warnings of Numba and CuPy."""

import threading
import time
import types
import warnings
import weakref
from typing import Any

import pytest

import warpwell as ww
from warpwell import gpu
from warpwell.pool.agent.cuda_runtime import as_cupy_stream
from warpwell.targets import fault
from warpwell.targets.compiler import compiling, run_cuda
from warpwell.targets.compiler.run_cuda import configured

SMALL = "Grid size 4 will likely result in GPU under-utilization"


@ww.kernel
def scale(x):
    x[gpu.grid(1)] *= 2


def test_kernels_and_launches_say_what_they_are() -> None:
    assert repr(scale) == "<warpwell.kernel 'scale'>"
    assert repr(ww.kernel(scale.function, max_registers=64)) == "<warpwell.kernel 'scale', max_registers=64>"
    assert repr(scale[3, 4]) == "<launch of <warpwell.kernel 'scale'> over 3, 4>"


def test_one_warning_of_a_long_compilation_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "SECONDS", 0.01)
    monkeypatch.setattr(compiling, "_warned", False)
    caplog.set_level("WARNING", compiling.compilation_logger.name)
    with compiling.compiling("kernel 'short'"):
        pass
    assert not caplog.records
    for name in ("one", "two"):
        with compiling.compiling(f"kernel {name!r}"):
            time.sleep(0.2)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "compiling kernel 'one'" in record.getMessage()


def test_a_small_grid_is_no_reason_to_warn() -> None:
    class Dispatcher:
        """Warns as numba-cuda's does."""

        def configure(self, blocks: Any, threads: Any, stream: Any) -> Any:
            if blocks[0] < 128:
                warnings.warn(coloured(SMALL), stacklevel=1)
            return types.SimpleNamespace(griddim=blocks, blockdim=threads, stream=stream)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = configured(Dispatcher(), (4,), (32,), None)
        assert (found.griddim, found.blockdim) == ((4, 1, 1), (32,))
        assert configured(Dispatcher(), (4, 2), (32, 8), None).griddim == (4, 2, 1)


def coloured(text: str) -> str:
    """Return a text as Numba formats warnings where it colours them."""
    return f"\x1b[1m{text} due to low occupancy.\x1b[0m"


@pytest.mark.parametrize("text", [SMALL, "Host array used in CUDA kernel"])
def test_tests_may_launch_plain_numba_kernels_that_warn_in_colour(text: str) -> None:
    """The filters of pyproject.toml, under which this test runs, take both forms."""
    warnings.warn(f"{text} ...", stacklevel=1)
    warnings.warn(coloured(text), stacklevel=1)


def test_a_stream_becomes_cupys_by_the_protocol_where_there_is_one() -> None:
    stream = types.SimpleNamespace(handle=7)
    space = types.SimpleNamespace
    old = space(cuda=space(Stream=object, ExternalStream=lambda handle: ("old", handle)))
    new = space(cuda=space(Stream=space(from_external=lambda s: ("new", s.handle))))
    assert as_cupy_stream(old, stream) == ("old", 7)
    assert as_cupy_stream(new, stream) == ("new", 7)


def test_threads_that_launch_first_kernels_pin_the_fault_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses to pin memory twice."""
    pinned = []

    def pin(*args: Any) -> object:
        time.sleep(0.05)
        pinned.append(args)
        return object()

    monkeypatch.setattr(fault, "_pinned", None)
    monkeypatch.setattr(fault.gpu_memory, "pin_mapped", pin)
    threads = [threading.Thread(target=fault.share_fault_page) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(pinned) == 1


def test_the_flag_of_a_launch_is_kept_whatever_other_threads_keep_meanwhile() -> None:
    """An agent's lanes launch at the same time; a flag that is let go of too early belongs to two launches at once."""
    flags: list[weakref.ref[fault.LaunchFlag]] = []
    running = types.SimpleNamespace(is_done=False)

    def keep(event: object) -> None:
        flag = fault.LaunchFlag("cuda")
        flags.append(weakref.ref(flag))
        run_cuda.keep(flag, event)

    class Over:
        """An event that is reached; while it is asked for the first time, another thread launches."""

        def __init__(self) -> None:
            self.asked = False

        @property
        def is_done(self) -> bool:
            if not self.asked:
                self.asked = True
                other = threading.Thread(target=keep, args=(running,))
                other.start()
                other.join()
            return True

    keep(Over())
    keep(running)  # here another thread launches, too
    keep(running)
    assert [flag() is None for flag in flags] == [True, False, False, False]
    running.is_done = True
    keep(running)
    assert [flag() is None for flag in flags] == [True, True, True, True, False]
