"""DriveMedium: a namespace of a drive as a medium, whose commands our own controller carries out on queues of the host.

Each command of the controller is cut into *parts*, one command of the drive each. A part has an id of a queue, and the
id has a buffer in the arena, and, where that has more than two pages, its list of pages; both never change. All data go
through these buffers: what the controller passes may lie anywhere and at any byte, a part that is retried still has
its data, and a drive that comes back after it was given up writes to them and to nothing else.

Any service thread starts commands on any queue and takes completions from any; a lock of the queue covers both. No
native function waits. Doorbells say how far a ring is filled, so several commands share one store: of the thread that
looks for completions, or of the one that submits the eighth.

A thread of Python watches commands in flight. It loses the drive if that has ended, reports a fatal error, or takes too
long. Then native threads answer everything in flight with "command aborted by host", and the ids stay taken.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
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
    UNRECOVERED_READ_ERROR,
    WRITE,
    WRITE_FAULT,
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
from ..storage import PENDING, Medium, NativeMedium, raw_bytes, set_word, word
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
    private_block,
    rem,
    store_relaxed,
)
from ..targets.interp.interpreter import current
from ..targets.native import native_but_interpreted
from .drive import COMMAND_SECONDS, LEAVE_SECONDS, Drive, Namespace

PART = 64 << 10
"""Most bytes of a command of the drive."""
RETRIES = 3
"""How often a part is submitted again whose status permits it."""
BATCH = 8
"""So many submitted commands are told to the drive at once; fewer, when completions are looked for."""
WATCH_SECONDS, IDLE_SECONDS = 0.02, 0.2
"""How often the drive is looked at while commands are in flight, and otherwise."""
QUIET_SECONDS = 0.5
"""A command older than this makes the watch read the drive's status register."""
ENDING_SECONDS = 0.1
"""How long it may take until a process that has closed its sockets is seen to have ended."""

# -- state ----------------------------------------------------------------------------------------------------------
M_STORE = 0
"""The transport's function that stores to a register, and its state."""
M_STORE_STATE = 1
M_LOST = 2
"""Why nothing reaches the drive any more: `LOST_...`, or 0."""
M_NSID = 3
M_SHIFT = 4
"""log2 of the bytes of a block."""
M_NBYTES = 5
M_WRITABLE = 6
M_PART = 7
M_QUEUES = 8
M_TABLE = 9
M_RETRIED = 10
M_ANSWER = 11
"""Second word of a completion that cannot be."""
M_TURN = 16
M_POLL = 24
M_FIRST = 32
"""Queue records."""

LOST_TOLD, LOST_STORE, LOST_ANSWER = 1, 2, 3
"""The host told it; a register could not be written; a completion names no command in flight."""

# -- record of a queue ----------------------------------------------------------------------------------------------
Q_LOCK = 0
Q_SQ = 8
Q_CQ = 9
Q_SHIFT = 10
"""log2 of the entries of each ring."""
Q_QID = 11
Q_SQ_DOORBELL = 12
Q_CQ_DOORBELL = 13
Q_TAIL = 14
"""Commands put into the ring so far; `Q_RUNG` of them are told to the drive."""
Q_RUNG = 15
Q_HEAD = 16
"""Completions taken so far; `Q_SEEN` of them are told to the drive."""
Q_SEEN = 17
Q_FLYING = 18
Q_FREE = 19
Q_STACK = 20
"""Address of the stack of free ids."""
Q_PARTS = 21
Q_WAIT = 22
"""Address of the ring of commands of which not all parts are submitted; then where it begins and ends."""
Q_WAIT_HEAD = 23
Q_WAIT_TAIL = 24
Q_WORDS = 32

# -- record of an id of a queue -------------------------------------------------------------------------------------
P_COMMAND = 0
"""Slot of the command of which this is a part."""
P_OFFSET = 1
P_NBYTES = 2
P_BUFFER = 3
"""Where the data belong."""
P_BOUNCE = 4
"""Where they lie while the drive has the part; next, what the drive calls that, its second page, and its list."""
P_PRP1 = 5
P_SECOND = 6
P_LIST = 7
P_SINCE = 8
"""When it was submitted (ns), 0 where it is not in flight."""
P_TRIES = 9
P_CID = 10
"""What commands call it: the id, and above it a generation, the next one for each (as in `queues.submission`)."""
P_WORDS = 11


class DriveMedium(Medium):
    """A namespace of a drive as a medium: for arrays, and to stripe, replicate, slow down or fail.

    Commands of kernels use queue pairs of their own; `read`, `write` and `sync` use that of the host. A drive that is
    lost fails all of them from then on; what was written and not synced may be lost.

    Parameters
    ----------
    namespace : Namespace
        Of a drive that stays open as long as the medium.
    writable : bool, optional
        Default: whether the namespace is.
    queues : int
        Most queue pairs; fewer where the drive has fewer left, at least one.
    depth : int
        Entries of each, a power of two; half as many commands are in flight.
    seconds : float
        A drive that takes longer for a command is lost.

    Attributes
    ----------
    block : int
        Bytes of a logical block; commands of kernels are multiples.
    queues, depth : int
        What was granted.

    Raises
    ------
    DriveError
        The drive has no queue left, or no memory; or refuses.
    DriveLostError
        The drive does not answer.
    ArgumentError
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
                f"{type(namespace).__name__} is no namespace: pass drive.namespace(1)", name="namespace"
            )
        drive = namespace.drive
        checked_integer(queues, "queues", most=64)
        if checked_integer(depth, "depth", least=4, most=4096) & (depth - 1):
            raise errors.ArgumentError(f"queues of {depth} entries: a power of two", name="depth")
        self.seconds = checked_seconds(seconds, "seconds")
        if writable and not namespace.writable:
            raise errors.ReadOnlyError(f"{namespace.name} is write-protected: leave writable out")
        self.namespace = namespace
        self.block = namespace.block
        self.nbytes = namespace.nbytes
        self.writable = namespace.writable if writable is None else writable
        self.name = namespace.name
        self.emulated = "QEMU" in drive.model
        self.depth = min(depth, 1 << (drive.entries.bit_length() - 1))
        self._drive: Drive = drive
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._watch: threading.Thread | None = None
        self._table = SlotTable()
        self._pairs: list[_Pair] = []
        self._generation = namespace.generation
        with drive.held():
            try:
                drive.transport.require(namespace.generation)
                self._make_pairs(queues)
            except BaseException:
                self.close()
                raise
            self._describe()

    def _make_pairs(self, queues: int) -> None:
        drive = self._drive
        for number in range(queues):
            try:
                self._pairs.append(_Pair(drive, self.depth, self._part))
            except errors.DriveError:
                if not number or drive.lost is not None:
                    raise
                break  # the drive, or its memory, has no more

    def _describe(self) -> None:
        drive = self._drive
        self.queues = len(self._pairs)
        self.description = (
            f"{self.name}: {drive.model}, {self.queues} queues of {self.depth}, blocks of {self.block}"
            + (" (emulated by QEMU)" if self.emulated else "")
        )
        self._state = private_block(8 * (M_FIRST + Q_WORDS * self.queues))
        self._fill_state()
        _media[self._state.address] = self
        drive.serve(self)

    @property
    def _part(self) -> int:
        """Most bytes of one command to the drive: whole pages of memory, and whole blocks."""
        return max(self.block, min(PART, self._drive.max_transfer) // PAGE * PAGE)

    def _fill_state(self) -> None:
        words = self._state.words
        words[M_STORE], words[M_STORE_STATE] = self._drive.transport.native_store()
        words[M_NSID], words[M_SHIFT] = self.namespace.nsid, self.block.bit_length() - 1
        words[M_NBYTES], words[M_WRITABLE], words[M_PART] = self.nbytes, self.writable, self._part
        words[M_QUEUES], words[M_TABLE] = self.queues, self._table.address
        for k, pair in enumerate(self._pairs):
            pair.fill(words[M_FIRST + Q_WORDS * k :])

    # -- the interface of media ---------------------------------------------------------------------------------------

    def native(self) -> NativeMedium:
        """Return the native functions; raise `ForkError` in a process that was forked from the medium's."""
        if os.getpid() != self._process:
            self._drive.transport.check()
        with self._lock:
            if self._watch is None and not self._closed:
                self._watch = threading.Thread(
                    target=_watch, args=(weakref.ref(self), self._wake), name=f"watch {self.name}", daemon=True
                )
                self._watch.start()
        return NativeMedium(drive_start.address, drive_complete.address, self._state.address, self, non_blocking=True)

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes; see `Medium.read`."""
        self._check_open()
        inside = self._inside(offset, nbytes)
        out = np.zeros(nbytes, np.uint8)
        if inside:
            with self._told(offset):
                out[:inside] = self.namespace.read_bytes(offset, inside)
        return out

    def write(self, offset: int, data: NDArray[Any]) -> None:
        """Write bytes; see `Medium.write`. Blocks that are written in part are read first."""
        self._check_open()
        self._check_writable()
        raw = raw_bytes(data)
        raw = raw[: self._inside(offset, raw.nbytes)]
        with self._told(offset):
            self.namespace.write_bytes(offset, raw)

    def sync(self) -> None:
        """Flush the drive. If that fails, what was written may be lost: so the drive counts as lost."""
        self._check_open()
        if self.writable:
            self.namespace.sync()
        else:
            self._drive.transport.check()

    def failure(self) -> Exception | None:
        """Return the error of a drive that is lost, else None."""
        if self._closed:
            return None
        reason = int(self._state.words[M_LOST])
        transport = self._drive.transport
        if self._generation != transport.generation:
            self._state.words[M_LOST] = reason or LOST_TOLD
            return errors.DriveLostError(
                f"drive {self._drive.address} was lost, and has been started again since: what was not flushed may be "
                f"lost; close what uses {self.name}, and make a medium of drive.namespace({self.namespace.nsid}) again",
                drive=self._drive.address,
                namespace=self.namespace.nsid,
            )
        if reason == LOST_STORE and transport.lost is None:
            until = time.monotonic() + ENDING_SECONDS
            while transport.alive() and time.monotonic() < until:
                time.sleep(0.001)
            transport.lose("its registers cannot be written", self._generation)
        elif reason == LOST_ANSWER:
            answer = int(self._state.words[M_ANSWER])
            transport.lose(
                f"it completed a command that is not in flight (queue {word1_sqid(answer)}, cid {word1_cid(answer)}): "
                "it does not keep to the specification",
                self._generation,
            )
        if transport.lost is None:
            return None
        self._state.words[M_LOST] = self._state.words[M_LOST] or LOST_TOLD
        return errors.DriveLostError(
            f"{transport.lost} ({self.name})", drive=self._drive.address, namespace=self.namespace.nsid
        )

    @property
    def retried(self) -> int:
        """How many commands were submitted again after a status that permits it."""
        return int(self._state.words[M_RETRIED])

    def last_error(self) -> str | None:
        """Return why the drive is lost, or None."""
        error = self.failure()
        return None if error is None else str(error)

    def close(self) -> None:
        """Delete the queues (idempotent). A lost drive keeps what it may still write to until it is stopped."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if os.getpid() != self._process:
            return  # queues and thread are the parent's
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join(5)
        if hasattr(self, "_state"):
            _media.pop(self._state.address, None)
            self._state.words[M_LOST] = LOST_TOLD
            if not self._await_threads(self.seconds):  # its memory may not become another's
                self._drive.transport.lose("a thread does not leave its queues", self._generation)
                _left.extend(self._pairs)
        while self._pairs:
            self._pairs.pop().close()

    def leave(self) -> bool:
        """Give up what is in flight, for good; see `drive.User`."""
        self._state.words[M_LOST] = self._state.words[M_LOST] or LOST_TOLD
        return self._await_threads(LEAVE_SECONDS)

    def _await_threads(self, seconds: float) -> bool:
        """Wait until no native thread looks at rings and buffers: who takes a lock from now on finds the drive lost.

        Return whether all have left in time.
        """
        until = time.monotonic() + seconds
        self._answered = [pair.host_memory for pair in self._pairs]
        for k in range(len(self._pairs)):
            while self._state.words[M_FIRST + Q_WORDS * k + Q_LOCK]:
                if time.monotonic() > until:
                    return False
                time.sleep(1e-4)
        return True

    # -- for the host -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError(f"{self.name} is closed: open it again")

    @contextlib.contextmanager
    def _told(self, offset: int) -> Iterator[None]:
        """Turn a refusal of the drive into the error that `Medium` promises; a loss stays one."""
        try:
            yield
        except errors.DriveLostError:
            raise
        except errors.DriveError as error:
            if error.status is not None and error.status & 0x7FF == CAPACITY_EXCEEDED:
                raise errors.StorageFullError(f"{error}: free some space", path=self.name) from None
            raise errors.MediumError(str(error), lba=offset // self.block, status=error.status) from None

    def _look(self) -> float:
        """Look after the drive once; return the seconds until the next look."""
        if self.failure() is not None:
            return IDLE_SECONDS
        since = np.concatenate([pair.since() for pair in self._pairs])
        since = since[since > 0]
        transport = self._drive.transport
        if not transport.alive() or not since.size:
            return IDLE_SECONDS if transport.lost is None else 0.0
        age = (clock.monotonic_ns() - int(since.min())) * 1e-9
        if age > self.seconds:
            transport.lose(f"a command was not completed within {self.seconds:g} s", self._generation)
        elif age > QUIET_SECONDS:
            transport.examine()
        return WATCH_SECONDS if transport.lost is None else 0.0


_media: weakref.WeakValueDictionary[int, DriveMedium] = weakref.WeakValueDictionary()
"""By the address of their state, for the interpreter."""


def _after_fork() -> None:
    """Let native functions that somebody kept refuse in the child: the queues are the parent's."""
    for medium in list(_media.values()):
        medium._state.words[M_LOST] = LOST_TOLD


os.register_at_fork(after_in_child=_after_fork)

_left: list[Any] = []
"""Rings and buffers that a drive may still write to, and would not give up."""


def _watch(find: weakref.ref[DriveMedium], wake: threading.Event) -> None:
    """Look after a medium until it is closed or dropped."""
    seconds = 0.0
    while not wake.wait(seconds):
        medium = find()
        if medium is None:
            return
        with contextlib.suppress(errors.DriveError, errors.ClosedError):
            seconds = medium._look()
        del medium


class _Pair:
    """A queue pair of a medium: its rings, and of each id its buffer and list of pages."""

    def __init__(self, drive: Drive, depth: int, part: int) -> None:
        self._drive = drive
        ids = depth // 2
        pages = part // PAGE
        listed = 1 << (8 * pages - 1).bit_length() if pages > 2 else 0  # a power of two: no list crosses a page
        arena, dma = drive.arena, drive.transport.dma
        self._submission, self._completion = arena.allocate(64 * depth), arena.allocate(16 * depth)
        self._data = arena.allocate(ids * part)
        self._lists = arena.allocate(max(8, ids * listed))
        self._parts: Block = private_block(8 * P_WORDS * ids)
        self._stack: Block = private_block(8 * ids)
        self._wait: Block = private_block(8 * SLOTS)
        self._stack.words[:ids] = np.arange(ids)
        self.host_memory = self._parts, self._stack, self._wait
        """What native threads use to the end, to answer what is in flight; it lives as long as the medium."""
        self._records = self._parts.words[: P_WORDS * ids].reshape(ids, P_WORDS)
        self._records[:, P_CID] = np.arange(ids)
        self._records[:, P_BOUNCE] = self._data.address + part * np.arange(ids)
        for k, record in enumerate(self._records):
            buffer, table = int(record[P_BOUNCE]), self._lists.address + listed * k
            record[P_PRP1], record[P_LIST] = dma(buffer), dma(table)
            record[P_SECOND] = dma(buffer + PAGE) if pages > 1 else 0
            if listed:
                first = (table - self._lists.address) // 8
                self._lists.words[first : first + pages - 1] = [dma(buffer + PAGE * p) for p in range(1, pages)]
        self.depth, self.ids = depth, ids
        self._generation = drive.transport.generation
        self.qid = drive.create_pair(self._submission.address, self._completion.address, depth)

    def fill(self, words: NDArray[np.int64]) -> None:
        """Fill the record of the queue."""
        words[Q_SQ], words[Q_CQ] = self._submission.address, self._completion.address
        words[Q_SHIFT], words[Q_QID] = self.depth.bit_length() - 1, self.qid
        words[Q_SQ_DOORBELL] = submission_doorbell(self.qid, self._drive.stride)
        words[Q_CQ_DOORBELL] = completion_doorbell(self.qid, self._drive.stride)
        words[Q_FREE], words[Q_STACK], words[Q_PARTS] = self.ids, self._stack.address, self._parts.address
        words[Q_WAIT] = self._wait.address

    def since(self) -> NDArray[np.int64]:
        """Return when each part in flight was submitted (ns), and 0 for the others."""
        return self._records[:, P_SINCE].copy()

    def close(self) -> None:
        """Delete the queues, and drop the memory: a lost drive's waits in quarantine."""
        try:
            if self._drive.lost is None:
                self._drive.delete_pair(self.qid, self._generation)
        except errors.DriveLostError:
            pass
        except errors.DriveError:
            _left.append((self._submission, self._completion, self._data, self._lists))


# -- what the interpreter runs: it sees no memory that others write, so the host carries commands out -----------------


def carry_out(state: int, op: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
    """Carry out a command by the queue of the host; return its status (never pending)."""
    medium, run = _media[state], current()
    if op not in (READ, WRITE, FLUSH):
        return INVALID_OPCODE
    if offset < 0 or nbytes < 0:
        return LBA_OUT_OF_RANGE
    if op == WRITE and not medium.writable:
        return NAMESPACE_WRITE_PROTECTED
    try:
        if op == READ:
            run.write_bytes(buffer, medium.read(offset, nbytes).tobytes())
        elif op == WRITE:
            medium.write(offset, np.frombuffer(run.read_bytes(buffer, nbytes), np.uint8))
        else:
            medium.sync()
    except errors.DriveLostError:
        return ABORTED_BY_HOST
    except errors.StorageFullError:
        return CAPACITY_EXCEEDED
    except errors.MediumError as error:
        return error.status or (UNRECOVERED_READ_ERROR if op == READ else WRITE_FAULT)
    return 0


def none_is_due(state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Complete nothing."""
    return -1


# -- device code ------------------------------------------------------------------------------------------------------


@device
def store_register(state: int, offset: int, value: int) -> bool:
    """Store to a register of the drive, after everything that was stored before; return whether it could."""
    if call_native(word(state, M_STORE), word(state, M_STORE_STATE), offset, value, 0, 0, 0) == 0:
        return True
    if word(state, M_LOST) == 0:
        set_word(state, M_LOST, LOST_STORE)
    return False


@device
def ring(state: int, queue: int) -> None:
    """Tell the drive how far the submission ring is filled (lock held)."""
    tail = word(queue, Q_TAIL)
    mask = (1 << word(queue, Q_SHIFT)) - 1
    if tail != word(queue, Q_RUNG) and store_register(state, word(queue, Q_SQ_DOORBELL), tail & mask):
        set_word(queue, Q_RUNG, tail)


@device
def part_of(queue: int, cid: int) -> int:
    """Return the record of an id."""
    return word(queue, Q_PARTS) + cid * (8 * P_WORDS)


@device
def submit(state: int, queue: int, cid: int) -> None:
    """Put the command of a part into the ring (lock held). There are fewer ids than entries."""
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
        first = word(part, P_PRP1)
        if nbytes > 2 * PAGE:
            second = word(part, P_LIST)
        elif nbytes > PAGE:
            second = word(part, P_SECOND)
        block = word(part, P_OFFSET) >> word(state, M_SHIFT)
        count = command_word6((nbytes >> word(state, M_SHIFT)) - 1, 0)
    store_relaxed(entry, command_word0(op, use, word(state, M_NSID)), SYSTEM)
    store_relaxed(entry + 8, 0, SYSTEM)
    store_relaxed(entry + 16, 0, SYSTEM)
    store_relaxed(entry + 24, first, SYSTEM)
    store_relaxed(entry + 32, second, SYSTEM)
    store_relaxed(entry + 40, block, SYSTEM)
    store_relaxed(entry + 48, count, SYSTEM)
    store_relaxed(entry + 56, 0, SYSTEM)
    set_word(part, P_SINCE, clock_ns())
    set_word(queue, Q_TAIL, tail + 1)


@device
def submit_waiting(state: int, queue: int) -> None:
    """Submit parts of the commands that wait, while there are free ids (lock held)."""
    if word(state, M_LOST) != 0:
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
        set_word(queue, Q_FLYING, word(queue, Q_FLYING) + 1)
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
    if word(queue, Q_TAIL) - word(queue, Q_RUNG) >= BATCH:
        ring(state, queue)


@device
def parts_in(state: int, nbytes: int) -> int:
    """Return the number of parts of so many bytes; a flush has one."""
    return max(1, div(nbytes + word(state, M_PART) - 1, word(state, M_PART)))


@native_but_interpreted(carry_out)
def drive_start(state: int, op: int, offset: int, nbytes: int, buffer: int, tag: int) -> int:
    """Submit a command on one of the queues and return PENDING; or the status of one that cannot be."""
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
    if word(state, M_LOST) != 0:
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
    """Lock a queue: the next one in turn that no other thread holds, if there is one. Return its record."""
    count = word(state, M_QUEUES)
    turn = fetch_add(state + 8 * M_TURN, 1, SYSTEM)
    for k in range(count):
        queue = state + 8 * (M_FIRST + Q_WORDS * rem(turn + k, count))
        if exchange(queue + 8 * Q_LOCK, 1, SYSTEM) == 0:
            return queue
    queue = state + 8 * (M_FIRST + Q_WORDS * rem(turn, count))
    lock(queue + 8 * Q_LOCK)
    return queue


@native_but_interpreted(none_is_due)
def drive_complete(state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Return tag and status of a command that is done, or -1."""
    count = word(state, M_QUEUES)
    turn = fetch_add(state + 8 * M_POLL, 1, SYSTEM)
    for k in range(count):
        queue = state + 8 * (M_FIRST + Q_WORDS * rem(turn + k, count))
        # without the lock: what it misses is there at the next look
        if word(queue, Q_FLYING) == 0 and word(queue, Q_WAIT_HEAD) == word(queue, Q_WAIT_TAIL):
            continue
        if load_relaxed(queue + 8 * Q_LOCK, SYSTEM) != 0 or exchange(queue + 8 * Q_LOCK, 1, SYSTEM) != 0:
            continue
        slot = -1
        if word(state, M_LOST) == 0:
            ring(state, queue)
            slot = take_completions(state, queue)
        if word(state, M_LOST) != 0 and slot < 0:
            slot = give_up(state, queue)
        unlock(queue + 8 * Q_LOCK)
        if slot >= 0:
            table = word(state, M_TABLE)
            record = record_of(table, slot)
            found = (word(record, R_TAG) << 16) | word(record, R_STATUS)
            release_slot(table, slot)
            return found
    return -1


@device
def take_completions(state: int, queue: int) -> int:
    """Take completions until one ends a command; return its slot, or -1 (lock held)."""
    shift = word(queue, Q_SHIFT)
    while True:
        head = word(queue, Q_HEAD)
        answer = load_acquire(word(queue, Q_CQ) + 16 * (head & ((1 << shift) - 1)) + 8, SYSTEM)
        if word1_phase(answer) != ((head >> shift) & 1) ^ 1:
            return -1
        head += 1
        set_word(queue, Q_HEAD, head)
        if head - word(queue, Q_SEEN) >= (1 << shift) >> 2:
            # half the entries are for ids in flight, so the drive always has room
            if store_register(state, word(queue, Q_CQ_DOORBELL), head & ((1 << shift) - 1)):
                set_word(queue, Q_SEEN, head)
        cid = word1_cid(answer) & (((1 << shift) >> 1) - 1)
        part = part_of(queue, cid)
        ours = word(part, P_CID) == word1_cid(answer) and word1_sqid(answer) == word(queue, Q_QID)
        if not ours or word(part, P_SINCE) == 0:
            set_word(state, M_ANSWER, answer)
            set_word(state, M_LOST, LOST_ANSWER)
            return -1
        slot = finish_part(state, queue, cid, word1_status(answer))
        if slot >= 0:
            return slot


@device
def finish_part(state: int, queue: int, cid: int, status: int) -> int:
    """Move the data of a part and free its id, or submit it again; return the slot of a command that is done, or -1."""
    part = part_of(queue, cid)
    tries = word(part, P_TRIES)
    if status != 0 and status_dnr(status) == 0 and tries < RETRIES:
        set_word(part, P_TRIES, tries + 1)
        fetch_add(state + 8 * M_RETRIED, 1, SYSTEM)
        submit(state, queue, cid)
        ring(state, queue)
        return -1
    slot = word(part, P_COMMAND)
    record = record_of(word(state, M_TABLE), slot)
    if status == 0 and word(record, R_OP) == READ:
        copy_bytes(word(part, P_BUFFER), word(part, P_BOUNCE), word(part, P_NBYTES))
    free = word(queue, Q_FREE)
    store_relaxed(word(queue, Q_STACK) + 8 * free, cid, SYSTEM)
    set_word(queue, Q_FREE, free + 1)
    set_word(queue, Q_FLYING, word(queue, Q_FLYING) - 1)
    set_word(part, P_SINCE, 0)
    submit_waiting(state, queue)
    return count_down(record, slot, status, 1)


@device
def count_down(record: int, slot: int, status: int, parts: int) -> int:
    """Note that parts of a command are done; return its slot if all are, else -1 (lock of its queue held)."""
    if status != 0 and word(record, R_STATUS) == 0:
        set_word(record, R_STATUS, status)
    left = word(record, R_REMAINING) - parts
    set_word(record, R_REMAINING, left)
    if left == 0:
        return slot
    return -1


@device
def give_up(state: int, queue: int) -> int:
    """End parts of a lost drive until that ends a command; return its slot, or -1 (lock held). Ids stay taken."""
    table = word(state, M_TABLE)
    if word(queue, Q_FLYING) != 0:
        for cid in range((1 << word(queue, Q_SHIFT)) >> 1):
            part = part_of(queue, cid)
            if word(part, P_SINCE) == 0:
                continue
            set_word(part, P_SINCE, 0)
            set_word(queue, Q_FLYING, word(queue, Q_FLYING) - 1)
            slot = word(part, P_COMMAND)
            if count_down(record_of(table, slot), slot, ABORTED_BY_HOST, 1) >= 0:
                return slot
    while word(queue, Q_WAIT_HEAD) != word(queue, Q_WAIT_TAIL):
        head = word(queue, Q_WAIT_HEAD)
        slot = load_relaxed(word(queue, Q_WAIT) + 8 * (head & (SLOTS - 1)), SYSTEM)
        set_word(queue, Q_WAIT_HEAD, head + 1)
        record = record_of(table, slot)
        rest = parts_in(state, word(record, R_NBYTES) - word(record, R_EXTRA))
        if count_down(record, slot, ABORTED_BY_HOST, rest) >= 0:
            return slot
    return -1
