"""The disk with a volatile cache: foreign clients (qemu-img, qemu-io), and a client that says nothing but bytes."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

from lab.drives import nbd
from lab.drives.nbd import SECTOR, NbdServer
from warpwell import errors

foreign = pytest.mark.skipif(shutil.which("qemu-io") is None, reason="no qemu-io: apt-get install qemu-utils")
NBYTES = 1 << 20


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(3).integers(1, 256, NBYTES, np.uint8)


@pytest.fixture
def disk(content: np.ndarray) -> Iterator[NbdServer]:
    with NbdServer(content, seed=1) as made:
        yield made


def tool(*arguments: str) -> str:
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    return ran.stdout + ran.stderr


class Raw:
    """A client that sends requests without waiting for answers."""

    def __init__(self, disk: NbdServer) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(disk.path)
        assert self.take(18)[:8] == b"NBDMAGIC"
        self.socket.sendall(struct.pack(">IQII", 3, nbd.OPTION_MAGIC, nbd.OPT_EXPORT_NAME, 0))
        self.nbytes, self.flags = struct.unpack(">QH", self.take(10))

    def take(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            part = self.socket.recv(nbytes - len(got))
            assert part, "the disk has hung up"
            got += part
        return got

    def send(self, *requests: tuple[int, int, int, bytes]) -> None:
        """Send (kind, offset, length, data) in one piece."""
        self.socket.sendall(
            b"".join(
                nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, kind, k, offset, length) + data
                for k, (kind, offset, length, data) in enumerate(requests)
            )
        )

    def answers(self, count: int) -> list[int]:
        """Take answers without data; return their error numbers in the order of the requests."""
        found = {}
        for _ in range(count):
            magic, code, cookie = struct.unpack(">IIQ", self.take(16))
            assert magic == nbd.SIMPLE_REPLY_MAGIC
            found[cookie] = code
        return [found[k] for k in range(count)]

    def do(self, *request: object) -> int:
        self.send(request)  # type: ignore[arg-type]
        return self.answers(1)[0]

    def close(self, disk: NbdServer) -> None:
        """End as a killed process does."""
        self.socket.close()
        until(lambda: disk.losses)
        disk.wait_alone()


def sector(value: int) -> bytes:
    return bytes([value]) * SECTOR


@foreign
def test_foreign_programs_find_a_disk(disk: NbdServer, content: np.ndarray, tmp_path: object) -> None:
    assert "virtual size: 1 MiB" in tool("qemu-img", "info", disk.url)
    copy = f"{tmp_path}/copy.raw"
    assert tool("qemu-img", "convert", "-O", "raw", disk.url, copy) == ""
    assert np.array_equal(np.fromfile(copy, np.uint8), content)
    output = tool(
        "qemu-io",
        "-f",
        "raw",
        "-c",
        "write -P 7 512 64k",
        "-c",
        "read -P 7 512 64k",
        "-c",
        "flush",
        "-c",
        "aio_write -P 8 0 512",
        "-c",
        "aio_flush",
        disk.url,
    )
    assert "wrote 65536/65536" in output and "read 65536/65536" in output and "failed" not in output
    disk.wait_alone()
    assert disk.losses == 0 and disk.requests[nbd.FLUSH] > 0
    content[512 : 512 + 65536] = 7
    content[:512] = 8
    assert np.array_equal(disk.contents(), content)


@foreign
def test_a_killed_client_loses_what_it_did_not_flush(disk: NbdServer, content: np.ndarray) -> None:
    commands = ["write -P 7 0 128k", "flush", "write -P 8 64k 128k", "write -P 9 64k 128k", "sleep 60000"]
    options = [word for command in commands for word in ("-c", command)]
    program = ["qemu-io", "-t", "writeback", "-f", "raw", *options, disk.url]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL) as client:
        until(lambda: disk.requests[nbd.WRITE] >= 3)
        client.kill()
    disk.wait_alone()
    assert disk.losses == 1 and disk.unflushed == 0
    left = disk.contents()
    assert (left[: 64 << 10] == 7).all() and np.array_equal(left[192 << 10 :], content[192 << 10 :])
    torn = left[64 << 10 : 192 << 10].reshape(-1, SECTOR)
    newest = (torn == 9).all(axis=1)
    assert newest.sum() == 256 - disk.dropped and 90 < disk.dropped < 166
    before = np.concatenate([np.full(64 << 10, 7, np.uint8), content[128 << 10 : 192 << 10]]).reshape(-1, SECTOR)
    older = (torn == 8).all(axis=1)
    assert older.any() and ((torn == before).all(axis=1) | newest | older).all() and not (newest | older).all()


def test_a_flush_covers_only_what_was_acknowledged(content: np.ndarray) -> None:
    lost = 0
    for seed in range(6):
        with NbdServer(content, seed=seed) as disk:
            client = Raw(disk)
            assert client.nbytes == NBYTES and client.do(nbd.WRITE, 0, SECTOR, sector(1)) == 0
            # the second write is not acknowledged when the flush is sent, so the flush says nothing about it
            client.send((nbd.WRITE, SECTOR, SECTOR, sector(2)), (nbd.FLUSH, 0, 0, b""))
            assert client.answers(2) == [0, 0]
            client.close(disk)
            left = disk.contents()
            assert (left[:SECTOR] == 1).all()
            lost += not (left[SECTOR : 2 * SECTOR] == 2).all()
    assert 0 < lost < 6


def test_a_lost_sector_has_one_of_its_contents(content: np.ndarray) -> None:
    contents = set()
    for seed in range(40):
        with NbdServer(content, seed=seed) as disk:
            client = Raw(disk)
            for value in (1, 2, 3):
                client.do(nbd.WRITE, 0, SECTOR, sector(value))
            client.close(disk)
            left = disk.contents()[:SECTOR].tobytes()
            assert left in (content[:SECTOR].tobytes(), sector(1), sector(2), sector(3))
            contents.add(left)
    assert len(contents) == 4


def test_requests_that_fail(disk: NbdServer) -> None:
    client = Raw(disk)
    assert client.do(nbd.WRITE, NBYTES - SECTOR, 2 * SECTOR, bytes(2 * SECTOR)) == errno.ENOSPC
    assert client.do(nbd.READ, 100, SECTOR, b"") == errno.EINVAL
    assert client.do(nbd.READ, NBYTES, SECTOR, b"") == errno.EINVAL
    assert client.do(9, 0, 0, b"") == errno.EINVAL
    disk.fault = lambda kind, offset, length: errno.EIO if kind == nbd.FLUSH else 0
    assert client.do(nbd.FLUSH, 0, 0, b"") == errno.EIO
    client.close(disk)
    with NbdServer(NBYTES, writable=False) as disk:
        client = Raw(disk)
        assert client.flags & nbd.READ_ONLY and client.do(nbd.WRITE, 0, SECTOR, sector(1)) == errno.EPERM
        client.close(disk)
        assert not disk.contents().any()
    with pytest.raises(errors.ArgumentError, match="multiple of 512"):
        NbdServer(1000)


def test_closing_leaves_nothing(content: np.ndarray) -> None:
    disk = NbdServer(content)
    client = Raw(disk)
    disk.answering.clear()
    client.send((nbd.WRITE, 0, SECTOR, sector(1)))
    with pytest.raises(TimeoutError, match="is connected"):
        disk.wait_alone(0.01)
    disk.close()
    disk.close()
    client.socket.settimeout(5)
    while client.socket.recv(100):
        pass
    client.socket.close()
    assert not disk._thread.is_alive() and not os.path.exists(os.path.dirname(disk.path))


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(64), b"\xff" * 64])
def test_a_client_that_speaks_something_else_is_hung_up_on(disk: NbdServer, noise: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(disk.path)
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        while stranger.recv(1000):
            pass
    disk.wait_alone()
    assert disk.losses == 0
    client = Raw(disk)
    assert client.do(nbd.FLUSH, 0, 0, b"") == 0
    client.close(disk)
