"""Gpu: streams, partitions, events and flags of one GPU, for those who run many kernels on it at the same time."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..kernel import has_cuda
from ..memory import Block, memory_for

MIRROR_WORDS = 64
"""Words of pinned memory that control words are read into."""

_WRITE_WORD = 5
"""CU_STREAM_MEM_OP_WRITE_VALUE_64."""

_thread = threading.local()
"""The GPU that `Gpu.enter` made the calling thread's."""


class Gpu:
    """One GPU, with a stream for control that no kernel and no large copy holds up.

    Partitions are green contexts: disjoint sets of multiprocessors. To make a pair takes 2 to 3 ms, so they are made
    here and not when a task comes. Streams of the whole GPU reach every multiprocessor, those of partitions too.

    Parameters
    ----------
    ordinal : int
    pairs : sequence of int
        For each number n: one partition of about n multiprocessors and one of the rest. The driver rounds up.

    Attributes
    ----------
    bandwidth, cache : float, int
        Bytes a second of its memory, and bytes of its second-level cache; 0 where the driver does not say.
    partitions : dict
        Name and multiprocessors: ``"a32"`` and ``"b32"`` for the pair that was asked for with 32.
    """

    def __init__(self, ordinal: int = 0, pairs: Sequence[int] = ()) -> None:
        if not has_cuda():
            raise errors.DeviceNotFoundError("no GPU was found: use device='cpu'", device=f"cuda:{ordinal}")
        from cuda.bindings import driver
        from numba import cuda

        from ..compiler import run_cuda

        if not 0 <= ordinal < len(cuda.gpus):
            raise errors.DeviceNotFoundError(f"there is no GPU {ordinal}: {len(cuda.gpus)} were found", device="cuda")
        self.ordinal = ordinal
        self._driver = driver
        self.partitions: dict[str, int] = {}
        self._contexts: dict[str, Any] = {}
        self._idle: dict[tuple[int, str | None], list[Any]] = {}
        self._held: list[Any] = []
        # called by itself: the bindings want an object for each operation
        self._batch = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
        self._batch.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        with self.on_device():
            run_cuda.share_fault_page()
            cuda.current_context()
            device = cuda.get_current_device()
            self.name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
            self.processors = int(device.MULTIPROCESSOR_COUNT)
            self.registers = 4 * int(device.MAX_REGISTERS_PER_MULTIPROCESSOR)
            self.shared = int(device.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
            self.threads = int(device.MAX_THREADS_PER_MULTIPROCESSOR)
            self.clock = 1e3 * float(device.CLOCK_RATE)
            self.memory = int(cuda.current_context().get_memory_info().total)
            # of double data rate; 0 where the driver does not say
            self.bandwidth = 2e3 * self._attribute("MEMORY_CLOCK_RATE") * self._attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
            self.cache = self._attribute("L2_CACHE_SIZE")
            _, self._least, self._greatest = self._check(driver.cuCtxGetStreamPriorityRange())
            self._control = self.stream(priority=8)
            self._mirror = memory_for("cuda").allocate_shared(8 * MIRROR_WORDS)
            for count in pairs:
                self._split(count)

    def _attribute(self, name: str) -> int:
        """Return an attribute of the device, 0 where the driver does not have it."""
        wanted = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if wanted is None:
            return 0
        status, value = self._driver.cuDeviceGetAttribute(wanted, self.ordinal)
        return int(value) if int(status) == 0 else 0

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make this the current GPU of the calling thread for a block."""
        from numba import cuda

        return cuda.gpus[self.ordinal]  # type: ignore[no-any-return]

    def _split(self, count: int) -> None:
        from cuda.core import ContextOptions, Device, SMResourceOptions

        device = Device(self.ordinal)
        device.set_current()
        whole = device.resources.sm
        if not 0 < count < whole.sm_count:
            raise errors.ArgumentError(f"a partition of {count} multiprocessors: the GPU has {whole.sm_count}")
        (group,), rest = whole.split(SMResourceOptions(count=count))
        for side, resource in (("a", group), ("b", rest)):
            name = f"{side}{count}"
            self._contexts[name] = device.create_context(ContextOptions(resources=[resource]))
            self.partitions[name] = int(resource.sm_count)

    def _check(self, result: Any) -> Any:
        if int(result[0]) != 0:
            raise errors.DeviceNotFoundError(f"the GPU refused a call ({result[0]}): a kernel may have failed")
        return result

    # -- streams and events ----------------------------------------------------------------------------------

    def stream(self, priority: int = 0, partition: str | None = None) -> Any:
        """Return an idle stream that waits for no other (to be given back with `release`).

        Parameters
        ----------
        priority : int
            0 is the least; larger is sooner, as far as the GPU has levels. It matters when blocks are placed.
        partition : str, optional
        """
        if partition is not None and partition not in self._contexts:
            raise errors.ArgumentError(
                f"there is no partition {partition!r}: the GPU was divided into {', '.join(self._contexts) or 'none'}"
            )
        from numba import cuda

        level = max(self._greatest, self._least - max(0, priority))
        key = level, partition
        if self._idle.get(key):
            return self._idle[key].pop()
        if partition is None:
            flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            handle = self._check(self._driver.cuStreamCreateWithPriority(flags, level))[1]
            self._held.append(handle)
            stream = cuda.external_stream(int(handle))
        else:
            from cuda.core import StreamOptions

            made = self._contexts[partition].create_stream(options=StreamOptions(nonblocking=True, priority=level))
            self._held.append(made)
            stream = cuda.external_stream(int(made.handle))
        stream.warpwell_key = key
        return stream

    def release(self, stream: Any) -> None:
        """Give an idle stream back."""
        self._idle.setdefault(stream.warpwell_key, []).append(stream)

    def mark(self, stream: Any, timing: bool = False) -> Any:
        """Return an event behind all that the stream was given so far."""
        from numba import cuda

        event = cuda.event(timing=timing)
        event.record(stream)
        return event

    def done(self, event: Any) -> bool:
        """Tell whether an event was reached; raise `DeviceNotFoundError` where a kernel before it faulted."""
        result = self._driver.cuEventQuery(event.handle)[0]
        if result == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check((result,))
        return True

    def elapsed(self, first: Any, last: Any) -> float:
        """Return the seconds between two events that were marked with `timing` and reached."""
        from numba import cuda

        return 1e-3 * float(cuda.event_elapsed_time(first, last))

    def after(self, stream: Any, event: Any) -> None:
        """Let what the stream is given from now on wait for an event."""
        event.wait(stream)

    # -- words -----------------------------------------------------------------------------------------------

    def set_word(self, address: int, value: int) -> None:
        """Set a word of device memory as soon as possible, whatever runs; return at once.

        By a stream operation, which no copy engine carries: large copies do not hold it up.
        """
        handle = int(self._control.handle)
        self._check(self._driver.cuStreamWriteValue64(handle, address, value, 0))

    def wait_word(self, stream: Any, address: int, least: int) -> None:
        """Hold up a stream until a word has at least a value, as `set_word` and `set_words` before leave it."""
        self.after(stream, self.mark(self._control))
        at_least = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._check(self._driver.cuStreamWaitValue64(int(stream.handle), address, least, int(at_least)))

    def set_words(self, stream: Any, address: int, words: Sequence[int]) -> None:
        """Set words before what `stream` is given from now on, and before later `set_word` and `read_words`."""
        self.write_words(self._control, address, words)
        self.after(stream, self.mark(self._control))

    def write_words(self, stream: Any, address: int, words: Sequence[int]) -> None:
        """Set words of device memory, in a stream's order, by one call."""
        operations = np.zeros((len(words), 6), np.uint64)  # CUstreamBatchMemOpParams: a union of six words
        operations[:, 0] = _WRITE_WORD
        operations[:, 1] = np.arange(address, address + 8 * len(words), 8)
        operations[:, 2] = np.asarray(words, np.int64).view(np.uint64)
        status = self._batch(int(stream.handle), len(words), operations.ctypes.data, 0)
        self._check((status,))

    def read_words(self, address: int, count: int) -> NDArray[np.int64]:
        """Return words of device memory, as they are now; waits for nothing that runs (tens of microseconds)."""
        handle = int(self._control.handle)
        self._check(self._driver.cuMemcpyDtoHAsync(self._mirror.address, address, 8 * count, handle))
        self._check(self._driver.cuStreamSynchronize(handle))
        return self._mirror.words[:count].copy()

    # -- launches --------------------------------------------------------------------------------------------

    device = "cuda"

    def forms(self, blocks: Any) -> Any:
        """Return the compiled forms of a `BlockLaunch` that has begun (see `blocks_cuda.Forms`)."""
        return blocks.forms()

    def at_hand(self, launch: Any, args: Sequence[Any]) -> bool:
        """Tell whether a launch may begin at once: its arguments are in device memory, and some form is compiled."""
        for value in args:
            if not isinstance(value, int | float | np.generic) and not hasattr(value, "__cuda_array_interface__"):
                return False
        return any(key[0] == "cuda-forms" for key in launch.kernel.compiled)

    def allocate(self, nbytes: int) -> Block:
        """Return zeroed device memory."""
        with self.on_device():
            return memory_for("cuda").allocate(nbytes)

    def free_memory(self) -> int:
        """Return bytes of device memory that nobody holds."""
        from numba import cuda

        with self.on_device():
            return int(cuda.current_context().get_memory_info().free)

    def synchronize(self, stream: Any) -> None:
        """Wait for everything that a stream was given."""
        stream.synchronize()

    def enter(self) -> None:
        """Make this the GPU of the calling thread for good."""
        from numba import cuda

        if getattr(_thread, "ordinal", None) != self.ordinal:
            cuda.select_device(self.ordinal)
            _thread.ordinal = self.ordinal

    def close(self) -> None:
        """Destroy streams and partitions; nothing may run in them."""
        held, self._held = self._held, []
        self._idle.clear()
        for stream in held:
            if hasattr(stream, "close"):
                stream.close()
            else:
                self._driver.cuStreamDestroy(stream)
        contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            context.close()
        self.partitions = {}
