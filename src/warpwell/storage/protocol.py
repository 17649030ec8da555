"""Interfaces between a cache and the server that carries out the commands in its rings.

The server is usually threads of this process (`controller.HostThreads`), or an NVMe controller
(`warpwell.drives.controller`). A cache calls its `QueueBackend` before it allocates memory, because a drive limits the
rings and must reach their memory. The `QueueServer` that the backend starts lives as long as the cache.
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
    """The rings of a cache: number of pairs, entries of each, and the maximum number of pages of a command."""

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
        """Return the medium of a namespace: `Medium.sync` makes writes of commands durable."""

    def namespace_address(self, nsid: int) -> NamespaceAddress:
        """Return the address that commands to a namespace need."""

    def begin(self) -> None:
        """Count a launch that begins. Raise, without counting it, if no command can be carried out."""

    def end(self) -> None:
        """Count the end of a launch."""

    def services(self) -> list[Callable[[], int]]:
        """Return the functions that an interpreted launch calls between the steps of its threads (always the same)."""

    def failure(self, nsid: int | None = None, *, silent: bool = False) -> Exception | None:
        """Return why commands are not carried out any more, or None: it replaces the error that launches latched.

        `nsid` is the namespace that a launch waited for, and `silent` means that its wait timed out.
        """

    def silence(self) -> None:
        """Ensure that a lost controller no longer writes to rings and staging.

        Raises
        ------
        WarpwellError
            The call cannot ensure it; nothing was changed.
        """

    def restart(self) -> None:
        """Serve the pairs again after they were rewound. If that is not possible, raise, and stay lost."""

    def close(self) -> None:
        """Stop (bounded wait); commands in flight never complete. Memory to which they may write stays allocated."""


class QueueBackend(Protocol):
    """Finds a server for a cache.

    Attributes
    ----------
    lists : bool
        Whether commands need the lists of pages (PRPs) of `QueuePairs`, as those to drives do.
    """

    lists: bool

    def fit(self, rings: Rings, device: str, page_size: int) -> Rings:
        """Return rings that the backend can serve, which are at most the requested ones.

        Raises
        ------
        ArgumentError
            The backend cannot serve pages of this size, or this device.
        """

    def memory(self, device: str) -> Allocator:
        """Return an allocator of the cache's device for rings and staging: the server reaches its shared memory."""

    def start(self, pairs: QueuePairs, *, device: str, timeout: float) -> QueueServer:
        """Return a server of these pairs, which were allocated by `memory`."""
