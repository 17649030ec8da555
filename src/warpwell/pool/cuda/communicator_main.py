"""``python -m warpwell.pool.cuda.communicator_main``: the process that forwards CUDA calls to agents of other hosts.

The launcher starts it on the program's host, as the last rank.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import ClosedError
from ..agent.protocol import Op, unpack
from ..launch import cuda_programs
from ..launch.member import Member, serve
from ..transport.transport import Transport
from .near import NearServer

_POLL_SECONDS = 0.5


def main(member: Member) -> None:
    """Join the job and serve clients until the job ends."""
    decisions = member.wait_for_go()
    options = cuda_programs.take_settings()
    assert options is not None
    devices = {int(ordinal): (int(rank), str(name)) for ordinal, (rank, name) in decisions["devices"].items()}
    parts = cuda_programs.native_parts(options)
    near = NearServer(devices, Path(options["folder"]), parts.relay)  # before the program continues
    transport = member.connect()
    near.begin(transport)
    member.send(ready=True)
    _receive(transport, near)
    member.wait_for_end()


def _receive(transport: Transport, near: NearServer) -> None:
    while True:
        try:
            received = transport.receive(_POLL_SECONDS)
        except ClosedError:
            return
        if received is not None:
            op, *message = unpack(received[1])
            if op == Op.CUDA:
                near.handle(received[0], *message)


if __name__ == "__main__":
    serve(main)
