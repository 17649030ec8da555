"""``python -m warpwell.pool.cuda.communicator_main``: the process that brings CUDA calls to agents of other hosts.

The launcher starts it beside the application, as the last rank.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import ClosedError
from ..agent.protocol import Op, unpack
from ..launch import cuda_programs
from ..launch.member import Member, serve
from ..transport.transport import Transport
from .near import NearServer

_LOOK = 0.5


def main(member: Member) -> None:
    """Join the job, and serve clients until its end."""
    decisions = member.wait_for_go()
    about = cuda_programs.wanted()
    assert about is not None
    devices = {int(ordinal): (int(rank), str(name)) for ordinal, (rank, name) in decisions["devices"].items()}
    near = NearServer(devices, Path(about["folder"]), Path(about["relay"]))  # before the application goes on
    transport = member.connect()
    near.begin(transport)
    member.send(ready=True)
    _receive(transport, near)
    member.wait_for_end()


def _receive(transport: Transport, near: NearServer) -> None:
    while True:
        try:
            got = transport.receive(_LOOK)
        except ClosedError:
            return
        if got is not None:
            op, *message = unpack(got[1])
            if op == Op.CUDA:
                near.heard(got[0], *message)


if __name__ == "__main__":
    serve(main)
