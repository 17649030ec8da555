"""A service whose device process has a GPU: several processes, a device fault, a stuck kernel, and the command line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.commands import main
from warpwell import errors
from warpwell.scheduler.service.client import Client, connect
from warpwell.scheduler.service.service import Service

BOUND = 60.0

KERNELS = '''
import sys
import numpy as np
import warpwell as ww
from warpwell.scheduler.service.client import connect

@ww.kernel
def double(x):
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] = 2 * x[i]

@ww.kernel
def count(x, rounds):
    """Whole numbers in an order of their own: a block that ran twice, or not, shows."""
    i = ww.gpu.grid(1)
    v = x[i]
    for _ in range(rounds):
        v = (v * 1103515245 + 12345) & 0x7FFFFFFF
    x[i] = v

@ww.kernel
def wild(x, far):
    x[far + ww.gpu.grid(1)] = 1

@ww.kernel
def forever(x):
    while x[0] == 0:
        x[1] += 1

def counted(x, rounds):
    for _ in range(rounds):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
    return x

if __name__ == "__main__":
    path, seed = sys.argv[1], int(sys.argv[2])
    random = np.random.default_rng(seed)
    with connect(path, tenant=f"tenant{seed}") as client:
        jobs = []
        for k in range(4):
            x = random.integers(0, 1 << 31, int(random.integers(1, 300_000)))
            jobs.append((client.submit(count[x.size], x, 100, priority=k), x, counted(x, 100)))
        for handle, x, wanted in jobs:
            handle.result(100)
            assert np.array_equal(x, wanted)
    print("right", flush=True)
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("kernels") / "gpu_service_kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture(scope="module")
def kernels(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location("gpu_service_kernels", script)
    assert spec is not None and spec.loader is not None
    module = sys.modules["gpu_service_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service") / "run" / "s.sock", device="cuda", stuck=4.0) as started:
        yield started


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    found = connect(service.path, timeout=30.0)
    yield found
    found.close(cancel=True)


@pytest.mark.timeout(200)
def test_several_processes_submit(service: Service, script: Path) -> None:
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), str(service.path), str(seed)], stdout=subprocess.PIPE, text=True
                )
            )
            for seed in range(3)
        ]
        for process in processes:
            out, _ = process.communicate(timeout=150)
            assert process.returncode == 0 and out == "right\n"


def test_arrays_that_stay_on_the_device(client: Client, kernels: Any) -> None:
    x = np.arange(1000)
    array = client.to_device(x)
    client.submit_many([(kernels.double[1000], a) for a in (array, array, x)]).result(BOUND)
    assert np.array_equal(array.numpy(), 4 * np.arange(1000)) and np.array_equal(x, 2 * np.arange(1000))


@pytest.mark.timeout(200)
def test_a_device_fault_restarts_and_others_run_again(service: Service, client: Client, kernels: Any) -> None:
    array = client.to_device(np.arange(10))
    before = client.status()
    with connect(service.path, tenant="other", timeout=30.0) as second_client:
        x = np.arange(1 << 20)
        expected = kernels.counted(x, 1000)
        handle = second_client.submit(kernels.count[x.size], x, 1000)
        wild = client.submit(kernels.wild[1], np.zeros(4, np.int64), 1 << 44)
        with pytest.raises(errors.SchedulerError, match="wild"):
            wild.result(BOUND)
        handle.result(BOUND)
        assert np.array_equal(x, expected)
    assert client.status()["owner_restarts"] > before["owner_restarts"]
    with pytest.raises(errors.TaskLostError, match="to_device"):
        array.numpy()
    y = np.arange(10)
    client.submit(kernels.double[10], y).result(BOUND)
    assert np.array_equal(y, 2 * np.arange(10))


@pytest.mark.timeout(200)
def test_a_stuck_kernel_is_ended(service: Service, client: Client, kernels: Any) -> None:
    stuck = client.submit(kernels.forever[1], np.zeros(4, np.int64))
    with pytest.raises(errors.StallError):
        stuck.result(BOUND)
    y = np.arange(10)
    client.submit(kernels.double[10], y).result(BOUND)
    assert np.array_equal(y, 2 * np.arange(10))


@pytest.mark.timeout(200)
def test_policies_are_compared_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        [
            "sched",
            "run",
            "--device",
            "cuda",
            "--policy",
            "left-over,source,lanes",
            "--workload",
            "gemm:512,triad:1000000,atax:2048",
            "--repeat",
            "3",
            "--json",
        ]
    )
    values = json.loads(capsys.readouterr().out)
    assert code == 0 and values["results"] == "equal to NumPy's"
    assert {m["failed"] for m in values["policies"].values()} == {0}
