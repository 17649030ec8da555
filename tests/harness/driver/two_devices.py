"""A numba-cuda program for two devices that knows nothing of Warpwell: kernels, events, copies both ways, threads.

    python -m tests.harness.driver.two_devices [--items 4194304] [--rounds 200]

Prints one line of results, which must be the same however the devices are reached, and one line of seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numba import cuda

THREADS = 256


@cuda.jit
def scale_add(out, addend, factor):  # type: ignore[no-untyped-def]
    """Multiply by a factor and add another array."""
    i = cuda.grid(1)
    if i < out.size:
        out[i] = out[i] * factor + addend[i]


@cuda.jit
def step(out):  # type: ignore[no-untyped-def]
    """One step of a generator of numbers, in each item."""
    i = cuda.grid(1)
    if i < out.size:
        out[i] = out[i] * 1664525 + 1013904223


Call = Callable[[int], str]


class Both:
    """The contexts of two devices."""

    def __init__(self, items: int, rounds: int) -> None:
        self.items, self.rounds = items, rounds
        self.grid = (items + THREADS - 1) // THREADS
        self.results: list[str] = []
        self.seconds: list[str] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Remember how long a part takes."""
        start = time.perf_counter()
        yield
        self.seconds.append(f"{name} {time.perf_counter() - start:.4f}")

    def keep(self, name: str, *arrays: np.ndarray) -> None:
        """Remember what a part has computed."""
        self.results.append(f"{name} {hashlib.sha256(b''.join(a.tobytes() for a in arrays)).hexdigest()[:12]}")

    def fresh(self, device: int, seed: int) -> object:
        """Return an array on a device."""
        with cuda.gpus[device]:
            return cuda.to_device(np.random.default_rng(seed).integers(0, 1 << 32, self.items, np.uint32))

    def back_and_forth(self, name: str) -> None:
        """Each device in turn computes on what the other has sent; streams wait for events of the other device."""
        own = [self.fresh(0, 1), self.fresh(1, 2)]
        received, streams, computed, sent = [], [], [], []
        for device in range(2):
            with cuda.gpus[device]:
                received.append(cuda.device_array(self.items, np.uint32))
                streams.append(cuda.stream())
                computed.append(cuda.event(timing=False))
                sent.append(cuda.event(timing=False))
                step[self.grid, THREADS, streams[device]](received[device])  # compiles
                received[device].copy_to_device(np.zeros(self.items, np.uint32))
                cuda.synchronize()
        with self.timed(name):
            for k in range(self.rounds):
                device, peer = k % 2, 1 - k % 2
                with cuda.gpus[device]:
                    stream = streams[device]
                    sent[peer].wait(stream)  # the peer has read the memory that this step overwrites
                    step[self.grid, THREADS, stream](own[device])
                    scale_add[self.grid, THREADS, stream](own[device], received[device], np.uint32(k + 3))
                    computed[device].record(stream)
                with cuda.gpus[peer]:
                    computed[device].wait(streams[peer])
                    received[peer].copy_to_device(own[device], stream=streams[peer])
                    sent[peer].record(streams[peer])
            for device in range(2):
                with cuda.gpus[device]:
                    cuda.synchronize()
        self.keep(name, *(array.copy_to_host() for array in own + received))

    def synchronous(self) -> None:
        """Copies without a stream, both ways."""
        own = [self.fresh(0, 3), self.fresh(1, 4)]
        with self.timed("synchronous"):
            for k in range(20):
                device = k % 2
                with cuda.gpus[device]:
                    step[self.grid, THREADS](own[device])
                with cuda.gpus[1 - device]:
                    own[1 - device].copy_to_device(own[device])
                    step[self.grid, THREADS](own[1 - device])
        self.keep("synchronous", *(array.copy_to_host() for array in own))

    def threads(self) -> None:
        """Four threads, each with its own stream on a device, and copies to the other one."""
        found: list[np.ndarray] = [np.empty(0)] * 4

        def work(thread: int) -> None:
            device = thread % 2
            array, remote = self.fresh(device, 10 + thread), self.fresh(1 - device, 20 + thread)
            with cuda.gpus[device]:
                stream = cuda.per_thread_default_stream()
                for _ in range(10):
                    step[self.grid, THREADS, stream](array)
                    remote.copy_to_device(array, stream=stream)
                    step[self.grid, THREADS, stream](array)
                    array.copy_to_device(remote, stream=stream)
                stream.synchronize()
                found[thread] = array.copy_to_host()

        with self.timed("threads"):
            all_threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
            for thread in all_threads:
                thread.start()
            for thread in all_threads:
                thread.join()
        self.keep("threads", *found)

    def peers(self) -> None:
        """Kernels of each device read and write the other's memory, where they may."""
        own = [self.fresh(0, 5), self.fresh(1, 6)]
        for device in range(2):
            with cuda.gpus[device]:
                peer = cuda.gpus[1 - device]
                if not cuda.current_context().can_access_peer(1 - device):
                    self.results.append("peers none")
                    return
                with peer:
                    handle = cuda.current_context().handle
                cuda.current_context().enable_peer_access(handle)
        with self.timed("peers"):
            for k in range(20):
                with cuda.gpus[k % 2]:
                    scale_add[self.grid, THREADS](own[k % 2], own[1 - k % 2], np.uint32(k + 7))
                    scale_add[self.grid, THREADS](own[1 - k % 2], own[k % 2], np.uint32(k + 9))
                    cuda.synchronize()
        self.keep("peers", *(array.copy_to_host() for array in own))


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=200)
    chosen = parser.parse_args()
    both = Both(chosen.items, chosen.rounds)
    both.back_and_forth("first")
    both.back_and_forth("again")
    both.synchronous()
    both.threads()
    both.peers()
    print("; ".join(both.results), flush=True)
    print("; ".join(both.seconds), flush=True)


if __name__ == "__main__":
    main()
