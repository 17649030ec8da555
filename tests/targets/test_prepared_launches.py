"""Launches by the driver without numba-cuda's own: arguments in their order, with stand-ins for driver and compiler."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors, gpu
from warpwell.targets.blocks import cuda as blocks_cuda
from warpwell.targets.compiler import run_cuda
from warpwell.targets.fault import LaunchFlag

pytest.importorskip("cuda.bindings")


@ww.kernel
def scale(x, factor):
    x[gpu.grid(1)] *= factor


@ww.kernel
def until_failed(x):
    while not gpu.failed():
        x[gpu.grid(1)] += 1


class DeviceArray:
    """An array of two words for the driver."""

    dtype, ndim = np.dtype(np.int64), 1

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size


def type_of(value: Any) -> Any:
    return "array" if isinstance(value, np.ndarray | DeviceArray) else type(value)


class Overload:
    """A compiled kernel of numba-cuda."""

    regs_per_thread, shared_mem_per_block, local_mem_per_thread = 24, 0, 8

    def __init__(self, types: tuple[Any, ...], handle: int) -> None:
        self.argument_types = types
        self._codelibrary = SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=handle))

    def max_cooperative_grid_blocks(self, threads: int) -> int:
        return 2048 // threads

    def _prepare_args(self, kind: Any, value: Any, stream: Any, copied: list[Any], flat: list[Any]) -> None:
        assert kind == type_of(value)
        if isinstance(value, np.ndarray):
            copied.append(value)
        elif isinstance(value, DeviceArray):
            flat += ctypes.c_void_p(value.address), ctypes.c_int64(value.size)
        elif isinstance(value, tuple):
            flat += map(ctypes.c_int64, value)
        else:
            flat.append(ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value))


class Dispatcher:
    """A dispatcher of numba-cuda."""

    def __init__(self, handle: int) -> None:
        self.overloads: dict[Any, Overload] = {}
        self.launches: list[Any] = []
        self._handle = handle

    def typeof_pyval(self, value: Any) -> Any:
        return type_of(value)

    def compile(self, types: tuple[Any, ...]) -> Any:
        self.overloads[types] = Overload(types, self._handle)
        return SimpleNamespace(bind=lambda: None)

    def configure(self, blocks: Any, threads: Any, stream: Any) -> Any:
        def call(*arguments: Any) -> None:
            self.launches.append((configured.griddim, threads, stream, arguments))

        class Configured:
            griddim: Any = blocks
            __call__ = staticmethod(call)

        configured = Configured()
        return configured


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record launches of the driver: function, grid and threads, stream, argument words."""
    from cuda.bindings import driver

    calls: list[Any] = []

    def launch(function: Any, *parameters: Any) -> tuple[int]:
        *shape, shared, stream, addresses, extra = parameters
        assert shared == extra == 0
        pointers = ctypes.cast(addresses, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)))
        calls.append((int(function), tuple(shape), stream, [pointers[k][0] for k in range(COUNTS[int(function)])]))
        return (0,)

    monkeypatch.setattr(driver, "cuLaunchKernel", launch)
    for module in (run_cuda, blocks_cuda):
        monkeypatch.setattr(module, "share_fault_page", lambda: None)
    monkeypatch.setattr(run_cuda, "current", lambda: (driver, SimpleNamespace(device_id=0)))
    return calls


PLAIN, WORKERS, SERIES, FLAGGED, INTEGERS = 11, 12, 13, 14, 15
COUNTS = {PLAIN: 3 + 3, WORKERS: 9 + 3, SERIES: 3 + 5, FLAGGED: 3 + 2, INTEGERS: 3 + 2}
"""Argument words of each function."""


def forms_of(
    values: list[Any], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[blocks_cuda.Forms, Dispatcher]:
    """Return the prepared forms of a launch, and the dispatcher of its workers."""
    dispatchers = {"compiled": Dispatcher(PLAIN), "_form": Dispatcher(WORKERS)}
    for name, dispatcher in dispatchers.items():
        monkeypatch.setattr(blocks_cuda, name, lambda *_, found=dispatcher: found)
    kernel = ww.kernel(scale.function)
    blocks = SimpleNamespace(
        kernel=kernel,
        launch=SimpleNamespace(shape=shape),
        values=values,
        participants=[],
        preemptible=True,
        blocks=3,
        flag=LaunchFlag("cpu"),
    )
    forms = blocks_cuda.Forms(blocks)
    return forms, dispatchers["_form"]


def test_a_launch_alone_and_by_workers(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    forms, _ = forms_of([DeviceArray(4096, 350), 7], (5, 70), monkeypatch)
    assert forms.resources("workers") == {"registers": 24, "shared": 0, "local": 8, "threads": 256, "resident": 8}
    forms.start_plain(None)
    forms.start(1 << 40, 6, 9, SimpleNamespace(handle=99), 2)
    arguments = [4096, 350, 7]
    extents = [5, 70, 1]
    assert launched == [
        (PLAIN, (3, 1, 1, 32, 8, 1), 0, [*extents, *arguments]),
        (WORKERS, (9, 1, 1, 32, 8, 1), 99, [1 << 40, 6, 2, 3, 3, 1, *extents, *arguments]),
    ]
    row = forms.plain_row()
    assert row is not None and row is forms.plain_row() and row[7] == PLAIN and forms.lasting
    row = forms.workers_row(1 << 41, 1, 2)
    assert row is not None and row[7] == WORKERS
    addresses = (ctypes.c_int64 * 12).from_address(int(row[8]))
    found = [ctypes.c_int64.from_address(address).value for address in addresses]
    assert found == [1 << 41, 1, 1, 3, 3, 1, *extents, *arguments]


def test_arguments_that_must_be_copied_are_launched_by_numba(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.zeros(3)
    forms, dispatcher = forms_of([array, 7], (300,), monkeypatch)
    forms.start_plain(None)
    forms.start(64, 0, 5, SimpleNamespace(handle=99))
    assert launched == [] and forms.plain_row() is None and forms.workers_row(64, 0, 5) is None and not forms.lasting
    (plain,) = forms._forms["plain"].dispatcher.launches
    assert plain == ((2, 1, 1), (256,), 0, (300, 1, 1, array, 7))
    (workers,) = dispatcher.launches
    assert workers[0] == (5, 1, 1) and workers[3] == (64, 0, 1, 3, 2, 1, 300, 1, 1, array, 7)


def test_a_series_passes_what_changes(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dispatchers = {scale: Dispatcher(SERIES), until_failed: Dispatcher(FLAGGED)}
    monkeypatch.setattr(run_cuda, "compiled", lambda kernel, dims, count: dispatchers[kernel])
    monkeypatch.setattr(scale, "compiled", {})
    flag = LaunchFlag("cpu")
    series = run_cuda.Series(flag)
    first, second = DeviceArray(4096, 1), DeviceArray(8192, 2)
    series.compile(scale, (300,), (first, (1, 2), 0.5))
    assert launched == []
    series.launch(scale, (300,), (first, (1, 2), 0.5))
    series.launch(scale, (600,), (second, (3, 4), 0.25))
    series.launch(scale, (600,), (first, (3, 4), 2.0))
    bits = {value: int(np.float64(value).view(np.int64)) for value in (0.5, 0.25, 2.0)}
    assert launched == [
        (SERIES, (2, 1, 1, 256, 1, 1), 0, [300, 1, 1, 4096, 1, 1, 2, bits[0.5]]),
        (SERIES, (3, 1, 1, 256, 1, 1), 0, [600, 1, 1, 8192, 2, 3, 4, bits[0.25]]),
        (SERIES, (3, 1, 1, 256, 1, 1), 0, [600, 1, 1, 4096, 1, 3, 4, bits[2.0]]),
    ]
    launched.clear()
    series.compile(until_failed, (1,), (5,))
    series.launch(until_failed, (1,), (5,))
    assert launched == [(FLAGGED, (1, 1, 1, 256, 1, 1), 0, [1, 1, 1, 5, flag.address])]
    with pytest.raises(errors.ArgumentError, match="kernel 'scale': argument 0 is not in device memory"):
        series.launch(scale, (1,), (np.zeros(1), (1, 2), 0.5))


def test_another_series_flattens_no_more_than_arrays(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher(SERIES)
    monkeypatch.setattr(run_cuda, "compiled", lambda kernel, dims, count: dispatcher)
    monkeypatch.setattr(scale, "compiled", {})
    array = DeviceArray(4096, 1)
    flattened: list[Any] = []
    _launch_in_new_series(array)
    prepare = Overload._prepare_args

    def record(self: Overload, kind: Any, value: Any, *lists: Any) -> None:
        flattened.append(value)
        prepare(self, kind, value, *lists)

    monkeypatch.setattr(Overload, "_prepare_args", record)
    _launch_in_new_series(array)
    assert flattened == [array] and launched[0] == launched[1]


def _launch_in_new_series(array: DeviceArray) -> None:
    series = run_cuda.Series(LaunchFlag("cpu"))
    series.compile(scale, (300,), (array, (1, 2), 0.5))
    series.launch(scale, (300,), (array, (1, 2), 0.5))


def test_a_launch_of_words(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher(INTEGERS)
    monkeypatch.setattr(run_cuda, "compiled", lambda kernel, dims, count: dispatcher)
    monkeypatch.setattr(scale, "compiled", {})
    for n in (256, 257):
        run_cuda.launch(scale, n, SimpleNamespace(handle=5), n + 8, -n)
    assert launched == [
        (INTEGERS, (1, 1, 1, 256, 1, 1), 5, [256, 1, 1, 264, -256]),
        (INTEGERS, (2, 1, 1, 256, 1, 1), 5, [257, 1, 1, 265, -257]),
    ]
