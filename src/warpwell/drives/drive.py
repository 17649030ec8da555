"""`Drive`: an enabled controller with its identity, limits and queues. `Namespace`: its blocks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_integer
from .._os import interruptible
from ..nvme import COMMAND, FLUSH, MAX_TRANSFER, PAGE, READ, WRITE, controller, data_pointers, identify
from ..nvme.status import describe, status_dnr
from ..queues import QueuePairs
from ..targets import Block
from .host_queue import Answer, HostQueue
from .machine import drive_error
from .transport import Transport

MEDIA = 2
"""Status code type: media and data integrity errors."""
ADMIN_ENTRIES = 32
MIN_ENTRIES = 64
"""Entries of a queue whose ring fills a page of memory: the minimum of Warpwell's rings."""
COMMAND_SECONDS = 30.0
"""Time-out of an admin command, and of a read, write or flush of the host: the same as in Linux. It is long because a
drive's garbage collection may take seconds, and declaring a drive failed may lose unflushed data."""
SHUTDOWN_SECONDS = 5.0
"""Minimum time-out of a shutdown, as in Linux."""
QUIESCE_SECONDS = 5.0
"""Time-out for threads that used a drive when it failed."""
HOST_BYTES = 1 << 17
"""Largest read or write of the host, in bytes."""
MIN_START_SECONDS = 1.0
"""Minimum time-out of a start, even if the controller promises less, because this process may wait for a processor."""
MAX_QUEUES = 64
"""Queue pairs that a drive requests by default."""

_IN_HANDLER = "a signal's handler {} in the middle of a command of its thread: let the handler set a flag instead"


class User(Protocol):
    """An owner of queues on which threads without the interpreter lock ring doorbells."""

    def quiesce(self) -> bool:
        """End all use of a failed drive for good: no access to its registers or memory follows.

        Return False after a timeout of about `QUIESCE_SECONDS`. Called within `Drive.held`, possibly repeatedly.
        """


class Drive:
    """A third-party NVMe controller, enabled, with an admin queue.

    Parameters
    ----------
    transport : Transport
        Access to the controller. The drive owns the transport: `close` closes it, and so does a constructor that fails.
    queues : int
        I/O queue pairs to request; the controller may grant fewer.

    Attributes
    ----------
    address : str
        Name of the drive in messages.
    serial, model, firmware, version : str
        Identity, as the drive reports it.
    entries : int
        Maximum number of entries of an I/O queue.
    max_transfer : int
        Maximum number of bytes of one command: the limit of the controller, and at most 2 MiB.
    queues : int
        I/O queue pairs that the controller granted.
    stride : int
        Bytes from one doorbell to the next.
    volatile_cache : bool
        Whether written data are durable only after a Flush.
    timeout : float
        Time-out of enabling and disabling, in seconds.

    Raises
    ------
    DriveError
        The controller's limits are too small, or it does not start.
    DriveLostError
        The controller does not answer.
    """

    def __init__(self, transport: Transport, *, queues: int = MAX_QUEUES) -> None:
        checked_integer(queues, "queues", maximum=65535)
        self.transport = transport
        self.address = transport.address
        self.arena = transport.arena
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._pairs: dict[int, HostQueue | None] = {}
        self._io: HostQueue | None = None
        self._buffer: Block | None = None
        self._in_io = False
        self._admin: HostQueue | None = None
        self._closed = False
        self._requested_queues = queues
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self.timeout = MIN_START_SECONDS
        _all.add(self)
        try:
            self._start()
        except BaseException:
            with contextlib.suppress(errors.DriveError):
                self.close()
            raise

    # -- starting and stopping ------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Enable the controller, and read its identity and its limits."""
        self._read_capabilities()
        self._enable()
        self._identify()
        answer = self._run(controller.set_queues(self._requested_queues), "set features (number of queues)")
        self.queues = min(self._requested_queues, controller.queues_granted(answer.dw0))

    def _read_capabilities(self) -> None:
        version = self.transport.read32(controller.VS)
        if version == controller.ALL_ONES:
            raise self.transport.fail("its registers read as all ones: it was removed, or is not powered")
        cap = self.transport.read64(controller.CAP)
        self.version = controller.vs_text(version)
        self.entries = controller.cap_entries(cap)
        self.stride = controller.cap_stride(cap)
        self.timeout = max(self.timeout, controller.cap_timeout(cap))
        self._unit = controller.cap_smallest_page(cap)
        if not controller.cap_command_sets(cap) & controller.CSS_NVM:
            raise self._refusal("it has no NVM command set")
        if self._unit > PAGE:
            raise self._refusal(f"its smallest memory page has {self._unit} bytes, not {PAGE}")
        if self.entries < MIN_ENTRIES:
            raise self._refusal(f"its queues have at most {self.entries} entries, but {MIN_ENTRIES} are needed")

    def _enable(self) -> None:
        write = self.transport.write32
        self._disable()
        self._admin = HostQueue(self.transport, ADMIN_ENTRIES)
        self._admin.connect(0, self.stride)
        write(controller.AQA, controller.aqa_value(ADMIN_ENTRIES))
        self.transport.write64(controller.ASQ, self._admin.submission.address)
        self.transport.write64(controller.ACQ, self._admin.completion.address)
        write(controller.CC, controller.cc_value(enable=True))
        status = self._until(lambda status: controller.csts_ready(status) or controller.csts_fatal(status))
        if not controller.csts_ready(status) or controller.csts_fatal(status):
            raise self.transport.fail(f"it was not ready {self.timeout:g} s after it was enabled (CSTS {status:#x})")

    def _disable(self) -> None:
        """Clear CC.EN and wait for CSTS.RDY to follow, in the time that CAP.TO gives."""
        if self.transport.read32(controller.CC) & 1:
            # An enable in progress must end before CC.EN may change. A failed enable ends here.
            self._until(lambda status: controller.csts_ready(status) or controller.csts_fatal(status))
        self.transport.write32(controller.CC, controller.cc_value(enable=False))
        status = self._until(lambda status: not controller.csts_ready(status))
        if controller.csts_ready(status):
            raise self.transport.fail(f"it was not disabled within {self.timeout:g} s (CSTS {status:#x})")

    def _until(self, done: Callable[[int], bool], seconds: float = 0.0) -> int:
        """Read CSTS until `done` accepts it, or until the time-out (`timeout`, or longer); return it."""
        until = time.monotonic() + max(self.timeout, seconds)
        while True:
            status = self.transport.read32(controller.CSTS)
            if status == controller.ALL_ONES:
                raise self.transport.fail("its registers read as all ones: it was removed, or is not powered")
            if done(status) or time.monotonic() > until:
                return status
            time.sleep(0.0005)

    def _identify(self) -> None:
        found = identify.controller_of(self.identify(identify.CNS_CONTROLLER))
        self.serial, self.model, self.firmware = (identify.text_of(found[name]) for name in ("sn", "mn", "fr"))
        for name, size in (("sqes", 6), ("cqes", 4)):
            if not int(found[name]) & 0xF <= size <= int(found[name]) >> 4:
                raise self._refusal(f"its queue entries do not have {1 << size} bytes ({name} {int(found[name]):#x})")
        if int(found["cntrltype"]) > 1:
            raise self._refusal("it is an administrative or discovery controller")
        mdts = int(found["mdts"])
        self.max_transfer = min(MAX_TRANSFER, self._unit << mdts) if 0 < mdts < 32 else MAX_TRANSFER
        self.volatile_cache = bool(int(found["vwc"]) & 1)

    def _refusal(self, why: str) -> errors.DriveError:
        return self._error(f"it cannot be used: {why}")

    def _error(self, why: str, **details: Any) -> errors.DriveError:
        return drive_error(self.address, why, **details)

    @property
    def failure(self) -> errors.DriveLostError | None:
        """Why the drive must not be used, or None."""
        return self.transport.failure

    def stop(self) -> None:
        """Stop the controller, failed or not. It never accesses the arena again, and the drive refuses every call.

        No launch may be in flight on its queues, and no doorbell forwarder may run.

        Raises
        ------
        DriveError
            The controller cannot be stopped: no memory of the arena may be reused.
        """
        transport = self.transport
        with interruptible(lambda: None), self._lock:
            transport.fail("it was stopped: open it again")
            try:
                with transport.despite_failure():
                    self._disable()
            except errors.DriveError:
                transport.reset()
            self.arena.end_quarantine()

    # -- recovery from a failure ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the drive from being closed, stopped or recovered by other threads for the block."""
        with interruptible(lambda: None), self._lock:
            yield

    def serve(self, user: User) -> None:
        """Call `user.quiesce` before the controller is enabled again after a failure (within `held`)."""
        self._users.add(user)

    def recover(self) -> None:
        """Disable a failed controller, or reset it, and enable it again; do nothing if it has not failed.

        Namespaces, queues and media that were created before raise `DriveLostError`: create them again. Arrays that the
        drive serves keep their caches; `Array.recover` calls this method, and then restores the array. Unflushed data
        may be lost.

        Raises
        ------
        DriveLostError
            The controller does not start (a QEMU that has exited never does), or a different drive answers. The drive
            stays failed; call `recover` again, or close it.
        DriveError
            A thread still uses the drive, or a signal handler called this method during a command.
        ForkError, ClosedError
        """
        transport = self.transport
        with transport.despite_failure():
            transport.check()
        with self.held():
            if self._closed:
                raise errors.ClosedError(f"drive {self.address} is closed: open it again")
            if self._in_io:
                raise self._error(_IN_HANDLER.format("recovers it"))
            if transport.failure is None:
                return
            try:
                self._in_io = True
                self._end_users()
                with transport.despite_failure():
                    self._silence()
                    self._start_again()
                transport.revive()
            finally:
                self._in_io = False

    def _end_users(self) -> None:
        """Wait until no thread uses registers or memory of the failed controller."""
        hosts = [queue for queue in (self._admin, *self._pairs.values()) if queue is not None]
        are_quiet = [user.quiesce() for user in tuple(self._users)] + [
            queue.quiesce(QUIESCE_SECONDS) for queue in hosts
        ]
        if not all(are_quiet):
            raise self._error("it cannot be recovered: a thread still uses it: end this process")

    def _silence(self) -> None:
        """Disable the controller, or reset it. Then no write to its memory follows, and its generation has passed."""
        transport = self.transport
        try:
            transport.restore()
            self._disable()
        except errors.DriveError:
            if not transport.reset_function():
                raise
            transport.restore()
            self._disable()
        transport.pass_generation()
        self._users.clear()
        self._pairs.clear()
        self._admin = self._io = self._buffer = None
        self.arena.end_quarantine()

    def _start_again(self) -> None:
        """Enable the controller; raise if it is a different one, or has different limits."""

        def identity() -> dict[str, Any]:
            return {name: getattr(self, name) for name in ("serial", "model", "entries", "max_transfer", "stride")}

        before = identity()
        try:
            self._start()
            changed = [
                f"{name} is {now!r}, but was {before[name]!r}"
                for name, now in identity().items()
                if now != before[name]
            ]
            if changed:
                raise self.transport.fail(f"a different drive answers now ({', '.join(changed)}): close it")
        except BaseException:
            self.arena.quarantine()  # The controller may be enabled.
            raise
        finally:
            vars(self).update(before)

    def close(self) -> None:
        """Delete the queues, stop the controller and release all resources (idempotent). Unflushed data may be lost.

        Raises
        ------
        DriveError
            The controller cannot be stopped. Its memory is not reused.
        """
        if os.getpid() != self._pid:
            return  # The drive belongs to the parent.
        with interruptible(lambda: None), self._lock:
            if self._closed:
                return
            self._closed = True
            if self.transport.failure is None and self._admin is not None:
                with contextlib.suppress(errors.DriveError):
                    for qid in list(self._pairs):
                        self.delete_pair(qid)
                    self.transport.write32(
                        controller.CC, controller.cc_value(enable=True, shutdown=controller.SHUTDOWN_NORMAL)
                    )
                    self._until(
                        lambda status: controller.csts_shutdown(status) == controller.SHUTDOWN_COMPLETE,
                        SHUTDOWN_SECONDS,
                    )
            try:
                self.stop()
                self._admin = self._io = self._buffer = None
                self._pairs.clear()
            finally:
                self.transport.close()

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- admin commands -------------------------------------------------------------------------------------------

    def identify(self, cns: int, nsid: int = 0) -> bytes:
        """Return the 4,096 bytes of the data structure `cns` (`warpwell.nvme.identify`).

        Raises
        ------
        DriveError
            The controller refuses; ``status`` has the reason.
        """
        self.transport.check()
        page = self.arena.allocate(PAGE)
        self._run(controller.identify(cns, page.address, nsid=nsid), "identify", nsid or None)
        return page.read(0, PAGE).tobytes()

    def _run(self, command: NDArray[Any], name: str, nsid: int | None = None) -> Answer:
        if self._admin is None:
            self.transport.check()
            raise errors.ClosedError(f"drive {self.address} is closed: open it again")
        answer = self._admin.run(command, name, seconds=COMMAND_SECONDS, nsid=nsid)
        self.require(answer, name, nsid)
        return answer

    def require(self, answer: Answer, name: str, nsid: int | None = None, blocks: str = "") -> None:
        """Raise `DriveError` if a command failed."""
        if answer.status:
            where = "" if nsid is None else f"namespace {nsid}: "
            raise self._error(
                f"{where}{name}{blocks} failed: {describe(answer.status)}; {_next_step(answer.status)}",
                namespace=nsid,
                command=name,
                status=answer.status,
            )

    # -- queues ---------------------------------------------------------------------------------------------------

    def create_pair(self, submission: int, completion: int, entries: int) -> int:
        """Create an I/O queue pair over rings in the arena; return its id, the same for both queues.

        Parameters
        ----------
        submission, completion : int
            Addresses of the rings, multiples of 4,096; zeroed. They must stay until `delete_pair` or `stop`.
        entries : int
            Entries of each ring, at most `entries` of the drive.

        Raises
        ------
        DriveError
            The controller refuses, or grants no further queue.
        """
        if not 2 <= entries <= self.entries:
            raise errors.ArgumentError(
                f"queues of {entries} entries: choose 2 to {self.entries} for drive {self.address}", name="depth"
            )
        with interruptible(lambda: None), self._lock:
            qid = next((q for q in range(1, self.queues + 1) if q not in self._pairs), 0)
            if not qid:
                raise self._error(
                    f"it grants {self.queues} I/O queues, but all are in use: close a user, or request fewer queues"
                )
            self._run(controller.create_completion_queue(qid, entries, completion), "create I/O completion queue")
            try:
                self._run(
                    controller.create_submission_queue(qid, entries, submission, qid), "create I/O submission queue"
                )
            except errors.DriveError:
                with contextlib.suppress(errors.DriveError):
                    self._run(controller.delete_completion_queue(qid), "delete I/O completion queue")
                raise
            self._pairs[qid] = None
            return qid

    def delete_pair(self, qid: int, generation: int | None = None) -> None:
        """Delete an I/O queue pair: the submission queue, then the completion queue.

        Do nothing if its `generation` (`Transport.generation`) has passed: the queues no longer exist.

        Raises
        ------
        DriveError
            The controller refuses: the rings must stay until `stop`.
        """
        with interruptible(lambda: None), self._lock:
            if generation not in (None, self.transport.generation):
                return
            self._run(controller.delete_submission_queue(qid), "delete I/O submission queue")
            self._run(controller.delete_completion_queue(qid), "delete I/O completion queue")
            self._pairs.pop(qid, None)

    def connect(self, pairs: QueuePairs) -> tuple[list[int], list[tuple[int, int]]]:
        """Create an I/O queue pair over the rings of each of `pairs`; raises as `create_pair`.

        Returns
        -------
        queues : list of int
            Ids of the queue pairs, for `release_pairs`.
        doorbells : list of (int, int)
            Address of each doorbell word, and the offset of its register.
        """
        queues, doorbells = list[int](), list[tuple[int, int]]()
        with self.held():
            try:
                words = zip(pairs.rings().tolist(), pairs.doorbells().tolist(), strict=True)
                for k, ((submission, completion), (tail, head)) in enumerate(words):
                    qid = self.create_pair(submission, completion, pairs.depth)
                    queues.append(qid)
                    pairs.set_queue_id(k, qid)
                    # Store the head first: it makes room for the completions of new commands.
                    doorbells.append((head, controller.completion_doorbell(qid, self.stride)))
                    doorbells.append((tail, controller.submission_doorbell(qid, self.stride)))
            except BaseException:
                self.release_pairs(queues, self.transport.generation)
                raise
        return queues, doorbells

    def release_pairs(self, queues: Sequence[int], generation: int) -> None:
        """Delete I/O queue pairs that are not used any more. If the controller refuses, the drive fails."""
        try:
            for qid in queues:
                if self.failure is None:
                    self.delete_pair(qid, generation)
        except errors.DriveError as error:
            self.transport.fail(f"a queue could not be deleted ({error})", generation)

    def host_queue(self, entries: int = MIN_ENTRIES) -> HostQueue:
        """Create an I/O queue pair for the host; raises as `create_pair`. `delete_pair` takes its ``qid``."""
        with interruptible(lambda: None), self._lock:
            rings = HostQueue(self.transport, entries)
            qid = self.create_pair(rings.submission.address, rings.completion.address, entries)
            rings.connect(qid, self.stride)
            self._pairs[qid] = rings
            return rings

    # -- namespaces -----------------------------------------------------------------------------------------------

    def namespaces(self) -> list[int]:
        """Return the ids of the active namespaces, in order."""
        found: list[int] = []
        while True:
            more = identify.namespace_ids(self.identify(identify.CNS_ACTIVE_NAMESPACES, found[-1] if found else 0))
            found += more
            if len(more) < PAGE // 4:
                return found

    def namespace(self, nsid: int) -> Namespace:
        """Return a namespace.

        Raises
        ------
        DriveError
            The namespace does not exist, or Warpwell cannot use its format.
        """
        return Namespace(self, checked_integer(nsid, "namespace", maximum=0xFFFFFFFE))

    @contextlib.contextmanager
    def io(self, generation: int | None = None) -> Iterator[tuple[HostQueue, Block]]:
        """Own the queue for host commands of namespaces, and its buffer: data, then a page for a PRP list.

        The first use makes both. Ctrl-C waits for the end of the block.

        Raises
        ------
        DriveLostError
            The `generation` of the caller, if given, has passed.
        DriveError
            A signal handler runs within a block of its own thread, and would overwrite the data of that block.
        """
        with interruptible(lambda: None), self._lock:
            if self._in_io:
                raise self._error(_IN_HANDLER.format("uses it"))
            if generation is not None:
                self.transport.require(generation)
            try:
                self._in_io = True
                if self._io is None:
                    self._buffer = self.arena.allocate(HOST_BYTES + PAGE)
                    self._io = self.host_queue()
                queue, buffer = self._io, self._buffer
                if buffer is None:  # A signal handler has closed the drive.
                    raise errors.ClosedError(f"drive {self.address} is closed: open it again")
                yield queue, buffer
            finally:
                self._in_io = False

    @property
    def spare_queues(self) -> int:
        """Number of free I/O queue pairs, not counting the pair of `io`."""
        with self._lock:
            return self.queues - len(self._pairs) - (self._io is None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "lost" if self.failure else f"{self.queues} queues of {self.entries}"
        return f"<Drive {self.address}: {getattr(self, 'model', '?')}, {state}>"


_all: weakref.WeakSet[Drive] = weakref.WeakSet()


def _after_fork() -> None:
    """Replace the locks in the child: a thread of the parent may hold them, and the child has to be refused."""
    for drive in list(_all):
        drive._lock, drive._in_io = threading.RLock(), False


os.register_at_fork(after_in_child=_after_fork)


def _next_step(status: int) -> str:
    """Return the advice about a status, for messages."""
    if status >> 8 & 7 == MEDIA:
        return "restore the data from a copy, or check the health of the drive (smartctl, nvme smart-log)"
    if not status_dnr(status):
        return "the same command may succeed later"
    return "the same command would fail again"


class Namespace:
    """The blocks of one namespace of a drive.

    `read`, `write` and `flush` are for the host: one command at a time, through a buffer in the drive's memory.

    Attributes
    ----------
    drive : Drive
    nsid : int
        Id on the drive.
    name : str
        The drive's address and the id, for messages.
    block : int
        Bytes of a logical block: a power of two from 512.
    blocks, nbytes : int
        Size of the namespace.
    writable : bool
        Whether the drive does not report the namespace as write-protected.
    guid : str
        Globally unique identifier in hexadecimal: the NGUID, else the EUI-64, else empty.
    generation : int
        `Transport.generation` at construction. After a recovery of the drive, `read`, `write` and `flush` raise
        `DriveLostError`, because a flush would acknowledge writes to the previous generation.
    """

    def __init__(self, drive: Drive, nsid: int) -> None:
        self.drive = drive
        self.generation = drive.transport.generation
        self.nsid = nsid
        self.name = f"{drive.address}/{nsid}"
        if nsid not in (active := drive.namespaces()):
            raise drive._error(f"it has no namespace {nsid}: its namespaces are {active}", namespace=nsid)
        found = identify.namespace_of(drive.identify(identify.CNS_NAMESPACE, nsid))
        form = identify.block_format(found)
        self.block = form.block
        self.blocks = int(found["nsze"])
        self.nbytes = self.block * self.blocks
        self.writable = not int(found["nsattr"]) & 1
        self.guid = next((raw.hex() for raw in (bytes(found["nguid"]), bytes(found["eui64"])) if any(raw)), "")
        if why := self._refused(form, shared=bool(int(found["nmic"]) & 1)):
            raise drive._error(f"namespace {nsid} cannot be used: {why}", namespace=nsid)

    def _refused(self, form: identify.BlockFormat, *, shared: bool) -> str:
        csi = self._command_set()
        if csi != identify.CSI_NVM:
            name = {identify.CSI_KEY_VALUE: "keys and values", identify.CSI_ZONED: "zones"}.get(csi, "another kind")
            return f"it is a namespace of {name} (command set {csi}), not of blocks"
        reformat = "format it without (nvme format --lbaf=...), which erases all data"
        if form.metadata:
            where = "behind each block" if form.extended else "in a separate buffer"
            return f"its format has {form.metadata} bytes of metadata {where}: {reformat}"
        if form.protection:
            return f"its format has protection information of type {form.protection}: {reformat}"
        if not form.block or form.block > min(self.drive.max_transfer, HOST_BYTES):
            return f"its blocks have {form.block} bytes, not 512 to {min(self.drive.max_transfer, HOST_BYTES)}"
        if shared:
            return "it is shared with other controllers, which may write to it"
        if not 0 < self.nbytes < 1 << 63:
            return f"it has {self.blocks} blocks of {form.block} bytes"
        return ""

    def _command_set(self) -> int:
        try:
            return identify.command_set(self.drive.identify(identify.CNS_DESCRIPTORS, self.nsid))
        except errors.DriveLostError:
            raise
        except errors.DriveError:
            return identify.CSI_NVM  # A controller older than descriptors has no other command set.

    def read(self, lba: int, count: int) -> NDArray[np.uint8]:
        """Read and return `count` blocks from block `lba`.

        Raises
        ------
        ArgumentError
            The range is not inside the namespace.
        DriveError
            The drive refuses, or cannot read; ``status`` has the reason.
        DriveLostError, ForkError, ClosedError
        """
        lba, count = self._range(lba, count)
        out = np.empty(count * self.block, np.uint8)
        for first, blocks, data in self._chunks(lba, count, out):
            with self.drive.io(self.generation) as (queue, buffer):
                self._run(queue, READ, "read", first, blocks, buffer)
                data[:] = buffer.view(np.dtype(np.uint8))[: data.size]
        return out

    def write(self, lba: int, data: NDArray[Any]) -> None:
        """Write `data` (C order, whole blocks) from block `lba`; it is durable after `flush`. Raises as `read`."""
        items = np.ascontiguousarray(data)
        if items.dtype.hasobject:
            raise errors.ArgumentError(f"data must be numbers, got items of {items.dtype}", name="data")
        raw = items.reshape(-1).view(np.uint8)
        if raw.size % self.block:
            raise errors.ArgumentError(
                f"data must be whole blocks of {self.block} bytes, got {raw.size} bytes", name="data"
            )
        for first, blocks, part in self._chunks(*self._range(lba, raw.size // self.block), raw):
            with self.drive.io(self.generation) as (queue, buffer):
                buffer.view(np.dtype(np.uint8))[: part.size] = part
                self._run(queue, WRITE, "write", first, blocks, buffer)

    def flush(self) -> None:
        """Wait until all written data are durable. Raises as `read`."""
        with self.drive.io(self.generation) as (queue, _):
            self._run(queue, FLUSH, "flush", 0, 0, None)

    def read_bytes(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Read and return `nbytes` bytes from byte `offset`; raises as `read`."""
        first, count, skip = self._blocks_of(offset, nbytes)
        return self.read(first, count)[skip : skip + nbytes]

    def write_bytes(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes from byte `offset`; raises as `read`.

        A block that `data` covers in part is read first. Only one such write to a drive runs at a time.
        """
        if not data.size:
            return
        first, count, skip = self._blocks_of(offset, data.size)
        if data.size == count * self.block:
            self.write(first, data)
            return
        padded = np.empty((count, self.block), np.uint8)
        with interruptible(lambda: None), self.drive._lock:
            for k in {0, count - 1}:
                padded[k] = self.read(first + k, 1)
            padded.reshape(-1)[skip : skip + data.size] = data
            self.write(first, padded)

    def sync(self) -> None:
        """Flush. If the flush fails, the drive fails, because writes that it has lost could not be repeated.

        Raises
        ------
        DriveLostError, ForkError, ClosedError
        """
        try:
            self.flush()
        except errors.DriveLostError:
            raise
        except errors.DriveError as error:
            raise self.drive.transport.fail(
                f"{error}; data written since the last flush may be lost", self.generation
            ) from None

    def _blocks_of(self, offset: int, nbytes: int) -> tuple[int, int, int]:
        """Return the first block of a byte range, the number of its blocks, and the offset in the first block."""
        first = offset // self.block
        return first, -(-(offset + nbytes) // self.block) - first, offset % self.block

    def _range(self, lba: int, count: int) -> tuple[int, int]:
        """Return a range of blocks as integers; raise if it is not inside the namespace."""
        owner = f"namespace {self.name}"
        lba = checked_integer(lba, "lba", minimum=0, maximum=self.blocks, of=owner)
        return lba, checked_integer(count, "count", minimum=0, maximum=self.blocks - lba, of=owner)

    def _chunks(self, lba: int, count: int, raw: NDArray[np.uint8]) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        max_blocks = max(1, min(self.drive.max_transfer, HOST_BYTES) // self.block)
        for first in range(0, count, max_blocks):
            blocks = min(max_blocks, count - first)
            yield lba + first, blocks, raw[first * self.block : (first + blocks) * self.block]

    def _run(self, queue: HostQueue, opc: int, name: str, lba: int, blocks: int, buffer: Block | None) -> None:
        command = np.zeros((), COMMAND)
        command["opc"], command["nsid"] = opc, self.nsid
        if buffer is not None:
            list_address = buffer.address + buffer.nbytes - PAGE
            prp1, prp2, pages = data_pointers(buffer.address, blocks * self.block, list_address)
            buffer.words[-PAGE // 8 :][: len(pages)] = pages
            command["prp1"], command["prp2"] = prp1, prp2
            command["cdw10"], command["cdw11"], command["cdw12"] = lba & 0xFFFFFFFF, lba >> 32, blocks - 1
        answer = queue.run(command, name, seconds=COMMAND_SECONDS, nsid=self.nsid)
        self.drive.require(answer, name, self.nsid, f" of {blocks} blocks from {lba}" if blocks else "")

    def __repr__(self) -> str:
        return f"<Namespace {self.name}: {self.blocks} blocks of {self.block} bytes>"
