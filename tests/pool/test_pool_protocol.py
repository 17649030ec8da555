"""Messages of a pool, code that travels, and waits: no agent, nothing compiled."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu
from warpwell.pool.agent import code, protocol
from warpwell.pool.agent.agent import HANDLER_MODULES
from warpwell.pool.agent.protocol import Op, pack
from warpwell.pool.agent.state import HANDLERS, handles
from warpwell.pool.devices import Devices
from warpwell.pool.transport.milestone import Milestone, limit


def test_operations_have_places_of_their_own() -> None:
    assert len({op.value for op in Op}) == len(Op)
    assert all(op < 32 for op in (Op.ALLOCATE, Op.SYNCHRONIZE))
    assert protocol.WINDOW_CALLS > protocol.ACKNOWLEDGE_CALLS
    assert protocol.WINDOW_BYTES > 2 * protocol.ACKNOWLEDGE_BYTES


numbers = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([np.float32(1.5), np.int8(-3), np.uint64(1 << 63), np.bool_(True), np.float64(0.25)]),
)


@given(st.lists(st.recursive(numbers, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6), max_size=5))
def test_arguments_arrive_as_they_were(values: list[object]) -> None:
    packed = protocol.unpack(protocol.pack(protocol.pack_arguments(values, lambda value: None)))[0]
    found = protocol.unpack_arguments(packed, lambda handle: None)
    assert found == values
    assert [type(v) for v in found] == [type(v) for v in values]


def test_handles_are_resolved_in_tuples_too() -> None:
    handle = object()
    packed = protocol.pack_arguments([(handle, 1), handle], lambda value: 7 if value is handle else None)
    assert protocol.unpack_arguments(packed, lambda handle: f"object {handle}") == [("object 7", 1), "object 7"]


@pytest.mark.parametrize("value", ["text", None, [1], {1: 2}, np.datetime64, object()])
def test_other_arguments_are_refused(value: object) -> None:
    with pytest.raises(errors.ArgumentError, match="cannot be an argument"):
        protocol.pack_arguments([value], lambda value: None)


@pytest.mark.parametrize("dtype", ["<f4", ">i8", "V3", "S5", [("a", "<u2"), ("b", "<f8", (2, 3))], "M8[ns]"])
def test_dtypes_arrive_as_they_were(dtype: object) -> None:
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    packed = protocol.unpack(protocol.pack(protocol.pack_dtype(kind)))[0]
    assert protocol.unpack_dtype(packed) == kind


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise TypeError("no text")


@pytest.mark.parametrize(
    "error", [KeyError("x"), Locked(), Mute(), errors.ArgumentError("no", name="n"), SystemExit(3)]
)
def test_every_failure_can_be_told(error: BaseException) -> None:
    try:
        raise error
    except BaseException as caught:
        packed = protocol.unpack(protocol.pack(protocol.pack_failure(caught)))[0]
    found = protocol.unpack_failure(packed, "launch of 'f'", "device 3")
    assert str(found).startswith("launch of 'f' failed on device 3: " + type(error).__name__)
    assert found.call == "launch of 'f'"
    assert "raise error" in str(found.remote_traceback)
    if isinstance(error, KeyError | errors.ArgumentError):
        assert type(found.__cause__) is type(error) and vars(found.__cause__) == vars(error)


# -- code --------------------------------------------------------------------------------------------------------------

WEIGHTS = np.arange(3)


@gpu.function
def helper(x):
    return x + WEIGHTS[0]


@ww.kernel(max_registers=40)
def uses(x):
    x[gpu.grid(1)] = helper(1)


def test_code_has_a_key_of_its_content() -> None:
    made = code.Code.of(uses)
    assert code.Code.of(uses) is made
    assert code.Code("uses", made.data).key == made.key != code.Code("uses", made.data + b" ").key
    assert code.Code.of(lambda: 1).key != code.Code.of(lambda: 2).key


def test_kernels_arrive_with_their_options_and_helpers() -> None:
    kernel = code.deserialize(code.Code.of(uses).data)
    assert (kernel.max_registers, kernel.block, kernel.__name__) == (40, None, "uses")
    received = kernel.function.__globals__["helper"]
    from warpwell.targets.device import is_device

    assert is_device(received) and is_device(kernel.function)
    changed = code.deserialize(code.Code.of(uses).data, {"WEIGHTS": np.full(3, 9)})
    assert changed.function.__globals__["helper"](1) == 10


class FilesReplaced(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle 3.1.3, in earlier versions, too."""

    def reducer_override(self, value: object) -> object:
        if isinstance(value, types.CodeType) and value.co_filename != "<dynamic-code>":
            return copy.copy, (value.replace(co_filename="<dynamic-code>"),)
        return super().reducer_override(value)


def test_code_arrives_with_the_names_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "cloudpickle", lambda: SimpleNamespace(**{**vars(cloudpickle), "Pickler": FilesReplaced}))
    code._code_pickler.cache_clear()
    try:
        kernel = ww.kernel(uses.function)
        received = code.deserialize(code.Code.of(kernel).data).function
    finally:
        code._code_pickler.cache_clear()
    assert received is not uses.function
    assert {f.__code__.co_filename for f in (received, received.__globals__["helper"])} == {__file__}


def test_cuda_source_arrives_whole() -> None:
    source = ww.CudaSource('extern "C" __global__ void f(float *x) {}', "f", {"x": "float32*"}, options=["-DN=4"])
    received = code.deserialize(code.Code.of(source).data)
    assert (received.code, received.name, received.options) == (source.code, "f", ("-DN=4",))
    assert received.parameters == source.parameters


def test_modules_of_the_user_travel_by_value(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            import warpwell as ww
            FACTOR = 5
            @ww.gpu.function
            def deep(x):
                return x * FACTOR
            @ww.kernel
            def kernel(x):
                x[0] = deep(1)
            class Record:
                def __init__(self, n):
                    self.n = n
            def function(record):
                return Record(deep(record.n)).n
            """)
    )
    send = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mine\n"
        "from warpwell.pool.agent.code import Code, dumps\n"
        "import pathlib\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "for name in ('kernel', 'function'):\n"
        "    (out / name).write_bytes(Code.of(getattr(mine, name)).data)\n"
        "(out / 'record').write_bytes(dumps(mine.Record(4))[0])\n"
    )
    take = (
        "import sys, pathlib\n"
        "from warpwell.pool.agent.code import deserialize, loads\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "print(deserialize((out / 'kernel').read_bytes()).function.__globals__['deep'](2))\n"
        "print(deserialize((out / 'function').read_bytes())(loads((out / 'record').read_bytes())))\n"
        "assert 'mine' not in sys.modules\n"
    )
    for program in (send, take):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=HANG_SECONDS
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "10\n20\n"


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def inner() -> None:
        lock.release()

    def outer() -> None:
        inner()

    with pytest.raises(errors.CodeError, match=r"'outer' cannot be sent to a device: 'lock' \(lock\)"):
        code.Code.of(outer)
    with pytest.raises(errors.CodeError, match="expected a kernel or a function"):
        code.Code.of(3)


def test_objects_of_a_device_become_handles() -> None:
    data, handles = code.dumps({"a": (uses, 1)}, lambda value: 12 if value is uses else None)
    assert handles == (12,)
    assert code.loads(data, ["there"]) == {"a": ("there", 1)}


# -- waits -------------------------------------------------------------------------------------------------------------


def test_milestones_come_once() -> None:
    milestone, values = Milestone(), []
    milestone.when_set(lambda m: values.append(m.value))
    milestone.set(3)
    milestone.set(4)
    milestone.fail(KeyError())
    milestone.when_set(lambda m: values.append(m.value))
    assert values == [3, 3]
    assert milestone.get("it", alive=lambda: None) == 3


def test_waits_end() -> None:
    with pytest.raises(errors.StallError, match=r"waited 0.01 s for a thing"):
        Milestone().wait("a thing", 0.01, lambda: None)

    def end() -> None:
        raise errors.DeviceLostError("gone")

    with pytest.raises(errors.DeviceLostError):
        Milestone().wait("a thing", 60, end)


def test_the_bound_of_waits_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_POOL_STALL", "7")
    assert (limit(), limit(2.0)) == (7.0, 2.0)


def test_each_operation_that_an_agent_receives_has_one_handler() -> None:
    assert set(HANDLERS) == {op for op in Op if op < Op.DONE or op >= Op.SIGNAL} and HANDLER_MODULES
    with pytest.raises(ValueError, match=r"WRITE.*two handlers: write and write"):
        handles(Op.WRITE)(HANDLERS[Op.WRITE])


@pytest.mark.parametrize(("op", "name"), [(77, "77"), (int(Op.DONE), "DONE")])
def test_a_message_without_a_handler_ends_the_agent_and_is_named(op: int, name: str) -> None:
    with Devices(targets=["cpu"]) as found:
        found[0].caller.transport.send(1, pack(op, 0, 0))
        with pytest.raises(errors.DeviceLostError, match=f"no handler for the message {name} of rank 0"):
            found[0].synchronize(60)


@pytest.mark.parametrize("program", ["agent.agent_main", "launch.application"])
def test_a_process_of_a_job_tells_the_launcher_of_itself_before_it_loads_the_compiler(program: str) -> None:
    code = f"import sys, warpwell.pool.{program}; assert not {{'llvmlite', 'numba', 'mpi4py'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
