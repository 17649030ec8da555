"""`Mpiexec`: the program that starts the processes of a job, and the line for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import AgentError
from ...errors.general import extra

_VERSION_SECONDS = 20.0

_NO_MPI = (
    f"there is no mpiexec next to {{python}} nor on PATH: install {extra('mpi')}, which brings one, or put that of "
    f"your MPI on PATH"
)
_CARRIED = ("WARPWELL_", "NUMBA_", "PYTHON", "OMPI_MCA_", "UCX_")
"""Variables with these beginnings go to every host: Open MPI hands on none of its own accord."""


@dataclass(frozen=True)
class Part:
    """Processes of one kind on one host; `host` None means here."""

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
        Its first line about itself.
    """

    path: str
    kind: str
    version: str = ""

    @classmethod
    def find(cls, path: str | None = None, python: str = sys.executable) -> Mpiexec:
        """Return the one of this Python's environment, or else the one on PATH, and ask it what it is.

        Raises
        ------
        AgentError
            There is none, or it is of another kind.
        """
        beside = Path(python).parent / "mpiexec"
        found = path or (str(beside) if os.access(beside, os.X_OK) else None) or shutil.which("mpiexec")
        if found is None:
            raise AgentError(_NO_MPI.format(python=python))
        try:
            done = subprocess.run([found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=_VERSION_SECONDS, env=root_allowed(os.environ))  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AgentError(f"{found} --version: {error}; check the MPI that it belongs to") from error
        said = done.stdout + done.stderr
        return cls(found, _kind(said, found), next((line.strip() for line in said.splitlines() if line.strip()), ""))

    @property
    def survives(self) -> bool:
        """Whether a job can go on after a process of it is lost."""
        return self.kind == "openmpi"

    def line(
        self, parts: Sequence[Part], environ: Mapping[str, str], *, ft: bool = True, tcp: bool = False,
        folder: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Return the command.

        Parameters
        ----------
        parts : sequence of Part
            In the order of their ranks.
        environ : mapping
            Variables of which some go to other hosts.
        ft : bool
            The other processes go on when one is lost. Open MPI then takes its portable path (no UCX).
        tcp : bool
            No shared memory: all data go through sockets.
        folder : str, optional
            Where the launcher keeps its files on this host.
        """
        away = sorted({part.host for part in parts if part.host is not None})
        if self.kind == "mpich":
            return [self.path, *_joined([_mpich(part, bool(away)) for part in parts])]
        # the shortest start: the others are asked for seconds whether they know a network that is not there
        options = ["--with-ft", "ulfm", "--mca", "pml", "ob1"] if ft else []
        options += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        if tcp:
            options += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"] if not ft else ["--mca", "btl", "tcp,self"]
        if folder is not None:
            options += ["--prtemca", "prte_local_tmpdir_base", folder]
        carried = [name for name in sorted(environ) if name.startswith(_CARRIED)] if away else []
        exports = [word for name in carried for word in ("-x", name)]
        return [self.path, *options, *_joined([_openmpi(part, bool(away), exports) for part in parts])]


def root_allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Open MPI, when root runs it, does not refuse."""
    if os.geteuid() != 0:
        return dict(environ)
    return {**environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _kind(said: str, path: str) -> str:
    if "Open MPI" in said or "OpenRTE" in said or "PRRTE" in said:
        return "openmpi"
    if "HYDRA" in said or "MPICH" in said or "Intel(R) MPI" in said:
        return "mpich"
    first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
    raise AgentError(
        f"{path} is neither Open MPI's nor MPICH's (it says {first[:100]!r}): put one of those on PATH, or "
        f"install {extra('mpi')}"
    )


def _openmpi(part: Part, hosts: bool, exports: Sequence[str]) -> list[str]:
    # a host without a number would have one slot
    where = ["--host", f"{part.host or 'localhost'}:{part.count}"] if hosts else []
    return ["-n", str(part.count), *where, *exports, *part.command]


def _mpich(part: Part, hosts: bool) -> list[str]:
    where = ["-host", part.host or "localhost"] if hosts else []
    return ["-n", str(part.count), *where, *part.command]


def _joined(parts: Sequence[Sequence[str]]) -> list[str]:
    words: list[str] = []
    for part in parts:
        words += [*([":"] if words else []), *part]
    return words
