"""`EmulatedLink`: a transport that is as slow as a network."""

from __future__ import annotations

import argparse
import ctypes
import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from warpwell._os import FUTEX, clock
from warpwell.errors import ArgumentError, ClosedError
from warpwell.pool.launch.member import TRANSPORT
from warpwell.pool.transport.bulk import CANCELLED, Region, Transfer
from warpwell.pool.transport.signal import Signal, short_naps
from warpwell.pool.transport.table import READY, TransferTable
from warpwell.pool.transport.transport import Bytes, Transport
from warpwell.targets import native

from . import link_loop as loop

LINK = "WARPWELL_LAB_LINK"
"""``bandwidth,latency`` of the link that `emulated` returns, in MB/s (0: unlimited) and microseconds."""


def emulated(transport: Transport) -> EmulatedLink:
    """Return a transport with the bandwidth and latency of ``WARPWELL_LAB_LINK``."""
    bandwidth, latency = map(float, os.environ[LINK].split(","))
    return EmulatedLink(transport, bandwidth * 1e6 if bandwidth else float("inf"), latency * 1e-6)


def main(argv: list[str]) -> None:
    """Replace this process with ``warpwell run``, with the options after ``--`` and emulated links."""
    usage = "%(prog)s [--bandwidth MB/S] [--latency US] -- [OPTION ...] PROGRAM [ARGUMENT ...]"
    parser = argparse.ArgumentParser(usage=usage, description="Run a program on agents with slow links between them.")
    parser.add_argument("--bandwidth", type=float, default=0.0, metavar="MB/S", help="of each link (default: no limit)")
    parser.add_argument("--latency", type=float, default=0.0, metavar="US", help="latency of each link; default 0")
    parser.add_argument("arguments", nargs="*", help="options, program and arguments of warpwell run")
    options = parser.parse_args(argv)
    for name in ("bandwidth", "latency"):
        value = getattr(options, name)
        if not 0 <= value < 1e8:
            parser.error(f"--{name} must be from 0 to 1e8, got {value:g}")
    os.environ[LINK] = f"{options.bandwidth:g},{options.latency:g}"
    os.environ[TRANSPORT] = f"{__name__}:{emulated.__name__}"
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)  # agents and the program import this module
    os.execv(sys.executable, [sys.executable, "-m", "warpwell", "run", *options.arguments])


class EmulatedLink(Transport):
    """Wraps a transport: messages and chunks arrive as late as over a link with a bandwidth and a latency.

    There is one link for each peer and direction, which all its transfers and messages share. Each arrival is delayed
    until an absolute time: when the link has carried all arrivals up to it, plus the latency. So the wrapped transport
    and the link work at the same time, and the transport adds its own time to the first chunk only. Both ends must wrap
    their transport. A native thread, which a busy main thread does not slow, times the transfers; the receiving thread
    times the messages.

    Parameters
    ----------
    transport : Transport
        The transport of the data; closing the link closes it.
    bandwidth : float
        Bytes a second; infinite for no bound.
    latency : float
        Transit time in seconds.
    """

    can_share_memory = False

    def __init__(self, transport: Transport, bandwidth: float, latency: float) -> None:
        if not bandwidth > 0:
            raise ArgumentError(f"a link of {bandwidth} bytes a second", name="bandwidth")
        if not 0 <= latency < 100:
            raise ArgumentError(f"a link with a latency of {latency} s", name="latency")
        self.transport = transport
        self.rank, self.peers = transport.rank, transport.peers
        speed = f"{bandwidth / 1e6:g} MB/s, " if bandwidth != float("inf") else ""
        self.name = f"{transport.name} (emulated link: {speed}{latency * 1e6:g} us)"
        self.bandwidth, self.latency = bandwidth, latency
        self._links = np.zeros((len(self.peers), 2), np.int64)
        self._links[:, loop.L_COST // 8] = int(1e12 / bandwidth)
        self._link = dict(zip(self.peers, self._links, strict=True))
        self._held: list[tuple[int, int, int, bytes]] = []  # messages on the link: (time, number, peer, message)
        self._numbers = itertools.count()
        self._precise = False
        self._closed = False
        self._global = np.zeros(loop.GLOBAL_WORDS, np.int64)
        self._table = TransferTable(loop.ROW_BYTES, self._global[loop.G_ROWS // 8 :][:1])
        self._doorbell = Signal(int(self._global.ctypes.data))
        self._global[loop.G_TABLE // 8] = self._table.address
        self._global[loop.G_SYSCALL // 8] = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0
        self._global[loop.G_FUTEX // 8] = FUTEX
        self._global[loop.G_LATENCY // 8] = int(latency * 1e9)
        self._thread = threading.Thread(
            target=self._run, args=(native(loop.run).load(),), name="warpwell emulated link", daemon=True
        )
        self._thread.start()

    def _run(self, compiled: Any) -> None:
        short_naps()
        compiled(int(self._global.ctypes.data))

    def send(self, peer: int, *parts: Bytes) -> None:
        self.transport.send(peer, *parts)

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        if not self._precise:
            short_naps()  # delivered by this thread, which receives
            self._precise = True
        end = clock.monotonic() + timeout
        while True:
            if self._closed:
                raise ClosedError("the transport was closed")
            self._table.release_finished()
            now = clock.monotonic()
            if self._held and self._held[0][0] <= now * 1e9:
                _, _, peer, message = heapq.heappop(self._held)
                return peer, message
            left = end - now
            if left <= 0:
                return None
            if self._held:
                left = min(left, self._held[0][0] / 1e9 - now)
            got = self.transport.receive(left)
            if got is not None:
                due = _occupy(self._link[got[0]], len(got[1])) + int(self.latency * 1e9)
                heapq.heappush(self._held, (due, next(self._numbers), *got))

    def put(self, peer: int, tag: int, memory: Region) -> Transfer:
        """Start to send bulk data, which the receiver holds back."""
        return self.transport.put(peer, tag, memory)

    def get(self, peer: int, tag: int, memory: Region) -> Transfer:
        inner = self.transport.get(peer, tag, memory)
        outer = _Delayed(inner, memory, self._doorbell.raise_)
        if not outer.chunks:
            return outer
        fields = {
            loop.E_INNER: inner.address,
            loop.E_OUTER: outer.address,
            loop.E_LINK: self._link[peer].ctypes.data,
            loop.E_NBYTES: memory.nbytes,
            loop.E_CHUNK: memory.chunk,
            loop.E_CHUNKS: memory.chunks,
        }
        self._table.add(outer, fields)
        self._doorbell.raise_()
        return outer

    def lost(self) -> Mapping[int, str]:
        return self.transport.lost()

    def on_lost(self, call: Callable[[int, str], None]) -> None:
        self.transport.on_lost(call)

    def lose(self, peer: int, reason: str) -> None:
        self.transport.lose(peer, reason)

    def statistics(self) -> dict[int, dict[str, int]]:
        return self.transport.statistics()

    def close(self, timeout: float = 5.0) -> None:
        if self._closed:
            return
        end = clock.monotonic() + timeout
        self.transport.close(timeout)
        while clock.monotonic() < end and any(self._table.rows[row, 0] == READY for row, _ in self._table.transfers()):
            time.sleep(1e-3)
        self._closed = True
        self._global[loop.G_STOP // 8] = 1
        self._doorbell.raise_()
        self._thread.join(5.0)


class _Delayed(Transfer):
    """The receiving half of a transfer, as seen over the link."""

    def __init__(self, inner: Transfer, memory: Region, wake: Callable[[], None]) -> None:
        self._inner = inner
        super().__init__(inner.peer, inner.tag, memory)
        self.wake = self._pass_on
        self._ring = wake

    def _pass_on(self) -> None:
        if self.status == CANCELLED:
            self._inner.cancel()
        else:
            # Call allow() only here, because it wakes the thread that moves chunks.
            self._inner.allow(self.allowed)
        self._ring()

    @property
    def reason(self) -> str:
        """Reason of the failure."""
        return self._inner.reason

    @reason.setter
    def reason(self, value: str) -> None:
        pass


def _occupy(link: Any, nbytes: int) -> int:
    over = max(clock.monotonic_ns(), int(link[loop.L_FREE // 8])) + nbytes * int(link[loop.L_COST // 8]) // 1000
    link[loop.L_FREE // 8] = over
    return over
