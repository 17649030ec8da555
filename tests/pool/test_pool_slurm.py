"""Slurm's commands, replaced by scripts: the GPUs of a job, and allocations that are granted, refused and revoked."""

from __future__ import annotations

import errno
import os
import signal
import socket
import uuid
from pathlib import Path

import pytest
from tests.harness.until import until

from warpwell.errors import ArgumentError, PoolError
from warpwell.pool.launch import slurm
from warpwell.pool.launch.hosts import Host
from warpwell.pool.launch.mpiexec import Mpiexec, Ranks
from warpwell.pool.launch.slurm import Allocation, step_environ, use_job

HOSTNAME = socket.gethostname()
TWO_NODES = (
    f"Nodes={HOSTNAME} CPU_IDs=0-1 Mem=0 GRES=gpu:a:1(IDX:1),gpu:b:2(IDX:4-5) Nodes=n[7-8] CPU_IDs=0 Mem=0 GRES="
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the first folder on PATH, with commands that fail."""
    for name in ("scontrol", "sinfo"):
        script(tmp_path / name, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return tmp_path


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def job(folder: Path, details: str, node: str = "Gres=(null)", **variables: str) -> dict[str, str]:
    """Return the environment of a job that scontrol describes."""
    script(folder / "scontrol", f'case "$*" in *" job "*) echo "{details}";; *) echo "{node}";; esac')
    return {"SLURM_JOB_ID": uuid.uuid4().hex, "SLURM_JOB_NODELIST": HOSTNAME, **variables}


def test_a_command_of_salloc_uses_the_gpus_of_its_job(folder: Path) -> None:
    environ = job(folder, TWO_NODES, SLURM_JOB_NODELIST=f"{HOSTNAME},n[7-8]", SLURM_TASKS_PER_NODE="1(x3)")
    assert use_job(environ, "auto") == [Host(HOSTNAME, 3)]
    assert environ["CUDA_VISIBLE_DEVICES"] == "1,4,5"
    assert use_job(environ, "cpu") == [Host(HOSTNAME, 1), Host("n7", 1), Host("n8", 1)]
    environ |= {"CUDA_VISIBLE_DEVICES": "GPU-x", "SLURM_NTASKS": "3"}
    assert use_job(environ, "auto") == [Host(HOSTNAME, 1), Host("n7", 1), Host("n8", 1)]
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-x"


@pytest.mark.parametrize(
    ("details", "node", "visible"),
    [
        (f"Nodes={HOSTNAME} CPU_IDs=0 Mem=0 GRES= MinCPUs=1", "Gres=gpu:2", ""),
        (f"Nodes={HOSTNAME} CPU_IDs=0 Mem=0 GRES= MinCPUs=1", "Gres=(null)", None),
        (f"Nodes={HOSTNAME} CPU_IDs=0 Mem=0 GRES=gpu:2(CNT:2)", "Gres=gpu:2", None),
        (f"Nodes={HOSTNAME} CPU_IDs=0 Mem=0 GRES=gpu:0(IDX:N/A),shard:1(1/4)", "Gres=gpu:1,shard:4", None),
        (f"Nodes=x[1-2],{HOSTNAME} CPU_IDs=0-63 Mem=0 GRES=gpu:4(IDX:0-1,6-7)", "", "0,1,6,7"),
        ("", "", None),
    ],
)
def test_only_known_gpus_restrict_a_job(folder: Path, details: str, node: str, visible: str | None) -> None:
    environ = job(folder, details, node)
    use_job(environ, "auto")
    assert environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_no_program_is_called_outside_of_a_job(folder: Path) -> None:
    script(folder / "scontrol", f"touch {folder}/called")
    assert use_job({}, "auto") == [] and step_environ({}, [Host("n1", 2)]) == []
    assert not (folder / "called").exists()


def test_a_step_on_other_hosts_gets_all_gpus_of_the_job_there(folder: Path) -> None:
    gpus = f"Nodes={HOSTNAME} CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:1) Nodes=n[7-9] CPU_IDs=0 Mem=0 GRES=gpu:8(IDX:0-7)"
    environ = job(folder, gpus)
    command = step_environ(environ, [Host(HOSTNAME, 1), Host("n7", 2), Host("n8", 8)])
    assert command[0] == "env" and command[-1] == "SLURM_GPUS=16" and "SLURM_GPUS_PER_TASK" in command
    assert step_environ(environ, [Host(HOSTNAME, 1)]) == []
    line = Mpiexec("mpiexec", "openmpi").line([Ranks(1, ["app"])], environ)
    assert "--prtemca ras ^slurm" in " ".join(line)


def test_an_allocation_lasts_until_it_is_closed_or_revoked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(
        folder / "salloc",
        f"""echo "$*" > {folder}/arguments
        while [ "${{1#-}}" != "$1" ]; do shift; done
        echo welcome
        exec 3<&0  # a shell gives /dev/null as 0 to a command in the background
        SLURM_JOB_ID=5 sh -c 'echo $$ > {folder}/child; exec "$@"' sh "$@" <&3 &
        wait
        [ ! -e {folder}/linger ] || exec sleep 600""",
    )
    monkeypatch.setenv("SLURM_JOB_ID", "")
    with Allocation(2, True, 90.5, "--partition=gpu --comment='a b'") as allocation:
        assert os.environ["SLURM_JOB_ID"] == "5" and not allocation.is_revoked()
        text = (folder / "arguments").read_text()
        expected = "--ntasks=2 --gpus-per-task=1 --immediate=91 --kill-command=TERM --partition=gpu --comment=a b "
        assert text.startswith(expected)
    assert allocation.is_revoked() and not Path(f"/proc/{(folder / 'child').read_text().strip()}").exists()
    with Allocation(1, False, 1.0, "") as allocation:
        assert "--gpus-per-task" not in (folder / "arguments").read_text()
        (folder / "linger").touch()  # salloc has run for 120 s after it had terminated its command
        os.kill(int((folder / "child").read_text()), signal.SIGTERM)
        until(allocation.is_revoked)
    (folder / "linger").unlink()
    monkeypatch.setattr(os, "pidfd_open", missing)
    with Allocation(1, False, 1.0, "") as allocation:  # as before Linux 5.3
        assert not allocation.is_revoked()
        os.kill(int((folder / "child").read_text()), signal.SIGTERM)
        until(allocation.is_revoked)


def missing(_: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_slurm_without_a_configuration_is_not_used(folder: Path) -> None:
    script(folder / "salloc", "exit 1")
    assert slurm.is_configured()  # scontrol fails for another reason, such as a controller that is down
    script(folder / "scontrol", "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1")
    assert not slurm.is_configured()


def test_a_request_that_cannot_be_granted_raises(folder: Path) -> None:
    script(folder / "salloc", "exit 1")
    with pytest.raises(PoolError, match=r"not granted 2 tasks with a GPU each.*--wait.*--hosts localhost"):
        Allocation(2, True, 1.0, "")
    script(folder / "sinfo", "printf 'n1 2 gpu:a:1(S:0),gpu:b:2\\nn2 4 (null)\\nn1 2 gpu:a:1(S:0),gpu:b:2\\n'")
    with pytest.raises(PoolError):
        Allocation(3, True, 1.0, "")
    with pytest.raises(ArgumentError, match=r"4 agents need a GPU each.* together have 3 GPUs"):
        Allocation(4, True, 1.0, "")
    with pytest.raises(PoolError):
        Allocation(6, False, 1.0, "")
    with pytest.raises(ArgumentError, match=r"7 agents need a core each.* together have 6 cores"):
        Allocation(7, False, 1.0, "")
