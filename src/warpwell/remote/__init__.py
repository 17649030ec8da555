"""Arrays, stores and schedulers on the devices of a pool: what needs a pool and a room above it.

In the order in which a call meets them:

    stand_in.py          Remote, RemoteResource: stand in the application for objects on an agent; calls by name
    array.py             RemoteArray: an array that a device has opened, ``device.open(path)``
    store.py             RemoteStore: a key-value store that a device has opened, ``device.open_store(path)``
    scheduler.py         PoolScheduler: ``Scheduler(devices=...)``; checks tasks and submits them
    placement.py         PoolHandle; Placements: chooses a device for each batch of tasks; Member: sends batches to one
    scheduler_agent.py   AgentScheduler: the scheduler of one device, in the process of its agent
"""

from typing import TYPE_CHECKING

from .. import registry

if TYPE_CHECKING:
    from .array import RemoteArray
    from .placement import PoolHandle
    from .scheduler import PoolScheduler
    from .store import RemoteStore

__all__ = ["PoolHandle", "PoolScheduler", "RemoteArray", "RemoteStore"]

if not TYPE_CHECKING:  # an agent that opens an array needs neither stores nor schedulers
    __getattr__, __dir__ = registry.on_first_use(
        __name__,
        {
            "PoolHandle": "placement:",
            "PoolScheduler": "scheduler:",
            "RemoteArray": "array:",
            "RemoteStore": "store:",
        },
    )
