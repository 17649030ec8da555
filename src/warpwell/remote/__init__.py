"""Arrays, stores and schedulers on the devices of a pool."""

from .array import RemoteArray
from .scheduler import PoolScheduler
from .scheduler_handle import PoolHandle
from .store import RemoteStore

__all__ = ["PoolHandle", "PoolScheduler", "RemoteArray", "RemoteStore"]
