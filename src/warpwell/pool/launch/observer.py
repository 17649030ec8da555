"""`Observer`: somebody who asks a launcher what its agents do."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .rendezvous import Connection

_SECONDS = 2.0
"""That agents have to answer; one that computes without the interpreter lock answers at once, others may not."""


class Observer:
    """Asks all agents, and answers when they have.

    Parameters
    ----------
    connection : Connection
        Of whoever asks.
    agents : sequence of Connection
    """

    _last = 0

    def __init__(self, connection: Connection, agents: Sequence[Connection]) -> None:
        Observer._last += 1
        self._number = Observer._last
        self._connection, self._agents = connection, sorted(agents, key=lambda agent: agent.rank)
        self._waiting = {agent.rank for agent in agents if agent.open and agent.ready}
        self._heard: dict[int, object] = {}
        self._until = time.monotonic() + _SECONDS
        for agent in agents:
            agent.tell(ask=self._number)

    def heard(self, agent: Connection, number: int) -> None:
        """Take an answer, if it is one to this question."""
        if number == self._number and agent.rank in self._waiting:
            self._waiting.discard(agent.rank)
            self._heard[agent.rank] = agent.about.get("info")

    def answered(self) -> bool:
        """Answer if it is time; return whether that is done."""
        if self._waiting and time.monotonic() < self._until:
            return False
        found = []
        for agent in self._agents:
            state = "lost" if not agent.open else "starting" if not agent.ready else "silent"
            about = {"rank": agent.rank, "host": agent.host, "pid": agent.pid}
            info = self._heard.get(agent.rank)
            found.append({**about, "state": "running", "info": info} if info else {**about, "state": state})
        self._connection.tell(agents=found)
        self._connection.close()
        return True
