"""`Program`: random programs of copies, launches and events over the devices of a pool, compared bit for bit.

``python -m tests.harness.pool_programs --programs 500 --agents 3 --seed 7`` runs them over agents in this process;
under ``warpwell run --agents 3 -m tests.harness.pool_programs``, over the job's devices.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell import errors
from warpwell.pool.device import Device
from warpwell.pool.devices import Devices, devices, joined
from warpwell.pool.host_memory import pinned_empty
from warpwell.targets import kernel
from warpwell.targets.primitives import grid

LENGTHS = (0, 1, 3, 257, 1000, 9001, 40_000, 131_073)
"""Items of the buffers of a program: some copies travel inside messages, others by the side, some are odd."""

LARGE = 1_100_003
"""Items of a few programs: more than is copied before a call returns."""

LIMIT = 60.0
"""Timeout in seconds of each operation, without compilation."""

COMPILING = 600.0
"""Timeout in seconds of the first launches, while several agents compile on few cores."""

Clock = dict[int, int]


@kernel
def mix(x: Any, y: Any, factor: Any) -> None:
    """Multiply and add, around 2^64."""
    i = grid(1)
    y[i] = x[i] * factor + (y[i] ^ i)


@kernel
def add(x: Any, y: Any, z: Any) -> None:
    """Add."""
    i = grid(1)
    z[i] = x[i] + y[i]


def double(x: Any) -> int:
    """Double an array in place, on the agent; return its length."""
    x *= 2
    return len(x)


def fail(number: int) -> None:
    """Fail, on the agent."""
    raise ValueError(f"planned failure {number};")


class _Memory:
    """A buffer, its expected content, and the calls that wrote and read it last."""

    def __init__(self, device: int, buffer: Any, expected: NDArray[np.int64]) -> None:
        self.device = device
        self.buffer = buffer
        self.expected = expected
        self.written: list[tuple[int, int]] = []
        self.read: list[tuple[int, int]] = []


class Program:
    """A random program, run while it is made: NumPy in step with the devices.

    Every stream knows by a clock which calls of others it comes after. Where a call needs more, the program
    synchronizes, with one of several methods. So its results are determined, and all else is as concurrent
    as it can be.

    Parameters
    ----------
    found : sequence of Device
    seed : int
    steps : int
    failing : set of int, optional
        The planned failures not raised yet. Programs that use the same devices at the same time share it:
        they have the default streams in common.
    """

    def __init__(self, found: Sequence[Device], seed: int, steps: int = 40, failing: set[int] | None = None) -> None:
        self.seed = seed
        self.counts: dict[str, int] = {}
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._devices = found
        self._steps = steps
        self._length = LARGE if seed % 50 == 49 else self._random.choice(LENGTHS)
        self._streams: list[Any] = []
        self._of: list[int] = []
        for index, device in enumerate(found):
            self._streams += [device.default_stream, device.stream(), device.stream(priority=1)]
            self._of += [index] * 3
        self._open = [list(range(3 * index, 3 * index + 3)) for index in range(len(found))]
        self._last: dict[int, Any] = {}  # of closed streams: an event after all their work, or None
        self._lent: list[tuple[NDArray[np.int64], int, int]] = []
        self._clocks: list[Clock] = [{} for _ in self._streams]
        self._host: Clock = {}
        self._calls = [0] * len(self._streams)
        self._events: list[Any] = []
        self._memories: list[_Memory] = []
        self._failing = set() if failing is None else failing

    def run(self) -> None:
        """Run it, and compare every buffer at the end.

        Raises
        ------
        AssertionError
            A buffer does not hold what NumPy computes.
        """
        for index in range(len(self._devices)):
            for _ in range(3):
                self._allocate(index)
        steps = (
            [self._upload] * 3
            + [self._lend, self._change_lent]
            + [self._between] * 5
            + [self._opposite] * 4
            + [self._within]
            + [self._launch] * 6
            + [self._fill, self._call, self._fail, self._replace]
            + [self._download] * 2
            + [self._synchronize, self._record, self._close]
        )
        for _ in range(self._steps):
            step = self._random.choice(steps)
            self.counts[step.__name__[1:]] = self.counts.get(step.__name__[1:], 0) + 1
            step()
        for memory in self._memories:
            self._compare(memory)
        for device in self._devices:
            self._note_failures(device.synchronize, LIMIT)
        for number, stream in enumerate(self._streams):
            if number not in self._last:
                stream.close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _allocate(self, index: int) -> None:
        stream = self._stream(index)
        expected = self._fresh(self._length)
        memory = _Memory(index, self._devices[index].empty(self._length, np.int64, self._streams[stream]), expected)
        self._use(stream, [], [memory])
        memory.buffer.copy_from(expected.copy(), self._streams[stream])
        self._memories.append(memory)

    def _upload(self) -> None:
        memory = self._random.choice(self._memories)
        stream, part = self._stream(memory.device), self._part()
        source = self._fresh(len(range(*part.indices(self._length))))
        self._use(stream, [], [memory])
        memory.expected[part] = source
        strided = np.zeros((len(source), 2), np.int64)
        strided[:, 0] = source
        data = strided[:, 0] if self._random.random() < 0.3 else source
        memory.buffer[part].copy_from(data, self._streams[stream])
        data[...] = -1  # the call has copied the data before its return

    def _lend(self) -> None:
        """Copy from a pinned array, which must stay as it is until the stream is there, but may be dropped."""
        memory = self._random.choice(self._memories)
        stream, part = self._stream(memory.device), self._part()
        source = pinned_empty(len(range(*part.indices(self._length))), np.int64)
        source[...] = self._fresh(len(source))
        self._use(stream, [], [memory])
        memory.expected[part] = source
        memory.buffer[part].copy_from(source, self._streams[stream])
        if self._random.random() < 0.5:
            self._lent.append((source, stream, self._calls[stream]))

    def _change_lent(self) -> None:
        """Change the arrays that are known to have been copied."""
        for source, stream, number in self._lent:
            if self._host.get(stream, 0) >= number:
                source[...] = -2

    def _close(self) -> None:
        """End a stream that may still be at work, and begin another."""
        index = self._random.randrange(len(self._devices))
        stream = self._open[index].pop(self._random.randrange(1, 3))
        self._last[stream] = self._streams[stream].record() if self._random.random() < 0.5 else None
        self._streams[stream].close()
        self._open[index].append(len(self._streams))
        self._streams.append(self._devices[index].stream(priority=self._random.randrange(2)))
        self._of.append(index)
        self._calls.append(0)
        self._clocks.append({})

    def _download(self) -> None:
        self._compare(self._random.choice(self._memories))

    def _between(self) -> None:
        source, destination = self._random.sample(self._memories, 2)
        self._copy(destination, source)

    def _opposite(self) -> None:
        """Copy both ways between two devices, with nothing in between."""
        if len(self._devices) < 2:
            return
        left, right = self._random.sample(range(len(self._devices)), 2)
        a, b = self._random.sample([p for p in self._memories if p.device == left], 2)
        c, d = self._random.sample([p for p in self._memories if p.device == right], 2)
        self._copy(c, a)
        self._copy(b, d)

    def _within(self) -> None:
        index = self._random.randrange(len(self._devices))
        source, destination = self._random.sample([p for p in self._memories if p.device == index], 2)
        self._copy(destination, source)

    def _copy(self, destination: _Memory, source: _Memory) -> None:
        part = self._part()
        self._devices[destination.device].transfers.direct = self._random.random() < 0.7
        streams: list[int] = [3 * destination.device, 3 * source.device]
        chosen = None
        if self._random.random() < 0.6:
            chosen = self._stream(self._random.choice([destination.device, source.device]))
            streams = [chosen]
        for stream in streams:
            self._after(stream, [*source.written, *destination.written, *destination.read])
        if len(set(streams)) == 2:  # both streams order the copy
            for stream in streams:
                self._merge(self._clocks[stream], self._clocks[streams[0]])
                self._merge(self._clocks[streams[0]], self._clocks[stream])
            self._clocks[streams[1]] = dict(self._clocks[streams[0]])
        uses = [(s, self._count(s)) for s in dict.fromkeys(streams)]
        for stream in streams:
            for at in uses:
                self._clocks[stream][at[0]] = at[1]
        source.read += uses
        destination.written, destination.read = uses, []
        destination.expected[part] = source.expected[part]
        native = None if chosen is None else self._streams[chosen]
        self._devices[destination.device].copy(destination.buffer[part], source.buffer[part], native)

    def _launch(self) -> None:
        index = self._random.randrange(len(self._devices))
        x, y, z = (self._random.choice([p for p in self._memories if p.device == index]) for _ in range(3))
        stream, part = self._stream(index), self._part()
        native, length = self._streams[stream], len(range(*part.indices(self._length)))
        if self._random.random() < 0.5:
            self._use(stream, [x], [y])
            factor = self._random.randrange(-(1 << 40), 1 << 40)
            i = np.arange(length)
            y.expected[part] = x.expected[part] * factor + (y.expected[part] ^ i)
            mix[length, native](x.buffer[part], y.buffer[part], factor)
        else:
            self._use(stream, [x, y], [z])
            z.expected[part] = x.expected[part] + y.expected[part]
            add[length, native](x.buffer[part], y.buffer[part], z.buffer[part])

    def _fill(self) -> None:
        memory = self._random.choice(self._memories)
        stream, part, value = self._stream(memory.device), self._part(), self._random.randrange(1 << 60)
        self._use(stream, [], [memory])
        memory.expected[part] = value
        memory.buffer[part].fill(value, self._streams[stream])

    def _call(self) -> None:
        memory = self._random.choice(self._memories)
        stream = self._stream(memory.device)
        self._use(stream, [], [memory])
        memory.expected *= 2
        result = self._devices[memory.device].call(double, memory.buffer, stream=self._streams[stream])
        if self._random.random() < 0.5:
            assert result.get(LIMIT) == self._length
            self._host_knows(stream)

    def _fail(self) -> None:
        """Call a function that raises; later calls are not affected."""
        stream = self._any_stream()
        at_once = self._random.random() < 0.3  # `get` raises the error; a concurrent synchronization does, too
        number = -1 if at_once else 1000 * self.seed + self.counts["fail"]
        if not at_once:
            self._failing.add(number)
        result = self._devices[self._of[stream]].call(fail, number, stream=self._streams[stream])
        if at_once:
            try:
                result.get(LIMIT)
            except errors.RemoteError as error:
                assert f"planned failure {number};" in str(error)
            else:
                raise AssertionError("a function that raises has a result")

    def _note_failures(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Synchronize, and note the failures that it raises."""
        while True:
            try:
                return call(*arguments)
            except errors.RemoteError as error:
                self._note(error)

    def _note(self, error: errors.RemoteError) -> None:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])  # others are named in the notes
        for number in {int(found) for found in re.findall(r"planned failure (\d+);", text)}:
            assert number in self._failing, f"program {self.seed}: told twice of failure {number}"
            self._failing.remove(number)

    def _replace(self) -> None:
        """Free a buffer while it may still be in use, and allocate another."""
        memory = self._memories.pop(self._random.randrange(len(self._memories)))
        if self._random.random() < 0.5:
            memory.buffer.free()
        index = memory.device
        del memory
        self._allocate(index)

    def _record(self) -> None:
        stream = self._any_stream()
        if self._events and self._random.random() < 0.3:
            event, index, _ = self._events.pop(self._random.randrange(len(self._events)))
            stream = self._stream(index)
            self._streams[stream].record(event)
        else:
            event = self._streams[stream].record()
        self._events.append((event, self._of[stream], dict(self._clocks[stream])))
        if self._random.random() < 0.5:
            event, _, clock = self._random.choice(self._events)
            waiting = self._any_stream()
            self._streams[waiting].wait(event)
            self._merge(self._clocks[waiting], clock)

    def _synchronize(self) -> None:
        index = self._random.randrange(len(self._devices))
        self._synchronize_device(index)

    # -- order -------------------------------------------------------------------------------------------------------

    def _use(self, stream: int, read: Sequence[_Memory], written: Sequence[_Memory]) -> None:
        """Count a call of a stream, behind what it depends on."""
        for memory in read:
            self._after(stream, memory.written)
        for memory in written:
            self._after(stream, [*memory.written, *memory.read])
        at = stream, self._count(stream)
        for memory in read:
            memory.read.append(at)
        for memory in written:
            memory.written, memory.read = [at], []

    def _count(self, stream: int) -> int:
        self._merge(self._clocks[stream], self._host)
        self._calls[stream] += 1
        self._clocks[stream][stream] = self._calls[stream]
        return self._calls[stream]

    def _after(self, stream: int, calls: Sequence[tuple[int, int]]) -> None:
        """Let a stream come after calls of others, by one of the means."""
        self._merge(self._clocks[stream], self._host)
        for producer, number in calls:
            if self._clocks[stream].get(producer, 0) >= number:
                continue
            native, method = self._streams[producer], self._random.randrange(8)
            if producer in self._last:
                self._after_closed(stream, producer, method)
            elif method < 4:
                event = native.record()
                self._streams[stream].wait(event)
            elif method < 6:
                self._streams[stream].wait(native)
            elif method == 6:
                self._note_failures(native.record().synchronize, LIMIT)
                self._host_knows(producer)
            else:
                self._note_failures(native.synchronize, LIMIT)
                self._host_knows(producer)
            self._merge(self._clocks[stream], self._clocks[producer])

    def _after_closed(self, stream: int, producer: int, method: int) -> None:
        event = self._last[producer]
        if event is None:
            self._synchronize_device(self._of[producer])
        elif method < 6:
            self._streams[stream].wait(event)
        else:
            self._note_failures(event.synchronize, LIMIT)
            assert event.done
            self._host_knows(producer)

    def _synchronize_device(self, index: int) -> None:
        self._note_failures(self._devices[index].synchronize, LIMIT)
        for stream, of in enumerate(self._of):
            if of == index:
                self._host_knows(stream)

    def _host_knows(self, stream: int) -> None:
        self._merge(self._host, self._clocks[stream])

    @staticmethod
    def _merge(clock: Clock, added: Clock) -> None:
        for stream, number in added.items():
            clock[stream] = max(clock.get(stream, 0), number)

    # -- choices -----------------------------------------------------------------------------------------------------

    def _stream(self, index: int) -> int:
        return self._random.choice(self._open[index])

    def _any_stream(self) -> int:
        return self._stream(self._random.randrange(len(self._devices)))

    def _part(self) -> slice:
        if self._random.random() < 0.6:
            return slice(None)
        first = self._random.randrange(self._length + 1)
        return slice(first, self._random.randrange(first, self._length + 1))

    def _fresh(self, length: int) -> NDArray[np.int64]:
        return self._numbers.integers(-(1 << 62), 1 << 62, length)

    def _compare(self, memory: _Memory) -> None:
        stream = self._stream(memory.device)
        self._use(stream, [memory], [])
        into = pinned_empty(self._length, np.int64) if self._random.random() < 0.3 else None
        found = self._note_failures(memory.buffer.copy_to_host, into, self._streams[stream])
        self._host_knows(stream)
        wrong = np.flatnonzero(found != memory.expected)
        assert not wrong.size, (
            f"program {self.seed}: {wrong.size} of {found.size} items of a buffer of device {memory.device} differ, "
            f"the first at {wrong[0]}: {found[wrong[0]]}, not {memory.expected[wrong[0]]}"
        )


def run(found: Sequence[Device], programs: int, seed: int, steps: int = 40, threads: int = 1) -> dict[str, int]:
    """Run programs ``seed * 1000 ..``, `threads` at a time, and return the number of steps of each kind."""

    def run_program(number: int) -> dict[str, int]:
        program = Program(found, seed * 1000 + number, steps, failing)
        try:
            with np.errstate(over="ignore"):
                program.run()
        except Exception as error:
            error.add_note(f"in program {program.seed}")
            raise
        return program.counts

    counts: dict[str, int] = {}
    failing: set[int] = set()
    for device in found:
        x = device.zeros(1, np.int64)
        mix[1](x, x, 1)
        add[1](x, x, x)
        with contextlib.closing(device.stream()) as stream:
            mix[1, stream](x, x, 1 << 33)
    for device in found:
        device.synchronize(COMPILING)
    with ThreadPoolExecutor(threads) as executor:
        for made in executor.map(run_program, range(programs)):
            for name, count in made.items():
                counts[name] = counts.get(name, 0) + count
    assert not failing, f"these failures were never raised: {failing}"
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs, and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--agents", type=int, default=3, help="in this process; of no use under `warpwell run`")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="of the application, each with a program of its own")
    options = parser.parse_args(arguments)
    found = devices() if joined() else Devices(targets=["cpu"] * options.agents)
    start = time.perf_counter()
    counts = run(found, options.programs, options.seed, options.steps, options.threads)
    seconds = time.perf_counter() - start
    print(f"{options.programs} programs over {len(found)} devices ({found[0].link}): all equal, {seconds:.1f} s")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    if not joined():
        found.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
