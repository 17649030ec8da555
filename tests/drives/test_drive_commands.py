"""``warpwell drive format-array``, ``info`` and ``bench``, on a drive of QEMU instead of a drive of this machine."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.drives import needs_qemu

from lab.bench.micro.drives import drive_reads
from lab.commands import main as lab
from lab.drives.qemu import QemuDrive
from warpwell.cli import main
from warpwell.cli.drive import describe_drive
from warpwell.drives import Namespace
from warpwell.drives.superblock import NPY_AT
from warpwell.errors import WarpwellError

pytestmark = needs_qemu

ITEMS = np.arange(12_000.0).reshape(120, 100)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    with QemuDrive(["8MiB"], serial="S1") as qemu, qemu.open() as drive:
        found = drive.namespace(1)
        monkeypatch.setattr("warpwell.drives.open_namespace", lambda name: (found, lambda: None))
        yield found


def test_it_asks_first(namespace: Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ITEMS)
    command = ["drive", "format-array", "01:00.0/1", "--from", str(tmp_path / "a.npy")]
    assert main(command) == 2
    assert "to confirm, add --yes-destroy-data S1/1" in capsys.readouterr().err
    assert main([*command, "--yes-destroy-data", "S2/1"]) == 2
    assert "was not changed" in capsys.readouterr().err
    assert not namespace.read(0, namespace.blocks).any()
    assert main([*command, "--yes-destroy-data", "S1/1"]) == 0
    assert "ww.open(" in capsys.readouterr().out
    assert np.array_equal(np.load(io.BytesIO(namespace.read(0, namespace.blocks).tobytes()[NPY_AT:])), ITEMS)
    assert (
        main(
            [
                "drive",
                "format-array",
                "01:00.0/1",
                "--dtype",
                "int32",
                "--shape",
                "10,20",
                "--json",
                "--yes-destroy-data",
                "S1/1",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["shape"] == [10, 20]


def test_somebodys_data_stay(namespace: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    namespace.write(2, np.full(512, 0xEF, np.uint8))  # the location of an ext4 superblock
    before = namespace.read(0, namespace.blocks)
    for more in ([], ["--yes-destroy-data", "S1/1"]):
        assert main(["drive", "format-array", "01:00.0/1", "--dtype", "int32", "--shape", "10", *more]) == 2
        assert "was left alone: byte 1024 is not zero" in capsys.readouterr().err
    assert np.array_equal(namespace.read(0, namespace.blocks), before)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--dtype and --shape"),
        (["--dtype", "int32", "--shape", "0"], "at least 1"),
        (["--dtype", "int32", "--shape", "x"], "1000,100"),
        (["--dtype", "nothing", "--shape", "1"], "not a dtype"),
        (["--from", "none.npy"], "does not exist"),
        (["--from", "a.npy", "--dtype", "int32"], "determines the dtype"),
        (["--dtype", "int64", "--shape", "10000000"], "does not fit"),
    ],
)
def test_bad_input(namespace: Namespace, capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    assert main(["drive", "format-array", "01:00.0/1", "--yes-destroy-data", "S1/1", *options]) == 2
    assert says in capsys.readouterr().err
    assert not namespace.read(0, namespace.blocks).any()


def test_info_tells_what_lies_on_a_drive(namespace: Namespace) -> None:
    description = describe_drive(namespace.drive)
    assert description["serial"] == "S1" and "no array of Warpwell" in description["namespace 1"]
    how = ["--yes-destroy-data", "S1/1", "--dtype", "int32", "--shape", "9"]
    assert main(["drive", "format-array", "01:00.0/1", *how]) == 0
    assert "an array of 4.0 KiB" in describe_drive(namespace.drive)["namespace 1"]
    namespace.write(0, np.frombuffer(b"WARPWELL" + bytes(504), np.uint8))
    assert "damaged" in describe_drive(namespace.drive)["namespace 1"]


def test_bench_reads_a_virtual_drive(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(["bench", "drive", "--qemu", "--bytes", "2MiB", "--runs", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["rows"]) == 8 and all(row["rate"] > 0 for row in report["rows"])
    for wrong in ([], ["01:00.0/1", "--qemu"]):
        assert lab(["bench", "drive", *wrong]) == 2
        assert "--qemu" in capsys.readouterr().err


def test_bench_checks_what_it_reads(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    read = namespace.read
    # As if the host corrupted the data.
    monkeypatch.setattr(namespace, "read", lambda lba, count: read(lba, count) + np.uint8(1))
    with pytest.raises(WarpwellError, match="first words of pages"):
        drive_reads(namespace, nbytes=1 << 20, runs=1)
