"""A GPU's memory pool is handed to other processes of this user by a socket; the driver is a stand-in here."""

from __future__ import annotations

import contextlib
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from warpwell import errors
from warpwell.pool.agent import memory_pool
from warpwell.pool.agent.memory_pool import ImportedPool, MemoryPool


class Driver:
    """The driver calls of a memory pool. The pool's descriptor is a pipe's."""

    def __init__(self, room: bool = True, reserved: int = 0) -> None:
        self.reserved = reserved
        self.room = room
        self.pipe = os.pipe()
        self.imported: list[str] = []
        self.destroyed: list[str] = []
        self.CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
        self.CUmemPool_attribute = SimpleNamespace(
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD=4,
            CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES=3,
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT=5,
            CU_MEMPOOL_ATTR_USED_MEM_CURRENT=7,
        )
        self.cuuint64_t = int

    def CUmemPoolProps(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemPoolProps

    def cuMemPoolCreate(self, properties: Any) -> Any:
        return 0, "own"

    def cuDeviceGetDefaultMemPool(self, ordinal: int) -> Any:
        return 0, "default"

    def cuMemGetInfo(self) -> Any:
        return 0, 1 << 30, 1 << 32

    def cuMemAllocFromPoolAsync(self, nbytes: int, pool: str, stream: int) -> Any:
        return (0, 4096) if self.room else (2, None)

    def cuMemPoolGetAttribute(self, pool: str, attribute: int) -> Any:
        return 0, self.reserved

    def cuMemPoolDestroy(self, pool: str) -> Any:
        self.destroyed.append(pool)
        return (0,)

    def cuMemPoolExportToShareableHandle(self, pool: str, kind: int, flags: int) -> Any:
        return 0, self.pipe[1]

    def cuMemPoolImportFromShareableHandle(self, descriptor: int, kind: int, flags: int) -> Any:
        os.write(descriptor, b"here")
        self.imported.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return 0, "imported"

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("cu")
        return lambda *arguments: (0,)


def gpu(driver: Driver) -> Any:
    """Return a GPU that imports pools."""
    return SimpleNamespace(driver=driver, ordinal=1, new_stream=lambda: None)


def test_a_pool_goes_to_another_process_as_a_descriptor() -> None:
    driver = Driver()
    pool = MemoryPool(driver, 0)
    assert pool.exportable and pool.handle == "own"
    name = pool.name()
    assert name is not None and name == pool.name()
    for _ in range(3):
        ImportedPool(gpu(driver), name)
        assert os.read(driver.pipe[0], 10) == b"here", "it is the pool's own"
    assert len(driver.imported) == 3


@pytest.mark.parametrize(("room", "reserved"), [(False, 0), (True, 32 << 20)], ids=["full", "keeps"])
def test_a_gpu_whose_pool_cannot_be_shared_has_the_default_one(room: bool, reserved: int) -> None:
    driver = Driver(room, reserved)
    pool = MemoryPool(driver, 0)
    assert (pool.exportable, pool.handle, pool.name()) == (False, "default", None)
    assert driver.destroyed == ["own"]


@pytest.mark.parametrize("side", ["owner", "importer"])
def test_another_user_gets_and_gives_nothing(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    name = MemoryPool(driver, 0).name()
    real = memory_pool.socket_peer

    def peer(connection: socket.socket) -> tuple[int, int]:
        process, user = real(connection)
        accepted = connection.getsockname() != ""
        return process, user + (accepted == (side == "owner"))

    monkeypatch.setattr(memory_pool, "socket_peer", peer)
    with pytest.raises((errors.PoolError, ValueError, OSError)):
        ImportedPool(gpu(driver), str(name))
    assert not driver.imported
    monkeypatch.undo()
    ImportedPool(gpu(driver), str(name))


def test_the_door_stays_open_when_a_visitor_cannot_be_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    name = str(MemoryPool(driver, 0).name())
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as visitor:  # the visitor disconnects at once
        visitor.connect("\0" + name)
    ImportedPool(gpu(driver), name)  # so the door has handled the first visitor
    real, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def accept(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    ImportedPool(gpu(driver), name)
    ImportedPool(gpu(driver), name)
    assert not failures
