"""Controller: serves queue pairs from native threads, as an NVMe drive would."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from .._os import clock
from ..queues import QueuePairs
from ..queues import layout as at
from ..targets import Allocator, Block, memory_for
from ..targets import native as native_function
from . import io_threads
from . import serve as native
from .medium import Medium, NativeMedium, python_functions
from .protocol import NamespaceAddress, Rings

NAMESPACES = 64
"""Size of the namespace table; namespace ids run from 1."""

MAX_WEIGHT = native.FETCH
"""Largest weight of a queue."""

_serve_ports = native_function(native.poll_queues)

_PARK_SECONDS = 5.0
_MAX_THREADS = 64


@dataclass
class _Client:
    """Queue pairs that the controller serves, their first port, and the number of their launches in flight."""

    pairs: QueuePairs
    first: int
    launches: int


class Controller:
    """Serves the commands of queue pairs: block commands from media, and key-value commands from stores.

    Threads run native code without Python's global interpreter lock: they poll doorbells, decode commands, move data
    and post completions, round-robin over the ports. All controllers of a process share its I/O threads (`io_threads`),
    which park while no launch is in flight. The code of a medium written in Python is run by one thread at a time.

    A controller may serve queue pairs of several devices (`add_pairs`), each with a weight: if commands wait in several
    rings, the rings are served in proportion to their weights. Without a `window`, each thread goes through the rings
    independently.

    Parameters
    ----------
    pairs : QueuePairs
    threads : int
        Maximum number of service threads that serve this controller at once.
    spin : bool
        Never sleep while a launch is in flight (for machines with idle cores).
    interpreted : bool
        Start no threads: the `interp` target calls `services` between the steps of its logical threads.
    window : int
        Maximum number of commands in flight, over all queues. Further commands wait in their rings, and all threads
        serve all rings together. A drive's queue depth is a good choice. 0: no limit.
    weight : int
        Weight of the queues of `pairs`; see `add_pairs`.
    """

    def __init__(
        self,
        pairs: QueuePairs,
        *,
        threads: int,
        spin: bool = False,
        interpreted: bool = False,
        window: int = 0,
        weight: int = 1,
    ) -> None:
        if window < 0:
            raise errors.ArgumentError(
                f"window must be a number of commands, or 0 for no limit, got {window}", name="window"
            )
        self.pairs = pairs
        self.interpreted = interpreted
        self._max_threads = max(1, min(threads, _MAX_THREADS))
        self._table = memory_for("cpu").allocate(8 * native.NS_WORDS * NAMESPACES)
        self._records = self._table.words.reshape(NAMESPACES, native.NS_WORDS)
        control_words = native.K_PORTS + native.MAX_PORTS
        self._control_block = memory_for("cpu").allocate(8 * (control_words + native.THREAD_WORDS * self._max_threads))
        self._control = self._control_block.words
        self._records_of_threads = self._control_block.address + 8 * control_words
        self._control[control_words + native.T_SEAT :: native.THREAD_WORDS] = np.arange(self._max_threads)
        self._control[native.K_SPIN] = spin
        self._control[native.K_WINDOW] = window
        self._clients: list[_Client] = []
        self._retired: list[_Client] = []
        self._served: dict[int, tuple[Any, NativeMedium]] = {}
        """Media or owners of native functions, and these functions."""
        self._lock = threading.Lock()
        self._pool = io_threads.current()
        self._slots = io_threads.WorkerSlots(self._needed_threads, self._serve, self._quiesce)
        self._services: list[Callable[[], int]] = []
        self._closed = False
        self.add_pairs(pairs, weight)

    # -- queue pairs ----------------------------------------------------------------------------------------

    def add_pairs(self, pairs: QueuePairs, weight: int = 1) -> None:
        """Serve more queue pairs, for example of another GPU.

        Parameters
        ----------
        pairs : QueuePairs
        weight : int
            Number of commands that are served from each queue of `pairs` for each command of a queue with weight 1, if
            commands wait in both; 1 to `MAX_WEIGHT`.

        Raises
        ------
        ArgumentError
            The weight is out of range, or there are too many queues.
        """
        if not 1 <= weight <= MAX_WEIGHT:
            raise errors.ArgumentError(f"weight is {weight}: 1 to {MAX_WEIGHT}", name="weight")
        with self._lock:
            self._require_open()
            first = int(self._control[native.K_N_PORTS])
            if first + pairs.count > native.MAX_PORTS:
                raise errors.ArgumentError(f"a controller serves at most {native.MAX_PORTS} queues: open fewer")
            pairs.ports[:, at.P_WEIGHT] = weight
            pairs.ports[:, at.P_BURST] = 1  # `_share_out` sets it below
            self._clients.append(_Client(pairs, first, 0))
            for k in range(pairs.count):
                self._control[native.K_PORTS + first + k] = pairs.port(k)
            self._share_out()
            # do this last: a thread polls only ports below this number
            self._control[native.K_N_PORTS] = first + pairs.count

    def remove_pairs(self, pairs: QueuePairs) -> None:
        """Stop serving queue pairs. Their memory stays until the controller is closed.

        Raises
        ------
        SharingError
            A launch or command on them is in flight.
        """
        with self._lock:
            client = self._client(pairs)
            if client.launches or pairs.outstanding():
                raise errors.SharingError(
                    f"{client.launches} launches and {pairs.outstanding()} commands of these queues are in flight: "
                    "wait for them, then close"
                )
            for k in range(pairs.count):
                self._control[native.K_PORTS + client.first + k] = 0
            self._clients.remove(client)
            self._retired.append(client)
            self._share_out()

    def _share_out(self) -> None:
        """Set the number of commands of each port per round, in proportion to its weight."""
        heaviest = max((int(c.pairs.ports[:, at.P_WEIGHT].max()) for c in self._clients), default=1)
        for client in self._clients:
            ports = client.pairs.ports
            ports[:, at.P_BURST] = ports[:, at.P_WEIGHT] * (native.FETCH // heaviest)

    def _client(self, pairs: QueuePairs | None) -> _Client:
        for client in self._clients:
            if pairs is None or client.pairs is pairs:
                return client
        raise errors.ArgumentError("these queue pairs are not served here: pass them to add_pairs", name="pairs")

    @property
    def threads(self) -> int:
        """Maximum number of service threads that serve this controller at once; not above the number of queues."""
        return min(self._max_threads, sum(c.pairs.count for c in self._clients) or 1)

    @property
    def control(self) -> int:
        """Address of the control record (`serve`)."""
        return self._control_block.address

    @property
    def namespaces(self) -> int:
        """Address of the namespace table (`serve`)."""
        return self._table.address

    def blocks(self) -> list[Block]:
        """Return the memory that service steps access in addition to the memory of the pairs."""
        return [self._table, self._control_block]

    def outstanding(self) -> int:
        """Return how many commands of all pairs were fetched and are not complete (a snapshot)."""
        return sum(c.pairs.outstanding() for c in self._clients)

    # -- namespaces -----------------------------------------------------------------------------------------

    def attach(self, medium: Medium, unit: int = native.BLOCK) -> int:
        """Serve a medium, up to its last whole `unit` bytes; return its namespace id."""
        if unit % medium.block:
            raise errors.ArgumentError(
                f"{medium.name} has blocks of {medium.block} bytes, but a page has {unit}: choose larger pages",
                name="page_size",
            )
        functions = medium.native() or python_functions(medium)
        return self._publish(medium, functions, native.BLOCKS, -(-medium.nbytes // unit) * unit)

    def attach_kv(self, functions: NativeMedium, owner: Any = None) -> int:
        """Serve keys and values; return the namespace id.

        Parameters
        ----------
        functions : NativeMedium
            Native functions that check and run commands. The controller itself checks only the namespace. The bits of a
            tag above 15 are the index of the queue.
        owner : object, optional
            Object that the functions work on; it is kept alive while the namespace is served.

        Raises
        ------
        ArgumentError, ClosedError
        """
        return self._publish(owner, functions, native.KEY_VALUE, 0)

    def _publish(self, owner: Any, functions: NativeMedium, kind: int, nbytes: int) -> int:
        with self._lock:
            self._require_open()
            nsid = next((k for k in range(1, NAMESPACES) if k not in self._served), 0)
            if not nsid:
                raise errors.ArgumentError(
                    f"a controller serves at most {NAMESPACES - 1} arrays and stores: close some"
                )
            self._served[nsid] = owner, functions
            record = self._records[nsid]
            record[native.NS_STATE], record[native.NS_BYTES], record[native.NS_KIND] = functions.state, nbytes, kind
            record[native.NS_MEMORY], record[native.NS_NON_BLOCKING] = functions.memory, functions.non_blocking
            record[native.NS_COMPLETE] = functions.complete
            record[native.NS_START] = functions.start
            self._records[0, 0] = max(self._served) + 1
            return nsid

    def detach(self, nsid: int) -> None:
        """Stop serving a namespace; later commands to it get an error status.

        After this call, no thread is in a function of the medium or store, except for a thread that has been in such a
        function for 5 s.
        """
        with self._lock:
            self._records[nsid, native.NS_START] = 0
            self._records[nsid, native.NS_COMPLETE] = 0
        left = self._passed(_PARK_SECONDS)
        with self._lock:
            served = self._served.pop(nsid, None)
        if not left:
            _leaked.append(served)

    def _passed(self, seconds: float) -> bool:
        """Wait until each thread has begun two more rounds, or has left; return False after a timeout."""

        def rounds(slot: int) -> int:
            return int(self._control[native.K_PORTS + native.MAX_PORTS + native.THREAD_WORDS * slot + native.T_ROUNDS])

        deadline = clock.monotonic() + seconds
        before = [(slot, rounds(slot)) for slot in tuple(self._slots.occupied)]
        while any(slot in self._slots.occupied and rounds(slot) - started < 2 for slot, started in before):
            if clock.monotonic() > deadline:
                return False
            clock.sleep(5e-5)
        return True

    def medium(self, nsid: int) -> Medium:
        """Return the medium of a namespace."""
        medium: Medium = self._served[nsid][0]
        return medium

    def namespace_address(self, nsid: int) -> NamespaceAddress:
        """Return the address that commands to a namespace need."""
        return NamespaceAddress(nsid, native.BLOCK.bit_length() - 1, self._served[nsid][0].nbytes)

    def failure(self, nsid: int | None = None, *, silent: bool = False) -> None:
        """Return None: the status of each command reports failures."""

    def silence(self) -> None:
        """Raise an error: threads of this process are never lost, and would continue."""
        raise errors.SharingError("threads of this process serve the queues: close the arrays, and open them again")

    def restart(self) -> None:
        """Do nothing: the threads continue to serve."""

    @property
    def commands(self) -> int:
        """Commands received so far, of all namespaces."""
        return sum(int(c.pairs.ports[:, at.P_SQ_HEAD].sum()) for c in [*self._clients, *self._retired])

    # -- service --------------------------------------------------------------------------------------------

    def begin(self, pairs: QueuePairs | None = None) -> None:
        """Count a launch on some pairs (default: the first ones) that begins, and wake the threads."""
        if not self.interpreted:
            _serve_ports.load()  # before the timeouts of a launch begin, and without the lock: it may take seconds
        with self._lock:
            self._require_open()
            client = self._client(pairs)
            self._count_launch(client, 1)
            if self.interpreted:
                return
            try:
                self._pool.submit(self._slots)
            except BaseException:
                self._count_launch(client, -1)
                raise

    def end(self, pairs: QueuePairs | None = None) -> None:
        """Count the end of a launch: the threads park when no command is outstanding."""
        with self._lock:
            self._count_launch(self._client(pairs), -1)

    def _count_launch(self, client: _Client, change: int) -> None:
        self._control[native.K_QUIESCE] = 0
        client.launches += change
        self._control[native.K_LAUNCHES] += change

    @contextlib.contextmanager
    def active(self, pairs: QueuePairs | None = None) -> Iterator[Controller]:
        """Keep the threads awake for the block."""
        self.begin(pairs)
        try:
            yield self
        finally:
            self.end(pairs)

    def services(self) -> list[Callable[[], int]]:
        """Return the functions that an interpreted launch calls between the steps of its threads (always the same)."""
        if not self._services:
            self._services.append(self.step)
        return list(self._services)

    def step(self, thread: int = 0) -> int:
        """Do one round of the work of a service thread (interpreted runs); return the number of commands."""
        work = int(native.process_batch(self.control, self._record_of(thread), self.namespaces))
        return work + self.complete(thread)

    def complete(self, thread: int) -> int:
        """Do the second part of a round: post the commands that media have completed; return their number."""
        answers = self._record_of(thread) + 8 * native.T_ANSWERS
        return int(native.poll_media(self.control, answers, self.namespaces))

    def _record_of(self, thread: int) -> int:
        return self._records_of_threads + 8 * native.THREAD_WORDS * thread

    def close(self) -> None:
        """Stop the threads (bounded wait). Commands in flight are never completed after this."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._control[native.K_STOP] = 1
        if not self._pool.remove(self._slots, _PARK_SECONDS):
            # a thread is in a system call that never returns: the memory to which the call writes must stay allocated
            _leaked.append((self.blocks(), self._clients, self._retired, self._served))

    def _serve(self, slot: int) -> None:
        """Serve as the thread in a slot, without the interpreter lock, until nothing is left to do."""
        _serve_ports(self.control, self._record_of(slot), self.namespaces)

    def _needed_threads(self) -> int:
        """Return how many threads have work: a launch may begin and end before a thread wakes."""
        if self._control[native.K_STOP]:
            return 0
        clients = tuple(self._clients)
        if self._control[native.K_LAUNCHES] or any(c.pairs.announced() for c in clients):
            return self.threads
        return int(any(c.pairs.outstanding() for c in clients))

    def _quiesce(self) -> None:
        self._control[native.K_QUIESCE] = 1

    def _require_open(self) -> None:
        if self._closed:
            raise errors.ClosedError("the controller is closed: open the array or store again")


class HostThreads:
    """The service of a cache by threads of this process.

    Parameters
    ----------
    threads : int, optional
        Maximum number of the process's service threads that serve the cache at once.
    """

    lists = False

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def fit(self, rings: Rings, device: str, page_size: int) -> Rings:
        """Return the rings unchanged."""
        return rings

    def memory(self, device: str) -> Allocator:
        """Return the allocator of a device."""
        return memory_for(device)

    def start(self, pairs: QueuePairs, *, device: str, timeout: float) -> Controller:
        """Return a `Controller` that gives the queues of the cache the largest weight; bulk reads have 1."""
        return Controller(
            pairs,
            threads=self._threads or service_threads(device),
            spin=device == "cuda",
            interpreted=device == "interp",
            weight=MAX_WEIGHT,
        )


_leaked: list[Any] = []


def service_threads(device: str) -> int:
    """Return the default number of service threads: they mostly wait for the drive; with a GPU they also copy."""
    cores = os.cpu_count() or 2
    return max(2, min(14, cores - 2)) if device == "cuda" else 8
