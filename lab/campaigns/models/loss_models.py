"""Lies and loss: queues with a controller that posts invalid completions, or stops.

*Lies*: another thread posts completions with a wrong cid, queue or head, of an old phase, or for a command that has
completed; the id often belongs to another command at that time. Every true command must complete as without the lies,
and the loss must be latched.

*Loss*: the controller stops at some step. Waiting threads give up, the host aborts the commands in flight, other
threads settle them, and the queues are rewound. A second controller then serves the queues, with all checks of new
queues.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from warpwell.nvme import ABORTED_BY_HOST, completion_word1, describe
from warpwell.queues import (
    ID_STATE,
    ID_STATUS,
    QueuePairs,
    drain,
    field,
    id_record,
    release_id,
    take_ready,
)
from warpwell.queues.layout import (
    BAD_COMPLETION,
    FOUND,
    FREE,
    KIND,
    LOSS_ENTRY,
    LOSS_KIND,
    LOST,
    P_CQ,
    P_CQ_DOORBELL,
    P_CQ_TAIL,
    P_POST_LOCK,
    P_SQ_HEAD,
    Q_CQ_HEAD,
    Q_CQ_LOCK,
    Q_MARKS,
)
from warpwell.queues.loss import lost
from warpwell.storage.commands import lock
from warpwell.targets.primitives import (
    DEVICE,
    SYSTEM,
    backoff,
    load_acquire,
    load_relaxed,
    store_relaxed,
    store_release,
)

from .adversary import Adversary, Violation
from .queue_model import MAX_STEPS, QueueModel, Request


class LiesModel(QueueModel):
    """One run of the scenario of lies; `seed` and `trace` as for `QueueModel`."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        self._random = Random(seed * 3 + 2)
        self._left = self._random.randint(1, 6)
        self._kinds = self._random.sample(("cid", "sqid", "sqhd", "head", "twice", "stale"), self._random.randint(1, 3))
        self._lies: list[int] = []
        self._past: list[int] = []
        """Cids of commands that have completed."""
        super().__init__(seed, trace)

    def _services(self, random: Random) -> None:
        super()._services(random)
        self.run.serve(self._lie)

    def _finish(self, request: Request, status: int) -> None:
        super()._finish(request, status)
        self._past.append(request.cid)

    def _lie(self) -> None:
        """Post one more lie, if the queue has room for it in addition to all true completions."""
        if not self._left or self._random.random() < 0.7:
            return
        lock(self.port + 8 * P_POST_LOCK)
        tail = load_relaxed(self.port + 8 * P_CQ_TAIL, SYSTEM)
        used = (tail - load_acquire(field(self.port, P_CQ_DOORBELL), SYSTEM)) & (self.depth - 1)
        made = self._make_lie(tail) if used + self.pairs.ids + 1 < self.depth else None
        if made is not None:
            word1, moves = made
            entry = field(self.port, P_CQ) + 16 * (tail & (self.depth - 1))
            store_release(entry + 8, word1, SYSTEM)
            if moves:
                self._lies.append(word1)
                store_release(self.port + 8 * P_CQ_TAIL, tail + 1, SYSTEM)
            self._left -= 1
        store_release(self.port + 8 * P_POST_LOCK, 0, SYSTEM)

    def _make_lie(self, tail: int) -> tuple[int, bool] | None:
        """Return word 1 of an entry, and whether the entry counts as a completion: with an old phase it does not."""
        random, ids = self._random, self.pairs.ids
        kind = random.choice(self._kinds)
        head = load_acquire(self.port + 8 * P_SQ_HEAD, SYSTEM)
        fresh = (tail // self.depth & 1) ^ 1
        cid, sqid, sqhd = random.randrange(ids), 1, head
        if kind == "cid":
            cid = random.choice((0x7FFF, 0x8000, 0xFFFF, 0xFFFF - ids))  # generations that a run does not reach
        elif kind == "sqid":
            sqid = random.choice((0, 2, 0xFFFF))
        elif kind == "sqhd":
            return completion_word1(random.choice((self.depth, 2 * self.depth + 1, 0xFFFF)), 1, cid, fresh, 0), True
        elif kind == "head":
            # the entry is invalid, but its head must still be checked
            cid, sqhd = 0xFFFF, head + random.randrange(self.depth)
        elif kind == "twice":
            if not self._past:
                return None
            cid = random.choice(self._past)
        else:
            return completion_word1(head & (self.depth - 1), 1, cid, fresh ^ 1, 0), False
        return completion_word1(sqhd & (self.depth - 1), sqid, cid, fresh, random.choice((0, 0x281))), True

    def _check_end(self) -> None:
        super()._check_end()
        found = self.pairs.loss()
        drained = int(self.pairs._device.words[Q_CQ_HEAD])
        drained_lies = len(self._lies) - (int(self.pairs.ports[0, P_CQ_TAIL]) - drained)
        if (found is not None) != (drained_lies > 0):
            raise Violation(f"{drained_lies} lies were drained, and the loss is {found}")
        kind, entry = (int(self.pairs._loss[k]) for k in (LOSS_KIND, LOSS_ENTRY))
        if found is not None and (kind != BAD_COMPLETION or entry not in self._lies):
            raise Violation(f"the loss is {found}, which no lie caused")


class _Dying(QueueModel):
    """The queue scenario with a controller that stops; waiting threads give up."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        self._random = Random(seed * 3 + 2)
        self._steps = self._random.choice((0, 3, 10, 30, 100))
        super().__init__(seed, trace)

    def _services(self, random: Random) -> None:
        serve = self.run.serve
        self.run.serve = lambda *steps: serve(*(self._mortal(step) for step in steps))  # type: ignore[method-assign]
        super()._services(random)

    def _mortal(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            if self._steps > 0:
                self._steps -= 1
                return step()
            store_relaxed(self.pairs.loss_address, LOST, SYSTEM)
            return 0

        return run

    def _submitter(self, own_requests: list[Request], max_held: int) -> None:
        held: list[Request] = []
        for request in own_requests:
            attempt = 0
            while not lost(self.queue) and not self._submit(request):
                if held:
                    self._wait(held.pop(0))
                else:
                    self._serve()
                    backoff(attempt)
                    attempt += 1
            if request.kind != "async" and request.cid >= 0:
                held.append(request)
            if len(held) >= max_held:
                self._wait(held.pop(0))
        for request in held:
            self._wait(request)

    def _gives_up(self, request: Request, attempt: int) -> bool:
        if lost(self.queue):
            request.kind = "orphan"  # set before other threads find it
            return True
        return super()._gives_up(request, attempt)

    def _check_end(self) -> None:
        self.controller.close()


class _After(QueueModel):
    """The queue scenario on queues that were rewound."""

    def __init__(self, pairs: QueuePairs, seed: int, trace: int = 0) -> None:
        self._rewound = pairs
        super().__init__(seed, trace)

    def _make_pairs(self, random: Random) -> QueuePairs:
        return self._rewound

    def _check_end(self) -> None:
        super()._check_end()
        if (found := self.pairs.loss()) is not None:
            raise Violation(f"the next controller is reported as lost: {found}")


class LossModel:
    """One run of the scenario of loss; `seed` and `trace` as for `QueueModel`."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        self.seed, self.trace = seed, trace
        self._random = Random(seed * 5 + 3)
        self._dying = _Dying(seed, trace)
        self.pairs, self.queue, self.bound = self._dying.pairs, self._dying.queue, self._dying.bound
        self.run: Adversary = self._dying.run

    def check(self) -> int:
        """Run all parts; return their steps. Raises `Violation` or what device code raised."""
        steps = self._dying.check()
        fields = self.pairs._device.words
        if self._random.random() < 0.3:
            # one kernel was killed while it drained, another one between its mark and the tail
            fields[Q_CQ_LOCK] = 1
            fields[(int(fields[Q_MARKS]) - self.queue) // 8] = 1
        states = {cid: self._state(cid) for cid in self.bound}
        self.pairs.abort()
        self.run = Adversary(self.seed + 1, max_steps=MAX_STEPS, trace=self.trace)
        self.run.announce_blocks(self.pairs._device, self.pairs._shared)
        for k in range(2):
            self.run.spawn(self._settle, states, name=f"settler-{k}")
        self.run.run()
        self.pairs.rewind()
        after = _After(self.pairs, self.seed + 2, self.trace)
        steps += self.run.steps
        self.run = after.run
        return steps + after.check()

    def _state(self, cid: int) -> int:
        return int(self._dying.pairs._id_records(0)[cid & (self.pairs.ids - 1), ID_STATE])

    def _settle(self, states: dict[int, int]) -> None:
        attempt = 0
        while self.bound:
            drain(self.queue, 1, 0, 0)
            cid = take_ready(self.queue)
            if cid < 0:
                backoff(attempt)
                attempt += 1
                continue
            if cid not in self.bound:
                raise Violation(f"id {cid} was settled, and was not in flight")
            request = self.bound.pop(cid)
            status = load_relaxed(id_record(self.queue, cid) + 8 * ID_STATUS, DEVICE)
            expected = request.status if states[cid] & FOUND else ABORTED_BY_HOST
            if status != expected or states[cid] & KIND == FREE:
                raise Violation(f"command {request.serial} was settled as {describe(status)}, not {describe(expected)}")
            release_id(self.queue, cid)
