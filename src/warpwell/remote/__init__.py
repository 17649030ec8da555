"""Arrays, stores and schedulers on the devices of a pool: what needs a pool and a room above it.

In the order in which a call meets them:

    stand_in.py          Remote, RemoteResource: stand in the application for objects on an agent; calls by name
    array.py             RemoteArray: an array that a device has opened, ``device.open(path)``
    store.py             RemoteStore: a key-value store that a device has opened, ``device.open_store(path)``
    scheduler.py         PoolScheduler: ``Scheduler(devices=...)``; checks tasks and submits them
    scheduler_places.py  Places: chooses a device for each task, and another one when a device is lost
    scheduler_handle.py  PoolHandle: the future of a task
    scheduler_member.py  Member: one device; sends it units of tasks, and brings results back
    scheduler_agent.py   AgentScheduler: the scheduler of one device, in the process of its agent
"""

from typing import TYPE_CHECKING

from .. import registry

if TYPE_CHECKING:
    from .array import RemoteArray
    from .scheduler import PoolScheduler
    from .scheduler_handle import PoolHandle
    from .store import RemoteStore

__all__ = ["PoolHandle", "PoolScheduler", "RemoteArray", "RemoteStore"]

if not TYPE_CHECKING:  # an agent that opens an array needs neither stores nor schedulers
    __getattr__, __dir__ = registry.on_first_use(
        __name__,
        {
            "PoolHandle": "scheduler_handle:",
            "PoolScheduler": "scheduler:",
            "RemoteArray": "array:",
            "RemoteStore": "store:",
        },
    )
