"""Checks of one area that run one after another in one program, which tests start once.

    python -m tests.harness.driver.checks graph_checks

Each is a function of the driver that asserts; a line on standard output says what came of it.
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
    """A stream that waits until it is let go."""

    def __init__(self, cuda: Cuda, flags: int = NON_BLOCKING, ordinal: int = 0) -> None:
        self.cuda, self.ordinal = cuda, ordinal
        cuda.use(ordinal)
        self.word, self.other, self.stream = cuda.alloc(4), cuda.stream(NON_BLOCKING), cuda.stream(flags)
        self.hold()

    def hold(self) -> None:
        """Let the stream wait."""
        self.cuda.cuMemsetD32Async(self.word, ctypes.c_uint(0), 1, self.other)
        self.cuda.cuStreamSynchronize(self.other)
        self.cuda.launch(self.ordinal, self.stream, "flag", self.word, 1)

    def let_go(self) -> None:
        """Let the stream go on; any thread may."""
        self.cuda.use(self.ordinal)
        self.cuda.cuMemsetD32Async(self.word, ctypes.c_uint(1), 1, self.other)

    def waits(self) -> bool:
        """Say whether the stream has work that is not done."""
        return self.cuda.code("cuStreamQuery", self.stream) == NOT_READY


def fresh(cuda: Cuda) -> None:
    """Begin anew with the contexts."""
    count = len(cuda.contexts)
    cuda.contexts.clear()
    for ordinal in range(count):
        cuda.cuDevicePrimaryCtxReset_v2(ctypes.c_int(ordinal))
    cuda.start(count)


def words(cuda: Cuda, address: int, count: int) -> list[int]:
    """Return words of the device's memory."""
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
