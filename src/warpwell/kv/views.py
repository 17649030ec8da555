"""The records and the values of a store, read in batches."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .store import Store

_BATCH = 1024
"""Records that iteration reads at once."""


class Items(ItemsView[Any, Any]):
    """The records of a store."""

    _mapping: Store

    def __iter__(self) -> Iterator[tuple[int | bytes, Any]]:
        return _records(self._mapping)


class Values(ValuesView[Any]):
    """The values of a store."""

    _mapping: Store

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in _records(self._mapping))

    def __contains__(self, value: object) -> bool:
        return any(other is value or other == value for other in self)  # the mixin would get one key after the other


def _records(store: Store) -> Iterator[tuple[int | bytes, Any]]:
    keys, _ = store._parts.entries()
    for first in range(0, keys.size, _BATCH):
        some = keys.take(slice(first, first + _BATCH))
        batch, found = store.get_many(some)
        for k, key in enumerate(some.to_list()):
            if found[k]:  # else it was deleted meanwhile
                yield key, batch[k] if store.schema is None else {n: a[k] for n, a in batch.items()}
