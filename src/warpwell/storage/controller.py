"""Controller: serves queue pairs from native threads, as an NVMe drive would."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import errors
from ..nvme import READ, WRITE
from ..queues import QueuePairs
from ..queues.layout import P_COMMANDS
from ..targets import memory_for
from ..targets.device import seam_for
from ..targets.memory import view_of
from . import serve as native
from .medium import Medium

NAMESPACES = 64
"""Size of the namespace table; namespace ids run from 1."""

_PARK_SECONDS = 5.0


class Controller:
    """Serves the commands of queue pairs from media, one namespace a medium.

    Threads run native code without the interpreter lock: they poll doorbells, decode Commands, move data
    and post Completions, round-robin over their ports. They park while no launch is in flight. A medium
    that exists only in Python is served by one interpreter thread, which `python_served` tells.

    Parameters
    ----------
    pairs : QueuePairs
    threads : int
        Native service threads.
    spin : bool
        Never sleep while a launch is in flight (for machines with cores to spare).
    interpreted : bool
        Start no threads: the `interp` target calls `services` beside its logical threads.
    """

    def __init__(self, pairs: QueuePairs, *, threads: int, spin: bool = False, interpreted: bool = False) -> None:
        self.pairs = pairs
        self.threads = max(1, min(threads, pairs.count))
        self.interpreted = interpreted
        self._table = memory_for("cpu").allocate(8 * native.NS_WORDS * NAMESPACES)
        self._records = self._table.words.reshape(NAMESPACES, native.NS_WORDS)
        self._control_block = memory_for("cpu").allocate(64)
        self._control = self._control_block.words
        self._control[2] = spin
        self._media: dict[int, Medium] = {}
        self._keep: list[Any] = []
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._workers: list[threading.Thread] = []
        self._services: list[Callable[[], int]] = []
        self._closed = False

    # -- namespaces -----------------------------------------------------------------------------------------

    def attach(self, medium: Medium, unit: int = native.BLOCK) -> int:
        """Serve a medium, whose capacity counts as whole `unit`s of bytes; return its namespace id."""
        with self._lock:
            if self._closed:
                raise errors.ClosedError("the controller is closed: open the array again")
            free = [k for k in range(1, NAMESPACES) if k not in self._media]
            if not free:
                raise errors.ArgumentError(f"a cache serves at most {NAMESPACES - 1} arrays: close some")
            nsid = free[0]
            record = self._records[nsid]
            functions = medium.native()
            start, complete, state = self._python_functions(medium) if functions is None else (
                functions.start, functions.complete, functions.state)  # fmt: skip
            record[native.NS_STATE] = state
            record[native.NS_BYTES] = -(-medium.nbytes // unit) * unit
            record[native.NS_ERRORS] = 0
            record[native.NS_COMPLETE] = complete
            record[native.NS_START] = start
            self._media[nsid] = medium
            self._records[0, 0] = max(self._media) + 1
            return nsid

    def detach(self, nsid: int) -> None:
        """Stop serving a namespace; later commands to it get an error status."""
        with self._lock:
            self._records[nsid, native.NS_START] = 0
            self._records[nsid, native.NS_COMPLETE] = 0
            self._media.pop(nsid, None)

    def medium(self, nsid: int) -> Medium:
        """Return the medium of a namespace."""
        return self._media[nsid]

    @property
    def commands(self) -> int:
        """Commands received so far, of all namespaces."""
        return int(self.pairs.ports[:, P_COMMANDS].sum())

    @property
    def python_served(self) -> list[str]:
        """Names of the media that Python serves, slowly."""
        return [m.name for m in self._media.values() if m.native() is None]

    def _python_functions(self, medium: Medium) -> tuple[int, int, int]:
        """Wrap a medium written in Python as a C function that takes the interpreter lock for each command."""
        prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *([ctypes.c_int64] * 6))
        one_at_a_time = threading.Lock()

        def start(state: int, opcode: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
            try:
                with one_at_a_time:
                    data = view_of(buffer, nbytes, np.uint8)
                    if opcode == READ:
                        data[:] = medium.read(offset, nbytes)
                    elif opcode == WRITE:
                        medium.write(offset, data[: max(0, medium.nbytes - offset)])
                    else:
                        medium.sync()
                    return 0
            except Exception as error:  # to device code a failing medium is an I/O error, with a status at most
                status = getattr(error, "status", None)
                if isinstance(status, int) and 0 < status < 0x8000:
                    return status
                if isinstance(error, errors.StorageFullError):
                    return 0x81
                return 0x281 if opcode == READ else 0x280

        function = prototype(start)
        self._keep.append(function)
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0), 0, 0

    # -- service --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A launch starts: wake the threads."""
        with self._lock:
            if self._closed:
                raise errors.ClosedError("the controller is closed: open the array again")
            self._control[1] += 1
            if self.interpreted:
                return
            if not self._workers:
                loop = _native_loop()
                for k in range(self.threads):
                    worker = threading.Thread(
                        target=self._work, args=(loop, k), name=f"warpwell-controller-{k}", daemon=True
                    )
                    self._workers.append(worker)
                    worker.start()
            self._wake.notify_all()

    def end(self) -> None:
        """A launch ended: the threads park when nothing is outstanding any more."""
        with self._lock:
            self._control[1] -= 1

    @contextlib.contextmanager
    def active(self) -> Any:
        """Keep the threads awake for the block."""
        self.begin()
        try:
            yield self
        finally:
            self.end()

    def services(self) -> list[Callable[[], int]]:
        """Return the steps that an interpreted launch must call beside its threads (always the same ones)."""

        def step() -> int:
            work = 0
            for index in range(self.pairs.count):
                work += int(native.serve_port(self.pairs.port(index), index, self._table.address))
            work += int(native.serve_media(self.pairs.port(0), self._table.address))
            return work

        if not self._services:
            self._services.append(step)
        return list(self._services)

    def close(self) -> None:
        """Stop the threads (bounded wait). Commands in flight are never completed after this."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._control[0] = 1
            self._wake.notify_all()
        deadline = time.monotonic() + _PARK_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        if any(worker.is_alive() for worker in self._workers):
            # a system call that never returns: the memory it writes to must outlive it
            _leaked.append((self._table, self._control_block, self.pairs, self._media, self._keep))

    def _work(self, loop: Any, index: int) -> None:
        while True:
            with self._lock:
                while not self._control[0] and self._control[1] == 0 and self.pairs.outstanding() == 0:
                    self._wake.wait()
                if self._control[0]:
                    return
            loop(
                self._control_block.address,
                self.pairs.port(0),
                index,
                self.threads,
                self.pairs.count,
                self._table.address,
            )


_leaked: list[Any] = []


_loop: Any = None


def _native_loop() -> Any:
    """Return the compiled service loop (compiled or loaded once a process)."""
    global _loop
    if _loop is None:
        from ..targets.compiled import dispatcher  # imports the compiler: not before the first launch

        seam_for("cpu")
        _loop = dispatcher(native.serve)
    return _loop


def service_threads(device: str) -> int:
    """Return the default number of service threads: they mostly wait for the drive, beside a GPU they also copy."""
    cores = os.cpu_count() or 2
    return max(2, min(14, cores - 2)) if device == "cuda" else 8

