"""Functions and graphs as tasks of a scheduler, mixed with kernels."""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from lab.testing.fake_gpu import FakeGpu
from warpwell import errors, gpu
from warpwell.scheduler import Scheduler
from warpwell.scheduler.callables import Call, as_launch
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.predict.identity import identity
from warpwell.scheduler.task import State


@ww.kernel
def double(x):
    i = gpu.grid(1)
    x[i] = 2 * x[i]


def on_gpu() -> CudaExecutor:
    return CudaExecutor(gpu=FakeGpu())


@pytest.fixture(params=[None, on_gpu], ids=["cpu", "fake GPU"])
def scheduler(request: pytest.FixtureRequest) -> Any:
    with Scheduler("cpu", executor=request.param) as made:
        yield made


def test_functions_run_once_between_kernels_in_their_order(scheduler: Scheduler) -> None:
    x, threads = np.ones(1000), []

    def add(stream: Any, array: Any, value: float) -> None:
        assert stream is None
        threads.append(threading.current_thread())
        array += value

    handles = scheduler.submit_many([(double[1000], x), (add, x, 1.0), (double[1000], x), (add, x, 1.0)]).handles
    for handle in handles:
        handle.result(HANG_SECONDS)
    assert (x == 7).all()
    assert len(threads) == 2 and threading.main_thread() not in threads
    assert handles[1].name == "add" and handles[1].task.blocks == 1
    launches = [event for event in scheduler.log if event.kind == "launch" and event.task == handles[1].task.number]
    assert [event.why["whole"] for event in launches] == [handles[1].task.whole]
    assert "not a kernel of Warpwell" in handles[1].task.whole


def test_a_function_that_has_run_is_let_go_with_what_it_encloses() -> None:
    with Scheduler("cpu") as scheduler:
        batch = np.ones(10)
        reference = weakref.ref(batch)

        def step(stream: Any, batch: Any = batch) -> None:
            batch += 1

        scheduler.submit(step).result(HANG_SECONDS)
        del step, batch
        until(lambda: gc.collect() >= 0 and reference() is None)


def test_what_a_function_raises_is_its_tasks_failure() -> None:
    def fails(stream: Any) -> None:
        raise ZeroDivisionError("mine")

    x = np.ones(10)
    with Scheduler("cpu") as scheduler:
        first, second = scheduler.submit_many([(fails,), (double[10], x)]).handles
        with pytest.raises(ZeroDivisionError, match="mine"):
            first.result(HANG_SECONDS)
        with pytest.raises(CancelledError):
            second.result(HANG_SECONDS)
        scheduler.submit(double[10], x).result(HANG_SECONDS)
        assert first.state is State.FAILED and scheduler.failure is None
    assert (x == 2).all()


def test_a_function_is_measured_and_known_again() -> None:
    def work(stream: Any) -> None:
        threading.Event().wait(0.02)

    class Model:
        def forward(self, stream: Any) -> None:
            work(stream)

    first_model, second_model = Model(), Model()
    with Scheduler("cpu") as scheduler:
        for function in (work, first_model.forward, second_model.forward):
            for _ in range(2):
                scheduler.submit(function).result(HANG_SECONDS)
            again = scheduler.submit(function)
            again.result(HANG_SECONDS)
            assert again.task.profile.source == "measured"
            assert 0.015 < (again.task.profile.seconds or 0)
    names = [
        identity(Call(function, None, ()), ())
        for function in (work, first_model.forward, first_model.forward, second_model.forward)
    ]
    assert names[1] == names[2] and len(set(names)) == 3


def test_each_function_of_a_module_or_an_object_is_known_by_itself() -> None:
    class Model:
        def step(self, stream: object) -> None: ...
        def other(self, stream: object) -> None: ...

    def kernel_of(function: Any) -> Any:
        return as_launch(function, ())[0].kernel

    first, second = Model(), Model()
    kinds = (
        (lambda: operator.add),
        (lambda: operator.mul),
        (lambda: first.step),
        (lambda: first.other),
        (lambda: second.step),
    )
    assert all(kernel_of(function()) is kernel_of(function()) for function in kinds)
    assert len({id(kernel_of(function())) for function in kinds}) == len(kinds)


def test_what_is_no_launch_is_refused() -> None:
    with Scheduler("cpu") as scheduler:
        for wrong in (double, 3, "text", None, Scheduler):
            with pytest.raises(errors.ArgumentError, match="pass kernel"):
                scheduler.submit(wrong)


class Stream:
    handle = 77


def test_functions_get_the_drivers_stream_and_arrays_count_as_memory() -> None:
    class OnDevice:
        nbytes, dtype, ndim = 800, np.dtype("f8"), 1
        __cuda_array_interface__ = {"shape": (100,), "typestr": "<f8", "data": (1, False), "version": 3}  # noqa: RUF012

    class Gradient:
        nbytes, dtype = 800, np.dtype("f8")

        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("requires grad")

    calls: list[Any] = []
    array, gradient = OnDevice(), Gradient()
    call, arrays = as_launch(lambda *args: calls.append(args), (array, 2, gradient, np.ones(3)))
    assert arrays == (array,)
    cut = call.cut(arrays, "cuda")
    assert not cut.preemptible and cut.args == (array,)
    cut.forms().start_plain(Stream())
    cut.end()
    assert calls[0][:3] == (77, array, 2)


def test_what_enqueuing_raises_comes_out_at_the_end() -> None:
    def fails(stream: int) -> None:
        raise KeyError(stream)

    call, _ = as_launch(fails, ())
    cut = call.cut((), "cuda")
    cut.begin()
    cut.forms().start_plain(Stream())
    with pytest.raises(KeyError, match="77"):
        cut.end()


def graph_of(module: str, name: str, **inside: Any) -> Any:
    made = type(name, (), {"__module__": module, **inside})()
    return made


def test_graphs_are_launched_as_their_library_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Library:
        """Stands for torch and cupy."""

        class cuda:
            class ExternalStream(int):
                pass

            class Stream:
                pass

            @staticmethod
            def stream(stream: int) -> Any:
                calls.append(("in", stream))
                return threading.Lock()

    class Driver:
        status = 0

        def cuGraphLaunch(self, graph: int, stream: int) -> int:
            calls.append((graph, stream))
            return self.status

    made = Driver()
    monkeypatch.setattr("warpwell.scheduler.callables.driver", lambda: made)
    monkeypatch.setitem(__import__("sys").modules, "torch", Library)
    monkeypatch.setitem(__import__("sys").modules, "cupy", Library)

    def run(graph: Any) -> list[Any]:
        calls.clear()
        cut = as_launch(graph, ())[0].cut((), "cuda")
        cut.forms().start_plain(Stream())
        cut.end()
        return list(calls)

    replay = graph_of("torch.cuda.graphs", "CUDAGraph", replay=lambda self: calls.append("replay"))
    assert run(replay) == [("in", 77), "replay"]
    assert run(graph_of("cupy.cuda.graph", "Graph", launch=lambda self, stream: calls.append(stream))) == [77]
    newer = staticmethod(lambda stream: ("external", *stream.__cuda_stream__()))
    monkeypatch.setattr(Library.cuda.Stream, "from_external", newer, raising=False)
    assert run(graph_of("cupy.cuda.graph", "Graph", launch=lambda self, stream: calls.append(stream))) == [
        ("external", 0, 77)
    ]
    raw = graph_of("cuda.bindings.driver", "CUgraphExec", __int__=lambda self: 5)
    assert run(raw) == [(5, 77)]
    assert run(graph_of("cuda.core._graph", "Graph", handle=raw)) == [(5, 77)]
    made.status = 400
    with pytest.raises(errors.SchedulerError, match="status 400"):
        run(raw)
    with Scheduler("cpu") as scheduler:
        with pytest.raises(errors.ArgumentError, match="needs a GPU"):
            scheduler.submit(raw)
        with pytest.raises(errors.ArgumentError, match="because they were captured"):
            scheduler.submit(raw, 3)
