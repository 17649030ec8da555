"""Kernels for all operations of a store, and values that identify their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.media import KeyValueFaulty
from warpwell.kv.keys import as_key
from warpwell.targets import kernel
from warpwell.targets.primitives import clock_ns, grid

MIX = 0x9E3779B97F4A7C15
WRONG = -12
"""Result of `hold` for a size that is not the value's."""


def value_of(key: int | bytes, nbytes: int) -> bytes:
    """Return the value of a key: words that differ from those in other keys' values, for any size."""
    number = key if isinstance(key, int) else int.from_bytes(key, "little") + (len(key) << 128)
    mixed = (number * MIX) ^ (number >> 61)
    sequence = (np.arange(-(-nbytes // 8), dtype=np.uint64) + np.uint64(mixed & (2**64 - 1))) * np.uint64(MIX)
    return sequence.tobytes()[:nbytes]


def drive(faults: list[KeyValueFaulty]) -> Callable[[Any], KeyValueFaulty]:
    """Return a function that makes a drive faulty, for `kv.open`; it adds the drive to `faults`."""

    def make(functions: Any) -> KeyValueFaulty:
        faults.append(KeyValueFaulty(functions))
        return faults[-1]

    return make


def fill(store: Any, keys: Iterable[Any], sizes: Iterable[int]) -> dict[bytes, bytes]:
    """Put a value for each key, and return all records."""
    records = {as_key(k): value_of(as_key(k), n) for k, n in zip(keys, sizes, strict=True)}
    store.put_many(list(records), list(records.values()))
    return records


def check_rows(rows: NDArray[np.uint8], sizes: Any, keys: Iterable[Any], records: dict[bytes, bytes]) -> None:
    """Raise AssertionError if rows and sizes read by kernels do not match their keys."""
    for row, key in enumerate(keys):
        value = records.get(as_key(key))
        if value is None:
            assert sizes[row] == -1, (row, sizes[row])
        else:
            assert sizes[row] == len(value), (row, sizes[row], len(value))
            assert rows[row, : len(value)].tobytes() == value[: rows.shape[1]], row


@kernel
def retrieve_rows(kv, keys, rows, sizes):
    """Retrieve a value a thread."""
    i = grid(1)
    sizes[i] = kv.retrieve(keys[i], rows[i])


@kernel
def retrieve_long(kv, key_words, rows, sizes):
    """As `retrieve_rows`, with keys of any length: three words each."""
    i = grid(1)
    sizes[i] = kv.retrieve((key_words[i, 0], key_words[i, 1], key_words[i, 2]), rows[i])


def check_keys(store: Any, keys: Iterable[Any], records: dict[bytes, bytes], room: int = 512) -> None:
    """Retrieve the value of each key in a kernel, one thread for each; raise AssertionError if one is wrong."""
    keys = list(keys)
    rows, sizes = np.zeros((len(keys), room), np.uint8), np.full(len(keys), -99, np.int64)
    retrieve_long[len(keys)](store, words_of(keys), rows, sizes)
    check_rows(rows, sizes, keys, records)


@kernel
def exist(kv, keys, present):
    """Ask for a key a thread."""
    i = grid(1)
    present[i] = kv.exists(keys[i])


@kernel
def part_ways(kv, keys, rows, sizes):
    """Lanes of a warp do different things: retrieve, ask, take a ticket, nothing."""
    i = grid(1)
    turn = i % 5
    if turn == 0:
        sizes[i] = kv.retrieve(keys[i], rows[i])
    elif turn == 1:
        if kv.exists(keys[i]) == 1:
            sizes[i] = kv.retrieve(keys[i], rows[i])
        else:
            sizes[i] = -1
    elif turn == 2:
        ticket = kv.submit(keys[i])
        if ticket < 0:
            sizes[i] = kv.retrieve(keys[i], rows[i])
        else:
            while kv.poll(ticket) < 0:
                pass
            sizes[i] = kv.take(ticket, rows[i])
    elif turn == 3:
        for k in range(i % 7):
            sizes[i] = kv.retrieve(keys[(i + k) % keys.size], rows[i])
        sizes[i] = kv.retrieve(keys[i], rows[i])


@kernel
def hold(kv, keys, rows, sizes):
    """Take a ticket, hold it while another value is retrieved, and take its value once."""
    i = grid(1)
    ticket = kv.submit(keys[i])
    neighbor_size = kv.retrieve(keys[(i + 1) % keys.size], rows[i])
    if ticket < 0:
        sizes[i] = kv.retrieve(keys[i], rows[i])
    else:
        while kv.poll(ticket) < 0:
            pass
        reported_size = kv.length(ticket)
        sizes[i] = kv.take(ticket, rows[i])
        if reported_size != sizes[i] or neighbor_size < -1:
            sizes[i] = WRONG


@kernel
def poll_to_the_end(kv, keys, states):
    """Poll a ticket for as long as it takes, and take it."""
    i = grid(1)
    ticket = kv.submit(keys[i])
    states[i] = -3
    if ticket >= 0:
        states[i] = kv.poll(ticket)
        while states[i] < 0:
            states[i] = kv.poll(ticket)


@kernel
def retrieve_for(kv, keys, rows, counts, nanoseconds):
    """Retrieve for so long; note how often the value came and how often not, and the longest wait (ns)."""
    i = grid(1)
    until = clock_ns() + nanoseconds
    since = clock_ns()
    while since < until:
        size = kv.retrieve(keys[i], rows[i])
        if size >= 0:
            counts[i, 0] += 1
        else:
            counts[i, 1] += 1
        now = clock_ns()
        counts[i, 2] = max(counts[i, 2], now - since)
        since = now


@kernel
def poll_for(kv, keys, rows, counts, nanoseconds):
    """As `retrieve_for`, with a ticket each time."""
    i = grid(1)
    until = clock_ns() + nanoseconds
    since = clock_ns()
    while since < until:
        ticket = kv.submit(keys[i])
        if ticket >= 0:
            status = kv.poll(ticket)
            while status < 0:
                status = kv.poll(ticket)
            if status == 0:
                kv.take(ticket, rows[i])
                counts[i, 0] += 1
            else:
                counts[i, 1] += 1
        now = clock_ns()
        counts[i, 2] = max(counts[i, 2], now - since)
        since = now


@kernel
def share_a_row(kv, keys, rows, sizes):
    """All threads read their values into one row; its content is undefined."""
    i = grid(1)
    sizes[i] = kv.retrieve(keys[i], rows[0])


@kernel
def take_twice(kv, keys, rows, sizes, again):
    """Take each ticket twice, with something else in between."""
    i = grid(1)
    ticket = kv.submit(keys[i])
    while ticket < 0:
        ticket = kv.submit(keys[i])
    while kv.poll(ticket) < 0:
        pass
    sizes[i] = kv.take(ticket, rows[i])
    again[i] = kv.take(ticket, rows[i])


@kernel
def forge(kv, tickets, rows, results):
    """Use numbers that are no tickets."""
    i = grid(1)
    results[i, 0] = kv.poll(tickets[i])
    results[i, 1] = kv.length(tickets[i])
    results[i, 2] = kv.take(tickets[i], rows[i])


@kernel
def into_column(kv, key, columns, sizes):
    """Retrieve to where items do not stand side by side."""
    sizes[grid(1)] = kv.retrieve(key, columns[:, 0])


RAGGED = {
    "ok": "bool",
    "img": ("uint8", (None,)),
    "label": "int64",
    "name": "str",
    "boxes": ("float32", (None, 3)),
    "grid": ("int16", (2, 3)),
}


def ragged_records(count: int) -> dict[str, Any]:
    """Return records of `RAGGED`, with images of 0 to 18,000 bytes."""
    random = np.random.default_rng(0)
    return {
        "ok": np.arange(count) % 2 == 0,
        "img": [random.integers(0, 256, n, np.uint8) for n in random.integers(0, 18_000, count)],
        "label": np.arange(count) - 3,
        "name": ["é" * (k % 5) for k in range(count)],
        "boxes": [np.full((k % 4, 3), k, np.float32) for k in range(count)],
        "grid": np.arange(6 * count, dtype=np.int16).reshape(count, 2, 3),
    }


def reduced(records: dict[str, Any], k: int) -> list[float]:
    """Return what `reduce_fields` writes for a record."""
    named = {name: column[k] for name, column in records.items()}
    text = named["name"].encode()
    sums = [int(named["img"].sum(dtype=np.int64)), named["label"], len(text), text[-1] if text else 0]
    return [named["ok"], *sums, len(named["boxes"]), named["boxes"].sum(), named["grid"][1, 2], named["grid"].size]


@kernel
def reduce_fields(kv, keys, rows, sizes, out):
    """Retrieve a record of `RAGGED` a thread, and reduce its fields to numbers."""
    i = grid(1)
    row = rows[i]
    sizes[i] = kv.retrieve(keys[i], row)
    if kv.field(row, "ok"):
        out[i, 0] = 1
    img = kv.field(row, "img")
    total = 0
    for k in range(img.size):
        total += img[k]
    out[i, 1] = total
    out[i, 2] = kv.field(row, "label")
    name = kv.field(row, "name")
    out[i, 3] = len(name)
    if len(name) > 0:
        out[i, 4] = name[len(name) - 1]
    boxes = kv.field(row, "boxes")
    out[i, 5] = boxes.shape[0]
    corners = 0.0
    for a in range(boxes.shape[0]):
        for b in range(boxes.shape[1]):
            corners += boxes[a, b]
    out[i, 6] = corners
    cells = kv.field(row, "grid")
    out[i, 8] = cells.size
    if cells.size > 0:
        out[i, 7] = cells[1, 2]


@kernel
def overwrite_labels(kv, keys, rows, labels):
    """Change a field of a row in place."""
    i = grid(1)
    kv.retrieve(keys[i], rows[i])
    img = kv.field(rows[i], "img")
    img[0] = 77
    labels[i] = kv.field(rows[i], "img")[0]


@kernel
def unknown_field(kv, keys, rows, out):
    """Name a field that the schema does not have."""
    i = grid(1)
    out[i] = kv.field(rows[i], "picture")


def random_keys(seed: int, count: int) -> list[bytes]:
    """Return keys of 1 to 16 bytes, and among them many that differ in their length or one byte alone."""
    random = np.random.default_rng(seed)
    keys = {b"a" * n for n in range(1, 17)} | {bytes(n) for n in range(1, 17)}
    while len(keys) < count:
        keys.add(random.bytes(int(random.integers(1, 17))))
    return sorted(keys)[:count]


def words_of(keys: Iterable[Any]) -> NDArray[np.int64]:
    """Return keys as kernels take them: two words and the length."""
    raw = [as_key(key) for key in keys]
    padded = np.frombuffer(b"".join(key.ljust(16, b"\0") for key in raw), np.int64).reshape(-1, 2)
    return np.column_stack([padded, [len(key) for key in raw]]).astype(np.int64)
