"""`rows`: batches of rows whose numbers are announced before they are used; `RowBatches` yields them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._check import checked_integer
from ...targets.launch_stream import LaunchStream, stream_on
from ..array import Array
from .future import Gather, begin, by_stream, check, crew_for, gather, new_result, numbers_of
from .in_stream import InStream, Numbers, RowsInStream, give_back, take_room
from .jobs import Job
from .memory import RowCopy
from .tensors import on_a_gpu, row_numbers


@dataclass
class RowsReport:
    """What became of the batches so far; see `RowBatches.report`.

    Attributes
    ----------
    batches, rows : int
        That were handed out.
    bytes_wanted : int
        Bytes of these rows.
    repeated : int
        Rows that their batch had already, so that nothing was read for them.
    hot : int
        Rows that came from the packed ones, so that neither cache nor storage was asked for them.
    hot_memory : {"", "host", "device", "pinned"}
        Where these are packed: of arrays on "cuda" in device memory, or in pinned memory if they do not fit there.
    bytes_hot : int
        Bytes of the rows that came from there.
    bytes_asked : int
        Bytes that storage was asked for ahead: pages that were not in memory, or not in the cache, and holes between
        them. What was not known to be missing, and was read when it was used, is not in it.
    waited : float
        Seconds for which the caller waited for batches; if they are many, announce more of them (`ahead`).
    """

    batches: int = 0
    rows: int = 0
    bytes_wanted: int = 0
    repeated: int = 0
    hot: int = 0
    hot_memory: str = ""
    bytes_hot: int = 0
    bytes_asked: int = 0
    waited: float = 0.0


class RowBatches(Iterator[Any]):
    """An iterator over batches of rows, which are gathered ahead; see `rows`. It is a context manager, too."""

    def __init__(self, array: Array, batches: Iterable[Any], ahead: int, hot: Any) -> None:
        self._array, self._ahead = array, ahead
        self._batches = iter(batches)
        self._failed: BaseException | None = None
        self._over = False
        self._row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
        self._coming: deque[_Batch] = deque()
        self._report = RowsReport()
        self._hot_rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self._packed: _Packed | None = None
        # beside the program's own streams
        self._stream: LaunchStream | None = stream_on(array.device) if by_stream(array) else None
        if hot is not None:
            self._hot_rows = np.unique(self._numbers(hot)).astype(np.int64)
            self._packed = _packed(array, self._hot_rows, self._row_bytes, self._stream)
            self._report.hot_memory = self._packed.memory

    def __iter__(self) -> RowBatches:
        return self

    def __next__(self) -> Any:
        """Return the rows of the next batch, a new array (a `DeviceArray` of arrays on "cuda").

        Raises
        ------
        IndexRangeError, MediumError, StallError
            As `Gather.result`; the iteration is over.
        """
        self._announce()
        if not self._coming:
            self.close()
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed
            raise StopIteration
        batch = self._coming.popleft()
        self._announce()  # while this one is waited for
        since = time.perf_counter()
        try:
            result = batch.result()
        except Exception:
            self.close()
            raise
        except BaseException:  # Ctrl-C ends the wait: the next call waits for this batch again
            self._coming.appendleft(batch)
            raise
        report = self._report
        report.waited += time.perf_counter() - since
        report.batches += 1
        report.rows += batch.rows
        report.bytes_wanted += batch.rows * self._row_bytes
        report.repeated += batch.repeated
        report.hot += batch.hot
        report.bytes_hot += batch.hot * self._row_bytes
        report.bytes_asked += batch.asked()
        return result

    def report(self) -> RowsReport:
        """Return what became of the batches that were handed out."""
        return RowsReport(**vars(self._report))

    def close(self) -> None:
        """End the iteration, and cancel what is being gathered (idempotent)."""
        self._over = True
        while self._coming:
            self._coming.popleft().cancel()
        self._packed = None

    def __enter__(self) -> RowBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _announce(self) -> None:
        """Begin the batches that are due."""
        while not self._over and self._failed is None and len(self._coming) <= self._ahead:
            try:
                numbers = next(self._batches)
            except StopIteration:
                self._over = True
                return
            except BaseException as error:
                if not isinstance(error, Exception):
                    raise
                self._failed = error  # when the batches before it have been handed out
                return
            try:
                self._coming.append(self._begin(self._numbers(numbers)))
            except Exception as error:
                self._failed = error
                return

    def _numbers(self, rows: Any) -> NDArray[Any]:
        """Return row numbers in host memory."""
        if self._stream is None or not on_a_gpu(rows):
            return row_numbers(rows)
        numbers = numbers_of(rows, 0)
        self._stream.after_default()
        room = take_room(self._array.device, max(8, 8 * numbers.size))
        found = numbers.on_host(self._stream, room).reshape(numbers.shape).copy()
        give_back(room)
        return found

    def _begin(self, numbers: NDArray[Any]) -> _Batch:
        array = self._array
        result, address = new_result(array, (*numbers.shape, *array.shape[1:]))
        batch = _Batch(numbers.size)
        ordered = np.sort(numbers, axis=None)
        batch.repeated = int(np.count_nonzero(ordered[1:] == ordered[:-1]))
        packed = self._packed
        if packed is None or not len(self._hot_rows):
            batch.cold = begin(array, numbers, None, result, address, result, self._stream)
            return batch
        flat = numbers.reshape(-1).astype(np.int64)
        where = np.minimum(np.searchsorted(self._hot_rows, flat), len(self._hot_rows) - 1)
        found = self._hot_rows[where] == flat
        batch.hot = int(np.count_nonzero(found))
        rest = np.flatnonzero(~found)
        batch.cold = begin(array, flat[rest], rest, result, address, result, self._stream)
        listed, places = where[found].astype(np.int64), np.flatnonzero(found)
        kept = packed, result
        rows: Any = {
            "source": packed.address,
            "extent": len(self._hot_rows),
            "stride": self._row_bytes,
            "nbytes": self._row_bytes,
        }
        if self._stream is not None:
            there = Numbers(listed.shape, listed, None, 8)
            far = packed.memory == "pinned"
            batch.copied = RowsInStream(array.device, self._stream, **rows, far=far).begin(
                there, places, address, lambda: None, lambda _: AssertionError("they are packed"), kept
            )
            return batch
        copier = RowCopy(listed, places, **rows, out=address)

        def copy(piece: int, kept: tuple[Any, ...] = kept) -> None:
            copier.copy(0, batch.hot)

        batch.copied = Job(1, copy, lambda: None, crew_for(array))
        return batch


@dataclass
class _Packed:
    """Rows one after another in memory that the array's device reads."""

    address: int
    memory: str
    keep: Any


def _packed(array: Array, rows: NDArray[np.int64], row_bytes: int, stream: LaunchStream | None) -> _Packed:
    """Gather rows into memory of their own: that of the device, or pinned memory if they do not fit there."""
    if stream is None:
        found = gather(array, rows).result()
        return _Packed(int(found.ctypes.data), "host", found)
    nbytes = max(1, len(rows) * row_bytes)
    try:
        block, memory = array.cache.memory.allocate(nbytes), "device"
    except MemoryError:
        block, memory = array.cache.memory.allocate_shared(nbytes), "pinned"
    begin(array, rows, None, block, block.address, block, stream).result()
    return _Packed(block.address, memory, block)


class _Batch:
    """A batch that is being gathered: rows from storage, and packed ones."""

    cold: Gather
    copied: Job | InStream | None = None

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.repeated = self.hot = 0

    def result(self) -> Any:
        try:
            out = self.cold.result()
        except Exception:
            if self.copied is not None:
                self.copied.wait()  # the caller may close the array
            raise
        if self.copied is not None:
            self.copied.wait()
            if self.copied.error is not None:
                raise self.copied.error
        return out

    def asked(self) -> int:
        return self.cold.asked()

    def cancel(self) -> None:
        self.cold.cancel()
        if self.copied is not None:
            self.copied.cancel()


def rows(array: Array, batches: Iterable[Any], ahead: int = 2, hot: Any = None) -> RowBatches:
    """Return an iterator over batches of rows, which are gathered while the caller works on the one before.

    A batch is announced when it is taken from `batches`; from then on its rows are gathered (`gather`), each into
    memory of its own, so that what it needs cannot be evicted before it is used. `ahead` bounds that memory.

    Parameters
    ----------
    array : Array
    batches : iterable of array-like of int32 or int64
        Row numbers of each batch, as for `gather`. It is iterated over `ahead` batches early, in this thread.
    ahead : int
        Batches that are gathered before the one that was handed out last is done with; 0: none.
    hot : array-like of int32 or int64, optional
        Rows that many batches have, such as vertices of high degree. They are gathered once, here, and packed in
        memory: of arrays on "cuda" in device memory, or in pinned memory if they do not fit there. Batches copy them
        from there. Changes of the array are not seen in them.

    Returns
    -------
    RowBatches
        Yields NumPy arrays of shape ``(*rows.shape, *array.shape[1:])``, or `DeviceArray` of arrays on "cuda"; its
        `RowBatches.report` says what was saved.

    Raises
    ------
    ArgumentError, DTypeError, IndexRangeError, MediumError, StallError, ClosedError

    Examples
    --------
    >>> import numpy as np, warpwell as ww, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "x.npy")
    >>> np.save(path, np.arange(10) ** 2)
    >>> with ww.open(path, device="cpu") as x:
    ...     [batch.tolist() for batch in ww.rows(x, [[3, 1], [9, 9, 0]], hot=[9])]
    [[9, 1], [81, 81, 0]]
    """
    check(array, None, None, None)
    array._require_readable()
    ahead = checked_integer(ahead, "ahead", least=0)
    if isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
        raise errors.ArgumentError(
            f"batches is {type(batches).__name__}: give a list or an iterator of lists of row numbers", name="batches"
        )
    return RowBatches(array, batches, ahead, hot)
