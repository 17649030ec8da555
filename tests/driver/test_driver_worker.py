"""A worker on the fake driver: parked calls, freed memory, losses; and the handshake of its server."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.driver.raw import DONE, FACTS, HELLO, OPEN, REFUSED, Lost, Raw
from tests.harness.until import HANG_SECONDS, until

from lab.driver import build
from lab.driver.serve import Servers, client_environ, serve
from warpwell.driver.environment import without_layer

NOT_READY, OUT_OF_MEMORY, INVALID_VALUE, INVALID_HANDLE, ILLEGAL_ADDRESS = 600, 2, 1, 400, 700
LEGACY, BLOCKING, FREE, SECOND_BLOCKING = 1, 20, 21, 22
EVENT = 1
KERNELS = b"//FAKE\nkernel fill 8 8 4\nkernel copy 8 8 8\nkernel flag 8 4\nkernel fault\n\0"
ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class Client(Raw):
    """A raw client with three streams, an event, kernels, and a page of zeros."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for stream, flags in ((BLOCKING, 0), (FREE, 1), (SECOND_BLOCKING, 0)):
            self.post("STREAM_CREATE", struct.pack("=IIiI", stream, flags, 0, 0))
        self.post("EVENT_CREATE", struct.pack("=II", EVENT, 0))
        self.kernels = self.load(KERNELS)[1]
        self.page = self.alloc(4096)
        self.fill(0, 1024, 0)
        assert self.call("CTX_SYNC") == (0, b"")

    def launch(self, name: str, parameters: bytes, stream: int) -> None:
        head = struct.pack("=I3I3II4I", self.kernels[name], 1, 1, 1, 1, 1, 1, 0, 0, len(parameters), 0, 0)
        self.post("LAUNCH", head + parameters, stream=stream)

    def fill(self, item: int, count: int, value: int, stream: int = LEGACY) -> None:
        """Set items of the page."""
        self.post("MEMSET", struct.pack("=QQII", self.page + 4 * item, count, value, 4), stream=stream)

    def stick(self, stream: int) -> None:
        """Let a stream wait until item 0 of the page is 1."""
        self.launch("flag", struct.pack("=QI", self.page, 1), stream)

    def items(self) -> tuple[int, ...]:
        self.post("OUT", struct.pack("=QQ", self.page, 4096), stream=FREE, staging_index=2, nbytes=4096)
        assert self.wait_for_staging(2) == 0
        return struct.unpack_from("=1024I", self.staging, MIB)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setenv("FAKE_BLOCKED", str(tmp_path / "blocked"))
    with serve(1, driver=build.build().fake, quota=64 * MIB) as server:
        yield server
    assert not server.folder.exists()
    with contextlib.suppress(FileNotFoundError):
        assert "main" not in (tmp_path / "blocked").read_text()


@pytest.fixture
def client(server: Servers) -> Iterator[Client]:
    with Client(server.folder) as client:
        yield client
        assert client.deferred == (0, 0)


def query(client: Client, stream: int) -> int:
    return client.call("STREAM_QUERY", stream=stream)[0]


def test_a_stream_that_is_never_ready_holds_up_only_who_waits_for_it(client: Client) -> None:
    client.stick(BLOCKING)
    for i in range(3000):  # more than the driver queues, and than the worker issues to it
        client.launch("fill", struct.pack("=QQI", client.page + 4, 1, i), BLOCKING)
    client.post("EVENT_RECORD", struct.pack("=II", EVENT, 0), stream=BLOCKING)
    client.post("STREAM_WAIT", struct.pack("=II", EVENT, 0), stream=SECOND_BLOCKING)
    client.fill(2, 1, 5, SECOND_BLOCKING)
    for i in range(3000):
        client.launch("fill", struct.pack("=QQI", client.page + 12, 1, i), FREE)
    assert client.call("STREAM_SYNC", stream=FREE)[0] == 0
    assert (query(client, BLOCKING), query(client, SECOND_BLOCKING), query(client, FREE)) == (NOT_READY, NOT_READY, 0)
    assert client.call("EVENT_QUERY", struct.pack("=II", EVENT, 0))[0] == NOT_READY
    memory = client.alloc(MIB)
    client.post("FREE", struct.pack("=Q", memory))
    assert client.alloc(MIB) != memory  # the memory is reused when all streams have passed the free
    client.post("CTX_SYNC", slot=7)
    assert client.items()[:4] == (0, 0, 0, 2999)
    client.fill(0, 1, 1, FREE)
    assert client.call("CTX_SYNC", slot=8)[0] == 0
    assert client.items()[:4] == (1, 2999, 5, 2999)


def test_parked_calls_of_the_legacy_stream_and_of_blocking_streams_keep_their_order(client: Client) -> None:
    client.stick(BLOCKING)
    for i in range(600):  # so that later calls are parked
        client.fill(1, 1, i, BLOCKING)
    for i in range(100):
        client.fill(2, 1, 3 * i, LEGACY)
        client.fill(2, 1, 3 * i + 1, SECOND_BLOCKING)
        client.fill(2, 1, 3 * i + 2, LEGACY)
    client.post("COPY", struct.pack("=QQQ", client.page + 12, client.page + 8, 4), stream=BLOCKING)
    client.fill(2, 1, 9999, LEGACY)
    assert query(client, SECOND_BLOCKING) == NOT_READY
    assert query(client, LEGACY) == NOT_READY
    assert query(client, FREE) == 0
    client.fill(0, 1, 1, FREE)
    assert client.call("STREAM_SYNC", stream=LEGACY)[0] == 0
    assert client.items()[:4] == (1, 599, 9999, 299)


def test_who_waits_for_one_stream_does_not_wait_for_later_calls_of_others(client: Client) -> None:
    client.fill(1, 1, 6, SECOND_BLOCKING)
    client.stick(BLOCKING)
    client.fill(2, 1, 7, LEGACY)  # waits for the stuck stream; a later mark in SECOND_BLOCKING would wait for this
    assert client.call("STREAM_SYNC", stream=SECOND_BLOCKING)[0] == 0
    assert client.items()[:3] == (0, 6, 0)
    client.fill(0, 1, 1, FREE)
    assert client.call("CTX_SYNC")[0] == 0
    assert client.items()[2] == 7


def test_a_copy_between_host_addresses_waits_for_its_stream_and_nobody_else_does(client: Client) -> None:
    pinned = 0x200000000000
    assert client.call("PIN", struct.pack("=QQII", pinned, 4096, 0, 0))[0] == 0
    _, (memory,), _, _ = socket.recv_fds(client.line, 100, 1)
    client.stick(BLOCKING)
    client.fill(1, 1, 5, BLOCKING)
    client.post("COPY", struct.pack("=QQQ", pinned, client.page, 8), stream=BLOCKING)
    client.post("COPY", struct.pack("=QQQ", pinned + 8, pinned, 8), stream=LEGACY)
    client.post("IN", struct.pack("=QQ", pinned + 16, 4) + b"host", stream=LEGACY)
    client.post("COPY", struct.pack("=QQQ", client.page + 32, pinned + 8, 12), stream=SECOND_BLOCKING)
    client.post("COPY", struct.pack("=QQQ", pinned + 100, pinned + 200, 8), stream=FREE)
    assert client.call("STREAM_SYNC", stream=FREE)[0] == 0
    assert os.pread(memory, 24, 0) == bytes(24)
    client.fill(0, 1, 1, FREE)
    assert client.call("STREAM_SYNC", stream=SECOND_BLOCKING)[0] == 0
    assert os.pread(memory, 20, 0) == struct.pack("=4I", 1, 5, 1, 5) + b"host"
    assert client.items()[8:10] == (1, 5)
    os.close(memory)
    assert client.call("UNPIN", struct.pack("=Q", pinned))[0] == 0


def test_small_payloads_of_a_stuck_stream_leave_room_for_others(client: Client) -> None:
    client.stick(BLOCKING)
    for i in range(700):
        client.post("IN", struct.pack("=QQ", client.page + 1024, 1024) + bytes([i % 256]) * 1024, stream=BLOCKING)
    for i in range(700):
        client.post("IN", struct.pack("=QQ", client.page + 2048, 1024) + bytes([i % 256]) * 1024, stream=FREE)
    assert client.call("STREAM_SYNC", stream=FREE)[0] == 0
    assert client.items()[512] == 0x01010101 * (699 % 256)
    client.fill(0, 1, 1, FREE)
    assert client.call("STREAM_SYNC", stream=BLOCKING)[0] == 0
    assert client.items()[256] == 0x01010101 * (699 % 256)


def test_an_allocation_waits_for_frees_and_is_refused_beyond_the_quota(client: Client) -> None:
    assert client.call("ALLOC", struct.pack("=Q", 65 * MIB))[0] == OUT_OF_MEMORY
    assert client.call("ALLOC", struct.pack("=Q", (1 << 64) - 100))[0] == OUT_OF_MEMORY
    first = client.alloc(40 * MIB)
    assert client.call("ALLOC", struct.pack("=Q", 40 * MIB))[0] == OUT_OF_MEMORY
    client.stick(FREE)
    client.post("FREE", struct.pack("=Q", first))
    client.post("ALLOC", struct.pack("=Q", 40 * MIB), slot=3)
    assert client.call("ALLOC_ASYNC", struct.pack("=Q", 0), stream=FREE)[0] == INVALID_VALUE
    client.fill(0, 1, 1, BLOCKING)
    at = 4096 + 4096 * 3
    client.until(lambda: struct.unpack_from("=I", client.status, at)[0] == 1, "the allocation")
    assert struct.unpack_from("=i", client.status, at + 4)[0] == 0
    free, total = struct.unpack("=QQ", client.call("MEM_INFO")[1])
    assert total == 64 * MIB
    assert free == 64 * MIB - 40 * MIB - 4096


def test_a_kernel_may_read_before_the_first_array(client: Client) -> None:
    """As with the driver's own allocations. Rodinia's srad_v2 does so, and ignores the values."""
    client.launch("copy", struct.pack("=QQQ", client.page, client.page - 2048, 2048), BLOCKING)
    assert client.call("CTX_SYNC") == (0, b"")


def mapped_by(server: Servers, client: Raw) -> Callable[[], int]:
    """Return a function for the MiB of memory that the client's worker has mapped since now."""

    def total() -> int:
        found = 0
        for line in Path(f"/proc/{server.workers[0]}/maps").read_text().splitlines():
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            inside = client.arena <= first < client.arena + client.arena_bytes
            found += last - first if inside and line.split()[1].startswith("rw") else 0
        return found // MIB

    before = total()
    return lambda: total() - before


def test_memory_that_was_freed_is_kept_for_a_second_for_who_makes_as_much_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_MEMORY", str(32 << 30))  # the worker keeps up to 1/32 of it mapped: 1 GiB
    with serve(1, driver=build.build().fake) as server, Raw(server.folder) as client:
        mapped = mapped_by(server, client)
        for count, freed in ((5, 640), (10, 1280)):
            for _ in range(2):  # the second time reuses the mapped memory
                pieces, last = [client.alloc(128 * MIB) for _ in range(count)], time.monotonic()
                assert freed <= mapped() < freed + 128
                for piece in pieces:
                    client.post("FREE", struct.pack("=Q", piece))
                assert client.call("CTX_SYNC") == (0, b"")
            mapped_before = mapped()
            assert (count == 10 or mapped_before >= 640) or time.monotonic() - last > 0.9
        until(lambda: mapped() <= 256)


def test_memory_that_nobody_needed_for_a_while_goes_back_whatever_else_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MEMORY", str(64 << 30))
    with serve(1, driver=build.build().fake) as server, Raw(server.folder) as client:
        mapped = mapped_by(server, client)
        large, last = [client.alloc(128 * MIB) for _ in range(16)], time.monotonic()
        for piece in large:
            client.post("FREE", struct.pack("=Q", piece))
        small = client.alloc(4096)
        assert mapped() >= 2048 or time.monotonic() - last > 0.9

        def make_another() -> bool:
            nonlocal small
            client.post("FREE", struct.pack("=Q", small))
            small = client.alloc(4096)
            return mapped() <= 320

        until(make_another)


def test_memory_that_a_stream_frees_is_the_next_ones_when_the_stream_has_passed(client: Client) -> None:
    for i in range(50):
        code, data = client.call("ALLOC_ASYNC", struct.pack("=Q", 30 * MIB), stream=FREE)
        assert code == 0
        client.launch("fill", data + struct.pack("=QI", 4, i), FREE)
        client.post("FREE_ASYNC", data, stream=FREE)
    client.stick(FREE)
    code, data = client.call("ALLOC_ASYNC", struct.pack("=Q", MIB), stream=FREE)
    client.post("FREE_ASYNC", data, stream=FREE)
    assert client.call("ALLOC_ASYNC", struct.pack("=Q", MIB), stream=SECOND_BLOCKING)[1] != data
    client.fill(0, 1, 1, BLOCKING)
    assert client.call("CTX_SYNC") == (0, b"")


def test_a_graph_that_was_never_made_is_dropped_without_a_word(client: Client) -> None:
    for graph in ((7, 0), (7, 3)):  # as if the first handle of graph 7 had been refused
        client.post("GRAPH_DROP", struct.pack("=II", *graph))
    assert client.call("CTX_SYNC") == (0, b"")


def test_wrong_calls_are_told_once_and_harm_nothing(server: Servers) -> None:
    with Client(server.folder) as client:
        wrong = {
            "COPY": [
                struct.pack("=QQQ", client.page, 0x1000, 64),
                struct.pack("=QQQ", client.page, client.page, 1 << 63),
            ],
            "MEMSET": [
                struct.pack("=QQII", client.page, 1 << 62, 0, 4),
                struct.pack("=QQII", client.page + 1, 4, 0, 2),
            ],
        }
        for op, calls in wrong.items():
            for arguments in calls:
                assert client.call(op, arguments, stream=FREE, flags=DONE)[0] == INVALID_VALUE
        assert client.call("STREAM_SYNC", stream=99)[0] == INVALID_HANDLE
        assert client.call("EVENT_SYNC", struct.pack("=II", 1 << 31, 0))[0] == INVALID_HANDLE
        client.post("FREE", struct.pack("=Q", client.page + 512))
        client.post("STREAM_CREATE", struct.pack("=IIiI", BLOCKING, 0, 0, 0))
        assert client.call("CTX_SYNC")[0] == 0
        assert client.deferred == (INVALID_VALUE, 2)
        assert set(client.items()) == {0}


def test_a_fault_of_one_client_is_its_own(server: Servers) -> None:
    with Client(server.folder) as bystander, Client(server.folder) as client:
        client.launch("fault", b"", FREE)
        with pytest.raises(Lost):
            for event in range(2, 1 << 16):  # calls fail because the context is lost
                client.post("EVENT_CREATE", struct.pack("=II", event, 0))
                client.post("EVENT_RECORD", struct.pack("=II", event, 0), stream=SECOND_BLOCKING)
                client.call("STREAM_QUERY", stream=SECOND_BLOCKING)
        assert client.deferred == (0, 0)
        assert client.sticky == ILLEGAL_ADDRESS
        assert bystander.call("CTX_SYNC")[0] == 0
        assert set(bystander.items()) == {0}
        until(lambda: len(server.workers) == 1)
    until(lambda: not server.workers)


def connect(server: Servers) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(HANG_SECONDS)
    line.connect(str(server.folder / "device-0"))
    return line


def test_a_server_outlives_what_clients_say(server: Servers) -> None:
    hello, descriptors = Raw.hello(HELLO), len(os.listdir("/proc/self/fd"))
    for packet in (b"x", b"", hello[:-1], hello + b"x", Raw.hello(OPEN), Raw.hello(9), b"\xff" * 24):
        with connect(server) as line:
            line.send(packet)
            line.shutdown(socket.SHUT_WR)
            assert line.recv(2000) == b""
    with connect(server) as line:
        line.send(hello[:8] + bytes(8) + hello[16:])
        assert struct.unpack_from("=I", line.recv(2000))[0] == REFUSED
    with connect(server) as line, connect(server) as second:
        socket.send_fds(second, [Raw.hello(OPEN)], [0] * 20)
        assert second.recv(2000) == b""
        line.send(hello)
        kind, version = struct.unpack_from("=II", line.recv(2000))
        assert (kind, version) == (FACTS, 13000)
    # The connection to the worker that sent the facts.
    until(lambda: len(os.listdir("/proc/self/fd")) == descriptors + 1)
    assert not server.workers


def test_who_told_the_facts_serves_the_first_client_and_a_spare_the_next(tmp_path: Path) -> None:
    parts, wrapper, log = build.build(), tmp_path / "worker", tmp_path / "log"
    wrapper.write_text(f'#!/bin/sh\necho $$ >> {log}\nexec {parts.worker} "$@"\n')
    wrapper.chmod(0o700)

    def started() -> list[int]:
        return [int(line) for line in log.read_text().split()]

    with serve(1, driver=parts.fake, parts=dataclasses.replace(parts, worker=wrapper)) as server:
        with connect(server) as line:
            line.send(Raw.hello(HELLO))
            assert struct.unpack_from("=I", line.recv(2000))[0] == FACTS
        assert len(started()) == 1 and not server.workers
        with Raw(server.folder) as first:
            assert started()[:1] == server.workers
            until(lambda: len(started()) == 2)  # a spare worker starts a second later
            with Raw(server.folder) as second:
                assert started()[:2] == server.workers
                until(lambda: len(started()) == 3)
                os.kill(started()[2], signal.SIGKILL)  # the server replaces a spare that was killed
                until(lambda: Path(f"/proc/{started()[2]}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z")
                with Raw(server.folder) as third:
                    assert [client.call("CTX_SYNC") for client in (first, second, third)] == [(0, b"")] * 3
                    assert len(server.workers) == 3
        until(lambda: len(started()) == 5)
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in started()))


def test_a_spare_that_could_not_start_refuses_nobody_later(tmp_path: Path) -> None:
    fake, driver = build.build().fake, tmp_path / "driver"
    driver.symlink_to(fake)
    with serve(1, driver=driver) as server:
        with Raw(server.folder) as first:
            driver.unlink()  # the next spare worker finds no driver
            # It has sent the refusal.
            until(lambda: (spare := server.servers[0]._spare) and select.select([spare.control], [], [], 0)[0])
            driver.symlink_to(fake)
            with Raw(server.folder) as second:
                assert [client.call("CTX_SYNC") for client in (first, second)] == [(0, b"")] * 2


def test_the_environment_of_clients_leads_to_the_layer_and_back() -> None:
    before = {"LD_LIBRARY_PATH": "/a:/b", "CUDA_VISIBLE_DEVICES": "3", "X": "y"}
    environ = client_environ("/job/cuda", before)
    assert environ["LD_LIBRARY_PATH"] == "/job/cuda/lib:/a:/b"
    assert "CUDA_VISIBLE_DEVICES" not in environ
    assert client_environ("/other", environ)["LD_LIBRARY_PATH"] == "/other/lib:/a:/b"
    back = without_layer(environ)
    assert back["LD_LIBRARY_PATH"] == "/a:/b"
    assert "WARPWELL_CUDA" not in back and "TRITON_LIBCUDA_PATH" not in back
    assert without_layer(client_environ("/job/cuda", {})).get("LD_LIBRARY_PATH") is None
