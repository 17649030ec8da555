"""`PeerAccess`: another device of this host whose memory this device writes to."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any, Protocol

from ... import errors

PIECE = 64 << 20
"""Size in bytes of a system call, which moves at most 2 GiB."""

_libc = ctypes.CDLL(None, use_errno=True)


class PeerAccess(Protocol):
    """The access of this device to the memory of another one."""

    def open(self, block: Any) -> int:
        """Return the address for `put` of a block that the other runtime has exported."""
        return int(block)

    def close(self, address: int) -> None:
        """Stop using a block; its owner may free it when this returns."""
        return

    def put(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy memory of this device to the other device, in the order of a stream of this device."""


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class HostAccess(PeerAccess):
    """Host memory of a process of this user, by ``process_vm_writev``: one copy, by the kernel.

    Parameters
    ----------
    process : int
    address : int
        Address of `proof` in that process.
    proof : bytes

    Raises
    ------
    OSError
        The kernel does not allow it (``ptrace_scope``), or the process has exited.
    PoolError
        The process does not hold the proof.
    """

    def __init__(self, process: int, address: int, proof: bytes) -> None:
        self._process = process
        found = ctypes.create_string_buffer(len(proof))
        self._transfer(_libc.process_vm_readv, ctypes.addressof(found), address, len(proof))
        if found.raw != proof:
            raise errors.PoolError(f"process {process} is not the agent that exported the memory")

    def put(self, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Copy memory of this device to the other process before it returns."""
        for offset in range(0, nbytes, PIECE):
            self._transfer(_libc.process_vm_writev, source + offset, to + offset, min(PIECE, nbytes - offset))

    def _transfer(self, function: Any, local_address: int, remote_address: int, nbytes: int) -> None:
        while nbytes:
            local, remote = _Vector(local_address, nbytes), _Vector(remote_address, nbytes)
            ends = ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0)
            moved = function(self._process, *ends)
            if moved <= 0:
                number = ctypes.get_errno() or errno.EFAULT
                raise OSError(number, f"memory of process {self._process}: {os.strerror(number)}")
            local_address, remote_address, nbytes = local_address + moved, remote_address + moved, nbytes - moved


for _function in (_libc.process_vm_readv, _libc.process_vm_writev):
    _function.restype = ctypes.c_ssize_t
