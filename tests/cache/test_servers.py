"""Both servers of a cache keep the promises of `storage.protocol`: our own controller, and a drive."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS

from lab.drives.scripted_drive import ScriptedDrive
from warpwell import errors
from warpwell.drives import Drive
from warpwell.drives.controller import DriveRings
from warpwell.drives.medium import NamespaceMedium
from warpwell.queues import QueuePairs
from warpwell.storage import RamMedium
from warpwell.storage.controller import HostThreads
from warpwell.storage.medium import Medium
from warpwell.storage.protocol import QueueBackend, QueueServer, Rings

PAGE = 4096
REQUESTED = Rings(2, 128, 4)


@dataclass
class Served:
    """A server, the rings that were made for it, and media that it takes."""

    service: QueueBackend
    rings: Rings
    server: QueueServer
    media: list[Medium]


@pytest.fixture(params=["our controller", "a drive"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        service: Any
        media: list[Medium]
        if request.param == "a drive":
            wire = ScriptedDrive(arena=8 << 20)
            wire.namespace["nsze"] = 63  # the last page is not whole
            drive = stack.enter_context(Drive(wire))
            service = DriveRings(drive)
            media = [NamespaceMedium(drive.namespace(1), writable=True) for _ in range(3)]
        else:
            service = HostThreads(2)
            media = [RamMedium(np.zeros(8 * PAGE, np.uint8), writable=True) for _ in range(3)]
        rings = service.fit(REQUESTED, "cpu", PAGE)
        pairs = QueuePairs(
            service.memory("cpu"),
            count=rings.queues,
            depth=rings.depth,
            staging_bytes=PAGE * rings.merge,
            lists=service.lists,
        )
        server = service.start(pairs, device="cpu", timeout=HANG_SECONDS)
        stack.callback(server.close)
        yield Served(service, rings, server, media)


def test_rings_are_at_most_those_asked_for(served: Served) -> None:
    rings = served.rings
    assert 1 <= rings.queues <= REQUESTED.queues and rings.merge in (1, 2, 4) and rings.merge <= REQUESTED.merge
    assert 4 <= rings.depth <= REQUESTED.depth and rings.depth & (rings.depth - 1) == 0


def test_handles_are_numbers_of_arrays_and_used_again(served: Served) -> None:
    server, media = served.server, served.media
    handles = [server.attach(medium, PAGE) for medium in media]
    assert len(set(handles)) == 3 and min(handles) > 0
    for handle, medium in zip(handles, media, strict=True):
        assert server.medium(handle) is medium
        wire = server.namespace_address(handle)
        assert wire.nsid > 0 and medium.nbytes - PAGE < wire.nbytes <= medium.nbytes
        assert 1 << wire.block_shift == max(512, medium.block)
    server.detach(handles[1])
    assert server.attach(media[1], PAGE) == handles[1]
    assert server.medium(handles[0]) is media[0] and server.medium(handles[2]) is media[2]


def test_launches_are_counted_side_by_side(served: Served) -> None:
    server = served.server
    server.attach(served.media[0], PAGE)

    def launch() -> None:
        for _ in range(50):
            server.begin()
            server.end()

    run_threads(launch, [()] * 4)
    assert server.failure() is None and server.failure(1, silent=True) is None
    assert server.services() == server.services()


def test_who_is_closed_serves_nothing_and_closes_again(served: Served) -> None:
    server = served.server
    server.attach(served.media[0], PAGE)
    server.begin()
    server.end()
    server.close()
    server.close()
    for call in (server.begin, lambda: server.attach(served.media[1], PAGE)):
        with pytest.raises(errors.ClosedError):
            call()
    assert not [t for t in threading.enumerate() if t.name == "warpwell-relay" and t.is_alive()]
