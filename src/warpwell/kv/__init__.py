"""Key-value stores: durable records on disk that the host reads like a mapping and kernels fetch by key.

>>> import warpwell as ww
>>> with ww.kv.create("digits.kv", schema={"x": ("uint8", (8, 8)), "y": ("int64", ())}) as w:
...     w.put_many(keys, {"x": images, "y": labels})
>>> store = ww.kv.open("digits.kv")
>>> batch, found = store.get_many(keys[:256])

The files, in the order in which a record meets them:

    opening.py        create and open stores; check their options
    store.py          `Store`, the mapping that the host uses; views, statistics, reads in the background
    keys.py           types of keys; keys as arrays; the order of keys
    schema.py         types of values: bytes, or a record of named fields
    ragged.py         items of different lengths in one buffer: a ragged field of a batch
    records.py        log, index and reader of one store together; commit, refresh
    compaction.py     move live records out of mostly dead segments
    log/              the files on disk: segments of values, folders of shards, journal, snapshots, recovery
    index/            where each value lies, in memory; native code that looks keys up and reads values
    native.py         compile device code into functions that Python calls
    device/           how kernels fetch records: queues, requests, device cache, batches
    permutation.py    a shuffled order, for training: computed position by position, also in kernels
    salvage.py        copy the undamaged records of a damaged store into a new one
    lifetime.py       stores that are dropped, forked, or open when the program ends: commit and close
    convert/          import records from other formats, and export them
"""

from ..nvme import key_words
from .device.device_store import DeviceStore
from .keys import Keys, as_key, as_keys
from .log.checksum import crc32c
from .log.recovery import Problem
from .opening import create, seal
from .opening import open_store as open  # reads as kv.open, like io.open
from .permutation import Permutation, permuted
from .ragged import Ragged
from .salvage import SalvageReport, salvage
from .schema import Schema
from .store import HostFuture, Store, StoreStatistics

__all__ = [
    "DeviceStore",
    "Permutation",
    "Ragged",
    "SalvageReport",
    "Schema",
    "Store",
    "StoreStatistics",
    "create",
    "key_words",
    "open",
    "permuted",
    "salvage",
    "seal",
]
