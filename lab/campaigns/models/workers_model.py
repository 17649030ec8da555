"""Workers scenario: kernels on one GPU whose workers are re-issued, stop, resume, change their number, or are queued
after the workers of another kernel.

`CudaExecutor` and the workers' `claim` run unchanged, on launch queues and words of a small scheduler that switches
threads at each access to a word that workers share. Blocks compute nothing; the model counts their executions.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent

from warpwell.scheduler import Profile
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.scheduler.extend import Ended, Job, Placement, Request, Task
from warpwell.targets.blocks import cuda
from warpwell.targets.blocks.control import CONTROL_WORDS

from .adversary import Violation
from .service_model import Scheduler

RESIDENT, ROOM = 3, 5
"""Largest number of workers of one kernel, and of all kernels. Next to one kernel a second one fits only partly."""
CHANGES = 12
RECORDS = 1 << 20
"""Address of control records."""
PINNED = 1 << 40
"""Address of the progress words."""


class _Stream:
    """Operations that a separate thread executes one after another."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.operations: list[Callable[[], None]] = []
        self.busy = False
        self._scheduler = scheduler
        scheduler.spawn(self._work)

    def _work(self) -> None:
        while True:
            self._scheduler.pause(lambda: bool(self.operations))
            self.busy = True
            self.operations.pop(0)()
            self.busy = False

    @property
    def idle(self) -> bool:
        return not self.operations and not self.busy


class _LaunchQueue:
    """Model of `LaunchQueue`, with a separate thread that launches its rows as operations of a stream."""

    room = 1024

    def __init__(self, queues: _LaunchQueues) -> None:
        self.stream = queues.streams[next(queues.numbers) % len(queues.streams)]
        self._queues = queues
        self._rows: list[Any] = []
        self.polled = self._launched = 0
        queues.scheduler.spawn(self._launch)

    def _launch(self) -> None:
        while True:
            self._queues.scheduler.pause(lambda: len(self._rows) > self._launched)
            row = self._rows[self._launched]
            if row.ready:
                row.ready = False
                if callable(row.operation):
                    self.stream.operations.append(row.operation)
                self.stream.operations.append(partial(self._end, row))
            else:
                self._queues.news += 1
            self._launched += 1

    def launched(self, number: int) -> bool:
        self._queues.scheduler.pause(lambda: self._launched > number)
        return True

    def _end(self, row: Any) -> None:
        row.ended = True
        self._queues.news += 1

    def push(self, operation: Any, expected: float, owner: Any, timer: tuple[int, int] = (0, 0)) -> int:
        row = SimpleNamespace(operation=operation, owner=owner, ready=True, ended=False, withdrawn=False)
        self._rows.append(row)
        return len(self._rows) - 1

    def withdraw(self, number: int) -> bool:
        row = self._rows[number]
        ready, row.ready = row.ready, False
        row.withdrawn |= ready
        return bool(ready)

    def withdrawable(self, number: int) -> bool:
        return bool(self._rows[number].ready)

    def follows(self, number: int, owner: Any) -> bool:
        return any(row.owner is not owner for row in self._rows[self.polled : number])

    @property
    def empty(self) -> bool:
        return self.polled == len(self._rows)

    def poll_completions(self) -> list[tuple[Any, int, float, float]]:
        found = []
        while not self.empty and (self._rows[self.polled].ended or self._rows[self.polled].withdrawn):
            row = self._rows[self.polled]
            self.polled += 1
            found.append((row.owner, -1 if row.withdrawn else 0, 0.0, 0.0))
        return found


class _LaunchQueues:
    """Model of `LaunchQueues`."""

    def __init__(self, scheduler: Scheduler, streams: int) -> None:
        self.scheduler = scheduler
        self.news = 0
        self.streams = [_Stream(scheduler) for _ in range(streams)]
        """Possibly fewer streams than launch queues, as if launch queues shared queues of the GPU."""
        self.numbers = itertools.count()
        self._idle: list[_LaunchQueue] = []

    def take(self, priority: int) -> _LaunchQueue:
        return self._idle.pop() if self._idle else _LaunchQueue(self)

    def put(self, queue: _LaunchQueue) -> None:
        self._idle.append(queue)

    def nudge(self) -> None:
        pass


class _ProgressWords:
    """The progress words."""

    def __init__(self, memory: dict[int, int]) -> None:
        self._memory = memory

    def __getitem__(self, number: int) -> int:
        return self._memory[PINNED + 8 * number]

    def __setitem__(self, number: int, value: int) -> None:
        self._memory[PINNED + 8 * number] = value


class _Gpu:
    """Model of `Gpu`."""

    device = "cpu"
    processors, registers, shared, threads, clock = 1, 1 << 18, 1 << 17, 2048, 1e9
    name, bandwidth, cache = "model", 1e10, 0

    def __init__(self, model: WorkersModel) -> None:
        self.model, self.scheduler = model, model.scheduler
        self.memory: dict[int, int] = defaultdict(int)
        self._control = _Stream(self.scheduler)
        self.launch_queues = _LaunchQueues(self.scheduler, model.random.choice((1, 2, 50)))

    def enter(self) -> None:
        pass

    close = enter

    def memory_info(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def at_hand(self, launch: Any, args: Any) -> bool:
        return True

    def allocate(self, nbytes: int) -> Any:
        # the model uses only the first records
        return SimpleNamespace(address=RECORDS, write=lambda at, fields: self._keep(fields[: 4 * CONTROL_WORDS]))

    def allocate_shared(self, nbytes: int) -> Any:
        return SimpleNamespace(address=PINNED, words=_ProgressWords(self.memory))

    def _keep(self, fields: Any) -> None:
        self.memory.update((RECORDS + 8 * k, int(word)) for k, word in enumerate(fields))

    def forms(self, blocks: Any) -> Any:
        return blocks

    def synchronize(self, stream: _Stream) -> None:
        self.scheduler.pause(lambda: stream.idle)

    def set_word(self, address: int, value: int) -> None:
        self._control.operations.append(lambda: self._store(address, [value]))

    def _store(self, address: int, values: Sequence[int]) -> None:
        for k, value in enumerate(values):
            self.scheduler.pause()
            self.memory[address + 8 * k] = int(value)

    def wait_word(self, stream: _Stream, address: int, minimum: int) -> None:
        stream.operations.append(lambda: self.scheduler.pause(lambda: self.memory[address] >= minimum))

    def read_words(self, address: int, count: int) -> Any:
        self.synchronize(self._control)
        return np.array([self.memory[address + 8 * k] for k in range(count)], np.int64)


class _Blocks:
    """Model of `BlockLaunch` and its `Forms`; counts the executions of each block."""

    preemptible = ends_at_once = True

    def __init__(self, model: WorkersModel, blocks: int) -> None:
        self.model, self.blocks = model, blocks
        self.ran = [0] * blocks
        self.live = 0
        self.control = 0
        self.before: _Blocks | None = None
        """The kernel that it was queued after, until that kernel was preempted."""
        model.made.append(self)

    def begin(self) -> None:
        pass

    prepare = end = abort = begin

    def resources(self, form: str) -> dict[str, int]:
        return {"resident": RESIDENT}

    @property
    def left(self) -> int:
        """Number of blocks that no worker has claimed."""
        return self.blocks - self.model.gpu.memory[self.control + cuda.CURSOR] if self.control else self.blocks

    def workers_row(self, control: int, base: int, workers: int, chunk: int = 1) -> Callable[[], None]:
        self.control = control

        def operation() -> None:
            left = [workers]
            for k in range(workers):
                self.model.scheduler.spawn(partial(self._work, control, base + k, chunk, left))
            self.model.scheduler.pause(lambda: not left[0])

        return operation

    def _work(self, control: int, number: int, chunk: int, left: list[int]) -> None:
        model = self.model
        model.scheduler.pause(lambda: model.resident < ROOM)
        model.resident += 1
        cuda.enter(control)  # type: ignore[no-untyped-call]
        ended = 0
        while True:
            first = cuda.claim(control, number, chunk, ended)  # type: ignore[no-untyped-call]
            if first < 0 or first >= self.blocks:
                break
            if self.before is not None and self.before.left > 0:
                raise Violation(f"a kernel started before its predecessor, which has {self.before.left} blocks left")
            if not ended:
                self.live += 1
            if self.live > RESIDENT:
                raise Violation(f"{self.live} workers of a kernel that is limited to {RESIDENT}")
            last = min(first + chunk, self.blocks)
            for block in range(first, last):
                model.scheduler.pause()
                self.ran[block] += 1
                if self.ran[block] > 1:
                    raise Violation(f"block {block} ran {self.ran[block]} times")
            ended = last - first
        self.live -= ended > 0
        cuda.leave(control)  # type: ignore[no-untyped-call]
        model.resident -= 1
        left[0] -= 1


class WorkersModel:
    """One run of the scenario; see `QueueModel`."""

    def __init__(self, seed: int, trace: int = 0) -> None:
        self.random = Random(seed * 2 + 1)
        self.scheduler = self.run = Scheduler(seed)
        self.gpu = _Gpu(self)
        self.resident = 0
        self.made: list[_Blocks] = []
        self.over = False
        self._claims: dict[Any, int] = {}

    def load(self, address: int, scope: Any = None) -> int:
        self.scheduler.pause()
        return self.gpu.memory[address]

    def load_pair(self, address: int) -> tuple[int, int]:
        return self.load(address), self.load(address + 8)

    def store(self, address: int, value: int, scope: Any = None) -> None:
        self.scheduler.pause()
        if address >= PINNED:
            blocks = next(b for b in self.made if self.gpu.memory[b.control + cuda.MIRROR] & -64 == address)
            if value > sum(blocks.ran):
                raise Violation(f"{value} blocks are reported as ended, and {sum(blocks.ran)} have ended")
        self.gpu.memory[address] = value

    def add(self, address: int, value: int) -> int:
        self.scheduler.pause()
        before = self.gpu.memory[address]
        self.gpu.memory[address] = before + value
        return before

    def check(self) -> int:
        """Run the interleaving; return its steps. Raises `Violation`."""
        with self._replaced():
            self.scheduler.spawn(self._host)
            self.scheduler.run(lambda: self.over, lambda: False)
        return self.scheduler.steps

    def _placement(self) -> dict[str, Any]:
        return {"workers": self.random.choice((1, 2, None))}

    def _host(self) -> None:
        """Launch some kernels, change them at random, and check the events that they report."""
        executor = CudaExecutor(gpu=self.gpu)
        executor._time = executor.now = lambda: 1e-6 * self.scheduler.now  # type: ignore[method-assign]
        jobs: dict[Job, _Blocks] = {}
        for _ in range(self.random.choice((2, 2, 3))):
            blocks = _Blocks(self, self.random.randint(4, 20))
            launch = SimpleNamespace(cut=lambda args, device, blocks=blocks: blocks)
            task = Task("k", blocks.blocks, Profile(seconds=1e-3), launch=launch)
            jobs[Job(task, Request("k", [task]), 0.0)] = blocks
        running: set[Job] = set()
        leaving: set[Job] = set()
        predecessors: dict[Job, Job] = {}
        """For each job the job that it was queued after, or whose workers it takes over."""
        changes = CHANGES
        while jobs:
            for job in list(jobs):
                if job not in running:
                    placement = Placement(**self._placement())
                    peers = [peer for peer in jobs if peer in running]
                    self.random.shuffle(peers)
                    peer = peers[0] if peers else None
                    jobs[job].before = None
                    predecessors.pop(job, None)
                    if peer is None or self.random.random() < 0.4:
                        executor.launch(job, placement)
                    elif executor.launch_behind(job, placement, peer):
                        jobs[job].before = None if peer in leaving else jobs[peer]
                        predecessors[job] = peer
                    else:
                        continue
                    running.add(job)
                elif changes and self.random.random() < 0.3:
                    changes -= 1
                    if self.random.random() < 0.3:
                        for blocks in jobs.values():
                            blocks.before = None if blocks.before is jobs[job] else blocks.before
                        leaving.add(job)
                        executor.preempt(job)
                    else:
                        executor.resize(job, **self._placement(), younger=self.random.random() < 0.5)
            until = self.scheduler.now + self.random.randint(0, 40)
            self.scheduler.pause(lambda until=until: self.scheduler.now >= until)  # type: ignore[misc]
            for event in executor.poll():
                running.remove(event.job)
                leaving.discard(event.job)
                if event.job in predecessors and (isinstance(event, Ended) or event.done > event.job.done):
                    raise Violation("a kernel is reported as left before its predecessor")
                predecessors = {job: p for job, p in predecessors.items() if p is not event.job}
                blocks = jobs[event.job]
                if blocks.live:
                    raise Violation(f"{blocks.live} workers run of a kernel that is reported as left")
                if isinstance(event, Ended):
                    if event.error is not None:
                        raise event.error
                    del jobs[event.job]
                event.job.done = sum(blocks.ran)
                ended = blocks.blocks if isinstance(event, Ended) else event.done
                if event.job.done != ended or blocks.ran != [1] * ended + [0] * (blocks.blocks - ended):
                    raise Violation(f"blocks ran {blocks.ran}, and {ended} are reported as ended")
        self.over = True

    @contextlib.contextmanager
    def _replaced(self) -> Iterator[None]:
        new = {
            "barrier": lambda: None,
            "thread_index": lambda: 0,
            "fetch_add_as": lambda address, value, dtype: self.add(address, value),
            "load_pair": self.load_pair,
            "load_relaxed": self.load,
            "store_relaxed": self.store,
            "put_claim": lambda value: self._claims.__setitem__(getcurrent(), value),
            "get_claim": lambda: self._claims[getcurrent()],
        }
        before = {name: getattr(cuda, name) for name in new}
        try:
            for name, value in new.items():
                setattr(cuda, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(cuda, name, value)
