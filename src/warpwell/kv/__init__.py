"""Key-value stores: durable records on disk that the host reads like a mapping and kernels fetch by key.

>>> import warpwell as ww
>>> with ww.kv.create("digits.kv", schema={"x": ("uint8", (8, 8)), "y": ("int64", ())}) as w:
...     w.put_many(keys, {"x": images, "y": labels})
>>> store = ww.kv.open("digits.kv")
>>> batch, found = store.get_many(keys[:256])

The files, in the order in which a record meets them:

    opening.py        creates and opens stores, and checks the options of both
    store.py          the mapping that the host uses; its views, its statistics, reads that go on in a thread
    keys.py           what may be a key; keys as arrays; the orders of keys
    schema.py         what may be a value: bytes, or a record of named arrays
    shards.py         several folders as one: which shard a key belongs to (rendezvous hash)
    shard.py          the records of one folder: log, index and reader together; commit, refresh, compaction
    log/              the files on disk: segments of values, journal, snapshots, recovery
    index/            where each value lies, in memory; native code that looks keys up and reads values
    native.py         device code as functions that Python calls
    writes.py         changes that kernels ask for, carried out by one thread
    device/           how kernels fetch records: queues, requests, device cache, batches
    loader/           shuffled batches for training
    shard_folders.py  where shards are after a store was moved or copied; whether a store with its shards is sound
    salvage.py        what is sound of a damaged store, put into a new one
    lifetime.py       what becomes of stores that are dropped, forked, or open when the program ends
    convert/          records from and to other formats
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
