"""A service with a device process on the CPU: several clients, and deaths of processes during tasks."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

from warpwell import errors
from warpwell.scheduler.scheduler import Scheduler
from warpwell.scheduler.service import references
from warpwell.scheduler.service.client import Client, connect
from warpwell.scheduler.service.service import Service

INPUT = np.arange(64 * 256)
INPUT.flags.writeable = False

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
def mix(x, y, rounds):
    """A block that ran twice, or never, changes the result."""
    i = ww.gpu.grid(1)
    if i < x.size:
        v = x[i]
        for k in range(rounds):
            v = v * 6364136223846793005 + 1442695040888963407
        y[i] = y[i] * 3 + v

@ww.kernel
def wild(x, far):
    x[far + ww.gpu.grid(1)] = 1

@ww.kernel
def wrong(x):
    x[ww.gpu.grid(1)] = "a" + ww.gpu.grid(1)

@ww.kernel
def forever(x):
    while x[0] == 0:
        x[1] += 1

none = 3

def mixed(x, y, rounds):
    """Return the result of `mix`: all rounds together are one multiplication and one addition."""
    factor, term, a, c = 1, 0, 6364136223846793005, 1442695040888963407
    while rounds:
        if rounds % 2:
            factor, term = factor * a, term * a + c
        a, c, rounds = a * a % 2**64, (a * c + c) % 2**64, rounds // 2
    factor, term = np.array([factor % 2**64, term % 2**64], np.uint64)
    return y * 3 + (x.view(np.uint64) * factor + term).view(np.int64)

if __name__ == "__main__":
    path, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    random = np.random.default_rng(seed)
    with connect(path, tenant=f"tenant{seed}") as client:
        jobs = []
        for k in range(5):
            n = int(random.integers(1, 3000))
            x, y = random.integers(-9, 9, n), random.integers(-9, 9, n)
            wanted = mixed(x, y, rounds), 2 * x
            first = client.submit(mix[n], x.copy(), y, rounds, priority=k)
            jobs.append((first, client.submit(double[n], x), x, y, wanted))
        print("submitted", flush=True)
        for first, second, x, y, (mixed_y, doubled) in jobs:
            first.result(100)
            second.result(100)
            assert np.array_equal(y, mixed_y) and np.array_equal(x, doubled)
    print("right", flush=True)
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("kernels") / "service_kernels.py"
    path.write_text(KERNELS)
    return path


def imported(name: str, path: Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels(script: Path) -> Any:
    return imported("service_kernels", script)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("service") / "run" / "s.sock", device="cpu")
    with made as started:
        yield started
        process = started.process
    assert process is not None and process.poll() is not None


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    found = connect(service.path, timeout=HANG_SECONDS)
    yield found
    found.close(cancel=True)


def long_task(client: Client, kernels: Any, seconds: float = 1.5, x: Any = INPUT) -> tuple[Any, Any, Any]:
    """Submit a task of many blocks that takes about `seconds`, and wait until it runs."""
    y = np.zeros(x.size, np.int64)
    rounds = int(seconds * 30_000)
    expected = kernels.mixed(x, y, rounds)
    handle = client.submit(kernels.mix[x.size], x, y, rounds)
    until(lambda: handle.running() or handle.done())
    return handle, y, expected


def launches(client: Client) -> int:
    return sum(e.kind == "launch" and e.name == "mix" for e in client.log())


def caught_task(client: Client, kernels: Any, x: Any = INPUT) -> tuple[Any, Any, Any, int]:
    """Stop the device process in the middle of a task, on any machine; return its process number, too."""
    for seconds in (1.5, 6.0, 24.0):
        before = launches(client)
        handle, y, expected = long_task(client, kernels, seconds, x)
        until(lambda: launches(client) > before)
        pid = client.status()["owner_pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)  # Results that it had sent before have arrived.
        if not handle.done():
            return handle, y, expected, pid
        os.kill(pid, signal.SIGCONT)
    raise AssertionError("every task ended before its device process could be stopped")


def test_an_error_names_the_file_of_the_client(client: Client, kernels: Any, script: Path) -> None:
    with pytest.raises(errors.CompileError) as raised:
        client.submit(kernels.wrong[8], np.zeros(8)).result(HANG_SECONDS)
    assert f"({script}, line " in str(raised.value)
    (event,) = [e for e in client.log() if e.kind == "fail" and e.name == "wrong"]
    assert f"({script}, line " in event.why["error"]


def test_several_processes_submit(service: Service, script: Path) -> None:
    command = [sys.executable, str(script), str(service.path)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen([*command, str(seed), "2000"], stdout=subprocess.PIPE, text=True))
            for seed in range(3)
        ]
        for process in processes:
            out, _ = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 0 and out.splitlines() == ["submitted", "right"]
    with connect(service.path, timeout=HANG_SECONDS) as client:
        text, status = client.metrics(), client.status()
    for seed in range(3):
        assert f'warpwell_tasks_ended_total{{outcome="done",policy="lanes",tenant="tenant{seed}"}} 10' in text
    assert status["requests"] == 0


def test_arrays_that_stay_on_the_device_and_requests_in_order(client: Client, kernels: Any) -> None:
    x = np.arange(1000)
    on_device = client.to_device(x)
    client.submit_many([(kernels.double[1000], a) for a in (on_device, on_device, x)]).result(HANG_SECONDS)
    assert np.array_equal(on_device.numpy(), 4 * np.arange(1000)) and np.array_equal(x, 2 * np.arange(1000))


def test_clients_that_are_gone_leave_no_threads(service: Service) -> None:
    threads = Path(f"/proc/{service.properties['owner_pid']}/task")
    before = len(list(threads.iterdir()))
    for k in range(24):
        with connect(service.path, tenant=f"one of many {k}", timeout=HANG_SECONDS) as client:
            client.to_device(np.arange(3))
    until(lambda: len(list(threads.iterdir())) <= before + 1)


def test_a_task_that_cannot_be_fails_alone(client: Client, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(10)
    named = references.reference(kernels.double)
    with monkeypatch.context() as patch:
        patch.setattr(references, "reference", lambda _: {**named, "name": "none"})
        missing = client.submit(kernels.double[10], x)
        patch.setattr(references, "reference", lambda _: {**named, "sha256": "0" * 64})
        changed = client.submit(kernels.double[10], x)
    with pytest.raises(errors.SchedulerError, match="is not a kernel"):
        missing.result(HANG_SECONDS)
    with pytest.raises(errors.SchedulerError, match="has changed since your program read it"):
        changed.result(HANG_SECONDS)
    bad = client.submit(kernels.double[10], 1.5)  # a number has no size
    good = client.submit(kernels.double[10], x)
    assert good.result(HANG_SECONDS) is None and np.array_equal(x, 2 * np.arange(10))
    with pytest.raises(errors.CompileError, match="size"):
        bad.result(HANG_SECONDS)
    huge = client.submit(kernels.double[10], x, memory=1 << 60)
    with pytest.raises(errors.TaskMemoryError, match="make it smaller"):
        huge.result(HANG_SECONDS)


def test_what_a_client_only_reads_no_kernel_writes_to(client: Client, kernels: Any) -> None:
    x = np.arange(10)
    x.flags.writeable = False
    with Scheduler("cpu") as local, pytest.raises(errors.CompileError, match="Cannot modify readonly array"):
        local.submit(kernels.double[10], x).result(HANG_SECONDS)
    with pytest.raises(errors.CompileError, match="Cannot modify readonly array"):
        client.submit(kernels.double[10], x).result(HANG_SECONDS)
    y = np.zeros(10, np.int64)
    assert client.submit(kernels.mix[10], x, y, 1).result(HANG_SECONDS) is None
    assert np.array_equal(y, kernels.mixed(x, np.zeros(10, np.int64), 1))


def test_an_import_that_takes_long_holds_up_its_own_client_alone(
    service: Service, client: Client, kernels: Any, tmp_path: Path
) -> None:
    path, gate, count = tmp_path / "slow.py", tmp_path / "gate", tmp_path / "count"
    path.write_text(f"""
import time, pathlib, warpwell as ww
from warpwell.scheduler.service import references
if references.in_device_process:
    with open({str(count)!r}, "a") as stream:
        stream.write("x")
    while not pathlib.Path({str(gate)!r}).exists():
        time.sleep(0.01)
@ww.kernel
def k(x):
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] += 1
@ww.kernel
def other(x):
    i = ww.gpu.grid(1)
    if i < x.size:
        x[i] *= 3
""")
    slow, arrays = imported("slow", path), [np.arange(10) for _ in range(4)]
    with (
        connect(service.path, tenant="slow", timeout=HANG_SECONDS) as first_client,
        connect(service.path, tenant="x") as two,
    ):
        first = first_client.submit(slow.k[10], arrays[0])
        second = first_client.submit(slow.other[10], arrays[3], after=first)
        third = first_client.submit(kernels.double[10], arrays[1])  # runs after `second`, in the order of submission
        same = two.submit(slow.k[10], arrays[2])
        until(count.exists)
        x = np.arange(10)
        for _ in range(3):
            client.submit(kernels.double[10], x).result(HANG_SECONDS)
        on_device = client.to_device(x)
        assert on_device.numpy()[3] == 24 and not any(h.done() for h in (first, second, third, same))
        assert first.state.value == "waiting"
        gate.write_text("")
        for handle in (first, second, third, same):
            handle.result(HANG_SECONDS)
    assert arrays[0][1] == 2 and arrays[3][1] == 3
    assert arrays[1][3] == 6 and arrays[2][3] == 4 and count.read_text() == "x"


def test_what_stays_on_the_device_counts_for_its_tenant(tmp_path: Path, kernels: Any) -> None:
    settings = {"a": {"memory": 9000}, "b": 1}
    with (
        Service(tmp_path / "run" / "s.sock", device="cpu", tenants=settings) as service,
        connect(service.path, tenant="a", timeout=HANG_SECONDS) as first_client,
        connect(service.path, tenant="b", timeout=HANG_SECONDS) as two,
    ):
        first = first_client.to_device(np.arange(1000))
        for _ in range(2):
            with pytest.raises(errors.TaskMemoryError, match="tenant 'a' may have 1000 more bytes"):
                first_client.to_device(np.arange(200))
        first_client.submit(kernels.double[1000], first).result(HANG_SECONDS)  # counted once
        with pytest.raises(errors.TaskMemoryError, match="its tenant may hold 9000"):
            first_client.submit(kernels.double[2000], np.arange(2000), memory=0).result(HANG_SECONDS)
        two.submit(kernels.double[2000], np.arange(2000)).result(HANG_SECONDS)
        first.free()
        second = None
        while second is None:  # The service counts the bytes as free when it deletes the array.
            with contextlib.suppress(errors.TaskMemoryError):
                second = first_client.to_device(np.arange(1000))
        assert second.numpy()[3] == 3


def test_a_file_that_ends_the_device_process_while_it_is_imported(client: Client, kernels: Any, tmp_path: Path) -> None:
    path = tmp_path / "aborts.py"
    path.write_text("""
import os, warpwell as ww
from warpwell.scheduler.service import references
if references.in_device_process:
    os._exit(3)
@ww.kernel
def k(x):
    x[0] = 1
""")
    before = client.status()["owner_restarts"]
    with pytest.raises(errors.TaskLostError, match="because of task 'k': it exited with status 3"):
        client.submit(imported("aborts", path).k[1], np.zeros(1)).result(HANG_SECONDS)
    x = np.arange(10)
    assert client.submit(kernels.double[10], x).result(HANG_SECONDS) is None and x[3] == 6
    assert client.status()["owner_restarts"] == before + 2  # The device process died again when it ran this task alone.


def test_a_client_that_is_killed_in_mid_task(service: Service, client: Client, script: Path) -> None:
    command = [sys.executable, str(script), str(service.path), "7", "3000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "submitted\n"
        # Its worker may prepare requests later than it answers them; those that it has not prepared leave no events.
        until(lambda: sum(e.kind == "arrive" and e.tenant == "tenant7" for e in client.log()) == 10)
        until(lambda: any(e.kind == "launch" and e.tenant == "tenant7" for e in client.log()))
        process.kill()
    until(lambda: client.status()["requests"] == 0)
    # The tasks stop at the end of their blocks.
    until(lambda: sum(e.kind in ("cancel", "end") and e.tenant == "tenant7" for e in client.log()) == 10)


def test_input_behind_a_read_only_view_is_resubmitted_as_it_was(client: Client, kernels: Any) -> None:
    x = INPUT.copy()
    view = x[:]
    view.flags.writeable = False
    handle, y, expected, pid = caught_task(client, kernels, view)
    x *= 2  # as if a later request had changed x
    os.kill(pid, signal.SIGKILL)
    handle.result(HANG_SECONDS)
    assert np.array_equal(y, expected)


def test_a_device_process_that_is_killed_in_mid_task(client: Client, kernels: Any) -> None:
    on_device = client.to_device(np.arange(10))
    before = client.status()  # A stopped process does not answer.
    handle, y, expected, pid = caught_task(client, kernels)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.TaskLostError):  # raised here or in the service, which may not have noticed the death
        client.submit(kernels.double[10], on_device).result(HANG_SECONDS)
    handle.result(HANG_SECONDS)
    assert np.array_equal(y, expected)  # It ran to its end once, although it was started twice.
    after = client.status()
    assert after["owner_restarts"] == before["owner_restarts"] + 1 and after["owner_pid"] != pid
    with pytest.raises(errors.TaskLostError, match="to_device"):
        on_device.numpy()
    kinds = [e.kind for e in client.log() if e.name == "mix"]
    assert kinds[-1] == "end" and kinds.count("launch") >= 1


@pytest.mark.slow
def test_a_kernel_that_ends_its_device_process(service: Service, client: Client, kernels: Any) -> None:
    with connect(service.path, tenant="other", timeout=HANG_SECONDS) as other_client:
        handle, y, expected = long_task(other_client, kernels)
        wild = client.submit(kernels.wild[1], np.zeros(4, np.int64), 1 << 44)
        with pytest.raises(errors.TaskLostError, match=r"because of task 'wild': it was killed by signal 11"):
            wild.result(HANG_SECONDS)
        handle.result(HANG_SECONDS)
        assert np.array_equal(y, expected)


def test_a_kernel_that_is_stuck(tmp_path: Path, kernels: Any) -> None:
    with (
        Service(tmp_path / "run" / "s.sock", device="cpu", stuck=2.0) as service,
        connect(service.path, timeout=HANG_SECONDS) as client,
        connect(service.path, tenant="other", timeout=HANG_SECONDS) as other_client,
    ):
        stuck = client.submit(kernels.forever[1], np.zeros(4, np.int64))
        until(stuck.running)
        handle, y, expected = long_task(other_client, kernels, 0.5)
        with pytest.raises(errors.StallError):
            stuck.result(HANG_SECONDS)
        handle.result(HANG_SECONDS)
        assert np.array_equal(y, expected)
        assert client.status()["owner_restarts"] >= 1
        x = np.arange(10)
        assert client.submit(kernels.double[10], x).result(HANG_SECONDS) is None and x[3] == 6


def test_a_script_without_a_guard(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "unguarded.py"
    path.write_text(f"""
import numpy as np, warpwell as ww
from warpwell.scheduler.service.client import connect
@ww.kernel
def k(x):
    x[0] = 1
with connect({str(service.path)!r}) as client:
    client.submit(k[1], np.zeros(1)).result(60)
""")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 1 and "if __name__ == '__main__'" in done.stderr
    assert "SchedulerError" in done.stderr or "ServiceError" in done.stderr


def test_the_service_killed_in_mid_task(tmp_path: Path, kernels: Any) -> None:
    """Waiting clients get an error at once, and the device process exits."""
    path = tmp_path / "run" / "s.sock"
    code = (
        "from warpwell.scheduler.service.service import Service; import time\n"
        f"with Service({str(path)!r}, device='cpu'): print('ready', flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            client = connect(path, timeout=HANG_SECONDS)
            pid = client.status()["owner_pid"]
            handle, _, _ = long_task(client, kernels, 1000.0)
        finally:
            process.kill()
    with pytest.raises(errors.ServiceError, match="is gone"):
        handle.result(HANG_SECONDS)
    client.close()
    until(lambda: not running(pid))
    assert path.is_socket()  # A killed service cannot remove it.
    with pytest.raises(errors.ServiceError, match="no scheduler service listens"):
        connect(path)


def running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie that its new parent has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_service_keeps_what_its_kernels_took(tmp_path: Path) -> None:
    script = tmp_path / "kept_kernels.py"
    name = f"once_{time.time_ns()}"  # a new name, which no history contains
    script.write_text(f"import warpwell as ww\n@ww.kernel\ndef {name}(x):\n    x[ww.gpu.grid(1)] += {time.time_ns()}\n")
    kernel = getattr(imported("kept_kernels", script), name)
    rules = []
    for number in range(2):
        with Service(tmp_path / f"run{number}" / "s.sock", device="cpu") as made, connect(made.path) as client:
            client.submit(kernel[1000], np.zeros(1000, np.int64)).result(HANG_SECONDS)
            rules += [e.why["rule"] for e in client.log() if e.kind == "launch"]
    # The rule for a known kernel depends on its measured time.
    assert len(rules) == 2 and rules[0] == "unknown" != rules[1], "the second service has read what the first one saved"
