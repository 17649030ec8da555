"""Engine: the queues, controller and device cache through which one device reads a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..queues import QueuePairs
from ..queues.layout import Q_WORDS
from ..storage import Controller
from ..storage.controller import service_threads
from ..storage.medium import NativeMedium
from ..targets import Block, kernel, memory_for
from ..targets.stream import stream_on
from . import requests as at
from .device_cache import D_DATA, D_MASK, D_STRIDE, D_WAYS, D_WORDS, W_WORDS
from .kernel_view import KernelStore
from .requests import serve

ARENA = 64 << 20
"""Bytes of staging at most, unless the smallest pieces need more."""
SMALLEST, LARGEST = 512, 1 << 20
"""Bytes of a piece of a value, the range."""


@dataclass(frozen=True)
class Options:
    """How a device reads a store; see `warpwell.kv.open`."""

    device: str
    cache_bytes: int = 0
    queues: int = 4
    depth: int = 1024
    threads: int | None = None
    timeout: float = 10.0
    value_bytes: int = 4096
    window: int = 0
    weight: int = 1
    returns: str = "request"


@kernel
def settle(core, queues, count):
    """Drain queues, and release what was given up (one thread; the host, between launches)."""
    for k in range(count):
        serve(queues + k * (8 * Q_WORDS), 1, 0, 0)


class Engine:
    """Queue pairs of one device on a store's controller, and what its threads share.

    Parameters
    ----------
    natives : sequence of NativeMedium
        The store's shards.
    options : Options
    name : str
        Of the store, for messages.
    beside : Engine, optional
        Use its controller: two devices read one store's device.
    """

    def __init__(
        self, natives: Sequence[NativeMedium], options: Options, *, name: str, beside: Engine | None = None
    ) -> None:
        self.options, self.name = options, name
        self.target = "cuda" if options.device.startswith("cuda") else options.device
        self.stream = stream_on(options.device)
        self._closed = False
        self._launches = 0
        self._natives = list(natives)
        with self.stream.on_device():
            memory = memory_for(self.target)
            self.memory = memory
            self.chunk = self._chunk()
            self.pairs = QueuePairs(
                memory, count=options.queues, depth=options.depth, results=True,
                staging_bytes=SMALLEST if self._places() else self.chunk,
                returns=self._places(), place_bytes=self.chunk if self._places() else 0,
            )  # fmt: skip
            self._abort = memory.allocate_shared(4096)
            self._core = memory.allocate(8 * at.K_WORDS)
            self._cache: Block | None = self._make_cache(options.cache_bytes)
            self._owned = beside is None
            if beside is None:
                threads = options.threads or service_threads(self.target)
                self.controller = Controller(
                    self.pairs, threads=threads, spin=self.target == "cuda", interpreted=self.target == "interp",
                    window=options.window, weight=options.weight,
                )  # fmt: skip
                ids = [self.controller.attach_kv(n, name=name, owner=self) for n in self._natives]
                self.nsid = ids[0]
            else:
                self.controller, self.nsid = beside.controller, beside.nsid
                self.controller.add_pairs(self.pairs, options.weight)
            words = np.zeros(at.K_WORDS, np.int64)
            words[at.K_QUEUES], words[at.K_N_QUEUES] = self.pairs.records, self.pairs.count
            words[at.K_NSID], words[at.K_SHARDS] = self.nsid, len(self._natives)
            words[at.K_CHUNK], words[at.K_TIMEOUT] = self.chunk, int(options.timeout * 1e9)
            words[at.K_CACHE] = self._cache.address if self._cache is not None else 0
            words[at.K_ABORT] = self._abort.address
            words[at.K_RETURNS] = int(self._places() > 0)
            self._core.write(0, words)
        self.view = KernelStore(None, {"core": self._core.address, "chunk": self.pairs.staging_bytes})

    def _chunk(self) -> int:
        """Return the bytes of a piece: as large as a value, as far as the arena allows."""
        wanted = max(SMALLEST, 1 << max(0, self.options.value_bytes - 1).bit_length())
        inside = max(1, self.options.depth // 2) if self.options.returns == "request" else 16
        share = ARENA // (self.options.queues * inside)
        return max(SMALLEST, min(wanted, LARGEST, 1 << max(share, 1).bit_length() - 1))

    def _places(self) -> int:
        """Return the places of a queue pair's return value queue, 0 where values come to the requests themselves."""
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
        ways_at, data_at = 128, 128 + 2 * sets * 8 * W_WORDS
        block = self.memory.allocate(data_at + 2 * sets * stride)
        words = np.zeros(D_WORDS, np.int64)
        words[D_MASK], words[D_STRIDE] = sets - 1, stride
        words[D_WAYS], words[D_DATA] = block.address + ways_at, block.address + data_at
        block.write(0, words)
        self._ways = (ways_at, 2 * sets * 8 * W_WORDS)
        self.cache_records = 2 * sets
        return block

    cache_records = 0

    @property
    def core(self) -> int:
        """Address of the record that device code works on."""
        return self._core.address

    def forget(self) -> None:
        """Empty the device cache: the store changed. No launch may be in flight."""
        if self._cache is not None:
            with self.stream.on_device():
                self._cache.write(self._ways[0], np.zeros(self._ways[1], np.uint8))

    # -- launches -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Keep the controller's threads awake from now on."""
        if self._closed:
            raise errors.ClosedError(f"the store {self.name} is closed: open it again")
        self.controller.begin(self.pairs)
        self._launches += 1

    def end(self) -> None:
        """Undo `begin`."""
        self._launches -= 1
        self.controller.end(self.pairs)

    def services(self) -> list[Callable[[], int]]:
        """Return the steps that an interpreted launch calls beside its threads."""
        return self.controller.services()

    def launch(self, function: Any, n: int, *args: int) -> None:
        """Launch a kernel in the engine's stream, between `begin` and `end`."""
        self.stream.launch(function, n, *args, services=self.services())

    def abort(self) -> None:
        """Make every wait of device code end soon."""
        self._abort.words[0] = 1

    def read_words(self, first: int, count: int) -> list[int]:
        """Return words of the core record."""
        with self.stream.on_device():
            return [int(w) for w in self._core.read(8 * first, 8 * count).view(np.int64)]

    def raise_stopped(self) -> None:
        """Raise where a wait was given up since the last time, and make the device usable again."""
        if self.read_words(at.K_STOPPED, 1)[0] == 0:
            return
        aborted = bool(self._abort.words[0])
        self._abort.words[0] = 0
        with self.stream.on_device():
            self._core.write(8 * at.K_STOPPED, np.zeros(1, np.int64))
        if not aborted:
            raise errors.StallError(
                f"the device of {self.name} did not answer for {self.options.timeout:g} s: its command ids stay "
                "quarantined until it does; check the drive",
                array=self.name,
                seconds=self.options.timeout,
            )

    # -- life -----------------------------------------------------------------------------------------------

    def quiet(self, seconds: float) -> bool:
        """Wait until no command id is taken; return whether that is so."""
        end = time.monotonic() + seconds
        while self.pairs.in_use():
            if time.monotonic() > end:
                return False
            self.begin()
            try:
                self.launch(settle, 1, self.core, self.pairs.records, self.pairs.count)
                self.stream.wait((self,))
            finally:
                self.end()
            time.sleep(1e-3)
        return True

    def close(self) -> None:
        """Give everything back (idempotent).

        Raises
        ------
        SharingError
            Requests are in flight: nothing was closed.
        """
        if self._closed:
            return
        if self._launches:
            raise errors.SharingError(
                f"{self._launches} batches or launches of {self.name} are in flight: wait() for them, then close"
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
