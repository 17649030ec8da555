"""`communicator`: MPI for applications that use it themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

from .._check import extra


@cache
def communicator() -> Any:
    """Return an mpi4py communicator of the application alone, without the agents.

    Under ``warpwell run`` the application is one process, and so this one has one rank; ``MPI.COMM_WORLD`` includes the
    agents there, who take part in nothing. Elsewhere it is ``MPI.COMM_WORLD``.

    Raises
    ------
    ImportError
        mpi4py is not installed: install the extra ``mpi``.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(f"mpi4py cannot be imported ({error}): install {extra('mpi')}") from None

    from .launch import member

    return MPI.COMM_SELF.Dup() if member.joined else MPI.COMM_WORLD
