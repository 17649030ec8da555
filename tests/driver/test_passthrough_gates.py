"""Gates in the streams of programs on the fake driver, which has the pass-through driver in front of it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.conversation import Conversation
from tests.harness.driver import natives
from tests.harness.driver.gates import (
    BELL,
    DONE,
    FAKE_UUID,
    GATE,
    HELD,
    ISSUED,
    LAUNCHES,
    LONGEST,
    PROGRAMS,
    SERIAL,
    TABLE,
    Gates,
    flipping,
)
from tests.harness.until import HANG_SECONDS, until

from lab.driver.build import build_fake
from warpwell.driver import passthrough_environ

ROOT = Path(__file__).parents[2]
BEFORE = """
import ctypes, os, sys, threading, time
from pathlib import Path
from tests.harness.driver.calls import *
from tests.harness.driver.gates import FAKE_UUID, Gates
from tests.harness.threads import until_blocked
def started():
    cuda = Cuda()
    cuda.start(1)
    cuda.use(0)
    return cuda
cuda = started()
def reset():
    cuda.code("cuDevicePrimaryCtxReset_v2", ctypes.c_int(0))
    cuda.code("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(0))
def own_gates():
    return Gates(Path(os.environ["WARPWELL_TURNS"]) / f"gpu-{FAKE_UUID}00.board")
def launch(stream, microseconds=1000, count=1):
    for _ in range(count):
        cuda.launch(0, stream, "nap", microseconds)
def said(*words):
    print(*words, flush=True)
launch(cuda.stream(NON_BLOCKING))
cuda.cuCtxSynchronize()
def hold(stream):  # until the word that is returned becomes 7
    word = ctypes.c_uint32.from_address(cuda.out("cuMemAllocHost_v2", 4096))
    cuda.launch(0, stream, "flag", ctypes.addressof(word), 7)
    return word
said("ready")
sys.stdin.readline()
"""
CAPTURE = """
graph, kept, executable = cuda.out("cuGraphCreate", 0), cuda.stream(NON_BLOCKING), ctypes.c_uint64()
address, ended = cuda.alloc(4096), ctypes.c_uint64()
cuda.cuStreamBeginCaptureToGraph(kept, graph, None, None, 0, 2)
cuda.launch(0, kept, "fill", address, 1024, 7)
cuda.cuStreamEndCapture(kept, ctypes.byref(ended))
cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), ended.value, 0)
said("captured")
"""


@functools.cache
def library_environ(is_real: bool) -> dict[str, str]:
    """Return the variables with which programs load the pass-through driver and the fake driver."""
    with natives.changed({} if is_real else natives.PATIENT):
        return passthrough_environ({}, build_fake())


class Program(Conversation):
    """A program that shares a GPU, at its start. Without beats its gate opens after 100 s; with `is_real`, 100 ms."""

    def __init__(self, folder: Path, text: str, is_real: bool = False, **variables: str) -> None:
        environ = os.environ | library_environ(is_real) | {"CUDA_MODULE_LOADING": "EAGER"}
        environ |= {"WARPWELL_SHARE": "3:tenant", "WARPWELL_TURNS": str(folder), **variables}
        line = [sys.executable, "-c", BEFORE + textwrap.dedent(text)]
        self.process = subprocess.Popen(
            line, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if not is_real:
            gates = Gates(folder / f"gpu-{FAKE_UUID}00.board")
            until(lambda: gates.is_attached)
            gates.set_gate(True)
        assert self.line() == "ready"

    def code(self) -> int:
        return self.process.wait(HANG_SECONDS)


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / f"gpu-{FAKE_UUID}00.board")


@contextlib.contextmanager
def started(tmp_path: Path, text: str, is_real: bool = False, **variables: str) -> Iterator[Program]:
    program = Program(tmp_path, text, is_real, **variables)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()


def wait_until(gates: Gates, name: str) -> None:
    """Wait for a state of a program, as an arbiter that is alive."""
    until(lambda: gates.beat() or getattr(gates, name))


def stay_closed(gates: Gates, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gates.beat()
        assert gates.is_waiting
        time.sleep(5e-3)


@pytest.mark.parametrize("refusal", [{}, {"FAKE_FILES": "0"}], ids=str)
@pytest.mark.parametrize("stream", ["cuda.stream(NON_BLOCKING)", "LEGACY", "PER_THREAD"])
def test_the_gpu_stands_at_the_closed_gate_and_the_host_goes_on(
    tmp_path: Path, gates: Gates, stream: str, refusal: dict[str, str]
) -> None:
    text = f"""
        stream, event = {stream}, cuda.event()
        word = hold(stream)
        launch(stream, 100, 100)
        said("enqueued")
        sys.stdin.readline()
        word.value = 7
        sys.stdin.readline()
        said(cuda.code("cuStreamQuery", stream))
        cuda.cuStreamSynchronize(stream)
        said("done")
        """
    with started(tmp_path, text, **refusal) as program:
        assert gates.is_attached
        wait_until(gates, "is_idle")
        program.post()
        assert program.line() == "enqueued" and not gates.is_idle
        gates.set_gate(False)
        program.post()
        wait_until(gates, "is_waiting")
        stay_closed(gates, 0.2)
        program.post()
        assert program.line() == "600"
        gates.set_gate(True)
        assert program.line() == "done"
        wait_until(gates, "is_idle")
        assert program.code() == 0


@pytest.mark.parametrize("refusal", [{}, {"FAKE_FILES": "0"}, {"FAKE_GATES": "0"}], ids=str)
def test_a_program_with_work_is_never_reported_as_idle(tmp_path: Path, gates: Gates, refusal: dict[str, str]) -> None:
    text = """
        gates, stream = own_gates(), cuda.stream(NON_BLOCKING)
        word, without, beside = hold(stream), 0, 0
        for _ in range(1000):
            word.value = 7
            cuda.cuStreamSynchronize(stream)
            without += gates.is_idle
            word.value = 0
            cuda.launch(0, stream, "flag", ctypes.addressof(word), 7)
            beside += any(gates.is_idle for _ in range(20))
        word.value = 7
        said(without > 0, beside)
        """
    with started(tmp_path, text, **refusal) as program:
        program.post()
        end = time.monotonic() + HANG_SECONDS
        while program.process.poll() is None and time.monotonic() < end:
            gates.set_gate(True)  # each call makes the keeper thread look at the program
        assert program.line() == "True 0" and program.code() == 0


@pytest.mark.parametrize("refusal", [{}, {"FAKE_FILES": "0"}], ids=str)
def test_a_program_that_comes_to_a_closed_gate_asks_for_the_gpu(
    tmp_path: Path, gates: Gates, refusal: dict[str, str]
) -> None:
    text = """
        stream = cuda.stream(NON_BLOCKING)
        launch(stream)
        said("enqueued")
        sys.stdin.readline()
        said(cuda.code("cuStreamQuery", stream))
        cuda.cuStreamSynchronize(stream)
        said("done")
        """
    with started(tmp_path, text, **refusal) as program:
        wait_until(gates, "is_idle")
        gates.fields[TABLE // 8 + GATE] = 0  # wakes no thread of the program: its call is the first to find it
        program.post()
        assert program.line() == "enqueued" and gates.is_waiting
        stay_closed(gates, 0.1)
        program.post()
        assert program.line() == "600"
        gates.set_gate(True)
        assert program.line() == "done" and program.code() == 0


def test_work_before_a_second_program_came_is_waited_for(tmp_path: Path, gates: Gates) -> None:
    text = """
        stream = cuda.stream(NON_BLOCKING)
        launch(stream, 10, 100)
        word = hold(stream)
        said("enqueued")
        sys.stdin.readline()
        word.value = 7
        cuda.cuStreamSynchronize(stream)
        said("done")
        """
    with started(tmp_path, text) as program:
        gates.fields[PROGRAMS] = 1
        wait_until(gates, "is_idle")
        bell = gates.fields[BELL]
        program.post()
        assert program.line() == "enqueued"
        until(lambda: not gates.is_idle)
        gates.fields[PROGRAMS] = 2
        gates.set_gate(False)
        time.sleep(0.1)
        assert not gates.is_idle
        program.post()
        wait_until(gates, "is_idle")
        assert program.line() == "done" and program.code() == 0
        assert gates.fields[BELL] - bell <= 4  # rings only when the GPU becomes free, not at each call


def test_without_an_arbiter_gates_open(tmp_path: Path, gates: Gates) -> None:
    text = """
        stream = cuda.stream(NON_BLOCKING)
        launch(stream, 100, 100)
        cuda.cuStreamSynchronize(stream)
        said("done")
        """
    with started(tmp_path, text, is_real=True) as program:
        gates.set_gate(False)
        began = time.monotonic()
        program.post()
        assert program.line() == "done"  # no arbiter changes the beat, so the program opens the gate itself
        assert time.monotonic() - began > 0.09 and gates.word(GATE) == 1 and program.code() == 0


def test_streams_that_wait_for_events_of_standing_streams_stand(tmp_path: Path, gates: Gates) -> None:
    text = """
        streams = [cuda.stream(NON_BLOCKING) for _ in range(3)]
        for _ in range(60):
            for k, stream in enumerate(streams):
                event = cuda.event()
                launch(stream, 300)
                cuda.cuEventRecord(event, stream)
                cuda.cuStreamWaitEvent(streams[(k + 1) % 3], event, ctypes.c_uint(0))
        said("enqueued")
        cuda.cuCtxSynchronize()
        said("done")
        """
    with started(tmp_path, text) as program:
        gates.set_gate(False)
        program.post()
        assert program.line() == "enqueued"
        for _ in range(5):
            until(lambda: gates.beat() or gates.is_waiting or gates.is_idle)
            if gates.is_waiting:
                stay_closed(gates, 0.02)
            gates.set_gate(True)
            time.sleep(2e-3)
            gates.set_gate(False)
        gates.set_gate(True)
        assert program.line() == "done" and program.code() == 0


@pytest.mark.parametrize("stream", ["cuda.stream(NON_BLOCKING)", "LEGACY", "PER_THREAD"])
def test_a_wait_for_an_event_at_a_closed_gate_asks_for_the_gpu(tmp_path: Path, gates: Gates, stream: str) -> None:
    text = f"""
        stream, event = {stream}, cuda.event()
        launch(stream)
        cuda.cuEventRecord(event, stream)
        cuda.cuStreamSynchronize(stream)
        said("idle")
        sys.stdin.readline()
        cuda.cuStreamWaitEvent(stream, event, ctypes.c_uint(0))
        said("waits")
        cuda.cuStreamSynchronize(stream)
        said("done")
        """
    with started(tmp_path, text) as program:
        program.post()
        assert program.line() == "idle"
        wait_until(gates, "is_idle")
        gates.set_gate(False)
        program.post()
        assert program.line() == "waits"
        wait_until(gates, "is_waiting")
        stay_closed(gates, 0.1)
        gates.set_gate(True)
        assert program.line() == "done"
        wait_until(gates, "is_idle")
        assert program.code() == 0


def test_a_copy_that_is_done_says_nothing_of_later_calls_of_other_threads(tmp_path: Path, gates: Gates) -> None:
    text = """
        launch(LEGACY, 1000, 4)
        cuda.cuStreamSynchronize(LEGACY)
        said("called")
        sys.stdin.readline()
        flag, address = cuda.out("cuMemAllocHost_v2", 4096), cuda.alloc(4096)
        cuda.launch(0, LEGACY, "flag", flag, 7)
        def copy():
            cuda.use(0)
            cuda.cuMemcpyDtoH_v2((ctypes.c_char * 64)(), address, 64)
        thread = threading.Thread(target=copy)
        thread.start()
        until_blocked(thread)
        launch(LEGACY, 1000, 3)
        said("enqueued")
        sys.stdin.readline()
        ctypes.c_uint32.from_address(flag).value = 7
        thread.join()
        said("copied")
        cuda.cuStreamSynchronize(LEGACY)
        said("done")
        """
    with started(tmp_path, text) as program:
        program.post()
        assert program.line() == "called"
        wait_until(gates, "has_measured")  # each later call begins with a gate
        program.post()
        assert program.line() == "enqueued"
        gates.set_gate(False)
        program.post()
        assert program.line() == "copied"
        wait_until(gates, "is_waiting")
        gates.set_gate(True)
        assert program.line() == "done" and program.code() == 0


def test_blocking_streams_do_not_wait_for_each_other(tmp_path: Path, gates: Gates) -> None:
    text = """
        address, streams = cuda.alloc(4096), [cuda.stream(0), cuda.stream(0)]
        for stream in (*streams, LEGACY):
            launch(stream, 10)
        cuda.launch(0, streams[0], "flag", address, 7)
        time.sleep(0.05)
        cuda.launch(0, streams[1], "fill", address, 1, 7)
        said("enqueued")
        cuda.cuCtxSynchronize()
        said("done")
        """
    with started(tmp_path, text) as program:
        program.post()
        assert program.line() == "enqueued"
        wait_until(gates, "is_idle")
        assert program.line() == "done" and program.code() == 0


def test_streams_that_wait_for_a_standing_stream_are_found_in_a_bounded_time(tmp_path: Path, gates: Gates) -> None:
    text = """
        stream = cuda.stream(0)
        word = hold(stream)
        for _ in range(100):
            launch(stream, 300)
            launch(LEGACY, 300)
        said("enqueued")
        sys.stdin.readline()
        word.value = 7
        cuda.cuCtxSynchronize()
        said("done")
        """
    with started(tmp_path, text) as program:
        program.post()
        until(lambda: not gates.is_idle)
        gates.fields[TABLE // 8 + LONGEST] = 1 << 61
        gates.set_gate(False)
        assert program.line() == "enqueued"
        program.post()
        wait_until(gates, "is_waiting")
        gates.set_gate(True)
        assert program.line() == "done" and program.code() == 0


def test_streams_without_a_record_wait_in_the_host(tmp_path: Path, gates: Gates) -> None:
    text = """
        streams = [cuda.stream(NON_BLOCKING) for _ in range(20)]
        for stream in streams:
            launch(stream, 10)
            said("enqueued")
        cuda.cuCtxSynchronize()
        """
    with started(tmp_path, text) as program:
        gates.set_gate(False)
        program.post()
        for _ in range(16):
            assert program.line() == "enqueued"
        stay_closed(gates, 0.1)
        gates.set_gate(True)
        for _ in range(4):
            assert program.line() == "enqueued"
        assert program.code() == 0


def test_records_of_destroyed_streams_are_used_again(tmp_path: Path, gates: Gates) -> None:
    text = """
        for _ in range(60):
            stream = cuda.stream(NON_BLOCKING)
            launch(stream, 10)
            cuda.cuStreamDestroy_v2(stream)
            time.sleep(2e-3)
        said("destroyed")
        sys.stdin.readline()
        launch(cuda.stream(NON_BLOCKING), 100, 20)
        said("enqueued")
        cuda.cuCtxSynchronize()
        """
    with started(tmp_path, text) as program:
        program.post()
        assert program.line() == "destroyed"
        wait_until(gates, "is_idle")
        gates.set_gate(False)
        program.post()
        assert program.line() == "enqueued"
        wait_until(gates, "is_waiting")
        gates.set_gate(True)
        assert program.code() == 0


@pytest.mark.parametrize("refusal", [{}, {"FAKE_FILES": "0"}, {"FAKE_GATES": "0"}], ids=str)
def test_records_of_streams_without_work_are_used_again(tmp_path: Path, gates: Gates, refusal: dict[str, str]) -> None:
    text = """
        streams = [cuda.stream(NON_BLOCKING) for _ in range(40)]
        for stream in streams:
            launch(stream, 10)
            cuda.cuStreamSynchronize(stream)
        time.sleep(0.1)
        words = [hold(stream) for stream in streams[-8:]]
        said("enqueued")
        sys.stdin.readline()
        for word in words:
            word.value = 7
        cuda.cuCtxSynchronize()
        said("done")
        """
    with started(tmp_path, text, **refusal) as program:
        program.post()
        assert program.line() == "enqueued"
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            assert not gates.is_idle
            time.sleep(1e-3)
        program.post()
        assert program.line() == "done" and program.code() == 0


def test_captures_have_no_gates_and_a_graph_is_one_call(tmp_path: Path, gates: Gates) -> None:
    text = """
        stream = cuda.stream(NON_BLOCKING)
        for _ in range(3):
            cuda.cuGraphLaunch(executable.value, stream)
        said("enqueued")
        cuda.cuStreamSynchronize(stream)
        said(cuda.read(address, 1)[0])
        """
    with started(tmp_path, CAPTURE + textwrap.dedent(text)) as program:
        gates.set_gate(False)
        program.post()
        assert [program.line(), program.line()] == ["captured", "enqueued"]
        assert gates.is_waiting
        gates.set_gate(True)
        assert program.line() == "7" and program.code() == 0


def test_a_context_that_is_reset_works_again(tmp_path: Path, gates: Gates) -> None:
    text = """
        launch(cuda.stream(NON_BLOCKING), 100, 30)
        reset()
        again = started()
        stream = again.stream(NON_BLOCKING)
        said("again")
        sys.stdin.readline()
        for _ in range(30):
            again.launch(0, stream, "nap", 100)
        said("enqueued")
        again.cuCtxSynchronize()
        said("done")
        """
    with started(tmp_path, text) as program:
        program.post()
        assert program.line() == "again"
        gates.set_gate(False)
        program.post()
        assert program.line() == "enqueued"
        wait_until(gates, "is_waiting")
        gates.set_gate(True)
        assert program.line() == "done" and program.code() == 0


def test_a_call_that_waits_while_its_context_is_destroyed_does_not_count(tmp_path: Path, gates: Gates) -> None:
    text = """
        stream = cuda.stream(NON_BLOCKING)
        def call():
            cuda.use(0)
            said(cuda.code("cuMemsetD8Async", 0, ctypes.c_ubyte(0), 0, stream))
        thread = threading.Thread(target=call)
        thread.start()
        sys.stdin.readline()
        reset()
        said("reset")
        thread.join()
        again = started()
        stream = again.stream(NON_BLOCKING)
        again.launch(0, stream, "nap", 100)
        again.cuStreamSynchronize(stream)
        said("done")
        sys.stdin.readline()
        """
    with started(tmp_path, text, FAKE_GATES="0") as program:
        gates.set_gate(False)
        program.post()
        wait_until(gates, "is_waiting")
        program.post()
        assert program.line() == "reset"
        gates.set_gate(True)
        assert program.line() == "709" and program.line() == "done"
        wait_until(gates, "is_idle")
        program.post()
        assert program.code() == 0


def test_a_first_call_in_a_capture_does_not_harm_it(tmp_path: Path, gates: Gates) -> None:
    text = """
        reset()
        cuda = started()
        """
    text = textwrap.dedent(text) + CAPTURE.replace("None, None, 0, 2", "None, None, 0, 0")
    text += 'launch(cuda.stream(NON_BLOCKING))\nsaid("enqueued")\ncuda.cuCtxSynchronize()\n'
    with started(tmp_path, text) as program:
        gates.set_gate(False)
        program.post()
        assert program.line() == "captured"
        # The call did not wait: the gate is still closed, and opens later without a beat.
        assert program.line() == "enqueued" and gates.word(GATE) == 0
        gates.set_gate(True)
        assert program.code() == 0


def test_a_board_in_a_folder_of_a_group_belongs_to_the_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with started(tmp_path, ""):
        board_stat = next(tmp_path.glob("*.board")).stat()
        assert board_stat.st_mode & 0o777 == 0o660 and board_stat.st_gid == tmp_path.stat().st_gid


@pytest.mark.parametrize("refusal", [{}, {"FAKE_FILES": "0"}, {"FAKE_GATES": "0"}], ids=str)
def test_a_program_goes_on_without_its_slot(tmp_path: Path, gates: Gates, refusal: dict[str, str]) -> None:
    """A process that closes any descriptor of the board loses the lock of its slot, which the arbiter then frees."""
    text = """
        stream = cuda.stream(NON_BLOCKING)
        launch(stream, 10, 2)
        cuda.cuCtxSynchronize()
        said("done")
        time.sleep(0.1)  # several checks of the keeper
        """
    with started(tmp_path, text, **refusal) as program:
        gates.set_gate(False)
        program.post()
        wait_until(gates, "is_waiting")
        gates.fields[TABLE // 8 + SERIAL] += 2
        assert program.line() == "done" and program.code() == 0


def test_a_slot_shows_nothing_of_its_previous_program(tmp_path: Path, gates: Gates) -> None:
    gates.fields[TABLE // 8 + LAUNCHES] = 7
    with started(tmp_path, ""):
        assert gates.is_attached and gates.word(LAUNCHES) == 0


def test_where_the_driver_refuses_gates_the_host_waits(tmp_path: Path, gates: Gates) -> None:
    text = """
        stream = cuda.stream(NON_BLOCKING)
        launch(stream, 10, 2)
        said("enqueued")
        """
    with started(tmp_path, text, FAKE_GATES="0") as program:
        gates.set_gate(False)
        program.post()
        stayed = time.monotonic() + 0.1
        wait_until(gates, "is_waiting")
        while time.monotonic() < stayed:
            gates.beat()
            time.sleep(5e-3)
        gates.set_gate(True)
        assert program.line() == "enqueued" and program.code() == 0


@pytest.mark.parametrize("stream", ["cuda.stream(NON_BLOCKING)", "LEGACY", "PER_THREAD"])
def test_queued_work_is_waited_for_where_the_host_waits(tmp_path: Path, gates: Gates, stream: str) -> None:
    text = f"""
        stream = {stream}
        word = hold(stream)
        def release():
            sys.stdin.readline()
            word.value = 7
        said("enqueued")
        sys.stdin.readline()
        threading.Thread(target=release).start()
        launch(stream)
        said("launched")
        cuda.cuStreamSynchronize(stream)
        said("done")
        """

    def stay_busy(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            gates.beat()
            assert gates.word(ISSUED) != gates.word(DONE)
            time.sleep(1e-3)

    with started(tmp_path, text, FAKE_GATES="0") as program:
        wait_until(gates, "is_idle")
        program.post()
        assert program.line() == "enqueued"
        stay_busy(0.1)
        gates.set_gate(False)
        program.post()
        until(lambda: gates.beat() or gates.word(HELD) != 0)
        stay_busy(0.1)
        program.post()
        wait_until(gates, "is_waiting")
        stay_closed(gates, 0.1)
        gates.set_gate(True)
        assert [program.line(), program.line()] == ["launched", "done"]
        wait_until(gates, "is_idle")
        assert program.code() == 0


def test_a_quiet_stream_is_found_idle_although_the_host_waits_for_nothing(tmp_path: Path, gates: Gates) -> None:
    text = """
        word = hold(cuda.stream(NON_BLOCKING))
        sys.stdin.readline()
        word.value = 7
        sys.stdin.readline()
        """
    with started(tmp_path, text) as program:
        program.post()
        until(lambda: not gates.is_idle)
        program.post()
        wait_until(gates, "is_idle")
        program.post()
        assert program.code() == 0


def test_a_mark_does_not_overtake_a_call_that_has_just_been_counted(tmp_path: Path, gates: Gates) -> None:
    text = f"""
        gates, stream = own_gates(), cuda.stream(NON_BLOCKING)
        gates.fields[{PROGRAMS}] = 1
        word, idle = hold(stream), 0
        for k in range(40):
            word.value = 7
            cuda.cuStreamSynchronize(stream)
            time.sleep(k / 1000)
            word.value = 0
            cuda.launch(0, stream, "flag", ctypes.addressof(word), 7)
            time.sleep(0.05)
            idle += gates.is_idle
        word.value = 7
        said(idle)
        """
    with started(tmp_path, text, FAKE_CURRENT_US="5000", FAKE_LAUNCH_US="30000") as program:
        program.post()
        assert program.line() == "0" and program.code() == 0


def test_a_call_on_its_way_to_the_driver_when_another_program_comes_is_counted(tmp_path: Path, gates: Gates) -> None:
    text = f"""
        gates, stream = own_gates(), cuda.stream(NON_BLOCKING)
        word, idle = hold(stream), 0
        for _ in range(10):
            word.value = 7
            cuda.cuStreamSynchronize(stream)
            gates.fields[{PROGRAMS}] = 1
            time.sleep(0.05)
            word.value = 0
            threading.Timer(0.01, lambda: gates.fields.__setitem__({PROGRAMS}, 2)).start()
            cuda.launch(0, stream, "flag", ctypes.addressof(word), 7)
            time.sleep(0.05)
            idle += gates.is_idle
        word.value = 7
        said(idle)
        """
    with started(tmp_path, text, FAKE_LAUNCH_US="30000") as program:
        program.post()
        assert program.line() == "0" and program.code() == 0


@pytest.mark.parametrize("refusal", [{}, {"FAKE_FILES": "0"}], ids=str)
def test_work_that_passes_a_gate_of_a_short_opening_is_counted(
    tmp_path: Path, gates: Gates, refusal: dict[str, str]
) -> None:
    text = f"""
        gates = own_gates()
        stream, other = cuda.stream(NON_BLOCKING), cuda.stream(NON_BLOCKING)
        begun, counted = ctypes.c_uint32.from_address(cuda.out("cuMemAllocHost_v2", 4096)), 0
        def until(condition):
            while not condition():
                gates.beat()
        for _ in range(20):
            gates.set_gate(False)
            begun.value = 5
            cuda.launch(0, stream, "fill", ctypes.addressof(begun), 1, 7)
            word = hold(stream)
            until(lambda: gates.is_waiting)
            gates.fields[{TABLE // 8 + GATE}] = 1  # wakes no thread of the program
            launch(other, 10)
            until(lambda: begun.value == 7)
            held = gates.word({HELD})
            gates.set_gate(False)
            until(lambda: held != gates.word({HELD}) or gates.word({ISSUED}) != gates.word({DONE}))
            counted += gates.word({ISSUED}) != gates.word({DONE})
            gates.set_gate(True)
            word.value = 7
            cuda.cuCtxSynchronize()
        said(counted)
        """
    with started(tmp_path, text, **refusal) as program:
        program.post()
        assert program.line() == "20" and program.code() == 0


def test_programs_end_while_the_gpu_stands_at_a_gate(tmp_path: Path, gates: Gates) -> None:
    """At an exit, by Ctrl-C, by a signal, and in a forked child, which shares nothing."""
    text = """
        stream = cuda.stream(NON_BLOCKING)
        launch(stream, 100, 50)
        if not os.fork():
            os._exit(cuda.code("cuCtxSynchronize"))
        said(os.waitstatus_to_exitcode(os.wait()[1]))
        if {0}:
            cuda.cuCtxSynchronize()
        """
    for number, is_waiting in ((0, False), (signal.SIGINT, True), (signal.SIGTERM, True)):
        gates.set_gate(True)
        with started(tmp_path, textwrap.dedent(text).replace("{0}", str(is_waiting)), is_real=True) as program:
            gates.set_gate(False)
            program.post()
            assert program.line() == "3"  # not initialized
            if number:
                program.process.send_signal(number)
            assert program.code() in (0, -signal.SIGINT, -signal.SIGTERM, 1)
        assert gates.is_attached  # the arbiter frees the slot


@pytest.mark.parametrize("refusal", [{}, {"FAKE_FILES": "0"}, {"FAKE_GATES": "0"}], ids=str)
def test_random_programs_are_right_under_random_gates(tmp_path: Path, refusal: dict[str, str]) -> None:
    for options in (["--seeds", "0:8"], ["--seeds", "8:16", "--threads", "3"]):
        environ = passthrough_environ(os.environ, build_fake()) | {"FAKE_SEED": "7", "WARPWELL_SHARE": "0:t"}
        environ |= {"WARPWELL_TURNS": str(tmp_path), **refusal}
        line = [sys.executable, "-m", "tests.harness.driver.programs", "--devices", "2", "--relies", "", *options]
        with flipping(tmp_path) as sums:
            found = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert found.stdout == "8 programs are right\n", found.stderr
        assert sums.closings > 20 and sums.held > 0


def test_an_arbiter_that_is_killed_at_random_moments_stops_no_program(tmp_path: Path) -> None:
    text = """
        streams = [cuda.stream(NON_BLOCKING) for _ in range(3)]
        for round in range(40):
            for stream in streams:
                launch(stream, 200, 5)
            cuda.cuCtxSynchronize()
        said("done")
        """
    for seed in range(4):
        with started(tmp_path, text, is_real=True) as program:
            with flipping(tmp_path, seed):
                program.post()
                time.sleep(0.03 * seed)
            Gates(tmp_path / f"gpu-{FAKE_UUID}00.board").set_gate(seed % 2 == 0)
            assert program.line() == "done" and program.code() == 0
