"""Memory of a client that the owner of a service uses in place; a fake driver lends it (`tests/harness/fake_ipc`)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.fake_ipc import GPU, FakeIpc
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors
from warpwell.array.device_array import DeviceArray
from warpwell.scheduler import Scheduler
from warpwell.scheduler.service import client as client_module
from warpwell.scheduler.service import ipc, references, wire
from warpwell.scheduler.service.client import Client, Packer, connect
from warpwell.scheduler.service.owner import _RequestArrays
from warpwell.scheduler.service.service import Service

BOUND = HANG_SECONDS
ROOT = Path(__file__).parents[2]

KERNELS = """
import sys, time
from pathlib import Path
import numpy as np
import warpwell as ww

@ww.kernel
def add(x, y):
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] += y[i]

@ww.kernel
def mix(x, rounds):
    i = ww.gpu.grid(1)
    v = x[i]
    for k in range(rounds):
        v = v * 6364136223846793005 + 1442695040888963407
    x[i] = v

@ww.kernel
def held(x, gate):
    i = 0
    while gate[0] == 0:  # the stores force a new load each time
        i += 1
        x[i & 3] = i & 7

if __name__ == "__main__":
    from tests.harness.fake_ipc import GPU, FakeIpc
    from warpwell.scheduler.service import client
    from warpwell.scheduler.service import ipc
    fake = FakeIpc(Path(sys.argv[2]))
    ipc.driver, client.device_name = lambda: fake, lambda _: GPU
    found = client.connect(sys.argv[1], tenant="killed")
    handle = found.submit(mix[64 * 256], fake.array(np.arange(64 * 256)), 3_000_000)
    while not handle.running() and not handle.done():
        time.sleep(0.01)
    print("running", flush=True)
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import importlib.util

    path = tmp_path_factory.mktemp("kernels") / "lent_kernels.py"
    path.write_text(KERNELS)
    spec = importlib.util.spec_from_file_location("lent_kernels", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["lent_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def owner(folder: Path) -> tuple[str, ...]:
    """Return the command of an owner with a fake driver."""
    return sys.executable, str(ROOT / "tests" / "harness" / "fake_ipc.py"), str(folder)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("lent")
    with Service(folder / "run" / "s.sock", device="cpu", command=owner(folder)) as made:
        yield made


@pytest.fixture
def gpu(service: Service, monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    fake = FakeIpc(service.path.parents[1])
    monkeypatch.setattr(ipc, "driver", lambda: fake)
    monkeypatch.setattr(client_module, "device_name", lambda _: GPU)
    return fake


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with connect(service.path, timeout=BOUND) as found:
        yield found


def owners_log(service: Service) -> list[str]:
    pid = service.broker.status()["owner_pid"]
    path = service.path.parents[1] / f"log-{pid}"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def all_closed(service: Service) -> bool:
    log = [line.split() for line in owners_log(service)]
    opens, closes = (sorted(n for kind, *n in log if kind == what) for what in ("open", "close"))
    return opens == closes


def dlpack_alone(array: Any, where: tuple[int, int] = (2, 0)) -> Any:
    """Return an array that says by DLPack alone where it lies."""
    made = DeviceArray(array, array.shape, array.dtype) if where[0] == 2 else array

    class Alone:
        def __dlpack__(self, stream: Any = None) -> Any:
            return made.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return where

    return Alone()


def test_a_kernel_works_in_memory_of_the_client(service: Service, client: Client, gpu: FakeIpc, kernels: Any) -> None:
    x = gpu.array(np.arange(1000), before=4096, after=512)
    y, mine = x[200:300], np.ones(100, np.int64)
    before = len(owners_log(service))
    client.submit(kernels.add[100], x[:100], y).result(BOUND)  # one allocation, opened once
    wanted = np.arange(1000)
    wanted[:100] += wanted[200:300]
    assert np.array_equal(x.numpy(), wanted)
    client.submit(kernels.add[100], y, mine).result(BOUND)  # and arrays of the host beside it
    client.submit(kernels.add[100], mine, y).result(BOUND)
    wanted[200:300] += 1
    assert np.array_equal(x.numpy(), wanted) and np.array_equal(mine, wanted[200:300] + 1)
    client.submit_many([(kernels.add[100], a, a) for a in (y, dlpack_alone(y), y)])[-1].result(BOUND)
    wanted[200:300] *= 8
    assert np.array_equal(x.numpy(), wanted)
    until(lambda: all_closed(service))
    log = [line.split()[0] for line in owners_log(service)[before:]]
    assert log == ["open", "close"] * (len(log) // 2) and 1 <= len(log) // 2 <= 4  # what is used again may stay open
    assert client.status()["held_bytes"] == 0


def test_what_was_given_to_the_gpu_before_is_done(
    client: Client, gpu: FakeIpc, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []
    ask = client._ask
    monkeypatch.setattr(client, "_ask", lambda header, *a: (sent.append(gpu.log[:]), ask(header, *a))[1])
    x = gpu.array(np.arange(4))
    client.submit(kernels.add[4], x, x).result(BOUND)
    assert sent == [["synchronize"]]


def test_memory_is_kept_until_its_task_has_ended(client: Client, gpu: FakeIpc, kernels: Any) -> None:
    x, gate = gpu.array(np.arange(4)), gpu.array(np.zeros(1, np.int64))
    there = weakref.ref(x)
    handle = client.submit(kernels.held[1], x, gate)
    del x
    gc.collect()
    assert not handle.done() and there() is not None
    gate[0] = 1
    handle.result(BOUND)
    until(lambda: gc.collect() is not None and there() is None)  # the owner has closed it


def test_an_end_is_told_before_memory_is_closed(service: Service, client: Client, gpu: FakeIpc, kernels: Any) -> None:
    """Closing waits for all that runs on the GPU, which may be long: it holds up no end and no other memory."""
    x, y = gpu.array(np.arange(8)), gpu.array(np.arange(8))
    there, runs = weakref.ref(x), gpu.folder / f"runs-{gpu.name_of(x)}"
    runs.touch()
    try:
        client.submit(kernels.add[8], x, x).result(BOUND)
        client.submit(kernels.add[8], y, y).result(BOUND)
        assert np.array_equal(x.numpy(), 2 * np.arange(8))
        again = client.submit(kernels.add[8], x, x)  # the driver opens an allocation once: this one waits
        del x
        gc.collect()
        assert there() is not None and not again.done()  # who frees what is open elsewhere has undefined behaviour
    finally:
        runs.unlink()
    again.result(BOUND)
    until(lambda: gc.collect() is not None and there() is None and all_closed(service))
    assert not client._open


def test_memory_that_cannot_be_closed_keeps_no_other_open() -> None:
    closed: list[bytes] = []

    class Memory:
        def close(self, handle: bytes) -> None:
            closed.append(handle)
            if handle == b"bad":
                raise errors.DeviceNotFoundError("the driver does not answer")

    request = _RequestArrays([], [], set(), Memory())  # type: ignore[arg-type]
    request.borrowed += [b"bad", b"good"]
    with pytest.raises(errors.DeviceNotFoundError):
        request.close()
    assert set(closed) == {b"bad", b"good"}


def test_memory_of_a_task_that_nobody_tells_of_is_kept(
    service: Service, gpu: FakeIpc, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []
    monkeypatch.setattr(client_module, "_left", left)
    found = connect(service.path)
    x, y, *gates = (gpu.array(np.zeros(4, np.int64)) for _ in range(4))
    found.submit(kernels.held[1], x, gates[0])
    found.close(cancel=True)  # it may still be written to
    assert x in [kept[0] for kept in left]
    found = connect(service.path)

    def interrupted(reply: Any) -> None:
        reply.result()
        raise KeyboardInterrupt

    monkeypatch.setattr(found, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.submit(kernels.held[1], y, gates[1])
    assert y in [kept[0] for kept in left]
    found.close(cancel=True)
    for gate in gates:
        gate[0] = 1
    until(lambda: all_closed(service))


def test_memory_that_cannot_be_lent(
    service: Service, client: Client, gpu: FakeIpc, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = gpu.array(np.arange(8))
    pool = gpu.array(np.arange(8), lendable=False)
    with pytest.raises(errors.ArgumentError, match="PYTORCH_CUDA_ALLOC_CONF"):
        client.submit(kernels.add[8], pool, good)
    good.shape = (9,)
    with pytest.raises(errors.ArgumentError, match="72 bytes ends beyond its allocation of 64"):
        client.submit(kernels.add[8], good, good)
    good.shape = (8,)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "cuCtxSynchronize", lambda: 700)
        with pytest.raises(errors.ArgumentError, match="status 700"):
            client.submit(kernels.add[8], good, good)
    with monkeypatch.context() as patch:
        patch.setattr(client_module, "device_name", lambda _: "gpu-other")
        with pytest.raises(errors.ArgumentError, match="another device than the service's"):
            client.submit(kernels.add[8], good, good)
    with pytest.raises(errors.ArgumentError, match="the CPU"):
        Packer().launch(kernels.add[8], [good, good])
    good.dtype = np.dtype("M8[s]")
    with pytest.raises(errors.DTypeError, match="do not travel"):
        client.submit(kernels.add[8], good, good)
    assert client.status()["requests"] == 0


def test_made_up_handles_fail_alone(service: Service, client: Client, gpu: FakeIpc, kernels: Any) -> None:
    x = gpu.array(np.arange(8), before=64)
    real = ipc.lend(x.address, 64).handle.hex()
    lent = {"handle": real, "offset": 64, "dtype": "<i8", "shape": [8]}
    task = {"kernel": references.reference(kernels.add), "shape": [8], "arguments": [["lent", 0], ["lent", 0]]}

    def send(**changes: Any) -> Any:
        header = {"type": "submit", "tasks": [task], "lent": [{**lent, **changes}]}
        found = client_module.ServiceHandle(client, "add", Packer())
        client._answer(client._ask(header, handles=[found]))
        return found.exception(BOUND)

    assert send() is None
    assert "cannot be opened" in str(send(handle="ab" * 64))
    for beyond in ({"shape": [9]}, {"offset": 72}, {"offset": 1 << 40}, {"shape": [3, 3]}, {"dtype": "<c16"}):
        assert "is not in memory of 128 bytes that was lent" in str(send(**beyond))
    assert send() is None and np.array_equal(x.numpy(), 4 * np.arange(8))
    until(lambda: all_closed(service))


@pytest.mark.parametrize(
    "change",
    [
        {"handle": "ab"},
        {"handle": "zz" * 64},
        {"handle": 3},
        {"handle": "ab" * 65},
        {"offset": -1},
        {"offset": 1 << 48},
        {"offset": 0.5},
        {"offset": True},
        {"offset": 6},
        {"dtype": "|O"},
        {"dtype": "<U2"},
        {"dtype": 7},
        {"shape": []},
        {"shape": [0]},
        {"shape": [-1, -1]},
        {"shape": [1 << 30, 1 << 30]},
        {"shape": [True]},
        {"shape": [1] * 33},
        {"shape": "8"},
    ],
)
def test_lent_arrays_that_are_none(change: dict[str, Any]) -> None:
    good = {"handle": "ab" * 64, "offset": 8, "dtype": "<f4", "shape": [2, 3]}
    assert wire.check_lent([good]) == [good] and wire.lent_bytes(good) == 24
    for wrong in ([{**good, **change}], [good, 3], [good] * 1025):
        with pytest.raises(errors.ServiceError):
            wire.check_lent(wrong)
    task = {"shape": [8], "arguments": [["lent", 1]], "kernel": {"module": "m", "name": "k", "sha256": ""}}
    assert wire.check_task(task, [], 2)
    with pytest.raises(errors.ServiceError):
        wire.check_task(task, [], 1)


def test_a_client_that_is_killed_while_its_memory_is_written_to(
    service: Service, client: Client, gpu: FakeIpc, kernels: Any
) -> None:
    before = client.status()["owner_restarts"]
    command = [sys.executable, kernels.__file__, str(service.path), str(gpu.folder)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        process.kill()
    until(lambda: client.status()["requests"] == 0)
    until(lambda: all_closed(service))
    x = gpu.array(np.arange(8))
    client.submit(kernels.add[8], x, x).result(BOUND)
    assert np.array_equal(x.numpy(), 2 * np.arange(8)) and client.status()["owner_restarts"] == before


def test_tasks_on_lent_memory_do_not_run_twice(service: Service, client: Client, gpu: FakeIpc, kernels: Any) -> None:
    x, y, here = gpu.array(np.arange(16384)), gpu.array(np.arange(16384)), np.arange(16384)
    owner = client.status()["owner_pid"]
    first = client.submit(kernels.mix[16384], x, 5_000_000)
    until(first.running)
    other = client.submit(kernels.mix[16384], here, 200_000)
    waits = client.submit(kernels.add[16384], y, y, after=other)  # at the service, so it has changed nothing
    os.kill(owner, signal.SIGKILL)
    with pytest.raises(errors.TaskLostError, match="may have changed memory of your process"):
        first.result(BOUND)
    other.result(BOUND)
    waits.result(BOUND)
    assert np.array_equal(y.numpy(), 2 * np.arange(16384))


@pytest.mark.slow
def test_memory_is_not_closed_under_a_kernel_that_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Any
) -> None:
    gpu = FakeIpc(tmp_path)
    monkeypatch.setattr(ipc, "driver", lambda: gpu)
    monkeypatch.setattr(client_module, "device_name", lambda _: GPU)
    x, gate = gpu.array(np.zeros(4, np.int64)), gpu.array(np.zeros(1, np.int64))
    with Service(tmp_path / "run" / "s.sock", device="cpu", command=owner(tmp_path), stuck=2.0) as service:
        with connect(service.path, timeout=BOUND) as client:
            with pytest.raises(errors.StallError):  # and not the loss of a process that met no memory
                client.submit(kernels.held[1], x, gate).result(BOUND)
            logs = [path.read_text() for path in gpu.folder.glob("log-*")]
            assert sum(f"open {gpu.name_of(x)}" in log for log in logs) == 1
            assert not any(f"close {gpu.name_of(x)}" in log for log in logs)
            x = gpu.array(np.arange(8))
            client.submit(kernels.add[8], x, x).result(BOUND)
            assert np.array_equal(x.numpy(), 2 * np.arange(8))


@ww.kernel
def double(x: Any) -> None:
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] = 2 * x[i]


def test_arrays_with_dlpack_alone_are_arguments_in_one_process(gpu: FakeIpc) -> None:
    x = np.arange(1000.0)
    with Scheduler("cpu") as scheduler:
        scheduler.submit(double[1000], dlpack_alone(x, (1, 0))).result(BOUND)
        assert np.array_equal(x, 2 * np.arange(1000.0))
        with pytest.raises(errors.ArgumentError, match="argument 0 is in the memory of a GPU"):
            scheduler.submit(double[8], dlpack_alone(gpu.array(np.arange(8))))
        with pytest.raises(errors.ArgumentError, match="make it contiguous"):
            scheduler.submit(double[8], dlpack_alone(x[::2], (1, 0)))
