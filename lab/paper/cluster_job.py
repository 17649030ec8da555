"""The two processes of the cluster experiments: an application and the agent of an emulated device.

The device has a copy engine of `COPY` bytes per second, and the link between the processes one of `LINK`, at 1/8 of the
document's InfiniBand, because the processes share two cores. The application prints its measurements as JSON.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lab.emulated_device import EmulatedDevice
from warpwell.pool import Tuning
from warpwell.pool.agent.agent import Agent
from warpwell.pool.devices import Devices
from warpwell.pool.transport.mpi_transport import MpiTransport

from ..link import EmulatedLink

LINK = 3600e6 / 8
COPY = 3600e6 / 8
LATENCY = 5e-6
ROW = 1024
"""Points of a row of the FFT."""


def transport() -> Any:
    """Return MPI behind the emulated link."""
    mpi: Any = MpiTransport()
    mpi.can_share_memory = False
    return EmulatedLink(mpi, LINK, LATENCY)


def agent() -> None:
    """Serve the device until the application ends."""
    link = transport()
    Agent(link, EmulatedDevice(COPY)).run()
    link.close()


def seconds(run: Callable[[], object], runs: int) -> float:
    """Return the shortest time of a call in seconds, because other programs on the cores only lengthen it."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def product(a: Any, b: Any, c: Any) -> None:
    """Multiply matrices on the device."""
    np.matmul(a, b, out=c)


def transform(a: Any, c: Any) -> None:
    """Transform the rows of a matrix on the device."""
    c[...] = np.fft.fft(a, axis=1)


class Application:
    """Measures transfers and computations on the device of the agent, and on one of this process.

    Parameters
    ----------
    device : Device
        The agent's device.
    runs : int
        Each value is the minimum of this number of runs.
    """

    def __init__(self, device: Any, runs: int) -> None:
        self.device, self.runs = device, runs
        self._local = EmulatedDevice(COPY)
        self._stream = self._local.stream(0)

    def bandwidth(self, chunks: list[int], size: int) -> list[float]:
        """Return the bytes per second of a copy of `size` bytes in each size of chunks."""
        data, to = np.ones(size, np.uint8), self.device.empty(size, np.uint8)
        found = []
        for chunk in chunks:
            self.device.transfers = Tuning(chunk)
            found.append(size / seconds(lambda: self._copy(to, data), self.runs))
        return found

    def copies(self, sizes: list[int]) -> list[dict[str, float]]:
        """Return the seconds of a copy of each size: in a pipeline, and in one piece."""
        found = []
        for size in sizes:
            data, to = np.ones(size, np.uint8), self.device.empty(size, np.uint8)
            copy = functools.partial(self._copy, to, data)
            found.append(self._in_turns({name: (tuning, copy) for name, tuning in self._tunings(size).items()}))
        return found

    def _in_turns(self, methods: Mapping[str, tuple[Tuning, Callable[[], object]]]) -> dict[str, float]:
        """Return the shortest time of each method. Methods alternate, so that other programs slow all equally."""
        best = dict.fromkeys(methods, float("inf"))
        for _ in range(self.runs):
            for name, (tuning, run) in methods.items():
                self.device.transfers = tuning
                best[name] = min(best[name], seconds(run, 1))
        return best

    def _copy(self, to: Any, data: Any) -> None:
        to.copy_from(data)
        self.device.synchronize()

    @staticmethod
    def _tunings(size: int) -> dict[str, Tuning]:
        chunk = min(1 << 20, max(4096, size // 4))
        return {"pipeline": Tuning(chunk), "one piece": Tuning(max(size, 4096), pipelined=False)}

    def computations(self, function: Callable[..., None], cases: list[list[Any]]) -> list[dict[str, float]]:
        """Return the seconds of each case with its transfers: on a local device, in a pipeline, and in one piece.

        The arrays of a case are the operands and then the result.
        """
        found = []
        for arrays in cases:
            remote = [self.device.empty(a.shape, a.dtype) for a in arrays]
            run_locally = functools.partial(self._locally, function, arrays)
            away = functools.partial(self._away, function, remote, arrays)
            tunings = self._tunings(max(a.nbytes for a in arrays))
            run_locally()
            expected = arrays[-1].copy()
            for tuning in tunings.values():
                self.device.transfers, arrays[-1][...] = tuning, 0
                away()
                np.testing.assert_allclose(arrays[-1], expected, rtol=1e-3, atol=1e-2)
            methods = {"local": (Tuning(), run_locally)} | {name: (tuning, away) for name, tuning in tunings.items()}
            found.append(self._in_turns(methods))
        return found

    def _away(self, function: Callable[..., None], remote: list[Any], arrays: list[Any]) -> None:
        for to, a in zip(remote[:-1], arrays, strict=False):
            to.copy_from(a)
        self.device.call(function, *remote)
        remote[-1].copy_to_host(arrays[-1])

    def _locally(self, function: Callable[..., None], arrays: list[Any]) -> None:
        remote = [np.empty_like(a) for a in arrays]
        for to, a in zip(remote[:-1], arrays, strict=False):
            self._local.write(self._stream, to.ctypes.data, np.ascontiguousarray(a).view(np.uint8).ravel())
        self._local.synchronize(self._stream)
        function(*remote)
        result = arrays[-1].view(np.uint8).ravel()
        self._local.fetch(self._stream, result, remote[-1].ctypes.data)
        self._local.synchronize(self._stream)


def application(options: dict[str, Any]) -> dict[str, Any]:
    """Measure everything."""
    rng = np.random.default_rng(0)
    matrices = [
        [*(rng.random((n, n), np.float32) for _ in range(2)), np.zeros((n, n), np.float32)] for n in options["matrices"]
    ]
    rows = [(rng.random((n, ROW), np.float32) + 1j).astype(np.complex64) for n in options["ffts"]]
    with Devices(transport()) as devices:
        measure = Application(devices[0], options["runs"])
        size = options["size"]
        measure.bandwidth([1 << 20], size)  # compiles
        return {
            "chunks": measure.bandwidth(options["chunks"], size),
            "copies": measure.copies(options["sizes"]),
            "matrices": measure.computations(product, matrices),
            "ffts": measure.computations(transform, [[a, np.zeros_like(a)] for a in rows]),
        }


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        agent()
    else:
        print("measured " + json.dumps(application(json.loads(sys.argv[2]))), flush=True)
