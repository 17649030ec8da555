"""`SharedMemory`: an agent's memory that other agents of its host write to, and theirs that it writes to.

A block is offered with each copy. The sender opens it when it first sees it, keeps it open, and closes it when the
receiver says that nobody has it any more; then the receiver frees it. ::

    receiver                        sender
    GO or ROOM, with an offer
                                    opens the block, if it is new; writes; FILLED
    ...
    the last reference goes: RELEASE
                                    closes the block; RELEASED
    frees it

A sender that was lost may still be writing: what it could reach is freed when its process has ended, and not before.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ... import errors
from ..agent.lane import Lane, LaneOwner
from ..agent.memory import BufferView, DeviceMemory, Shared
from ..agent.protocol import Op
from .neighbour import Neighbour

_numbers = itertools.count(1)


class MemoryOwner(LaneOwner, Protocol):
    """What shared memory needs of its agent."""

    def helper(self) -> Lane:
        """Return a lane for one call that belongs to no stream."""

    def later(self, call: Callable[[], None], mark: Any = None) -> None:
        """Make a deferred call."""

    def copies_with(self, peer: int) -> Sequence[object]:
        """Return the copies with another agent that are under way."""


class _OpenedPeer:
    """An agent to whose memory this one writes."""

    def __init__(self, neighbour: Neighbour) -> None:
        self.neighbour = neighbour
        self.opened: dict[int, Any] = {}


class SharedMemory:
    """What an agent shares.

    Parameters
    ----------
    agent : MemoryOwner
    """

    def __init__(self, agent: MemoryOwner) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # the main loop takes it, and must not wait for memory that is being opened
        self._opening = threading.Lock()
        self._held: dict[int, tuple[int, DeviceMemory]] = {}
        self._ending: dict[int, tuple[Any, set[int]]] = {}
        self._processes: dict[int, int | None] = {}
        self._lost: set[int] = set()
        self._dead: set[int] = set()
        self._refused: set[int] = set()
        self._peers: dict[int, _OpenedPeer | str] = {}
        self._closing: collections.deque[tuple[int, int]] = collections.deque()
        self._closes = False
        self._closing_lock = threading.Lock()

    # -- the receiver's side ---------------------------------------------------------------------------------------

    def offer(self, copy: int, view: BufferView, peer: int, process: int) -> Any:
        """Return what the sender of a copy needs to write to a view; None where it cannot, or is lost.

        The memory is kept until the sender has said how the copy ended: `answered`.

        Parameters
        ----------
        copy : int
        view : BufferView
        peer : int
            Rank of the sender,
        process : int
            and its process.
        """
        runtime = self._agent.runtime
        memory = view.memory
        block = memory.ready()
        with self._lock:
            if peer not in self._processes:
                self._processes[peer] = _watch(process)
            # nobody would answer, and `lost` does not see what is offered from now on; or nobody would take it
            if peer in self._lost or peer in self._refused:
                return None
            try:
                way = runtime.way()
                if way is None:
                    return None
                if memory.shared is None:
                    memory.shared = Shared(next(_numbers), runtime.offer(block), set(), self._unused)
            except Exception:  # no descriptors left, no sockets: data are sent
                return None
            memory.shared.peers.add(peer)
            self._held[copy] = (peer, memory)
        return way, memory.shared.number, memory.shared.offer, view.offset

    def refused(self, peer: int) -> None:
        """A sender has no way here: nothing is offered to it any more."""
        self._refused.add(peer)

    def answered(self, copy: int) -> None:
        """The sender of a copy writes no more."""
        self._held.pop(copy, None)

    def _unused(self, shared: Shared, block: Any) -> None:
        """The last reference to a memory has gone; called by whatever thread that happened in."""
        if not self._agent.stopped:
            self._agent.later(lambda: self._release(shared.number, block, shared.peers))

    def _release(self, number: int, block: Any, peers: set[int]) -> None:
        with self._lock:
            left = peers - self._dead
            if left:
                self._ending[number] = (block, left)
        for peer in sorted(left):
            self._agent.tell(Op.RELEASE, number, to=peer)

    def released(self, peer: int, number: int) -> None:
        """A sender has closed a block: it is freed when all have."""
        with self._lock:
            peers = self._ending.get(number, (None, set()))[1]
            peers.discard(peer)
            if not peers:
                self._ending.pop(number, None)

    def lost(self, peer: int) -> None:
        """Another agent was lost: a thread waits for the end of its process, and then nobody for anything of it.

        What is open of its memory is closed, behind the copies there; the dead process's GPU has it until then.
        """
        self._lost.add(peer)  # before these looks: `offer` and `open` do it in the other order
        if self._agent.stopped:
            return
        if self._processes.get(peer) is not None:
            self._agent.helper().put(0, "wait for the end of an agent", 0, 0, lambda _: self._wait_for_end(peer))
        if isinstance(self._peers.get(peer), _OpenedPeer):
            self._agent.helper().put(0, "end of a lost agent's blocks", 0, 0, lambda _: self._close_all(peer))

    def _wait_for_end(self, peer: int) -> None:
        process = self._processes[peer]
        assert process is not None
        end = select.poll()
        end.register(process, select.POLLIN)
        while not end.poll(100):
            if self._agent.stopped:
                return
        with self._lock:
            os.close(process)
            self._processes[peer] = None
            self._dead.add(peer)
            for copy, (whose, _) in list(self._held.items()):  # a copy: the main loop takes answered ones out meanwhile
                if whose == peer:
                    self._held.pop(copy, None)
            for number in list(self._ending):
                self.released(peer, number)

    # -- the sender's side -----------------------------------------------------------------------------------------

    def open(self, peer: int, offer: Any) -> tuple[Neighbour, int]:
        """Return the way to a receiver's memory, and the address there. Raises what the way or its memory refuses."""
        way, number, block, offset = offer
        with self._opening:
            known = self._peers.get(peer)
            if known is None:
                try:
                    known = _OpenedPeer(self._agent.runtime.neighbour(way))
                except Exception as error:
                    known = str(error)  # not the error: what is raised again and again keeps all who raised it
                self._peers[peer] = known
            if isinstance(known, str):
                raise errors.PoolError(f"no access to the memory of rank {peer}: {known}")
            if peer in self._lost:
                raise errors.PoolError(f"rank {peer} is gone")
            opened = known.opened.get(number)
            if opened is None:
                opened = known.opened[number] = known.neighbour.open(block)
            return known.neighbour, int(opened.address) + offset

    def unreachable(self) -> dict[int, str]:
        """Return the agents to whose memory there is no way, and why."""
        return {peer: known for peer, known in list(self._peers.items()) if isinstance(known, str)}

    def release(self, peer: int, number: int) -> None:
        """Close a block that its owner is to free, and say so; in one thread for all, because it may take long."""
        with self._closing_lock:
            self._closing.append((peer, number))
            if self._closes:
                return
            self._closes = True
        self._agent.helper().put(0, "end of other devices' blocks", 0, 0, self._close)

    def _close(self, _lane: Lane) -> None:
        while True:
            with self._closing_lock:
                if not self._closing:
                    self._closes = False
                    return
                peer, number = self._closing.popleft()
            with contextlib.suppress(Exception):  # of a device that failed: its owner keeps the block
                self._close_one(peer, number)
                self._agent.tell(Op.RELEASED, number, to=peer)

    def _close_one(self, peer: int, number: int) -> None:
        with self._opening:
            known = self._peers.get(peer)
            opened = known.opened.pop(number, None) if isinstance(known, _OpenedPeer) else None
            if isinstance(known, _OpenedPeer) and opened is not None:
                known.neighbour.close(opened)

    def _close_all(self, peer: int) -> None:
        """Close what was opened of a lost agent, once no copy uses it: each ends when its lane comes to it."""
        while self._agent.copies_with(peer):
            if self._agent.stopped:
                return
            time.sleep(0.1)
        known = self._peers[peer]
        for number in list(known.opened) if isinstance(known, _OpenedPeer) else ():
            with contextlib.suppress(Exception):
                self._close_one(peer, number)

    # -- both ------------------------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        """Return how many blocks are held for copies, wait for senders to close them, and are open here."""
        opened = [p.opened for p in list(self._peers.values()) if isinstance(p, _OpenedPeer)]
        return {"held": len(self._held), "ending": len(self._ending), "open": sum(map(len, opened))}


def _watch(process: int) -> int | None:
    """Return a descriptor that tells when a process has ended; None for this one, and where there is no such thing."""
    if process == os.getpid():
        return None
    try:
        return os.pidfd_open(process)
    except (OSError, AttributeError):
        return None
