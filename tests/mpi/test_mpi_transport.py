"""MpiTransport between 2, 3 and 4 ranks, over shared memory and over TCP."""

import json
from pathlib import Path

import pytest

from warpwell.testing.transport_checks import CHECKS, LAST

from .conftest import TCP, TOLERANT, Job

WAYS = {"shared memory": TOLERANT, "tcp": (*TOLERANT, *TCP), "without fault tolerance": ()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", ["shared memory", "tcp"])
def test_all_checks_of_a_transport(job: Job, way: str, ranks: int) -> None:
    ended = job(ranks, "checks.py", options=WAYS[way], timeout=100)
    found = [json.loads(line) for line in ended.lines("check ")]
    assert not [failure for _, _, failure in found if failure], "\n".join(f[2] for f in found) + ended.errors
    assert {(rank, name) for rank, name, _ in found} == {
        (rank, name) for rank in range(ranks) for name in [*CHECKS, LAST.__name__]
    }, ended.errors
    assert ended.status == 0, ended.errors


def test_all_checks_without_fault_tolerance(job: Job) -> None:
    test_all_checks_of_a_transport(job, "without fault tolerance", 3)


@pytest.mark.parametrize("how", ["kill", "exit", "stop"])
@pytest.mark.parametrize("way", ["shared memory", "tcp"])
def test_a_peer_that_dies_in_the_middle_of_copies(job: Job, tmp_path: Path, way: str, how: str) -> None:
    ended = job(3, "failing.py", how, str(tmp_path), options=WAYS[way])
    lines = [line.split(maxsplit=5) for line in ended.lines("survivor ")]
    assert sorted(line[0] for line in lines) == ["0", "1"], ended
    for _, copies, chunks, seconds, told, sent in lines:
        assert (
            int(copies) == 2 and int(chunks) > 0 and float(seconds) < 5.0 and told == "1" and "rank 2 is gone" in sent
        )
