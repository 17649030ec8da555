"""Drive scenario: several threads call the native functions of a drive's medium while its queues are served or lost.

A controller thread fetches commands after doorbell writes, executes them in any order, and interrupts some of them. In
half of the seeds the drive is lost at some step; commands from before still execute, late. Each command must be
completed once, with the data of its range. A lost drive must not access the buffer of a completed command.
"""

from __future__ import annotations

import contextlib
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from warpwell.drives import Drive, DriveMedium, Namespace
from warpwell.drives import medium as native
from warpwell.nvme import ABORTED_BY_HOST, COMMAND_INTERRUPTED, READ, WRITE, completion_word1, word0_cid, word0_opc
from warpwell.nvme.controller import DOORBELLS
from warpwell.queues import QueuePairs
from warpwell.storage import PENDING
from warpwell.targets import Block, memory_for
from warpwell.targets.interp.interpreter import native_functions
from warpwell.targets.primitives import SYSTEM, backoff, load_acquire, load_relaxed, store_relaxed, store_release
from warpwell.testing.media import command_of

from .adversary import Adversary, Violation

BLOCK = 512
"""Size of a block in bytes. The drive transfers only the first word; the medium copies the whole block."""
BLOCKS = 64
DEPTH = 4
"""With this depth two commands of a queue are in flight, and most commands wait."""
FILL = -77
MAX_REQUESTS, MAX_THREADS = 14, 3
COMMAND_BYTES, ANSWER_BYTES = 64, 24
"""Sizes of a command and of an answer of the native functions (`warpwell.storage.commands`)."""


def _pairs_without_lists(memory: Any, **options: Any) -> QueuePairs:
    """Return queues with rings that are smaller than a page, which PRP lists do not allow."""
    return QueuePairs(memory, **options | {"lists": False})


class DriveModel:
    """One run of the scenario; `seed` and `trace` as for `CacheModel`."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        random = self._random = Random(seed * 3 + 1)
        self.run = Adversary(seed, max_steps=60_000, trace=trace)
        self._blocks: list[Any] = []
        self.queues = random.randint(1, 2)
        self.disk = [1000 + k for k in range(BLOCKS)]
        self._bells = self.allocate(256)
        self._buffers = self.allocate(BLOCK * BLOCKS)
        self._first_words = self._buffers.words.reshape(BLOCKS, -1)[:, 0]
        """The first word of each block of the buffers."""
        self._first_words[:] = FILL
        self._commands = self.allocate(COMMAND_BYTES * MAX_REQUESTS)
        self._answers = self.allocate(ANSWER_BYTES * MAX_THREADS)
        drive = SimpleNamespace(
            model="model",
            entries=DEPTH,
            max_transfer=BLOCK,
            failure=None,
            stride=4,
            address="model",
            arena=SimpleNamespace(memory=lambda device: self),
            connect=lambda pairs: Drive.connect(drive, pairs),
            create_pair=self._create,
            release_pairs=lambda queues, generation: None,
            held=contextlib.nullcontext,
            serve=lambda user: None,
            transport=SimpleNamespace(
                dma=lambda address: address,
                native_store=lambda: (self._bells.address, 0),
                failure=None,
                generation=0,
                require=lambda generation: None,
            ),
        )
        space = Namespace.__new__(Namespace)  # without the queries of a real drive
        space.__dict__.update(
            drive=drive, block=BLOCK, nbytes=BLOCK * BLOCKS, writable=True, name="model/1", nsid=1, generation=0
        )
        self._rings: list[tuple[int, int]] = []
        native_functions[self._bells.address] = self._store
        with patch.object(native, "MIN_ENTRIES", DEPTH), patch.object(native, "QueuePairs", _pairs_without_lists):
            self.medium = DriveMedium(space, queues=self.queues, depth=DEPTH)
        self.state = self.medium._state.address
        self.run.announce_blocks(*self._blocks, self.medium._state, self.medium._waiting, self.medium._doorbells)
        self._interruptions = random.choice((0, 0, 3))
        self._dies = random.choice((-1, -1, 0, 2, 5, 10))
        """Number of commands that are executed before the drive is lost; -1 if it is not lost."""
        self._refuses = random.random() < 0.5
        self.dead = False
        self._make_requests(random)
        threads = random.randint(2, MAX_THREADS)
        for k in range(threads):
            self.run.spawn(self._serve, k, threads, name=f"service-{k}")
        self.run.spawn(self._control, name="controller")

    def allocate(self, nbytes: int) -> Block:
        """Return memory of the interpreter, and register it for the run."""
        block = memory_for("interp").allocate(nbytes)
        self._blocks.append(block)
        return block

    allocate_shared = allocate

    def _create(self, submission: int, completion: int, entries: int) -> int:
        self._rings.append((submission, completion))
        return len(self._rings)

    def _make_requests(self, random: Random) -> None:
        self.requests: list[tuple[int, int, int, int]] = []  # opcode, first block, blocks, first word of the buffer
        first, at = 0, 0
        commands = self._commands.words.reshape(MAX_REQUESTS, -1)
        while first < BLOCKS - 4 and len(self.requests) < MAX_REQUESTS:
            count = random.randint(1, 4)
            opcode = random.choice((READ, WRITE))
            if opcode == WRITE:
                self._first_words[at : at + count] = [5000 + first + k for k in range(count)]
            commands[len(self.requests)] = command_of(opcode, first * BLOCK, count * BLOCK, self._buffer(at))
            self.requests.append((opcode, first, count, at))
            first, at = first + count, at + count
        self.answers: dict[int, int] = {}
        self._contents: dict[int, list[int]] = {}

    def _buffer(self, at: int) -> int:
        return self._buffers.address + BLOCK * at

    # -- the drive

    def _bell(self, offset: int) -> int:
        return self._bells.address + 2 * (offset - DOORBELLS)

    def _store(self, state: int, offset: int, value: int, *_: int) -> int:
        if self.dead and self._refuses:
            return -1
        store_release(self._bell(offset), value, SYSTEM)
        return 0

    def _control(self) -> None:
        fetched, posted = [0] * self.queues, [0] * self.queues
        going: list[tuple[int, list[int]]] = []
        attempt = done = 0
        while len(self.answers) < len(self.requests) or going:
            for k, (submission, _) in enumerate(self._rings):
                tail = load_acquire(self._bell(DOORBELLS + 8 * (k + 1)), SYSTEM)
                while fetched[k] & (DEPTH - 1) != tail:
                    entry = submission + 64 * (fetched[k] & (DEPTH - 1))
                    going.append((k, [load_relaxed(entry + 8 * w, SYSTEM) for w in range(8)]))
                    fetched[k] += 1
            if not self.dead and done == self._dies:
                self.dead = True
                if not self._refuses:
                    store_relaxed(self.state + 8 * native.M_FAILED, native.FAILED_BY_HOST, SYSTEM)
            number = self._random.randrange(len(going)) if going else 0
            if not going or not self._execute(*going[number], fetched, posted):
                if self.dead and len(self.answers) == len(self.requests):
                    return  # no thread reads completions any more
                backoff(attempt)
                attempt += 1
                continue
            del going[number]
            done, attempt = done + 1, 0

    def _execute(self, k: int, command: list[int], fetched: list[int], posted: list[int]) -> bool:
        """Execute a command and post its completion, if the queue has room."""
        head = load_acquire(self._bell(DOORBELLS + 8 * (k + 1) + 4), SYSTEM)
        if (posted[k] - head) & (DEPTH - 1) == DEPTH - 1:
            return False
        status = 0
        first, opcode = command[5], word0_opc(command[0])
        if command[6] or opcode not in (READ, WRITE) or not 0 <= first < BLOCKS:
            raise Violation(f"the command {command}")
        if self._interruptions and self._random.random() < 0.3:
            self._interruptions -= 1
            status = COMMAND_INTERRUPTED
        elif opcode == READ:
            store_relaxed(command[3], self.disk[first], SYSTEM)
        else:
            self.disk[first] = load_relaxed(command[3], SYSTEM)
        entry = self._rings[k][1] + 16 * (posted[k] & (DEPTH - 1))
        phase = (posted[k] // DEPTH & 1) ^ 1
        store_release(
            entry + 8, completion_word1(fetched[k] & (DEPTH - 1), k + 1, word0_cid(command[0]), phase, status), SYSTEM
        )
        posted[k] += 1
        return True

    # -- threads that call the medium

    def _serve(self, number: int, threads: int) -> None:
        for tag in range(number, len(self.requests), threads):
            status = native.drive_start.function(self.state, self._commands.address + COMMAND_BYTES * tag, tag)
            if status != PENDING:
                self._answered(tag, status)
        attempt, answer = 0, self._answers.address + ANSWER_BYTES * number
        while len(self.answers) < len(self.requests):
            if native.drive_complete.function(self.state, answer):
                self._answered(load_relaxed(answer, SYSTEM), load_relaxed(answer + 8, SYSTEM))
                attempt = 0
            else:
                backoff(attempt)
                attempt += 1

    def _answered(self, tag: int, status: int) -> None:
        if tag in self.answers:
            raise Violation(f"command {tag} was answered twice")
        opcode, first, count, at = self.requests[tag]
        if status not in ((0, ABORTED_BY_HOST) if self.dead else (0,)):
            raise Violation(f"command {tag} has status {status:#x}")
        self._contents[tag] = [load_relaxed(self._buffer(at + k), SYSTEM) for k in range(count)]
        if opcode == READ and status == 0 and self._contents[tag] != [1000 + first + k for k in range(count)]:
            raise Violation(f"command {tag} read {self._contents[tag]} from block {first}")
        self.answers[tag] = status

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation` or what device code raised."""
        try:
            self.run.run()
        finally:
            native_functions.pop(self._bells.address, None)
            self.medium.seconds = 0.0  # a stopped thread does not release its lock
            self.medium.close()
        for tag, (opcode, first, count, at) in enumerate(self.requests):
            if self._first_words[at : at + count].tolist() != self._contents[tag]:
                raise Violation(f"the buffer of command {tag} changed after its answer")
            expected = [5000 + first + k for k in range(count)]
            if opcode == WRITE and not self.answers[tag] and self.disk[first : first + count] != expected:
                raise Violation(f"command {tag} wrote {self.disk[first : first + count]}")
        return self.run.steps
