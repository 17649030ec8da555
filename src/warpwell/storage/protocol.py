"""Interfaces between a cache and the server that carries out the commands in its rings.

Threads of this process are the usual choice (`controller.HostThreads`); a real NVMe controller is the other
(`warpwell.drives.controller`). A `QueueBackend` is asked before a cache allocates anything, because a drive bounds the
rings and has to reach their memory; the `QueueServer` that it starts lives as long as the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..queues import QueuePairs
from ..targets import Allocator
from .medium import Medium


@dataclass(frozen=True)
class Rings:
    """The rings of a cache: number of pairs, entries of each, and the most pages of a command."""

    queues: int
    depth: int
    merge: int


class NamespaceAddress(NamedTuple):
    """The address of an array in commands: namespace id, log2 of the bytes of a block, and capacity in bytes."""

    nsid: int
    block_shift: int
    nbytes: int


class QueueServer(Protocol):
    """Carries out the commands of one cache. Its namespace ids are handles of the cache's arrays (`wire`)."""

    def attach(self, medium: Medium, unit: int) -> int:
        """Serve a medium, up to its last whole `unit` bytes; return its namespace id."""

    def detach(self, nsid: int) -> None:
        """Stop serving a namespace that has no commands in flight."""

    def medium(self, nsid: int) -> Medium:
        """Return the medium of a namespace: `Medium.sync` makes what commands wrote durable."""

    def namespace_address(self, nsid: int) -> NamespaceAddress:
        """Return the address that commands to a namespace need."""

    def begin(self) -> None:
        """Note that a launch begins. Raise, with nothing counted, if no command can be carried out."""

    def end(self) -> None:
        """Note that a launch ended."""

    def services(self) -> list[Callable[[], int]]:
        """Return the functions that an interpreted launch calls between the steps of its threads (always the same)."""

    def failure(self, nsid: int | None = None, *, silent: bool = False) -> Exception | None:
        """Return why commands are not carried out any more, or None: it replaces the error that launches latched.

        `nsid` is the namespace that a launch waited for, and `silent` means that its wait timed out.
        """

    def silence(self) -> None:
        """Make sure that a lost controller does not write to rings and staging any more.

        Raises
        ------
        WarpwellError
            It cannot be made sure of; nothing was changed.
        """

    def restart(self) -> None:
        """Serve the pairs again, which were rewound. Raise, and stay lost, if that cannot be."""

    def close(self) -> None:
        """Stop (bounded wait). Memory that may still be written to outlives this; commands in flight never complete."""


class QueueBackend(Protocol):
    """Finds a server for a cache.

    Attributes
    ----------
    lists : bool
        Whether commands need the lists of pages (PRPs) of `QueuePairs`, as those to drives do.
    """

    lists: bool

    def fit(self, rings: Rings, device: str, page_size: int) -> Rings:
        """Return the rings that it can serve, at most those asked for.

        Raises
        ------
        ArgumentError
            It serves no pages of this size, or not this device.
        """

    def memory(self, device: str) -> Allocator:
        """Return an allocator of the cache's device for rings and staging: the server reaches its shared memory."""

    def start(self, pairs: QueuePairs, *, device: str, timeout: float) -> QueueServer:
        """Return a server of these pairs, which were allocated by `memory`."""
