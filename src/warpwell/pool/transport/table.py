"""`TransferTable`: the transfers that a native loop serves, as rows of 64-bit fields."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StallError
from .bulk import Transfer

FREE, READY, OVER, ABANDONED = range(4)
"""States of a row, in its first field: unused; owned by the loop; finished, for Python to free; never used again,
because MPI may still access the memory of its transfer."""

ROWS = 4096
_ROW_TIMEOUT_SECONDS = 60.0


class TransferTable:
    """Rows of 64-bit fields for transfers in flight. Python fills a row and sets READY; the loop sets OVER.

    Parameters
    ----------
    row_bytes : int
        Size of a row.
    count : ndarray
        One int64: the number of rows that the loop polls.
    """

    def __init__(self, row_bytes: int, count: NDArray[np.int64]) -> None:
        self._count = count
        self.rows = np.zeros((ROWS, row_bytes // 8), np.int64)
        self._held: dict[int, tuple[Transfer, Any]] = {}  # by row, with the memory of the transfer
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Address of the first row."""
        return int(self.rows.ctypes.data)

    def transfers(self) -> list[tuple[int, Transfer]]:
        """Return the rows in use, each with its transfer."""
        with self._lock:
            return [(row, transfer) for row, (transfer, _) in self._held.items()]

    def add(self, transfer: Transfer, fields: dict[int, int]) -> None:
        """Pass a transfer to the loop, described by values at byte offsets in its row.

        Raises
        ------
        StallError
            No row became free within 60 s.
        """
        end = time.monotonic() + _ROW_TIMEOUT_SECONDS
        while (row := self._allocate_row(transfer)) is None:
            if time.monotonic() > end:
                raise StallError(f"no transfer has completed for {_ROW_TIMEOUT_SECONDS:g} s ({ROWS} in flight)")
            time.sleep(1e-3)
        self.rows[row] = 0
        for offset, value in fields.items():
            self.rows[row, offset // 8] = value
        self.rows[row, 0] = READY

    def _allocate_row(self, transfer: Transfer) -> int | None:
        self.release_finished()
        with self._lock:
            row = next((k for k in range(ROWS) if k not in self._held), None)
            if row is not None:
                self._held[row] = (transfer, transfer.region)
                self._count[0] = max(self._held) + 1
            return row

    def release_finished(self) -> None:
        """Release finished transfers and their memory."""
        released = []
        with self._lock:
            for row, (transfer, _) in list(self._held.items()):
                if self.rows[row, 0] == OVER:
                    transfer.region = None
                    self.rows[row, 0] = FREE
                    released.append(self._held.pop(row))
        released.clear()  # outside the lock, because finalizers of the memory run here
