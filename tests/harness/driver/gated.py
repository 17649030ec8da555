"""A program for tests of gates: ``python -m tests.harness.driver.gated loop MICROSECONDS``, or ``each MICROSECONDS``.

``loop`` launches kernels until stdin ends, and prints their number. ``each`` launches one for each line of stdin, and
prints the seconds until it has ended. Both print "ready" first.
"""

from __future__ import annotations

import select
import sys
import time

from tests.harness.driver.calls import NON_BLOCKING, Cuda

BATCH = 20


def main(kind: str, microseconds: int) -> None:
    cuda = Cuda()
    cuda.start(1)
    cuda.use(0)
    stream = cuda.stream(NON_BLOCKING)
    print("ready", flush=True)
    if kind == "each":
        for _ in sys.stdin:
            began = time.monotonic()
            cuda.launch(0, stream, "nap", microseconds)
            cuda.cuStreamSynchronize(stream)
            print(time.monotonic() - began, flush=True)
        return
    count = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(BATCH):
            cuda.launch(0, stream, "nap", microseconds)
        cuda.cuStreamSynchronize(stream)
        count += BATCH
    print(count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
