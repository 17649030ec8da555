"""`PeerMemory`: memory of an agent to which other agents of its host write, and memory of these agents.

A receiver offers the block of a buffer with each copy. The sender opens a block at its first offer and keeps it open.
After the last reference to the block is dropped, the receiver sends RELEASE; each sender closes the block and answers
RELEASED; then the receiver frees the block.

A lost sender may still be writing. Memory that it can access is freed only after the launcher has reported the end of
its process.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ... import errors
from ..._os import clock
from .lane import CLOSING, Lane, LaneOwner
from .memory import BufferView, DeviceMemory, Shared
from .peer_access import PeerAccess
from .protocol import Op

_numbers = itertools.count(1)


class PeerMemory:
    """The memory that an agent shares with other agents of its host.

    Parameters
    ----------
    agent : LaneOwner
    """

    def __init__(self, agent: LaneOwner) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # the main loop acquires it, and must not wait while memory is opened
        self._opening = threading.Lock()
        self._held: dict[int, tuple[int, DeviceMemory]] = {}
        self._ending: dict[int, tuple[Any, set[int]]] = {}
        self._lost: set[int] = set()
        self._dead: set[int] = set()
        self._unable: set[int] = set()
        self._peers: dict[int, PeerAccess | str] = {}
        self._blocks: dict[tuple[int, int], tuple[PeerAccess, int]] = {}
        self._writes: Counter[int] = Counter()
        self._closer: Lane | None = None

    # -- receiver -------------------------------------------------------------------------------------------------

    def offer(self, copy: int, view: BufferView, peer: int) -> Any:
        """Return the data with which the sender of a copy can write to a view, or None if the sender cannot or is lost.

        The memory is kept until the sender has answered (`answered`).

        Parameters
        ----------
        copy : int
        view : BufferView
        peer : int
            Rank of the sender.
        """
        runtime, memory = self._agent.runtime, view.memory
        block = memory.ready()
        with self._lock:
            # A lost sender never answers, and `lost` does not release later offers.
            if peer in self._lost or peer in self._unable:
                return None
            try:
                address = runtime.peer_address()
                if address is None:
                    return None
                if memory.shared is None:
                    memory.shared = Shared(next(_numbers), runtime.export(block), set(), self._unused)
            except Exception:  # out of descriptors or sockets: the sender sends the data instead
                return None
            memory.shared.peers.add(peer)
            self._held[copy] = (peer, memory)
        return address, memory.shared.number, memory.shared.offer, view.offset

    def answered(self, copy: int, unable: int | None = None) -> None:
        """Release the memory of a copy whose sender has stopped writing; the peer `unable` can never write here."""
        self._held.pop(copy, None)
        if unable is not None:
            self._unable.add(unable)

    def _unused(self, shared: Shared, block: Any) -> None:
        """Free a block without references (any thread)."""
        if not self._agent.stopped:
            self._agent.later(lambda: self._release(shared.number, block, shared.peers))

    def _release(self, number: int, block: Any, peers: set[int]) -> None:
        with self._lock:
            remaining = peers - self._dead
            if remaining:
                self._ending[number] = (block, remaining)
        for peer in sorted(remaining):
            self._agent.send(Op.RELEASE, number, to=peer)

    def released(self, peer: int, number: int) -> None:
        """Record that a sender has closed a block. When all senders have closed it, the block is freed."""
        with self._lock:
            peers = self._ending.get(number, (None, set()))[1]
            peers.discard(peer)
            if not peers:
                self._ending.pop(number, None)

    def lost(self, peer: int) -> None:
        """Close the blocks of a lost agent. Memory that it can write to is kept until `ended`."""
        self._lost.add(peer)  # first, because `offer` and `open` check `_lost` last
        if not self._agent.stopped and not isinstance(self._peers.get(peer, ""), str):
            self._agent.helper().put(0, "end of a lost agent's blocks", 0, 0, lambda _: self._close_all(peer))

    def ended(self, peer: int) -> None:
        """Free the memory to which an agent could write, after the end of its process."""
        with self._lock:
            self._lost.add(peer)
            self._dead.add(peer)
            for copy, (sender, _) in list(self._held.items()):  # copied, because the main loop removes answered copies
                if sender == peer:
                    self._held.pop(copy, None)
            for number in list(self._ending):
                self.released(peer, number)

    # -- sender ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, peer: int, offer: Any) -> Iterator[tuple[PeerAccess, int]]:
        """Yield the access to a receiver's memory and the address of an offer; raise `PoolError` without access."""
        with self._opening:
            self._writes[peer] += 1
        try:
            yield self._open(peer, *offer)
        finally:
            with self._opening:
                self._writes[peer] -= 1

    def _open(self, peer: int, address: Any, number: int, block: Any, offset: int) -> tuple[PeerAccess, int]:
        with self._opening:
            if peer not in self._peers:
                try:
                    self._peers[peer] = self._agent.runtime.peer_access(address)
                except Exception as error:
                    self._peers[peer] = str(error)  # an error that is raised again would keep the frames of each raise
            access = self._peers[peer]
            if isinstance(access, str):
                raise errors.PoolError(f"no access to the memory of rank {peer}: {access}")
            if peer in self._lost:
                raise errors.PoolError(f"rank {peer} is lost")
            if (peer, number) not in self._blocks:
                self._blocks[peer, number] = access, access.open(block)
            return access, self._blocks[peer, number][1] + offset

    def unreachable(self) -> dict[int, str]:
        """Return the reasons why this device cannot access the memory of agents, by rank."""
        return {peer: reason for peer, reason in list(self._peers.items()) if isinstance(reason, str)}

    def release(self, peer: int, number: int) -> None:
        """Close a block whose owner will free it, and answer, in one thread for all blocks: closing may take long."""
        if self._closer is None:
            self._closer = Lane(self._agent, CLOSING)
        self._closer.put(0, "end of other devices' blocks", 0, 0, lambda _: self._close_and_answer(peer, number))

    def _close_and_answer(self, peer: int, number: int) -> None:
        with contextlib.suppress(Exception):  # of a failed device: the owner keeps the block
            self._close(peer, number)
            self._agent.send(Op.RELEASED, number, to=peer)

    def _close(self, peer: int, number: int) -> None:
        with self._opening:
            if (opened := self._blocks.pop((peer, number), None)) is not None:
                access, address = opened
                access.close(address)

    def _close_all(self, peer: int) -> None:
        """Close all blocks of a lost agent, after the copies that use them."""
        while self._writes[peer]:
            if self._agent.stopped:
                return
            clock.sleep(0.1)
        for owner, number in list(self._blocks):
            if owner == peer:
                with contextlib.suppress(Exception):
                    self._close(peer, number)

    # -- both ------------------------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        """Return the number of blocks that are held for copies, that senders must close, and that are open here."""
        return {"held": len(self._held), "ending": len(self._ending), "open": len(self._blocks)}

    def end(self) -> None:
        """Stop the thread that closes blocks."""
        if self._closer is not None:
            self._closer.end()
