"""A drive as a medium: QEMU's controller passes the suite for media, alone, striped and replicated; loss and errors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.drives import needs_qemu

from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell.drives import Drive, DriveMedium
from warpwell.nvme import READ, WRITE
from warpwell.storage.medium import Medium
from warpwell.storage.striped import Replicated, Striped
from warpwell.testing.media import HostBytes, MediumConformance

pytestmark = needs_qemu

SMALL, LARGE = 40 * 512 + 2048, 40 * 4096 + 16384


@pytest.fixture(scope="module")
def shared() -> Iterator[Drive]:
    """One drive for all of the suites."""
    spaces = [QemuNamespace(n, block=b) for n, b in ((SMALL, 512), *((LARGE, 4096),) * 2, *((SMALL // 2, 512),) * 2)]
    with QemuDrive(spaces, queues=9) as qemu, qemu.open() as made:
        yield made


class DriveConformance(MediumConformance):
    drive: Drive

    @pytest.fixture(autouse=True)
    def _drive(self, shared: Drive) -> None:
        self.drive = shared

    def namespace(self, nsid: int, content: np.ndarray, writable: bool) -> DriveMedium:
        """Return a namespace with this content."""
        space = self.drive.namespace(nsid)
        space.write(0, content)
        return DriveMedium(space, writable=writable, queues=3)

    def test_any_byte_of_memory_may_be_a_buffer(self, medium: Medium, content: np.ndarray) -> None:
        nbytes = 8 * self.BLOCK
        buffer = HostBytes(nbytes + 16)
        assert self.run(medium, (READ, 0, nbytes, buffer.address + 3)) == [0]
        assert np.array_equal(buffer.bytes[3 : 3 + nbytes], content[:nbytes])
        assert self.run(medium, (WRITE, nbytes, nbytes, buffer.address + 3)) == [0]
        assert np.array_equal(medium.read(nbytes, nbytes), content[:nbytes])


class TestBlocksOf512(DriveConformance):
    NBYTES = SMALL

    def make(self, content, folder, writable):
        return self.namespace(1, content, writable)


class TestBlocksOf4096(DriveConformance):
    BLOCK, NBYTES = 4096, LARGE

    def make(self, content, folder, writable):
        return self.namespace(2, content, writable)


class TestStriped(DriveConformance):
    NBYTES = SMALL

    def make(self, content, folder, writable):
        stripes = content.reshape(-1, 1024)
        return Striped([self.namespace(4 + k, stripes[k::2].reshape(-1), writable) for k in range(2)], 1024)


class TestReplicated(DriveConformance):
    BLOCK, NBYTES = 4096, LARGE

    def make(self, content, folder, writable):
        return Replicated([self.namespace(nsid, content, writable) for nsid in (2, 3)])
