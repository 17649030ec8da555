"""Cache scenario: kernels' reads, writes and additions on a few frames under one interleaving.

Each item holds its page, its number and a version. So a read detects bytes of another page, values that no thread
wrote, and versions that decrease. At the end the file must hold every write and the sum of all additions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np
from numpy.typing import NDArray

from warpwell import closing
from warpwell.array import Array, atomic_add, fill
from warpwell.array.attachment import Attachment
from warpwell.array.header import Header
from warpwell.cache import READABLE, VALID, Cache, frame_of, word_address
from warpwell.cache import layout as at
from warpwell.cache.frames import clean
from warpwell.cache.maintenance import flush_frames
from warpwell.cache.paging import evict_page
from warpwell.cache.transfer import serve
from warpwell.cache.word import DIRTY, INVALID, PINS, pins_of, state_of
from warpwell.queues import Q_IN_USE
from warpwell.targets import LaunchFlag
from warpwell.targets.primitives import DEVICE, backoff, load_acquire

from .adversary import Adversary, Violation
from .scripted_medium import ScriptedMedium

MAX_STEPS = 400_000
PAGE = 512
ITEMS = PAGE // 8
OWNED = 16
"""Only thread t writes item ``OWNED + t`` of each page; no thread writes the items before `OWNED`."""
COUNTERS = 40
"""All threads add to the items from this number on."""


@dataclass(frozen=True)
class Focus:
    """Restriction of a run, for faults that need it; None lets the seed decide."""

    frames: int | None = None
    pages: int | None = None
    readers: bool | None = None
    """Some threads only read one page while the remaining threads evict pages."""
    naps: Sequence[int] = ()
    """Lengths of the readers' naps; see `Adversary`."""
    resident: bool = False
    """The cache holds all pages."""
    writers: bool = False
    """The remaining threads also write to pages that the readers do not read; then all threads read only items that
    these threads write."""


def base_value(page: int, item: int) -> int:
    """Return version 0 of an item."""
    return ((page + 1) << 40) | (item << 32)


def stored_value(item: int, value: int) -> int:
    """Return the value that a span stores."""
    return value


class CacheModel:
    """One run of the cache scenario.

    Parameters
    ----------
    seed : int
        Selects the scenario and the interleaving.
    trace : int
        Number of accesses to keep for the report.
    focus : Focus, optional
    """

    def __init__(self, seed: int, trace: int = 0, focus: Focus | None = None) -> None:
        focus = focus or Focus()
        random = Random(seed * 2 + 1)
        self.seed, self.trace, self.naps, self.writers = seed, trace, focus.naps, focus.writers
        self.random = random
        stats = "full" if random.random() < 0.2 else "basic"
        frames = focus.frames or random.choice((1, 1, 1, 2, 2, 3, 4))
        self.resident = focus.resident
        if focus.resident:
            frames = random.randint(2, 4)
        self.cache = Cache(
            frames * (PAGE + 8),
            page_size=PAGE,
            device="interp",
            depth=random.choice((4, 8, 16)),
            queues=random.choice((1, 1, 2)),
            merge=1,
            timeout=1.0,
            stats=stats,
        )
        total = frames if focus.resident else random.randint(8, 20)
        number = focus.pages or random.choice((2, 3, 5, 8))
        self.pages = random.sample(range(total), min(number, total))
        self.medium = ScriptedMedium(total * PAGE, seed)
        for page in self.pages:
            items = [base_value(page, k) for k in range(ITEMS)]
            self.medium.block_of(page)[:] = np.array(items, np.int64).tobytes()
        header = Header(np.dtype(np.int64), (total * ITEMS,), 0)
        self.array = Array(
            Attachment(
                self.medium, header, cache=self.cache, owns_cache=False, tier="storage", writable=True, name="model"
            )
        )
        self.flag = LaunchFlag("interp")
        self.view = self.array.kernel_struct()
        self.frames = self.cache.frames
        self.owners = self.cache._owners
        self.held: dict[int, int] = defaultdict(int)
        self.started: dict[tuple[int, int], int] = defaultdict(int)
        self.returned: set[tuple[int, int, int]] = set()
        self.threads = random.randint(3, 6)
        self.rounds = 1
        self.readers = 0
        if random.random() < 0.25 if focus.readers is None else focus.readers:
            self.readers = random.choice((1, self.threads - 2))
        self.where: dict[int, int] = {}
        self.run = self._interpreter(seed)

    # -- threads --------------------------------------------------------------------------------------------

    def _interpreter(self, seed: int) -> Adversary:
        nappers = self.readers if self.naps else 0
        run = Adversary(seed, max_steps=MAX_STEPS, trace=self.trace, nappers=nappers, naps=self.naps)
        cache = self.cache
        assert cache._core is not None
        run.announce_blocks(
            cache._core,
            *cache.launches.blocks,
            cache._stats,
            cache.pairs._device,
            cache.pairs._shared,
            *cache.controller.blocks(),
            self.medium.order,
        )
        run.announce(self.flag.address, 16)
        controller = cache.controller
        run.serve(*controller.services(), lambda: controller.complete(1))
        for address in range(cache.space(self.array._nsid).pages):
            word = self.view.table + 8 * address
            run.watched[word] = partial(self._word_changed, word)
        return run

    def _word_changed(self, word: int, value: int) -> None:
        frame = frame_of(value) if state_of(value) & READABLE else -1
        before = self.where.get(word, -1)
        if pins_of(value) > self.threads + len(self.held) + 8:
            raise Violation(f"a page word has {pins_of(value)} pins")
        if frame == before:
            return
        if before >= 0 and self.held.get(word) and not self.resident:  # in that case an eviction may overtake a pin
            raise Violation(f"the page of frame {before} was evicted while it was pinned for long")
        self.where.pop(word, None)
        if frame < 0:
            return
        if frame >= self.frames or frame in self.where.values():
            raise Violation(f"frame {frame} of {self.frames} belongs to two pages")
        self.where[word] = frame

    def _worker(self, thread: int, seed: int) -> None:
        random = Random(seed)
        view = self.view
        observed: dict[tuple[int, int], int] = defaultdict(int)
        if self.readers:
            # The readers read the first page again and again; the other threads read all pages, which evicts that page.
            reader = thread < self.readers
            pages = self.pages[:1] if reader else self.pages
            for _ in range(random.randint(20, 60)):
                if self.writers and not reader and random.random() < 0.7:
                    self._write(thread, random.choice(self.pages[1:]), observed)
                page, item = random.choice(pages), random.randrange(OWNED)
                if self.writers:
                    item = OWNED + self.readers + item % (self.threads - self.readers)
                self._read(thread, page, item, observed)
            return
        for _ in range(random.randint(4, 12)):
            page = random.choice(self.pages)
            action = random.random()
            if action < 0.45:
                for _ in range(random.randint(1, 4)):
                    kinds = (random.randrange(OWNED), OWNED + random.randrange(self.threads), COUNTERS)
                    self._read(thread, page, random.choice(kinds), observed)
            elif action < 0.65:
                self._write(thread, page, observed)
            elif action < 0.8:
                self._add(page, COUNTERS, observed)
            elif action < 0.86:
                view.prefetch(page * ITEMS)
            elif action < 0.92:
                self._hold(thread, page, observed)
            else:
                self._clean(page, action < 0.96)

    def _read(self, thread: int, page: int, item: int, observed: dict[tuple[int, int], int]) -> None:
        value = self.view[page * ITEMS + item]
        version = value - base_value(page, item)
        oldest, newest = observed[page, item], self.started[page, item]
        if item == OWNED + thread:
            oldest = newest
        if not oldest <= version <= newest:
            raise Violation(
                f"page {page}, item {item}: read {value:#x}, page {(value >> 40) - 1} item {(value >> 32) & 255} "
                f"version {value & 0xFFFFFFFF}, not a version from {oldest} to {newest}"
            )
        observed[page, item] = version

    def _write(self, thread: int, page: int, observed: dict[tuple[int, int], int]) -> None:
        item = OWNED + thread
        self.started[page, item] += 1
        observed[page, item] = self.started[page, item]
        at, value = page * ITEMS + item, base_value(page, item) + observed[page, item]
        if thread & 1:
            fill(stored_value, self.view, at, at + 1, value)
        else:
            self.view[at] = value

    def _add(self, page: int, item: int, observed: dict[tuple[int, int], int]) -> None:
        self.started[page, item] += 1
        old = atomic_add(self.view, page * ITEMS + item, 1) - base_value(page, item)
        if not observed[page, item] <= old < self.started[page, item] or (page, item, old) in self.returned:
            raise Violation(f"page {page}, item {item}: an addition returned {old:#x} or returned it twice")
        self.returned.add((page, item, old))
        observed[page, item] = old + 1

    def _hold(self, thread: int, page: int, observed: dict[tuple[int, int], int]) -> None:
        # device code holds all frames except one, so that the remaining threads make progress
        word = word_address(self.cache._core_address, page)
        if self.view.pin(page * ITEMS):
            self.held[word] += 1
            self._read(thread, page, OWNED + thread, observed)
            self._read(thread, page, 0, observed)
            self.held[word] -= 1
            self.view.unpin(page * ITEMS)

    def _clean(self, page: int, evict: bool) -> None:
        core, space = self.cache._core_address, self.view.space
        if clean(core, space, page, False, 1, 0, 0) and evict:
            evict_page(core, space, page, 1, 0, 0)

    # -- the whole ------------------------------------------------------------------------------------------

    def check(self) -> int:
        """Run the interleaving, then settle and flush in a second interleaving; return the steps of both.

        Raises `Violation` or what device code raised or latched.
        """
        cache = self.cache
        try:
            steps = 0
            for number in range(self.rounds):
                if number:
                    self.run = self._interpreter(self.seed + (number << 42))
                for thread in range(self.threads):
                    self.run.spawn(self._worker, thread, self.random.getrandbits(32), name=f"worker-{thread}")
                cache.begin(self.flag)
                self.view = self.array.kernel_struct(self.flag)
                self.run.run()
                cache.end(self.flag)
                steps += self.run.steps
            cache.begin(self.flag)
            self._check_words(settled=False)
            settling = self._interpreter(self.seed + (1 << 40))
            settling.spawn(self._settle, name="settle")
            settling.run()
            cache.end(self.flag)
            self._flush()
            self._check_words(settled=True)
            self._check_file()
        finally:
            self._discard()
        return steps + settling.steps

    def _settle(self) -> None:
        core, attempt = self.cache._core_address, 0
        for index in range(self.cache.pairs.count):
            queue = self.cache.pairs.record(index)
            while load_acquire(queue + 8 * Q_IN_USE, DEVICE) > 0:
                serve(core, queue, 1, 0, 0)
                backoff(attempt)
                attempt += 1

    def _flush(self) -> None:
        cache = self.cache
        space = cache.space(self.array._nsid)
        # retry pages for which no command id was free
        for attempt in range(4):
            run = self._interpreter(self.seed + ((attempt + 1) << 41))
            cache.begin(self.flag)
            launch = cache.launches.take(self.flag)
            launch.reset()
            arguments = (
                cache._core_address,
                launch.space(0),
                space.base,
                space.base + space.pages,
                0,
                launch.count_address,
            )
            run.launch(flush_frames.function, self.frames, arguments)
            left = launch.counted()
            cache.end(self.flag)
            if not left:
                return
        raise Violation(f"{left} pages could not be flushed at the end")

    def _check_words(self, *, settled: bool) -> None:
        page_words = self.cache.page_words(self.array._nsid)
        owners = np.array(self._owners())
        for number, word in enumerate(int(w) for w in page_words):
            if word & PINS:
                raise Violation(f"page word {number} has {pins_of(word)} pins at the end")
            state = state_of(word)
            if settled and (state not in (INVALID, VALID) or (state == VALID and word & DIRTY)):
                raise Violation(f"page word {number} is {word:#x} at the end")
            if state == VALID and owners[frame_of(word)] <= 0:
                raise Violation(f"frame {frame_of(word)} of page word {number} has no owner")
        pool = self._read_core(self.cache._core_address + 8 * at.C_POOLS, 1)[0]
        if self.cache._count_pinned(self.array._nsid):
            raise Violation(f"{self.cache._count_pinned(self.array._nsid)} pages are held for long at the end")
        valid = sum(state_of(int(w)) == VALID for w in page_words)
        stashed = self._stashed(pool, owners)
        if self.resident:
            present = self._read_core(pool, at.POOL_WORDS)[at.F_PRESENT]
            if stashed or (settled and (valid != present or self.cache.pairs.in_use())):
                raise Violation(f"{valid} valid pages, {present} counted, stash {stashed}")
        elif settled and (
            valid != int((owners > 0).sum())
            or valid + int((owners == at.FREE_FRAME).sum()) + len(stashed) != len(owners)
            or self.cache.pairs.in_use()
        ):
            raise Violation(
                f"{valid} valid pages, owners {owners.tolist()}, stash {stashed}, {self.cache.pairs.in_use()} ids taken"
            )

    def _stashed(self, pool: int, owners: NDArray[np.int64]) -> list[int]:
        """Return the frames of the free list. Each must be in it once, and have no other owner."""
        record = self._read_core(pool, at.POOL_WORDS)
        ring = self._read_core(record[at.F_RING], record[at.F_RING_MASK] + 1)
        frames = [entry - 1 for entry in ring if entry]
        counted = record[at.F_STASHED], len(ring) - record[at.F_STASH_ROOM]
        if len(set(frames)) != len(frames) or any(owners[f] != at.HELD_FRAME for f in frames):
            raise Violation(f"stash {frames}: a frame is in it twice or has an owner, owners {owners.tolist()}")
        if counted != (len(frames), len(frames)):
            raise Violation(f"stash {frames}: the counters are {counted[0]} frames and {counted[1]} entries")
        return frames

    def _owners(self) -> list[int]:
        return self._read_core(self.owners, self.frames)

    def _read_core(self, address: int, count: int) -> list[int]:
        assert self.cache._core is not None
        return [int(n) for n in self.cache._core.read(address - self.cache._core_address, 8 * count).view(np.int64)]

    def _check_file(self) -> None:
        for page in self.pages:
            items = np.frombuffer(bytes(self.medium.block_of(page)), np.int64)
            for item in range(ITEMS):
                if int(items[item]) != base_value(page, item) + self.started[page, item]:
                    raise Violation(
                        f"page {page}, item {item}: the file holds {int(items[item]):#x}, "
                        f"not version {self.started[page, item]}"
                    )

    def _discard(self) -> None:
        """Discard array and cache without the flush of a regular close."""
        self.array._finalizer.detach()
        self.array._part.closed = self.cache.closed = True
        closing.forget(self.array._part)
        self.cache.controller.close()
        self.medium.close()
