"""`TransferTable`: the transfers that a native loop serves, as rows of words."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StallError
from .bulk import Transfer

FREE, READY, OVER, ABANDONED = range(4)
"""States of a row, its first word: unused, the loop's, to be cleared up by Python, and never to be used again."""

ROWS = 4096
_PATIENCE = 60.0


class TransferTable:
    """Rows of words for transfers under way. Python fills a row and makes it READY; the loop ends it with OVER.

    Parameters
    ----------
    nbytes : int
        Of a row.
    count : ndarray
        One word: how many rows the loop has to look at.
    """

    def __init__(self, nbytes: int, count: NDArray[np.int64]) -> None:
        self._count = count
        self.rows = np.zeros((ROWS, nbytes // 8), np.int64)
        self._held: dict[int, tuple[Transfer, Any]] = {}  # by row, with their memory
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Where the rows lie."""
        return int(self.rows.ctypes.data)

    def transfers(self) -> list[tuple[int, Transfer]]:
        """Return the rows that are in use, with their transfers."""
        with self._lock:
            return [(row, transfer) for row, (transfer, _) in self._held.items()]

    def add(self, transfer: Transfer, words: dict[int, int]) -> None:
        """Take a transfer over, with words at byte offsets of its row.

        Raises
        ------
        StallError
            No row became free within a minute.
        """
        end = time.monotonic() + _PATIENCE
        while (row := self._take_row(transfer)) is None:
            if time.monotonic() > end:
                raise StallError(f"{ROWS} transfers are under way, and none ended for {_PATIENCE:g} s")
            time.sleep(1e-3)
        self.rows[row] = 0
        for place, value in words.items():
            self.rows[row, place // 8] = value
        self.rows[row, 0] = READY

    def _take_row(self, transfer: Transfer) -> int | None:
        self.clear_up()
        with self._lock:
            row = next((k for k in range(ROWS) if k not in self._held), None)
            if row is not None:
                self._held[row] = (transfer, transfer.region)
                self._count[0] = max(self._held) + 1
            return row

    def clear_up(self) -> None:
        """Let go of transfers that are over, and of their memory."""
        gone = []
        with self._lock:
            for row, (transfer, _) in list(self._held.items()):
                if self.rows[row, 0] == OVER:
                    transfer.region = None
                    self.rows[row, 0] = FREE
                    gone.append(self._held.pop(row))
        gone.clear()  # out of the lock: whatever has to do with this memory may run now
