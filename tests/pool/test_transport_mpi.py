"""MpiTransport between 2, 3 and 4 ranks, over shared memory and over TCP."""

import json
from pathlib import Path

import pytest
from tests.harness.transports.checks import CHECKS, LAST

from .conftest import TCP, TOLERANT, Job

WAYS = {"shared memory": TOLERANT, "tcp": (*TOLERANT, *TCP), "without fault tolerance": ()}


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("tcp", 2),
        *[
            pytest.param(way, ranks, marks=pytest.mark.slow)
            for way, ranks in (("shared memory", 2), ("tcp", 3), ("shared memory", 3), ("tcp", 4), ("shared memory", 4))
        ],
    ],
)
def test_all_checks_of_a_transport(job: Job, way: str, ranks: int, kind: str = "mpi") -> None:
    ended = job(ranks, "checks.py", kind, options=WAYS[way])
    found = [json.loads(line) for line in ended.lines("check ")]
    assert not [failure for _, _, failure in found if failure], "\n".join(f[2] for f in found) + ended.errors
    assert {(rank, name) for rank, name, _ in found} == {
        (rank, name) for rank in range(ranks) for name in [*CHECKS, LAST.__name__]
    }, ended.errors
    assert ended.status == 0, ended.errors


@pytest.mark.slow
def test_all_checks_over_an_emulated_link(job: Job) -> None:
    test_all_checks_of_a_transport(job, "shared memory", 3, "emulated")


@pytest.mark.slow
def test_all_checks_without_fault_tolerance(job: Job) -> None:
    test_all_checks_of_a_transport(job, "without fault tolerance", 3)


ENDS = [(way, how) for way in ("shared memory", "tcp") for how in ("kill", "exit", "stop")]


@pytest.mark.parametrize(
    ("way", "how"), [pytest.param(*case, marks=pytest.mark.slow if case != ("tcp", "exit") else ()) for case in ENDS]
)
def test_a_peer_that_dies_in_the_middle_of_copies(job: Job, tmp_path: Path, way: str, how: str) -> None:
    ended = job(3, "failing.py", how, str(tmp_path), options=WAYS[way])
    for rank in (0, 1):
        report = tmp_path / f"survivor-{rank}"
        assert report.exists(), ended
        copies, told, sent = report.read_text().split(maxsplit=2)
        assert (copies, told) == ("2", "[2]") and "rank 2 is gone" in sent


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends_well(job: Job) -> None:
    ended = job(3, "forgotten.py")
    assert ended.status == 0, ended
