"""FakeGpu: streams, events and words in host memory, so that a `CudaExecutor` can be tested without a GPU.

A stream is a thread that executes its operations in order; workers are threads that run the kernel's blocks on the
`cpu` target. Operations run in the order of a GPU, and interleave like its operations; times differ.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from warpwell import errors
from warpwell._os import clock
from warpwell.scheduler.executors.launch_queues import LaunchQueues, address_of
from warpwell.targets.blocks.control import LEFT
from warpwell.targets.blocks.launch import BlockLaunch
from warpwell.targets.memory import Block, memory_for, view_of
from warpwell.targets.native import native
from warpwell.targets.primitives import SYSTEM, load_acquire


class _Stream:
    streams: ClassVar[dict[int, _Stream]] = {}

    def __init__(self, key: int, memory: Sequence[Any] = ()) -> None:
        self.warpwell_key = key
        self.handle = next(_numbers)
        self.streams[self.handle] = self
        self.operations: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Kernels of a lost GPU still use the memory, so the thread keeps it.
        threading.Thread(target=self._work, args=(memory,), daemon=True).start()

    def _work(self, memory: Sequence[Any]) -> None:
        while (operation := self.operations.get()) is not None:
            operation()


_numbers = itertools.count(1)


class FakeForms:
    """Replaces `Forms`: threads run a launch's blocks."""

    def __init__(self, blocks: BlockLaunch, resident: int, uses_rows: bool) -> None:
        self._blocks = blocks
        if not blocks.participants:  # launches with the same signature start only after the end of this launch
            self._blocks = blocks.launch.cut(blocks.args, blocks.device)
            self._blocks.flag = blocks.flag
            self._blocks.begin()
        self._blocks.prepare()
        self._resident = resident
        self._uses_rows = uses_rows
        self.max_workers = 0
        """Maximum number of workers that ran at the same time."""
        self._rows: list[_Row] = []
        self._now = 0
        self._started: collections.Counter[int] = collections.Counter()
        self._lock = threading.Lock()

    def resources(self, form: str) -> dict[str, int]:
        """See `Forms`."""
        return {"registers": 32, "shared": 0, "local": 0, "threads": 256, "resident": self._resident}

    def start(self, control: int, base: int, workers: int, stream: _Stream, chunk: int = 1) -> None:
        """See `Forms`."""
        stream.operations.put(self._workers(control, base, workers))

    def _workers(self, control: int, base: int, workers: int) -> Callable[[], None]:
        def work(worker: int) -> None:
            with self._lock:
                self._now += 1
                self._started[control] += 1
                # A worker counts itself as left before its thread returns, so other workers may start before that.
                self.max_workers = max(
                    self.max_workers, self._started[control] - int(view_of(control + 8 * LEFT, 8, np.int64)[0])
                )
            self._blocks.work(control, worker)
            with self._lock:
                self._now -= 1

        def operation() -> None:
            threads = [threading.Thread(target=work, args=(base + k,)) for k in range(workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return operation

    def workers_row(self, control: int, base: int, workers: int, chunk: int = 1) -> NDArray[np.int64] | None:
        """See `Forms`."""
        return self._row(self._workers(control, base, workers))

    def _row(self, operation: Callable[[], None]) -> NDArray[np.int64] | None:
        if not self._uses_rows:
            return None
        self._rows.append(_Row(operation))
        return self._rows[-1].fields

    def start_plain(self, stream: _Stream) -> None:
        """See `Forms`."""
        stream.operations.put(self._run_whole)

    def _run_whole(self) -> None:
        self._blocks.launch(*self._blocks.args, device="cpu")

    lasting = True

    def plain_row(self) -> NDArray[np.int64] | None:
        """See `Forms`."""
        return self._row(self._run_whole)


class _Row:
    """An operation that a row of a queue launches."""

    def __init__(self, operation: Callable[[], None]) -> None:
        self.operation = operation
        self.fields = np.zeros(9, np.int64)
        self.fields[7] = id(self)
        _functions[id(self)] = self


_functions: weakref.WeakValueDictionary[int, _Row] = weakref.WeakValueDictionary()
"""The functions that rows of queues name."""


@native
def _reached(event, _a, _b, _c, _d, _e):
    word = load_acquire(event, SYSTEM)
    return 0 if word > 0 else 600 if word == 0 else LOST


LOST = 700
"""CUDA_ERROR_ILLEGAL_ADDRESS."""


_CALL_FIELDS = (ctypes.c_int64,) * 7


@ctypes.CFUNCTYPE(*_CALL_FIELDS)
def _launch(row: int, function: int, *_: int) -> int:
    stream = _Stream.streams[int(view_of(row, 56, np.int64)[4])]
    stream.operations.put(_functions[function].operation)
    return 0


@ctypes.CFUNCTYPE(*_CALL_FIELDS)
def _record(event: int, stream: int, *_: int) -> int:
    word = view_of(event, 16, np.int64)
    word[0] = min(word[0], 0)  # negative if the GPU is lost, and stays so

    def reach() -> None:
        word[1] = clock.monotonic_ns()
        word[0] |= 1

    _Stream.streams[stream].operations.put(reach)
    return 0


class FakeGpu:
    """Replaces `Gpu`.

    Parameters
    ----------
    resident : int
        Maximum number of workers of a kernel.
    uses_rows : bool
        Whether the native thread of `LaunchQueues` launches the kernels. Otherwise, Python launches them.
    """

    device = "cpu"
    processors, registers, shared, threads = 4, 1 << 18, 1 << 17, 2048
    clock = 1e9
    name, bandwidth = "stand-in", 1e10

    def __init__(self, resident: int = 4, uses_rows: bool = True) -> None:
        self.resident = resident
        self._uses_rows = uses_rows
        self.made: list[FakeForms] = []
        self._streams: list[_Stream] = []
        self._events: list[Any] = []
        self._memory: list[Any] = []
        self.default: list[Callable[[], object]] = []
        """Operations that the default stream has not run yet; only `wait_default` waits for them."""

    @functools.cached_property
    def launch_queues(self) -> LaunchQueues:
        """See `Gpu`."""
        functions = [address_of(_launch), address_of(_record), _reached.address]
        return LaunchQueues(functions, self.new_events, self.new_stream, self.enter)

    def new_events(self, count: int, timing: bool = False) -> list[int]:
        """See `Gpu`."""
        made = [np.zeros(2, np.int64) for _ in range(count)]
        self._events += made
        self._memory += made
        return [int(fields.ctypes.data) for fields in made]

    def lose(self) -> None:
        """Make each event report a fault."""
        for fields in self._events:
            fields[0] = -1

    def record(self, event: int, stream: _Stream) -> None:
        """See `Gpu`."""
        _record(event, stream.handle, 0, 0, 0, 0)

    def between(self, first: int, last: int) -> float:
        """See `Gpu`."""
        return 1e-9 * float(view_of(last, 16, np.int64)[1] - view_of(first, 16, np.int64)[1])

    def failure(self, status: int, name: str) -> BaseException:
        """See `Gpu`."""
        return errors.DeviceNotFoundError(f"the GPU refused a call ({status}): a kernel may have failed")

    def enter(self) -> None:
        """See `Gpu`."""

    def memory_info(self) -> tuple[int, int]:
        """See `Gpu`."""
        return 1 << 30, 1 << 30

    def forms(self, blocks: BlockLaunch) -> FakeForms:
        """See `Gpu`. Waits for the default stream, as the begin of arguments on a GPU does."""
        self.wait_default()
        self.made.append(FakeForms(blocks, self.resident, self._uses_rows))
        return self.made[-1]

    def at_hand(self, launch: Any, args: Sequence[Any]) -> bool:
        """See `Gpu`."""
        return any(key[0] == "cpu-blocks" for key in launch.kernel.compiled)

    def launch_signature(self, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """See `Gpu`. The arrays are NumPy's."""
        found: list[Any] = []
        for value in args:
            if type(value) is np.ndarray:
                found += value.ctypes.data, value.shape, value.strides, value.dtype
            elif isinstance(value, np.generic):
                found += value.dtype, value.tobytes()
            elif isinstance(value, int | float):
                found += type(value), value
            else:
                return None
        return tuple(found)

    def allocate(self, nbytes: int) -> Block:
        """See `Gpu`."""
        block = memory_for("cpu").allocate(nbytes)
        self._memory.append(block)
        return block

    def allocate_shared(self, nbytes: int) -> Block:
        """See `Gpu`."""
        return self.allocate(nbytes)

    def new_stream(self, priority: int = 0) -> _Stream:
        """See `Gpu`."""
        self._streams.append(_Stream(priority, self._memory))
        return self._streams[-1]

    def wait_default(self) -> None:
        """See `Gpu`."""
        while self.default:
            self.default.pop(0)()

    def done(self, event: threading.Event) -> bool:
        """See `Gpu`."""
        return event.is_set()

    def synchronize(self, stream: _Stream) -> None:
        """See `Gpu`."""
        event = threading.Event()
        stream.operations.put(event.set)
        event.wait()

    def set_word(self, address: int, value: int) -> None:
        """See `Gpu`."""
        view_of(address, 8, np.int64)[0] = value

    def reset_words(self, addresses: Sequence[int], fields: Sequence[int]) -> threading.Event:
        """See `Gpu`."""
        assert len(addresses) * len(fields) < 256  # cuStreamBatchMemOp refuses more than 256 operations
        for address in addresses:
            view_of(address, 8 * len(fields), np.int64)[:] = fields
        event = threading.Event()
        event.set()
        return event

    def wait_word(self, stream: _Stream, address: int, minimum: int) -> None:
        """See `Gpu`."""
        word = view_of(address, 8, np.int64)

        def operation() -> None:
            while word[0] < minimum:
                time.sleep(1e-4)

        stream.operations.put(operation)

    def read_words(self, address: int, count: int) -> NDArray[np.int64]:
        """See `Gpu`."""
        return view_of(address, 8 * count, np.int64).copy()

    def close(self) -> None:
        """See `Gpu`."""
        for stream in self._streams:
            stream.operations.put(None)
        self._streams.clear()


def fake_executor(**options: Any) -> Any:
    """Return a `CudaExecutor` over a `FakeGpu`."""
    from warpwell.scheduler.executors.cuda_executor import CudaExecutor

    return CudaExecutor(gpu=FakeGpu(**options))
