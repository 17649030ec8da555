"""`pool_of`: a pool whose agents are threads of this process, on devices of any kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from warpwell.pool.agent.agent import Agent, start
from warpwell.pool.devices import Devices
from warpwell.pool.transport.local_transport import local_transports

Pool = tuple[Devices, list[Agent]]


@contextlib.contextmanager
def pool_of(runtimes: Iterable[Any], wrap: Callable[[Any, int], Any] = lambda given, _: given) -> Iterator[Pool]:
    """Yield devices, one for each runtime, and their agents; see that these end.

    Parameters
    ----------
    runtimes : iterable of Runtime
    wrap : callable
        Returns what the k-th agent takes for its transport.
    """
    kinds = list(runtimes)
    own, *others = local_transports(len(kinds) + 1)
    agents = [Agent(wrap(transport, k), kind) for k, (transport, kind) in enumerate(zip(others, kinds, strict=True))]
    threads = [start(agent, "agent") for agent in agents]
    with Devices(own) as made:
        yield made, agents
    for thread, transport in zip(threads, others, strict=True):
        thread.join(10)
        transport.close()
        if thread.is_alive():
            raise TimeoutError("an agent does not end")
