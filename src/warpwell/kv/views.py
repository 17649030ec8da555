"""The records and the values of a store, read in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .store import Store

_BATCH = 1024
"""Records that iteration reads at once."""


class Items:
    """The records of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __iter__(self) -> Iterator[tuple[bytes, Any]]:
        store = self._store
        keys, _ = store._parts.entries()
        for first in range(0, keys.size, _BATCH):
            some = keys.take(slice(first, first + _BATCH))
            batch, found = store.get_many(some)
            for k, key in enumerate(some.to_list()):
                if found[k]:  # else it was deleted meanwhile
                    yield key, batch[k] if store.schema is None else {n: a[k] for n, a in batch.items()}


class Values(Items):
    """The values of a store."""

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in super().__iter__())
