"""Drives: QEMU's NVMe controller, driven by our transport, admin queue and host queues."""

import numpy as np
import pytest
from tests.harness.drives import needs_qemu

from warpwell import errors
from warpwell.testing.qemu import QemuDrive, QemuNamespace

pytestmark = needs_qemu


def content(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_what_is_written_is_read(tmp_path) -> None:
    image = tmp_path / "image.raw"
    image.write_bytes(bytes(4 << 20))
    with QemuDrive(["16MiB", QemuNamespace(path=image, block=4096)], mdts=3) as qemu, qemu.open() as drive:
        assert drive.max_transfer == 8 * 4096 and drive.namespaces() == [1, 2]
        small, large = drive.namespace(1), drive.namespace(2)
        assert (small.block, small.nbytes, large.block, large.blocks) == (512, 16 << 20, 4096, 1024)
        data = content(300 * 4096)
        small.write(17, data)
        large.write(5, data)
        large.flush()
        assert np.array_equal(small.read(17, data.size // 512), data)
        assert np.array_equal(large.read(5, 300), data)
        assert image.read_bytes()[5 * 4096 :][: data.size] == data.tobytes()
        assert not small.read(0, 17).any()


def test_a_drive_that_dies_is_lost_for_every_later_call() -> None:
    with QemuDrive() as qemu, qemu.open() as drive:
        space = drive.namespace(1)
        qemu.kill()
        for call in (lambda: space.read(0, 1), lambda: drive.namespaces(), lambda: drive.host_queue(), space.flush):
            with pytest.raises(errors.DriveLostError, match=r"qemu:\d+ is lost.* QEMU has ended"):
                call()
