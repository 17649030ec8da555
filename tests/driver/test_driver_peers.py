"""Two devices of one program: each other's memory and events, through layer and workers on the fake driver."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.driver.test_driver_programs import programs
from tests.harness.driver import faults, natives
from tests.harness.driver.raw import Raw
from tests.harness.until import HANG_SECONDS, until

from lab.driver import build
from lab.driver.serve import Servers, serve

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PIECE = 2 * MIB
OTHER_ARENA = 0x310000000000
INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, DEVICE_UNAVAILABLE, ALREADY_MAPPED = 1, 2, 600, 46, 208
LINK = 7  # packet types in driver_calls.txt
RANGE, MAP, UNMAP, DONE, SIGNAL = range(1, 6)  # enum ww_link_said
MESSAGE = struct.Struct("=IiQQQ")  # type, result, at, nbytes, number

RIGHT = {
    "access": [
        "can 1 [0, 1, 1, 0] 0",
        "wrong 1 201 201 705",
        "enabled 0 704 0",
        "disabled 0 705",
        "copied {5}",
        "grown",
    ],
    "frees": ["waits True", "another True", "right True True"],
    "graph_memory": ["waits True others False", "done 0 True"],
    "graph_memory_behind": ["ran True True True freed False", "done 0 True"],
    "comes_back": ["codes 0 0 seen True again True"],
    "pinned": [
        "block {20} {20} True",
        "block {21} {21} True",
        "block {21} {21} True",
        "block {22} {22} True",
        "registered 0 {30}",
        "freed 0 True",
        "freed 0 True",
        "reset {50} 1",
    ],
    "waits_for_event": ["posted True True {1}", "done {2}"],
    "synchronous": ["codes 0 0 wrong 0"],
    "rows": ["codes 0 0 rows [{2}, {3}] [{3}, {2}]"],
    "lost": [
        "waiting",
        "told 46 0 True",
        "refused True True",
        "by the way {4}",
        "copied {8}",
        "linked again 0 {6}",
    ],
}
"""Expected output of the acts."""


def worker_of(server: Servers, ordinal: int) -> int:
    """Return the process of a device's worker."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.workers}
    (found,) = [pid for pid, line in commands.items() if f"--ordinal\0{ordinal}\0".encode() in line]
    return found


def output_of(server: Servers, act: str, seconds: float = HANG_SECONDS) -> list[str]:
    """Return what an act says; the worker of device 0 is killed where it waits for that."""
    command = [sys.executable, "-m", "tests.harness.driver.peer_acts", act]
    with subprocess.Popen(
        command, env=server.environ(), cwd=ROOT, text=True, stdin=-1, stdout=-1, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline() if act == "lost" else ""
        if first == "waiting\n":
            os.kill(worker_of(server, 0), signal.SIGKILL)
        try:
            return (first + process.communicate("\n", timeout=seconds)[0]).splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@pytest.fixture(scope="module")
def server() -> Iterator[Servers]:
    """A server of two devices with little memory; operations take random times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_SEED", "7")
        with serve(2, driver=build.build().fake, quota=96 * MIB) as server:
            yield server


@pytest.mark.parametrize("act", RIGHT)
def test_devices_use_each_others_memory_and_events(server: Servers, act: str) -> None:
    assert output_of(server, act) == RIGHT[act]
    assert until(lambda: not server.workers)


def test_devices_that_cannot_reach_each_other_say_so_and_copy_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PEERS", "0")
    monkeypatch.setenv("FAKE_SEED", "7")
    with serve(2, driver=build.build().fake) as server:
        assert output_of(server, "access") == [
            "can 0 [0, 0, 0, 0] 0",
            "wrong 1 201 201 705",
            "enabled 217 217 217",
            "disabled 705 705",
            "copied {5}",
        ]
        assert programs(server, "--seeds", "0:8") == "8 programs are right\n"


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.PEERS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, changes = faults.PEERS[fault]
    monkeypatch.setenv("FAKE_SEED", "7")
    with natives.changed(changes) as planted, serve(2, driver=planted.fake, quota=96 * MIB) as server:
        try:
            assert output_of(server, act, seconds=20) != RIGHT[act]
        except subprocess.TimeoutExpired:
            pass


# -- a hostile client at the other end of a link ------------------------------------------------------------------


class Linked(Raw):
    """A client that is itself the other end of a link."""

    serial = 0

    def send_descriptor(self, descriptor: int | None, serial: int | None = None) -> int:
        """Hand a descriptor over and ask for a link; return the code."""
        self.serial += 1
        if descriptor is not None:
            fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            self.line.sendmsg([struct.pack("=II", LINK, self.serial if serial is None else serial)], fds)
        return self.call("LINK", struct.pack("=II", 1, self.serial))[0]

    def link(self) -> socket.socket:
        """Return the other end of a link."""
        own, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with peer:
            assert self.send_descriptor(peer.fileno()) == 0
        own.settimeout(HANG_SECONDS)
        return own

    def send_message(
        self, line: socket.socket, kind: int, at: int = 0, nbytes: int = 0, number: int = 0, fd: int = -1
    ) -> int:
        """Send a request over a link; return the code of its answer."""
        fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        line.sendmsg([MESSAGE.pack(kind, 0, at, nbytes, number)], fds)
        answer = MESSAGE.unpack(line.recv(100))
        assert answer[0] == DONE
        return int(answer[1])


def ended(line: socket.socket) -> bool:
    """Return True once the worker has closed its end."""
    try:
        while line.recv(100):
            pass
    except ConnectionResetError:
        pass
    return True


def test_what_is_no_link_is_refused(server: Servers) -> None:
    with Linked(server.folder) as raw:
        assert raw.send_descriptor(None) == INVALID_VALUE
        stream, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with open(os.devnull, "rb") as nothing, stream, far_end:
            assert [
                raw.send_descriptor(nothing.fileno()),
                raw.send_descriptor(stream.fileno()),
                raw.send_descriptor(raw.line.fileno(), 99),
            ] == [1, 1, 1]
        for peer in (16, 1 << 31):
            assert raw.call("LINK", struct.pack("=II", peer, 1))[0] == INVALID_VALUE
            assert raw.call("SHARE", struct.pack("=II", peer, 1))[0] == INVALID_VALUE
        assert raw.call("SHARE", struct.pack("=II", 1, 0))[0] == DEVICE_UNAVAILABLE
        raw.post("AWAIT", struct.pack("=IIQ", 0, 1, 5), stream=1)
        raw.post("SIGNAL", struct.pack("=IIQ", 77, 1, 5))
        assert raw.call("CTX_SYNC")[0] == 0
        assert raw.deferred[1] == 2
        with raw.link():
            assert raw.send_descriptor(raw.line.fileno()) == NOT_READY


def test_memory_that_is_not_lent_by_a_worker_is_refused(server: Servers) -> None:
    pin, borrowed = 0x200000000000, 0x200000100000
    with Linked(server.folder) as raw, Raw(server.folder, 1) as second:
        assert raw.call("LEND", struct.pack("=Q", pin))[0] == INVALID_VALUE
        for address, lends in ((pin, 1), (pin + 4096, 0)):
            assert raw.call("PIN", struct.pack("=QQII", address, 4096, lends, 0))[0] == 0
            os.close(socket.recv_fds(raw.line, 100, 1)[1][0])
        assert raw.call("LEND", struct.pack("=Q", pin + 4096))[0] == INVALID_VALUE
        assert raw.call("LEND", struct.pack("=Q", pin))[0] == 0
        _, (lent,), _, _ = socket.recv_fds(raw.line, 100, 1)
        unsealed, file = os.memfd_create("unsealed"), os.open(os.devnull, os.O_RDWR)
        os.ftruncate(unsealed, 4096)
        codes = []
        wrong = [(unsealed, borrowed, 4096), (file, borrowed, 4096), (lent, borrowed, 8192)]
        right = [(lent, borrowed, 4096), (lent, borrowed, 4096), (lent, pin, 4096)]
        for serial, (descriptor, address, nbytes) in enumerate([*wrong, *right]):
            fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            second.line.sendmsg([struct.pack("=II", LINK, serial)], fds)
            codes.append(second.call("BORROW", struct.pack("=QQII", address, nbytes, 0, serial))[0])
        assert codes == [INVALID_VALUE, INVALID_VALUE, INVALID_VALUE, 0, ALREADY_MAPPED, 0]
        assert second.call("BORROW", struct.pack("=QQII", borrowed + 4096, 4096, 0, 77))[0] == INVALID_VALUE
        raw.post("COPY", struct.pack("=QQQ", pin, pin + 4096, 8), stream=1)
        assert raw.call("CTX_SYNC")[0] == 0
        second.post("IN", struct.pack("=QQ", pin, 4) + b"seen", stream=1)
        assert second.call("CTX_SYNC")[0] == 0
        assert os.pread(lent, 8, 0) == b"seen" + bytes(4)
        assert [second.call("UNPIN", struct.pack("=Q", address))[0] for address in (borrowed, pin, pin)] == [0, 0, 1]
        for descriptor in (lent, unsealed, file):
            os.close(descriptor)


def test_borrowed_memory_leaves_a_worker_the_bound_of_its_own(server: Servers) -> None:
    """The memory is half of the host's, of which no page exists."""
    pin, nbytes = 0x200000000000, os.sysconf("SC_PHYS_PAGES") // 2 * os.sysconf("SC_PAGE_SIZE")
    lent = os.memfd_create("lent", os.MFD_ALLOW_SEALING)
    os.ftruncate(lent, nbytes)
    fcntl.fcntl(lent, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with Linked(server.folder) as raw:
        for serial, code in enumerate([0, OUT_OF_MEMORY]):
            fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lent]))]
            raw.line.sendmsg([struct.pack("=II", LINK, serial)], fds)
            address = pin + serial * nbytes
            assert raw.call("BORROW", struct.pack("=QQII", address, nbytes, 0, serial))[0] == code
        assert raw.call("PIN", struct.pack("=QQII", pin + nbytes, 4096, 0, 0))[0] == 0
    os.close(lent)


def test_what_comes_over_a_link_is_checked(server: Servers) -> None:
    with Linked(server.folder) as raw:
        own = raw.alloc(4096)
        raw.put(own, b"x" * 4096)
        with raw.link() as line, open(os.devnull, "rb") as nothing:
            fd = nothing.fileno()
            for nbytes in (0, 1, PIECE - 1, 1 << 41, (1 << 64) - PIECE):
                assert raw.send_message(line, RANGE, OTHER_ARENA, nbytes) == INVALID_VALUE
            assert raw.send_message(line, MAP, OTHER_ARENA, PIECE, fd=fd) == INVALID_VALUE  # before the first RANGE
            # The worker uses these addresses itself.
            assert raw.send_message(line, RANGE, raw.arena, raw.arena_bytes) != 0
            assert raw.send_message(line, RANGE, OTHER_ARENA, 8 * PIECE) == 0
            assert raw.send_message(line, RANGE, OTHER_ARENA + 16 * PIECE, PIECE) == INVALID_VALUE
            for at, nbytes in [
                (raw.arena, PIECE),
                (OTHER_ARENA - PIECE, PIECE),
                (OTHER_ARENA, 9 * PIECE),
                (OTHER_ARENA, 0),
                (OTHER_ARENA + 1, PIECE),
                ((1 << 64) - PIECE, PIECE),
                (OTHER_ARENA, (1 << 64) - PIECE),
            ]:
                assert raw.send_message(line, MAP, at, nbytes, fd=fd) == INVALID_VALUE
                assert raw.send_message(line, UNMAP, at, nbytes) == INVALID_VALUE
            assert raw.send_message(line, MAP, OTHER_ARENA, PIECE) == INVALID_VALUE
            # The descriptor is not memory of the driver.
            assert raw.send_message(line, MAP, OTHER_ARENA, PIECE, fd=fd) != 0
            raw.post("COPY", struct.pack("=QQQ", own, OTHER_ARENA, 4096), stream=1)
            assert raw.call("CTX_SYNC")[0] == 0
            assert raw.deferred == (INVALID_VALUE, 1)
            assert raw.get(own, 4096) == b"x" * 4096


@pytest.mark.parametrize("packet", [b"", b"x", bytes(32), MESSAGE.pack(6, 0, 0, 0, 0), MESSAGE.pack(1, 0, 0, 0, 0) * 2])
def test_a_malformed_message_ends_the_link_alone(server: Servers, packet: bytes) -> None:
    with Linked(server.folder) as raw:
        line = raw.link()
        raw.post("AWAIT", struct.pack("=IIQ", 0, 1, 5), stream=1)
        line.send(packet)
        assert ended(line)
        assert raw.call("CTX_SYNC")[0] == 0
        assert raw.deferred == (DEVICE_UNAVAILABLE, 1)
        line.close()
        own, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with own, peer:
            assert until(lambda: raw.send_descriptor(peer.fileno()) == 0)


def test_a_client_that_hears_nothing_of_its_link_waits_alone(server: Servers) -> None:
    """Requests that are never answered, and signals without a reader or a waiter."""
    with Linked(server.folder) as raw, Raw(server.folder) as witness:
        line = raw.link()
        raw.post("EVENT_CREATE", struct.pack("=II", 1, 0))
        for number in range(3000):
            raw.post("SIGNAL", struct.pack("=IIQ", 1, 1, number))
        for number in range(2000):
            line.send(MESSAGE.pack(SIGNAL, 0, 0, 0, number))
        raw.post("AWAIT", struct.pack("=IIQ", 0, 1, 1999), stream=1)
        assert raw.call("CTX_SYNC")[0] == 0
        raw.post("SHARE", struct.pack("=II", 1, 0), slot=3)  # the worker answers it after this peer's answer
        assert witness.get(witness.alloc(64), 64)
        numbers = [MESSAGE.unpack(line.recv(100)) for _ in range(3001)]
        assert [message[4] for message in numbers if message[0] == SIGNAL] == list(range(3000))
        assert [message for message in numbers if message[0] == RANGE] == [(RANGE, 0, raw.arena, raw.arena_bytes, 0)]
        line.close()
        assert raw.call("ALLOC", struct.pack("=Q", 64))[0] == 0
        assert raw.deferred == (0, 0)
    assert until(lambda: not server.workers)
