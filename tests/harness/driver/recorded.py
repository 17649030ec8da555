"""Parts of random programs that streams record: a graph is made once, and does its work at each launch.

A recorded call changes no model; a launch changes all at once, as one call of the stream that it is posted to. Within a
recording calls of one stream come in their order; if calls of its two streams meet in memory, each waits for the
other by events. A launch comes after the last one of the same executable graph, without more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from tests.harness.driver.calls import Cuda
from tests.harness.driver.graphs import FUNCTION, Update

if TYPE_CHECKING:
    from tests.harness.driver.programs import Clock, Memory, Program, Stream

THREAD_MODE, RELAXED_MODE = 1, 2
NO_FLAGS = ctypes.c_uint(0)
SAFE = threading.RLock()
"""Held while a stream records, and while a thread waits for a whole context: that would end the capture."""


@dataclass
class Rows:
    """A copy of rows: how many bytes of how many, at which distances and from which starts."""

    width: int
    height: int
    to_pitch: int
    to_start: int
    pitch: int
    start: int

    @staticmethod
    def make(program: Program, to: int, source: int) -> Rows:
        """Choose rows that both sizes hold."""
        rng = program.random
        width = rng.randint(1, max(1, min(to, source) // rng.choice([1, 3, 8])))
        height = rng.randint(1, max(1, min(6, min(to, source) // width)))
        ends = []
        for size in (to, source):
            limit = (size - width) // (height - 1) if height > 1 else size
            pitch = rng.choice([width, limit, rng.randint(width, limit)])
            ends += [pitch, rng.randint(0, size - (height - 1) * pitch - width)]
        return Rows(width, height, *ends)

    def apply(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy in the models."""
        for row in range(self.height):
            at, start = self.to_start + row * self.to_pitch, self.start + row * self.pitch
            to[at : at + self.width] = source[start : start + self.width]

    def post(self, cuda: Cuda, to: Memory, source: Memory, stream: int | None) -> None:
        """Copy by the driver; without a stream synchronously."""
        ends = cuda.end(to.address + self.to_start, self.to_pitch), cuda.end(source.address + self.start, self.pitch)
        cuda.rows(*ends, self.width, self.height, stream)


@dataclass
class Step:
    """A recorded call."""

    text: str
    reads: list[Memory]
    writes: list[Memory]
    post: Callable[[int], object]
    apply: Callable[[], object]
    branch: int = 0

    def meets(self, steps: list[Step]) -> bool:
        """Return whether it conflicts with other steps in memory."""
        touched, written = {id(memory) for memory in self.reads + self.writes}, {id(memory) for memory in self.writes}
        return any(
            touched & {id(memory) for memory in step.writes} or written & {id(memory) for memory in step.reads}
            for step in steps
        )


@dataclass(eq=False)
class Recording:
    """A recording, with its executable graph."""

    device: int
    makers: list[Callable[[], Step]]
    branches: list[int]
    changes: bool  # whether an update may change it
    steps: list[Step] = field(default_factory=list)
    exec_: int = 0
    own: list[Memory] = field(default_factory=list)  # memory of the program that only this graph copies from and to
    held: list[tuple[int, int]] = field(default_factory=list)  # addresses and sizes of memory of the graph
    clock: Clock = field(default_factory=dict)  # of its last launch

    def uses(self, memory: Memory) -> bool:
        """Return whether it reads or writes a memory."""
        return any(touched is memory for step in self.steps for touched in step.reads + step.writes)


class Recorder:
    """The recordings of a program."""

    def __init__(self, program: Program) -> None:
        self.program, self.cuda = program, program.cuda
        self.all: list[Recording] = []

    def step(self, device: int) -> None:
        """Record, launch, change or drop."""
        local = [recording for recording in self.all if recording.device == device]
        chosen = self.program.random.choice(local) if local else None
        choice = self.program.random.random()
        if chosen is None or (choice < 0.2 and len(local) < 3):
            self.record(device)
        elif choice < 0.75:
            for _ in range(self.program.random.choice([1, 1, 2, 3])):
                self.launch(chosen)
        elif choice < 0.85 and chosen.changes:
            self.change(chosen)
        elif choice < 0.93:
            for memory in chosen.own:
                self.program.compare(memory)
                self.program.rewrite(memory)
        else:
            self.drop(chosen)

    # -- calls that may be recorded --------------------------------------------------------------------------

    def maker(self, recording: Recording) -> Callable[[], Step]:
        """Return what makes a call of a random kind between memories that stay the same; other values each time."""
        program, cuda, device = self.program, self.cuda, recording.device
        rng = program.random
        own = [memory for memory in program.memory if memory.device == device]
        on_device = [memory for memory in own if memory.bytes is None]
        host = [memory for memory in own if memory.bytes is not None] + recording.own
        a, b = rng.choice(on_device), rng.choice(on_device)
        h = rng.choice(host)
        kind = rng.choice(["set", "in", "in", "out", "copy", "kernel", "fill", "rows", "host", "temporary", "nap"])
        width = rng.choice([1, 2, 4])
        to, source = rng.choice([(a, b), (a, h), (h, a)])

        def memset() -> Step:
            start, nbytes = program.span(a, width)
            value = program.random.getrandbits(8 * width)
            word = {1: ctypes.c_ubyte, 2: ctypes.c_ushort, 4: ctypes.c_uint}[width](value)
            call = getattr(cuda, f"cuMemsetD{8 * width}Async")
            model = a.model[start : start + nbytes].view(f"u{width}")
            return Step(
                f"memset({a.address:#x}+{start}, {nbytes})",
                [],
                [a],
                lambda s: call(a.address + start, word, nbytes // width, s),
                lambda: model.fill(value),
            )

        def plain(to: Memory, source: Memory, call: str) -> Step:
            start, nbytes = program.span(to)
            nbytes = min(nbytes, len(source.model))
            model = to.model[start : start + nbytes]
            return Step(
                f"{call}({to.address:#x}+{start}, {source.address:#x}, {nbytes})",
                [source],
                [to],
                lambda s: getattr(cuda, call)(to.address + start, source.address, nbytes, s),
                lambda: np.copyto(model, source.model[:nbytes]),
            )

        def kernel() -> Step:
            start, nbytes = program.span(a, 4)
            nbytes = min(nbytes, len(b.model) // 4 * 4)
            model, addend = a.model[start : start + nbytes].view("u4"), b.model[:nbytes].view("u4")
            return Step(
                f"add({a.address:#x}+{start}, {b.address:#x}, {nbytes})",
                [b],
                [a],
                lambda s: cuda.launch(device, s, "add", a.address + start, b.address, nbytes // 4),
                lambda: np.add(model, addend, out=model),
            )

        def fill() -> Step:
            start, nbytes = program.span(a, 4)
            value = program.random.getrandbits(32)
            model = a.model[start : start + nbytes].view("u4")
            return Step(
                f"fill({a.address:#x}+{start}, {nbytes})",
                [],
                [a],
                lambda s: cuda.launch(device, s, "fill", a.address + start, nbytes // 4, value),
                lambda: model.fill(value),
            )

        def rows() -> Step:
            shape = Rows.make(program, len(to.model), len(source.model))
            return Step(
                f"rows({to.address:#x}, {source.address:#x}, {shape})",
                [source],
                [to],
                lambda s: shape.post(cuda, to, source, s),
                lambda: shape.apply(to.model, source.model),
            )

        def host_function() -> Step:
            start, nbytes = program.span(h)
            value = program.random.randrange(256)
            function = FUNCTION(lambda _: ctypes.memset(h.address + start, value, nbytes) and None)
            program.functions.append(function)
            return Step(
                f"host function({h.address:#x}+{start}, {nbytes}, {value})",
                [],
                [h],
                lambda s: cuda.cuLaunchHostFunc(s, function, None),
                lambda: h.model[start : start + nbytes].fill(value),
            )

        def temporary() -> Step:
            nbytes = min(len(a.model), len(b.model), 50_000)

            def post(stream: int) -> None:
                address = cuda.out("cuMemAllocAsync", nbytes, stream)
                program.is_free(address, nbytes)
                recording.held.append((address, nbytes))
                cuda.cuMemcpyDtoDAsync_v2(address, b.address, nbytes, stream)
                cuda.cuMemcpyDtoDAsync_v2(a.address, address, nbytes, stream)
                cuda.cuMemFreeAsync(address, stream)

            return Step(
                f"by memory of the graph({a.address:#x}, {b.address:#x}, {nbytes})",
                [b],
                [a],
                post,
                lambda: np.copyto(a.model[:nbytes], b.model[:nbytes]),
            )

        def nap() -> Step:
            return Step("nap", [], [], lambda s: cuda.launch(device, s, "nap", 100), lambda: None)

        made: dict[str, Callable[[], Step]] = {
            "set": memset,
            "in": lambda: plain(a, h, "cuMemcpyHtoDAsync_v2"),
            "fill": fill,
            "host": host_function,
            "out": lambda: plain(h, a, "cuMemcpyDtoHAsync_v2"),
            "nap": nap,
        }
        between = {"copy": lambda: plain(a, b, "cuMemcpyDtoDAsync_v2"), "kernel": kernel}
        if a is not b:
            made |= between
            if kind == "temporary":
                recording.changes = False
                return temporary
        if kind == "rows" and to is not source:
            recording.changes = False  # an update takes no copies of rows
            return rows
        return made.get(kind, memset)

    # -- graphs -----------------------------------------------------------------------------------------------

    def record(self, device: int) -> None:
        """Record some calls, and make them an executable graph."""
        program = self.program
        recording = Recording(device, [], [], True)
        recording.own = [program.pageable(device) for _ in range(2)]
        count = program.random.randint(1, 7)
        recording.makers = [self.maker(recording) for _ in range(count)]
        forks = program.random.random() < 0.5
        recording.branches = [program.random.randrange(2) if forks else 0 for _ in range(count)]
        graph = self.capture(recording)
        recording.exec_ = self.cuda.out("cuGraphInstantiateWithFlags", graph, 0)
        self.cuda.cuGraphDestroy(graph)
        self.all.append(recording)

    def capture(self, recording: Recording) -> int:
        """Let streams record the calls, with values that are chosen now; return the graph."""
        program, cuda = self.program, self.cuda
        cuda.use(recording.device)
        may = [stream for stream in program.streams if stream.device == recording.device and stream.kind != "legacy"]
        free = [stream for stream in may if stream.kind == "free"]
        made = []
        if not program.alone or program.random.random() < 0.3:
            may = free
        while len(may) < 2:
            made.append(cuda.stream(1))
            may = [*may, program.outside(made[-1], recording.device)]
        pair = [stream.handle for stream in program.random.sample(may, 2)]
        recording.steps = [maker() for maker in recording.makers]
        for step, branch in zip(recording.steps, recording.branches, strict=True):
            step.branch = branch
        program.note(f"record in {pair} on {recording.device}: {[f'{s.branch} {s.text}' for s in recording.steps]}")
        graph, event = ctypes.c_uint64(), cuda.event()
        mode = program.random.choice([THREAD_MODE, RELAXED_MODE])
        with SAFE:
            cuda.cuStreamBeginCapture_v2(pair[0], ctypes.c_int(mode))
            self.post(recording.steps, pair, event)
            cuda.cuStreamEndCapture(pair[0], ctypes.byref(graph))
        cuda.cuEventDestroy_v2(event)
        for stream in made:
            cuda.cuStreamDestroy_v2(stream)
        return graph.value

    def post(self, steps: list[Step], pair: list[int], event: int) -> None:
        """Post the calls to the streams that record, and the events that order them."""

        def after(stream: int, waiter: int) -> None:
            self.cuda.cuEventRecord(event, waiter)
            self.cuda.cuStreamWaitEvent(stream, event, NO_FLAGS)

        since: list[list[Step]] = [[], []]  # by stream: since they came together
        forked = False
        for step in steps:
            if step.branch and not forked:
                after(pair[1], pair[0])
                forked, since = True, [[], []]
            elif step.meets(since[1 - step.branch]):
                after(pair[0], pair[1])
                after(pair[1], pair[0])
                since = [[], []]
            step.post(pair[step.branch])
            since[step.branch].append(step)
        if forked:
            after(pair[0], pair[1])

    def launch(self, recording: Recording) -> None:
        """Launch the graph in some stream."""
        program = self.program
        stream: Stream = program.random.choice(
            [stream for stream in program.streams if stream.device == recording.device]
        )
        for key, count in recording.clock.items():
            stream.clock[key] = max(stream.clock.get(key, 0), count)
        reads = [memory for step in recording.steps for memory in step.reads]
        writes = [memory for step in recording.steps for memory in step.writes]
        program.after(stream, reads, writes)
        program.note(f"launch({recording.exec_:#x}) in {stream.key}")
        self.cuda.cuGraphLaunch(recording.exec_, stream.handle)
        recording.clock = dict(stream.clock)
        for step in recording.steps:
            step.apply()

    def change(self, recording: Recording) -> None:
        """Record the same calls with other values, which later launches have."""
        graph, info = self.capture(recording), Update()
        self.program.note(f"update({recording.exec_:#x})")
        self.cuda.cuGraphExecUpdate_v2(recording.exec_, graph, ctypes.byref(info))
        self.cuda.cuGraphDestroy(graph)

    def drop(self, recording: Recording) -> None:
        """Destroy a graph, although launches may be in flight; its own memory is compared, and stays until then."""
        self.all.remove(recording)
        self.program.note(f"destroy graph({recording.exec_:#x})")
        self.cuda.cuGraphExecDestroy(recording.exec_)
        for memory in recording.own:
            self.program.compare(memory)
            self.program.host_may_touch(memory, write=True)

    def drop_users(self, memory: Memory) -> None:
        """Destroy the graphs that use a memory which goes."""
        for recording in [recording for recording in self.all if recording.uses(memory)]:
            self.drop(recording)

    def close(self) -> None:
        """Destroy all."""
        for recording in list(self.all):
            self.drop(recording)
