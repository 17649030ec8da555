"""QEMU packed into a folder works, and uses nothing of the machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.harness.drives import needs_qemu

from lab.drives.qemu import QemuDrive
from lab.drives.qemu_pack import pack
from warpwell import errors

pytestmark = needs_qemu


def test_a_packed_qemu_is_a_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = pack(tmp_path / "qemu with a blank")
    monkeypatch.setenv("WARPWELL_QEMU", str(start))
    monkeypatch.setenv("PATH", str(tmp_path))  # the installed one is not found
    assert QemuDrive.is_installed()
    with QemuDrive(["1MiB"]) as qemu, qemu.open() as drive:
        data = np.arange(512)
        drive.namespace(1).write(8, data)
        assert np.array_equal(drive.namespace(1).read(8, 8).view(np.int64), data)
        mappings = Path(f"/proc/{qemu.pid}/maps").read_text().splitlines()
    files = {line.split(None, 5)[5] for line in mappings if "/" in line and len(line.split(None, 5)) == 6}
    mapped = {name for name in files if not name.startswith(("/memfd:", "/dev/zero"))}
    assert mapped and all(name.startswith(str(start.parent)) for name in mapped), mapped
    with pytest.raises(SystemExit, match="is not installed"):
        pack(tmp_path / "again")


def test_a_name_that_is_no_program_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_QEMU", "/nowhere/qemu")
    assert not QemuDrive.is_installed()
    with pytest.raises(errors.DeviceNotFoundError, match="WARPWELL_QEMU is /nowhere/qemu"):
        QemuDrive()
