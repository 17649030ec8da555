"""The mpiexec command of a job, and the GPU of each rank."""

import os
import stat
from pathlib import Path

import pytest

from warpwell.errors import AgentError
from warpwell.pool.launch.gpus import assign
from warpwell.pool.launch.launcher import joined_names
from warpwell.pool.launch.mpiexec import Mpiexec, Ranks

APPLICATION = Ranks(1, ["python", "app.py"])
AGENTS = Ranks(3, ["python", "agent"])
OPENMPI = Mpiexec("/usr/bin/mpiexec", "openmpi")


def test_one_host() -> None:
    line = OPENMPI.line([APPLICATION, AGENTS], {"WARPWELL_X": "1"})
    assert line == [
        "/usr/bin/mpiexec",
        "--with-ft",
        "ulfm",
        "--mca",
        "pml",
        "ob1",
        "--map-by",
        ":OVERSUBSCRIBE",
        "--bind-to",
        "none",
        "-n",
        "1",
        "python",
        "app.py",
        ":",
        "-n",
        "3",
        "python",
        "agent",
    ]


def test_without_fault_tolerance_the_network_is_mpis_choice() -> None:
    line = OPENMPI.line([APPLICATION, AGENTS], {}, ft=False)
    assert "--with-ft" not in line and "pml" not in line


@pytest.mark.parametrize("ft", [True, False])
def test_sockets_only(ft: bool) -> None:
    line = " ".join(OPENMPI.line([APPLICATION, AGENTS], {}, ft=ft, tcp=True))
    assert "--mca btl tcp,self" in line and line.count("--mca pml ob1") == 1


def test_other_hosts_get_the_variables() -> None:
    parts = [Ranks(1, ["app"], "a"), Ranks(8, ["agent"], "a"), Ranks(8, ["agent"], "b")]
    line = " ".join(OPENMPI.line(parts, {"WARPWELL_POOL_JOB": "x", "HOME": "/root", "PYTHONPATH": "/p"}))
    assert "-n 1 --host a:1 -x PYTHONPATH -x WARPWELL_POOL_JOB app" in line
    assert "-n 8 --host b:8 -x PYTHONPATH -x WARPWELL_POOL_JOB agent" in line
    assert "HOME" not in line


def test_mpich() -> None:
    mpich = Mpiexec("mpiexec", "mpich")
    assert not mpich.survives
    assert mpich.line([APPLICATION, AGENTS], {}) == "mpiexec -n 1 python app.py : -n 3 python agent".split()
    line = mpich.line([Ranks(1, ["app"], "a"), Ranks(2, ["agent"], "b")], {"WARPWELL_X": "1"})
    assert line == "mpiexec -n 1 -host a app : -n 2 -host b agent".split()


def script(folder: Path, text: str) -> str:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mpiexec (Open MPI) 5.0.11", "openmpi"),
        ("HYDRA build details:\n    Version: 4.3.1", "mpich"),
        ("Intel(R) MPI Library for Linux* OS", "mpich"),
    ],
)
def test_mpiexec_says_what_it_is(tmp_path: Path, text: str, kind: str) -> None:
    assert Mpiexec.find(script(tmp_path, text)).kind == kind


def test_another_program_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="is not the mpiexec of"):
        Mpiexec.find(script(tmp_path, "I am something else"))


def test_an_mpiexec_that_is_too_old_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"mpiexec is an Open MPI from before version 5 .*4\.1\.6.*extra \[mpi\]"):
        Mpiexec.find(script(tmp_path, "mpiexec (OpenRTE) 4.1.6"))


def test_the_one_beside_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("venv", "path"):
        (tmp_path / name).mkdir()
        script(tmp_path / name, "mpiexec (Open MPI) 5")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    assert Mpiexec.find(python=str(tmp_path / "venv" / "python")).path == str(tmp_path / "venv" / "mpiexec")
    assert Mpiexec.find(python=str(tmp_path / "other" / "python")).path == str(tmp_path / "path" / "mpiexec")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AgentError, match=r"extra \[mpi\]"):
        Mpiexec.find(python=str(tmp_path / "other" / "python"))


def test_gpus_go_round_by_rank() -> None:
    assert assign([1, 2], [], "auto", False, "a") == {1: {"target": "cpu"}, 2: {"target": "cpu"}}
    assert assign([1, 2], ["x", "y"], "cpu", False, "a")[2] == {"target": "cpu"}
    assert assign([3, 4], ["x", "y"], "auto", False, "a") == {
        3: {"target": "cuda", "uuid": "x"},
        4: {"target": "cuda", "uuid": "y"},
    }
    assert assign([1, 2, 3], ["x", "y"], "cuda", True, "a")[3] == {"target": "cuda", "uuid": "x"}
    with pytest.raises(AgentError, match=r"host a has 2 GPUs for 3 agents.*--share-gpu"):
        assign([1, 2, 3], ["x", "y"], "auto", False, "a")
    with pytest.raises(AgentError, match="host a has no GPU"):
        assign([1], [], "cuda", True, "a")


def test_of_many_a_message_names_the_first() -> None:
    assert joined_names([]) == "" and joined_names(["a"]) == "a" and joined_names(list("abcde")) == "a, b, c, d, e"
    assert joined_names([str(k) for k in range(999)]) == "0, 1, 2, 3, and 995 more"
