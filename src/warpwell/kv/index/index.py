"""The index of a store: a hash table from keys to locations, for one writer and any number of native readers.

A store has one state block. Its pointers are replaced, never changed in place: a native reader enters an epoch, loads a
pointer, follows it, and leaves. Replaced memory is freed once every reader that may have seen it has left.

The table uses open addressing over 32-byte slots. The key of a used slot never changes, and a deleted key keeps its
slot (a tombstone) until the table is replaced. Locations are never reused, so a reader that reads the same loc0 before
and after loc1 has a consistent pair.

The records of a snapshot are in its file (`sealed`), and the table has the later records. A slot hides the record of
the same key in the file. The table holds the file's address, so one pointer replaces both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._os import clock
from ...targets import device, private_block
from ...targets.primitives import (
    SYSTEM,
    backoff,
    fetch_add,
    load_acquire,
    load_relaxed,
    load_weak_as,
    prefetch,
    store_relaxed,
    store_release,
    store_weak_as,
)
from ..keys import Keys, keys_in
from ..log.format import DAMAGED, KEY_LEN_SHIFT, TOMBSTONE, size_of
from ..native import INT64, UINT8, address_of, compiled, huge_words
from .sealed import (
    DESCRIPTOR_WORDS,
    SLOT,
    SLOT_KEY0,
    SLOT_KEY1,
    SLOT_LOC0,
    SLOT_LOC1,
    SealedIndex,
    has_key,
    hash_of,
    look_up_sealed,
    prefetch_sealed,
)

# -- state block, in 64-bit words ------------------------------------------------------------------------------
S_TABLE = 0
"""Address of the index's table."""
S_SEGMENTS = 1
"""Address of the segment table."""
S_READS = 3
"""Number of single values that system calls have read because their file is not mapped."""
S_EPOCH = 8
S_STRIPES = 16
"""First of `STRIPES` stripes, each a cache line, so that threads rarely count in the same cache line."""
STRIPES = 16

# -- stripe ----------------------------------------------------------------------------------------------------
C_READERS = 0
"""Two words: readers in even and in odd epochs."""
C_GETS = 2
C_HITS = 3
C_BYTES = 4
C_ERRORS = 5
STRIPE_WORDS = 8

STATE_WORDS = S_STRIPES + STRIPES * STRIPE_WORDS

# -- table of the index: header of 8 words, then slots of 4 -----------------------------------------------------
T_MASK = 0
T_USED = 1
"""Number of used slots, including tombstones."""
T_LIVE = 2
"""Number of records, including the records of the index file; valid if `T_EXACT` is 1."""
T_BYTES = 3
"""Bytes of their values."""
T_EXACT = 4
T_SEALED = 5
"""Address of the descriptor of the snapshot's file, or 0."""
TABLE_HEADER = 64

SLOTS_AHEAD = 8
"""Distance in a batch between a key that is looked up and the next prefetched slot."""
MIN_SLOTS = 1024
MAX_LOAD = 0.7
"""Share of used slots above which the table is replaced."""
_NO_SLOTS = np.empty((0, 4), np.int64)
_CLOSED = np.zeros(DESCRIPTOR_WORDS, np.int64)
"""Descriptor of a closed file: each look-up returns `DAMAGED`."""


# -- epochs ----------------------------------------------------------------------------------------------------


@device
def stripe_of(state: int, stripe: int) -> int:
    """Return the address of a stripe; `stripe` is any integer."""
    return state + 8 * S_STRIPES + 8 * STRIPE_WORDS * (stripe & (STRIPES - 1))


@device
def enter(state: int, stripe: int) -> int:
    """Enter the current epoch and return it: memory reachable from the state block is not freed until `leave`."""
    readers = stripe_of(state, stripe)
    while True:
        epoch = load_acquire(state + 8 * S_EPOCH, SYSTEM)
        fetch_add(readers + 8 * (epoch & 1), 1, SYSTEM)
        # `readers_in` also uses a read-modify-write. Either it counts this reader, or this reader sees that the epoch
        # has ended.
        if load_acquire(state + 8 * S_EPOCH, SYSTEM) == epoch:
            return epoch
        fetch_add(readers + 8 * (epoch & 1), -1, SYSTEM)


@device
def leave(state: int, stripe: int, epoch: int) -> None:
    """Leave an epoch."""
    fetch_add(stripe_of(state, stripe) + 8 * (epoch & 1), -1, SYSTEM)


@device
def next_epoch(state: int) -> int:
    """Start the next epoch; return the current one. No reader may be left in the previous epoch (host, one thread)."""
    return fetch_add(state + 8 * S_EPOCH, 1, SYSTEM)


@device
def readers_in(state: int, epoch: int) -> int:
    """Return the number of readers that have not left an epoch."""
    total = 0
    for stripe in range(STRIPES):
        total += fetch_add(stripe_of(state, stripe) + 8 * (epoch & 1), 0, SYSTEM)
    return total


@device
def publish(state: int, index: int, address: int) -> None:
    """Replace a pointer of the state block."""
    store_release(state + 8 * index, address, SYSTEM)


# -- the table -------------------------------------------------------------------------------------------------


@device
def lookup(table: int, key0: int, key1: int, length: int) -> tuple[int, int]:
    """Return the location of a key, as two words; (0, 0) if it is absent, (`DAMAGED`, 0) if its block is damaged."""
    hashed = hash_of(key0, key1, length)
    if load_relaxed(table + 8 * T_USED, SYSTEM) != 0:
        mask = load_relaxed(table + 8 * T_MASK, SYSTEM)
        position = hashed & mask
        for _ in range(mask + 1):
            slot = table + TABLE_HEADER + SLOT * position
            loc0 = load_acquire(slot + SLOT_LOC0, SYSTEM)
            loc1 = load_acquire(slot + SLOT_LOC1, SYSTEM)
            if loc1 == 0:
                break
            if has_key(slot, loc1, key0, key1, length):
                attempt = 0
                while loc0 == 0 or load_relaxed(slot + SLOT_LOC0, SYSTEM) != loc0:
                    backoff(attempt)
                    attempt += 1
                    loc0 = load_acquire(slot + SLOT_LOC0, SYSTEM)
                    loc1 = load_acquire(slot + SLOT_LOC1, SYSTEM)
                if loc0 == TOMBSTONE:
                    return 0, 0
                return loc0, loc1
            position = (position + 1) & mask
    sealed = load_relaxed(table + 8 * T_SEALED, SYSTEM)
    if sealed == 0:
        return 0, 0
    return look_up_sealed(sealed, key0, key1, length, hashed)


@device
def slot_of(table: int, key0: int, key1: int, length: int) -> int:
    """Return the slot of a key, or the free slot for it (the writer; the table is never full)."""
    mask = load_relaxed(table + 8 * T_MASK, SYSTEM)
    position = hash_of(key0, key1, length) & mask
    while True:
        slot = table + TABLE_HEADER + SLOT * position
        loc1 = load_relaxed(slot + SLOT_LOC1, SYSTEM)
        if loc1 == 0 or has_key(slot, loc1, key0, key1, length):
            return slot
        position = (position + 1) & mask


@device
def put(table: int, key0: int, key1: int, length: int, loc0: int, loc1: int) -> int:
    """Store the location of a key, or `TOMBSTONE` to delete it; return 0 if the key was known to be absent, else 1."""
    slot = slot_of(table, key0, key1, length)
    sealed = load_relaxed(table + 8 * T_SEALED, SYSTEM)
    before0 = load_relaxed(slot + SLOT_LOC0, SYSTEM)
    before1 = load_relaxed(slot + SLOT_LOC1, SYSTEM)
    is_new_slot = before1 == 0
    if is_new_slot:
        if loc0 == TOMBSTONE:
            if sealed == 0:
                return 0
            loc1 = length << KEY_LEN_SHIFT
        store_relaxed(slot + SLOT_KEY0, key0, SYSTEM)
        store_relaxed(slot + SLOT_KEY1, key1, SYSTEM)
        store_relaxed(table + 8 * T_USED, load_relaxed(table + 8 * T_USED, SYSTEM) + 1, SYSTEM)
        if sealed != 0 and load_relaxed(table + 8 * T_EXACT, SYSTEM) != 0:
            before0, before1 = look_up_sealed(sealed, key0, key1, length, hash_of(key0, key1, length))
            if before0 == DAMAGED:
                store_relaxed(table + 8 * T_EXACT, 0, SYSTEM)
    live = load_relaxed(table + 8 * T_LIVE, SYSTEM)
    nbytes = load_relaxed(table + 8 * T_BYTES, SYSTEM)
    if before0 > 0:
        live -= 1
        nbytes -= size_of(before0, before1)
    if loc0 > 0:
        live += 1
        nbytes += size_of(loc0, loc1)
    store_relaxed(table + 8 * T_LIVE, live, SYSTEM)
    store_relaxed(table + 8 * T_BYTES, nbytes, SYSTEM)
    if is_new_slot or loc0 != TOMBSTONE:
        if not is_new_slot:
            store_relaxed(slot + SLOT_LOC0, 0, SYSTEM)
        store_release(slot + SLOT_LOC1, loc1, SYSTEM)
    store_release(slot + SLOT_LOC0, loc0, SYSTEM)
    return 0 if loc0 == TOMBSTONE and before0 == TOMBSTONE else 1


@device
def key_at(keys: int, lengths: int, k: int) -> tuple[int, int, int]:
    """Return key0, key1 and length of one key of a batch; `lengths` is 0 for flat 8-byte keys."""
    if lengths == 0:
        return load_weak_as(keys + 8 * k, INT64), 0, 8
    return (
        load_weak_as(keys + 16 * k, INT64),
        load_weak_as(keys + 16 * k + 8, INT64),
        int(load_weak_as(lengths + k, UINT8)),
    )


@device
def look_up_all(table: int, keys: int, lengths: int, count: int, locations: int) -> None:
    """Write the locations of keys, two words each; see `lookup`."""
    mask = load_relaxed(table + 8 * T_MASK, SYSTEM)
    sealed = load_relaxed(table + 8 * T_SEALED, SYSTEM)
    is_used = load_relaxed(table + 8 * T_USED, SYSTEM) != 0
    for k in range(count):
        if k + SLOTS_AHEAD < count:
            key0, key1, length = key_at(keys, lengths, k + SLOTS_AHEAD)
            hashed = hash_of(key0, key1, length)
            if is_used:
                prefetch(table + TABLE_HEADER + SLOT * (hashed & mask))
            if sealed != 0:
                prefetch_sealed(sealed, key0, hashed)
        key0, key1, length = key_at(keys, lengths, k)
        loc0, loc1 = lookup(table, key0, key1, length)
        store_weak_as(locations + 16 * k, loc0, INT64)
        store_weak_as(locations + 16 * k + 8, loc1, INT64)


@device
def find_many(state: int, stripe: int, keys: int, lengths: int, count: int, locations: int) -> None:
    """Write the locations of keys, two words each (see `lookup`), without counting gets."""
    epoch = enter(state, stripe)
    look_up_all(load_acquire(state + 8 * S_TABLE, SYSTEM), keys, lengths, count, locations)
    leave(state, stripe, epoch)


def lookup_many(state: int, stripe: int, keys: int, lengths: int, count: int, locations: int) -> int:
    """Write the locations of keys, two words each (see `lookup`), and count the gets."""
    find_many(state, stripe, keys, lengths, count, locations)
    fetch_add(stripe_of(state, stripe) + 8 * C_GETS, count, SYSTEM)
    return 0


def put_slots(table: int, slots: int, stride: int, count: int) -> int:
    """Put slots that are `stride` bytes apart, in order; return how many of them changed a key (the writer)."""
    mask = load_relaxed(table + 8 * T_MASK, SYSTEM)
    changed = 0
    for k in range(count):
        if k + SLOTS_AHEAD < count:
            key0, key1, length, _, _ = slot_at(slots + stride * (k + SLOTS_AHEAD))
            prefetch(table + TABLE_HEADER + SLOT * (hash_of(key0, key1, length) & mask))
        key0, key1, length, loc0, loc1 = slot_at(slots + stride * k)
        changed += put(table, key0, key1, length, loc0, loc1)
    return changed


@device
def slot_at(slot: int) -> tuple[int, int, int, int, int]:
    """Return key0, key1, the length of the key, loc0 and loc1 of a slot outside of tables."""
    loc1 = load_weak_as(slot + SLOT_LOC1, INT64)
    key0, key1 = load_weak_as(slot + SLOT_KEY0, INT64), load_weak_as(slot + SLOT_KEY1, INT64)
    return key0, key1, (loc1 >> KEY_LEN_SHIFT) & 31, load_weak_as(slot + SLOT_LOC0, INT64), loc1


def count_records(table: int, count: int, nbytes: int) -> int:
    """Store the exact counts of records and value bytes; return 0 if a block is damaged.

    `count` and `nbytes` are the counts of the index file; the table's slots add to them or hide records of the file.
    """
    sealed = load_relaxed(table + 8 * T_SEALED, SYSTEM)
    for position in range(load_relaxed(table + 8 * T_MASK, SYSTEM) + 1):
        slot = table + TABLE_HEADER + SLOT * position
        loc0 = load_relaxed(slot + SLOT_LOC0, SYSTEM)
        loc1 = load_relaxed(slot + SLOT_LOC1, SYSTEM)
        if loc1 != 0:
            key0 = load_relaxed(slot + SLOT_KEY0, SYSTEM)
            key1 = load_relaxed(slot + SLOT_KEY1, SYSTEM)
            length = (loc1 >> KEY_LEN_SHIFT) & 31
            hidden0, hidden1 = look_up_sealed(sealed, key0, key1, length, hash_of(key0, key1, length))
            if hidden0 == DAMAGED:
                return 0
            if hidden0 > 0:
                count -= 1
                nbytes -= size_of(hidden0, hidden1)
            if loc0 > 0:
                count += 1
                nbytes += size_of(loc0, loc1)
    store_relaxed(table + 8 * T_LIVE, count, SYSTEM)
    store_relaxed(table + 8 * T_BYTES, nbytes, SYSTEM)
    store_relaxed(table + 8 * T_EXACT, 1, SYSTEM)
    return 1


def mark_hidden(table: int, slots: int, count: int, hidden: int) -> int:
    """Store a byte for each slot of a file, 1 if the table has its key (the writer)."""
    for k in range(count):
        key0, key1, length, _, _ = slot_at(slots + SLOT * k)
        own = slot_of(table, key0, key1, length)
        store_weak_as(hidden + k, 1 if load_relaxed(own + SLOT_LOC1, SYSTEM) != 0 else 0, UINT8)
    return 0


# -- the host's side -------------------------------------------------------------------------------------------


class StoreState:
    """The state block of one store, and the memory to free once readers have left.

    Attributes
    ----------
    address : int
        Of the state block.
    """

    def __init__(self) -> None:
        self._block = private_block(8 * STATE_WORDS)
        self.address = self._block.address
        self.words = self._block.words
        # Never blocking: a signal handler or a finalizer may run while its own thread holds the lock.
        self._collecting = threading.Lock()
        self._next: deque[Callable[[], None]] = deque()
        self._waiting: list[Callable[[], None]] = []
        self._epoch = 0

    def retire(self, free: Callable[[], None]) -> None:
        """Call `free` after all present readers have left. New readers cannot reach the memory."""
        self._next.append(free)
        self.collect()

    def collect(self) -> bool:
        """Free the retired memory without readers; return True if all retired memory is freed. Never blocks.

        Does nothing and returns False if another thread, or an interrupted call of this thread, is in this method.
        """
        start_epoch, count = compiled(next_epoch), compiled(readers_in)
        if not self._collecting.acquire(blocking=False):
            return False
        try:
            for _ in range(2):
                if self._waiting and count(self.address, self._epoch) == 0:
                    done, self._waiting = self._waiting, []
                    for free in done:
                        free()
                if not self._waiting and self._next:
                    number = len(self._next)  # memory that is retired after this line waits for the next epoch
                    self._epoch = int(start_epoch(self.address))
                    self._waiting = [self._next.popleft() for _ in range(number)]
            return not self._waiting and not self._next
        finally:
            self._collecting.release()

    def drain(self, seconds: float = 5.0) -> bool:
        """Wait until all retired memory is freed; return False if readers have not left after `seconds`."""
        end = clock.monotonic() + seconds
        pause = 1e-5
        while not self.collect():
            if clock.monotonic() > end:
                return False
            clock.sleep(pause)
            pause = min(2 * pause, 0.01)
        return True

    def forked(self) -> None:
        """Reset the counts of readers in a forked child: the threads of these readers exist only in the parent."""
        self._collecting = threading.Lock()
        self.words[S_STRIPES:].reshape(STRIPES, STRIPE_WORDS)[:, C_READERS : C_READERS + 2] = 0

    def counters(self) -> dict[str, int]:
        """Return the sums of the stripes: gets, hits, bytes, errors."""
        sums = self.words[S_STRIPES:].reshape(STRIPES, STRIPE_WORDS).sum(axis=0)
        positions = {"gets": C_GETS, "hits": C_HITS, "bytes": C_BYTES, "errors": C_ERRORS}
        return {name: int(sums[position]) for name, position in positions.items()}


class Index:
    """Hash table from keys to locations, on top of a snapshot's index file.

    One thread at a time may change it; native readers need no lock and see each key's old or new location.

    Parameters
    ----------
    state : StoreState
        The state block through which readers find the table.
    sealed : SealedIndex, optional
        The file; owned by the index from now on.
    slots : int64 [N, 4], optional
        Later records in order; the first location word is `TOMBSTONE` for a delete.
    """

    def __init__(
        self, state: StoreState, sealed: SealedIndex | None = None, slots: NDArray[np.int64] = _NO_SLOTS
    ) -> None:
        self._state = state
        self._sealed, self._table = sealed, _Table(len(slots), sealed)
        self._table.fill(slots)
        self._publish()

    def __len__(self) -> int:
        return self._counted(T_LIVE)

    @property
    def value_bytes(self) -> int:
        """Bytes of all values."""
        return self._counted(T_BYTES)

    def _counted(self, word: int) -> int:
        header, sealed = self._table.header, self._sealed
        if not header[T_EXACT] and sealed is not None:
            if not compiled(count_records)(self._table.address, sealed.count, sealed.value_bytes):
                raise sealed.damage()
        return int(header[word])

    @property
    def is_counted(self) -> bool:
        """Whether `len` and `value_bytes` are known; otherwise reading them counts records and changes the table."""
        return bool(self._table.header[T_EXACT])

    @property
    def nbytes(self) -> int:
        """Size of the table and of the file in bytes."""
        return self._table.nbytes + (0 if self._sealed is None else self._sealed.nbytes)

    def lookup(self, keys: Keys) -> NDArray[np.int64]:
        """Return locations, int64 [N, 2], zeros for absent keys (any thread).

        Raises
        ------
        CorruptionError
        """
        locations = np.empty((keys.size, 2), np.int64)
        at = address_of(locations)
        compiled(lookup_many)(self._state.address, at >> 12, *addresses(keys), keys.size, at)
        sealed = self._sealed
        if (locations[:, 0] < 0).any():
            raise errors.ClosedError("the store is closed: open it again") if sealed is None else sealed.damage()
        return locations

    def put(self, slots: NDArray[np.int64]) -> int:
        """Put slots, int64 [N, 4], in order (see `format.slots_of`); return how many of them changed a key.

        A location `TOMBSTONE` deletes a key.
        """
        self._reserve(len(slots))
        return self._table.put(slots)

    def slots(self) -> NDArray[np.int64]:
        """Return all records, int64 [N, 4]: key0, key1, loc0, loc1; in arbitrary order.

        Raises
        ------
        CorruptionError
        """
        slots = self._table.slots
        live = slots[slots[:, 2] > 0]
        if self._sealed is None:
            return live
        found = self._sealed.slots()
        if not self._table.header[T_USED]:
            return found
        hidden = np.empty(len(found), np.bool_)
        compiled(mark_hidden)(self._table.address, address_of(found), len(found), address_of(hidden))
        return np.concatenate([found[~hidden], live])

    def entries(self) -> tuple[Keys, NDArray[np.int64]]:
        """Return all keys and their locations; see `slots`."""
        slots = self.slots()
        return keys_in(slots), np.ascontiguousarray(slots[:, 2:])

    def replace(self, sealed: SealedIndex | None, slots: NDArray[np.int64] = _NO_SLOTS) -> None:
        """Replace all contents; a reader sees either the old or the new contents."""
        old, table = self._sealed, _Table(len(slots), sealed)
        table.fill(slots)
        self._swap(table, sealed)
        if old is not None:
            self._state.retire(old.close)

    def close(self) -> None:
        """Let each later look-up return `DAMAGED`, and release the file after the last reader (idempotent)."""
        sealed, closed = self._sealed, _Table(0, None)
        closed.header[T_SEALED] = address_of(_CLOSED)
        self._swap(closed, None)
        if sealed is not None:
            self._state.retire(sealed.close)

    def _reserve(self, count: int) -> None:
        """Replace the table if it has no room for `count` more keys."""
        table = self._table
        if table.header[T_USED] + count <= table.capacity:
            return
        # Tombstones are copied only if they may hide records of a file.
        slots = table.slots[table.slots[:, 2] > 0 if self._sealed is None else table.slots[:, 2] != 0]
        larger = _Table(2 * len(slots) + count, self._sealed)
        larger.header[T_EXACT] = 0
        larger.fill(slots)
        for word in (T_LIVE, T_BYTES, T_EXACT):
            larger.header[word] = table.header[word]
        self._swap(larger, self._sealed)

    def _swap(self, table: _Table, sealed: SealedIndex | None) -> None:
        old, self._table, self._sealed = self._table, table, sealed
        self._publish()
        self._state.retire(old.free)

    def _publish(self) -> None:
        compiled(publish)(self._state.address, S_TABLE, self._table.address)


class _Table:
    """The memory of one table; in huge pages if the system has them, because lookups are random."""

    def __init__(self, capacity: int, sealed: SealedIndex | None) -> None:
        slots = MIN_SLOTS
        while MAX_LOAD * slots < capacity:
            slots *= 2
        self.capacity = int(MAX_LOAD * slots)
        self.nbytes = TABLE_HEADER + SLOT * slots
        contents = huge_words(self.nbytes)
        self.address = address_of(contents)
        self.header = contents[: TABLE_HEADER // 8]
        self.slots = contents[TABLE_HEADER // 8 :].reshape(slots, SLOT // 8)
        self.header[T_MASK], self.header[T_EXACT] = slots - 1, 1
        if sealed is not None:
            self.header[[T_SEALED, T_LIVE, T_BYTES]] = sealed.address, sealed.count, sealed.value_bytes

    def put(self, slots: NDArray[np.int64]) -> int:
        """Put slots; see `Index.put`."""
        return int(compiled(put_slots)(self.address, address_of(slots), slots.strides[0], len(slots)))

    def fill(self, slots: NDArray[np.int64]) -> None:
        """Put slots without reading the file; `len` and `value_bytes` count records when used."""
        if len(slots):
            if self.header[T_SEALED]:
                self.header[T_EXACT] = 0
            self.put(slots)

    def free(self) -> None:
        """Do nothing: the memory lives as long as the table, to which `StoreState.retire` refers by this method."""


def addresses(keys: Keys) -> tuple[int, int]:
    """Return the addresses of the words of keys, and of their lengths or 0."""
    return address_of(keys.words), 0 if keys.lengths is None else address_of(keys.lengths)
