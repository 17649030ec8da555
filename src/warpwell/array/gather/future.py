"""`gather`: rows of an array by their numbers, in the background; `Gather` is what becomes of them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._check import checked_timeout
from ...targets import LaunchFlag
from ...targets.arrays import empty
from ...targets.launch_stream import LaunchStream, handle_of, stream_of
from ..array import Array
from ..device_array import DeviceArray
from ..items import on_host
from .cached import CachedRows
from .frames import FrameRows
from .in_stream import InStream, Numbers, RowsInStream
from .jobs import Crew, Job, crew_of
from .memory import DONE, RowCopy, read_gap
from .tensors import Tensor, numbers_on_gpu, on_a_gpu, row_numbers, tensor_of

PIECE_BYTES = 1 << 20
"""Bytes below which a second thread does not pay."""
PIECE_ROWS = 1 << 16
"""Rows from which on it does, for it takes as long to find a row as to copy some bytes of it."""
HERE_BYTES = 4 << 20
"""Most bytes that `gather` copies before it returns, with the help of other threads, if all of them are in memory: it
takes about as long as others take to begin and to end."""
HERE_ROWS = 1 << 17
"""Most rows of them."""
SHARE_BYTES, SHARE_ROWS = 1 << 18, 1 << 13
"""Bytes, or rows, of a piece of these: about a tenth of a millisecond, as a thread takes to begin."""
HELPED = 3
"""Pieces from which on another thread is asked to help."""
MOST_BYTES = 64 << 20
"""Most bytes of a piece: for each it is decided anew whether pages have to be read."""


class Gather:
    """Rows that are being gathered; see `gather`.

    It goes on in the background, also if nobody keeps this object, and keeps its array open: `Array.close` waits for
    it, up to twice the array's time-out.
    """

    def __init__(self, array: Array, rows: NDArray[Any] | Numbers, out: Any) -> None:
        self._array, self._numbers, self._out = array, rows, out
        self._job: Job | InStream
        self._stop: Callable[[], None] = lambda: None
        self._settle: Callable[[], None] = lambda: None
        self.asked: Callable[[], int] = lambda: 0
        """Returns the bytes that storage was asked for ahead, when the gather is done."""
        self._over = threading.Event()

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        return f"<gather of {self._numbers.size} rows of array {self._array.name!r}, {state}>"

    def done(self) -> bool:
        """Return whether `result` would return, or raise, at once."""
        return self._job.done

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the rows and return them (may be called again).

        Ctrl-C is raised here and ends the wait, not the gather: call it again, or `cancel`.

        Parameters
        ----------
        timeout : float, optional
            Seconds.

        Returns
        -------
        ndarray, `DeviceArray`, or `out`
            Shape ``(*rows.shape, *array.shape[1:])``; a `DeviceArray` of arrays on "cuda".

        Raises
        ------
        IndexRangeError
            A row number is negative or too large; the message says which and where. `out` has some rows.
        MediumError, StallError
            Reading failed; `out` has some rows.
        TimeoutError
            It took longer than `timeout` seconds, and goes on.
        ClosedError
            `cancel` came before the end; `out` has some rows.
        ForkError
            This process was forked from the one that began the gather.
        """
        timeout = checked_timeout(timeout)
        if not self._job.wait(timeout):
            raise TimeoutError(f"the gather is not done after {timeout:g} s: wait longer, or cancel() it")
        self._settle()
        if self._job.error is not None:
            raise self._job.error
        if self._job.cancelled:
            raise errors.ClosedError(f"this gather of array {self._array.name!r} was cancelled: begin another")
        return self._out

    def cancel(self) -> bool:
        """End the gather soon; return whether that came before its end. Wait by `result` before `out` is used again."""
        came = self._job.cancel()
        if came:
            self._stop()
        return came


def gather(array: Array, rows: Any, out: Any = None, stream: Any = None) -> Gather:
    """Begin to gather rows of an array; return a future.

    Neighbours, gaps and duplicates are seen: what is needed is read once, by as few commands as pay, with many of them
    in flight. Pages that kernels have changed and not flushed are taken from the cache.

    Parameters
    ----------
    array : Array
        A row is ``array[i]``: of any shape and any number of bytes.
    rows : array-like of int32 or int64
        Row numbers, of one or more dimensions, in any order, 0 or more; duplicates are allowed. They are copied, unless
        they are in GPU memory (of arrays on "cuda"): leave those alone until the gather is done.
    out : array, optional
        Where to store the rows: C order, writable, shape ``(*rows.shape, *array.shape[1:])``, the array's dtype; a
        NumPy array, or an array in host memory of a library that has DLPack, such as PyTorch (bfloat16 too). Of arrays
        on "cuda": an array in the memory of the GPU, with DLPack or ``__cuda_array_interface__``. Leave it
        alone until the gather is done. Default: a new NumPy array; bfloat16 as `Array` reads it; a `DeviceArray`.
    stream : optional
        For arrays on "cuda": a stream of PyTorch, CuPy or numba-cuda, whose work so far is done before rows are read or
        stored; default: the default stream. Of arrays that are all in memory (tiers "device" and "host") the whole
        gather is in that stream, so that later work there may use `out` at once. Else `out` is used after `result`.

    Returns
    -------
    Gather

    Raises
    ------
    ArgumentError, DTypeError, ClosedError
        Nothing was begun. A row number out of range raises in `Gather.result`.

    Examples
    --------
    >>> import numpy as np, warpwell as ww, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "x.npy")
    >>> np.save(path, np.arange(40).reshape(10, 4))
    >>> with ww.open(path, device="cpu") as x:
    ...     ww.gather(x, [7, 0, 7]).result().tolist()
    [[28, 29, 30, 31], [0, 1, 2, 3], [28, 29, 30, 31]]
    """
    check(array, rows, out, stream)
    gpu = by_stream(array)
    handle = handle_of(stream) if gpu else 0
    numbers: Any = numbers_of(rows, handle) if gpu else row_numbers(rows, copy=False)
    shape = (*numbers.shape, *array.shape[1:])
    if isinstance(out, Array):  # what rows of it share by DLPack is a copy
        raise errors.ArgumentError(
            f"out is array {out.name!r} of Warpwell: gather into a NumPy array, and assign that to rows of it",
            name="out",
        )
    if out is None:
        result, address = new_result(array, shape)
        keep: Any = result
    else:
        keep = tensor_of(out, "out", handle)
        keep.require(shape, array.dtype, array.name)
        result, address = out, keep.address
        _require_apart(array, address, math.prod(shape) * array.dtype.itemsize)
        if not gpu:
            numbers = _apart_from(numbers, address, math.prod(shape) * array.dtype.itemsize)
    if not gpu:
        return begin(array, numbers, result, address, keep, borrowed=True)
    caller = stream_of(array.device, handle)
    for tensor in (keep, numbers.tensor):
        if isinstance(tensor, Tensor):
            if tensor.ordinal != 0:
                raise errors.ArgumentError(
                    f"an argument is in the memory of GPU {tensor.ordinal}, and array "
                    f"{array.name!r} on GPU 0: copy it there"
                )
            if tensor.stream is not None:
                caller.after(stream_of(array.device, tensor.stream).point())
    return begin(array, numbers, result, address, (keep, numbers, stream), caller)


def by_stream(array: Array) -> bool:
    """Return whether rows of an array are gathered to a GPU's memory, in the order of a stream."""
    return array.device == "cuda"


def new_result(array: Array, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Return a new array for rows where the array's device has them, and its address."""
    if array.device == "cuda":
        memory = empty("cuda", max(math.prod(shape) * array.dtype.itemsize, 1), np.uint8)
        found = DeviceArray(memory, shape, array.dtype)
        return found, int(found.__cuda_array_interface__["data"][0])
    result = np.empty(shape, on_host(array.dtype))
    return result, int(result.ctypes.data)


def numbers_of(rows: Any, handle: int) -> Numbers:
    """Return row numbers for a gather in a stream, wherever they are."""
    if on_a_gpu(rows):
        tensor = numbers_on_gpu(rows, handle)
        width = tensor.items.itemsize if isinstance(tensor.items, np.dtype) else tensor.items[1] // 8
        return Numbers(tensor.shape, None, tensor, width)
    host = row_numbers(rows)
    return Numbers(host.shape, host.reshape(-1), None, host.itemsize)


def check(array: Any, rows: Any, out: Any, stream: Any) -> None:
    """Raise unless rows of an array can be gathered, with these arguments of `gather`."""
    if not isinstance(array, Array):
        raise errors.ArgumentError(
            f"gather reads an array of this process, from ww.open(path, device=...), and not {type(array).__name__}: "
            "write a[rows]",
            name="array",
        )
    if not array.shape:
        raise errors.ArgumentError(f"array {array.name!r} has no dimensions, and so no rows: read a[()]", name="array")
    gpu = by_stream(array)
    if stream is not None and not gpu:
        raise errors.ArgumentError(
            f'stream orders work of arrays on "cuda", and {array.name!r} is on "{array.device}": leave it out',
            name="stream",
        )
    for name, given in (("rows", rows), ("out", out)):
        if given is not None and not gpu and on_a_gpu(given):
            raise errors.ArgumentError(
                f'{name} is in GPU memory, and array {array.name!r} on "{array.device}": give one in host memory',
                name=name,
            )
    if gpu and out is not None and not isinstance(out, Array) and not on_a_gpu(out):
        raise errors.ArgumentError(
            f'out is in host memory, and array {array.name!r} on "cuda": give an array in the memory of the GPU, or '
            "copy what result() returns",
            name="out",
        )
    inner = array.dtype.itemsize
    for extent, stride in zip(reversed(array.shape[1:]), reversed(array._strides[1:]), strict=True):
        if extent > 1 and stride != inner and 0 not in array.shape:
            raise errors.ArgumentError(
                f"items of a row of {array.name!r} do not follow one another: gather the array whose field it is",
                name="array",
            )
        inner *= extent


def _apart_from(numbers: NDArray[Any], address: int, nbytes: int) -> NDArray[Any]:
    """Return row numbers, a copy of them if they lie where rows will be stored."""
    first = int(numbers.ctypes.data)
    return numbers.copy() if first < address + nbytes and address < first + numbers.nbytes else numbers


def _require_apart(array: Array, address: int, nbytes: int) -> None:
    """Raise if memory overlaps the array's own."""
    part = array._part
    if part.cached or not nbytes:
        return
    first = part.data + array._origin
    if address < first + max(1, array.shape[0]) * max(1, array._strides[0]) and first < address + nbytes:
        raise errors.ArgumentError(f"out overlaps array {array.name!r}: give memory of its own", name="out")


def begin(
    array: Array,
    numbers: Any,
    result: Any,
    address: int,
    keep: Any,
    stream: LaunchStream | None = None,
    *,
    borrowed: bool = False,
) -> Gather:
    """Begin to copy rows to memory that `keep` keeps, row ``numbers.flat[k]`` to row k there.

    With a stream after its work so far. Numbers that are borrowed are copied, unless all is done when this returns.
    """
    array._require_readable()
    if stream is not None:
        return _begin_in_stream(array, numbers, result, address, keep, stream)
    future = Gather(array, numbers, result)
    flat = numbers.reshape(-1)
    nbytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    part = array._part
    way = _through_cache if part.cached else _from_memory
    pieces, run, at_once = way(future, flat, address, nbytes, HERE_BYTES if borrowed else PIECE_BYTES)
    if borrowed and not at_once:
        pieces, run, at_once = way(future, flat.copy(), address, nbytes, 0)

    finished, is_over = future._over, future._over.is_set
    # a forked child reads a mapping as it is, and takes no lock, which a thread of the parent may have held
    counted = part.mapping is None or not part.forked

    def over(kept: Any = keep) -> None:
        finished.set()  # not by way of the future, which has the job: the result lives no longer than its users
        if counted:
            part.continued_over(is_over)

    if counted:
        with part.launch(False):
            pass
        part.launch_continues(is_over)
    try:
        alone = at_once and (pieces < HELPED or array.device == "interp" or len(os.sched_getaffinity(0)) == 1)
        future._job = job = Job(pieces, run, over, None if alone else crew_for(array), here=at_once)
        if job.done and job.error is not None and not isinstance(job.error, Exception):  # Ctrl-C, here
            raise job.error
    except BaseException:
        over()
        raise
    return future


def _begin_in_stream(
    array: Array,
    numbers: Any,
    result: Any,
    address: int,
    keep: Any,
    stream: LaunchStream,
) -> Gather:
    """Do the same to a GPU's memory, after the work in a stream so far."""
    if isinstance(numbers, np.ndarray):
        numbers = Numbers(numbers.shape, numbers.reshape(-1), None, numbers.itemsize)
    future = Gather(array, numbers, result)
    part, cache, flag = array._part, array.cache, LaunchFlag(array.device)
    nbytes = math.prod(array.shape[1:]) * array.dtype.itemsize

    def wrong(rows: NDArray[Any]) -> errors.IndexRangeError:
        bad = np.flatnonzero((rows < 0) | (rows >= array.shape[0]))
        return _out_of_range(array, rows, int(bad[0]))

    def check_range(rows: NDArray[Any]) -> None:
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= array.shape[0]):
            raise wrong(rows)

    ended, begun = future._over, list[InStream]()

    def is_over() -> bool:
        return ended.is_set() or any(job.done for job in begun)

    def settle() -> None:
        part.continued_over(is_over)
        if part.cached:
            cache.reap()

    resident = not part.cached or cache.complete(array._nsid)
    if part.cached:
        cache.require_no_doubt(array._nsid)
    with part.launch(False):
        if part.cached and resident:
            cache.begin(flag, array._nsid, stores=False)
        elif part.cached:
            cache.tell(array._nsid)
    part.launch_continues(is_over)
    try:
        source = _in_memory(array, flag) if resident else None
        if source is not None:
            rows = RowsInStream(
                array.device,
                stream,
                source=source,
                extent=array.shape[0],
                stride=array._strides[0],
                nbytes=nbytes,
                far=array.tier == "host",
            )
            begun.append(rows.begin(numbers, address, ended.set, wrong, keep))
            future._job, future._settle = begun[0], settle
            if part.cached:
                cache.continues(flag, is_over)
            return future
        cache.end(flag)
        copier = FrameRows(array, nbytes=nbytes, stride=array._strides[0], out=address)
        future._stop, future.asked = copier.stop, lambda: copier.asked
        point = stream.point()

        def over(kept: Any = keep) -> None:
            ended.set()
            part.continued_over(is_over)

        future._job = Job(1, lambda piece: copier.copy(numbers, point, check_range), over, crew_for(array))
    except BaseException:
        ended.set()
        part.continued_over(is_over)
        if part.cached:
            cache.end(flag)
        raise
    return future


def _in_memory(array: Array, flag: LaunchFlag) -> int | None:
    """Return the address of row 0 if all rows lie in memory, for a launch that has begun; None if they may not."""
    part = array._part
    if not part.cached:
        return part.data + array._origin
    values = array.cache.constants(array._nsid, flag)
    return values["data"] + array._origin if values["complete"] else None


def crew_for(array: Array) -> Crew | None:
    """Return who gathers from an array: a thread for each core; behind a cache two, whose waves take turns.

    To a GPU one: it gives work to a stream, and has lists of rows copied by others.
    """
    if array.device == "interp":
        return None
    if by_stream(array):
        return crew_of(array._part, 1)
    return crew_of(array._part, 2 if array._part.cached else len(os.sched_getaffinity(0)))


def _from_memory(
    future: Gather, rows: NDArray[Any], address: int, nbytes: int, here_bytes: int
) -> tuple[int, Callable[[int], None], bool]:
    """Return the number of pieces of a gather from memory, the function that does one, and whether to do it here.

    It is done here if it has at most `here_bytes`, all in memory.
    """
    array, part = future._array, future._array._part
    copier = RowCopy(
        rows,
        source=part.data + array._origin,
        extent=array.shape[0],
        stride=array._strides[0],
        nbytes=nbytes,
        out=address,
        mapped=part.mapping,
    )
    gap = read_gap()
    future._stop, future.asked = copier.stop, lambda: copier.fetched[1]
    at_once = rows.size * nbytes <= here_bytes and rows.size <= HERE_ROWS
    at_once = at_once and not (nbytes and copier.absent(0, rows.size))
    if at_once:
        shares = max(rows.size * nbytes // SHARE_BYTES, rows.size // SHARE_ROWS)
    else:
        shares = max(rows.size * nbytes // PIECE_BYTES, rows.size // PIECE_ROWS)
        shares = min(len(os.sched_getaffinity(0)), shares)
    most = max(1, MOST_BYTES // max(nbytes, 1))
    each = max(1, min(most, -(-rows.size // max(1, shares))))

    def run(piece: int) -> None:
        first, end = piece * each, min((piece + 1) * each, rows.size)
        if nbytes and not at_once and copier.absent(first, end):
            wrong = copier.fetch(first, end, gap)
        else:
            wrong = copier.copy(first, end)
        if wrong != DONE:
            raise _out_of_range(array, rows, wrong)
        part.require_sound()

    return max(1, -(-rows.size // each)), run, at_once


def _through_cache(
    future: Gather, rows: NDArray[Any], address: int, nbytes: int, here_bytes: int
) -> tuple[int, Callable[[int], None], bool]:
    """Return the same of a gather through a cache, which shares the cache's own threads: one piece, never here."""
    del here_bytes
    array = future._array
    copier = CachedRows(array, nbytes=nbytes, stride=array._strides[0], out=address)
    gap = read_gap()
    future._stop, future.asked = copier.stop, lambda: copier.asked * array.cache.page_size

    def run(piece: int) -> None:
        if not rows.size:
            return
        if int(rows.min()) < 0 or int(rows.max()) >= array.shape[0]:
            wrong = np.flatnonzero((rows < 0) | (rows >= array.shape[0]))
            raise _out_of_range(array, rows, int(wrong[0]))
        if nbytes:
            copier.copy(rows, gap)

    return 1, run, False


def _out_of_range(array: Array, rows: NDArray[Any], wrong: int) -> errors.IndexRangeError:
    row, extent = int(rows[wrong]), array.shape[0]
    advice = "gather counts from 0 (a[rows] takes negative numbers)" if row < 0 else "compare the numbers with len(a)"
    return errors.IndexRangeError(
        f"row {row} at place {wrong} of the list is out of range for array {array.name!r} of {extent} rows: {advice}",
        array=array.name,
        index=row,
        size=extent,
    )
