"""Warpwell, LMDB and RocksDB with one interface (`lab.kv.ycsb_run.System`), each used as its documentation advises.

`row_bytes` is given where `get_array` is called: it returns the values of a batch as one array [N, row_bytes].
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Warpwell:
    """A key-value store of Warpwell without a device."""

    name = "Warpwell"

    def __init__(self, folder: Path, durable: bool, nbytes: int, row_bytes: int = 0) -> None:
        import warpwell as ww

        schema = {"x": ("uint8", (row_bytes,))} if row_bytes else None
        durability = "commit" if durable else "none"
        self.store = ww.kv.create(folder / "warpwell", schema=schema, durability=durability)
        self._rows = row_bytes > 0
        self.get, self.put, self.put_many = self.store.get, self.store.put, self.store.put_many
        self._commit = self.store.commit
        self._writes = False

    def keys_of(self, keys):
        return keys.tolist()

    def batch_of(self, keys):
        return keys

    def values_of(self, values):
        return {"x": values} if self._rows else values

    def begin(self, writes):
        self._writes = writes

    def get_many(self, batch):
        return self.store.get_many(batch)[0]

    def get_array(self, batch):
        return self.store.get_many(batch)[0]["x"]

    def commit(self):
        if self._writes:
            self._commit()

    def settle(self):
        """Bring the store into its best state for reads."""

    def close(self):
        self.store.close()


class Lmdb:
    """LMDB: reads in one transaction until the first write, getmulti, a commit that syncs."""

    name = "LMDB"

    def __init__(self, folder: Path, durable: bool, nbytes: int, row_bytes: int = 0) -> None:
        import lmdb

        self.environment = lmdb.open(
            str(folder / "lmdb"), map_size=4 * nbytes + (1 << 30), sync=durable, metasync=durable, readahead=False
        )
        self._transaction: Any = None
        self._writes = False

    def keys_of(self, keys):
        return [k.tobytes() for k in keys]

    batch_of = keys_of

    def values_of(self, values):
        return [v.tobytes() for v in values]

    def begin(self, writes):
        if self._transaction is not None and (writes or self._writes):
            self._end()
        if self._transaction is None:
            self._transaction = self.environment.begin(write=writes)
            self._cursor = self._transaction.cursor()
            self.get, self.put = self._transaction.get, self._transaction.put
        self._writes = writes

    def get_many(self, batch):
        return _in_order(batch, self._cursor.getmulti(batch))

    def put_many(self, batch, values):
        self._cursor.putmulti(zip(batch, values, strict=True))

    def get_array(self, batch):
        found = self._views.getmulti(batch)  # views into the database: only join() copies the bytes
        return np.frombuffer(b"".join([value for _, value in found]), np.uint8).reshape(len(batch), -1)

    def commit(self):
        if self._writes:
            self._end()

    def _end(self):
        if self._transaction is not None:
            self._cursor.close()
            self._transaction.commit()
            self._transaction = None

    def settle(self):
        self._end()
        self._views = self.environment.begin(buffers=True).cursor()

    def close(self):
        self._end()
        self.environment.close()


class RocksDb:
    """RocksDB (rocksdict): a block cache that holds everything, bloom filters, no compression, synced log."""

    name = "RocksDB"

    def __init__(self, folder: Path, durable: bool, nbytes: int, row_bytes: int = 0) -> None:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())  # the values are random
        table = rocksdict.BlockBasedOptions()
        table.set_block_cache(rocksdict.Cache(nbytes))
        table.set_bloom_filter(10.0, False)
        table.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
        options.set_block_based_table_factory(table)
        self.store = rocksdict.Rdict(str(folder / "rocksdb"), options)
        self._batch = rocksdict.WriteBatch
        self._durable, self._writes = durable, False
        self.get, self.put = self.store.get, self.store.put

    def keys_of(self, keys):
        return [k.tobytes() for k in keys]

    batch_of = keys_of

    def values_of(self, values):
        return [v.tobytes() for v in values]

    def begin(self, writes):
        self._writes = writes

    def get_many(self, batch):
        return self.store.get(batch)

    def put_many(self, batch, values):
        writes = self._batch(raw_mode=True)
        for key, value in zip(batch, values, strict=True):
            writes.put(key, value)
        self.store.write(writes)

    def get_array(self, batch):
        return np.frombuffer(b"".join(self.store.get(batch)), np.uint8).reshape(len(batch), -1)

    def commit(self):
        if self._writes and self._durable:
            self.store.flush_wal(True)

    def settle(self):
        self.store.flush()
        self.store.compact_range(None, None)

    def close(self):
        self.store.close()


SYSTEMS = (Warpwell, Lmdb, RocksDb)


def _in_order(batch: Sequence[bytes], found: list[tuple[bytes, bytes]]) -> list[bytes | None]:
    """Return the values of a batch; LMDB omits absent keys."""
    if len(found) == len(batch):
        return [value for _, value in found]
    values_by_key = dict(found)
    return [values_by_key.get(key) for key in batch]
