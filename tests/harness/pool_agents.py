"""`pool_of`: a pool whose agents are threads of this process, on devices of any kind; `spare_pool`: of spare ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.harness.until import HANG_SECONDS

from warpwell.pool.agent.agent import Agent, start
from warpwell.pool.agent.runtime import Runtime
from warpwell.pool.agent.spare import SpareDevice
from warpwell.pool.devices import Devices
from warpwell.pool.transport.local_transport import local_transports

Pool = tuple[Devices, list[Agent]]


@contextlib.contextmanager
def pool_of(
    runtimes: Iterable[Any], wrap: Callable[[Any, int], Any] = lambda transport, _: transport
) -> Iterator[Pool]:
    """Yield devices, one for each runtime, and their agents; see that these end.

    Parameters
    ----------
    runtimes : iterable of Runtime
    wrap : callable
        Returns what the k-th agent takes for its transport.
    """
    with _pool([(runtime, None) for runtime in runtimes], wrap) as made:
        yield made


@contextlib.contextmanager
def spare_pool(spares: Iterable[SpareDevice], **options: Any) -> Iterator[Pool]:
    """Yield devices that join and leave, as under ``warpwell run --allocate use``, and their agents.

    Parameters
    ----------
    spares : iterable of SpareDevice
    **options
        Of `Devices`.
    """
    with _pool([(Runtime(), spare) for spare in spares], lambda transport, _: transport, **options) as made:
        yield made


@contextlib.contextmanager
def _pool(
    kinds: list[tuple[Any, SpareDevice | None]], wrap: Callable[[Any, int], Any], **options: Any
) -> Iterator[Pool]:
    own, *ends = local_transports(len(kinds) + 1)
    agents = [Agent(wrap(transport, k), *kind) for k, (transport, kind) in enumerate(zip(ends, kinds, strict=True))]
    threads = [start(agent, "agent") for agent in agents]
    with Devices(own, **options) as made:
        yield made, agents
    for thread, transport in zip(threads, ends, strict=True):
        thread.join(HANG_SECONDS)
        transport.close()
        if thread.is_alive():
            raise TimeoutError("an agent does not end")
