"""`Gpu`: a GPU as the executor uses it: streams that a native thread fills, events without a time, control words."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...libcuda import driver
from ...targets import Block, GpuDevice, memory_for
from .launch_queues import LaunchQueues, address_of

MIRROR_WORDS = 64
"""Words of pinned memory that control words are read into."""

_WRITE_WORD = 5
"""CU_STREAM_MEM_OP_WRITE_VALUE_64."""

_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""


class Gpu(GpuDevice):
    """One GPU, with a stream for control that kernels and large copies do not delay.

    Parameters
    ----------
    ordinal : int

    Attributes
    ----------
    bandwidth : float
        Memory bandwidth in bytes a second; 0 if the driver does not report it.
    """

    device = "cuda"

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__(ordinal)
        self._events: list[int] = []
        properties = self._core.Device(ordinal).properties
        self.processors = int(properties.multiprocessor_count)
        self.registers = 4 * int(properties.max_registers_per_multiprocessor)
        self.shared = int(properties.max_shared_memory_per_multiprocessor)
        self.threads = int(properties.max_threads_per_multiprocessor)
        self.clock = 1e3 * float(properties.clock_rate)
        # The memory has double data rate. The driver may report 0.
        self.bandwidth = 2e3 * properties.memory_clock_rate * properties.global_memory_bus_width / 8
        # Direct calls: the bindings create objects for each call, which takes as long as the call.
        library = driver()
        self._batch = library.cuStreamBatchMemOp_v2
        self._write_value, self._wait_value = library.cuStreamWriteValue64_v2, library.cuStreamWaitValue64_v2
        self._control = self.new_stream(priority=8)
        self._control_handle = int(self._control.handle)
        with self.on_device():
            self._mirror = memory_for("cuda").allocate_shared(8 * MIRROR_WORDS)

    # -- streams ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def launch_queues(self) -> LaunchQueues:
        """The launch queues with their native thread. Close them before the GPU."""
        library = driver()
        functions = (library.cuLaunchKernelEx, library.cuEventRecord, library.cuEventQuery)
        return LaunchQueues([address_of(f) for f in functions], self.new_events, self.new_stream, self.enter)

    def new_events(self, count: int, timing: bool = False) -> list[int]:
        """Return the handles of new events, with times or without them."""
        made = (ctypes.c_void_p * count)()
        create, flags = driver().cuEventCreate, self.driver.CUevent_flags
        kind = int(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING)
        with self.on_device():
            for k in range(count):
                self.check((create(ctypes.byref(made, 8 * k), kind),))
                self._events.append(int(made[k] or 0))
        return self._events[-count:]

    def failure(self, status: int, name: str) -> BaseException:
        """Return the exception for a driver status of kernel `name`; see `check_kernel`."""
        try:
            self.check_kernel((self.driver.CUresult(status),), name)
        except (errors.ArgumentError, errors.DeviceNotFoundError) as error:
            return error
        return errors.DeviceNotFoundError(f"kernel {name!r} ended with status {status}")

    def record(self, event: int, stream: Any) -> None:
        """Record an event of `new_events` after all work that a stream has so far."""
        self.check(self.driver.cuEventRecord(event, stream.handle))

    def between(self, first: int, last: int) -> float:
        """Return the seconds between two events of `new_events` that were reached."""
        return 1e-3 * float(self.check(self.driver.cuEventElapsedTime(first, last)))

    # -- words -----------------------------------------------------------------------------------------------

    def set_word(self, address: int, value: int) -> None:
        """Set a word of device memory as soon as possible, even while kernels run, without waiting for it.

        A stream operation does not use a copy engine, so large copies do not delay it. The call releases the
        interpreter lock: if another thread frees memory, the driver may wait for kernels that wait for Python threads.
        """
        self.check((self._write_value(self._control_handle, address, value, 0),))

    def wait_word(self, stream: Any, address: int, minimum: int) -> None:
        """Make a stream wait until a word has at least a value."""
        self.check((self._wait_value(int(stream.handle), address, minimum, _AT_LEAST),))

    def reset_words(self, addresses: Sequence[int], values: Sequence[int]) -> Any:
        """Set the words at each address after all `set_word` calls (fewer than 256 words); return an event after it."""
        targets = np.asarray(addresses, np.uint64)[:, None] + 8 * np.arange(len(values), dtype=np.uint64)
        self._write(self._control, targets.ravel(), np.tile(np.asarray(values, np.int64), len(addresses)))
        return self.mark(self._control)

    def write_words(self, stream: Any, address: int, values: Sequence[int]) -> None:
        """Set words of device memory, in a stream's order, by one call."""
        self._write(stream, np.arange(address, address + 8 * len(values), 8), np.asarray(values, np.int64))

    def _write(self, stream: Any, addresses: NDArray[Any], values: NDArray[np.int64]) -> None:
        operations = np.zeros((len(values), 6), np.uint64)  # CUstreamBatchMemOpParams: a union of six words
        operations[:, 0] = _WRITE_WORD
        operations[:, 1] = addresses
        operations[:, 2] = values.view(np.uint64)
        self.check((self._batch(int(stream.handle), len(values), operations.ctypes.data, 0),))

    def read_words(self, address: int, count: int) -> NDArray[np.int64]:
        """Return the current words of device memory, without waiting for kernels (tens of microseconds)."""
        self.to_host(self._control, self._mirror.address, address, 8 * count)
        self.synchronize(self._control)
        return self._mirror.words[:count].copy()

    # -- launches --------------------------------------------------------------------------------------------

    def forms(self, blocks: Any) -> Any:
        """Return the compiled forms of a launch that has begun (see `targets.blocks.cuda.Forms`)."""
        keeps = getattr(blocks, "kept_forms", None)
        return blocks.forms() if keeps is None else keeps(self.ordinal, self.launch_signature)

    def at_hand(self, launch: Any, args: Sequence[Any]) -> bool:
        """Return True if a launch may begin at once: its arguments are in device memory, and some form is compiled."""
        for value in args:
            if not isinstance(value, int | float | np.generic) and not hasattr(value, "__cuda_array_interface__"):
                return False
        return any(key[0] == "cuda-forms" for key in list(launch.kernel.compiled))

    def launch_signature(self, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return types and values of numbers and device arrays, equal if the arguments are; None for other objects."""
        found: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is int or kind is bool:
                found += kind, value
            elif kind is float:
                found.append(value.hex())  # 0.0 and -0.0 must differ
            elif issubclass(kind, np.generic):
                found += value.dtype, value.tobytes()
            elif (memory := getattr(value, "gpu_data", None)) is not None:  # an array of numba-cuda's
                pointer = memory.device_ctypes_pointer.value
                found += kind, pointer, value.shape, value.strides, value.dtype
            else:
                try:
                    interface = value.__cuda_array_interface__
                except Exception:  # not an array, or a tensor of PyTorch with gradients, which raises RuntimeError
                    return None
                if interface.get("stream") not in (None, 1):  # each launch must wait for this stream, too
                    return None
                found += kind, interface["data"], interface["shape"], interface.get("strides"), interface["typestr"]
        return tuple(found)

    def allocate(self, nbytes: int) -> Block:
        """Return zeroed device memory."""
        with self.on_device():
            return memory_for("cuda").allocate(nbytes)

    def allocate_shared(self, nbytes: int) -> Block:
        """Return zeroed pinned memory."""
        with self.on_device():
            return memory_for("cuda").allocate_shared(nbytes)

    def close(self) -> None:
        """Destroy the events and the stream for control; nothing may run in it."""
        events, self._events = self._events, []
        for event in events:
            self.driver.cuEventDestroy(event)
        self._control.close()
