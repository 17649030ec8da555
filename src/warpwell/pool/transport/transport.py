"""`Transport`: messages and bulk data between the processes of one job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from .bulk import Region, Transfer

Bytes: TypeAlias = bytes | bytearray | memoryview
"""What a message may be made of (any contiguous buffer will do)."""

WINDOW = 1 << 20
"""Bytes of messages to one peer that may wait before `Transport.send` waits."""

OVERHEAD = 256
"""What each message counts besides its bytes."""

SEND_TIMEOUT = 60.0
"""Seconds that `Transport.send` waits for a peer that takes no messages, but lives."""

TAGS = 1 << 20
"""Tags of transfers run from 0 to TAGS - 1 and around."""


class Transport(ABC):
    """Carries messages in order, and bulk data by the side, between this process and its peers.

    Attributes
    ----------
    rank : int
        This process.
    peers : sequence of int
        The others, lost ones included.
    name : str
        What carries, for people: ``"local"``, ``"mpi"``, or what a wrapper says.
    """

    rank: int
    peers: Sequence[int]
    name: str
    close_reason = "it closed its transport"
    """Why peers in this process lose this one when it closes."""
    lends = True
    """Whether peers on this host may be given memory instead of data; a link that is emulated would be gone round."""

    @abstractmethod
    def send(self, peer: int, *parts: Bytes) -> None:
        """Send one message, made of `parts` on end. It is copied, and the call returns at once.

        Messages to one peer arrive whole and in the order in which they were sent. Any thread may send. While more
        than `WINDOW` bytes wait that the peer has not received, the call waits, so a thread that receives should
        not also be the only one on which the peer's receiving depends.

        Raises
        ------
        DeviceLostError
            The peer is gone, already or while the call waited.
        StallError
            The peer lives, but received nothing for `SEND_TIMEOUT` seconds.
        ClosedError
            This transport was closed.
        """

    @abstractmethod
    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next whole message of any peer, with the peer; None after `timeout` seconds.

        Only one thread receives. What a lost peer had sent before is still received.

        Raises
        ------
        ClosedError
            This transport was closed.
        """

    @abstractmethod
    def put(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to send bulk data. A `get` of the peer with the same tag, size and chunk takes it.

        Whoever starts a copy chooses its tag: unique among the copies from one process to another that are under
        way, and less than `TAGS`. Either side may come first. A copy is under way until both halves are `done`; so
        is one that was cancelled. Then what this side sent and nobody took is gone, too.

        Raises
        ------
        DeviceLostError
            The peer is gone.
        """

    @abstractmethod
    def get(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to receive bulk data: the other half of `put`."""

    @abstractmethod
    def lost(self) -> Mapping[int, str]:
        """Return the peers that are gone, each with the reason. One that closed its transport is gone too."""

    @abstractmethod
    def on_lost(self, call: Callable[[int, str], None]) -> None:
        """Call ``call(peer, reason)`` once for each peer that is lost, those before now included.

        It is called by the transport's own thread and must not wait for anything.
        """

    @abstractmethod
    def lose(self, peer: int, reason: str) -> None:
        """Treat a peer as lost whose process is known to have ended.

        What it had sent before is still received. A peer that is lost already, and a transport that is closed, stay as
        they are.
        """

    @abstractmethod
    def statistics(self) -> dict[int, dict[str, int]]:
        """Return counts for each peer.

        They are ``messages_sent``, ``messages_received``, ``bytes_sent``, ``bytes_received`` (both of messages),
        ``waits`` (sends that had to wait) and ``transfers``.
        """

    @abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """Finish what is under way, for at most `timeout` seconds, tell the peers, and stop."""
