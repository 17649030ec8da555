"""Queue scenario: many submitters on a tiny ring under one interleaving, checked against a model.

Every command has its own block with its own pattern, and often its own status. So the model detects a command that is
lost, duplicated or corrupted, or that gets the completion or data of another command.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from warpwell.nvme import READ, WRITE, command_word0, command_word6
from warpwell.queues import (
    ASYNC,
    ID_STATE,
    ID_STATUS,
    ORPHAN,
    QueuePairs,
    drain,
    id_record,
    orphan,
    poll,
    release_id,
    staging_of,
    state_word,
    submit,
    take_id,
    take_ready,
)
from warpwell.queues.layout import (
    FREE,
    ID_WORDS,
    KIND,
    P_SQ_HEAD,
    Q_IDS,
    Q_MARKS,
    Q_READY_HEAD,
    Q_READY_TAIL,
    Q_SQ,
    Q_SQ_DOORBELL,
    Q_TAIL,
    Q_TICKET,
)
from warpwell.storage import Controller
from warpwell.targets import memory_for
from warpwell.targets.primitives import DEVICE, backoff, load_relaxed, store_relaxed, store_release

from .adversary import Adversary, Violation
from .scripted_medium import BLOCK, ScriptedMedium

MAX_STEPS = 200_000
DATA_WORDS = 8
"""Number of 8-byte words that each command transfers."""


@dataclass
class Request:
    """A command of the scenario and its state."""

    serial: int
    opcode: int
    kind: str
    """wait, async, or orphan (the submitter gives up after some polls)."""
    status: int
    looks: int
    cid: int = -1
    size: int = 0
    started: bool = False
    moved: bool = False
    completed: bool = False

    def word(self, index: int) -> int:
        """Return word `index` of its data."""
        return ((self.serial + 1) << 20) | (self.opcode << 8) | index


class QueueModel:
    """One run of the queue scenario.

    Parameters
    ----------
    seed : int
        Selects the scenario and the interleaving.
    trace : int
        Number of accesses to keep for the report.
    """

    results = False
    """Whether the pair keeps dw0 of completions."""
    medium: Any

    def __init__(self, seed: int, trace: int = 0) -> None:
        random = Random(seed * 2 + 1)
        self.run = Adversary(seed, max_steps=MAX_STEPS, trace=trace)
        self.pairs = self._make_pairs(random)
        self.depth = self.pairs.depth
        # the maximum number of threads; one pair uses two of them
        self.controller = Controller(self.pairs, threads=3, interpreted=True, window=self._window(random))
        self.queue, self.port = self.pairs.record(0), self.pairs.port(0)
        self.bound: dict[int, Request] = {}
        self.entered = 0
        threads = random.randint(3, 6)
        each = random.randint(2, 7)
        self.requests = [self._request(random, n) for n in range(threads * each)]
        self.nsid = self._attach(seed)
        for k in range(threads):
            own_requests = self.requests[k * each : (k + 1) * each]
            self.run.spawn(self._submitter, own_requests, random.choice((1, 1, 2, 3)), name=f"submitter-{k}")
        self._services(random)
        self._watch()

    def _make_pairs(self, random: Random) -> QueuePairs:
        depth = random.choice((4, 4, 8))
        return QueuePairs(memory_for("interp"), count=1, depth=depth, staging_bytes=BLOCK, results=self.results)

    def _window(self, random: Random) -> int:
        return 0

    def _attach(self, seed: int) -> int:
        medium = self.medium = ScriptedMedium(
            BLOCK * len(self.requests), seed, moved=8 * DATA_WORDS, on_start=self._started, on_move=self._moved
        )
        for request in self.requests:
            if request.opcode == READ:
                medium.block_of(request.serial)[: 8 * DATA_WORDS] = self._bytes(request)
        return self.controller.attach(medium)

    def _request(self, random: Random, serial: int) -> Request:
        kind = random.choice(("wait", "wait", "wait", "async", "orphan"))
        status = random.choice((0, 0, serial + 1))
        return Request(serial, random.choice((READ, READ, WRITE)), kind, status, random.randint(0, 3))

    @staticmethod
    def _bytes(request: Request) -> bytes:
        return b"".join(request.word(k).to_bytes(8, "little") for k in range(DATA_WORDS))

    def _services(self, random: Random) -> None:
        controller = self.controller
        steps = list(controller.services())
        if random.random() < 0.5:
            steps.append(lambda: controller.step(1))
        if random.random() < 0.5:
            steps.append(lambda: controller.complete(2))
        self.run.serve(*steps)
        self.run.announce_blocks(
            self.pairs._device,
            self.pairs._shared,
            *self.controller.blocks(),
            self.medium.order,
        )

    def _watch(self) -> None:
        watched = self.run.watched
        fields = self.pairs._device.words
        mask = self.depth - 1
        rung = [0]
        unread = [False] * self.depth

        def doorbell(value: int) -> None:
            step = (value - rung[0]) & mask
            rung[0] += step
            if not 0 < step <= self.pairs.ids or rung[0] > self.entered:
                raise Violation(f"the doorbell moved by {step} entries to {rung[0]} of {self.entered} submitted")

        def entry(position: int, _value: int) -> None:
            if unread[position]:
                raise Violation(f"ring entry {position} was overwritten before it was read")
            unread[position] = True

        read = [0]

        def fetched(value: int) -> None:
            for position in range(read[0], value):
                unread[position & mask] = False
            if value < read[0]:
                raise Violation(f"the controller's head went back from {read[0]} to {value}")
            read[0] = value

        watched[int(fields[Q_SQ_DOORBELL])] = doorbell
        for position in range(self.depth):
            watched[int(fields[Q_SQ]) + 64 * position] = partial(entry, position)
        watched[self.port + 8 * P_SQ_HEAD] = fetched

    # -- the medium's side ----------------------------------------------------------------------------------

    def _started(self, opcode: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
        request = self._of(tag & 0xFFFF, "a command arrived")
        if request.started:
            raise Violation(f"command {request.serial} was fetched twice")
        request.started = True
        expected = (request.opcode, request.serial * BLOCK, BLOCK, staging_of(self.queue, request.cid))
        if (opcode, offset, nbytes, buffer) != expected:
            raise Violation(f"command {request.serial} arrived as {opcode, offset, nbytes, buffer}, not {expected}")
        return request.status

    def _moved(self, opcode: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
        request = self._of(tag & 0xFFFF, "data moved")
        if request.serial != offset // BLOCK or request.moved:
            raise Violation(f"data of block {offset // BLOCK} moved for command {request.serial}")
        request.moved = True
        return 0

    def _of(self, cid: int, event: str) -> Request:
        if cid not in self.bound:
            raise Violation(f"{event} for id {cid}, which is not in use")
        return self.bound[cid]

    # -- the submitters' side -------------------------------------------------------------------------------

    def _submitter(self, own_requests: list[Request], max_held: int) -> None:
        held: list[Request] = []
        for request in own_requests:
            attempt = 0
            # a thread that holds an id must not wait for another id: that would be a deadlock of the test
            while not self._submit(request):
                if held:
                    self._wait(held.pop(0))
                else:
                    self._serve()
                    backoff(attempt)
                    attempt += 1
            if request.kind != "async":
                held.append(request)
            if len(held) >= max_held:
                self._wait(held.pop(0))
        for request in held:
            self._wait(request)
        attempt = 0
        while not all(request.completed for request in own_requests):
            self._serve()
            backoff(attempt)
            attempt += 1

    def _submit(self, request: Request) -> bool:
        queue = self.queue
        cid = take_id(queue, 1 if request.kind == "async" and self.depth > 4 else 0)
        if cid < 0:
            return False
        if any((cid ^ bound) & (self.pairs.ids - 1) == 0 for bound in self.bound):
            raise Violation(f"id {cid} was handed out twice")
        self.bound[cid] = request
        request.cid = cid
        staging = staging_of(queue, cid)
        for k in range(DATA_WORDS):
            # the buffer of a read starts with other data
            store_relaxed(staging + 8 * k, request.word(k) if request.opcode == WRITE else -1, DEVICE)
        if request.kind == "async":
            store_release(id_record(queue, cid) + 8 * ID_STATE, state_word(queue, cid, ASYNC), DEVICE)
        self.entered += 1
        if not self._enter(request, command_word0(request.opcode, cid, self.nsid), staging):
            raise Violation(f"command {request.serial} found no room in the ring")
        return True

    def _enter(self, request: Request, word0: int, staging: int) -> bool:
        return bool(submit(self.queue, word0, staging, 0, request.serial, command_word6(0, 0)))

    def _wait(self, request: Request) -> None:
        attempt = 0
        while True:
            status = poll(self.queue, request.cid)
            if status < 0 and self._gives_up(request, attempt):
                status = orphan(self.queue, request.cid, ORPHAN)
                if status < 0:
                    return
            if status >= 0:
                self._finish(request, status)
                return
            self._serve()
            backoff(attempt)
            attempt += 1

    def _gives_up(self, request: Request, attempt: int) -> bool:
        return request.kind == "orphan" and attempt >= request.looks

    def _serve(self) -> None:
        drain(self.queue, 1, 0, 0)
        cid = take_ready(self.queue)
        if cid >= 0:
            request = self._of(cid, "a completion was ready")
            if request.kind == "wait":
                raise Violation(f"command {request.serial} has a waiter, but its completion was handed out")
            self._finish(request, load_relaxed(id_record(self.queue, cid) + 8 * ID_STATUS, DEVICE))

    def _finish(self, request: Request, status: int) -> None:
        if request.completed:
            raise Violation(f"command {request.serial} completed twice")
        if not request.moved:
            raise Violation(f"command {request.serial} completed before the medium was done")
        if status != request.status:
            raise Violation(f"command {request.serial} got status {status}, not its own {request.status}")
        self._check_data(request, status)
        request.completed = True
        del self.bound[request.cid]
        release_id(self.queue, request.cid)

    def _check_data(self, request: Request, status: int) -> None:
        staging = staging_of(self.queue, request.cid)
        if status == 0 and request.opcode == READ:
            for k in range(DATA_WORDS):
                word = load_relaxed(staging + 8 * k, DEVICE)
                if word != request.word(k):
                    raise Violation(f"command {request.serial} read {word:#x}, not {request.word(k):#x}")

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
        total = len(self.requests)
        queue = self.pairs._device.words
        port = self.pairs.ports[0]
        counts = (int(queue[Q_TICKET]), int(queue[Q_TAIL]), int(port[P_SQ_HEAD]))
        if counts != (total,) * 3:
            raise Violation(f"{total} commands, but ticket, tail and fetched are {counts}")
        if self.pairs.in_use() or self.bound:
            raise Violation(f"{self.pairs.in_use()} ids are still taken")
        first = (int(queue[Q_IDS]) - self.queue) // 8 + ID_STATE
        states = queue[first : first + ID_WORDS * self.pairs.ids : ID_WORDS]
        marks = (int(queue[Q_MARKS]) - self.queue) // 8
        ready = int(queue[Q_READY_TAIL] - queue[Q_READY_HEAD])
        if (states & KIND != FREE).any() or queue[marks : marks + self.depth].any() or ready:
            raise Violation("an id, a mark or a ready completion was left over")
        self._check_stored()

    def _check_stored(self) -> None:
        for request in self.requests:
            data = bytes(self.medium.block_of(request.serial)[: 8 * DATA_WORDS])
            is_stored = request.opcode == READ or request.status == 0
            if data != (self._bytes(request) if is_stored else bytes(8 * DATA_WORDS)):
                raise Violation(f"block {request.serial} holds other data than command {request.serial} wrote")
