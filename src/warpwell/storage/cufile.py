"""`CuFileReads`: bulk reads of files into device memory by libcufile (GPUDirect Storage), past host memory.

The library is the module `cuda.bindings.cufile` or a replacement with the same functions. This module defines the
structures of ``cufile.h`` itself, because their layout is fixed and releases of the bindings name the fields
differently.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._os import clock
from ..nvme.status import UNRECOVERED_READ_ERROR
from ..targets import ALIGNMENT, Block

USE_PCI_P2PDMA = 7
"""Parameter of libcufile: use the kernel's P2PDMA instead of the module nvidia-fs."""
ALLOW_COMPAT_MODE = 1
"""Parameter of libcufile, and bit of its control flags: copy through host memory if there is no direct path."""
NVME_P2P_SUPPORTED = 11
"""Bit of libcufile's status flags."""
DRIVER_ALREADY_OPEN = 5026
COMPLETE = 16
"""Status of an event; other statuses report a failed, canceled or timed-out read."""
MAX_BATCH = 128
"""Largest number of reads in a batch: the default limit of libcufile."""
COMPAT_READS = 16
"""Largest number of reads in flight if libcufile may copy through host memory. libcufile takes a buffer for each read
at its submission. A GPU has 32 to 64 buffers, and the call does not return if a batch needs more."""
MAX_RETRIES = 1000
"""Limit of submissions of a slot's reads after EAGAIN."""
POLL_SECONDS = 1e-4
"""Interval between two polls of reads in flight."""
DRAIN_TIMEOUT_SECONDS = 5.0
"""Time that reads in flight have to complete before their memory is deregistered."""

# The structures of cufile.h. In the first two an int and its padding are one word, because the padding is zero.
DESCRIPTOR = np.dtype([(name, "<i8") for name in ("type", "fd", "fs_ops")])
READ = np.dtype(
    [(name, "<i8") for name in ("mode", "base", "file_offset", "offset", "nbytes", "handle", "opcode", "cookie")]
)
EVENT = np.dtype([("cookie", "<i8"), ("status", "<i4"), ("padding", "<i4"), ("result", "<i8")])
PROPERTY_WORDS = 16
"""32-bit words that hold the properties."""
STATUS, CONTROL, BATCH = 6, 7, 12
"""Words of the status flags, the control flags, and the largest number of reads in a batch."""

logger = logging.getLogger(__package__)
_abandoned: list[CuFileReads] = []
"""Reads that never completed: the device may still write to their memory, so it stays registered."""


@dataclass
class Slot:
    """A part of the memory, and its reads."""

    address: int
    batch: int
    reads: NDArray[Any] = field(default_factory=lambda: np.zeros(0, READ))
    statuses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    file_nbytes: int = 0
    waiting: list[int] = field(default_factory=list)
    """Reads that are not submitted."""
    submitted: NDArray[Any] | None = None
    """The structures of the reads in flight, which libcufile may still use."""
    in_flight: int = 0
    retries: int = 0


class CuFileReads:
    """Reads of files into slots of device memory, by the methods of `StagedReads`.

    One thread at a time calls the methods, with the context of the memory's GPU current. An error of libcufile is
    raised as its own exception; then call `close`. In a forked process, `close` and the finalizer do nothing.

    Parameters
    ----------
    cufile : module
        `cuda.bindings.cufile`, or a replacement.
    memory : Block
        Device memory, which is kept alive until it is deregistered.
    slots, slot_bytes : int
        Parts of the memory, from its start.
    allow_compat : bool
        Accept copies through host memory, for tests on machines without P2PDMA.
    zero : callable
        ``zero(address, nbytes)`` clears device memory before all later work on the slot.

    Raises
    ------
    WarpwellError
        The host has no P2PDMA, or another library opened libcufile in compatibility mode.
    Exception
        libcufile cannot be loaded or opened, or cannot register the memory.
    """

    def __init__(
        self,
        cufile: Any,
        memory: Block,
        *,
        slots: int,
        slot_bytes: int,
        allow_compat: bool,
        zero: Callable[[int, int], None],
    ) -> None:
        self._cufile, self._memory, self._zero = cufile, memory, zero
        self._process = os.getpid()
        self._batch_size = open_driver(cufile, allow_compat)
        self._max_in_flight = COMPAT_READS if allow_compat else slots * self._batch_size
        self._files: dict[int, tuple[int, int]] = {}
        self._slots: list[Slot] = []
        self._registered: list[tuple[Callable[[int], None], int]] = []
        self._finalizer = weakref.finalize(self, _deregister, self._registered, self._process, memory)
        self._finalizer.atexit = False
        try:
            for address in range(memory.address, memory.address + slots * slot_bytes, slot_bytes):
                cufile.buf_register(address, slot_bytes, 0)
                self._registered.append((cufile.buf_deregister, address))
                batch = cufile.batch_io_set_up(self._batch_size)
                self._registered.append((cufile.batch_io_destroy, batch))
                self._slots.append(Slot(address, batch))
        except BaseException:
            self._finalizer()
            raise

    def open_file(self, nsid: int, fd: int, nbytes: int) -> None:
        """Register a file of `nbytes` bytes, open with O_DIRECT, for reads of a namespace."""
        descriptor = np.zeros(1, DESCRIPTOR)
        descriptor["type"], descriptor["fd"] = 1, fd
        handle = self._cufile.handle_register(descriptor.ctypes.data)
        self._registered.append((self._cufile.handle_deregister, handle))
        self._files[nsid] = handle, nbytes

    def close_file(self, nsid: int) -> None:
        """Deregister the file of a namespace before its descriptor is closed and while no read of it is in flight."""
        handle, _ = self._files.pop(nsid)
        self._registered.remove((self._cufile.handle_deregister, handle))
        self._cufile.handle_deregister(handle)

    def start(self, slot: int, nsid: int, blocks: NDArray[np.int64], counts: Any, buffers: NDArray[np.int64]) -> None:
        """Start reads into an idle slot: `counts` blocks of 512 bytes each, from `blocks`, to addresses `buffers`."""
        state, count = self._slots[slot], len(blocks)
        if state.in_flight:
            raise errors.ArgumentError(f"slot {slot} has {state.in_flight} reads in flight; wait for them")
        handle, state.file_nbytes = self._files[nsid]
        reads = state.reads = np.zeros(count, READ)
        reads["mode"], reads["base"], reads["handle"], reads["cookie"] = 1, state.address, handle, np.arange(count)
        reads["file_offset"], reads["nbytes"] = 512 * np.asarray(blocks), 512 * np.asarray(counts)
        reads["offset"] = buffers - state.address
        state.statuses = np.full(count, UNRECOVERED_READ_ERROR, np.int64)
        state.waiting, state.retries = list(range(count)), 0
        self._advance(state)

    def wait(self, slot: int, seconds: float, stopped: Callable[[], bool]) -> bool:
        """Wait until a slot is done; return False if no read completes for `seconds`, or if `stopped` returns True."""
        state, deadline = self._slots[slot], clock.monotonic() + seconds
        while state.waiting or state.in_flight:
            if sum([self._advance(each) for each in self._slots]):
                deadline = clock.monotonic() + seconds
            elif clock.monotonic() > deadline or stopped():
                return False
            else:
                clock.sleep(POLL_SECONDS)
        return True

    def statuses(self, slot: int) -> NDArray[np.int64]:
        """Return the NVMe status of each read of a slot: 0 for success."""
        return self._slots[slot].statuses

    def cancel(self) -> None:
        """Submit no more reads; wait for those in flight (`left`)."""
        for state in self._slots:
            state.waiting = []

    def left(self) -> int:
        """Return how many reads are not done."""
        for state in self._slots:
            self._advance(state)
        return sum(len(state.waiting) + state.in_flight for state in self._slots)

    def close(self) -> None:
        """Wait for reads in flight and deregister everything, in bounded time (idempotent).

        Reads that do not complete, even after they are canceled, keep their memory allocated and registered.
        """
        if not self._finalizer.alive or os.getpid() != self._process:
            return
        try:
            is_idle = self._drain()
            if not is_idle:
                for state in self._slots:
                    if state.in_flight:
                        self._cufile.batch_io_cancel(state.batch)
                is_idle = self._drain()
        except Exception as error:  # an error of libcufile
            is_idle = False
            logger.warning("cuFile failed to report reads in flight: %s", error)
        if is_idle:
            self._finalizer()
        elif self not in _abandoned:
            logger.error("reads by cuFile do not complete; their device memory stays allocated")
            _abandoned.append(self)

    def _drain(self) -> bool:
        self.cancel()
        deadline = clock.monotonic() + DRAIN_TIMEOUT_SECONDS
        while self.left():
            if clock.monotonic() > deadline:
                return False
            clock.sleep(POLL_SECONDS)
        return True

    def _advance(self, state: Slot) -> int:
        """Poll the reads of a slot, or submit waiting ones; return how many made progress."""
        progress = 0
        if state.in_flight:
            count, events = np.array([state.in_flight], np.uint32), np.zeros(state.in_flight, EVENT)
            timeout = np.array([0, 0], np.int64)  # struct timespec
            self._cufile.batch_io_get_status(state.batch, 0, count.ctypes.data, events.ctypes.data, timeout.ctypes.data)
            for cookie, status, _, result in events[: int(count[0])].tolist():
                result = result if status == COMPLETE or result < 0 else -errno.EIO
                progress += self._complete(state, cookie, result)
        allowed = min(self._batch_size, self._max_in_flight - sum(each.in_flight for each in self._slots))
        if state.waiting and not state.in_flight and allowed > 0:  # one batch is in flight at a time
            submitted, state.waiting = state.waiting[:allowed], state.waiting[allowed:]
            state.submitted, state.in_flight = state.reads[submitted], len(submitted)
            try:
                self._cufile.batch_io_submit(state.batch, len(submitted), state.submitted.ctypes.data, 0)
            except BaseException:
                state.in_flight = 0
                raise
        return progress

    def _complete(self, state: Slot, index: int, result: int) -> bool:
        """Record the end of a read: its bytes, or the negative error number; return whether it made progress.

        The rest of a short read, and a read that ended with EAGAIN, are submitted again.
        """
        state.in_flight -= 1
        read = state.reads[index]
        at_end = read["file_offset"] + result >= min(read["file_offset"] + read["nbytes"], state.file_nbytes)
        done = max(0, result if at_end else result - result % ALIGNMENT)  # the rest must be aligned
        if not done and (not (result == -errno.EAGAIN or result > 0) or state.retries == MAX_RETRIES):
            return True  # its status reports the failure
        state.retries += not done
        for name, change in (("file_offset", done), ("offset", done), ("nbytes", -done)):
            read[name] += change
        if not at_end:
            state.waiting.append(index)
            return done > 0
        past_end = int(read["file_offset"] + read["nbytes"]) - state.file_nbytes
        if past_end > 0:  # bytes past the end of a medium are zeros
            self._zero(int(read["base"] + read["offset"] + read["nbytes"]) - past_end, past_end)
        state.statuses[index] = 0
        return True


def open_driver(cufile: Any, allow_compat: bool) -> int:
    """Open libcufile for P2PDMA; return the largest number of reads in a batch.

    The parameters of libcufile apply to the whole process and cannot change while it is open. So if another library has
    opened libcufile, that library's parameters stay in effect, and the properties report them.
    """
    for parameter, value in ((USE_PCI_P2PDMA, True), (ALLOW_COMPAT_MODE, allow_compat)):
        with contextlib.suppress(Exception):
            cufile.set_parameter_bool(parameter, value)
    try:
        cufile.driver_open()
    except Exception as error:
        if getattr(error, "status", None) != DRIVER_ALREADY_OPEN:
            raise
    properties = np.zeros(PROPERTY_WORDS, np.uint32)
    cufile.driver_get_properties(properties.ctypes.data)
    status, control, batch = properties[[STATUS, CONTROL, BATCH]].tolist()
    if not allow_compat and not status >> NVME_P2P_SUPPORTED & 1:
        raise errors.WarpwellError("libcufile finds no support for P2PDMA with NVMe drives")
    if not allow_compat and control >> ALLOW_COMPAT_MODE & 1:
        raise errors.WarpwellError("libcufile is open in compatibility mode, which copies through host memory")
    return min(batch, MAX_BATCH) or MAX_BATCH


def _deregister(registered: list[tuple[Callable[[int], None], int]], process: int, memory: Block) -> None:
    """Undo all registrations, unless another process made them. As an argument, `memory` lives until this call."""
    while registered and os.getpid() == process:
        undo, value = registered.pop()
        try:
            undo(value)
        except Exception as error:  # deregister the other files anyway
            logger.warning("cuFile failed to deregister a resource: %s", error)
