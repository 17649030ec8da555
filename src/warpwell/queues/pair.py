"""QueuePairs: the host object that owns the rings of a cache or store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme import completion_word1
from ..nvme.status import ABORTED_BY_HOST, status_of
from ..targets import Allocator, Block
from . import layout as at
from .loss import describe_impossible

LINE = 128
"""Bytes between doorbells, so that no two share a cache line."""


class QueuePairs:
    """Submission and completion rings, command ids and staging of a number of queue pairs.

    Everything is allocated once, here. Records, ids, marks and turns are in device memory; rings, doorbells
    and staging in shared host memory, where a controller serves them.

    Parameters
    ----------
    memory : Allocator
        Allocator of the device whose threads submit.
    count : int
        Queue pairs.
    depth : int
        Entries of each ring, a power of two of at least 4. Half as many commands may be in flight.
    staging_bytes : int
        Bytes of the staging buffer of each command id, a multiple of 128, for drives of 512.
    results : bool
        Keep dw0 of completions in the id records (a key-value completion has the value's size there).

    lists : bool
        The controller needs the PRPs of the specification: each id has a list of the pages of its staging, and rings
        begin at pages.
    timeout : float
        Seconds that a thread waits for its turn at the ring. It waits only if the controller's submission queue head
        does not move.

    Attributes
    ----------
    records : int
        Address of the first queue record; they lie ``8 * Q_WORDS`` bytes apart.
    ports : numpy.ndarray
        ``(count, P_WORDS)`` int64, the port records, in shared memory.
    ids : int
        Command ids of each pair.
    loss_address : int
        Address of the loss record, in shared memory: a thread that finds the controller lost stores ``LOST`` to word
        ``LOSS_KIND`` (or calls `lose`), and all waits end within milliseconds; see `warpwell.queues.loss`.
    progress : int
        Address of the count of completions drained from all pairs.
    """

    def __init__(
        self,
        memory: Allocator,
        *,
        count: int,
        depth: int,
        staging_bytes: int,
        results: bool = False,
        lists: bool = False,
        timeout: float = 60.0,
    ) -> None:
        if count < 1 or depth < 4 or depth & (depth - 1) or depth > 65536:
            raise errors.ArgumentError(
                f"{count} queue pairs of depth {depth}: need at least 1 pair and a power of two from 4 to 65536"
            )
        list_bytes = _list_bytes(depth, staging_bytes) if lists else 0
        self.count = count
        self.depth = depth
        self.ids = depth // 2
        self.staging_bytes = staging_bytes
        per_pair = 2 * depth + self.ids * at.ID_WORDS + self.ids
        self._device: Block = memory.allocate(8 * count * (at.Q_WORDS + per_pair) + LINE)
        ring_bytes = (64 + 16) * depth + 2 * LINE
        ring_bytes = -(-ring_bytes // 4096) * 4096
        staging_all = self.ids * staging_bytes
        staging_all = -(-staging_all // 4096) * 4096
        port_bytes = -(-(8 * at.P_WORDS * count + 8 * at.LOSS_WORDS) // 4096) * 4096
        lists_at = port_bytes + count * (ring_bytes + staging_all)
        lists_all = -(-self.ids * list_bytes // 4096) * 4096
        self._shared: Block = memory.allocate_shared(lists_at + count * lists_all)
        self.loss_address = self._shared.address + 8 * at.P_WORDS * count
        self._loss = self._shared.words[at.P_WORDS * count :][: at.LOSS_WORDS]
        self._why = ""
        self._user_blocks: list[Block] = []
        self._areas: list[int] = []
        """Offset of each pair's turns in device memory; marks and ids follow."""
        self.records = self._device.address
        self.progress = self.records + 8 * count * (at.Q_WORDS + per_pair)
        self.ports = self._shared.words[: count * at.P_WORDS].reshape(count, at.P_WORDS)
        records = np.zeros((count, at.Q_WORDS), np.int64)
        shift = depth.bit_length() - 1
        for k in range(count):
            rings = self._shared.address + port_bytes + k * (ring_bytes + staging_all)
            completions = rings + 64 * depth
            doorbells = completions + 16 * depth
            area = self.records + 8 * (count * at.Q_WORDS + k * per_pair)
            self._areas.append(area - self.records)
            record = records[k]
            record[at.Q_SQ], record[at.Q_CQ] = rings, completions
            record[at.Q_DEPTH_SHIFT] = shift
            record[at.Q_SQ_DOORBELL], record[at.Q_CQ_DOORBELL] = doorbells, doorbells + LINE
            record[at.Q_TURNS], record[at.Q_MARKS] = area, area + 8 * depth
            record[at.Q_IDS] = area + 16 * depth
            record[at.Q_READY] = record[at.Q_IDS] + 8 * at.ID_WORDS * self.ids
            record[at.Q_N_IDS] = self.ids
            record[at.Q_PROGRESS] = self.progress
            record[at.Q_RESULTS] = results
            record[at.Q_STAGING], record[at.Q_STAGING_BYTES] = rings + ring_bytes, staging_bytes
            record[at.Q_SQID], record[at.Q_LOSS], record[at.Q_TURN_NS] = k + 1, self.loss_address, int(timeout * 1e9)
            record[at.Q_GENERATION] = 0 if results else self.ids
            if lists:
                self._make_lists(record, lists_at + k * lists_all, list_bytes)
            port = self.ports[k]
            port[at.P_SQ], port[at.P_CQ] = rings, completions
            port[at.P_DEPTH_SHIFT] = shift
            port[at.P_SQ_DOORBELL], port[at.P_CQ_DOORBELL] = doorbells, doorbells + LINE
            port[at.P_SQID] = k + 1
        self._device.write(0, records)

    def _make_lists(self, record: NDArray[np.int64], offset: int, nbytes: int) -> None:
        """Fill in the PRP list of each id: the pages of its staging after the first."""
        record[at.Q_LISTS], record[at.Q_LIST_SHIFT] = self._shared.address + offset, max(0, nbytes.bit_length() - 1)
        if not nbytes:
            record[at.Q_LISTS] = record[at.Q_STAGING]  # never read: a command has at most two pages
            return
        pages = self.staging_bytes // at.MEMORY_PAGE - 1
        lists = self._shared.words[offset // 8 :][: self.ids * nbytes // 8].reshape(self.ids, nbytes // 8)
        first = int(record[at.Q_STAGING]) + self.staging_bytes * np.arange(self.ids)[:, None]
        lists[:, :pages] = first + at.MEMORY_PAGE * (1 + np.arange(pages))

    def port(self, index: int) -> int:
        """Return the address of a port record."""
        return self._shared.address + 8 * at.P_WORDS * index

    def record(self, index: int) -> int:
        """Return the address of a queue record."""
        return self.records + 8 * at.Q_WORDS * index

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that records, ids and marks take."""
        return self._device.nbytes

    @property
    def shared_nbytes(self) -> int:
        """Bytes of shared host memory that rings and staging take."""
        return self._shared.nbytes

    def free_shared(self) -> None:
        """Free rings and staging; records and ids live as long as this object."""
        self._shared.free()

    def set_queue_id(self, index: int, qid: int) -> None:
        """Set the identifier of a pair at its controller: by default they are numbered from 1 (nothing in flight)."""
        self.ports[index, at.P_SQID] = qid
        self._device.write(8 * (index * at.Q_WORDS + at.Q_SQID), np.array([qid], np.int64))

    def set_user(self, index: int, block: Block, offset: int, results: int) -> None:
        """Set a pair's `Q_USER` and `P_USER` to a byte of shared memory, and `Q_RESULTS` (no launch in flight).

        The memory lives as long as the pairs.
        """
        self._user_blocks.append(block)
        self.ports[index, at.P_USER] = block.address + offset
        for word, value in ((at.Q_USER, block.address + offset), (at.Q_RESULTS, results)):
            self._device.write(8 * (index * at.Q_WORDS + word), np.array([value], np.int64))

    def opcodes_in_use(self) -> set[int]:
        """Return the opcodes of commands whose ids are taken (host; a snapshot)."""
        found: set[int] = set()
        for k in range(self.count):
            ids = self._id_records(k)
            found |= set(ids[ids[:, at.ID_STATE] & at.KIND != at.FREE, at.ID_OPCODE].tolist())
        return found

    def doorbells(self) -> NDArray[np.int64]:
        """Return the addresses of the doorbell words, ``(count, 2)``: submission tail and completion head of each pair.

        Each is a 64-bit word whose lower half is the value of the 32-bit register. A forwarder of tails executes a full
        fence between its read of the word and its store to the register: the entries before that tail are then written.
        """
        return self.ports[:, [at.P_SQ_DOORBELL, at.P_CQ_DOORBELL]].copy()

    def rings(self) -> NDArray[np.int64]:
        """Return the addresses of the rings, ``(count, 2)``: submission and completion ring of each pair."""
        return self.ports[:, [at.P_SQ, at.P_CQ]].copy()

    def outstanding(self) -> int:
        """Return how many commands Warpwell's service threads have fetched and not completed (host; a snapshot).

        Other controllers do not report this number: use `in_use`.
        """
        # read the tails first, so that a concurrent fetch cannot make the difference negative
        posted = self.ports[:, at.P_CQ_TAIL].copy()
        return int((self.ports[:, at.P_SQ_HEAD] - posted).sum())

    def announced(self) -> int:
        """Return how many commands with a rung doorbell wait for Warpwell's service threads (a snapshot)."""
        shared, base = self._shared.words, self._shared.address
        tails = shared[(self.ports[:, at.P_SQ_DOORBELL] - base) // 8]
        return int(((tails - self.ports[:, at.P_SQ_HEAD]) & (self.depth - 1)).sum())

    def in_use(self, pages: tuple[int, int] | None = None) -> int:
        """Return how many command ids are taken, or taken for pages [first, end) (host; a snapshot)."""
        count = sum(
            int(self._device.read(8 * (k * at.Q_WORDS + at.Q_IN_USE), 8).view(np.int64)[0]) for k in range(self.count)
        )
        if pages is None or not count:
            return count
        count = 0
        for k in range(self.count):
            ids = self._id_records(k)
            first = ids[:, at.ID_PAGE]
            end = first + np.maximum(ids[:, at.ID_COUNT], 1)
            count += int(((ids[:, at.ID_STATE] & at.KIND != at.FREE) & (first < pages[1]) & (end > pages[0])).sum())
        return count

    def asynchronous_ids(self) -> NDArray[np.int64]:
        """Return copies of the records of ids in flight that no thread waits for, shape ``(n, ID_WORDS)``."""
        ids = np.concatenate([self._id_records(k) for k in range(self.count)])
        found: NDArray[np.int64] = ids[ids[:, at.ID_STATE] & at.KIND == at.ASYNC]
        return found

    def _id_records(self, index: int) -> NDArray[np.int64]:
        begin = self._areas[index] + 16 * self.depth
        return self._device.read(begin, 8 * at.ID_WORDS * self.ids).view(np.int64).reshape(-1, at.ID_WORDS)

    # -- loss: see `warpwell.queues.loss` -----------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """Latch that the controller is lost; `why` continues a message after the controller's name (any thread)."""
        self._why = self._why or why
        if self._loss[at.LOSS_KIND] == at.ALIVE:
            self._loss[at.LOSS_KIND] = at.LOST

    def loss(self) -> str | None:
        """Return why the controller is lost, for messages, or None (host)."""
        if self._loss[at.LOSS_KIND] == at.ALIVE:
            return None
        kind, queue, entry = (int(word) for word in self._loss[: at.LOSS_ENTRY + 1])
        if self._why:
            return self._why
        if kind == at.BAD_COMPLETION:
            return describe_impossible(entry, queue, self.depth)
        if kind == at.NO_TURN:
            return f"it completes commands of queue {queue}, but its submission queue head does not move"
        return "it does not respond"

    def abort(self) -> int:
        """Complete each command in flight as "aborted by host"; return how many (host).

        The caller has ensured that the controller no longer writes and that no launch is in flight. This call empties
        the rings. Kernels then drain the rings and settle the ids (`Cache.recover`), before the caller calls `rewind`.
        """
        self._clear()
        status, aborted = status_of(ABORTED_BY_HOST, 0), 0
        for k in range(self.count):
            states = self._id_records(k)[:, at.ID_STATE]
            entries = self._shared.words[(int(self.ports[k, at.P_CQ]) - self._shared.address) // 8 :]
            kinds = states & at.KIND
            in_flight = np.flatnonzero((kinds >= at.TAKEN) & (kinds <= at.ORPHAN))
            for position, cid in enumerate(in_flight | states[in_flight] >> 8):
                entries[2 * position + 1] = completion_word1(0, int(self.ports[k, at.P_SQID]), int(cid), 1, status)
            aborted += len(in_flight)
        return aborted

    def rewind(self) -> None:
        """Reset the queues to their initial state, for the next controller (host; no launch is in flight).

        Raises
        ------
        SharingError
            Ids are in use: settle the commands that `abort` has completed. Nothing was changed.
        """
        count = self.in_use()
        if count:
            raise errors.SharingError(f"{count} command ids are in use: abort and settle them, then rewind the queues")
        self._clear()
        records = self._device.read(0, 8 * at.Q_WORDS * self.count).view(np.int64).reshape(-1, at.Q_WORDS)
        records[:, [at.Q_READY_TAIL, at.Q_READY_HEAD]] = 0
        self._device.write(0, records)
        self._device.write(self.progress + 8 - self.records, np.zeros(1, np.int64))
        self._loss[:] = 0
        self._why = ""

    def _clear(self) -> None:
        """Empty rings and doorbells, and reset their positions; ids and the ready ring do not change."""
        records = self._device.read(0, 8 * at.Q_WORDS * self.count).view(np.int64).reshape(-1, at.Q_WORDS)
        records[:, [at.Q_TICKET, at.Q_TAIL, at.Q_CQ_LOCK, at.Q_CQ_HEAD, at.Q_SQ_HEAD]] = 0
        self._device.write(0, records)
        self.ports[:, [at.P_SQ_HEAD, at.P_CQ_TAIL, at.P_POST_LOCK, at.P_FETCH_LOCK]] = 0
        for k in range(self.count):
            self._device.write(self._areas[k], np.zeros(2 * self.depth, np.int64))  # turns and marks
            rings = (int(self.ports[k, at.P_SQ]) - self._shared.address) // 8
            self._shared.words[rings : rings + (80 * self.depth + 2 * LINE) // 8] = 0


def _list_bytes(depth: int, staging_bytes: int) -> int:
    """Return the bytes of an id's PRP list, a power of two, so that no list crosses a page; 0 if none is needed."""
    if depth < 64:
        raise errors.ArgumentError(f"queue pairs of depth {depth}: choose at least 64 with PRP lists", name="depth")
    entries = -(-staging_bytes // at.MEMORY_PAGE) - 1
    if staging_bytes > at.LIST_MAX * at.MEMORY_PAGE:
        raise errors.ArgumentError(
            f"commands of {staging_bytes} bytes: choose at most {at.LIST_MAX * at.MEMORY_PAGE} bytes for a drive"
        )
    return 0 if entries < 2 else 8 << (entries - 1).bit_length()
