"""Variables that kernels name: a changed value is compiled again, or refused, on every target."""

import logging
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu
from warpwell.scheduler import Scheduler
from warpwell.targets.compiler.snapshot import Snapshot
from warpwell.targets.kernel import MANY_VERSIONS, Kernel

FACTOR: Any = 5
OFFSET = 0
TABLE = np.array([5, 5])
PAIR: Any = (5, 1)
RECORD = np.array((5, 0.5), [("factor", "i8"), ("rest", "f8")])[()]
conf = types.ModuleType("conf")
conf.FACTOR, conf.inner = 5, types.ModuleType("conf.inner")  # type: ignore[attr-defined]
conf.inner.FACTOR = 5  # type: ignore[attr-defined]


@ww.kernel
def by_global(x, out):
    i = gpu.grid(1)
    out[i] = FACTOR * x[i]


@gpu.function
def times(value):
    return FACTOR * value


@gpu.function
def plus_times(value):
    return times(value) + OFFSET


@ww.kernel
def by_helper(x, out):
    i = gpu.grid(1)
    out[i] = plus_times(x[i])


@ww.kernel
def by_helper_too(x, out):
    i = gpu.grid(1)
    out[i] = plus_times(x[i]) + 0


@ww.kernel
def by_function_argument(x, out):
    i = gpu.grid(1)
    out[i] = gpu.fold(add_times, 0, x, i, i + 1)


@gpu.function
def add_times(total, item):
    return total + FACTOR * item


@ww.kernel
def by_module(x, out):
    i = gpu.grid(1)
    out[i] = conf.FACTOR * x[i]


@ww.kernel
def by_inner_module(x, out):
    i = gpu.grid(1)
    out[i] = conf.inner.FACTOR * x[i]


@ww.kernel
def by_local_module(x, out):
    settings = conf
    i = gpu.grid(1)
    out[i] = settings.FACTOR * x[i]


@ww.kernel
def by_table(x, out):
    i = gpu.grid(1)
    out[i] = TABLE[0] * x[i]


@ww.kernel
def by_pair(x, out):
    i = gpu.grid(1)
    out[i] = PAIR[0] * x[i]


@ww.kernel
def by_record(x, out):
    i = gpu.grid(1)
    out[i] = RECORD["factor"] * x[i]


def enclosing() -> tuple[Kernel, Callable[[int], None]]:
    """Return a kernel with a free variable, and a function that assigns it."""
    factor = 5

    @ww.kernel
    def by_free_variable(x, out):
        i = gpu.grid(1)
        out[i] = factor * x[i]

    def assign(value: int) -> None:
        nonlocal factor
        factor = value

    return by_free_variable, assign


by_free_variable, assign_free = enclosing()


def assign(name: str) -> Callable[[Any], None]:
    return lambda value: globals().__setitem__(name, value)


def redefine(value: int) -> None:
    """Define a helper again, as a cell of a notebook that runs again does."""
    scope = {"ww": ww, "__name__": __name__, "VALUE": value}
    exec(compile("def times(value):\n    return VALUE * value", __file__, "exec"), scope)
    globals()["times"] = gpu.function(scope["times"])


CHANGES: dict[str, tuple[Any, Callable[[int], object]]] = {
    "global": (by_global, assign("FACTOR")),
    "helper": (by_helper, assign("FACTOR")),
    "helper that is defined again": (by_helper, redefine),
    "function argument": (by_function_argument, assign("FACTOR")),
    "module": (by_module, lambda value: setattr(conf, "FACTOR", value)),
    "inner module": (by_inner_module, lambda value: setattr(conf.inner, "FACTOR", value)),
    "module in a local variable": (by_local_module, lambda value: setattr(conf, "FACTOR", value)),
    "array": (by_table, lambda value: TABLE.__setitem__(0, value)),
    "other array": (by_table, lambda value: assign("TABLE")(np.array([value]))),
    "tuple": (by_pair, lambda value: assign("PAIR")((value, 1))),
    "record": (by_record, lambda value: RECORD.__setitem__("factor", value)),
    "free variable": (by_free_variable, assign_free),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    names = "FACTOR", "OFFSET", "TABLE", "PAIR", "times"
    values = {name: globals()[name] for name in names}
    yield
    globals().update(values)
    TABLE[:] = 5
    RECORD["factor"] = conf.FACTOR = conf.inner.FACTOR = 5  # type: ignore[attr-defined]
    assign_free(5)


def result(kernel: Any, device: str, dtype: Any = np.int64) -> Any:
    x, out = np.ones(3, dtype), np.zeros(3, dtype)
    kernel[3](x, out, device=device)
    assert len(set(out.tolist())) == 1
    return out[0].item()


SHARED_CHANGES = {"helper", "module", "inner module", "module in a local variable", "other array"}
"""Changes that need one fast test only: the names of a kernel are resolved by the same code for all targets."""


@pytest.mark.parametrize(
    ("change", "device"),
    [
        pytest.param(change, device, marks=pytest.mark.slow if device == "cpu" and change in SHARED_CHANGES else ())
        for change in CHANGES
        for device in ("cpu", "interp")
    ],
)
def test_a_changed_variable_is_seen_by_the_next_launch(change: str, device: str) -> None:
    kernel, assign = CHANGES[change]
    found = [result(kernel, device)]
    for value in (7, 5):
        assign(value)
        found.append(result(kernel, device))
    assert found == [5, 7, 5]


@pytest.mark.ptx
@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"record"}))  # numba-cuda has no constants of records
def test_a_changed_variable_is_seen_by_the_next_compilation(change: str) -> None:
    from warpwell.targets.compiler.run_cuda import ptx

    def compiled() -> str:
        return ptx(kernel, (np.zeros(3, np.int64), np.zeros(3, np.int64)))

    kernel, assign = CHANGES[change]
    before = compiled()
    assign(918273)
    assert "918273" not in before
    assert "918273" in compiled()


def test_a_value_that_returns_compiles_nothing() -> None:
    results, versions = [], []
    for value in (5, 7, 5.0, 5, 7):
        globals()["FACTOR"] = value
        results.append(result(by_helper, "cpu", np.float64))
        versions.append(by_helper.current())
    assert results == [5, 7, 5, 5, 7]
    assert versions[0] is versions[3] and versions[1] is versions[4]
    assert len({id(version) for version in versions}) == 3  # 5.0 is of another type than 5
    assert all(len(version.compiled["cpu", 2].overloads) <= 2 for version in versions)


def test_equal_values_share_a_version() -> None:
    first = by_table.current()
    globals()["TABLE"] = TABLE.copy()
    assert by_table.current() is first
    assert Snapshot(by_helper.function).function is by_helper.current().function


def test_a_kernel_that_is_compiled_later_has_no_old_helper() -> None:
    """Kernels share the compiled code of helpers."""
    assert result(by_helper, "cpu") == 5
    globals()["FACTOR"] = 7
    assert result(by_helper_too, "cpu") == 7


def test_code_on_disk_has_the_values_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The types of a second launch are compiled after the variable has changed."""
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    kernel = Kernel(by_global.function)
    assert result(kernel, "cpu") == 5
    globals()["FACTOR"] = 7
    assert result(kernel, "cpu", np.float32) == 7
    globals()["FACTOR"] = 5
    later = Kernel(by_global.function)
    assert (result(later, "cpu", np.float32), result(later, "cpu")) == (5, 5)
    (driver,) = later.current().compiled.values()
    assert sum(driver.stats.cache_hits.values()) == 1  # the hit is of the launch with integers


def test_checked_launches_see_changes() -> None:
    kernel = Kernel(by_helper.function, check=True)
    assert result(kernel, "cpu") == 5
    globals()["FACTOR"] = 7
    assert result(kernel, "cpu") == 7


def test_a_task_has_the_values_of_its_submission() -> None:
    x, outs = np.ones(3, np.int64), [np.zeros(3, np.int64) for _ in range(3)]
    launch = by_helper[3]
    with Scheduler("cpu") as scheduler:
        handles = []
        for value, out in zip((5, 7, 5), outs, strict=True):
            globals()["FACTOR"] = value
            handles.append(scheduler.submit(launch, x, out))
        for handle in handles:
            handle.result(HANG_SECONDS)
    assert [out.tolist() for out in outs] == [[5] * 3, [7] * 3, [5] * 3]


@numba.njit
def compiled_by_numba(value):
    return FACTOR * value


@ww.kernel
def by_dispatcher(x, out):
    i = gpu.grid(1)
    out[i] = compiled_by_numba(x[i])


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_a_function_with_a_compiler_of_its_own_is_refused_after_a_change(device: str) -> None:
    assert result(by_dispatcher, device) == 5
    globals()["FACTOR"] = 7
    with pytest.raises(errors.CompileError, match=r"'compiled_by_numba' .*'FACTOR'.*@gpu\.function"):
        result(by_dispatcher, device)
    globals()["FACTOR"] = 5
    assert result(by_dispatcher, device) == 5


def test_unrelated_variables_make_no_version() -> None:
    """Not the attributes of other names, not a name that is local."""
    before = by_module.current()
    conf.size = conf.x = 3  # type: ignore[attr-defined]
    globals()["OFFSET"] = 9
    assert by_module.current() is before


def test_many_versions_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel(by_helper.function)
    with caplog.at_level(logging.WARNING, "warpwell"):
        for value in range(MANY_VERSIONS + 2):
            globals()["OFFSET"] = value
            kernel.current()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "as an argument" in caplog.text


def test_a_kernel_that_names_only_installed_packages_is_compiled_as_it_is() -> None:
    kernel = Kernel(lambda x, out: out.__setitem__(gpu.grid(1), np.sqrt(x[0])))
    assert kernel.current() is kernel
