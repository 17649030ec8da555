"""``python -m warpwell.pool.cuda.communicator_main``: the process that brings CUDA calls to agents of other hosts.

The launcher starts it beside the application, as the last rank.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from ...errors import ClosedError, WarpwellError
from ..agent.protocol import Op, unpack
from ..launch import cuda_programs
from ..launch.connecting import connect
from ..launch.lifeline import Lifeline
from ..transport.transport import Transport
from .near import NearServer

_LOOK = 0.5


def main() -> int:
    """Join the job, and serve clients until the launcher ends this process."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides what they mean
    try:
        lifeline = Lifeline("communicator")
    except WarpwellError as error:
        print(f"warpwell: error: {error}", file=sys.stderr)
        return 1
    chosen = lifeline.wait_for_go()
    try:
        about = cuda_programs.wanted()
        assert about is not None
        devices = {int(ordinal): (int(rank), str(name)) for ordinal, (rank, name) in chosen["devices"].items()}
        near = NearServer(devices, Path(about["folder"]), Path(about["relay"]))  # before the application goes on
        transport = connect(lifeline)
        near.begin(transport)
        lifeline.tell(ready=True)
        _receive(transport, near)
        threading.Event().wait()  # mpiexec would end the others, too; the lifeline ends this process
    except WarpwellError as error:
        lifeline.tell(failed=str(error))
        return 1
    except BaseException as error:
        lifeline.tell(failed=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


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
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # MPI's own end would wait for those who are gone
