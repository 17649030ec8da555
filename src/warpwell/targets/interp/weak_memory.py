"""Weak memory of the ``interp`` target: the values that a load may return if happens-before permits several.

The model is operational and view-based, like the promise-free part of RC11: a location (an aligned 8-byte word) holds a
list of messages in coherence order, and a load may return every message that is not older than a message that the
thread knows.  Fences, acquire and release move knowledge between threads.  There is no total order of fences, so store
buffering is visible, and no load buffering: a load returns no value of the future.

A view is a vector clock over threads instead of a map of locations: joining it costs the number of threads,
however many words are in use.  Each message notes in which epoch each thread first wrote or read it, so "the
thread knows this message" is "it knows of an epoch in which a thread had seen the message".

Source of the model: Lahav, Vafeiadis, Kang, Hur, Dreyer: Repairing Sequential Consistency in C/C++11 (2017);
Kang and others: A Promising Semantics for Relaxed-Memory Concurrency (2017), without its promises.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from random import Random

WEAK, RELAXED, ORDERED = 0, 1, 2
"""Orders of an access: no synchronization at all, relaxed, and acquire (loads) or release (stores)."""

KEPT_MESSAGES = 8
STALE_LIMIT = 8
_NEVER = 1 << 62
_PART = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}


@dataclass(slots=True, eq=False)
class Knowledge:
    """Knowledge that a message carries: a vector clock; the thread and epoch whose snapshot it is."""

    clock: list[int]
    by: int
    epoch: int


@dataclass(slots=True, eq=False)
class WordValue:
    """One value that a word had.

    Attributes
    ----------
    value : int
    view : Knowledge or None
    first_epochs : dict
        The epoch in which each thread first wrote or read the value.
    stamp : int
        Position in coherence order.
    """

    value: int
    view: Knowledge | None
    first_epochs: dict[int, int]
    stamp: int


class Location:
    """An aligned 8-byte word of process memory and the messages that can still be read."""

    __slots__ = ("cell", "messages", "number")

    def __init__(self, address: int, number: int) -> None:
        self.cell = ctypes.c_int64.from_address(address)
        self.number = number
        self.messages = [WordValue(self.cell.value, None, {}, 0)]


class ThreadView:
    """Knowledge of a thread: current, pending until an acquire fence, and released by the last fence."""

    __slots__ = ("clock", "pending", "released", "slot", "stale")

    def __init__(self, slot: int, threads: int) -> None:
        self.slot = slot
        self.clock = [0] * threads
        self.clock[slot] = 1
        self.pending: list[Knowledge] = []
        self.released: Knowledge | None = None
        self.stale = 0

    def snapshot(self) -> Knowledge:
        """Close the thread's epoch and return all that it knows now."""
        clock, slot = self.clock, self.slot
        epoch = clock[slot]
        view = Knowledge(clock.copy(), slot, epoch)
        clock[slot] = epoch + 1
        return view

    def join(self, view: Knowledge) -> None:
        """Learn what `view` knows."""
        clock = self.clock
        # A thread that knows the epoch that ended with this snapshot already has all of it.
        if clock[view.by] < view.epoch:
            self.clock = [a if a > b else b for a, b in zip(clock, view.clock, strict=True)]

    def postpone(self, view: Knowledge) -> None:
        """Keep `view` for the next acquire fence."""
        if self.clock[view.by] < view.epoch:
            pending = self.pending
            if not pending or pending[-1] is not view:
                if len(pending) >= 32:
                    pending[:] = [_joined(pending, self.slot)]
                pending.append(view)

    def fence(self) -> None:
        """Acquire-release fence."""
        for view in self.pending:
            self.join(view)
        self.pending.clear()
        self.released = self.snapshot()


def _joined(views: list[Knowledge], slot: int) -> Knowledge:
    # No snapshot, so its epoch is one that no thread ever knows: such a view is always joined in full.
    return Knowledge([max(column) for column in zip(*(v.clock for v in views), strict=True)], slot, _NEVER)


def _continued(first: Knowledge | None, second: Knowledge | None, slot: int) -> Knowledge | None:
    if first is None or second is None:
        return first or second
    if first.clock[second.by] >= second.epoch:
        return first
    if second.clock[first.by] >= first.epoch:
        return second
    return _joined([first, second], slot)


class WeakMemory:
    """Words of process memory seen through views.

    Parameters
    ----------
    random : random.Random
        Source of every choice.
    fresh : float
        Probability with which a load that may choose takes the newest message at once (0 to 1).

    Notes
    -----
    Every store also writes process memory, so host code sees the newest value when the run has ended.  The
    first access to a word reads process memory.  A store to a part of a word replaces its bytes in the newest
    message and keeps the view: the parts of a word are thus ordered a little more than hardware orders them.
    """

    def __init__(self, random: Random, fresh: float) -> None:
        self.locations: dict[int, Location] = {}
        self.ranges: list[tuple[int, int]] = []
        self.fresh = fresh
        self.stores = 0
        self.digest = 0
        self._random = random.random

    def forget(self) -> None:
        """Drop all messages; the next access reads process memory."""
        self.locations.clear()

    def _touch(self, address: int) -> Location:
        address = int(address)
        if address & 7:
            raise ValueError(f"misaligned access: address {address:#x} of an item of 8 bytes")
        if address < 4096:
            raise ValueError(f"access to address {address:#x}, which is not memory (null or uninitialized)")
        if self.ranges and not any(start < address + 8 and address < end for start, end in self.ranges):
            raise ValueError(f"access to address {address:#x}, which is in none of the memory ranges of this run")
        location = self.locations[address] = Location(address, len(self.locations))
        return location

    def _choose(self, thread: ThreadView, messages: list[WordValue]) -> WordValue:
        # Called if the thread itself has not yet seen the newest message.
        if thread.stale >= STALE_LIMIT or self._random() < self.fresh:
            thread.stale = 0
            return messages[-1]
        clock = thread.clock
        oldest = len(messages) - 1
        while oldest:
            for slot, epoch in messages[oldest].first_epochs.items():
                if clock[slot] >= epoch:
                    break
            else:
                oldest -= 1
                continue
            break
        message = messages[oldest + int(self._random() * (len(messages) - oldest))]
        thread.stale = 0 if message is messages[-1] else thread.stale + 1
        return message

    def load(self, thread: ThreadView, address: int, order: int, newest: bool = False) -> int:
        """Return one of the values that the word at `address` may have for `thread`.

        A read-modify-write loads the `newest` value.
        """
        location = self.locations.get(address) or self._touch(address)
        messages = location.messages
        message = messages[-1]
        slot = thread.slot
        if slot not in message.first_epochs:
            if len(messages) > 1 and not newest:
                message = self._choose(thread, messages)
            if slot not in message.first_epochs:
                message.first_epochs[slot] = thread.clock[slot]
        view = message.view
        if view is not None and order:
            if order == ORDERED:
                thread.join(view)
            else:
                thread.postpone(view)
        self.digest = hash((self.digest, slot, location.number, message.stamp))
        return message.value

    def store(self, thread: ThreadView, address: int, value: int, order: int, continues: bool = False) -> None:
        """Append a message and write process memory.

        A message that `continues` the newest one also carries its knowledge: the store of a relaxed read-modify-write.
        """
        location = self.locations.get(address) or self._touch(address)
        self._append(location, thread, value, order, continues)
        location.cell.value = value

    def store_part(self, thread: ThreadView, address: int, size: int, bits: int, order: int) -> None:
        """Replace `size` (1, 2 or 4) bytes at `address` by the unsigned number `bits`."""
        if address & (size - 1):
            raise ValueError(f"misaligned access: address {address:#x} of an item of {size} bytes")
        word = address & ~7
        location = self.locations.get(word) or self._touch(word)
        shift = 8 * (address & 7)
        mask = ((1 << 8 * size) - 1) << shift
        value = (location.messages[-1].value & ~mask) | (bits << shift)
        value = ((value & (1 << 64) - 1) ^ (1 << 63)) - (1 << 63)
        # The other bytes keep the view with which they were released.
        self._append(location, thread, value, order, continues=True)
        # Only the bytes of the item: their neighbors may belong to other memory.
        _PART[size].from_address(address).value = bits

    def _append(self, location: Location, thread: ThreadView, value: int, order: int, continues: bool) -> None:
        messages, slot = location.messages, thread.slot
        epoch = thread.clock[slot]
        view = thread.snapshot() if order == ORDERED else thread.released if order else None
        if continues:
            view = _continued(view, messages[-1].view, slot)
        stamp = messages[-1].stamp + 1
        messages.append(WordValue(value, view, {slot: epoch}, stamp))
        if len(messages) > KEPT_MESSAGES:
            del messages[0]
        self.stores += 1
        self.digest = hash((self.digest, ~slot, location.number, stamp))

    def foreign_writes(self) -> list[int]:
        """Return the addresses of words that code outside of the interpreter has changed since their first access."""
        found = self.locations.items()
        return [address for address, word in found if word.cell.value != word.messages[-1].value]
