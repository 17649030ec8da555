"""Drives that QEMU emulates, for tests; without QEMU these tests are skipped with a reason that names the package."""

import pytest

from lab.drives import qtest_store
from lab.drives.qemu import INSTALL, QemuDrive
from warpwell.drives.drive import Drive

needs_qemu = pytest.mark.skipif(not QemuDrive.is_installed(), reason=INSTALL)


def set_timeout(drive: Drive, seconds: float) -> None:
    """Set how long an open drive may be silent; before a test stops it, so that healthy commands never time out."""
    transport = drive.transport
    transport._seconds = seconds  # type: ignore[attr-defined]
    transport._state_words[qtest_store.S_NANOSECONDS] = int(seconds * 1e9)  # type: ignore[attr-defined]
