"""`DriveController`: lets a drive execute the commands in the rings of a cache.

It replaces `warpwell.storage.Controller`. The rings, staging and page lists of `QueuePairs` are in the drive's
`DmaArena`; the drive creates its queues over them, and a `DoorbellForwarder` copies their doorbell words. No other
program is between a miss in a kernel and the drive.

Failure. The first thread that notices a failed drive (the forwarder, a command of the host, a launch that reached the
time-out with commands in flight) calls `Transport.fail`. From then on, memory of the arena that is freed stays in
quarantine until a reset (`DmaArena.quarantine`). The queues fail as well (`warpwell.queues.loss`), which ends launches
with an error that names the drive. Their command ids stay taken, so no other command gets their staging: late data
overwrite nothing. The array refuses everything until `Cache.recover` has restored it (`warpwell.queues.loss`), or until
it is opened again on a drive that was opened again.

`close` deletes each submission queue and then its completion queue, after which the drive no longer uses their memory.
If the drive refuses, it fails, and its memory stays in quarantine until a reset.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .. import errors
from ..nvme import READ, WRITE
from ..nvme.status import ABORTED_BY_HOST, describe
from ..queues import QueuePairs
from ..storage import Medium, NamespaceAddress, Rings
from ..targets import Allocator
from .doorbell_forwarder import DoorbellForwarder, require_processor
from .drive import MIN_ENTRIES, Drive
from .medium import NamespaceMedium


class DriveRings:
    """The queue backend of a cache whose namespaces are all on one drive; see `warpwell.storage.QueueBackend`.

    Parameters
    ----------
    drive : Drive
    """

    lists = True

    def __init__(self, drive: Drive) -> None:
        self.drive = drive

    def fit(self, rings: Rings, device: str, page_size: int) -> Rings:
        """Return rings within the limits of the drive, with staging that fits into half of its arena.

        One free queue is left for the host. A ring fills a page of memory, so it has at least 64 entries. On "cpu" a
        warp is one lane, so commands are not merged.

        Raises
        ------
        ArgumentError, DriveError
        """
        drive = self.drive
        drive.transport.check()
        require_processor()
        if device == "interp":
            raise errors.ArgumentError(
                f'device "interp" cannot see stores of drive {drive.address} to memory: choose device="cpu"',
                name="device",
            )
        if page_size > drive.max_transfer:
            raise errors.ArgumentError(
                f"drive {drive.address} moves at most {drive.max_transfer} bytes a command: choose a smaller page_size",
                name="page_size",
            )
        merge = 1 if device == "cpu" else max(1, min(rings.merge, drive.max_transfer // page_size))
        depth = min(max(rings.depth, MIN_ENTRIES), 1 << (drive.entries.bit_length() - 1))
        queues = max(1, min(rings.queues, drive.spare_queues))
        room = drive.arena.nbytes // 2
        while _shared_bytes(queues, depth, page_size * merge) > room:
            if merge > 1:
                merge //= 2
            elif depth > MIN_ENTRIES:
                depth //= 2
            elif queues > 1:
                queues -= 1
            else:
                raise errors.ArgumentError(
                    f"{MIN_ENTRIES // 2} pages of {page_size} bytes need more than half of the {2 * room} bytes of "
                    f"the arena of drive {drive.address}: choose a smaller page_size, or a larger arena",
                    name="page_size",
                )
        return Rings(queues, depth, merge)

    def memory(self, device: str) -> Allocator:
        """Return an allocator with shared memory in the drive's arena."""
        return self.drive.arena.memory(device)

    def start(self, pairs: QueuePairs, *, device: str, timeout: float) -> DriveController:
        """Create the drive's queues over the rings."""
        return DriveController(self.drive, pairs, timeout)


def _shared_bytes(queues: int, depth: int, staging: int) -> int:
    """Return an estimate of the shared memory of `QueuePairs`, in bytes."""
    return queues * (80 * depth + 8192 + depth // 2 * (staging + 4096))


class DriveController:
    """Serves the queue pairs of one cache by a drive; see `warpwell.storage.QueueServer`.

    Parameters
    ----------
    drive : Drive
    pairs : QueuePairs
        Allocated by `DriveRings.memory`.
    timeout : float
        Seconds that launches wait for a command, for messages.

    Attributes
    ----------
    forwarder : DoorbellForwarder

    Raises
    ------
    DriveError
        The drive refuses a queue, or has failed. Its queues are deleted.
    """

    def __init__(self, drive: Drive, pairs: QueuePairs, timeout: float) -> None:
        self.drive = drive
        self.pairs = pairs
        self._timeout = timeout
        self._media: dict[int, tuple[Medium, NamespaceAddress]] = {}
        self._lock = threading.RLock()  # Taken after the drive's lock, never before.
        self._closed = False
        self._start()

    def _start(self) -> None:
        """Create the drive's queues over the new or rewound rings, and a doorbell forwarder for them."""
        drive = self.drive
        with drive.held():
            generation = drive.transport.generation
            queues, doorbells = drive.connect(self.pairs)
            forwarder = DoorbellForwarder(drive.transport, doorbells, self._fail_pairs)
            with self._lock:
                self.forwarder, self._queues, self.generation = forwarder, queues, generation
            drive.serve(self)

    # -- namespaces -----------------------------------------------------------------------------------------

    def attach(self, medium: Medium, unit: int) -> int:
        """Serve a namespace of the drive, in whole pages of `unit` bytes; return its handle.

        Raises
        ------
        ArgumentError
            The namespace is not on this drive, or its blocks are larger than a page.
        """
        namespace = getattr(medium, "namespace", None)
        with self._lock:
            self._require_open()
            if medium.nbytes and (namespace is None or namespace.drive is not self.drive):
                raise errors.ArgumentError(
                    f"drive {self.drive.address} serves the rings of this cache, but {medium.name!r} is not on it: "
                    "open it with its own cache",
                    name="cache",
                )
            address = NamespaceAddress(0, 9, 0)
            if namespace is not None:
                self.drive.transport.require(namespace.generation)
                if namespace.block > unit:
                    raise errors.ArgumentError(
                        f"{medium.name} has blocks of {namespace.block} bytes: choose a page_size of at least that",
                        name="page_size",
                    )
                reach = medium.nbytes // unit * unit
                address = NamespaceAddress(namespace.nsid, namespace.block.bit_length() - 1, reach)
            nsid = next(k for k in range(1, len(self._media) + 2) if k not in self._media)
            self._media[nsid] = medium, address
            return nsid

    def detach(self, nsid: int) -> None:
        """Remove a handle."""
        with self._lock:
            self._media.pop(nsid, None)

    def medium(self, nsid: int) -> Medium:
        """Return the medium of a handle."""
        return self._media[nsid][0]

    def namespace_address(self, nsid: int) -> NamespaceAddress:
        """Return the address for commands to a handle."""
        return self._media[nsid][1]

    # -- launches -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Count a launch that begins; raise `DriveLostError` if the drive has failed."""
        with self._lock:
            self._require_open()
            if failure := self.failure():
                raise failure
            self.drive.transport.check()
            self.forwarder.begin()

    def end(self) -> None:
        """Count a launch that has ended."""
        self.forwarder.end()

    def services(self) -> list[Callable[[], int]]:
        """Return no functions: the drive serves itself."""
        return []

    def failure(self, nsid: int | None = None, *, silent: bool = False) -> errors.DriveLostError | None:
        """Return why the drive has failed, or None. It fails if a launch was `silent` with commands in flight."""
        transport, loss = self.drive.transport, self.pairs.loss()
        with self._lock:
            generation = self.generation
            if generation == transport.generation and transport.failure is None:
                if loss:
                    transport.fail(loss, generation)
                elif silent and (waiting := self.pairs.in_use()):
                    transport.fail_timeout(f"{waiting} commands of kernels were", self._timeout, generation)
                else:
                    return None
            failure = transport.failure if generation == transport.generation else None
            if failure is not None:
                self._fail_pairs()
        why = str(failure) if failure else f"drive {self.drive.address} was lost" + (f" ({loss})" if loss else "")
        in_flight = self.pairs.in_use()
        command = self._in_flight() or "read or write"
        media = [self._media[nsid]] if nsid in self._media else list(self._media.values())
        namespace = media[0][1].nsid if len(media) == 1 else None
        where = "all namespaces" if namespace is None else f"namespace {namespace}"
        return errors.DriveLostError(
            f"{why}. {in_flight} commands in flight ({command}, {where}) are aborted, as if they had ended with "
            f"{describe(ABORTED_BY_HOST)}; unflushed data may be lost. Call recover() on the array, or open drive and "
            "array again",
            drive=self.drive.address,
            namespace=namespace,
            command=command,
            status=ABORTED_BY_HOST,
        )

    def _in_flight(self) -> str:
        """Return the names of commands in flight."""
        return " or ".join(_NAMES[code] for code in sorted(self.pairs.opcodes_in_use()) if code in _NAMES)

    def _fail_pairs(self) -> None:
        """End the waits of device code."""
        self.pairs.lose(str(self.drive.failure))

    # -- recovery: see `warpwell.queues.loss` ------------------------------------------------------------------

    def quiesce(self) -> bool:
        """End launches and the forwarder for good; see `drive.User`."""
        self._fail_pairs()
        return self.forwarder.stop()

    def silence(self) -> None:
        """Recover a failed drive once, so that its previous generation can no longer write to these rings."""
        self.drive.recover()

    def restart(self) -> None:
        """Create the drive's queues over the rewound rings, if its namespaces are unchanged.

        Raises
        ------
        DriveError
            A namespace is missing, or has another size or format; or the drive has too few free queues.
        """
        with self.drive.held():
            for medium, _ in self._media.values():
                if isinstance(medium, NamespaceMedium):
                    medium.renew()
            self._start()

    # -- life -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Delete the queues (bounded wait), after which the drive no longer uses their memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # A forwarder that does not end keeps the rings alive, because it still reads their words.
        if not self.forwarder.stop():
            self.drive.transport.fail("the thread that rings its doorbells does not stop", self.generation)
        self.drive.release_pairs(self._queues, self.generation)

    def _require_open(self) -> None:
        if self._closed:
            raise errors.ClosedError("the cache is closed: open the array again")


_NAMES = {READ: "read", WRITE: "write"}
