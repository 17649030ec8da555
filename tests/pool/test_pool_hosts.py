"""Hosts of a pool from options, files and Slurm, and the number of agents on each."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpwell.errors import ArgumentError, MissingFileError
from warpwell.pool.launch.hosts import Host, assign_agents, expand, is_here, parse_hosts, read_hostfile, slurm_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:8,b:8", [Host("a", 8), Host("b", 8)]),
        ("a,b", [Host("a"), Host("b")]),
        ("n[01-03,7]:2", [Host("n01", 2), Host("n02", 2), Host("n03", 2), Host("n7", 2)]),
        ("10.0.0.1:4", [Host("10.0.0.1", 4)]),
        ("a:2,a:3", [Host("a", 5)]),
        ("r[1-2]n[1-2]", [Host("r1n1"), Host("r1n2"), Host("r2n1"), Host("r2n2")]),
    ],
)
def test_hosts_are_read(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a:0", "a:x", "a:-1", "n[3-1]", "n[a-b]", "n[1-", ":8", "n[1-9999999999]", "-oProxyCommand=x", "a b"],
)
def test_wrong_hosts_are_named(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_hosts(text)


def test_host_files_of_either_mpi(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two nodes\na slots=8 max_slots=16\nb:4  # MPICH\n\nc\n")
    assert read_hostfile(str(path)) == [Host("a", 8), Host("b", 4), Host("c")]
    path.write_text("a slots=many\n")
    with pytest.raises(ArgumentError, match="line 1"):
        read_hostfile(str(path))
    path.write_text("# nothing\n")
    with pytest.raises(ArgumentError, match="has no host"):
        read_hostfile(str(path))
    with pytest.raises(MissingFileError):
        read_hostfile(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        ({}, None),
        (
            {"SLURM_JOB_NODELIST": "n[01-03,7]", "SLURM_TASKS_PER_NODE": "2(x3),1"},
            [Host("n01", 2), Host("n02", 2), Host("n03", 2), Host("n7", 1)],
        ),
        ({"SLURM_JOB_NODELIST": "gpu1,login-2", "SLURM_TASKS_PER_NODE": "8,4"}, [Host("gpu1", 8), Host("login-2", 4)]),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}, [Host("n1", 4), Host("n2", 4)]),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, [Host("n1"), Host("n2")]),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "nonsense"}, [Host("n1"), Host("n2")]),
    ],
)
def test_slurm(environ: dict[str, str], hosts: list[Host] | None) -> None:
    assert slurm_hosts(environ, {}) == hosts


def test_a_slurm_job_without_a_number_of_tasks_has_an_agent_for_each_gpu() -> None:
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "1(x3)"}
    assert slurm_hosts(job, {"n1": 8, "n3": 2}) == [Host("n1", 8), Host("n3", 2)]
    assert slurm_hosts({**job, "SLURM_NTASKS": "3"}, {"n1": 8}) == [Host("n1", 1), Host("n2", 1), Host("n3", 1)]


def test_agents_fill_hosts_in_order() -> None:
    hosts = parse_hosts("a:2,b:3,c:1")
    assert assign_agents(hosts, None) == [Host("a", 2), Host("b", 3), Host("c", 1)]
    assert assign_agents(hosts, 4) == [Host("a", 2), Host("b", 2)]
    assert assign_agents(parse_hosts("a,b,c"), 7) == [Host("a", 3), Host("b", 2), Host("c", 2)]
    assert assign_agents(parse_hosts("a,b"), None) == [Host("a", 1), Host("b", 1)]
    with pytest.raises(ArgumentError, match="at most 6"):
        assign_agents(hosts, 7)
    with pytest.raises(ArgumentError, match="at least 1"):
        assign_agents(hosts, 0)


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.integers(1, 9)),
        min_size=1,
        max_size=8,
        unique_by=lambda pair: pair[0],
    ),
    st.data(),
)
def test_no_agent_is_lost_between_hosts(pairs: list[tuple[str, int]], data: st.DataObject) -> None:
    hosts = parse_hosts(",".join(f"{name}:{count}" for name, count in pairs))
    agents = data.draw(st.integers(1, sum(count for _, count in pairs)))
    placed = assign_agents(hosts, agents)
    assert sum(h.agents or 0 for h in placed) == agents
    assert all(0 < (h.agents or 0) <= dict(pairs)[h.name] for h in placed)


@given(st.integers(0, 500), st.integers(0, 200), st.integers(1, 5))
def test_ranges_keep_their_width(first: int, more: int, width: int) -> None:
    names = expand(f"n[{first:0{width}d}-{first + more}]")
    assert len(names) == more + 1
    assert names[0] == f"n{first:0{width}d}"
    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))


def test_this_host() -> None:
    assert is_here("localhost") and is_here("127.0.0.1")
    assert not is_here("192.0.2.7") and not is_here("some-other-host")
