"""Checks of one area that run one after another in one program, which tests start once.

    python -m tests.harness.driver.checks graph_checks

Each is a function of the driver that asserts; a line on standard output reports its outcome.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import traceback
from collections.abc import Callable

from tests.harness.driver.calls import NON_BLOCKING, NOT_READY, Cuda

Check = Callable[[Cuda], None]


class Held:
    """A stream that waits until it is released."""

    def __init__(self, cuda: Cuda, flags: int = NON_BLOCKING, ordinal: int = 0) -> None:
        self.cuda, self.ordinal = cuda, ordinal
        cuda.use(ordinal)
        self.word, self.free_stream, self.stream = cuda.alloc(4), cuda.stream(NON_BLOCKING), cuda.stream(flags)
        self.hold()

    def hold(self) -> None:
        """Let the stream wait."""
        self.cuda.cuMemsetD32Async(self.word, ctypes.c_uint(0), 1, self.free_stream)
        self.cuda.cuStreamSynchronize(self.free_stream)
        self.cuda.launch(self.ordinal, self.stream, "flag", self.word, 1)

    def release(self) -> None:
        """Let the stream continue; callable from any thread."""
        self.cuda.use(self.ordinal)
        self.cuda.cuMemsetD32Async(self.word, ctypes.c_uint(1), 1, self.free_stream)

    def is_pending(self) -> bool:
        """Return whether the stream has unfinished work."""
        return self.cuda.code("cuStreamQuery", self.stream) == NOT_READY


def fresh(cuda: Cuda) -> None:
    """Reset and retain the primary contexts of all devices."""
    count = len(cuda.contexts)
    cuda.contexts.clear()
    for ordinal in range(count):
        cuda.cuDevicePrimaryCtxReset_v2(ctypes.c_int(ordinal))
    cuda.start(count)


def read_words(cuda: Cuda, address: int, count: int) -> list[int]:
    """Return 32-bit words of the device's memory."""
    return memoryview(cuda.read(address, 4 * count)).cast("I").tolist()


def main() -> None:
    """Run the checks of a module."""
    module = importlib.import_module(f"tests.harness.driver.{sys.argv[1]}")
    checks: tuple[Check, ...] = module.CHECKS
    cuda = Cuda()
    cuda.start()
    for check in checks:
        cuda.use(0)
        try:
            check(cuda)
            print(f"{check.__name__}: right", flush=True)
        except Exception:
            print(f"{check.__name__}: {traceback.format_exc()}", flush=True)
            fresh(cuda)


if __name__ == "__main__":
    main()
