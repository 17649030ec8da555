"""`Neighbour`: another device of this host, to whose memory this one writes; how agents of one host give data."""

from __future__ import annotations

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from ... import errors

PIECE = 64 << 20
"""Bytes of one system call; it takes no more than 2 GiB."""

_started = os.urandom(16)
_libc = ctypes.CDLL(None, use_errno=True)


def this_process() -> bytes:
    """Return what no other process has, on any host, nor a child that was forked."""
    return _started + os.getpid().to_bytes(8, "little")


class Neighbour(ABC):
    """The way from one device to another's memory."""

    @abstractmethod
    def open(self, block: Any) -> Any:
        """Return a block of the other device, as its runtime `offers` it, with an ``address`` that counts here."""

    @abstractmethod
    def close(self, opened: Any) -> None:
        """Use a block no more; when this returns, its owner may free it."""

    @abstractmethod
    def put(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy this device's memory to the other's, in the order of a stream of this one."""


class Blocks:
    """The blocks of this process's devices that were offered, for who is in the same process."""

    def __init__(self) -> None:
        self._blocks: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def add(self, block: Any) -> int:
        """Offer a block; return its address."""
        self._blocks[block.address] = block
        return int(block.address)

    def get(self, address: int) -> Any:
        """Return the block, which is kept as long as whoever asked has it."""
        try:
            return self._blocks[address]
        except KeyError:
            raise errors.PoolError(f"there is no block at {address:#x} any more") from None


blocks = Blocks()


class HostInside(Neighbour):
    """Host memory of this process.

    Parameters
    ----------
    runtime : Runtime
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def open(self, block: Any) -> Any:
        return blocks.get(block)

    def close(self, opened: Any) -> None:
        """Do nothing: nothing was opened."""

    def put(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        self._runtime.copy(stream, to, source, nbytes)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class HostOutside(Neighbour):
    """Host memory of another process of this user, by ``process_vm_writev``: one copy, by the kernel.

    Parameters
    ----------
    process : int
    address : int
        Where in it `proof` lies.
    proof : bytes

    Raises
    ------
    OSError
        The kernel does not allow it (``ptrace_scope``), or there is no such process.
    PoolError
        It is another process.
    """

    def __init__(self, process: int, address: int, proof: bytes) -> None:
        self._process = process
        found = ctypes.create_string_buffer(len(proof))
        self._move(_libc.process_vm_readv, ctypes.addressof(found), address, len(proof))
        if found.raw != proof:
            raise errors.PoolError(f"process {process} is not the agent that was meant")

    def open(self, block: Any) -> Any:
        return SimpleNamespace(address=block)

    def close(self, opened: Any) -> None:
        """Do nothing: nothing was opened."""

    def put(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy; it is done when it returns."""
        for at in range(0, nbytes, PIECE):
            self._move(_libc.process_vm_writev, source + at, to + at, min(PIECE, nbytes - at))

    def _move(self, way: Any, here: int, there: int, nbytes: int) -> None:
        while nbytes:
            local, remote = _Vector(here, nbytes), _Vector(there, nbytes)
            ends = ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0)
            moved = way(self._process, *ends)
            if moved <= 0:
                number = ctypes.get_errno() or errno.EFAULT
                raise OSError(number, f"memory of process {self._process}: {os.strerror(number)}")
            here, there, nbytes = here + moved, there + moved, nbytes - moved


for _way in (_libc.process_vm_readv, _libc.process_vm_writev):
    _way.restype = ctypes.c_ssize_t
