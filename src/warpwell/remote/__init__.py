"""Arrays, stores and schedulers on the devices of a pool.

In the order in which a call passes them:

    stand_in.py          RemoteResource: a proxy for an object on an agent that must be closed
    array.py             RemoteArray: an array that a device has opened, ``device.open(path)``
    store.py             RemoteStore: a key-value store that a device has opened, ``device.open_store(path)``
    scheduler.py         PoolScheduler: ``Scheduler(devices=...)``; checks tasks and submits them
    placement.py         PoolHandle; Placements: chooses a device for the tasks of a Chain; Member: sends them to one
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

if not TYPE_CHECKING:  # an agent that opens an array does not need stores or schedulers
    _MODULES = {"PoolHandle": "placement", "PoolScheduler": "scheduler", "RemoteArray": "array", "RemoteStore": "store"}
    __getattr__, __dir__ = registry.on_first_use(__name__, {name: f"{home}:" for name, home in _MODULES.items()})
