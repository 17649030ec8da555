"""MpiTransport between 2, 3 and 4 ranks, over shared memory and over TCP."""

import json
from pathlib import Path

import pytest
from tests.harness.transports.checks import CHECKS, LAST

from .conftest import TCP, TOLERANT, Job

CONFIGURATIONS = {"shared memory": TOLERANT, "tcp": (*TOLERANT, *TCP), "without fault tolerance": ()}


@pytest.mark.parametrize(
    ("configuration", "ranks"),
    [
        ("tcp", 2),
        *[
            pytest.param(configuration, ranks, marks=pytest.mark.slow)
            for configuration, ranks in (
                ("shared memory", 2),
                ("tcp", 3),
                ("shared memory", 3),
                ("tcp", 4),
                ("shared memory", 4),
            )
        ],
    ],
)
def test_all_checks_of_a_transport(job: Job, configuration: str, ranks: int, kind: str = "mpi") -> None:
    ended = job(ranks, "checks.py", kind, options=CONFIGURATIONS[configuration])
    found = [json.loads(line) for line in ended.select_lines("check ")]
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


ENDS = [(configuration, how) for configuration in ("shared memory", "tcp") for how in ("kill", "exit", "stop")]


@pytest.mark.parametrize(
    ("configuration", "how"),
    [pytest.param(*case, marks=pytest.mark.slow if case != ("tcp", "exit") else ()) for case in ENDS],
)
def test_a_peer_that_dies_in_the_middle_of_copies(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configuration: str, how: str
) -> None:
    if how == "stop" or configuration == "shared memory":  # only silence shows the loss: there is no launcher
        monkeypatch.setenv("WARPWELL_POOL_TIMEOUT", "10")
    ended = job(3, "failing.py", how, str(tmp_path), options=CONFIGURATIONS[configuration])
    for rank in (0, 1):
        report = tmp_path / f"survivor-{rank}"
        assert report.exists(), ended
        copies, lost_peers, sent = report.read_text().split(maxsplit=2)
        assert (copies, lost_peers) == ("2", "[2]") and "rank 2 is gone" in sent


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends_well(job: Job) -> None:
    ended = job(3, "forgotten.py")
    assert ended.status == 0, ended
