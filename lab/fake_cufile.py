"""`FakeCuFile`: the functions of `cuda.bindings.cufile` that Warpwell calls, by pread into host memory, with faults.

It refuses wrong use that the real library may leave undefined: reads outside of registered memory, a second
submission to a busy batch, and deregistration of memory or files that reads in flight use.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from random import Random
from typing import Any

import numpy as np

from warpwell.storage import cufile
from warpwell.targets.memory import view_of

COMPAT_BUFFERS = 20
"""Buffers for reads in flight in compatibility mode."""
INVALID_VALUE = 5022
IO_ERROR = 5044


class FakeCuFileError(Exception):
    """An error of the fake library; `status` is the number in ``cufile.h``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{text} ({status})")
        self.status = status


class FakeCuFile:
    """A libcufile whose device memory is host memory.

    Parameters
    ----------
    seed : int
        Of the order of completions.
    p2p, compat : bool
        Whether the host has P2PDMA; whether another library has opened it in compatibility mode before.
    out_of_order : bool
        Complete random reads in flight, at most a few at each poll; else all, in order.
    short_every, again_every, fail_every : int
        Interval, in completions, of reads of half the bytes, of EAGAIN, and of EIO; 0: never.
    corrupt : bool
        Return wrong bytes.
    errors : dict of str to int
        Names of functions that raise once, with the number of their calls that succeed before that.
    silent_after : int, optional
        Completions after which no read completes, even after it was canceled.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        p2p: bool = True,
        compat: bool = False,
        out_of_order: bool = False,
        short_every: int = 0,
        again_every: int = 0,
        fail_every: int = 0,
        corrupt: bool = False,
        errors: dict[str, int] | None = None,
        silent_after: int | None = None,
    ) -> None:
        self.p2p, self.allow_compat, self.out_of_order = p2p, compat, out_of_order
        self.short_every, self.again_every, self.fail_every = short_every, again_every, fail_every
        self.corrupt, self.errors, self.silent_after = corrupt, dict(errors or {}), silent_after
        self.is_open = compat
        self.handles: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.batches: dict[int, tuple[int, list[Any]]] = {}
        """Size and reads in flight, by handle."""
        self.completions = self.bytes_read = self.calls = 0
        self._random = Random(seed)
        self._numbers = itertools.count(1)

    @property
    def registrations(self) -> int:
        """Number of handles, buffers and batches that exist."""
        return len(self.handles) + len(self.buffers) + len(self.batches)

    def _enter(self, name: str) -> None:
        self.calls += 1
        if name in self.errors:
            self.errors[name] -= 1
            if self.errors[name] < 0:
                del self.errors[name]
                raise FakeCuFileError(IO_ERROR, f"planted error of {name}")

    def _require(self, condition: bool, text: str) -> None:
        if not condition:
            raise FakeCuFileError(INVALID_VALUE, text)

    # -- the library ------------------------------------------------------------------------------------------

    def set_parameter_bool(self, parameter: int, value: bool) -> None:
        """Set a parameter of the process, before `driver_open`."""
        self._enter("set_parameter_bool")
        self._require(not self.is_open, "the driver is open")
        if parameter == cufile.ALLOW_COMPAT_MODE:
            self.allow_compat = value

    def driver_open(self) -> None:
        """Open the library."""
        self._enter("driver_open")
        if self.is_open:
            raise FakeCuFileError(cufile.DRIVER_ALREADY_OPEN, "the driver is already open")
        self.is_open = True

    def driver_get_properties(self, address: int) -> None:
        """Store the properties at an address."""
        self._enter("driver_get_properties")
        properties = view_of(address, 4 * cufile.PROPERTY_WORDS, np.uint32)
        properties[cufile.STATUS] = self.p2p << cufile.NVME_P2P_SUPPORTED
        properties[cufile.CONTROL] = self.allow_compat << cufile.ALLOW_COMPAT_MODE
        properties[cufile.BATCH] = 16

    # -- registrations ----------------------------------------------------------------------------------------

    def handle_register(self, address: int) -> int:
        """Register a file that is open with O_DIRECT; return its handle."""
        self._enter("handle_register")
        descriptor = view_of(address, cufile.DESCRIPTOR.itemsize, cufile.DESCRIPTOR)[0]
        with open(f"/proc/self/fdinfo/{descriptor['fd']}") as info:
            flags = int(next(line for line in info if line.startswith("flags")).split()[1], 8)
        self._require(bool(flags & os.O_DIRECT) and descriptor["type"] == 1, "the file is not open with O_DIRECT")
        handle = next(self._numbers)
        self.handles[handle] = int(descriptor["fd"])
        return handle

    def handle_deregister(self, handle: int) -> None:
        """Deregister a file, which must still be open."""
        self._enter("handle_deregister")
        os.fstat(self.handles[handle])
        self._require(all(read["handle"] != handle for read in self._in_flight()), "reads of the file are in flight")
        del self.handles[handle]

    def buf_register(self, address: int, nbytes: int, flags: int) -> None:
        """Register memory."""
        self._enter("buf_register")
        self._require(flags == 0 and address % 512 == 0 and address not in self.buffers, "wrong registration")
        self.buffers[address] = nbytes

    def buf_deregister(self, address: int) -> None:
        """Deregister memory."""
        self._enter("buf_deregister")
        self._require(all(read["base"] != address for read in self._in_flight()), "reads into memory are in flight")
        del self.buffers[address]

    # -- batches ----------------------------------------------------------------------------------------------

    def batch_io_set_up(self, size: int) -> int:
        """Return the handle of a new batch of at most `size` reads."""
        self._enter("batch_io_set_up")
        self._require(0 < size <= 16, "the batch is too large")
        batch = next(self._numbers)
        self.batches[batch] = size, []
        return batch

    def batch_io_submit(self, batch: int, count: int, address: int, flags: int) -> None:
        """Submit reads."""
        self._enter("batch_io_submit")
        size, in_flight = self.batches[batch]
        self._require(not in_flight and 0 < count <= size and flags == 0, "the batch is busy or too small")
        if self.allow_compat and not self.p2p:
            self._require(len(self._in_flight()) + count <= COMPAT_BUFFERS, "the call would never get its buffers")
        reads = view_of(address, count * cufile.READ.itemsize, cufile.READ).copy()
        for read in reads:
            end = read["offset"] + read["nbytes"]
            self._require(read["mode"] == 1 and read["opcode"] == 0 and read["handle"] in self.handles, "no such file")
            self._require(0 <= read["offset"] < end <= self.buffers[int(read["base"])], "outside of registered memory")
            aligned = read["file_offset"] % 512 == read["offset"] % 512 == read["nbytes"] % 512 == 0
            self._require(bool(aligned), "the read is not aligned")
        in_flight.extend(reads)

    def batch_io_get_status(self, batch: int, minimum: int, count: int, events: int, timeout: int) -> None:
        """Complete reads, and store their number and their events."""
        self._enter("batch_io_get_status")
        self._require(minimum == 0 and timeout != 0, "the call has no time limit")
        number, in_flight = ctypes.c_uint32.from_address(count), self.batches[batch][1]
        ready = min(len(in_flight), number.value)
        if self.out_of_order:
            self._random.shuffle(in_flight)
            ready = min(ready, self._random.randrange(4))
        out = view_of(events, max(1, number.value) * cufile.EVENT.itemsize, cufile.EVENT)
        number.value = 0
        while number.value < ready and (self.silent_after is None or self.completions < self.silent_after):
            read = in_flight.pop(0)
            result = self._carry_out(read)
            out[number.value] = read["cookie"], cufile.COMPLETE if result >= 0 else 64, 0, result
            number.value += 1

    def batch_io_cancel(self, batch: int) -> None:
        """Do nothing: drives do not cancel reads."""
        self._enter("batch_io_cancel")
        self._require(bool(self.batches[batch][1]), "nothing is in flight")

    def batch_io_destroy(self, batch: int) -> None:
        """Delete a batch."""
        self._enter("batch_io_destroy")
        self._require(not self.batches[batch][1], "reads are in flight")
        del self.batches[batch]

    def _in_flight(self) -> list[Any]:
        return [read for _, reads in self.batches.values() for read in reads]

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.completions % every == 0

    def _carry_out(self, read: Any) -> int:
        """Read, and return the number of bytes or a negative error number."""
        self.completions += 1
        if self._is_due(self.again_every):
            return -errno.EAGAIN
        if self._is_due(self.fail_every):
            return -errno.EIO
        nbytes = int(read["nbytes"])
        if self._is_due(self.short_every):
            nbytes = max(512, nbytes // 1024 * 512)
        with mmap.mmap(-1, nbytes) as raw, memoryview(raw) as view:
            got = os.preadv(self.handles[int(read["handle"])], [view], int(read["file_offset"]))
            target = view_of(int(read["base"] + read["offset"]), nbytes, np.uint8)
            target[:got] = np.frombuffer(view[:got], np.uint8) + np.uint8(self.corrupt)
        self.bytes_read += got
        return got
