"""`DriveMedium`: a namespace as a medium behind Warpwell's own controller; `NamespaceMedium`: its host commands alone.

`DriveMedium` submits the commands of the controller to queue pairs of its own (`warpwell.queues`). Each command takes a
command id. It is split into *parts* of at most `PART` bytes, and its id submits one part after another. All data pass
through the id's staging buffer in the arena. So a command may name any byte of host memory, a retried part still has
its data, and a failed drive that resumes writes only to these buffers. A command without a free id waits in a ring, and
the next call of `drive_complete` that finds a free id submits it.

Any service thread submits commands to any queue and takes completions from any. No native function waits for a command.
A doorbell write announces all commands in the rings. So several commands share one write, by a thread that finds no
completion or by the thread that starts the eighth for each queue.

A Python thread watches the commands in flight (`Transport.watch`). If the drive fails, `drive_complete` answers
everything in flight with "command aborted by host", and the ids stay taken.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_integer, checked_seconds
from .._os import clock
from ..nvme import PAGE, READ, WRITE, command_word0, command_word6
from ..nvme.status import (
    ABORTED_BY_HOST,
    CAPACITY_EXCEEDED,
    COMMAND_INTERRUPTED,
    INVALID_FIELD,
    INVALID_OPCODE,
    LBA_OUT_OF_RANGE,
    NAMESPACE_WRITE_PROTECTED,
    status_dnr,
)
from ..queues import (
    QueuePairs,
    drain,
    field,
    id_record,
    orphan,
    prp2_of,
    release_id,
    reuse_id,
    staging_of,
    submit,
    take_async_id,
    take_id,
    take_ready,
)
from ..queues.layout import ASYNC, ID_OPCODE, ID_STATUS, ID_USER, Q_IN_USE, Q_PROGRESS, Q_WORDS
from ..storage import NativeMedium, PythonMedium, carry_out_interpreted, complete_nothing
from ..storage.commands import PENDING, SLOTS, decode_command, lock, set_word, unlock, word, write_answer, zero_fill
from ..targets import device, native, private_block
from ..targets.primitives import DEVICE, SYSTEM, clock_ns, copy_bytes, exchange, fetch_add, load_relaxed, rem
from .doorbell_forwarder import doorbell_record, forward
from .drive import COMMAND_SECONDS, MIN_ENTRIES, QUIESCE_SECONDS, Drive, Namespace
from .transport import WATCH_SECONDS

PART = 64 << 10
"""Largest drive command, in bytes."""
RETRIES = 3
"""Retries of a part whose status permits another try."""
DOORBELL_BATCH = 8
"""Commands of a queue announced by one doorbell write. Fewer are announced when a thread finds no completion."""
IDLE_SECONDS = 0.2
"""Period of the watch while no command is in flight."""

# -- state ----------------------------------------------------------------------------------------------------------
M_FAILED = 0
"""Reason for which commands cannot reach the drive, or 0."""
M_NSID = 1
M_SHIFT = 2
"""Base-2 logarithm of the block size in bytes."""
M_NBYTES = 3
M_WRITABLE = 4
M_PART = 5
M_COUNT = 6
"""Number of queues."""
M_RECORDS = 7
"""Address of the first queue record."""
M_DOORBELLS = 8
"""Address of the record of `doorbell_forwarder.forward`."""
M_WAITING = 9
"""Address of the ring of commands that wait for an id. Each entry is the command, with the tag in `WAITING_TAG`."""
M_WAIT_LOCK = 16
M_WAIT_HEAD = 17
M_WAIT_TAIL = 18
M_RETRIED = 19
M_TURN = 32
"""Number of commands that were started."""
M_POLL = 48
M_INSIDE = 64
"""Number of threads in native functions."""
M_DOORBELL_LOCK = 80
M_WORDS = 96

FAILED_BY_HOST, STORE_FAILED = 1, 2
"""Values of `M_FAILED`."""

WAITING_WORDS = 8
WAITING_TAG = 1
"""Word of a waiting command that has its tag."""

# -- words of an id record for the owner of the queues ----------------------------------------------------------------
I_TAG = ID_USER
I_OFFSET = ID_USER + 1
"""Offset of the part in the namespace in bytes; then the bytes from there to the end of the command."""
I_NBYTES = ID_USER + 2
I_BUFFER = ID_USER + 3
"""Address of the part's data in the memory of the command."""
I_SINCE = ID_USER + 4
"""Time of submission in nanoseconds."""
I_TRIES = ID_USER + 5


class NamespaceMedium(PythonMedium):
    """A namespace for the host: reads, writes and flushes go through the host queue of its drive.

    Parameters
    ----------
    namespace : Namespace
    writable : bool, optional
        Default: whether the namespace is writable.

    Raises
    ------
    ReadOnlyError
        The namespace is write-protected, and `writable` is true.
    """

    def __init__(self, namespace: Namespace, *, writable: bool | None = None) -> None:
        name = f"nvme:{namespace.name}"
        if writable and not namespace.writable:
            raise errors.ReadOnlyError(f"{name} is write-protected: open it for reading")
        super().__init__(namespace.nbytes, writable=namespace.writable if writable is None else writable, name=name)
        self.namespace = namespace
        self.description = f"namespace {namespace.nsid} of {namespace.drive.model}, by the rings of kernels"

    def renew(self) -> None:
        """Take the namespace from a recovered drive; raise `DriveError` if it is a different one."""
        old, new = self.namespace, self.namespace.drive.namespace(self.namespace.nsid)
        for name in ("block", "blocks", "guid", "writable"):
            if getattr(old, name) != getattr(new, name):
                raise errors.DriveError(
                    f"namespace {old.name} is a different one after the restart ({name} is {getattr(new, name)!r}, "
                    f"but was {getattr(old, name)!r}): close the array and check the drive",
                    drive=old.drive.address,
                    namespace=old.nsid,
                )
        self.namespace = new

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes; see `Medium.read`."""
        with self._as_medium_errors(offset):
            return self.namespace.read_bytes(offset, nbytes)

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; see `Medium.write`. A block that `data` covers in part is read first."""
        with self._as_medium_errors(offset):
            self.namespace.write_bytes(offset, data)

    @contextlib.contextmanager
    def _as_medium_errors(self, offset: int) -> Iterator[None]:
        """Convert the error of a refused command into an error of `Medium`, but not that of a failed drive."""
        try:
            yield
        except errors.DriveLostError:
            raise
        except errors.DriveError as error:
            if error.status is not None and error.status & 0x7FF == CAPACITY_EXCEEDED:
                raise errors.StorageFullError(f"{error}: free some space", path=self.name) from None
            raise errors.MediumError(str(error), lba=offset // self.namespace.block, status=error.status) from None

    def sync(self) -> None:
        """Flush the volatile cache of the drive. If that fails, the drive fails: unflushed data may be lost."""
        self._check_open()
        if self.writable:
            self.namespace.sync()
        else:
            self.namespace.drive.transport.check()


class DriveMedium(NamespaceMedium):
    """A namespace of a drive as a medium: for arrays, or as part of a striped, replicated or test medium.

    Commands of kernels use queue pairs of their own; `read`, `write` and `sync` use the pair of the host. If the drive
    fails, all of them fail from then on, and unsynced data may be lost.

    Parameters
    ----------
    namespace : Namespace
        The namespace's drive must stay open as long as the medium.
    writable : bool, optional
        Default: whether the namespace is writable.
    queues : int
        Maximum number of queue pairs. The medium takes fewer if the drive has fewer left, and at least one.
    depth : int
        Entries of each queue, a power of two of at least 64. At most half as many commands are in flight.
    seconds : float
        Time-out of a command; the drive fails if one takes longer.

    Attributes
    ----------
    block : int
        Bytes of a logical block. Commands of kernels are multiples of it.
    queues, depth : int
        The numbers that the drive granted.

    Raises
    ------
    DriveError
        The drive has no queue or memory left, or refuses a queue.
    DriveLostError
        The drive does not answer.
    ArgumentError, ReadOnlyError
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        writable: bool | None = None,
        queues: int = 4,
        depth: int = 64,
        seconds: float = COMMAND_SECONDS,
    ) -> None:
        if not isinstance(namespace, Namespace):
            raise errors.ArgumentError(
                f"{type(namespace).__name__} is not a namespace: pass drive.namespace(1)", name="namespace"
            )
        drive = namespace.drive
        checked_integer(queues, "queues", maximum=64)
        if checked_integer(depth, "depth", minimum=MIN_ENTRIES, maximum=4096) & (depth - 1):
            raise errors.ArgumentError(f"depth must be a power of two, got {depth}", name="depth")
        super().__init__(namespace, writable=writable)
        self.seconds = checked_seconds(seconds, "seconds")
        self.block = namespace.block
        self.emulated = "QEMU" in drive.model
        self.depth = min(depth, 1 << (drive.entries.bit_length() - 1))
        self._drive: Drive = drive
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._watcher: threading.Thread | None = None
        self._generation = namespace.generation
        self._state, self._waiting = private_block(8 * M_WORDS), private_block(8 * WAITING_WORDS * SLOTS)
        with drive.held():
            drive.transport.require(namespace.generation)
            doorbells = self._create_pairs(queues)
            # At most half of the entries are in flight, so the drive has room although heads are announced in quarters.
            self._doorbells = doorbell_record(drive.transport, doorbells, head_mask=-(self.depth >> 2))
            self._fill_state()
            _media[self._state.address] = self
            drive.serve(self)
        self.queues = self._pairs.count
        self.description = (
            f"{self.name}: {drive.model}, {self.queues} queues of {self.depth}, blocks of {self.block}"
            + (" (emulated by QEMU)" if self.emulated else "")
        )

    def _create_pairs(self, queues: int) -> list[tuple[int, int]]:
        """Create at most `queues` queue pairs; return the addresses and registers of their doorbells."""
        drive = self._drive
        for count in range(queues, 0, -1):
            try:
                self._pairs = QueuePairs(
                    drive.arena.memory("cpu"),
                    count=count,
                    depth=self.depth,
                    staging_bytes=self._part,
                    lists=True,
                    timeout=self.seconds,
                )
                self._queues, doorbells = drive.connect(self._pairs)
            except errors.DriveError:
                if count == 1 or drive.failure is not None:
                    raise
            else:
                break  # Otherwise the drive or its memory has fewer.
        return doorbells

    @property
    def _part(self) -> int:
        """Size limit of a drive command: whole pages of memory, and whole blocks."""
        return max(self.block, min(PART, self._drive.max_transfer) // PAGE * PAGE)

    def _fill_state(self) -> None:
        state = self._state.words
        state[M_NSID], state[M_SHIFT] = self.namespace.nsid, self.block.bit_length() - 1
        state[M_NBYTES], state[M_WRITABLE], state[M_PART] = self.nbytes, self.writable, self._part
        state[M_COUNT], state[M_RECORDS] = self._pairs.count, self._pairs.records
        state[M_DOORBELLS], state[M_WAITING] = self._doorbells.address, self._waiting.address

    # -- the interface of media ---------------------------------------------------------------------------------------

    def native(self) -> NativeMedium:  # type: ignore[override]
        """Return the native functions; raise `ForkError` in a process that was forked from the medium's."""
        if os.getpid() != self._process:
            self._drive.transport.check()
        with self._lock:
            if self._watcher is None and not self._closed:
                self._watcher = threading.Thread(
                    target=_watch, args=(weakref.ref(self), self._wake), name=f"watch {self.name}", daemon=True
                )
                self._watcher.start()
        return NativeMedium(drive_start.address, drive_complete.address, self._state.address, self, non_blocking=True)

    def failure(self) -> Exception | None:
        """Return the error of a failed drive, or None."""
        if self._closed:
            return None
        transport = self._drive.transport
        address, nsid = self._drive.address, self.namespace.nsid
        if self._generation != transport.generation:
            self._fail()
            return errors.DriveLostError(
                f"drive {address} was lost, and has been started again since: unflushed data may be lost; close the "
                f"users of {self.name}, and make a medium of drive.namespace({nsid}) again",
                drive=address,
                namespace=nsid,
            )
        if self._state.words[M_FAILED] == STORE_FAILED:
            with contextlib.suppress(errors.WarpwellError):  # The error of `examine` names a better reason.
                transport.examine()
            transport.fail("its registers cannot be written", self._generation)
        elif transport.failure is None and (loss := self._pairs.loss()):
            transport.fail(loss, self._generation)
        if transport.failure is None:
            return None
        self._fail()
        return errors.DriveLostError(f"{transport.failure} ({self.name})", drive=address, namespace=nsid)

    def _fail(self) -> None:
        """Make native threads complete everything with "aborted by host", and end their waits for a turn."""
        self._state.words[M_FAILED] = self._state.words[M_FAILED] or FAILED_BY_HOST
        if not self._closed:
            self._pairs.lose("")

    @property
    def retried(self) -> int:
        """Number of commands that were submitted again because their status permits it."""
        return int(self._state.words[M_RETRIED])

    def last_error(self) -> str | None:
        """Return why the drive failed, or None."""
        error = self.failure()
        return None if error is None else str(error)

    def close(self) -> None:
        """Delete the queues (idempotent). A failed drive keeps the memory that it may write to until it is stopped."""
        if self._closed:
            return
        if os.getpid() == self._process:  # Otherwise queues and thread are the parent's.
            self._fail()
        self._closed = True
        self._wake.set()
        if os.getpid() != self._process:
            return
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(5)
        _media.pop(self._state.address, None)
        is_quiet = self._await_threads(self.seconds)
        if not is_quiet:
            self._drive.transport.fail("a native thread does not release its queues", self._generation)
        self._drive.release_pairs(self._queues, self._generation)
        if is_quiet:
            self._pairs.free_shared()
        else:
            _leaked.append(self._pairs)

    def quiesce(self) -> bool:
        """Abort everything in flight for good; see `drive.User`."""
        self._fail()
        return self._await_threads(QUIESCE_SECONDS)

    def _await_threads(self, seconds: float) -> bool:
        """Wait until no native thread uses rings and buffers; return False on time-out.

        A thread that enters a native function afterwards finds the failure.
        """
        until = clock.monotonic() + seconds
        while self._state.words[M_INSIDE]:
            if clock.monotonic() > until:
                return False
            clock.sleep(1e-4)
        return True

    def _watch(self) -> float:
        """Check once for a failure of the drive; return the seconds until the next check."""
        since = self._pairs.asynchronous_ids()[:, I_SINCE]
        if self.failure() is not None or not since.size:
            return IDLE_SECONDS
        age = (clock.monotonic_ns() - int(since.min())) * 1e-9
        self._drive.transport.watch("a command was", age, self.seconds, self._generation)
        return WATCH_SECONDS


_media: weakref.WeakValueDictionary[int, DriveMedium] = weakref.WeakValueDictionary()
"""Media by the address of their state, for the interpreter."""


def _after_fork() -> None:
    """Make native functions return errors in the child: the queues belong to the parent."""
    for medium in list(_media.values()):
        medium._state.words[M_FAILED] = FAILED_BY_HOST


os.register_at_fork(after_in_child=_after_fork)

_leaked: list[Any] = []
"""Rings and buffers that a native thread may still write to."""


def _watch(find: weakref.ref[DriveMedium], wake: threading.Event) -> None:
    """Watch a medium until it is closed or collected."""
    seconds = 0.0
    while not wake.wait(seconds):
        medium = find()
        if medium is None:
            return
        with contextlib.suppress(errors.DriveError, errors.ClosedError):
            seconds = medium._watch()
        del medium


# -- functions of the interpreter: it does not see stores of a drive, so the host carries commands out ----------------


def carry_out_by_host(state: int, command: int, tag: int) -> int:
    """Carry out a command by the host queue; return its status (never pending)."""
    medium = _media[state]
    status = carry_out_interpreted(medium, command)
    return status if medium.failure() is None else ABORTED_BY_HOST


# -- device code ------------------------------------------------------------------------------------------------------


@native(interpreted=carry_out_by_host)
def drive_start(state: int, command: int, tag: int) -> int:
    """Submit a command to one of the queues and return PENDING, or return the status of a refused command."""
    op, offset, nbytes, buffer = decode_command(command)
    if op != READ and op != WRITE:
        return INVALID_OPCODE
    if offset < 0 or nbytes < 0:
        return LBA_OUT_OF_RANGE
    if (offset | nbytes) & ((1 << word(state, M_SHIFT)) - 1) != 0:
        return INVALID_FIELD
    if op == WRITE and word(state, M_WRITABLE) == 0:
        return NAMESPACE_WRITE_PROTECTED
    inside = bytes_inside(state, offset, nbytes)
    if op == READ:
        zero_fill(buffer + inside, nbytes - inside)
    if inside == 0:
        return 0
    fetch_add(state + 8 * M_INSIDE, 1, SYSTEM)
    status = start_or_wait(state, command, tag)
    fetch_add(state + 8 * M_INSIDE, -1, SYSTEM)
    return status


@device
def bytes_inside(state: int, offset: int, nbytes: int) -> int:
    """Return how many of `nbytes` bytes from `offset` are inside the namespace."""
    return max(0, min(nbytes, word(state, M_NBYTES) - offset))


@device
def start_or_wait(state: int, command: int, tag: int) -> int:
    """Submit a command, or add it to the ring of waiting ones; return PENDING, or the status of a refused command."""
    if has_failed(state):
        return ABORTED_BY_HOST
    turn = fetch_add(state + 8 * M_TURN, 1, SYSTEM)
    if word(state, M_WAIT_HEAD) == word(state, M_WAIT_TAIL) and start(state, command, tag, turn):
        if rem(turn + 1, DOORBELL_BATCH * word(state, M_COUNT)) == 0:
            ring_doorbells(state)
        return PENDING
    lock(state + 8 * M_WAIT_LOCK)
    tail = word(state, M_WAIT_TAIL)
    is_full = tail - word(state, M_WAIT_HEAD) == SLOTS
    if not is_full:
        entry = waiting_entry(state, tail)
        for k in range(WAITING_WORDS):
            set_word(entry, k, word(command, k))
        set_word(entry, WAITING_TAG, tag)
        set_word(state, M_WAIT_TAIL, tail + 1)
    unlock(state + 8 * M_WAIT_LOCK)
    if is_full:
        return COMMAND_INTERRUPTED
    return PENDING


@device
def waiting_entry(state: int, position: int) -> int:
    """Return the address of an entry in the ring of waiting commands."""
    return word(state, M_WAITING) + 8 * WAITING_WORDS * (position & (SLOTS - 1))


@device
def has_failed(state: int) -> bool:
    """Return whether commands cannot reach the drive."""
    has_latched = load_relaxed(field(word(state, M_RECORDS), Q_PROGRESS) + 8, DEVICE) != 0
    return has_latched or word(state, M_FAILED) != 0


@device
def queue_record(state: int, index: int) -> int:
    """Return the address of a queue record."""
    return word(state, M_RECORDS) + 8 * Q_WORDS * index


@device
def ring_doorbells(state: int) -> None:
    """Store changed doorbells to their registers, unless another thread does."""
    if exchange(state + 8 * M_DOORBELL_LOCK, 1, SYSTEM) == 0:
        if forward(word(state, M_DOORBELLS)) < 0:
            set_word(state, M_FAILED, STORE_FAILED)
        unlock(state + 8 * M_DOORBELL_LOCK)


@device
def start(state: int, command: int, tag: int, turn: int) -> bool:
    """Take an id for a command and submit its first part; return False if no id of any queue is free."""
    count = word(state, M_COUNT)
    for k in range(count):
        queue = queue_record(state, rem(turn + k, count))
        cid = take_id(queue, 0)
        if cid >= 0:
            op, offset, nbytes, buffer = decode_command(command)
            record = id_record(queue, cid)
            set_word(record, ID_OPCODE, op)
            set_word(record, I_TAG, tag)
            set_word(record, I_OFFSET, offset)
            set_word(record, I_NBYTES, bytes_inside(state, offset, nbytes))
            set_word(record, I_BUFFER, buffer)
            set_word(record, I_TRIES, 0)
            submit_part(state, queue, cid)
            return True
    return False


@device
def submit_part(state: int, queue: int, cid: int) -> None:
    """Submit the next part of an id's command as use `cid` of the id. A failed drive's command is aborted later."""
    record = id_record(queue, cid)
    op = word(record, ID_OPCODE)
    nbytes = min(word(state, M_PART), word(record, I_NBYTES))
    first = staging_of(queue, cid)
    block = word(record, I_OFFSET) >> word(state, M_SHIFT)
    count = command_word6((nbytes >> word(state, M_SHIFT)) - 1, 0)
    if op == WRITE:
        copy_bytes(first, word(record, I_BUFFER), nbytes)
    set_word(record, I_SINCE, clock_ns())
    orphan(queue, cid, ASYNC)
    submit(queue, command_word0(op, cid, word(state, M_NSID)), first, prp2_of(queue, cid, nbytes), block, count)


@native(interpreted=complete_nothing)
def drive_complete(state: int, answer: int) -> bool:
    """Answer a completed command; return whether there was one."""
    fetch_add(state + 8 * M_INSIDE, 1, SYSTEM)
    is_answered = complete_one(state, answer)
    fetch_add(state + 8 * M_INSIDE, -1, SYSTEM)
    return is_answered


@device
def complete_one(state: int, answer: int) -> bool:
    """Submit waiting commands, and answer a completed or aborted command; return whether there was one."""
    if has_failed(state):
        return abort_one(state, answer)
    if word(state, M_WAIT_HEAD) != word(state, M_WAIT_TAIL):
        start_waiting(state)
    count = word(state, M_COUNT)
    turn = fetch_add(state + 8 * M_POLL, 1, SYSTEM)
    for k in range(count):
        queue = queue_record(state, rem(turn + k, count))
        if load_relaxed(queue + 8 * Q_IN_USE, DEVICE) == 0:
            continue
        cid = take_ready(queue)
        if cid < 0:
            drain(queue, 1, 0, 0)
            cid = take_ready(queue)
        while cid >= 0:
            if finish_part(state, queue, cid, answer):
                return True
            cid = take_ready(queue)
    ring_doorbells(state)
    return False


@device
def start_waiting(state: int) -> None:
    """Submit waiting commands while an id is free, unless another thread does."""
    if exchange(state + 8 * M_WAIT_LOCK, 1, SYSTEM) == 0:
        head = word(state, M_WAIT_HEAD)
        while head != word(state, M_WAIT_TAIL):
            entry = waiting_entry(state, head)
            if not start(state, entry, word(entry, WAITING_TAG), head):
                break
            head += 1
            set_word(state, M_WAIT_HEAD, head)
        unlock(state + 8 * M_WAIT_LOCK)


@device
def finish_part(state: int, queue: int, cid: int, answer: int) -> bool:
    """Move the data of a completed part. Submit it again or the next one, or answer the command and return True."""
    record = id_record(queue, cid)
    status = word(record, ID_STATUS)
    left = 0
    tries = 0
    if status != 0:
        tries = word(record, I_TRIES) + 1
        if tries <= RETRIES and status_dnr(status) == 0:
            fetch_add(state + 8 * M_RETRIED, 1, SYSTEM)
            left = 1
    else:
        nbytes = min(word(state, M_PART), word(record, I_NBYTES))
        buffer = word(record, I_BUFFER)
        if word(record, ID_OPCODE) == READ:
            copy_bytes(buffer, staging_of(queue, cid), nbytes)
        left = word(record, I_NBYTES) - nbytes
        set_word(record, I_OFFSET, word(record, I_OFFSET) + nbytes)
        set_word(record, I_NBYTES, left)
        set_word(record, I_BUFFER, buffer + nbytes)
    if left > 0:
        set_word(record, I_TRIES, tries)
        submit_part(state, queue, reuse_id(queue, cid))
        return False
    write_answer(answer, word(record, I_TAG), status, 0)
    release_id(queue, cid)
    return True


@device
def abort_one(state: int, answer: int) -> bool:
    """Answer a command of a failed drive, in flight or waiting; return whether there was one. Ids stay taken."""
    for k in range(word(state, M_COUNT)):
        queue = queue_record(state, k)
        cid = take_ready(queue)
        if cid < 0:
            cid = take_async_id(queue)
        if cid >= 0:
            return write_answer(answer, word(id_record(queue, cid), I_TAG), ABORTED_BY_HOST, 0)
    lock(state + 8 * M_WAIT_LOCK)
    head = word(state, M_WAIT_HEAD)
    is_waiting = head != word(state, M_WAIT_TAIL)
    if is_waiting:
        write_answer(answer, word(waiting_entry(state, head), WAITING_TAG), ABORTED_BY_HOST, 0)
        set_word(state, M_WAIT_HEAD, head + 1)
    unlock(state + 8 * M_WAIT_LOCK)
    return is_waiting
