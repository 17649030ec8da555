"""Store scenario: requests, tickets and the device cache of a store under one interleaving, checked against a model.

Each word of a value encodes its key, and there are more keys than ways of the cache. So the model detects values that
are torn, belong to another key, or were taken twice. In some runs values change all the time, two threads share a
buffer, or commands are lost.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random

import numpy as np

from warpwell.kv.device import device_cache, kernel_view
from warpwell.kv.device import requests as at
from warpwell.kv.index.serve import C_FIRST, WITH_VERSION, version_at
from warpwell.nvme import KV_RETRIEVE, word0_opc, word5_key_size, word5_options, word5_value_size
from warpwell.queues import QueuePairs
from warpwell.storage import PENDING, Controller, NativeMedium, ReturnSlots, word, write_answer
from warpwell.targets import Block, memory_for
from warpwell.targets.interp.interpreter import current
from warpwell.targets.primitives import DEVICE, SYSTEM, backoff, fetch_add, load_relaxed, store_relaxed

from .adversary import Adversary, Violation, native_handle

MAX_STEPS = 400_000
ROOM = 1088
"""Size of a thread's buffer for a value, in bytes."""
LENGTH = 8

_media: dict[int, StoreMedium] = {}
_numbers = itertools.count(1)


@dataclass
class Ticket:
    """A ticket that several threads share, its key, and the number of times that its value was taken."""

    number: int
    key: int
    take_count: int = 0


@dataclass(order=True)
class _PendingCommand:
    """A command that is pending."""

    tag: int
    key: int = field(compare=False)
    buffer: int = field(compare=False)
    first: int = field(compare=False)
    nbytes: int = field(compare=False)
    versioned: bool = field(compare=False)


class StoreMedium:
    """Completes the commands of a `StoreModel` late and out of order.

    Parameters
    ----------
    model : StoreModel
    random : random.Random
        Selects the pending commands and the times of their completion.
    """

    def __init__(self, model: StoreModel, random: Random) -> None:
        self._model, self._random = model, random
        self._pending_share = random.choice((0.0, 0.5, 1.0))
        self._lazy = random.choice((0.0, 0.5, 0.95))
        self._lost = random.choice((0.0, 0.05)) if model.impatient else 0.0
        self._waiting: list[_PendingCommand] = []
        # Orders threads as a store's own queue does: the completing thread sees all stores of the starting thread.
        self.order = memory_for("interp").allocate(8)
        self._number = next(_numbers)
        _media[self._number] = self

    def native(self) -> NativeMedium:
        """Return interpreted functions; compiled code cannot call them."""
        return NativeMedium(native_handle(_start), native_handle(_complete), self._number)

    def start(self, address: int, tag: int) -> int:
        """Start the command at an address; see `NativeMedium`."""
        word5 = word(address, 5)
        first, versioned = word(address, C_FIRST) & 0xFFFFFFFF, word5_options(word5) & WITH_VERSION != 0
        command = _PendingCommand(tag, word(address, 1), word(address, 3), first, word5_value_size(word5), versioned)
        if word5_key_size(word5) != LENGTH or word0_opc(word(address, 0)) != KV_RETRIEVE:
            raise Violation(f"opcode {word0_opc(word(address, 0))} arrived, with {word5_key_size(word5)} bytes of key")
        if self._random.random() >= self._pending_share:
            return self._finish(command)
        if self._random.random() < self._lost:
            return PENDING
        fetch_add(self.order.address, 1, SYSTEM)
        self._waiting.append(command)
        return PENDING

    def _finish(self, command: _PendingCommand) -> int:
        version = self._model.version
        if self._model.changing and self._random.random() < 0.3:
            self._model.version += 1
        value = self._model.value(command.key, version)
        if value is None:
            return kernel_view.KV_KEY_DOES_NOT_EXIST
        part = value[command.first : command.first + command.nbytes]
        for k in range(0, len(part), 8):
            current().write_bytes(command.buffer + k, part[k : k + 8])
        if command.versioned and command.nbytes and (command.first or len(value) > command.nbytes):
            location = np.array([version >> 1, version & 1]).tobytes()  # a version changes one or both words
            current().write_bytes(version_at(command.buffer, command.nbytes), location)
        return len(value) << 16

    def complete(self, out: int) -> bool:
        """Complete a finished command; see `NativeMedium`."""
        if not self._waiting or self._random.random() < self._lazy:
            return False
        fetch_add(self.order.address, 1, SYSTEM)
        command = self._waiting.pop(int(self._random.random() * len(self._waiting)))
        answer = self._finish(command)
        return write_answer(out, command.tag, answer & 0xFFFF, answer >> 16)

    def close(self) -> None:
        """Unregister the store."""
        _media.pop(self._number, None)


class StoreModel:
    """One run of the store scenario.

    Parameters
    ----------
    seed : int
        Selects the scenario and the interleaving.
    trace : int
        Number of accesses to keep for the report.
    """

    def __init__(self, seed: int, trace: int = 0) -> None:
        random = Random(seed * 2 + 1)
        self.run = Adversary(seed, max_steps=MAX_STEPS, trace=trace)
        memory = memory_for("interp")
        depth = random.choice((4, 4, 8))
        slots = random.choice((0, 0, 1, 2))
        self.large = random.random() < 0.3
        self.impatient = random.random() < 0.25
        self.only_gets = random.random() < 0.5
        self.changing = random.random() < 0.15
        careless = self.only_gets and random.random() < 0.4
        self.version = 0
        self.pairs = QueuePairs(
            memory,
            count=1,
            depth=depth,
            staging_bytes=640,
            results=True,
        )
        if slots:
            ReturnSlots(memory, self.pairs, slots, 1024)
        self.controller = Controller(self.pairs, threads=1, interpreted=True)
        self.medium = StoreMedium(self, random)
        nsid = self.controller.attach_kv(self.medium.native(), self.medium)
        self.queue = self.pairs.record(0)
        self.keys = random.randint(3, 5)
        self.shared: list[Ticket] = []
        self.core = memory.allocate(8 * at.K_WORDS)
        self.cache = self._make_cache(1040 if self.large else 32)
        self._abort = memory.allocate_shared(64)
        fields = self.core.words
        fields[at.K_QUEUES], fields[at.K_N_QUEUES] = self.queue, 1
        fields[at.K_NSID], fields[at.K_SHARDS], fields[at.K_CHUNK] = nsid, 1, 512
        fields[at.K_TIMEOUT] = 500_000 if self.impatient else 1 << 60
        cached = not self.changing and (self.only_gets or random.random() < 0.7)
        fields[at.K_CACHE] = self.cache.address if cached else 0
        fields[at.K_ABORT], fields[at.K_RETURNS] = self._abort.address, int(slots > 0)
        fields[at.K_RESERVE] = self.pairs.ids - min(self.pairs.ids, slots or self.pairs.ids) * 3 // 4
        threads = random.randint(3 if careless else 2, 4)
        self._rows = [memory.allocate(ROOM) for _ in range(threads)]
        for k in range(threads):
            plan = [self._step(random) for _ in range(random.randint(3, 16 if self.only_gets else 8))]
            if careless and k < 2:
                # Both threads read into one buffer. Its content is undefined, and must not reach other threads.
                keys = [key for _, key, _ in plan]
                self.run.spawn(self._overwrite, keys, self._rows[0].address, name=f"careless-{k}")
            else:
                self.run.spawn(self._thread, plan, self._rows[k].address, name=f"thread-{k}")
        for entry in range(2):
            # A thread that has read a version sometimes sleeps, so that the entry changes before it copies.
            address = self.cache.address + 128 + 8 * (device_cache.W_WORDS * entry + device_cache.W_VERSION)
            self.run.watched[address] = lambda _value: None
        self.run.serve(*self.controller.services())
        self.run.announce_blocks(
            self.pairs._device,
            self.pairs._shared,
            *self.pairs._user_blocks,
            *self.controller.blocks(),
            self.medium.order,
            self.core,
            self.cache,
            self._abort,
            *self._rows,
        )

    def _make_cache(self, stride: int) -> Block:
        block = memory_for("interp").allocate(128 + 2 * 8 * device_cache.W_WORDS + 2 * stride)
        fields = block.words
        fields[device_cache.D_MASK], fields[device_cache.D_STRIDE] = 0, stride
        fields[device_cache.D_ENTRIES] = block.address + 128
        fields[device_cache.D_DATA] = block.address + 128 + 2 * 8 * device_cache.W_WORDS
        return block

    def _step(self, random: Random) -> tuple[str, int, bool]:
        action = "get" if self.only_gets else random.choice(("get", "get", "get", "exists", "ticket", "share"))
        return action, random.randrange(self.keys + (random.random() < 0.1)), random.random() < 0.5

    def value(self, key: int, version: int = 0) -> bytes | None:
        """Return a version of the value of a key; None for the last key, which is absent."""
        if key >= self.keys:
            return None
        count = 1 + (key + version) % 4
        if self.large and (key + version // 3) % 2:
            count = 64 * (1 + (key + version) % 4 // 2) + 2
        items = np.arange(count, dtype=np.int64) + (version << 40) + (key + 1 << 20)
        return items.tobytes()

    # -- threads --------------------------------------------------------------------------------------------

    def _thread(self, plan: list[tuple[str, int, bool]], row: int) -> None:
        for action, key, flag in plan:
            for k in range(0, ROOM, 8):
                if k < 64 or self.large:
                    store_relaxed(row + k, -1, DEVICE)
            if action == "get":
                self._get(key, row)
            elif action == "exists":
                self._exists(key, row)
            else:
                self._use_ticket(key, row, share=action == "share", hold=flag)
            for ticket in self.shared[: 1 + flag]:
                self._take(ticket, row, patient=False)
        attempt = 0
        # abandoned commands complete
        while load_relaxed(self.queue + 8 * at.Q_IN_USE, DEVICE) and attempt < 200:
            at.serve(self.queue, 1, 0, 0)
            backoff(attempt)
            attempt += 1

    def _overwrite(self, keys: list[int], row: int) -> None:
        for key in keys:
            answer = kernel_view.retrieve_for_lanes(self.core.address, key, 0, LENGTH, row, ROOM)
            if answer & 0xFFFF == at.TIMED_OUT:
                self._gave_up()

    def _get(self, key: int, row: int) -> None:
        size = self._size_of(key, row, ROOM)
        if size >= 0:
            self._check(key, row, size)

    def _exists(self, key: int, row: int) -> None:
        size = self._size_of(key, row, 0)
        if size >= 0 and not self.changing and size != len(self.value(key) or b""):
            raise Violation(f"key {key} was found with {size} bytes")
        if load_relaxed(row, DEVICE) != -1:
            raise Violation(f"a look-up of key {key} wrote {load_relaxed(row, DEVICE):#x}")

    def _size_of(self, key: int, row: int, nbytes: int) -> int:
        """Retrieve a value and return its size, or -1 if it is absent or the command timed out."""
        answer = kernel_view.retrieve_for_lanes(self.core.address, key, 0, LENGTH, row, nbytes)
        status = answer & 0xFFFF
        if status == at.TIMED_OUT:
            self._gave_up()
            return -1
        if self.value(key) is None:
            if status != kernel_view.KV_KEY_DOES_NOT_EXIST:
                raise Violation(f"key {key} is absent, and got status {status:#x}")
            return -1
        if status != 0:
            raise Violation(f"key {key} got status {status:#x}")
        return answer >> 16

    def _use_ticket(self, key: int, row: int, *, share: bool, hold: bool) -> None:
        number = kernel_view.submit_ticket(self.core.address, key, 0, LENGTH)
        if number < 0:
            return
        ticket = Ticket(number, key)
        if share:
            self.shared.append(ticket)
        if hold:
            # this needs a free id and a free return slot
            self._get((key + 1) % self.keys, row)
        self._take(ticket, row, patient=True)

    def _take(self, ticket: Ticket, row: int, *, patient: bool) -> None:
        core = self.core.address
        attempt = 0
        status = kernel_view.poll_ticket(core, ticket.number)
        while patient and status < 0:
            backoff(attempt)
            attempt += 1
            status = kernel_view.poll_ticket(core, ticket.number)
        size = kernel_view.take_ticket(core, ticket.number, row, ROOM)
        if status == at.TIMED_OUT:
            self._gave_up()
        if size == kernel_view.FAILED:
            return
        ticket.take_count += 1
        if ticket.take_count > 1:
            raise Violation(f"the ticket of key {ticket.key} was taken twice")
        value = self.value(ticket.key)
        if (value is None) != (size == kernel_view.ABSENT):
            raise Violation(f"the ticket of key {ticket.key} returned {size}")
        if value is not None:
            self._check(ticket.key, row, size, 512)

    def _gave_up(self) -> None:
        if not self.impatient:
            raise Violation("a wait was aborted, but no thread had aborted it")
        # the host resets the word after a launch
        store_relaxed(self.core.address + 8 * at.K_STOPPED, 0, DEVICE)

    def _check(self, key: int, row: int, size: int, limit: int = ROOM) -> None:
        value = self.value(key, load_relaxed(row, DEVICE) >> 40) or b""
        if size != len(value):
            raise Violation(f"key {key} has {len(value)} bytes, not {size}")
        for k in range(0, min(size, limit), 8):
            word = load_relaxed(row + k, DEVICE)
            if word != int.from_bytes(value[k : k + 8], "little"):
                raise Violation(f"word {k // 8} of key {key} is {word:#x}")
        for k in range(size, ROOM if self.changing and limit == ROOM else 0, 8):
            if load_relaxed(row + k, DEVICE) not in (-1, 0):
                raise Violation(f"word {k // 8} after the value of key {key} belongs to another version")

    # -- the whole ------------------------------------------------------------------------------------------

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation` or what device code raised."""
        try:
            self.run.run()
            self._check_end()
        finally:
            self.medium.close()
        return self.run.steps

    def _check_end(self) -> None:
        if any(self.cache.words[128 // 8 :: device_cache.W_WORDS][:2] & 1):
            raise Violation("an entry of the cache is still marked as being filled")
        if not self.impatient and self.pairs.in_use():
            raise Violation(f"{self.pairs.in_use()} ids are still taken")
        if not self.impatient and any(ticket.take_count != 1 for ticket in self.shared):
            raise Violation("a ticket was not taken")


def _start(state: int, command: int, tag: int) -> int:
    return _media[state].start(command, tag)


def _complete(state: int, answer: int) -> int:
    return _media[state].complete(answer)
