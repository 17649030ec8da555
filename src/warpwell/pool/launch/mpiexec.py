"""`Mpiexec`: the program that starts the processes of a job, and its command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..._check import extra
from ...errors import AgentError

_VERSION_SECONDS = 20.0

_NO_MPI = (
    f"mpiexec is not next to {{python}} and not on PATH: install {extra('mpi')}, which includes mpiexec, or add the "
    f"mpiexec of your MPI to PATH"
)
_OLD_NAME = "OpenRTE"
"""The name of mpiexec in the output of Open MPI before version 5."""
_NAMES_IN_VERSION = {"openmpi": ("Open MPI", "PRRTE"), "mpich": ("HYDRA", "MPICH", "Intel(R) MPI")}
"""Parts of the output of ``mpiexec --version`` that identify its kind."""
_SENT_PREFIXES = ("WARPWELL_", "NUMBA_", "PYTHON", "OMPI_MCA_", "UCX_")
"""Prefixes of variables that are sent to every host, because Open MPI sends none by itself."""


@dataclass(frozen=True)
class Ranks:
    """Processes of one role on one host, with consecutive ranks; `host` None means this host."""

    count: int
    command: Sequence[str]
    host: str | None = None


@dataclass(frozen=True)
class Mpiexec:
    """The program that starts the processes of an MPI job.

    Parameters
    ----------
    path : str
    kind : {"openmpi", "mpich"}
    version : str
        First line of the output of ``--version``.
    """

    path: str
    kind: str
    version: str = ""

    @classmethod
    def find(cls, path: str | None = None, python: str = sys.executable) -> Mpiexec:
        """Return the mpiexec of this Python's environment, or else on PATH, and determine its kind.

        Raises
        ------
        AgentError
            mpiexec does not exist, is of another MPI, or is too old.
        """
        neighbor = Path(python).parent / "mpiexec"
        found = path or (str(neighbor) if os.access(neighbor, os.X_OK) else None) or shutil.which("mpiexec")
        if found is None:
            raise AgentError(_NO_MPI.format(python=python))
        try:
            command, environ, null = [found, "--version"], root_allowed(os.environ), subprocess.DEVNULL
            done = subprocess.run(
                command, stdin=null, capture_output=True, text=True, timeout=_VERSION_SECONDS, env=environ
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AgentError(f"{found} --version: {error}; check the installation of this MPI") from error
        output = (done.stdout + done.stderr).strip()
        first = output.partition("\n")[0].strip()
        for kind, marks in _NAMES_IN_VERSION.items():
            if any(mark in output for mark in marks):
                return cls(found, kind, first)
        if _OLD_NAME in output:
            raise AgentError(
                f"{found} is an Open MPI from before version 5 ({first[:100]}): install {extra('mpi')}, which includes "
                f"a newer version, and put its mpiexec first on PATH, or pass its path as --mpiexec"
            )
        raise AgentError(
            f"{found} is not the mpiexec of Open MPI or MPICH (--version prints {first[:100] or 'nothing'!r}): put one "
            f"of the two on PATH, or install {extra('mpi')}"
        )

    @property
    def survives(self) -> bool:
        """Whether a job can continue after it has lost a process."""
        return self.kind == "openmpi"

    def line(
        self,
        ranks: Sequence[Ranks],
        environ: Mapping[str, str],
        *,
        ft: bool = True,
        tcp: bool = False,
        folder: str | None = None,
    ) -> list[str]:
        """Return the command that starts all ranks.

        Parameters
        ----------
        ranks : sequence of Ranks
            In the order of their ranks.
        environ : mapping
            Environment variables; some are sent to other hosts.
        ft : bool
            Whether the other processes continue after a loss. Open MPI then uses its portable path (no UCX).
        tcp : bool
            Whether all data is sent over sockets, without shared memory.
        folder : str, optional
            The launcher's folder on this host, for Open MPI's own files.
        """
        mpich, away = self.kind == "mpich", any(each.host is not None for each in ranks)
        command = [self.path]
        if not mpich:
            # other settings of Open MPI probe for absent networks for seconds at the start
            command += ["--with-ft", "ulfm"] if ft else []
            command += ["--mca", "pml", "ob1"] if ft or tcp else []
            command += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
            command += ["--mca", "btl", "tcp,self"] if tcp else []
            # in a Slurm job, only its hosts would be possible, and not the host of the application
            command += ["--prtemca", "ras", "^slurm"] if environ.get("SLURM_JOB_ID") else []
            command += ["--prtemca", "prte_local_tmpdir_base", folder] if folder is not None else []
        carried = [name for name in sorted(environ) if name.startswith(_SENT_PREFIXES)] if away and not mpich else []
        for number, each in enumerate(ranks):
            command += [":"] if number else []
            command += ["-n", str(each.count)]
            host = each.host or "localhost"
            if away:  # in Open MPI, a host without a number has one slot
                command += ["-host", host] if mpich else ["--host", f"{host}:{each.count}"]
            command += [word for name in carried for word in ("-x", name)]
            command += each.command
        return command


def root_allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Open MPI does not refuse to be run by root."""
    if os.geteuid() != 0:
        return dict(environ)
    return {**environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
