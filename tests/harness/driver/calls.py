"""The CUDA driver's C interface by ctypes, as an unmodified program meets it: `libcuda.so.1`, found by the loader.

Works on the fake driver, on the layer, and on a real driver. Nothing of Warpwell is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, DEINITIALIZED = 0, 1, 2, 3, 4
NO_DEVICE, INVALID_DEVICE, INVALID_IMAGE, INVALID_CONTEXT = 100, 101, 200, 201
INVALID_HANDLE, NOT_FOUND, NOT_READY = 400, 500, 600
ALREADY_ENABLED, NOT_ENABLED, PEER_UNSUPPORTED = 704, 705, 217
ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED, NOT_SUPPORTED, UNKNOWN = 700, 709, 801, 999
NON_BLOCKING = 1
DISABLE_TIMING = 2
LEGACY, PER_THREAD = 1, 2

KERNELS = {
    "fill": "QQI",  # address, words, value
    "copy": "QQQ",  # to, from, bytes
    "add": "QQQ",  # to, from, words
    "nap": "I",  # microseconds
    "flag": "QI",  # wait until the word at an address has a value
    "fault": "",  # the context is lost: ILLEGAL_ADDRESS
    "fail": "",  # an assertion: a line on standard error, and the context is lost
    "print": "I",  # a line on standard output, at the next synchronization
}
"""Kernels of the image, with their parameters as ctypes letters: Q 8 bytes, I 4."""
MANY = {"fill": 256, "copy": 256, "add": 256}
"""Kernels whose threads share the work: how many there are."""
IMAGE = (Path(__file__).parents[3] / "lab" / "driver" / "kernels.ptx").read_bytes()
"""For the fake driver, and for GPUs."""
TYPES = {"Q": ctypes.c_uint64, "I": ctypes.c_uint32}


class End(ctypes.Structure):
    """One side of a copy of rows."""

    _fields_ = [
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    ]


class Rows(ctypes.Structure):
    """A copy of rows: CUDA_MEMCPY2D."""

    _fields_ = [("source", End), ("to", End), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


HOST_SIDE, DEVICE_SIDE, ARRAY_SIDE, EITHER_SIDE = 1, 2, 3, 4


class CudaError(Exception):
    """A call returned a code that is not success."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


class Cuda:
    """The driver, its primary contexts and the kernels of the image. Calls raise `CudaError`.

    Methods that begin with ``cu`` are the driver's own: ``cuda.cuMemFree_v2(address)``.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        self.library = ctypes.CDLL(path)
        self.contexts: list[int] = []
        self.modules: dict[int, int] = {}
        self.functions: dict[tuple[int, str], int] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = getattr(self.library, name)

        def call(*arguments: Any) -> None:
            code = function(*(ctypes.c_uint64(a) if type(a) is int else a for a in arguments))
            if code:
                raise CudaError(name, code)

        setattr(self, name, call)
        return call

    def code(self, name: str, *arguments: Any) -> int:
        """Return what a call returns."""
        return int(getattr(self.library, name)(*(ctypes.c_uint64(a) if type(a) is int else a for a in arguments)))

    def out(self, name: str, *arguments: Any, kind: type = ctypes.c_uint64) -> int:
        """Return what a call stores behind its first argument."""
        value = kind()
        getattr(self, name)(ctypes.byref(value), *arguments)
        return int(value.value)

    def start(self, devices: int | None = None) -> int:
        """Initialize, retain the primary contexts, load the image, make the first context current."""
        self.cuInit(0)
        count = self.out("cuDeviceGetCount", kind=ctypes.c_int)
        for ordinal in range(count if devices is None else devices):
            self.contexts.append(self.out("cuDevicePrimaryCtxRetain", ctypes.c_int(ordinal)))
        for ordinal in reversed(range(len(self.contexts))):
            self.use(ordinal)
            self.load(ordinal)
        return len(self.contexts)

    def use(self, ordinal: int) -> None:
        """Make a device's context the calling thread's current one."""
        self.cuCtxSetCurrent(self.contexts[ordinal])

    def load(self, ordinal: int) -> None:
        """Load the kernels into the current context."""
        self.modules[ordinal] = self.out("cuModuleLoadData", IMAGE)
        for name in KERNELS:
            self.functions[ordinal, name] = self.out("cuModuleGetFunction", self.modules[ordinal], name.encode())

    def alloc(self, nbytes: int) -> int:
        """Return the address of device memory."""
        return self.out("cuMemAlloc_v2", nbytes)

    def pinned(self, nbytes: int) -> tuple[int, memoryview]:
        """Return the address of pinned memory, and its bytes."""
        address = self.out("cuMemHostAlloc", nbytes, ctypes.c_uint(0))
        return address, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")

    def stream(self, flags: int = 0) -> int:
        """Return a new stream."""
        return self.out("cuStreamCreate", ctypes.c_uint(flags))

    def event(self, flags: int = DISABLE_TIMING) -> int:
        """Return a new event."""
        return self.out("cuEventCreate", ctypes.c_uint(flags))

    def launch(self, ordinal: int, stream: int, name: str, *arguments: int, call: str = "cuLaunchKernel") -> None:
        """Launch a kernel of the image with one block."""
        values = [TYPES[letter](value) for letter, value in zip(KERNELS[name], arguments, strict=True)]
        pointers = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(value) for value in values))
        single, many, function = ctypes.c_uint(1), ctypes.c_uint(MANY.get(name, 1)), self.functions[ordinal, name]
        getattr(self, call)(
            function, single, single, single, many, single, single, ctypes.c_uint(0), stream, pointers, None
        )

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to the device, synchronously."""
        self.cuMemcpyHtoD_v2(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from the device, synchronously."""
        data = ctypes.create_string_buffer(nbytes)
        self.cuMemcpyDtoH_v2(data, address, nbytes)
        return data.raw

    @staticmethod
    def end(address: int, pitch: int, x: int = 0, y: int = 0, kind: int = EITHER_SIDE) -> End:
        """Return one side of a copy of rows."""
        if kind == HOST_SIDE:
            return End(x, y, kind, host=address, pitch=pitch)
        return End(x, y, kind, device=address, pitch=pitch)

    def rows(self, to: End, source: End, width: int, height: int, stream: int | None = None) -> None:
        """Copy rows, synchronously where no stream is named."""
        copy = ctypes.byref(Rows(source, to, width, height))
        if stream is None:
            self.cuMemcpy2D_v2(copy)
        else:
            self.cuMemcpy2DAsync_v2(copy, stream)

    def params(self, values: Sequence[int]) -> Any:
        """Return an array of 8-byte values, for ``extra``."""
        return (ctypes.c_uint64 * len(values))(*values)
