"""Key-value stores: durable records on disk that the host reads like a mapping and kernels fetch by key.

>>> import warpwell as ww
>>> with ww.kv.create("digits.kv", schema={"x": ("uint8", (8, 8)), "y": ("int64", ())}) as w:
...     w.put_many(keys, {"x": images, "y": labels})
>>> store = ww.kv.open("digits.kv")
>>> batch, found = store.get_many(keys[:256])
"""

from .device.device_store import DeviceStore
from .loader.dataset import Dataset
from .loader.loader import DataLoader
from .loader.permutation import Permutation
from .opening import create
from .opening import open_store as open  # reads as kv.open, like io.open
from .salvage import SalvageReport, salvage
from .schema import Schema
from .store import Store, StoreStatistics

__all__ = [
    "DataLoader",
    "Dataset",
    "DeviceStore",
    "Permutation",
    "SalvageReport",
    "Schema",
    "Store",
    "StoreStatistics",
    "create",
    "open",
    "salvage",
]
