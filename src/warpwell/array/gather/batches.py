"""`rows`: gather the rows of batches ahead of their use; `RowBatches` is the iterator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from ... import errors
from ..._check import checked_integer
from ..._future import Future
from ...targets import LaunchStream, stream_on
from ..array import Array
from .api import begin, by_stream, check, new_result
from .gpu import acquire_buffer, release_buffer
from .tensors import indices_on_gpu, on_a_gpu, row_indices


class RowBatches(Iterator[Any]):
    """An iterator over batches of rows; `rows` returns it. It is also a context manager, which calls `close`."""

    def __init__(self, array: Array, batches: Iterable[Any], ahead: int) -> None:
        self._array, self._ahead = array, ahead
        self._batches = iter(batches)
        self._pending: deque[Future] = deque()
        self._error: Exception | None = None
        self._exhausted = False
        # a stream of its own, so that batches do not wait for kernels of the program
        self._stream: LaunchStream | None = stream_on(array.device) if by_stream(array) else None

    def __iter__(self) -> RowBatches:
        return self

    def __next__(self) -> Any:
        """Return the rows of the next batch as a new array (a `DeviceArray` for arrays on "cuda").

        Raises
        ------
        IndexRangeError, MediumError, StallError
            See the future that `gather` returns. The iteration is over.
        """
        self._start_batches()
        if not self._pending:
            self.close()
            error, self._error = self._error, None
            raise error or StopIteration
        batch = self._pending.popleft()
        try:
            self._start_batches()  # before the wait, so that `ahead` batches are read during it
            return batch.result()
        except Exception:
            self.close()
            raise
        except BaseException:  # Ctrl-C ends the wait: the next call waits for this batch again
            self._pending.appendleft(batch)
            raise

    def close(self) -> None:
        """End the iteration and cancel its gathers (idempotent)."""
        self._exhausted = True
        while self._pending:
            self._pending.popleft().cancel()

    def __enter__(self) -> RowBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_batches(self) -> None:
        """Start gathers until `ahead` batches follow the next one; raise an error only after the batches before it."""
        while not self._exhausted and len(self._pending) <= self._ahead:
            try:
                self._pending.append(self._start(next(self._batches)))
            except StopIteration:
                self._exhausted = True
            except Exception as error:
                self._error, self._exhausted = error, True

    def _start(self, batch: Any) -> Future:
        array, stream = self._array, self._stream
        if stream is not None and on_a_gpu(batch):  # copied, because the owner may change it before it is used
            tensor = indices_on_gpu(batch, 0)
            buffer = acquire_buffer(array.device, 8 * tensor.size)
            stream.after_default()
            batch = buffer.to_host(stream, tensor).reshape(tensor.shape).copy()
            release_buffer(buffer)
        indices = row_indices(batch)
        result, address = new_result(array, (*indices.shape, *array.shape[1:]))
        return begin(array, indices, result, address, result, stream)


def rows(array: Array, batches: Iterable[Any], ahead: int = 2) -> RowBatches:
    """Return an iterator over batches of rows; later batches are gathered while the caller uses the current one.

    Each batch is taken from `batches` early, and its rows are gathered (`gather`) into a new array. They stay there
    until the caller drops the array, so the cache cannot evict them before they are used. `ahead` bounds the memory of
    these arrays.

    Parameters
    ----------
    array : Array
    batches : iterable of array-like of int32 or int64
        Row numbers of each batch, as for `gather`. The calling thread iterates over it, `ahead` batches early.
    ahead : int
        Number of batches that are gathered in addition to the next one; 0 or more.

    Returns
    -------
    RowBatches
        Yields NumPy arrays of shape ``(*rows.shape, *array.shape[1:])``, or `DeviceArray` for arrays on "cuda".

    Raises
    ------
    ArgumentError, ClosedError

    Examples
    --------
    >>> import numpy as np, warpwell as ww, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "x.npy")
    >>> np.save(path, np.arange(10) ** 2)
    >>> with ww.open(path, device="cpu") as x:
    ...     [batch.tolist() for batch in ww.rows(x, [[3, 1], [9, 9, 0]])]
    [[9, 1], [81, 81, 0]]
    """
    check(array, None, None, None)
    array._require_readable()
    ahead = checked_integer(ahead, "ahead", minimum=0)
    if isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
        raise errors.ArgumentError(
            f"batches is {type(batches).__name__}: pass a list or an iterator of lists of row numbers", name="batches"
        )
    return RowBatches(array, batches, ahead)
