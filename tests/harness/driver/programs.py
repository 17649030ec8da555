"""Random CUDA programs that are free of races, and their expected results.

    python -m tests.harness.driver.programs --seeds 0:500 --devices 2

A program makes streams, events, device memory and pinned memory, and posts copies, memsets and kernels to streams in
random order; copies and waits also between devices, and kernels use other devices' memory if the driver permits it.
A vector clock says for each call after which others it comes; where two calls that meet in memory are not ordered, the
program first orders them: by an event and a wait, or by waiting itself. So executing the calls one after another on
NumPy arrays gives what the driver must give, and a call that ran too early or too late shows as wrong bytes.

Vector clocks: `clock[stream] = n` says that the first n calls of that stream are done before. Calls of the legacy
stream come after all earlier calls of blocking streams of their device, and before all later ones; a wait for a
legacy call includes the calls before it.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import threading
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

import numpy as np
from tests.harness.driver.calls import ALREADY_ENABLED, LEGACY, NON_BLOCKING, NOT_READY, PER_THREAD, Cuda
from tests.harness.driver.graphs import Pool
from tests.harness.driver.recorded import SAFE, Recorder, Rows
from tests.harness.until import HANG_SECONDS

Clock = dict[int, int]
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LAYER = frozenset({"source", "target", "free", "free_host", "pinned", "pools"})
"""The layer's promises beyond CUDA's: once a pageable ``Async`` copy returned, its source may be written and
its target read; ``cuMemFree`` waits for work on memory that was allocated in a stream, too, and ``cuMemFreeHost`` for
copies; copies read pinned memory when the stream gets there, even if only the legacy stream's order makes it
wait for the writer of that memory; and kernels of other devices reach memory that was allocated in a stream."""
WAITS_MOST = HANG_SECONDS
"""Timeout in seconds of a queried stream."""


def join(clock: Clock, added: Clock) -> None:
    """Make `clock` come after both."""
    for key, count in added.items():
        if clock.get(key, 0) < count:
            clock[key] = count


@dataclass
class Memory:
    """Device or pinned memory, with its expected content, and the calls that touched it last."""

    address: int
    model: np.ndarray
    device: int
    bytes: memoryview | None = None  # the host's view of pinned memory
    of_stream: bool = False  # allocated by cuMemAllocAsync, so cuMemFreeAsync may free it
    is_shared: bool = False  # a call has used it with memory of another device
    written: Clock = field(default_factory=dict)
    read: Clock = field(default_factory=dict)


@dataclass(eq=False)
class Stream:
    """A stream of a device: `clock` is what its next call comes after, `done` what its last call came after."""

    key: int
    handle: int
    device: int
    kind: str  # "legacy", "blocking", "free" (non-blocking)
    clock: Clock = field(default_factory=dict)
    done: Clock = field(default_factory=dict)


@dataclass(eq=False)
class Event:
    """An event, and the work that precedes its last record."""

    handle: int
    device: int
    clock: Clock = field(default_factory=dict)


class Wrong(Exception):
    """Memory holds something else than the model."""


class Program:
    """One random program; `run` executes it and compares."""

    relies = LAYER
    """On what programs rely that CUDA does not promise."""
    alone = True
    """Whether the program runs alone: the legacy stream may not be used while a blocking one records."""

    def __init__(
        self, cuda: Cuda, seed: int, devices: int, steps: int = 60, legacy: bool = True, skip: Container[int] = ()
    ) -> None:
        self.cuda, self.random, self.seed = cuda, random.Random(seed), seed
        self.steps, self.skip, self.host, self.keys = steps, skip, Clock(), iter(range(1, 1 << 30))
        self.text: list[str] = []
        self.streams: list[Stream] = []
        self.device_of: dict[int, int] = {}
        self.functions: list[object] = []  # host functions that streams call
        self.keepalive: list[object] = []
        self.events: list[Event] = []
        self.memory: list[Memory] = []
        self.destroyed: dict[int, Clock] = {device: {} for device in range(devices)}  # of streams that were destroyed
        self.peers = self.reach(devices)
        self.pools: dict[int, int] = {}
        # Only the layer defines when a graph accesses pageable memory: when its stream runs the copy.
        self.recorder = Recorder(self) if self.relies == LAYER and self.has_graphs() else None
        for device in range(devices):
            cuda.use(device)
            if legacy:
                handle = self.random.choice([0, LEGACY])
                self.add(handle, device, "legacy")
                self.add(PER_THREAD, device, "blocking")
            for _ in range(2):
                self.new_stream(device)
                self.new_memory(device)
            self.new_pinned(device)

    def reach(self, devices: int) -> bool:
        """Let the kernels of all devices use all memory, if possible; return whether they do."""
        for device in range(devices):
            self.cuda.use(device)
            for peer in {*range(devices)} - {device}:
                pair = ctypes.c_int(device), ctypes.c_int(peer)
                if not self.cuda.out("cuDeviceCanAccessPeer", *pair, kind=ctypes.c_int):
                    return False
                code = self.cuda.code("cuCtxEnablePeerAccess", self.cuda.contexts[peer], ctypes.c_uint(0))
                if code not in (0, ALREADY_ENABLED):
                    raise Wrong(f"cuCtxEnablePeerAccess: {code}")
        return devices > 1

    def has_graphs(self) -> bool:
        """Return whether the driver has pools, all kinds of graphs, and rows; only the fake driver lacks them."""
        pool = ctypes.c_uint64()
        code = self.cuda.code("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(Pool(1, 0, 1, 0)))
        return code == 0 and not self.cuda.code("cuMemPoolDestroy", pool.value)

    # -- resources -------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Record a step for the report of a failure."""
        self.text.append(text)

    def add(self, handle: int, device: int, kind: str) -> Stream:
        """Keep a stream."""
        stream = Stream(next(self.keys), handle, device, kind)
        self.streams.append(stream)
        self.device_of[stream.key] = device
        return stream

    def new_stream(self, device: int) -> None:
        """Make a stream."""
        flags = self.random.choice([0, NON_BLOCKING])
        stream = self.add(self.cuda.stream(flags), device, "free" if flags else "blocking")
        self.note(f"stream {stream.key} = create({stream.kind}) on {device}")

    def size(self) -> int:
        """Return a number of bytes, a multiple of 8."""
        kind = self.random.random()
        limit = 256 if kind < 0.3 else 40_000 if kind < 0.7 else 300_000 if kind < 0.97 else 3_000_000
        return 8 * self.random.randint(1, limit // 8)

    def new_memory(self, device: int) -> None:
        """Allocate device memory, sometimes in a stream, and fill it."""
        nbytes = self.size()
        streams = [stream for stream in self.streams if stream.device == device]
        if streams and self.random.random() < 0.6:
            stream = self.random.choice(streams)
            address = self.alloc_async(device, nbytes, stream.handle)
            memory = Memory(address, np.zeros(nbytes, np.uint8), device, of_stream=True)
            self.note(f"{address:#x} = allocAsync({nbytes}) in {stream.key}")
        else:
            stream = None
            memory = Memory(self.cuda.alloc(nbytes), np.zeros(nbytes, np.uint8), device)
            self.note(f"{memory.address:#x} = alloc({nbytes}) on {device}")
        self.is_free(memory.address, nbytes)
        self.memory.append(memory)
        if stream:
            self.after(stream, [], [memory])
            self.cuda.cuMemsetD8Async(memory.address, ctypes.c_ubyte(0), nbytes, stream.handle)
        else:
            stream = self.random.choice([stream for stream in self.streams if stream.device == device])
            self.memset(stream, memory)

    def alloc_async(self, device: int, nbytes: int, stream: int) -> int:
        """Allocate in a stream, from the device's pool or from one of the program's."""
        if self.recorder is None or self.random.random() < 0.6:
            return self.cuda.out("cuMemAllocAsync", nbytes, stream)
        if device not in self.pools:
            self.pools[device] = self.cuda.out("cuMemPoolCreate", ctypes.byref(Pool(1, 0, 1, device)))
        return self.cuda.out("cuMemAllocFromPoolAsync", nbytes, self.pools[device], stream)

    def is_free(self, address: int, nbytes: int) -> None:
        """Raise `Wrong` where memory that was given out is in use."""
        used = [(memory.address, len(memory.model)) for memory in self.memory]
        for recording in self.recorder.all if self.recorder else ():
            used += recording.held
        if any(address < start + size and start < address + nbytes for start, size in used):
            raise Wrong(f"{address:#x} is memory that is in use")

    def pageable(self, device: int) -> Memory:
        """Return memory of the program's own, that calls of a device copy from and to."""
        data = self.random.randbytes(self.random.choice([64, 5000, 100_000]))
        room = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self.keepalive.append(room)
        model = np.frombuffer(data, np.uint8).copy()
        return Memory(ctypes.addressof(room), model, device, memoryview(room).cast("B"))

    def outside(self, handle: int, device: int) -> Stream:
        """Return a stream that no other step uses."""
        return Stream(0, handle, device, "free")

    def new_pinned(self, device: int) -> None:
        """Allocate pinned memory."""
        nbytes = self.size()
        address, view = self.cuda.pinned(nbytes)
        data = self.random.randbytes(nbytes)
        view[:] = data
        self.memory.append(Memory(address, np.frombuffer(data, np.uint8).copy(), device, view))

    # -- order -----------------------------------------------------------------------------------------------

    def before(self, stream: Stream) -> Clock:
        """Return what a call posted to a stream now comes after."""
        clock = dict(self.host)
        join(clock, stream.clock)
        for earlier in self.streams:
            if earlier.device == stream.device and "free" not in (earlier.kind, stream.kind):
                if "legacy" in (earlier.kind, stream.kind):
                    join(clock, earlier.done)
        return clock

    def after(self, stream: Stream, reads: list[Memory], writes: list[Memory]) -> None:
        """Order a call of a stream behind all that it meets in memory, and count it."""
        need = Clock()
        for memory in reads + writes:
            join(need, memory.written)
        for memory in writes:
            join(need, memory.read)
        for _ in range(100):
            have = self.before(stream)
            missing = [key for key, count in need.items() if have.get(key, 0) < count]
            if not missing:
                break
            self.order(self.random.choice(missing), stream)
        self.cuda.use(stream.device)
        clock = self.before(stream)
        clock[stream.key] = clock.get(stream.key, 0) + 1
        stream.clock = clock
        stream.done = dict(clock)
        for memory in writes:
            memory.written, memory.read = {stream.key: clock[stream.key]}, {}
        for memory in reads:
            memory.read[stream.key] = clock[stream.key]

    def order(self, key: int, stream: Stream | None) -> None:
        """Let a stream, or the host, come after all calls of the stream with a key."""
        producer = next((stream for stream in self.streams if stream.key == key), None)
        if producer is None:
            self.synchronize_context(self.device_of[key])
            return
        if stream and self.random.random() < 0.75:
            self.wait(stream, self.record(producer))
        else:
            self.wait_on_host(producer)

    def record(self, stream: Stream) -> Event:
        """Record an event, new or used, in a stream."""
        self.cuda.use(stream.device)
        old = [event for event in self.events if event.device == stream.device]
        if old and self.random.random() < 0.8:
            event = self.random.choice(old)
        else:
            event = Event(self.cuda.event(), stream.device)
            self.events.append(event)
        self.note(f"record({event.handle:#x}) in {stream.key}")
        self.cuda.cuEventRecord(event.handle, stream.handle)
        event.clock = self.before(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream wait for an event."""
        self.note(f"wait({event.handle:#x}) in {stream.key}")
        self.cuda.use(stream.device)
        self.cuda.cuStreamWaitEvent(stream.handle, event.handle, ctypes.c_uint(0))
        join(stream.clock, event.clock)

    def wait_on_host(self, stream: Stream) -> None:
        """Wait for all calls of a stream, in one of the ways that there are."""
        self.cuda.use(stream.device)
        method = self.random.randrange(5)
        if method == 0:
            self.synchronize_context(stream.device)
        elif method == 1:
            self.note(f"synchronize({stream.key})")
            self.cuda.cuStreamSynchronize(stream.handle)
            join(self.host, self.before(stream) if stream.kind == "legacy" else stream.clock)
        elif method == 2:
            self.note(f"query({stream.key})")
            self.poll("cuStreamQuery", stream.handle)
            join(self.host, self.before(stream) if stream.kind == "legacy" else stream.clock)
        else:
            event = self.record(stream)
            if method == 3:
                self.cuda.cuEventSynchronize(event.handle)
            else:
                self.poll("cuEventQuery", event.handle)
            join(self.host, event.clock)

    def poll(self, call: str, handle: int) -> None:
        """Query until ready."""
        end = time.monotonic() + WAITS_MOST
        while (code := self.cuda.code(call, handle)) == NOT_READY:
            if time.monotonic() > end:
                raise Wrong(f"{call} is not ready after {WAITS_MOST:g} s")
        if code:
            raise Wrong(f"{call}: {code}")

    def synchronize_context(self, device: int) -> None:
        """Wait for a device."""
        self.note(f"synchronize device {device}")
        self.cuda.use(device)
        with SAFE:
            self.cuda.cuCtxSynchronize()
        join(self.host, self.destroyed[device])
        for stream in self.streams:
            if stream.device == device:
                join(self.host, stream.clock)

    # -- calls -----------------------------------------------------------------------------------------------

    def span(self, memory: Memory, align: int = 1) -> tuple[int, int]:
        """Return a start and a length inside memory, both multiples of `align`."""
        count = len(memory.model) // align
        if self.random.random() < 0.3:
            return 0, count * align
        start = self.random.randrange(count)
        return start * align, self.random.randint(1, count - start) * align

    def host_may_touch(self, memory: Memory, write: bool) -> None:
        """Wait on the host until pinned memory can be read, or written."""
        for clock in (memory.written, memory.read if write else {}):
            for key, count in clock.items():
                if self.host.get(key, 0) < count:
                    self.order(key, None)

    def compare(self, memory: Memory) -> None:
        """Compare pinned memory with the model."""
        assert memory.bytes is not None
        self.host_may_touch(memory, write=False)
        self.same(np.frombuffer(memory.bytes, np.uint8), memory.model, f"pinned {memory.address:#x}")

    def same(self, got: np.ndarray, want: np.ndarray, label: str) -> None:
        """Raise `Wrong` where bytes differ."""
        if not np.array_equal(got, want):
            at = np.flatnonzero(got != want)
            first = int(at[0])
            text = f"{len(at)} of {len(want)} bytes differ, first at {first}: {got[first]}, not {want[first]}"
            raise Wrong(f"{label}: {text}")

    def memset(self, stream: Stream, memory: Memory) -> None:
        """Set all of a memory to a value."""
        width = self.random.choice([1, 2, 4])
        start, nbytes = self.span(memory, width) if memory.written else (0, len(memory.model))
        value = self.random.getrandbits(8 * width)
        self.after(stream, [], [memory])
        self.note(f"memset{8 * width}({memory.address:#x}+{start}, {nbytes}) in {stream.key}")
        memory.model[start : start + nbytes].view(f"u{width}")[:] = value
        word = {1: ctypes.c_ubyte, 2: ctypes.c_ushort, 4: ctypes.c_uint}[width](value)
        call = f"cuMemsetD{8 * width}"
        if stream.kind == "legacy" and self.random.random() < 0.5:
            getattr(self.cuda, f"{call}_v2")(memory.address + start, word, nbytes // width)
        else:
            getattr(self.cuda, f"{call}Async")(memory.address + start, word, nbytes // width, stream.handle)

    def copy_in(self, stream: Stream, memory: Memory, pinned: Memory | None) -> None:
        """Copy from the host; pageable bytes are overwritten at once, they were read."""
        start, nbytes = self.span(memory)
        if pinned:
            nbytes = min(nbytes, len(pinned.model))
            source: int | ctypes.Array[ctypes.c_char] = pinned.address
            data = pinned.model[:nbytes].copy()
        else:
            data = np.frombuffer(self.random.randbytes(nbytes), np.uint8)
            source = ctypes.create_string_buffer(data.tobytes(), nbytes)
        for key, count in pinned.written.items() if pinned and "pinned" not in self.relies else ():
            if max(self.host.get(key, 0), stream.clock.get(key, 0)) < count:
                self.order(key, stream)
        self.after(stream, [pinned] if pinned else [], [memory])
        self.note(f"in({memory.address:#x}+{start}, {nbytes}, {'pinned' if pinned else 'pageable'}) in {stream.key}")
        call, to = self.random.choice(["cuMemcpyHtoD", "cuMemcpy"]), memory.address + start
        is_synchronous = stream.kind == "legacy" and self.random.random() < 0.5
        if is_synchronous:
            getattr(self.cuda, "cuMemcpyHtoD_v2" if call == "cuMemcpyHtoD" else call)(to, source, nbytes)
            if pinned:
                join(self.host, stream.clock)
        else:
            call = f"{call}Async_v2" if call == "cuMemcpyHtoD" else f"{call}Async"
            getattr(self.cuda, call)(to, source, nbytes, stream.handle)
        self.keepalive.append(source)
        if not isinstance(source, int) and (is_synchronous or "source" in self.relies):
            ctypes.memset(source, 0xEE, nbytes)
        memory.model[start : start + nbytes] = data

    def copy_out(self, stream: Stream, memory: Memory, pinned: Memory | None) -> None:
        """Copy to the host; pageable bytes are there when the call returns."""
        start, nbytes = self.span(memory)
        if pinned:
            nbytes = min(nbytes, len(pinned.model))
        self.after(stream, [memory], [pinned] if pinned else [])
        self.note(f"out({memory.address:#x}+{start}, {nbytes}, {'pinned' if pinned else 'pageable'}) in {stream.key}")
        target = pinned.address if pinned else ctypes.create_string_buffer(b"\xcc" * nbytes, nbytes)
        is_synchronous = stream.kind == "legacy" and self.random.random() < 0.5
        if is_synchronous:
            self.cuda.cuMemcpyDtoH_v2(target, memory.address + start, nbytes)
        else:
            self.cuda.cuMemcpyDtoHAsync_v2(target, memory.address + start, nbytes, stream.handle)
            if not pinned and "target" not in self.relies:
                self.cuda.cuStreamSynchronize(stream.handle)
        if is_synchronous or not pinned:
            join(self.host, stream.clock)
        if pinned:
            pinned.model[:nbytes] = memory.model[start : start + nbytes]
        else:
            assert not isinstance(target, int)
            want = memory.model[start : start + nbytes]
            self.same(np.frombuffer(target, np.uint8), want, f"{memory.address:#x}+{start}")

    def copy(self, stream: Stream, to: Memory, source: Memory, kernel: str | None) -> None:
        """Copy, or add, on the device of `to`, or by a stream of the other's."""
        align = 4 if kernel == "add" else 1
        start, nbytes = self.span(to, align)
        nbytes = min(nbytes, len(source.model) // align * align)
        if to.device != source.device:
            to.is_shared = source.is_shared = True
        self.after(stream, [source], [to])
        self.note(f"{kernel or 'copy'}({to.address:#x}+{start}, {source.address:#x}, {nbytes}) in {stream.key}")
        if kernel:
            count = nbytes // 4 if kernel == "add" else nbytes
            self.cuda.launch(stream.device, stream.handle, kernel, to.address + start, source.address, count)
        else:
            self.copy_call(stream, to, start, source, nbytes)
        if kernel == "add":
            to.model[start : start + nbytes].view("u4")[:] += source.model[:nbytes].view("u4")
        else:
            to.model[start : start + nbytes] = source.model[:nbytes]

    def rows(self, stream: Stream, to: Memory, source: Memory) -> None:
        """Copy rows."""
        shape = Rows.make(self, len(to.model), len(source.model))
        self.after(stream, [source], [to])
        is_synchronous = stream.kind == "legacy" and self.random.random() < 0.5
        self.note(
            f"rows({to.address:#x}, {source.address:#x}, {shape}) in {stream.key}{' at once' if is_synchronous else ''}"
        )
        shape.post(self.cuda, to, source, None if is_synchronous else stream.handle)
        if is_synchronous and (to.bytes is not None or source.bytes is not None):
            join(self.host, stream.clock)
        shape.apply(to.model, source.model)

    def rewrite(self, memory: Memory) -> None:
        """Change pinned memory, or the program's own memory, while it is unused."""
        self.host_may_touch(memory, write=True)
        data = self.random.randbytes(len(memory.model))
        assert memory.bytes is not None
        memory.bytes[:] = data
        memory.model[:] = np.frombuffer(data, np.uint8)

    def copy_call(self, stream: Stream, to: Memory, start: int, source: Memory, nbytes: int) -> None:
        """Copy by one of the driver's calls."""
        is_synchronous = stream.kind == "legacy" and self.random.random() < 0.5
        # Peer access does not extend to memory allocated in a stream: such copies name the contexts of both ends.
        needs_peer = to.device != source.device and (to.of_stream or source.of_stream) and "pools" not in self.relies
        if self.random.random() < 0.5 or needs_peer:
            contexts = self.cuda.contexts
            ends = (to.address + start, contexts[to.device], source.address, contexts[source.device], nbytes)
            if is_synchronous:
                self.cuda.cuMemcpyPeer(*ends)
            else:
                self.cuda.cuMemcpyPeerAsync(*ends, stream.handle)
        elif is_synchronous:
            self.cuda.cuMemcpyDtoD_v2(to.address + start, source.address, nbytes)
        else:
            self.cuda.cuMemcpyDtoDAsync_v2(to.address + start, source.address, nbytes, stream.handle)

    def fill(self, stream: Stream, memory: Memory) -> None:
        """Launch the kernel that fills words."""
        start, nbytes = self.span(memory, 4)
        value = self.random.getrandbits(32)
        self.after(stream, [], [memory])
        self.note(f"fill({memory.address:#x}+{start}, {nbytes}) in {stream.key}")
        self.cuda.launch(memory.device, stream.handle, "fill", memory.address + start, nbytes // 4, value)
        memory.model[start : start + nbytes].view("u4")[:] = value

    def host_function(self, stream: Stream, pinned: Memory) -> None:
        """Let a function of the program change pinned memory when the stream gets there."""
        start, nbytes = self.span(pinned)
        value = self.random.randrange(256)
        self.after(stream, [], [pinned])
        self.note(f"host function({pinned.address:#x}+{start}, {nbytes}, {value}) in {stream.key}")
        seconds = self.random.choice([0, 0, 0.002])

        def work(_: int | None) -> None:
            time.sleep(seconds)
            ctypes.memset(pinned.address + start, value, nbytes)

        function = HOST_FUNCTION(work)
        self.functions.append(function)
        self.cuda.cuLaunchHostFunc(stream.handle, function, None)
        pinned.model[start : start + nbytes] = value

    def free(self, memory: Memory) -> None:
        """Free memory: at once, while calls are in flight, or in a stream."""
        if self.recorder:
            self.recorder.drop_users(memory)
        self.memory.remove(memory)
        for key in {*memory.written, *memory.read}:
            if self.device_of[key] != memory.device:  # a free waits for its own device alone
                self.order(key, None)
        self.cuda.use(memory.device)
        if memory.bytes is not None:
            # Host functions write when the program may: a free waits only for copies.
            if self.functions or "free_host" not in self.relies:
                self.host_may_touch(memory, write=True)
                self.cuda.use(memory.device)
            elif self.relies == {"free_host"}:
                self.late_copy(memory)
            self.note(f"freeHost({memory.address:#x})")
            memory.bytes.release()
            self.cuda.cuMemFreeHost(memory.address)
            self.new_pinned(memory.device)
            return
        if not memory.of_stream or self.random.random() < 0.3:
            if (memory.of_stream or memory.is_shared) and "free" not in self.relies:
                self.host_may_touch(memory, write=True)  # a free waits only for its own device, but copies may use two
                self.cuda.use(memory.device)
            self.note(f"free({memory.address:#x})")
            self.cuda.cuMemFree_v2(memory.address)
        else:
            stream = self.random.choice([stream for stream in self.streams if stream.device == memory.device])
            peers = [block for block in self.memory if block.device == memory.device and block.bytes is None]
            if peers and self.random.random() < 0.5:  # it is still in use when it is freed
                for _ in range(3):
                    self.cuda.launch(stream.device, stream.handle, "nap", 200)
                self.copy(stream, self.random.choice(peers), memory, None)
            self.after(stream, [], [memory])
            self.note(f"freeAsync({memory.address:#x}) in {stream.key}")
            self.cuda.cuMemFreeAsync(memory.address, stream.handle)
        self.new_memory(memory.device)

    def late_copy(self, pinned: Memory) -> None:
        """Begin a copy to pinned memory that ends long after the call that frees it."""
        stream = next(stream for stream in self.streams if stream.device == pinned.device and stream.kind != "legacy")
        source = next(memory for memory in self.memory if memory.device == pinned.device and memory.bytes is None)
        self.cuda.launch(stream.device, stream.handle, "nap", 20_000)
        self.copy_out(stream, source, pinned)

    def destroy(self, stream: Stream) -> None:
        """Destroy a stream while its work may still run, and create another one."""
        self.streams.remove(stream)
        join(self.destroyed[stream.device], stream.clock)
        self.note(f"destroy({stream.key})")
        self.cuda.cuStreamDestroy_v2(stream.handle)
        self.new_stream(stream.device)

    def step(self) -> None:
        """Do one random thing."""
        device = self.random.choice(self.memory).device
        self.cuda.use(device)
        stream = self.random.choice([stream for stream in self.streams if stream.device == device])
        own = [memory for memory in self.memory if memory.device == device]
        on_device = [memory for memory in own if memory.bytes is None]
        pinned = [memory for memory in own if memory.bytes is not None]
        memory, host = self.random.choice(on_device), self.random.choice([None, *pinned])
        match self.random.randrange(28):
            case 0 | 1 | 2:
                self.copy_in(stream, memory, host)
            case 3 | 4:
                self.copy_out(stream, memory, host)
            case 5 | 6 | 7 | 8:
                operand = self.random.choice([block for block in self.memory if block.bytes is None])
                peers = self.peers and ("pools" in self.relies or not operand.of_stream)
                kernel = self.random.choice([None, "copy", "add"]) if operand.device == device or peers else None
                if operand is not memory:
                    self.copy(stream, *self.random.choice([(memory, operand), (operand, memory)]), kernel)
            case 9 | 10:
                self.fill(stream, memory)
            case 11 | 12:
                self.memset(stream, memory)
            case 13:
                for _ in range(self.random.choice([1, 1, 12])):
                    self.cuda.launch(device, stream.handle, "nap", self.random.randint(1, 200))
            case 14:
                self.wait_on_host(stream)
            case 15:
                self.record(stream)
            case 16 if self.events:
                self.wait(stream, self.random.choice(self.events))
            case 17 if self.events:
                event = self.events.pop(self.random.randrange(len(self.events)))
                self.cuda.use(event.device)
                self.note(f"destroy({event.handle:#x})")
                self.cuda.cuEventDestroy_v2(event.handle)
            case 18:
                self.free(self.random.choice(own))
            case 19 if stream.handle > PER_THREAD:
                self.destroy(stream)
            case 21 if pinned:
                written = self.random.choice(pinned)
                self.host_function(stream, written)
                if self.random.random() < 0.5:
                    siblings = [peer for peer in self.streams if peer.device == device and peer.kind != "free"]
                    self.copy_in(self.random.choice([stream, *siblings]), memory, written)
            case 20 if pinned:
                block = self.random.choice(pinned)
                self.compare(block)
                self.rewrite(block)
            case 22 | 23 if self.recorder:
                operand = self.random.choice([block for block in own if block is not memory] or [memory])
                if operand is not memory:
                    self.rows(stream, *self.random.choice([(memory, operand), (operand, memory)]))
            case 24 | 25 | 26 | 27 if self.recorder:
                self.recorder.step(device)

    def run(self) -> None:
        """Execute, compare all memory, and let everything go."""
        for number in range(self.steps):
            self.random = random.Random(f"{self.seed}/{number}")  # a step is the same if other steps are skipped
            if number not in self.skip:
                self.step()
        for device in self.destroyed:
            if self.random.random() < 0.5:
                self.synchronize_context(device)
        for memory in self.memory:
            self.cuda.use(memory.device)
            if memory.bytes is None:
                streams = [stream for stream in self.streams if stream.device == memory.device]
                self.copy_out(self.random.choice(streams), memory, None)
            else:
                self.compare(memory)
        self.close()

    def close(self) -> None:
        """Let everything go."""
        if self.recorder:
            self.recorder.close()
        for pool in self.pools.values():
            self.cuda.cuMemPoolDestroy(pool)
        for device in self.destroyed if self.functions or self.relies != LAYER else ():
            self.synchronize_context(device)
        for memory in self.memory:
            self.cuda.use(memory.device)
            if memory.bytes is None:
                self.cuda.cuMemFree_v2(memory.address)
            else:
                memory.bytes.release()
                self.cuda.cuMemFreeHost(memory.address)
        for event in self.events:
            self.cuda.use(event.device)
            self.cuda.cuEventDestroy_v2(event.handle)
        for stream in self.streams:
            if stream.handle > PER_THREAD:
                self.cuda.use(stream.device)
                self.cuda.cuStreamDestroy_v2(stream.handle)


def run(cuda: Cuda, seeds: Iterator[int], devices: int, found: list[str], legacy: bool = True) -> None:
    """Run programs until one is wrong."""
    for seed in seeds:
        if found:
            return
        program = None
        try:
            program = Program(cuda, seed, devices, legacy=legacy)
            program.run()
        except Exception as error:
            steps = "\n  ".join(program.text[-12:]) if program else ""
            found.append(f"seed {seed}: {type(error).__name__}: {error}\n  {steps}")
            return


def main(arguments: list[str] | None = None) -> int:
    """Run the programs of a range of seeds; print the first that is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.driver.programs", description=main.__doc__)
    parser.add_argument("--seeds", default="0:100", help="first and end")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads that run programs side by side")
    relied = ",".join(sorted(LAYER))
    parser.add_argument("--relies", default=relied, help="on what programs rely beyond CUDA's promises")
    chosen = parser.parse_args(arguments)
    Program.relies = frozenset(filter(None, chosen.relies.split(",")))
    Program.alone = chosen.threads == 1
    first, end = map(int, chosen.seeds.split(":"))
    cuda = Cuda()
    devices = cuda.start(chosen.devices)
    found: list[str] = []
    seeds = iter(range(first, end))
    if chosen.threads == 1:
        run(cuda, seeds, devices, found)
    else:
        shares = [iter(range(first + k, end, chosen.threads)) for k in range(chosen.threads)]
        threads = [threading.Thread(target=run, args=(cuda, share, devices, found)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(found[0] if found else f"{end - first} programs are right", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
