"""QueuePairs: the host object that owns the rings of a cache or store."""

from __future__ import annotations

import numpy as np

from .. import errors
from ..targets import Allocator, Block
from . import layout as at

LINE = 128
"""Bytes between doorbells, so that no two share a line."""


class QueuePairs:
    """Submission and completion rings, command ids and staging of a number of queue pairs.

    Everything is allocated once, here. Records, ids, marks and turns lie in device memory; rings, doorbells
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
        Bytes of the staging buffer of each command id, a multiple of 512.
    results : bool
        Keep dw0 of completions in the id records (a key-value completion has the value's size there).

    returns : int
        Places of a return value queue for each pair, a power of two, or 0 (see `warpwell.storage.returns`).
    place_bytes : int
        Bytes of each place, a multiple of 512.

    Attributes
    ----------
    records : int
        Address of the first queue record; they lie ``8 * Q_WORDS`` bytes apart.
    ports : numpy.ndarray
        ``(count, P_WORDS)`` int64, the port records, in shared memory.
    ids : int
        Command ids of each pair.
    progress : int
        Address of the count of completions drained from all pairs.
    """

    def __init__(
        self, memory: Allocator, *, count: int, depth: int, staging_bytes: int, results: bool = False,
        returns: int = 0, place_bytes: int = 0,
    ) -> None:  # fmt: skip
        if count < 1 or depth < 4 or depth & (depth - 1) or depth > 65536:
            raise errors.ArgumentError(
                f"{count} queue pairs of depth {depth}: need at least 1 pair and a power of two from 4 to 65536"
            )
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
        port_bytes = -(-8 * at.P_WORDS * count // 4096) * 4096
        wrong_place = place_bytes < 512 or place_bytes % 512 or not results
        if returns & (returns - 1) or returns > 32768 or (returns and wrong_place):
            raise errors.ArgumentError(
                f"{returns} return places of {place_bytes} bytes: use a power of two up to 32768 places, of a "
                "multiple of 512 bytes, on pairs with results"
            )
        self.returns = returns
        returned = 8 * (at.R_WORDS + returns + self.ids)
        returned = -(-returned // 4096) * 4096 + returns * place_bytes if returns else 0
        returns_at = port_bytes + count * (ring_bytes + staging_all)
        self._shared: Block = memory.allocate_shared(returns_at + count * returned)
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
            port = self.ports[k]
            port[at.P_SQ], port[at.P_CQ] = rings, completions
            port[at.P_DEPTH_SHIFT] = shift
            port[at.P_SQ_DOORBELL], port[at.P_CQ_DOORBELL] = doorbells, doorbells + LINE
            port[at.P_SQID] = k + 1
            if returns:
                here = returns_at + k * returned
                lent = self._shared.words[here // 8 :]
                address = self._shared.address + here
                lent[at.R_COUNT], lent[at.R_PLACE_BYTES] = returns, place_bytes
                lent[at.R_FLAGS] = address + 8 * at.R_WORDS
                lent[at.R_OF] = address + 8 * (at.R_WORDS + returns)
                lent[at.R_PLACES] = address + returned - returns * place_bytes
                record[at.Q_RETURNS] = port[at.P_RETURNS] = address
        self._device.write(0, records)

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

    def outstanding(self) -> int:
        """Return how many commands the controller has fetched and not completed (host; a snapshot)."""
        posted = self.ports[:, at.P_CQ_TAIL].copy()  # first: what is fetched meanwhile makes no count negative
        return int((self.ports[:, at.P_SQ_HEAD] - posted).sum())

    def announced(self) -> int:
        """Return how many commands wait in the rings, their doorbell rung (host; a snapshot)."""
        words, base = self._shared.words, self._shared.address
        tails = words[(self.ports[:, at.P_SQ_DOORBELL] - base) // 8]
        return int(((tails - self.ports[:, at.P_SQ_HEAD]) & (self.depth - 1)).sum())

    def in_use(self, pages: tuple[int, int] | None = None) -> int:
        """Return how many command ids are taken, or taken for pages [first, end) (host; a snapshot)."""
        taken = sum(
            int(self._device.read(8 * (k * at.Q_WORDS + at.Q_IN_USE), 8).view(np.int64)[0])
            for k in range(self.count)
        )
        if pages is None or not taken:
            return taken
        each = 2 * self.depth + self.ids * at.ID_WORDS + self.ids
        taken = 0
        for k in range(self.count):
            begin = 8 * (self.count * at.Q_WORDS + k * each + 2 * self.depth)
            ids = self._device.read(begin, 8 * at.ID_WORDS * self.ids).view(np.int64).reshape(-1, at.ID_WORDS)
            first = ids[:, at.ID_PAGE]
            end = first + np.maximum(ids[:, at.ID_COUNT], 1)
            taken += int(((ids[:, at.ID_STATE] != at.FREE) & (first < pages[1]) & (end > pages[0])).sum())
        return taken
