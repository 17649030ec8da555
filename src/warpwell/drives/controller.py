"""DriveController: a cache's own rings, served by a drive.

It takes the place of `warpwell.storage.Controller`. The rings, staging and lists of pages of `QueuePairs` lie in the
drive's `DmaArena`; the drive creates its queues over them, and a `Relay` forwards their doorbell words. Nothing else
stands between a miss in a kernel and the drive.

Loss. Whatever finds the drive gone (the relay, a command of the host, a launch that waited for the time-out with
commands in flight) declares its `Transport` lost. From then on memory of the arena that is freed waits for a reset
(`DmaArena.hold`). The queues are lost, too (`warpwell.queues.loss`), which ends launches; the error that they raise
names the drive. Their command ids stay taken, so their staging is given to nobody: data that arrive late meet nobody
else's. The array refuses everything until `Cache.recover` has brought it back (`warpwell.queues.loss`), or until it is
opened again, on a drive that was opened again.

Close deletes each submission queue and then its completion queue, after which the drive knows their memory no more. A
drive that refuses is lost, too: the arena keeps the memory until it is reset.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme import ABORTED_BY_HOST, READ, WRITE, describe
from ..nvme.controller import completion_doorbell, submission_doorbell
from ..queues import QueuePairs
from ..queues import layout as at
from ..storage import Medium, NamespaceAddress, PythonMedium, Rings
from ..targets import Allocator
from .drive import LEAST_ENTRIES, Drive, Namespace
from .relay import Relay, require_processor


class DriveRings:
    """The service of a cache whose namespaces are all on one drive; see `warpwell.storage.protocol.QueueBackend`.

    Parameters
    ----------
    drive : Drive
    """

    lists = True

    def __init__(self, drive: Drive) -> None:
        self.drive = drive

    def fit(self, rings: Rings, device: str, page_size: int) -> Rings:
        """Return rings that the drive grants and whose staging fits into half of its arena.

        One queue of those that are free is left for the host. A ring fills a page of memory, so it has at least 64
        entries. On "cpu" a warp is one lane, so that no commands are merged.

        Raises
        ------
        ArgumentError, DriveError
        """
        drive = self.drive
        drive.transport.check()
        require_processor()
        if device == "interp":
            raise errors.ArgumentError(
                f'device "interp" sees nothing that drive {drive.address} writes to memory: take device="cpu"',
                name="device",
            )
        if page_size > drive.max_transfer:
            raise errors.ArgumentError(
                f"drive {drive.address} moves at most {drive.max_transfer} bytes a command: take a smaller page_size",
                name="page_size",
            )
        merge = 1 if device == "cpu" else max(1, min(rings.merge, drive.max_transfer // page_size))
        most = 1 << (drive.entries.bit_length() - 1)
        depth = min(max(rings.depth, LEAST_ENTRIES), most)
        queues = max(1, min(rings.queues, drive.spare_queues))
        room = drive.arena.nbytes // 2
        while _shared_bytes(queues, depth, page_size * merge) > room:
            if merge > 1:
                merge //= 2
            elif depth > LEAST_ENTRIES:
                depth //= 2
            elif queues > 1:
                queues -= 1
            else:
                raise errors.ArgumentError(
                    f"{LEAST_ENTRIES // 2} pages of {page_size} bytes need more than half of the {2 * room} bytes that "
                    f"drive {drive.address} reaches: take a smaller page_size, or a larger arena",
                    name="page_size",
                )
        return Rings(queues, depth, merge)

    def memory(self, device: str) -> Allocator:
        """Return an allocator whose shared memory lies in the drive's arena."""
        return self.drive.arena.memory(device)

    def start(self, pairs: QueuePairs, *, device: str, timeout: float) -> DriveController:
        """Create the drive's queues over the rings."""
        return DriveController(self.drive, pairs)


def _shared_bytes(queues: int, depth: int, staging: int) -> int:
    """Return about how much shared memory `QueuePairs` takes."""
    return queues * (80 * depth + 8192 + depth // 2 * (staging + 4096))


class NamespaceMedium(PythonMedium):
    """A namespace for the host: what is read, written and flushed there goes through the drive's own host queue.

    Parameters
    ----------
    namespace : Namespace
    writable : bool
    """

    def __init__(self, namespace: Namespace, *, writable: bool) -> None:
        super().__init__(namespace.nbytes, writable=writable, name=name_of(namespace))
        self.namespace = namespace
        self.description = f"namespace {namespace.nsid} of {namespace.drive.model}, by the rings of kernels"

    def renew(self) -> None:
        """Take the namespace from a drive that was recovered; raise `DriveError` if it is another one."""
        old, new = self.namespace, self.namespace.drive.namespace(self.namespace.nsid)
        for name in ("block", "blocks", "guid", "writable"):
            if getattr(old, name) != getattr(new, name):
                raise errors.DriveError(
                    f"namespace {old.name} came back as another one ({name} is {getattr(new, name)!r}, and was "
                    f"{getattr(old, name)!r}): close the array and look at the drive",
                    drive=old.drive.address,
                    namespace=old.nsid,
                )
        self.namespace = new

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Read `nbytes` bytes from byte `offset`."""
        return self.namespace.read_bytes(offset, nbytes)

    def sync(self) -> None:
        """Flush the drive's volatile cache. A drive that fails to counts as lost."""
        self._check_open()
        self.namespace.sync()  # pages that were written are clean now


class DriveController:
    """Serves the pairs of one cache by a drive; see `warpwell.storage.protocol.QueueServer`.

    Parameters
    ----------
    drive : Drive
    pairs : QueuePairs
        Allocated by `DriveRings.memory`.

    Attributes
    ----------
    relay : Relay

    Raises
    ------
    DriveError
        The drive refuses a queue, or is lost. None of its queues is left.
    """

    def __init__(self, drive: Drive, pairs: QueuePairs) -> None:
        self.drive = drive
        self.pairs = pairs
        self._media: dict[int, tuple[Medium, NamespaceAddress]] = {}
        self._lock = threading.RLock()  # taken after the drive's, never before
        self._closed = False
        self._start()

    def _start(self) -> None:
        """Create the drive's queues over the rings, which are new or rewound, and a relay for them."""
        drive, pairs = self.drive, self.pairs
        with drive.held():
            generation, queues = drive.transport.generation, list[int]()
            try:
                doorbells: list[tuple[int, int]] = []
                for k, (port, (tail, head)) in enumerate(zip(pairs.ports, pairs.doorbells().tolist(), strict=True)):
                    qid = drive.create_pair(int(port[at.P_SQ]), int(port[at.P_CQ]), pairs.depth)
                    queues.append(qid)
                    pairs.set_queue_id(k, qid)
                    # the head first: it makes room for what the new commands answer
                    doorbells.append((head, completion_doorbell(qid, drive.stride)))
                    doorbells.append((tail, submission_doorbell(qid, drive.stride)))
                relay = Relay(drive.transport, doorbells, self._gone)
            except BaseException:
                self._delete_queues(queues, generation)
                raise
            with self._lock:
                self.relay, self._queues, self.generation = relay, queues, generation
            drive.serve(self)

    # -- namespaces -----------------------------------------------------------------------------------------

    def attach(self, medium: Medium, unit: int) -> int:
        """Serve a namespace of the drive, in whole pages of `unit` bytes; return its handle.

        Raises
        ------
        ArgumentError
            It is not one of this drive, or its blocks are larger than a page.
        """
        namespace = getattr(medium, "namespace", None)
        with self._lock:
            self._require_open()
            if medium.nbytes and (namespace is None or namespace.drive is not self.drive):
                raise errors.ArgumentError(
                    f"the rings of this cache are served by drive {self.drive.address}, and {medium.name!r} is not on "
                    "it: open it with a cache of its own",
                    name="cache",
                )
            address = NamespaceAddress(0, 9, 0)
            if namespace is not None:
                self.drive.transport.require(namespace.generation)
                if namespace.block > unit:
                    raise errors.ArgumentError(
                        f"{medium.name} has blocks of {namespace.block} bytes: take a page_size of at least that",
                        name="page_size",
                    )
                reach = medium.nbytes // unit * unit
                address = NamespaceAddress(namespace.nsid, namespace.block.bit_length() - 1, reach)
            nsid = next(k for k in range(1, len(self._media) + 2) if k not in self._media)
            self._media[nsid] = medium, address
            return nsid

    def detach(self, nsid: int) -> None:
        """Forget a handle."""
        with self._lock:
            self._media.pop(nsid, None)

    def medium(self, nsid: int) -> Medium:
        """Return the medium of a handle."""
        return self._media[nsid][0]

    def namespace_address(self, nsid: int) -> NamespaceAddress:
        """Return what commands to a handle say."""
        return self._media[nsid][1]

    # -- launches -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a launch begins; raise `DriveLostError` if the drive is lost."""
        with self._lock:
            self._require_open()
            if failure := self.failure():
                raise failure
            self.drive.transport.check()
            self.relay.begin()

    def end(self) -> None:
        """Note that a launch ended."""
        self.relay.end()

    def services(self) -> list[Callable[[], int]]:
        """Return no functions: the drive works by itself."""
        return []

    def failure(self, nsid: int | None = None, *, silent: bool = False) -> errors.DriveLostError | None:
        """Return why the drive is lost, or None. A launch that was `silent` with commands in flight loses it."""
        transport, loss = self.drive.transport, self.pairs.loss()
        with self._lock:
            generation = self.generation
            if generation == transport.generation and transport.lost is None:
                if loss:
                    transport.lose(loss.why, generation)
                elif silent and (waiting := self.pairs.in_use()):
                    transport.lose(f"{waiting} commands of kernels got no answer within the time-out", generation)
                else:
                    return None
            lost = transport.lost if generation == transport.generation else None
            if lost is not None:
                self._gone()
        why = str(lost) if lost else f"drive {self.drive.address} was lost" + (f" ({loss.why})" if loss else "")
        in_flight = self.pairs.in_use()
        command = self._in_flight() or "read or write"
        media = [self._media[nsid]] if nsid in self._media else list(self._media.values())
        namespace = media[0][1].nsid if len(media) == 1 else None
        where = "all namespaces" if namespace is None else f"namespace {namespace}"
        return errors.DriveLostError(
            f"{why}. {in_flight} commands in flight ({command}, {where}) are given up, as if they had ended "
            f"with {describe(ABORTED_BY_HOST)}; what was not flushed may be lost. Call recover() on the array, or open "
            "drive and array again",
            drive=self.drive.address,
            namespace=namespace,
            command=command,
            status=ABORTED_BY_HOST,
        )

    def _in_flight(self) -> str:
        """Return the names of commands in flight."""
        return " or ".join(_NAMES[code] for code in sorted(self.pairs.opcodes_in_use()) if code in _NAMES)

    def _gone(self) -> None:
        """End the waits of device code."""
        self.pairs.lose(str(self.drive.lost))

    # -- being brought back after a loss: see `warpwell.queues.loss` -----------------------------------------

    def leave(self) -> bool:
        """End launches and relay for good; see `drive.User`."""
        self._gone()
        return self.relay.stop()

    def silence(self) -> None:
        """Start the lost drive again, if nobody has: its controller of then writes to these rings no more."""
        self.drive.recover()

    def restart(self) -> None:
        """Create the drive's queues over the rewound rings, if its namespaces are what they were.

        Raises
        ------
        DriveError
            A namespace is gone, or has another size or format; or the drive has not queues enough any more.
        """
        with self.drive.held():
            for medium, _ in self._media.values():
                if isinstance(medium, NamespaceMedium):
                    medium.renew()
            self._start()

    # -- life -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Delete the queues (bounded wait). Their memory is free when the drive does not know it any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self.relay.stop():  # it stays, and keeps the rings: nobody else gets the words that it still reads
            self.drive.transport.lose("the thread that rings its doorbells does not end", self.generation)
        self._delete_queues(self._queues, self.generation)

    def _delete_queues(self, queues: list[int], generation: int) -> None:
        transport = self.drive.transport
        try:
            for qid in queues if transport.lost is None else ():
                self.drive.delete_pair(qid, generation)
        except errors.DriveError as error:
            transport.lose(f"queues could not be deleted ({error})", generation)

    def _require_open(self) -> None:
        if self._closed:
            raise errors.ClosedError("the cache is closed: open the array again")


def name_of(namespace: Namespace) -> str:
    """Return how a namespace is written, ``"nvme:ADDRESS/NAMESPACE"``."""
    return f"nvme:{namespace.name}"


_NAMES = {READ: "read", WRITE: "write"}
