"""``warpwell drive`` on a machine of files, and on this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.harness.fake_machine import FakeMachine, answering

from warpwell.cli import main

FREE, BUSY, BOUND = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    made = FakeMachine(tmp_path)
    made.add_drive(FREE, 0, namespaces=2)
    made.add_drive(BUSY, 1, group=13)
    made.add_drive(BOUND, 2, driver="vfio-pci", group=14)
    made.mount("/dev/nvme1n1", "/", "259:17")
    made.append("proc/swaps", "/dev/nvme1n1 partition 1000 0 -2")
    monkeypatch.setattr("warpwell.drives.Machine", lambda: made)
    return made


def test_list_names_each_drive_and_what_may_be_done(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drive", "list"]) == 0
    printed = capsys.readouterr().out
    line_of = {line.split()[1]: line for line in printed.splitlines() if "0000:" in line}
    assert list(line_of) == [FREE, BUSY, BOUND]
    assert "free to bind" in line_of[FREE] and "nvme0n1 nvme0n2" in line_of[FREE] and "8.0 MiB" in line_of[FREE]
    assert "no: nvme1n1 is mounted at / (and 1 more)" in line_of[BUSY]
    assert "ready" in line_of[BOUND] and "vfio-pci" in line_of[BOUND]


def test_list_for_programs(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drive", "list", "--json"]) == 0
    drives = json.loads(capsys.readouterr().out)["drives"]
    assert [(d["address"], d["driver"], len(d["refusals"])) for d in drives] == [
        (FREE, "nvme", 0),
        (BUSY, "nvme", 2),
        (BOUND, "vfio-pci", 0),
    ]
    assert drives[0]["namespaces"][1] == {"name": "nvme0n2", "nsid": 2, "nbytes": 4 << 20, "block": 512, "uses": []}


def test_list_on_any_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drive", "list"]) == 0
    assert "NVMe drive" in capsys.readouterr().out


def test_without_drives_it_is_said_what_can_be_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("warpwell.drives.Machine", lambda: FakeMachine(tmp_path))
    assert main(["drive", "list"]) == 0
    assert "docs/how-to/use-a-drive.md" in capsys.readouterr().out
    assert (Path(__file__).parents[2] / "docs/how-to/use-a-drive.md").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [("nvme0n1", "sudo warpwell drive bind 0000:01:00.0"), ("02:00.0", "- nvme1n1 is swap space")],
)
def test_info_says_what_may_be_done(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    assert main(["drive", "info", name]) == 0
    printed = capsys.readouterr().out
    assert says in printed and "Fast Drive 9000" in printed


def test_bind_and_unbind(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(machine):
        assert main(["drive", "bind", "nvme0"]) == 0
        assert "0000:01:00.0 is bound for Warpwell (IOMMU group 12)" in capsys.readouterr().out
        assert machine.driver(FREE) == "vfio-pci"
        assert main(["drive", "unbind", FREE, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["driver"] == "nvme"
        assert main(["drive", "bind", BUSY]) == 2
        printed = capsys.readouterr().err
        assert "was left alone:\n  - nvme1n1 is mounted at /\n  - nvme1n1 is swap space" in printed
        assert machine.driver(BUSY) == "nvme"
        assert main(["drive", "bind", FREE, "--user", "nobody-has-this-name"]) == 2
        assert machine.driver(FREE) == "nvme"
