"""`DriveMedium`: a namespace as a medium behind Warpwell's own controller; `NamespaceMedium`: its host commands alone.

`DriveMedium` splits each command of the controller into *parts*, one drive command each. A part has an id of a queue.
Each id owns a buffer in the arena and, if the buffer has more than two pages, a PRP list; both are constant. All data
pass through these buffers. So a command may name any byte of host memory, a retried part still has its data, and a
failed drive that resumes writes only to them.

Any service thread submits commands to any queue and takes completions from any; a lock per queue covers both. No
native function waits. A doorbell write announces all commands in the ring. So several commands share one write, by the
thread that looks for completions or by the thread that submits the eighth.

A Python thread watches the commands in flight (`Transport.watch`). If the drive fails, native threads complete
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
from ..nvme import (
    ABORTED_BY_HOST,
    CAPACITY_EXCEEDED,
    COMMAND_INTERRUPTED,
    FLUSH,
    INVALID_FIELD,
    INVALID_OPCODE,
    LBA_OUT_OF_RANGE,
    NAMESPACE_WRITE_PROTECTED,
    READ,
    WRITE,
    command_word0,
    command_word6,
    status_dnr,
    word1_cid,
    word1_phase,
    word1_sqid,
    word1_status,
)
from ..nvme.controller import completion_doorbell, submission_doorbell
from ..nvme.prp import PAGE
from ..storage import PENDING, NativeMedium, PythonMedium, carry_out, decode_command, set_word, word, write_answer
from ..storage.commands import (
    R_BUFFER,
    R_EXTRA,
    R_NBYTES,
    R_OFFSET,
    R_OP,
    R_REMAINING,
    R_STATUS,
    R_TAG,
    SLOTS,
    SlotTable,
    fill_slot,
    lock,
    record_of,
    release_slot,
    take_slot,
    unlock,
    zero_fill,
)
from ..targets import (
    SYSTEM,
    Block,
    call_native,
    clock_ns,
    copy_bytes,
    device,
    div,
    exchange,
    fetch_add,
    load_acquire,
    load_relaxed,
    native,
    private_block,
    rem,
    store_relaxed,
)
from ..targets.interp.interpreter import current
from .drive import COMMAND_SECONDS, QUIESCE_SECONDS, Drive, Namespace
from .transport import WATCH_SECONDS

PART = 64 << 10
"""Largest drive command, in bytes."""
RETRIES = 3
"""Retries of a part whose status permits another try."""
DOORBELL_BATCH = 8
"""Commands announced by one doorbell write. Fewer are announced when a thread looks for completions."""
IDLE_SECONDS = 0.2
"""Period of the watch while no command is in flight."""

# -- state ----------------------------------------------------------------------------------------------------------
M_STORE = 0
"""The transport's function that stores to a register; then the state of that function."""
M_STORE_STATE = 1
M_FAILURE = 2
"""Reason for which commands cannot reach the drive, or 0."""
M_NSID = 3
M_SHIFT = 4
"""Base-2 logarithm of the block size in bytes."""
M_NBYTES = 5
M_WRITABLE = 6
M_PART = 7
M_QUEUES = 8
M_TABLE = 9
M_RETRIED = 10
M_COMPLETION = 11
"""Second word of the completion that `UNKNOWN_COMPLETION` is about."""
M_TURN = 16
M_POLL = 24
M_FIRST = 32
"""Queue records."""

FAILED_BY_HOST, STORE_FAILED, UNKNOWN_COMPLETION = 1, 2, 3
"""Values of `M_FAILURE`. `UNKNOWN_COMPLETION`: a completion names no command in flight."""

# -- record of a queue ----------------------------------------------------------------------------------------------
Q_LOCK = 0
Q_SQ = 8
Q_CQ = 9
Q_SHIFT = 10
"""Base-2 logarithm of the entries of each ring."""
Q_QID = 11
Q_SQ_DOORBELL = 12
Q_CQ_DOORBELL = 13
Q_TAIL = 14
"""Count of commands written to the ring; `Q_TAIL_RUNG` of them are announced to the drive."""
Q_TAIL_RUNG = 15
Q_HEAD = 16
"""Count of completions consumed; `Q_HEAD_RUNG` of them are announced to the drive."""
Q_HEAD_RUNG = 17
Q_IN_FLIGHT = 18
Q_FREE = 19
Q_STACK = 20
"""Address of the stack of free ids."""
Q_PARTS = 21
Q_WAIT = 22
"""Address of the ring of commands that have parts to submit; then the head and the tail of that ring."""
Q_WAIT_HEAD = 23
Q_WAIT_TAIL = 24
Q_WORDS = 32

# -- record of an id of a queue -------------------------------------------------------------------------------------
P_COMMAND = 0
"""Slot of the command to which the part belongs."""
P_OFFSET = 1
P_NBYTES = 2
P_BUFFER = 3
"""Address of the part's data in the memory of the command."""
P_BOUNCE = 4
"""Address of the id's buffer in the arena; then the address of its PRP list."""
P_LIST = 5
P_SINCE = 6
"""Time of submission in nanoseconds, or 0 while no part is in flight."""
P_TRIES = 7
P_CID = 8
"""The id, with a generation above it that the next use increments (as in `queues.submission`)."""
P_WORDS = 9


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
                    f"namespace {old.name} came back as another one ({name} is {getattr(new, name)!r}, and was "
                    f"{getattr(old, name)!r}): close the array and look at the drive",
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
        """Convert the error of a refused command into the error that `Medium` promises; a failed drive stays one."""
        try:
            yield
        except errors.DriveLostError:
            raise
        except errors.DriveError as error:
            if error.status is not None and error.status & 0x7FF == CAPACITY_EXCEEDED:
                raise errors.StorageFullError(f"{error}: free some space", path=self.name) from None
            raise errors.MediumError(str(error), lba=offset // self.namespace.block, status=error.status) from None

    def sync(self) -> None:
        """Flush the volatile cache of the drive. If that fails, the drive fails: unflushed data may be gone."""
        self._check_open()
        if self.writable:
            self.namespace.sync()
        else:
            self.namespace.drive.transport.check()


class DriveMedium(NamespaceMedium):
    """A namespace of a drive as a medium: for arrays, and to stripe, replicate, slow down or fail.

    Commands of kernels use queue pairs of their own; `read`, `write` and `sync` use the pair of the host. If the drive
    fails, all of them fail from then on, and unsynced data may be lost.

    Parameters
    ----------
    namespace : Namespace
        Its drive must stay open as long as the medium.
    writable : bool, optional
        Default: whether the namespace is writable.
    queues : int
        Maximum number of queue pairs. The medium takes fewer if the drive has fewer left, and at least one.
    depth : int
        Entries of each queue, a power of two. At most half as many commands are in flight.
    seconds : float
        Time-out of a command; the drive fails if one takes longer.

    Attributes
    ----------
    block : int
        Bytes of a logical block; commands of kernels are multiples.
    queues, depth : int
        The granted numbers.

    Raises
    ------
    DriveError
        The drive has no queue or no memory left, or refuses one.
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
        checked_integer(queues, "queues", most=64)
        if checked_integer(depth, "depth", least=4, most=4096) & (depth - 1):
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
        self._table = SlotTable()
        self._pairs: list[_Pair] = []
        self._generation = namespace.generation
        self._state = private_block(8 * (M_FIRST + Q_WORDS * queues))
        with drive.held():
            try:
                drive.transport.require(namespace.generation)
                self._create_pairs(queues)
            except BaseException:
                self.close()
                raise
            self._fill_state()
            _media[self._state.address] = self
            drive.serve(self)

    def _create_pairs(self, queues: int) -> None:
        drive = self._drive
        for number in range(queues):
            try:
                self._pairs.append(_Pair(drive, self.depth, self._part))
            except errors.DriveError:
                if not number or drive.failure is not None:
                    raise
                break  # The drive or its memory has no more.
        self.queues = len(self._pairs)
        self.description = (
            f"{self.name}: {drive.model}, {self.queues} queues of {self.depth}, blocks of {self.block}"
            + (" (emulated by QEMU)" if self.emulated else "")
        )

    @property
    def _part(self) -> int:
        """Size limit of a drive command: whole pages of memory, and whole blocks."""
        return max(self.block, min(PART, self._drive.max_transfer) // PAGE * PAGE)

    def _fill_state(self) -> None:
        state = self._state.words
        state[M_STORE], state[M_STORE_STATE] = self._drive.transport.native_store()
        state[M_NSID], state[M_SHIFT] = self.namespace.nsid, self.block.bit_length() - 1
        state[M_NBYTES], state[M_WRITABLE], state[M_PART] = self.nbytes, self.writable, self._part
        state[M_QUEUES], state[M_TABLE] = self.queues, self._table.address
        for k, pair in enumerate(self._pairs):
            pair.fill(state[M_FIRST + Q_WORDS * k :])

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
        reason = int(self._state.words[M_FAILURE])
        if reason == STORE_FAILED:
            with contextlib.suppress(errors.WarpwellError):  # It names a better reason.
                transport.examine()
            transport.fail("its registers cannot be written", self._generation)
        elif reason == UNKNOWN_COMPLETION:
            completion = int(self._state.words[M_COMPLETION])
            transport.fail(
                f"it completed a command that is not in flight (queue {word1_sqid(completion)}, "
                f"cid {word1_cid(completion)}): it violates the specification",
                self._generation,
            )
        if transport.failure is None:
            return None
        self._fail()
        return errors.DriveLostError(f"{transport.failure} ({self.name})", drive=address, namespace=nsid)

    def _fail(self) -> None:
        """Make native threads complete everything with "aborted by host"; an earlier reason stays."""
        self._state.words[M_FAILURE] = self._state.words[M_FAILURE] or FAILED_BY_HOST

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
        self._closed = True
        self._wake.set()
        if os.getpid() != self._process:
            return  # Queues and thread are the parent's.
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(5)
        _media.pop(self._state.address, None)
        self._fail()
        is_quiet = self._await_threads(self.seconds)
        if not is_quiet:
            self._drive.transport.fail("a native thread does not release its queues", self._generation)
        for pair in self._pairs:
            pair.close(keep_memory=not is_quiet)

    def quiesce(self) -> bool:
        """Abort everything in flight for good; see `drive.User`."""
        self._fail()
        return self._await_threads(QUIESCE_SECONDS)

    def _await_threads(self, seconds: float) -> bool:
        """Wait until no native thread uses rings and buffers; return False on time-out.

        A thread that takes a lock afterwards finds the failure.
        """
        until = clock.monotonic() + seconds
        for k in range(len(self._pairs)):
            while self._state.words[M_FIRST + Q_WORDS * k + Q_LOCK]:
                if clock.monotonic() > until:
                    return False
                clock.sleep(1e-4)
        return True

    def _watch(self) -> float:
        """Look for a failure of the drive once; return the seconds until the next look."""
        since = np.concatenate([pair.records[:, P_SINCE] for pair in self._pairs])
        if self.failure() is not None or not since.any():
            return IDLE_SECONDS
        age = (clock.monotonic_ns() - int(since[since > 0].min())) * 1e-9
        self._drive.transport.watch("a command was", age, self.seconds, self._generation)
        return WATCH_SECONDS


_media: weakref.WeakValueDictionary[int, DriveMedium] = weakref.WeakValueDictionary()
"""Media by the address of their state, for the interpreter."""


def _after_fork() -> None:
    """Make native functions refuse in the child: the queues are the parent's."""
    for medium in list(_media.values()):
        medium._fail()


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


class _Pair:
    """A queue pair of a medium: its rings, and the buffer and the PRP list of each id.

    Attributes
    ----------
    dma_memory : tuple of Block
        Rings, buffers and lists in the arena, until `close`. The other blocks live as long as the medium, because
        native threads read them to complete aborted commands.
    records : ndarray
        Records of the ids, shape ``(ids, P_WORDS)``.
    """

    def __init__(self, drive: Drive, depth: int, part: int) -> None:
        self._drive = drive
        self.depth, self.ids = depth, depth // 2
        pages = part // PAGE
        list_bytes = 1 << (8 * pages - 1).bit_length() if pages > 2 else 0  # A power of two: no list crosses a page.
        self.dma_memory: tuple[Block, ...] = tuple(
            drive.arena.allocate(nbytes) for nbytes in (64 * depth, 16 * depth, self.ids * part, self.ids * list_bytes)
        )
        submission, completion, data, lists = self.dma_memory
        self._parts: Block = private_block(8 * P_WORDS * self.ids)
        self._stack: Block = private_block(8 * self.ids)
        self._wait: Block = private_block(8 * SLOTS)
        ids = np.arange(self.ids)
        self._stack.words[: self.ids] = ids
        self.records = self._parts.words[: P_WORDS * self.ids].reshape(self.ids, P_WORDS)
        self.records[:, P_CID] = ids
        self.records[:, P_BOUNCE] = data.address + part * ids
        self.records[:, P_LIST] = lists.address + list_bytes * ids
        if list_bytes:
            entries = lists.words[: self.ids * list_bytes // 8].reshape(self.ids, -1)
            entries[:, : pages - 1] = self.records[:, P_BOUNCE, None] + PAGE * np.arange(1, pages)
        self._generation = drive.transport.generation
        self.qid = drive.create_pair(submission.address, completion.address, depth)

    def fill(self, record: NDArray[np.int64]) -> None:
        """Fill the record of the queue."""
        record[Q_SQ], record[Q_CQ] = (block.address for block in self.dma_memory[:2])
        record[Q_SHIFT], record[Q_QID] = self.depth.bit_length() - 1, self.qid
        record[Q_SQ_DOORBELL] = submission_doorbell(self.qid, self._drive.stride)
        record[Q_CQ_DOORBELL] = completion_doorbell(self.qid, self._drive.stride)
        record[Q_FREE], record[Q_STACK], record[Q_PARTS] = self.ids, self._stack.address, self._parts.address
        record[Q_WAIT] = self._wait.address

    def close(self, *, keep_memory: bool) -> None:
        """Delete the queues and free the memory in the arena; a failed drive's memory stays in quarantine."""
        self._drive.release_pair(self.qid, self._generation)
        if keep_memory:
            _leaked.append(self.dma_memory)
        self.dma_memory = ()


# -- functions of the interpreter: it does not see stores of a drive, so the host carries commands out ----------------


def carry_out_by_host(state: int, command: int, tag: int) -> int:
    """Carry out a command by the host queue; return its status (never pending)."""
    medium, run = _media[state], current()
    op, offset, nbytes, buffer = decode_command(command)
    data = np.zeros(nbytes, np.uint8)
    if op == WRITE:
        data[:] = np.frombuffer(run.read_bytes(buffer, nbytes), np.uint8)
    status = carry_out(medium, op, offset, data)
    if op == READ and status == 0:
        run.write_bytes(buffer, data.tobytes())
    return status if medium.failure() is None else ABORTED_BY_HOST


def complete_nothing(state: int, answer: int) -> bool:
    """Return False: `carry_out_by_host` leaves no command pending."""
    return False


# -- device code ------------------------------------------------------------------------------------------------------


@device
def store_register(state: int, offset: int, value: int) -> bool:
    """Store to a register of the drive after all earlier stores; return False if the store failed."""
    if call_native(word(state, M_STORE), word(state, M_STORE_STATE), offset, value, 0, 0, 0) == 0:
        return True
    if word(state, M_FAILURE) == 0:
        set_word(state, M_FAILURE, STORE_FAILED)
    return False


@device
def ring_doorbell(state: int, queue: int) -> None:
    """Announce all commands in the submission ring to the drive (lock held)."""
    tail = word(queue, Q_TAIL)
    mask = (1 << word(queue, Q_SHIFT)) - 1
    if tail != word(queue, Q_TAIL_RUNG) and store_register(state, word(queue, Q_SQ_DOORBELL), tail & mask):
        set_word(queue, Q_TAIL_RUNG, tail)


@device
def part_of(queue: int, cid: int) -> int:
    """Return the record of an id."""
    return word(queue, Q_PARTS) + cid * (8 * P_WORDS)


@device
def submit(state: int, queue: int, cid: int) -> None:
    """Write the command of a part to the ring (lock held). There are fewer ids than entries.

    The other words of an entry stay zero.
    """
    part = part_of(queue, cid)
    tail = word(queue, Q_TAIL)
    entries = 1 << word(queue, Q_SHIFT)
    entry = word(queue, Q_SQ) + 64 * (tail & (entries - 1))
    use = (word(part, P_CID) + (entries >> 1)) & 0xFFFF
    set_word(part, P_CID, use)
    nbytes = word(part, P_NBYTES)
    op = word(record_of(word(state, M_TABLE), word(part, P_COMMAND)), R_OP)
    first = 0
    second = 0
    block = 0
    count = 0
    if op != FLUSH:
        first = word(part, P_BOUNCE)
        if nbytes > 2 * PAGE:
            second = word(part, P_LIST)
        elif nbytes > PAGE:
            second = first + PAGE
        block = word(part, P_OFFSET) >> word(state, M_SHIFT)
        count = command_word6((nbytes >> word(state, M_SHIFT)) - 1, 0)
    store_relaxed(entry, command_word0(op, use, word(state, M_NSID)), SYSTEM)
    store_relaxed(entry + 24, first, SYSTEM)
    store_relaxed(entry + 32, second, SYSTEM)
    store_relaxed(entry + 40, block, SYSTEM)
    store_relaxed(entry + 48, count, SYSTEM)
    set_word(part, P_SINCE, clock_ns())
    set_word(queue, Q_TAIL, tail + 1)


@device
def submit_waiting(state: int, queue: int) -> None:
    """Submit parts of the waiting commands while an id is free (lock held)."""
    if word(state, M_FAILURE) != 0:
        return
    while word(queue, Q_WAIT_HEAD) != word(queue, Q_WAIT_TAIL):
        free = word(queue, Q_FREE)
        if free == 0:
            return
        slot = load_relaxed(word(queue, Q_WAIT) + 8 * (word(queue, Q_WAIT_HEAD) & (SLOTS - 1)), SYSTEM)
        record = record_of(word(state, M_TABLE), slot)
        done = word(record, R_EXTRA)
        size = min(word(state, M_PART), word(record, R_NBYTES) - done)
        cid = load_relaxed(word(queue, Q_STACK) + 8 * (free - 1), SYSTEM)
        part = part_of(queue, cid)
        set_word(queue, Q_FREE, free - 1)
        set_word(queue, Q_IN_FLIGHT, word(queue, Q_IN_FLIGHT) + 1)
        set_word(part, P_COMMAND, slot)
        set_word(part, P_OFFSET, word(record, R_OFFSET) + done)
        set_word(part, P_NBYTES, size)
        set_word(part, P_BUFFER, word(record, R_BUFFER) + done)
        set_word(part, P_TRIES, 0)
        if word(record, R_OP) == WRITE:
            copy_bytes(word(part, P_BOUNCE), word(part, P_BUFFER), size)
        submit(state, queue, cid)
        set_word(record, R_EXTRA, done + size)
        if done + size >= word(record, R_NBYTES):
            set_word(queue, Q_WAIT_HEAD, word(queue, Q_WAIT_HEAD) + 1)
    if word(queue, Q_TAIL) - word(queue, Q_TAIL_RUNG) >= DOORBELL_BATCH:
        ring_doorbell(state, queue)


@device
def parts_in(state: int, nbytes: int) -> int:
    """Return the number of parts of a command of `nbytes` bytes; a flush has one."""
    return max(1, div(nbytes + word(state, M_PART) - 1, word(state, M_PART)))


@native(interpreted=carry_out_by_host)
def drive_start(state: int, command: int, tag: int) -> int:
    """Submit a command to one of the queues and return PENDING, or return the status of a refused command."""
    op, offset, nbytes, buffer = decode_command(command)
    if op != READ and op != WRITE and op != FLUSH:
        return INVALID_OPCODE
    if offset < 0 or nbytes < 0:
        return LBA_OUT_OF_RANGE
    inside = 0
    if op != FLUSH:
        if (offset | nbytes) & ((1 << word(state, M_SHIFT)) - 1) != 0:
            return INVALID_FIELD
        inside = max(0, min(nbytes, word(state, M_NBYTES) - offset))
    if op != READ and word(state, M_WRITABLE) == 0:
        if op == FLUSH:
            return 0
        return NAMESPACE_WRITE_PROTECTED
    if word(state, M_FAILURE) != 0:
        return ABORTED_BY_HOST
    if op == READ:
        zero_fill(buffer + inside, nbytes - inside)
    if op != FLUSH and inside == 0:
        return 0
    table = word(state, M_TABLE)
    slot = take_slot(table)
    if slot < 0:
        return COMMAND_INTERRUPTED
    fill_slot(table, slot, tag, op, offset, inside, buffer, parts_in(state, inside))
    queue = locked_queue(state)
    tail = word(queue, Q_WAIT_TAIL)
    store_relaxed(word(queue, Q_WAIT) + 8 * (tail & (SLOTS - 1)), slot, SYSTEM)
    set_word(queue, Q_WAIT_TAIL, tail + 1)
    submit_waiting(state, queue)
    unlock(queue + 8 * Q_LOCK)
    return PENDING


@device
def locked_queue(state: int) -> int:
    """Lock a queue and return its record: the next unlocked one in turn, else the next one."""
    count = word(state, M_QUEUES)
    turn = fetch_add(state + 8 * M_TURN, 1, SYSTEM)
    for k in range(count):
        queue = state + 8 * (M_FIRST + Q_WORDS * rem(turn + k, count))
        if exchange(queue + 8 * Q_LOCK, 1, SYSTEM) == 0:
            return queue
    queue = state + 8 * (M_FIRST + Q_WORDS * rem(turn, count))
    lock(queue + 8 * Q_LOCK)
    return queue


@native(interpreted=complete_nothing)
def drive_complete(state: int, answer: int) -> bool:
    """Answer a completed command; return whether there was one."""
    count = word(state, M_QUEUES)
    turn = fetch_add(state + 8 * M_POLL, 1, SYSTEM)
    for k in range(count):
        queue = state + 8 * (M_FIRST + Q_WORDS * rem(turn + k, count))
        # Read without the lock: the next call finds a command that this one misses.
        if word(queue, Q_IN_FLIGHT) == 0 and word(queue, Q_WAIT_HEAD) == word(queue, Q_WAIT_TAIL):
            continue
        if load_relaxed(queue + 8 * Q_LOCK, SYSTEM) != 0 or exchange(queue + 8 * Q_LOCK, 1, SYSTEM) != 0:
            continue
        slot = -1
        if word(state, M_FAILURE) == 0:
            ring_doorbell(state, queue)
            slot = take_completions(state, queue)
        if word(state, M_FAILURE) != 0 and slot < 0:
            slot = abort_parts(state, queue)
        unlock(queue + 8 * Q_LOCK)
        if slot >= 0:
            table = word(state, M_TABLE)
            record = record_of(table, slot)
            write_answer(answer, word(record, R_TAG), word(record, R_STATUS), 0)
            release_slot(table, slot)
            return True
    return False


@device
def take_completions(state: int, queue: int) -> int:
    """Consume completions until one completes a command; return its slot, or -1 (lock held)."""
    shift = word(queue, Q_SHIFT)
    while True:
        head = word(queue, Q_HEAD)
        completion = load_acquire(word(queue, Q_CQ) + 16 * (head & ((1 << shift) - 1)) + 8, SYSTEM)
        if word1_phase(completion) != ((head >> shift) & 1) ^ 1:
            return -1
        head += 1
        set_word(queue, Q_HEAD, head)
        if head - word(queue, Q_HEAD_RUNG) >= (1 << shift) >> 2:
            # At most half of the entries are in flight, so the drive always has room.
            if store_register(state, word(queue, Q_CQ_DOORBELL), head & ((1 << shift) - 1)):
                set_word(queue, Q_HEAD_RUNG, head)
        cid = word1_cid(completion) & (((1 << shift) >> 1) - 1)
        part = part_of(queue, cid)
        is_known = word(part, P_CID) == word1_cid(completion) and word1_sqid(completion) == word(queue, Q_QID)
        if not is_known or word(part, P_SINCE) == 0:
            set_word(state, M_COMPLETION, completion)
            set_word(state, M_FAILURE, UNKNOWN_COMPLETION)
            return -1
        slot = finish_part(state, queue, cid, word1_status(completion))
        if slot >= 0:
            return slot


@device
def finish_part(state: int, queue: int, cid: int, status: int) -> int:
    """Copy a part's data and free its id, or retry it; return the slot of a finished command, or -1 (lock held)."""
    part = part_of(queue, cid)
    tries = word(part, P_TRIES)
    if status != 0 and status_dnr(status) == 0 and tries < RETRIES:
        set_word(part, P_TRIES, tries + 1)
        fetch_add(state + 8 * M_RETRIED, 1, SYSTEM)
        submit(state, queue, cid)
        ring_doorbell(state, queue)
        return -1
    slot = word(part, P_COMMAND)
    record = record_of(word(state, M_TABLE), slot)
    if status == 0 and word(record, R_OP) == READ:
        copy_bytes(word(part, P_BUFFER), word(part, P_BOUNCE), word(part, P_NBYTES))
    free = word(queue, Q_FREE)
    store_relaxed(word(queue, Q_STACK) + 8 * free, cid, SYSTEM)
    set_word(queue, Q_FREE, free + 1)
    set_word(queue, Q_IN_FLIGHT, word(queue, Q_IN_FLIGHT) - 1)
    set_word(part, P_SINCE, 0)
    submit_waiting(state, queue)
    return count_down(record, slot, status, 1)


@device
def count_down(record: int, slot: int, status: int, parts: int) -> int:
    """Count completed parts of a command; return its slot if all are complete, else -1 (lock of its queue held)."""
    if status != 0 and word(record, R_STATUS) == 0:
        set_word(record, R_STATUS, status)
    left = word(record, R_REMAINING) - parts
    set_word(record, R_REMAINING, left)
    if left == 0:
        return slot
    return -1


@device
def abort_parts(state: int, queue: int) -> int:
    """Abort parts of a failed drive until a command is complete; return its slot, or -1 (lock held). Ids stay taken."""
    table = word(state, M_TABLE)
    if word(queue, Q_IN_FLIGHT) != 0:
        for cid in range((1 << word(queue, Q_SHIFT)) >> 1):
            part = part_of(queue, cid)
            if word(part, P_SINCE) == 0:
                continue
            set_word(part, P_SINCE, 0)
            set_word(queue, Q_IN_FLIGHT, word(queue, Q_IN_FLIGHT) - 1)
            slot = word(part, P_COMMAND)
            if count_down(record_of(table, slot), slot, ABORTED_BY_HOST, 1) >= 0:
                return slot
    while word(queue, Q_WAIT_HEAD) != word(queue, Q_WAIT_TAIL):
        head = word(queue, Q_WAIT_HEAD)
        slot = load_relaxed(word(queue, Q_WAIT) + 8 * (head & (SLOTS - 1)), SYSTEM)
        set_word(queue, Q_WAIT_HEAD, head + 1)
        record = record_of(table, slot)
        unsubmitted = parts_in(state, word(record, R_NBYTES) - word(record, R_EXTRA))
        if count_down(record, slot, ABORTED_BY_HOST, unsubmitted) >= 0:
            return slot
    return -1
