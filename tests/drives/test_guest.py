"""Drives behind an IOMMU, in a small Linux: access rules, and Warpwell's use of them through VFIO."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lab.campaigns.guest.boot import CannotRun, Guest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "lab/campaigns/guest/program.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", PROGRAM.read_text(), re.MULTILINE)

VIRTUAL = (
    "bus=upstream,subsys=subsystem,max_ioqpairs=8,msix_qsize=9,sriov_max_vfs=1,sriov_vq_flexible=2,sriov_vi_flexible=1"
)
DRIVES = {
    "free": "addr=4",
    "busy": "addr=5",
    "pair0": "addr=6.0,multifunction=on",
    "pair1": "addr=6.1",
    "root": "addr=7",
    "virtual": VIRTUAL,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), pytest.mark.xdist_group("guest")]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Return the result of each check of the program; one guest runs all checks."""
    try:
        output = Guest(PROGRAM, ROOT / "build" / "guest").run(DRIVES, "root=UUID=cafe")
    except CannotRun as error:
        pytest.skip(str(error))
    assert "the program ended with 0" in output, output
    print(output)
    return {each["check"]: each for each in map(json.loads, re.findall(r"^@@(.*)$", output, re.MULTILINE))}


def test_there_are_checks() -> None:
    assert len(CHECKS) > 15


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_guest(results: dict[str, dict[str, Any]], check: str) -> None:
    assert results[check]["ok"], results[check]["said"]
