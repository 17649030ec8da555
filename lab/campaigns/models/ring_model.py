"""Ring scenario: many threads mark entries of a small ring and move its tail.

A reader of the doorbell replaces the controller. So runs of adjacent marks occur far more often than in the queue
scenario, and so do threads that sleep for a whole lap of the ring and then find the mark of a later lap.
"""

from __future__ import annotations

from random import Random

from warpwell.queues import QueuePairs
from warpwell.queues.layout import Q_MARKS, Q_SQ, Q_SQ_DOORBELL, Q_TAIL
from warpwell.queues.submission import mark, ring
from warpwell.targets import memory_for
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    backoff,
    fetch_add,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)

from .adversary import Adversary, Violation

DEPTH = 8


class Sleepy(Adversary):
    """An adversary with threads that also nap after they exchanged a watched word, while they own its mark."""

    def _finish(self, op: str, addr: int, old: int, value: int) -> int:
        result = super()._finish(op, addr, old, value)
        if addr in self.watched and old and self.random.random() < 0.1:
            self._next_switch = self._nap_at = self.steps
        return result


class RingModel:
    """One run of the ring scenario; `seed` and `trace` as for `CacheModel`."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        random = Random(seed * 2 + 1)
        threads, each = random.randint(5, 8), random.randint(6, 16)
        nappers = random.choice((0, threads, threads))
        self.run = Sleepy(seed, max_steps=200_000, trace=trace, nappers=nappers, naps=(30, 60, 120, 240))
        self.pairs = QueuePairs(memory_for("interp"), count=1, depth=DEPTH, staging_bytes=512)
        self.queue = self.pairs.record(0)
        # Tickets, and the number of entries read. The controller's turns, which admit threads, are not modeled.
        self.counts = memory_for("interp").allocate(256)
        self.tickets, self.read = self.counts.address, self.counts.address + 128
        self.record = self.pairs._device.words
        self.run.announce_blocks(self.pairs._device, self.pairs._shared, self.counts)
        self.total = threads * each
        for k in range(threads):
            self.run.spawn(self._submit, each, name=f"submitter-{k}")
        self.run.spawn(self._fetch, name="controller")
        # Threads nap after a load of these words.
        for address in (self.queue + 8 * Q_TAIL, *(int(self.record[Q_MARKS]) + 8 * k for k in range(DEPTH))):
            self.run.watched[address] = lambda _: None

    def _submit(self, times: int) -> None:
        for _ in range(times):
            ticket = fetch_add(self.tickets, 1, DEVICE)
            attempt = 0
            while load_acquire(self.read, SYSTEM) + DEPTH - 1 <= ticket:
                backoff(attempt)
                attempt += 1
            store_relaxed(int(self.record[Q_SQ]) + 64 * (ticket & (DEPTH - 1)), ticket + 1000, SYSTEM)
            mark(self.queue, ticket, DEPTH - 1)
            ring(self.queue, DEPTH - 1)

    def _fetch(self) -> None:
        head, attempt = 0, 0
        while head < self.total:
            tail = load_acquire(int(self.record[Q_SQ_DOORBELL]), SYSTEM)
            if tail == head & (DEPTH - 1):
                backoff(attempt)
                attempt += 1
                continue
            while head & (DEPTH - 1) != tail:
                found = load_relaxed(int(self.record[Q_SQ]) + 64 * (head & (DEPTH - 1)), SYSTEM)
                if found != head + 1000:
                    raise Violation(f"entry {head} of {self.total} holds {found}")
                head += 1
            store_release(self.read, head, SYSTEM)

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation` or what device code raised."""
        self.run.run()
        marks = (int(self.record[Q_MARKS]) - self.queue) // 8
        if int(self.record[Q_TAIL]) != self.total or self.record[marks : marks + DEPTH].any():
            raise Violation(f"tail {int(self.record[Q_TAIL])} of {self.total}, marks {self.record[marks:]}")
        return self.run.steps
