"""Programs on devices of other hosts: the mirror behaves like a local worker, also if a peer is slow, wrong or lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from tests.harness.driver import faults, natives
from tests.harness.driver.hosts import Hosts, delay_data, hosts
from tests.harness.driver.raw import OPEN, Raw
from tests.harness.until import HANG_SECONDS, until

from lab.driver import build
from lab.link import EmulatedLink

ROOT = Path(__file__).parents[2]
SECONDS = HANG_SECONDS
MIRRORED_SEEDS = 100, 160
"""Random programs that find the planted faults of the mirror."""
ALL_RIGHT = "60 programs are right\n"


@pytest.fixture(autouse=True)
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake driver take random times."""
    monkeypatch.setenv("FAKE_SEED", "7")


@pytest.fixture(scope="module")
def job() -> Iterator[Hosts]:
    """A device of another host, for clients that write what they like."""
    with hosts(build.build(), 1) as job:
        yield job


def start(job: Hosts, module: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program of the harness as a client."""
    command = [sys.executable, "-m", f"tests.harness.driver.{module}", *arguments]
    out = subprocess.PIPE
    return subprocess.Popen(
        command, env=job.environ(), cwd=ROOT, stdin=out, stdout=out, stderr=subprocess.STDOUT, text=True
    )


def output_of(job: Hosts, module: str, *arguments: str, seconds: float = SECONDS) -> str:
    """Run a program of the harness as a client; return what it says."""
    with start(job, module, *arguments) as process:
        try:
            return process.communicate(timeout=seconds)[0]
        finally:
            process.kill()


def programs(job: Hosts, first: int, end: int, *more: str, seconds: float = SECONDS) -> str:
    """Run random programs on two devices."""
    return output_of(job, "programs", "--devices", "2", "--seeds", f"{first}:{end}", *more, seconds=seconds)


def backlog(job: Hosts) -> str:
    """Let a program post more than both rings hold while the worker is stopped; return what it says in the end."""
    with start(job, "acts", "backlog", "400", "100") as process:  # enough streams that the layer throttles none of them
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "stop\n"
            workers = job.servers[0].workers
            for worker in workers:
                os.kill(worker, signal.SIGSTOP)
            try:
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline().startswith("blocked")
            finally:
                for worker in workers:
                    os.kill(worker, signal.SIGCONT)
            return process.communicate("\n", timeout=SECONDS)[0]
        finally:
            process.kill()


def nothing_is_left(job: Hosts, clients: int = 0) -> None:
    """Wait until no client, no worker and no memory is left except for some clients."""
    until(lambda: len(job.workers) == len(job.near.served) == clients)
    until(lambda: sum(len(far.served) for far in job.fars) == clients)


def test_random_programs_are_right_on_other_hosts() -> None:
    with hosts(build.build()) as job:
        assert programs(job, 0, 8, "--threads", "2") == "8 programs are right\n"
        nothing_is_left(job)


@pytest.mark.slow
def test_random_programs_are_right_where_all_is_scarce_and_one_device_is_here() -> None:
    with natives.changed(natives.TIGHT) as parts, hosts(parts, local=1) as job:
        assert programs(job, 100, 120, "--threads", "4") == "20 programs are right\n"
        assert programs(job, 160, 165) == "5 programs are right\n"
        nothing_is_left(job)


@pytest.mark.slow
def test_random_programs_are_right_over_a_slow_link() -> None:
    with hosts(build.build(), wrap=lambda transport: EmulatedLink(transport, 300e6, 1e-3)) as job:
        assert programs(job, 600, 604) == "4 programs are right\n"


@pytest.mark.slow
def test_a_worker_of_another_host_that_is_stopped_loses_no_call() -> None:
    with natives.changed(natives.TIGHT) as parts, hosts(parts, 1) as job:
        assert backlog(job) == "right True\n"


@pytest.mark.slow
def test_streams_of_other_hosts_that_never_become_ready_leave_others_alone() -> None:
    with hosts(build.build()) as job:
        output = output_of(job, "acts", "stuck_beside").splitlines()
    assert output.pop() == "released True 0 260 {0}"
    assert output == ["independent [True, True, True] still stuck True", "held back True"]


def test_a_worker_of_another_host_is_lost_and_replaced() -> None:
    with hosts(build.build()) as job, start(job, "acts", "waits_for_killed_worker") as process:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        os.kill(job.servers[0].workers[0], signal.SIGKILL)
        output = process.communicate(timeout=SECONDS)[0].splitlines()
        assert output.pop(0).startswith("warpwell: device 0: its worker has ended")
        assert output == ["codes False 1 True", "other device True", "after reset True True", "old handles True True"]
        nothing_is_left(job)


@pytest.mark.parametrize(("kernel", "code"), [("fault", 700), ("fail", 710)])
def test_a_fault_on_another_host_has_its_code(kernel: str, code: int) -> None:
    with hosts(build.build()) as job:
        output = output_of(job, "acts", "faults", kernel).splitlines()
        assert output == ["before True True", "codes" + 5 * f" {code}", "other device True", "after reset True"]
        nothing_is_left(job)


def test_children_forked_among_threads_hang_nobody() -> None:
    with hosts(build.build()) as job:
        assert output_of(job, "acts", "fork_among_threads") == "children {1} wrong [] parent True\n"
        nothing_is_left(job)


def test_clients_that_come_and_go_leave_nothing() -> None:
    rng = random.Random(1)
    with hosts(build.build(), 1) as job, Raw(job.folder) as witness:
        address = witness.alloc(64)
        witness.put(address, bytes(range(64)))
        for _ in range(30):
            line = Raw.connect(job.folder)
            with open(os.devnull, "wb") as nothing:
                socket.send_fds(line, [Raw.hello(OPEN)], [nothing.fileno()] * 2)
            time.sleep(rng.choice([0, 0, 0.001, 0.01, 0.03]))
            line.close()
        nothing_is_left(job, 1)
        assert witness.get(address, 64) == bytes(range(64))


def loses(job: Hosts, rng: random.Random) -> None:
    """Lose something at a random moment of a program: it ends by itself, with the code of a lost device."""
    with start(job, "programs", "--devices", "2", "--seeds", "0:100000") as process:
        try:
            until(lambda: len(job.workers) == 2 or process.poll() is not None)
            time.sleep(rng.random() * 0.4)
            victim = rng.choice(["client", "worker", "agent", "communicator"])
            if victim == "client":
                process.kill()
            elif victim == "worker":
                os.kill(rng.choice(job.workers), signal.SIGKILL)
            elif victim == "agent":
                job.lose(rng.randrange(2))
            else:
                job.close_near()
            text = process.communicate(timeout=SECONDS)[0]
            assert victim == "client" or (": 46\n" in text and process.returncode == 1), (victim, text)
        finally:
            process.kill()
    nothing_is_left(job)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3))])
def test_whoever_is_lost_at_any_moment_no_program_hangs(seed: int) -> None:
    with hosts(build.build()) as job:
        loses(job, random.Random(seed))


@pytest.mark.slow
def test_many_losses_at_random_moments() -> None:
    for seed in range(100, 140):
        with hosts(build.build()) as job:
            loses(job, random.Random(seed))


def test_an_answer_comes_after_the_errors_before_it(job: Hosts) -> None:
    with Raw(job.folder) as raw:
        for count in range(1, 60):
            raw.post("MEMSET", struct.pack("=QQII", 8, 16, 1, 4), stream=1)
            raw.post("STREAM_SYNC", stream=1, slot=count % 3)
            at = 4096 * (1 + count % 3)
            raw.until(
                lambda at=at, k=count % 3: struct.unpack_from("=I", raw.status, at)[0] == raw.sequence[k], "no answer"
            )
            assert raw.deferred == (1, count)


def use_again(raw: Raw) -> None:
    """Name a place again while its last use is under way."""
    raw.post("IN", struct.pack("=QQ", raw.arena, 1 << 20), stream=1, staging_index=3, nbytes=1 << 20)
    raw.used[2] -= 1
    raw.post("IN", struct.pack("=QQ", raw.arena, 1 << 20), stream=1, staging_index=3, nbytes=1 << 20)


WRONG = {
    "a place that is under way": use_again,
    "a use that goes back": lambda raw: raw.post("OUT", bytes(32), stream=1, staging_index=3, nbytes=0, use=9),
    "pinned memory": lambda raw: raw.post("PIN", struct.pack("=QQII", 0x200000000000, 4096, 0, 0), slot=1),
    "padding that is too large": lambda raw: raw.write(struct.pack("=IHH", 1 << 20, 0, 0) + bytes(24), 1 << 20),
}


@pytest.mark.parametrize("act", WRONG)
def test_a_ring_that_is_wrong_ends_its_client_alone(job: Hosts, act: str) -> None:
    with Raw(job.folder) as witness, Raw(job.folder) as raw:
        address = witness.alloc(64)
        witness.put(address, bytes(64))
        raw.alloc(64)
        WRONG[act](raw)
        raw.until(raw.hung_up, "the client is still served")
        assert raw.sticky == 999
        assert witness.get(address, 64) == bytes(64)
    nothing_is_left(job)


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.MIRRORED)
def test_planted_faults_of_the_mirror_are_found(fault: str) -> None:
    symptom, changes = faults.MIRRORED[fault]
    with natives.changed(natives.merged(natives.TIGHT, changes)) as parts, contextlib.ExitStack() as stack:
        for target, made in faults.REPLACED.get(fault, {}).items():
            stack.enter_context(mock.patch(target, made))
        job = stack.enter_context(hosts(parts, local=1, wrap=delay_data))
        if symptom == faults.OVERRUN:
            assert backlog(job) != "right True\n"
        elif symptom == faults.STUCK:
            # Without the fault, these programs take about 20 s.
            with pytest.raises(subprocess.TimeoutExpired):
                programs(job, *MIRRORED_SEEDS, "--threads", "4")
        else:
            assert programs(job, *MIRRORED_SEEDS, "--threads", "4") != ALL_RIGHT


@pytest.mark.slow
def test_programs_that_find_planted_faults_are_right_without_one() -> None:
    with natives.changed(natives.TIGHT) as parts, hosts(parts, local=1, wrap=delay_data) as job:
        assert programs(job, *MIRRORED_SEEDS, "--threads", "4") == ALL_RIGHT
        nothing_is_left(job)
        assert backlog(job) == "right True\n"
