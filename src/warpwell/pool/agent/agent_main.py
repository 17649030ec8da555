"""``python -m warpwell.pool.agent.agent_main``: the process of one agent, started by the launcher."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import traceback

from ... import closing
from ..._os import clock
from ...errors import WarpwellError
from ..cuda.far import FarEnd
from ..devices import runtime_for
from ..launch import cuda_programs
from ..launch.connecting import connect
from ..launch.gpus import list_gpus, visible
from ..launch.lifeline import WAIT, Lifeline
from ..launch.reservation import POLL_SECONDS, Claim, Reservation, users
from .agent import Agent


def main() -> int:
    """Join the job, serve until the application is gone, and end."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides what they mean
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the end leaves no time for more
    gpus = list_gpus()  # before there are threads
    try:
        lifeline = Lifeline("agent", about={"gpus": gpus, "used": list(users(gpus))})
    except WarpwellError as error:
        print(f"warpwell: error: {error}", file=sys.stderr)
        return 1
    reservation: Reservation | None = None  # until this process ends

    def reserve(count: int, wait: float) -> list[str]:
        nonlocal reservation
        reservation = Reservation(gpus, count, wait, lambda text: lifeline.tell(note=text))
        while not (found := reservation.poll()):
            clock.sleep(POLL_SECONDS)
        return found

    chosen = lifeline.wait_for_go(reserve)
    try:
        if chosen.get("target") == "cuda":
            Claim(chosen["uuid"])  # until this process ends
        if "uuid" in chosen:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible(chosen["uuid"], gpus)
        about = cuda_programs.wanted() if "cuda" in chosen else None
        claim = functools.partial(_claim, chosen["uuid"]) if chosen.get("claim") else None
        if about is not None and not chosen["away"]:  # before the application goes on; it ends with this process
            server = cuda_programs.serve(about, chosen["cuda"], claim)
        transport = connect(lifeline)
        agent = Agent(transport, runtime_for(chosen.get("target", "cpu")))
        if about is not None and chosen["away"]:
            ordinal = chosen["cuda"]
            far = FarEnd(transport, ordinal, lambda: cuda_programs.serve_away(about, ordinal, claim))
            agent.cuda, agent.programs = far.heard, far.programs
        elif about is not None:
            agent.programs = server.programs
        # as a deferred call: the lifeline's thread has entered no device
        lifeline.on("ask", lambda said: agent.later(lambda: lifeline.tell(reply=said["ask"], info=agent.info())))
        lifeline.tell(ready=True)
        agent.run()
        closing.finish()  # this process ends without the interpreter's own handlers
        transport.close()
        if chosen.get("stay") or about is not None:
            # mpiexec would end the application, too; or that has executed another program, which says nothing by MPI
            # and uses this device. The lifeline ends this process.
            threading.Event().wait()
    except WarpwellError as error:
        lifeline.tell(failed=str(error))
        return 1
    except BaseException as error:
        lifeline.tell(failed=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def _claim(uuid: str) -> Reservation:
    """Return a reservation of the GPU of this agent for a program that opens its first context."""
    wait = float(os.environ.get(WAIT, 0))
    return Reservation([uuid], 1, wait, lambda text: print(f"warpwell: {text}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # MPI's own end would wait for those who are gone
