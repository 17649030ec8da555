"""`Hello`: the first message between two processes, with their versions; `exchange_hellos`."""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import AgentError, PoolVersionError

PROTOCOL = 4
"""Version of the protocol; incremented with every change of a message."""

NBYTES = 1024
"""Size in bytes of a hello in every version, so that any two versions can report each other's."""

_MAGIC = b"WARPWELL"
_HELLO_TAG = 2


@dataclass(frozen=True)
class Hello:
    """Versions, host name and process ID of a process."""

    protocol: int
    package: str
    python: str
    host: str
    process: int

    @classmethod
    def of_this_process(cls) -> Hello:
        """Return the hello of this process."""
        package = str(sys.modules["warpwell"].__version__)
        return cls(PROTOCOL, package, platform.python_version(), socket.gethostname()[:200], os.getpid())

    def encode(self) -> bytes:
        """Return the hello as `NBYTES` bytes."""
        text = json.dumps(asdict(self)).encode()
        return (_MAGIC + struct.pack("<q", len(text)) + text).ljust(NBYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Return the hello that `encode` wrote.

        Raises
        ------
        PoolVersionError
            `data` is not a hello.
        """
        try:
            if data[:8] != _MAGIC:
                raise ValueError("no hello")
            fields = json.loads(data[16 : 16 + struct.unpack("<q", data[8:16])[0]])
            return cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise PoolVersionError("the other process does not use Warpwell's protocol") from error

    def check(self, peer: Hello, rank: int) -> None:
        """Check that the versions of `peer`, of rank `rank`, fit. Code is sent as bytecode of one Python version.

        Raises
        ------
        PoolVersionError
            Versions differ; the message lists all of them.
        """
        differences = []
        if self.protocol != peer.protocol:
            differences.append(f"protocol {self.protocol} here and {peer.protocol} there")
        if self.package != peer.package:
            differences.append(f"Warpwell {self.package} here and {peer.package} there")
        if self.python.split(".")[:2] != peer.python.split(".")[:2]:
            differences.append(f"Python {self.python} here and {peer.python} there")
        if differences:
            raise PoolVersionError(
                f"rank {rank} on host {peer.host} cannot work with this process on {self.host}: "
                f"{', '.join(differences)}; install the same versions on every host"
            )


def several(texts: Sequence[str], separator: str = ", ") -> str:
    """Join texts for a message; of more than five, the first four and the number of the remaining ones."""
    if len(texts) <= 5:
        return separator.join(texts)
    return f"{separator.join(texts[:4])}{separator}and {len(texts) - 4} more"


def exchange_hellos(comm: Any, rank: int, peers: Sequence[int], timeout: float) -> dict[int, Hello]:
    """Send this process's hello to all peers and return theirs.

    Parameters
    ----------
    comm : mpi4py communicator
    rank : int
        This process.
    peers : sequence of int
    timeout : float
        Seconds to wait for the peers.

    Raises
    ------
    PoolVersionError
        The versions of a peer do not fit.
    AgentError
        A peer sent nothing in time.
    """
    from mpi4py import MPI

    own = Hello.of_this_process()
    message = own.encode()
    received = {peer: bytearray(NBYTES) for peer in peers}
    pending = {("from", peer): comm.Irecv([received[peer], MPI.BYTE], peer, _HELLO_TAG) for peer in peers}
    pending |= {("to", peer): comm.Isend([message, MPI.BYTE], peer, _HELLO_TAG) for peer in peers}
    end = time.monotonic() + timeout
    reasons: dict[int, str] = {}
    while pending and not reasons and time.monotonic() < end:
        for (direction, peer), request in list(pending.items()):
            try:
                if request.Test():
                    del pending[direction, peer]
            except MPI.Exception as error:
                reasons[peer] = error.Get_error_string()
                del pending[direction, peer]
        time.sleep(1e-3)
    hellos, refusals = {}, []
    for peer in peers:
        if peer in reasons or ("from", peer) in pending:
            continue
        try:
            hellos[peer] = Hello.decode(bytes(received[peer]))
            own.check(hellos[peer], peer)
        except PoolVersionError as error:
            refusals.append(str(error))
    if refusals:
        raise PoolVersionError(several(refusals, "; "))
    missing = sorted({peer for _, peer in pending} | set(reasons))
    if missing:
        raise AgentError(
            f"rank {rank}: no hello from rank {several([str(peer) for peer in missing])} within {timeout:g} s"
            + several([f"; rank {peer}: {reason}" for peer, reason in reasons.items()], ""),
            agent=f"rank {missing[0]}",
        )
    return hellos
