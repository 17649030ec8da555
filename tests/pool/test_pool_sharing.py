"""Memory that an agent shares, and peers' memory that it opened, is released when no process can use it."""

from __future__ import annotations

import contextlib
import errno
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS, until

from warpwell import errors
from warpwell.pool.agent import peer_access
from warpwell.pool.agent.memory import BufferView, DeviceMemory
from warpwell.pool.agent.peer_access import HostAccess
from warpwell.pool.agent.peer_memory import PeerMemory
from warpwell.pool.agent.protocol import Op
from warpwell.pool.agent.runtime import Runtime


class _Agent:
    """What `PeerMemory` needs of an agent, without one."""

    stopped = False

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.messages: list[tuple[Any, ...]] = []

    def send(self, op: Op, *operands: Any, to: int) -> None:
        self.messages.append((op, *operands, to))

    def later(self, call: Callable[[], None]) -> None:
        call()

    def helper(self) -> Any:
        class Helper:
            def put(self, *arguments: Any) -> None:
                threading.Thread(target=arguments[4], args=(None,), daemon=True).start()

        return Helper()


def sharing_of(agent: Any) -> PeerMemory:
    """Return the memory that a stand-in of an agent shares."""
    return PeerMemory(agent)


def test_what_a_lost_sender_can_reach_is_kept_until_its_process_has_ended() -> None:
    agent = _Agent()
    sharing = sharing_of(agent)
    memory = DeviceMemory(agent.runtime, 100)
    assert sharing.offer(17, BufferView(memory, 0, np.dtype("u1"), (100,)), 2)[3] == 0
    sharing.offer(19, BufferView(DeviceMemory(agent.runtime, 100), 0, np.dtype("u1"), (100,)), 3)
    del memory
    sharing.lost(2)
    assert sharing.count() == {"held": 2, "ending": 0, "open": 0}, "the peer may still write"
    sharing.ended(2)
    assert sharing.count() == {"held": 1, "ending": 0, "open": 0}, "as the other one may"
    assert agent.messages == [], "no process is left to notify"


def test_a_block_is_freed_when_all_who_opened_it_have_closed_it() -> None:
    agent = _Agent()
    sharing = sharing_of(agent)
    memory = DeviceMemory(agent.runtime, 100)
    view = BufferView(memory, 0, np.dtype("u1"), (100,))
    for copy, peer in ((1, 2), (3, 4)):
        _, number, _, _ = sharing.offer(copy, view, peer)
        sharing.answered(copy)
    del memory, view
    gc.collect()
    assert agent.messages == [(Op.RELEASE, number, 2), (Op.RELEASE, number, 4)]
    sharing.released(4, number)
    assert sharing.count()["ending"] == 1
    sharing.released(4, number)
    assert sharing.count()["ending"] == 1
    sharing.released(2, number)
    assert sharing.count()["ending"] == 0


def test_nothing_is_offered_to_a_sender_that_was_lost_while_the_stream_was_busy() -> None:
    agent = _Agent()
    sharing = sharing_of(agent)
    view = BufferView(DeviceMemory(agent.runtime, 100), 0, np.dtype("u1"), (100,))
    assert sharing.offer(1, view, 2) is not None
    sharing.answered(1)
    sharing.ended(2)  # the process has exited, and the transport has not noticed it
    assert sharing.offer(3, view, 2) is None
    sharing.lost(4)  # peer 4 is lost before the first offer to it
    assert sharing.offer(5, view, 4) is None
    del view
    gc.collect()
    assert sharing.count() == {"held": 0, "ending": 0, "open": 0}


def test_blocks_that_only_a_lost_sender_has_open_are_freed_when_its_process_has_ended() -> None:
    agent = _Agent()
    sharing = sharing_of(agent)
    view = BufferView(DeviceMemory(agent.runtime, 100), 0, np.dtype("u1"), (100,))
    sharing.offer(1, view, 2)
    sharing.answered(1)
    del view
    gc.collect()
    sharing.lost(2)
    assert sharing.count() == {"held": 0, "ending": 1, "open": 0}
    sharing.ended(2)
    assert not sharing.count()["ending"]


def test_copies_that_are_answered_while_a_sender_ends_are_no_matter() -> None:
    agent = _Agent()
    sharing = sharing_of(agent)
    memory = DeviceMemory(agent.runtime, 100)

    class Answering(int):
        """The rank of a sender; when it is compared, the main loop hears the end of another copy."""

        def __eq__(self, compared: object) -> bool:
            sharing.answered(8)
            return int(self) == compared

        __hash__ = int.__hash__

    view = BufferView(memory, 0, np.dtype("u1"), (100,))
    assert sharing.offer(7, view, 2) and sharing.offer(8, view, 3)
    sharing._held[7] = Answering(2), memory
    sharing.ended(2)
    assert sharing.count()["held"] == 0


def test_blocks_of_a_lost_receiver_are_closed_when_no_copy_uses_them() -> None:
    agent = _Agent()
    sharing = sharing_of(agent)
    blocks = [agent.runtime.allocate(100) for _ in range(3)]
    offers = [(agent.runtime.peer_address(), n, agent.runtime.export(block), 0) for n, block in enumerate(blocks)]
    with sharing.opened(2, offers[0]), sharing.opened(2, offers[1]):
        sharing.lost(2)
        time.sleep(0.3)
        assert sharing.count()["open"] == 2
    assert until(lambda: not sharing.count()["open"])
    with pytest.raises(errors.PoolError, match="rank 2 is lost"), sharing.opened(2, offers[2]):
        pass
    assert sharing.count()["open"] == 0


def test_the_main_loop_does_not_wait_for_memory_that_is_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = _Agent()
    sharing = sharing_of(agent)
    block = agent.runtime.allocate(100)
    offer = agent.runtime.peer_address(), 1, agent.runtime.export(block), 0
    entered, leave = threading.Event(), threading.Event()

    def slow(self: Any, block: Any) -> Any:
        entered.set()
        leave.wait(HANG_SECONDS)
        return block

    monkeypatch.setattr(HostAccess, "open", slow)
    opening = threading.Thread(target=_open, args=(sharing, offer))
    opening.start()
    assert entered.wait(HANG_SECONDS)
    messages = threading.Thread(target=lambda: (sharing.released(2, 1), sharing.release(2, 1), sharing.lost(2)))
    messages.start()
    messages.join(HANG_SECONDS)
    is_waiting = messages.is_alive()
    leave.set()
    opening.join()
    messages.join()
    assert not is_waiting


def _open(sharing: PeerMemory, offer: Any) -> None:
    with contextlib.suppress(Exception), sharing.opened(2, offer):
        pass


CHILD = """
import sys
from warpwell.pool.agent.runtime import Runtime
runtime = Runtime()
block = runtime.allocate(1 << 20)
block.bytes[:] = 1
print(*runtime.peer_address()[:2], runtime.peer_address()[2].hex(), runtime.export(block), flush=True)
sys.stdin.readline()
print(block.bytes[:3].tolist(), block.bytes[3:-5].tolist() == list(range(256)) * 4095 + list(range(248)),
      block.bytes[-5:].tolist(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("piece", [peer_access.PIECE, 100_000])
def test_memory_of_another_process(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_access, "PIECE", piece)
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            process, address, proof, block = child.stdout.readline().split()
            access = int(process), int(address), bytes.fromhex(proof)
            try:
                opened = HostAccess(*access)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOSYS):
                    raise
                pytest.skip("the kernel allows no process to reach another's memory (ptrace_scope, seccomp)")
            with pytest.raises(errors.PoolError, match="not the agent that exported"):
                HostAccess(access[0], access[1], bytes(16))
            with pytest.raises(OSError, match="memory of process"):
                HostAccess(access[0], 8, access[2])
            source = np.tile(np.arange(256, dtype=np.uint8), 4096)
            opened.put(None, opened.open(int(block)) + 3, int(source.ctypes.data), (1 << 20) - 8)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline().strip() == "[1, 1, 1] True [1, 1, 1, 1, 1]"
            child.kill()
            child.wait()
            with pytest.raises(OSError, match="memory of process"):
                opened.put(None, int(block), int(source.ctypes.data), 8)
        finally:
            child.kill()
