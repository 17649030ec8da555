"""Serving: what a cache needs of whoever carries out the commands in its rings.

Threads of this process are the usual choice (`HostThreads`, which starts a `Controller`); a real NVMe controller is the
other (`warpwell.drives.controller`). A `Service` is asked before a cache allocates anything, because a drive bounds the
rings and has to reach their memory; the `Server` that it starts lives as long as the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..queues import QueuePairs
from ..targets import Allocator, memory_for
from .controller import MAX_WEIGHT, Controller, service_threads
from .medium import Medium

BLOCK_SHIFT = 9
"""log2 of the bytes of a block in commands to our own controller."""


@dataclass(frozen=True)
class Rings:
    """The rings of a cache: number of pairs, entries of each, and the most pages of a command."""

    queues: int
    depth: int
    merge: int


class Server(Protocol):
    """Carries out the commands of one cache.

    Namespace ids are handles of the cache's arrays; `wire` has the id and the block size that commands name.
    """

    def attach(self, medium: Medium, unit: int) -> int:
        """Serve a medium, up to its last whole `unit` bytes; return its namespace id."""

    def detach(self, nsid: int) -> None:
        """Stop serving a namespace: none of its commands is in flight."""

    def medium(self, nsid: int) -> Medium:
        """Return the medium of a namespace: `Medium.sync` makes what commands wrote durable."""

    def wire(self, nsid: int) -> tuple[int, int]:
        """Return what commands to a namespace say: its id, and log2 of the bytes of a block."""

    def begin(self) -> None:
        """Note that a launch begins. Raise, with nothing counted, if no command can be carried out."""

    def end(self) -> None:
        """Note that a launch ended."""

    def services(self) -> list[Callable[[], int]]:
        """Return the functions that an interpreted launch calls between the steps of its threads (always the same)."""

    def failure(self) -> Exception | None:
        """Return why commands are not carried out any more, or None: it takes the place of what launches latched."""

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call a function, in any thread and at most once, when commands will not be carried out any more."""

    def close(self) -> None:
        """Stop (bounded wait). Memory that may still be written to outlives this; commands in flight never complete."""


class Service(Protocol):
    """Finds a server for a cache."""

    def fit(self, rings: Rings, device: str, page_size: int) -> Rings:
        """Return the rings that it can serve, at most those asked for.

        Raises
        ------
        ArgumentError
            It serves no pages of this size, or not this device.
        """

    def memory(self, device: str) -> Allocator:
        """Return an allocator of the cache's device for rings and staging: the server reaches its shared memory."""

    def start(self, pairs: QueuePairs, *, device: str, timeout: float) -> Server:
        """Return a server of these pairs, which were allocated by `memory`."""


class HostThreads:
    """The service of a cache by threads of this process.

    Parameters
    ----------
    threads : int, optional
        Most of the process's service threads that serve the cache at once.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def fit(self, rings: Rings, device: str, page_size: int) -> Rings:
        """Return the rings unchanged."""
        return rings

    def memory(self, device: str) -> Allocator:
        """Return the allocator of a device."""
        return memory_for(device)

    def start(self, pairs: QueuePairs, *, device: str, timeout: float) -> Server:
        """Return a `Controller`; other queues beside the cache's, for the host's long reads, weigh 1."""
        return Controller(
            pairs, threads=self._threads or service_threads(device), spin=device == "cuda",
            interpreted=device == "interp", weight=MAX_WEIGHT,
        )  # fmt: skip
