"""Drives that QEMU emulates, for tests; without QEMU these tests are skipped, and say what to install."""

import pytest

from warpwell.testing.qemu import INSTALL, QemuDrive

needs_qemu = pytest.mark.skipif(not QemuDrive.found(), reason=INSTALL)
