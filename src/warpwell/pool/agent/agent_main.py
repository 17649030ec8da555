"""``python -m warpwell.pool.agent.agent_main``: the process of one agent, started by the launcher."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from ... import closing
from ..._os import clock
from ...errors import PoolError
from ..cuda.far import FarEnd
from ..devices import runtime_for
from ..launch import cuda_programs
from ..launch.gpus import list_gpus, visible
from ..launch.member import Member, serve
from ..launch.reservation import POLL_SECONDS, WAIT, Claim, Reservation, users
from .agent import Agent
from .spare import SpareDevice


def main(gpus: Sequence[str], member: Member) -> None:
    """Join the job, and serve until its end."""
    reservation: Reservation | None = None  # until this process ends

    def reserve(count: int, wait: float) -> list[str]:
        nonlocal reservation
        reservation = Reservation(gpus, count, wait, lambda text: member.send(note=text))
        while not (found := reservation.poll()):
            clock.sleep(POLL_SECONDS)
        return found

    chosen = member.wait_for_go(reserve)
    values: list[Any] = [chosen.get(name) for name in ("target", "uuid", "joins", "away", "cuda")]
    target, uuid, joins, away, ordinal = values
    if target == "cuda" and not joins:
        Claim(uuid)  # until this process ends
    if uuid is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible(uuid, gpus)
    settings: Any = None if ordinal is None else cuda_programs.take_settings()
    claim = functools.partial(_claim, uuid) if joins and uuid is not None else None
    make_server = functools.partial(cuda_programs.make_server, settings, ordinal, claim, away=away)
    if settings is not None and not away:  # before the program continues; this process ends the server when it exits
        server, _ = make_server()
    transport = member.connect()
    spare = None
    if joins:
        spare = SpareDevice(target, uuid, lambda: runtime_for(target), lambda text: member.send(note=text))
    agent = Agent(transport, runtime_for("cpu" if spare else target), spare)
    if settings is not None and away:
        far = FarEnd(transport, ordinal, make_server)
        agent.cuda, agent.programs = far.handle, far.programs
    elif settings is not None:
        agent.programs = server.programs
    # as a deferred call, because the thread of the connection has not entered a device
    member.on("ask", lambda _: agent.later(lambda: member.send(reply=agent.info())))
    member.on("lost", lambda message: agent.sharing.ended(message["lost"]))
    member.send(ready=True)
    try:
        agent.run()
    except PoolError as error:
        member.send(fatal=str(error))
        raise
    closing.finish()  # this process exits without the interpreter's own handlers
    transport.close()
    member.wait_for_end()


def _claim(uuid: str) -> Reservation:
    """Return a reservation of the GPU of this agent for a program that opens its first context."""
    wait = float(os.environ.get(WAIT, 0))
    return Reservation([uuid], 1, wait, lambda text: print(f"warpwell: {text}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # at the end, there is no time for more
    host_gpus = list_gpus()  # before threads exist
    serve(functools.partial(main, host_gpus), gpus=host_gpus, used=list(users(host_gpus)))
