"""Key-value training: retrieval that overlaps with computing and with retrieval by another device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import warpwell as ww
from lab.media import KeyValueLatency
from warpwell import gpu
from warpwell.targets import kernel
from warpwell.targets.primitives import backoff, clock_ns, grid

from . import shapes
from .experiment import Document, Experiment, Outcome, Setting

VALUE_BYTES = 1024
RECORDS = 4096
BATCH = 256
RATE = 2000.0
"""Retrieves per second of the emulated drive."""
LATENCY_US = 20_000.0
"""Latency of the drive that two devices share."""
IN_FLIGHT = 8
"""Commands that the queues of one device hold, so that one device cannot keep the drive busy."""
THREADS = 32
"""Threads of a kernel that retrieves."""


@kernel
def fetch(store, keys, rows, tickets, nanoseconds, wrong):  # type: ignore[no-untyped-def]
    """Submit a request for each key, compute for a time, and take the values; the first item of a value is its key.

    Computing leaves the cores free for other threads, as on a GPU.
    """
    for k in range(keys.size):
        tickets[k] = store.submit(keys[k])
    began = clock_ns()
    attempt = 0
    while clock_ns() - began < nanoseconds:
        backoff(attempt)
        attempt += 1
    for k in range(keys.size):
        while store.poll(tickets[k]) < 0:
            pass
        row = rows[k]
        size = store.take(tickets[k], row)
        if size != 8 * row.size or row[0] != keys[k]:
            gpu.atomic_add(wrong, 0, 1)


@kernel
def retrieve_all(store, buffers, keys, rounds, wrong):  # type: ignore[no-untyped-def]
    """Retrieve `rounds` records per thread; the first item of a value is its key."""
    i = grid(1)
    for k in range(rounds):
        key = keys[i * rounds + k]
        row = buffers[i]
        size = store.retrieve(key, row)
        if size != 8 * row.size or row[0] != key:
            gpu.atomic_add(wrong, 0, 1)


def _store(folder: Path) -> str:
    """Make a store whose values begin with their keys."""
    path = folder / "records.kv"
    if not path.exists():
        with ww.kv.create(path, schema={"x": ("int64", (VALUE_BYTES // 8,))}, durability="none") as store:
            keys = np.arange(RECORDS)
            store.put_many(keys, {"x": np.repeat(keys[:, None], VALUE_BYTES // 8, axis=1)})
    return str(path)


def _fetch(store: Any, rng: np.random.Generator, count: int, seconds: float) -> None:
    """Fetch `count` records at random in a kernel that computes for some seconds before it takes them."""
    keys, wrong = rng.integers(0, RECORDS, count), np.zeros(1, np.int64)
    rows, tickets = np.zeros((count, VALUE_BYTES // 8), np.int64), np.zeros(count, np.int64)
    fetch[1](store, keys, rows, tickets, int(1e9 * seconds), wrong)
    assert wrong[0] == 0, f"{wrong[0]} records were wrong"


def _seconds(run: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def overlap(setting: Setting, document: Document) -> Outcome:
    """Fetch records while the kernel computes, and one after the other."""
    rng, runs = np.random.default_rng(1), 5 if setting.quick else 15
    path = _store(setting.folder)
    with ww.kv.open(path, device="cpu", drive=lambda f: KeyValueLatency(f, read_iops=RATE), threads=1) as store:

        def serial(seconds: float) -> None:
            _fetch(store, rng, BATCH, 0.0)
            _fetch(store, rng, 0, seconds)

        serial(0.0)  # compiles
        fetching = _seconds(lambda: _fetch(store, rng, BATCH, 0.0), runs)
        computing = _seconds(lambda: _fetch(store, rng, 0, fetching), runs)
        together = _seconds(lambda: _fetch(store, rng, BATCH, fetching), runs)
        after = _seconds(lambda: serial(fetching), runs)
    longer = max(fetching, computing)
    checks = [
        shapes.between("together, over the longer of the two", together / longer, 0.8, 1.3),
        shapes.between("one after the other, over together", after / together, 1.4),
    ]
    text = f"fetch {1e3 * fetching:.0f} ms, compute {1e3 * computing:.0f} ms, together {1e3 * together:.0f} ms"
    values = {"fetch_s": fetching, "compute_s": computing, "together_s": together, "serial_s": after}
    return Outcome(f"{text}, one after the other {1e3 * after:.0f} ms (drive and computing emulated)", checks, values)


def two_devices(setting: Setting, document: Document) -> Outcome:
    """Retrieve records from one drive by the queues of one device, and by the queues of two at the same time."""
    rounds = 4 if setting.quick else 16
    path = _store(setting.folder)
    shape: dict[str, Any] = {"device": "cpu", "queues": 1, "depth": 2 * IN_FLIGHT, "threads": 1}
    first: Any = ww.kv.open(path, drive=lambda f: KeyValueLatency(f, latency_us=LATENCY_US), **shape)
    second = ww.kv.open(path, beside=first, **shape)
    _retrieve([first], 1)  # compiles
    alone = _retrieve([first], rounds)
    serial = alone + _retrieve([second], rounds)
    together = _retrieve([first, second], rounds)
    second.close()
    first.close()
    gain = 2 * alone / together
    checks = [
        shapes.between("records per second of two devices, over one", gain, 1.7, 2.2),
        shapes.between("both at once, over one after the other", together / serial, 0.4, 0.65),
    ]
    rates = THREADS * rounds / alone, 2 * THREADS * rounds / together
    text = f"{rates[0]:,.0f} records/s by one, {rates[1]:,.0f} by two: {gain:.2f}x"
    values = {"alone_s": alone, "serial_s": serial, "together_s": together}
    return Outcome(f"{text} (one emulated drive)", checks, values)


def _retrieve(stores: list[Any], rounds: int) -> float:
    """Return the seconds in which the kernels of all stores, at the same time, retrieve records at random."""
    wrong = np.zeros(1, np.int64)

    def work(number: int) -> None:
        keys = np.random.default_rng(number).integers(0, RECORDS, THREADS * rounds)
        buffers = np.zeros((THREADS, VALUE_BYTES // 8), np.int64)
        retrieve_all[THREADS](stores[number], buffers, keys, rounds, wrong, device="cpu")

    began = time.perf_counter()
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(work, range(len(stores))))
    seconds = time.perf_counter() - began
    assert wrong[0] == 0, f"{wrong[0]} records were wrong"
    return seconds


EXPERIMENTS = [
    Experiment("key-value/overlap", overlap),
    Experiment("key-value/two-devices", two_devices),
]
