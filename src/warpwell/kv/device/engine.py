"""Engine: the queues, controller and device cache through which one device reads a store."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors
from ..._check import checked_integer, checked_seconds
from ..._os import clock
from ...nvme.status import KV_UNRECOVERED_ERROR, describe
from ...queues import QueuePairs
from ...storage import MAX_PORTS, MAX_WEIGHT, Controller, NativeMedium, ReturnSlots, service_threads
from ...targets import Block, LaunchFlag, memory_for, stream_on
from ..log.files import check_process
from ..log.format import MAX_VALUE
from . import requests as at
from .device_cache import D_DATA, D_ENTRIES, D_MASK, D_STRIDE, D_WORDS, W_WORDS

ARENA = 64 << 20
"""Maximum bytes of staging, unless the smallest pieces need more."""
SMALLEST, LARGEST = 512, 1 << 20
"""Minimum and maximum size of a piece of a value, in bytes."""
LINE = 128
"""Bytes after a piece's staging for its version: a cache line, so that the staging of each id is aligned."""


@dataclass(frozen=True)
class DeviceOptions:
    """How a device reads a store; see `warpwell.kv.open`."""

    device: str
    cache: int = 0
    queues: int = 4
    depth: int = 1024
    threads: int | None = None
    timeout: float = 10.0
    value_bytes: int = 4096
    window: int = 0
    weight: int = 1
    returns: str = "request"

    def __post_init__(self) -> None:
        """Check the options that no other code checks.

        Raises
        ------
        ArgumentError
        """
        ranges = {
            "queues": (1, MAX_PORTS),
            "depth": (4, 1 << 16),
            "threads": (1, None),
            "cache": (0, None),
            "value_bytes": (1, MAX_VALUE),
            "window": (0, None),
            "weight": (1, MAX_WEIGHT),
        }
        for name, (minimum, maximum) in ranges.items():
            value = getattr(self, name)
            if value is not None or name != "threads":
                object.__setattr__(self, name, checked_integer(value, name, minimum=minimum, maximum=maximum))
        if self.depth & (self.depth - 1):
            raise errors.ArgumentError(f"depth is {self.depth}: give a power of two, 4 to 65536", name="depth")
        object.__setattr__(self, "timeout", checked_seconds(self.timeout, "timeout"))
        if self.returns not in ("request", "queue"):
            raise errors.ArgumentError(f'returns is {self.returns!r}: choose "request" or "queue"', name="returns")


class Engine:
    """The queue pairs of one device on a store's controller, and the records that its threads share.

    Parameters
    ----------
    natives : sequence of NativeMedium
        The store's shards.
    options : DeviceOptions
    name : str
        Name of the store, for messages.
    host : Engine, optional
        The engine with the controller to use, so that two devices read through one controller.
    """

    def __init__(
        self, natives: Sequence[NativeMedium], options: DeviceOptions, *, name: str, host: Engine | None = None
    ) -> None:
        self.options, self.name = options, name
        self.target = "cuda" if options.device.startswith("cuda") else options.device
        self.stream = stream_on(options.device)
        self._closed = False
        self._process = os.getpid()
        self._launches = 0
        self.failures = 0
        """Number of failed commands of kernels so far, for `raise_since`."""
        self._aborting = 0
        self._alone: int | None = None
        self._idle = threading.Condition(threading.RLock())
        self._going: deque[Callable[[], bool]] = deque()
        self.gathered: deque[Any] = deque()
        """Gathered batches in flight, which are kept until they have ended."""
        self.guests: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.natives = list(natives)
        with self.stream.on_device():
            memory = memory_for(self.target)
            self.memory = memory
            self.chunk = self._chunk()
            self.pairs = QueuePairs(
                memory,
                count=options.queues,
                depth=options.depth,
                results=True,
                staging_bytes=SMALLEST if self._return_slots() else self.chunk + LINE,
            )
            self.shared_nbytes = self.pairs.shared_nbytes
            if self._return_slots():
                slots = ReturnSlots(memory, self.pairs, self._return_slots(), self.chunk + SMALLEST)
                self.shared_nbytes += slots.nbytes
            self._abort = memory.allocate_shared(4096)
            self._core = memory.allocate(8 * at.K_WORDS)
            self._cache: Block | None = self._make_cache(options.cache)
            self._owned = host is None
            if host is None:
                threads = options.threads or service_threads(self.target)
                self.controller = Controller(
                    self.pairs,
                    threads=threads,
                    spin=self.target == "cuda",
                    interpreted=self.target == "interp",
                    window=options.window,
                    weight=options.weight,
                )
                ids = [self.controller.attach_kv(n, self) for n in self.natives]
                self.nsid = ids[0]
            else:
                self.controller, self.nsid = host.controller, host.nsid
                self.controller.add_pairs(self.pairs, options.weight)
                host.guests.add(self)
            fields = np.zeros(at.K_WORDS, np.int64)
            fields[at.K_QUEUES], fields[at.K_N_QUEUES] = self.pairs.records, self.pairs.count
            fields[at.K_NSID], fields[at.K_SHARDS] = self.nsid, len(self.natives)
            fields[at.K_CHUNK], fields[at.K_TIMEOUT] = self.chunk, int(options.timeout * 1e9)
            fields[at.K_CACHE] = self._cache.address if self._cache is not None else 0
            fields[at.K_ABORT] = self._abort.address
            fields[at.K_RETURNS] = int(self._return_slots() > 0)
            fields[at.K_RESERVE] = self.pairs.ids - min(self.pairs.ids, self._return_slots() or self.pairs.ids) * 3 // 4
            self._core.write(0, fields)

    def _chunk(self) -> int:
        """Return the size of a piece in bytes: the size of a value, if the arena has room for it."""
        wanted_bytes = max(SMALLEST, 1 << max(0, self.options.value_bytes - 1).bit_length())
        inside = max(1, self.options.depth // 2) if self.options.returns == "request" else 16
        share = ARENA // (self.options.queues * inside)
        return max(SMALLEST, min(wanted_bytes, LARGEST, 1 << max(share, 1).bit_length() - 1))

    def _return_slots(self) -> int:
        """Return the number of slots of a return value queue, or 0 if each request has its own slot."""
        if self.options.returns == "request":
            return 0
        share = ARENA // (self.options.queues * self.chunk)
        return max(1, min(1 << max(share, 1).bit_length() - 1, self.options.depth // 4))

    def _make_cache(self, nbytes: int) -> Block | None:
        stride = -(-max(16, self.options.value_bytes) // 16) * 16
        sets = nbytes // (2 * (stride + 8 * W_WORDS))
        if sets < 1:
            return None
        sets = 1 << sets.bit_length() - 1
        entries_at, data_at = 128, 128 + 2 * sets * 8 * W_WORDS
        block = self.memory.allocate(data_at + 2 * sets * stride)
        fields = np.zeros(D_WORDS, np.int64)
        fields[D_MASK], fields[D_STRIDE] = sets - 1, stride
        fields[D_ENTRIES], fields[D_DATA] = block.address + entries_at, block.address + data_at
        block.write(0, fields)
        self._entries = (entries_at, 2 * sets * 8 * W_WORDS)
        self.cache_records = 2 * sets
        return block

    cache_records = 0

    @property
    def core(self) -> int:
        """Address of the record that device code works on."""
        return self._core.address

    # -- launches -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Keep the controller's threads awake from now on.

        Raises
        ------
        ClosedError
        ForkError
            This process was forked after the store was opened: no thread here serves its queues.
        """
        self.check()
        self.reap()
        with self._idle:
            while self._alone not in (None, threading.get_ident()):
                self._idle.wait(0.1)
            self.check()
            self.controller.begin(self.pairs)
            self._launches += 1

    def end(self) -> None:
        """Undo `begin`."""
        with self._idle:
            self._launches -= 1
            self.controller.end(self.pairs)
            self._idle.notify_all()

    @property
    def forked(self) -> bool:
        """Whether this process was forked after the store was opened: no thread here serves its queues."""
        return self._process != os.getpid()

    def check(self) -> None:
        """Raise an error if the device cannot be used."""
        if self._closed:
            raise errors.ClosedError(f"the store {self.name} is closed: open it again")
        check_process(self._process, self.name)

    def lost(self) -> errors.DriveLostError | None:
        """Return the error for a controller that is lost, or None."""
        loss = self.pairs.loss()
        if loss is None:
            return None
        return errors.DriveLostError(
            f"the controller of {self.name} is lost: {loss}. Close the store, check the drive, open it again"
        )

    def services(self) -> list[Callable[[], int]]:
        """Return the functions that an interpreted launch calls between the steps of its threads."""
        return self.controller.services()

    def continues(self, done: Callable[[], bool]) -> None:
        """Register a launch that continues; `end` is called after `done` has returned True."""
        self._going.append(done)

    def reap(self) -> None:
        """End continued launches and batches that are done."""
        for batch in list(self.gathered):
            if batch.done():
                batch.wait_until_ended()
        for _ in range(len(self._going)):
            done = self._going.popleft()
            if done():
                self.end()
            else:
                self._going.append(done)

    def abort(self, flag: LaunchFlag | None = None) -> None:
        """Make every wait of device code end soon."""
        self._aborting = threading.get_ident()
        self._abort.words[0] = 1

    def resume(self) -> bool:
        """Let device code wait again after an abort; return whether this thread had aborted the waits."""
        aborted = self._aborting == threading.get_ident()
        if aborted:
            self._aborting = 0
            self._abort.words[0] = 0
        with self.stream.on_device():
            self._core.write(8 * at.K_STOPPED, np.zeros(1, np.int64))
        return aborted

    def read_words(self, first: int, count: int) -> list[int]:
        """Return words of the core record."""
        with self.stream.on_device():
            return [int(w) for w in self._core.read(8 * first, 8 * count).view(np.int64)]

    def raise_since(self, failures: int) -> None:
        """Raise the error of a command that failed since `failures`, and make the device usable again."""
        is_stopped, _, status, count = self.read_words(at.K_STOPPED, 4)
        self.failures = max(self.failures, count)
        if (is_stopped or self._aborting == threading.get_ident()) and self.resume():
            return  # after Ctrl-C, which raises its own exception
        if count != failures:
            raise self.error_of(status, f"{self.name}: a record that a kernel named")

    def error_of(self, status: int, item: str) -> Exception:
        """Return the error for a command's status, or for a timeout; `item` describes the record."""
        if error := self.lost():
            return error
        if status == at.TIMED_OUT:
            return errors.StallError(
                f"the device of {self.name} did not answer for {self.options.timeout:g} s (or not one command, for"
                f" {at.LOST_TIMEOUTS} times as long), or a Ctrl-C in another thread ended all waits: its command ids"
                " stay quarantined until it answers; check the drive",
                array=self.name,
                seconds=self.options.timeout,
            )
        if status == at.CHANGED:
            return errors.MediumError(
                f"{item} changed while it was read in pieces, {at.MAX_RESTARTS} times: read it while no process writes"
                f" it, or open the store with larger pieces than {self.chunk} bytes (fewer queues, less depth)",
                status=status,
            )
        if status == at.BAD_TICKET:
            return errors.KernelError(
                f"a kernel used an invalid ticket of {self.name} that was taken before, timed out, or was never"
                " returned by submit(): take each ticket once",
                array=self.name,
            )
        if status == at.BAD_BUFFER:
            return errors.KernelError(
                f"a kernel passed {self.name} an array whose items are not contiguous: pass a contiguous row",
                array=self.name,
            )
        if status == KV_UNRECOVERED_ERROR:
            return errors.CorruptionError(
                f"{item} is damaged or cannot be read: run `warpwell kv verify`, and put the key again from its source",
                path=self.name,
            )
        return errors.MediumError(f"{item}: {describe(status)} (status {status:#06x}); check the drive", status=status)

    # -- batches --------------------------------------------------------------------------------------------

    def forget_gathered(self, batch: Any) -> None:
        """Forget a gathered batch that has ended (any number of calls)."""
        with self._idle:
            if batch in self.gathered:
                self.gathered.remove(batch)
                batch.retire()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block while no launch is in flight; other threads wait before they start one."""
        with self._idle:
            while self._alone is not None:
                self._idle.wait(0.1)
            self._alone = threading.get_ident()
        try:
            while self._launches:
                self.reap()
                with self._idle:
                    if self._launches:
                        self._idle.wait(1e-3)
            yield
        finally:
            with self._idle:
                self._alone = None
                self._idle.notify_all()

    def forget(self) -> None:
        """Empty the device cache because the store changed. Call it inside of `alone`."""
        if self._cache is not None:
            with self.stream.on_device():
                self._cache.write(self._entries[0], np.zeros(self._entries[1], np.uint8))

    # -- life -----------------------------------------------------------------------------------------------

    def quiet(self, seconds: float) -> bool:
        """Wait until no command id is in use; return False if some stay in use."""
        end = clock.monotonic() + seconds
        while self.pairs.in_use():
            if clock.monotonic() > end:
                return False
            self.begin()
            try:
                arguments = (self.core, self.pairs.records, self.pairs.count)
                self.stream.launch(at.drain_abandoned, 1, *arguments, services=self.services(), aborts=(self,))
                self.stream.wait((self,))
            finally:
                self.end()
            clock.sleep(1e-3)
        return True

    def close(self) -> None:
        """Release all resources (idempotent).

        Raises
        ------
        SharingError
            Requests are in flight, or another device uses this one's controller: nothing was closed.
        """
        if self._closed:
            return
        if self._process != os.getpid():
            self._closed = True  # in a forked child, these resources belong to the parent
            return
        self.reap()
        for batch in list(self.gathered):  # these end soon, because they do not wait for kernels
            batch.wait_until_ended()
        with self._idle:
            if self._launches:
                raise errors.SharingError(
                    f"{self._launches} launches with {self.name} are in flight: wait for them, then close"
                )
            guests = [guest for guest in self.guests if not guest._closed]
            if guests:
                raise errors.SharingError(
                    f"{self.name} is read by {len(guests)} devices through this one: close those first"
                )
            with self.stream.on_device():
                self.quiet(0.2)
                self._closed = True
                if self._owned:
                    self.controller.close()
                elif not self.pairs.outstanding():
                    self.controller.remove_pairs(self.pairs)
                if not self.pairs.outstanding():
                    self._cache = None
