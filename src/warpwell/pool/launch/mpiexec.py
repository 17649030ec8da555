"""`Mpiexec`: the program that starts the processes of a job, and the line for it."""

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
    f"there is no mpiexec next to {{python}} nor on PATH: install {extra('mpi')}, which brings one, or put that of "
    f"your MPI on PATH"
)
_OLD = "OpenRTE"
"""The name of mpiexec in the output of Open MPI before version 5."""
_MARKS = {"openmpi": ("Open MPI", "PRRTE"), "mpich": ("HYDRA", "MPICH", "Intel(R) MPI")}
"""Words in the output of ``mpiexec --version`` that tell its kind."""
_CARRIED = ("WARPWELL_", "NUMBA_", "PYTHON", "OMPI_MCA_", "UCX_")
"""Variables with these beginnings go to every host: Open MPI by itself passes on none."""


@dataclass(frozen=True)
class Ranks:
    """Processes of one kind on one host, with consecutive ranks; `host` None means this host."""

    count: int
    command: Sequence[str]
    host: str | None = None


@dataclass(frozen=True)
class Mpiexec:
    """A launcher of MPI.

    Parameters
    ----------
    path : str
    kind : {"openmpi", "mpich"}
    version : str
        First line of its output for ``--version``.
    """

    path: str
    kind: str
    version: str = ""

    @classmethod
    def find(cls, path: str | None = None, python: str = sys.executable) -> Mpiexec:
        """Return the mpiexec of this Python's environment, or else the one on PATH, and ask it for its kind.

        Raises
        ------
        AgentError
            It does not exist, has another kind, or is too old.
        """
        beside = Path(python).parent / "mpiexec"
        found = path or (str(beside) if os.access(beside, os.X_OK) else None) or shutil.which("mpiexec")
        if found is None:
            raise AgentError(_NO_MPI.format(python=python))
        try:
            done = subprocess.run(
                [found, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_VERSION_SECONDS,
                env=root_allowed(os.environ),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AgentError(f"{found} --version: {error}; check the MPI that it belongs to") from error
        said = (done.stdout + done.stderr).strip()
        first = said.partition("\n")[0].strip()
        for kind, marks in _MARKS.items():
            if any(mark in said for mark in marks):
                return cls(found, kind, first)
        if _OLD in said:
            raise AgentError(
                f"{found} is an Open MPI from before version 5 ({first[:100]}): install {extra('mpi')}, which brings a"
                f" newer one, and put that one first on PATH, or name it with --mpiexec"
            )
        raise AgentError(
            f"{found} is neither Open MPI's nor MPICH's (it says {first[:100] or 'nothing'!r}): put one of those on "
            f"PATH, or install {extra('mpi')}"
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
            Variables; some of them go to other hosts.
        ft : bool
            The other processes continue if one is lost. Open MPI then uses its portable path (no UCX).
        tcp : bool
            No shared memory: all data go through sockets.
        folder : str, optional
            The launcher's folder on this host, for Open MPI's own files.
        """
        mpich, away = self.kind == "mpich", any(each.host is not None for each in ranks)
        words = [self.path]
        if not mpich:
            # the shortest start: Open MPI's other ways ask for seconds whether there is a network that is not there
            words += ["--with-ft", "ulfm"] if ft else []
            words += ["--mca", "pml", "ob1"] if ft or tcp else []
            words += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
            words += ["--mca", "btl", "tcp,self"] if tcp else []
            words += ["--prtemca", "prte_local_tmpdir_base", folder] if folder is not None else []
        carried = [name for name in sorted(environ) if name.startswith(_CARRIED)] if away and not mpich else []
        for number, each in enumerate(ranks):
            words += [":"] if number else []
            words += ["-n", str(each.count)]
            host = each.host or "localhost"
            if away:  # Open MPI takes a host without a number to have one slot
                words += ["-host", host] if mpich else ["--host", f"{host}:{each.count}"]
            words += [word for name in carried for word in ("-x", name)]
            words += each.command
        return words


def root_allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Open MPI does not refuse to be run by root."""
    if os.geteuid() != 0:
        return dict(environ)
    return {**environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
