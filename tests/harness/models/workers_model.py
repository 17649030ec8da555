"""Workers scenario: kernels whose workers are relieved by others, stop, go on, and change their number, on one GPU.

`CudaExecutor` and the workers' `claim` run as they are, on streams, events and words of a small scheduler that switches
at each access to a word that workers share. No block computes anything: it is counted.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent

from warpwell.scheduler import Ended, Job, Placement, Profile, Request, Task
from warpwell.scheduler.executors.cuda_executor import CudaExecutor
from warpwell.targets.blocks import cuda
from warpwell.targets.blocks.control import SLOTS, mirror_word

from .adversary import Violation
from .service_model import Scheduler

RESIDENT, ROOM = 3, 5
"""Workers of one kernel, and of all, at most: a second kernel finds some room beside the first, not enough."""
CHANGES = 12
PINNED = 1 << 40
"""Address of the pinned record, of one kernel after the other."""


class _Stream:
    """Operations, done one after the other by a thread of its own."""

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


class _Gpu:
    """Stands for `Gpu`; see there."""

    device = "cpu"
    processors, registers, shared, threads, clock = 1, 1 << 18, 1 << 17, 2048, 1e9
    name, bandwidth, cache = "model", 1e10, 0

    def __init__(self, model: WorkersModel) -> None:
        self.model, self.scheduler = model, model.scheduler
        self.memory: dict[int, int] = defaultdict(int)
        self._idle: list[_Stream] = []
        self._control = _Stream(self.scheduler)
        self.lines = SimpleNamespace(news=0, wake=self.enter, nudge=self.enter, close=self.enter)  # nothing runs whole

    def enter(self) -> None:
        pass

    close = enter

    def free_memory(self) -> int:
        return 1 << 30

    def at_hand(self, launch: Any, args: Any) -> bool:
        return True

    def allocate(self, nbytes: int) -> Any:
        return SimpleNamespace(address=1 << 20)

    def forms(self, blocks: Any) -> Any:
        return blocks

    def stream(self, priority: int = 0) -> _Stream:
        return self._idle.pop() if self._idle else _Stream(self.scheduler)

    def release(self, stream: _Stream) -> None:
        self._idle.append(stream)

    def mark(self, stream: _Stream, timing: bool = False) -> Any:
        event = SimpleNamespace(done=False)
        stream.operations.append(lambda: setattr(event, "done", True))
        return event

    def done(self, event: Any) -> bool:
        return bool(event.done)

    def after(self, stream: _Stream, event: Any) -> None:
        stream.operations.append(lambda: self.scheduler.pause(lambda: event.done))

    def synchronize(self, stream: _Stream) -> None:
        self.scheduler.pause(lambda: stream.idle)

    def set_word(self, address: int, value: int) -> None:
        self._control.operations.append(lambda: self._store(address, [value]))

    def set_words(self, stream: _Stream, address: int, words: Sequence[int]) -> None:
        self._control.operations.append(lambda: self._store(address, words))
        self.after(stream, self.mark(self._control))

    def _store(self, address: int, words: Sequence[int]) -> None:
        for k, value in enumerate(words):
            self.scheduler.pause()
            self.memory[address + 8 * k] = int(value)

    def wait_word(self, stream: _Stream, address: int, least: int) -> None:
        self.after(stream, self.mark(self._control))
        stream.operations.append(lambda: self.scheduler.pause(lambda: self.memory[address] >= least))

    def read_words(self, address: int, count: int) -> Any:
        self.synchronize(self._control)
        return np.array([self.memory[address + 8 * k] for k in range(count)], np.int64)


class _Blocks:
    """Stands for `BlockLaunch` and its `Forms`: counts how often each block ran."""

    preemptible = ends_at_once = True

    def __init__(self, model: WorkersModel, blocks: int) -> None:
        self.model, self.blocks = model, blocks
        self.ran = [0] * blocks
        self.live = 0
        self.going: dict[int, int] = {}
        """Workers that have blocks to run, of each launch by its slot."""
        self.pinned = PINNED + (len(model.made) << 10)
        self._slot = 0
        model.made.append(self)

    def told(self, word: int, value: int) -> None:
        """Check what a worker writes to the pinned record."""
        slot = (word - cuda.ENDED) // 8
        if word == cuda.PROGRESS and value > sum(self.ran):
            raise Violation(f"{value} blocks are said to have ended, and {sum(self.ran)} have")
        if word >= cuda.ENDED and (self.going.get(slot) != 0 or self.pinned + word in self.model.gpu.memory):
            raise Violation(f"a launch is said to have ended, of which {self.going.get(slot)} workers run")

    def begin(self) -> None:
        pass

    prepare = end = abort = begin

    def resources(self, form: str) -> dict[str, int]:
        return {"resident": RESIDENT}

    def start(self, control: int, base: int, workers: int, stream: _Stream, chunk: int = 1, rounds: int = 1,
              slot: int = 0) -> None:  # fmt: skip
        slot = self._slot = (self._slot + 1) % SLOTS
        ended = self.pinned + cuda.ENDED + 8 * slot

        def operation() -> None:
            if slot in self.going:
                raise Violation(f"{SLOTS} launches of a kernel are in flight")
            self.going[slot] = workers
            left = [workers]
            self.model.gpu.memory[control + cuda.MIRROR] = mirror_word(self.pinned, self.blocks)
            for k in range(workers):
                self.model.scheduler.spawn(partial(self._work, control, base, k, chunk, left, workers, slot))
            self.model.scheduler.pause(lambda: not left[0])
            if not self.model.gpu.memory.pop(ended, 0):
                raise Violation("all workers have left, and the pinned record does not say so")
            del self.going[slot]

        stream.operations.append(operation)

    def _work(self, control: int, base: int, number: int, chunk: int, left: list[int], workers: int,
              slot: int) -> None:  # fmt: skip
        model = self.model
        model.scheduler.pause(lambda: model.resident < ROOM)
        model.resident += 1
        self.live += 1
        if self.live > RESIDENT:
            raise Violation(f"{self.live} workers of a kernel that may have {RESIDENT}")
        cuda.enter(control, number, slot)  # type: ignore[no-untyped-call]
        ended = 0
        while True:
            first = cuda.claim(control, base + number, chunk, ended)  # type: ignore[no-untyped-call]
            if first < 0 or first >= self.blocks:
                break
            last = min(first + chunk, self.blocks)
            for block in range(first, last):
                model.scheduler.pause()
                self.ran[block] += 1
                if self.ran[block] > 1:
                    raise Violation(f"block {block} ran {self.ran[block]} times")
            ended = last - first
        self.live -= 1
        self.going[slot] -= 1
        cuda.leave(control, workers, slot)  # type: ignore[no-untyped-call]
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
            blocks, word = divmod(address - PINNED, 1 << 10)
            self.made[blocks].told(word, value)
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
        """Launch two kernels, and change them at random; see that each says what is so."""
        executor = CudaExecutor(gpu=self.gpu)
        executor._time = executor.now = lambda: 1e-6 * self.scheduler.now  # type: ignore[method-assign]
        jobs: dict[Job, _Blocks] = {}
        for _ in range(2):
            blocks = _Blocks(self, self.random.randint(4, 20))
            launch = SimpleNamespace(cut=lambda args, device, blocks=blocks: blocks)
            task = Task("k", blocks.blocks, Profile(seconds=1e-3), launch=launch)
            jobs[Job(task, Request("k", [task]), 0.0)] = blocks
        running: set[Job] = set()
        changes = CHANGES
        while jobs:
            for job in list(jobs):
                if job not in running:
                    executor.launch(job, Placement(**self._placement()))
                    running.add(job)
                elif changes and self.random.random() < 0.3:
                    changes -= 1
                    if self.random.random() < 0.3:
                        executor.preempt(job)
                    else:
                        executor.resize(job, **self._placement(), younger=self.random.random() < 0.5)
            until = self.scheduler.now + self.random.randint(0, 40)
            self.scheduler.pause(lambda until=until: self.scheduler.now >= until)  # type: ignore[misc]
            for event in executor.poll():
                running.remove(event.job)
                blocks = jobs[event.job]
                if blocks.live:
                    raise Violation(f"{blocks.live} workers run of a kernel that is said to have left")
                if isinstance(event, Ended):
                    if event.error is not None:
                        raise event.error
                    del jobs[event.job]
                event.job.done = sum(blocks.ran)
                said = blocks.blocks if isinstance(event, Ended) else event.done
                if event.job.done != said or blocks.ran != [1] * said + [0] * (blocks.blocks - said):
                    raise Violation(f"blocks ran {blocks.ran}, and {said} are said to have ended")
        self.over = True

    @contextlib.contextmanager
    def _replaced(self) -> Iterator[None]:
        new = {
            "barrier": lambda: None, "thread_index": lambda: 0, "load_relaxed": self.load, "add_relaxed": self.add,
            "load_pair": self.load_pair, "store_relaxed": self.store, "fence": lambda scope: None,
            "clock_ns": lambda: self.scheduler.now + 1,
            "put_claim": lambda value: self._claims.__setitem__(getcurrent(), value),
            "get_claim": lambda: self._claims[getcurrent()],
        }  # fmt: skip
        before = {name: getattr(cuda, name) for name in new}
        try:
            for name, value in new.items():
                setattr(cuda, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(cuda, name, value)
