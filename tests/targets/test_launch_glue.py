"""The host side of launches: notices, names, warnings of Numba and CuPy."""

import io
import sys
import threading
import time
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import gpu
from warpwell.pool.agent.cuda_runtime import as_cupy_stream
from warpwell.targets import fault
from warpwell.targets.compiler import compiling, dispatcher, run_cuda
from warpwell.targets.compiler.run_cuda import configured

SMALL = "Grid size 4 will likely result in GPU under-utilization"


@ww.kernel
def scale(x):
    x[gpu.grid(1)] *= 2


def test_kernels_and_launches_say_what_they_are() -> None:
    assert repr(scale) == "<warpwell.kernel 'scale'>"
    assert repr(ww.kernel(scale.function, max_registers=64)) == "<warpwell.kernel 'scale', max_registers=64>"
    assert repr(scale[3, 4]) == "<launch of <warpwell.kernel 'scale'> over 3, 4>"


def test_code_is_compiled_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    # As at the end of Python 3.12.1, where a store commits, or at a limit of threads.
    def refuse(timer: threading.Timer) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(compiling, "_warned", False)
    monkeypatch.setattr(threading.Timer, "start", refuse)
    assert dispatcher(compiled_late)(1) == 2


def compiled_late(x: int) -> int:
    return x + 1


@pytest.mark.parametrize("is_interactive", [False, True])
def test_one_message_of_a_long_compilation_is_logged(
    is_interactive: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    if is_interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(compiling, "SECONDS", HANG_SECONDS)
    monkeypatch.setattr(compiling, "_warned", False)
    caplog.set_level("INFO", compiling.__name__)
    with compiling.compiling("kernel 'short'"):
        pass
    assert not caplog.records
    monkeypatch.setattr(compiling, "SECONDS", 0.01)
    with compiling.compiling("kernel 'one'"):
        until(lambda: caplog.records)
    with compiling.compiling("kernel 'two'"):
        time.sleep(0.1)
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if is_interactive else "INFO")
    assert "compiling kernel 'one'" in record.getMessage()


def add_one(x):
    return x + 1


def test_long_compilations_of_functions_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "SECONDS", 0.0)
    monkeypatch.setattr(compiling, "_warned", False)
    caplog.set_level("INFO", compiling.__name__)
    assert dispatcher(add_one)(1) == 2
    assert "compiling 'add_one'" in caplog.text


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
    run_threads(fault.share_fault_page, [()] * 4)
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
            self.was_queried = False

        @property
        def is_done(self) -> bool:
            if not self.was_queried:
                self.was_queried = True
                thread = threading.Thread(target=keep, args=(running,))
                thread.start()
                thread.join()
            return True

    keep(Over())
    keep(running)  # here, `Over` has started a launch as another thread would
    keep(running)
    assert [flag() is None for flag in flags] == [True, False, False, False]
    running.is_done = True
    keep(running)
    assert [flag() is None for flag in flags] == [True, True, True, True, False]
