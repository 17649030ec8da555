"""`gather`: copy rows of an array, by their numbers, in the background."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._future import Future
from ..._os import interruptible
from ...targets import LaunchFlag
from ...targets.arrays import empty
from ...targets.launch_stream import LaunchStream, handle_of, stream_of
from ..array import Array
from ..device_array import DeviceArray
from ..items import on_host
from .frames import FrameRows
from .host import DONE, RowCopy, read_gap
from .in_stream import Numbers, RowsInStream
from .tasks import ChunkedTask, WorkerGroup, worker_group
from .tensors import Tensor, numbers_on_gpu, on_a_gpu, row_numbers, tensor_of
from .waves import CachedRows

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
MIN_SHARED_CHUNKS = 3
"""Number of chunks from which on other threads help."""
MAX_CHUNK_BYTES = 64 << 20
"""Maximum bytes of a chunk; each chunk checks again whether its pages are in memory."""


class _Plan(NamedTuple):
    """How the rows of a gather to host memory are copied.

    Attributes
    ----------
    chunks : int
    run : callable
        ``run(k)`` copies the rows of chunk `k`.
    here : bool
        Whether all of it takes so little time that the caller does it before `gather` returns.
    stop : callable
        Lets `run` return soon.
    bytes_read : callable
        Returns the bytes of storage that were read ahead so far, gaps included.
    """

    chunks: int
    run: Callable[[int], None]
    here: bool
    stop: Callable[[], None]
    bytes_read: Callable[[], int]


def gather(array: Array, rows: Any, out: Any = None, stream: Any = None) -> Future:
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
    Future
        A `concurrent.futures.Future` of the rows: `out`, or an array of shape ``(*rows.shape, *array.shape[1:])``. Its
        `result` raises IndexRangeError, MediumError or StallError; `out` then has some of the rows. `Array.close` waits
        for the gather, up to twice the array's time-out.

    Raises
    ------
    ArgumentError, DTypeError, ClosedError
        Nothing was started.

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
    report_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Future:
    """Start to copy row ``numbers.flat[k]`` to row k of memory at `address`; return a future of `result`.

    Parameters
    ----------
    keep : object
        Keeps the memory at `address`, until the rows are copied.
    stream : LaunchStream, optional
        Of arrays on a GPU: the copy starts after its work so far.
    borrowed : bool
        Whether the caller may change `numbers`: they are copied, unless the gather is done when this returns.
    report_bytes : callable
        Is called at the end with the bytes of storage that were read ahead.
    """
    array._require_readable()
    with interruptible(lambda: None) as interrupts:  # an array cannot be closed while a gather is half started
        if stream is None:
            future = _begin_on_host(array, numbers, result, address, keep, borrowed, report_bytes)
        else:
            future = _begin_in_stream(array, numbers, result, address, keep, stream, report_bytes)
        if interrupts.raised:
            future.cancel()
    return future


def _begin_on_host(
    array: Array,
    numbers: Any,
    result: Any,
    address: int,
    keep: Any,
    borrowed: bool,
    report_bytes: Callable[[int], None],
) -> Future:
    """Start to copy rows to host memory; see `begin`."""
    flat = numbers.reshape(-1)
    part = array._part
    plan_of = _through_cache if part.cached else _from_memory
    plan = plan_of(array, flat, address, HERE_BYTES if borrowed else PIECE_BYTES)
    if borrowed and not plan.here:
        plan = plan_of(array, flat.copy(), address, 0)

    # a forked child reads a mapping as it is, and takes no lock, which a thread of the parent may have held
    counted = part.mapping is None or not part.forked
    ended = threading.Event()
    is_over = ended.is_set

    def finished(kept: Any = keep, bytes_read: Callable[[], int] = plan.bytes_read) -> None:
        ended.set()
        if counted:
            part.continued_over(is_over)
        report_bytes(bytes_read())

    if counted:
        with part.launch(False):
            pass
        part.launch_continues(is_over)
    alone = plan.here and (
        plan.chunks < MIN_SHARED_CHUNKS or array.device == "interp" or len(os.sched_getaffinity(0)) == 1
    )
    try:
        return ChunkedTask(
            plan.chunks,
            plan.run,
            None if alone else _workers_of(array),
            work=_work(array, numbers),
            result=result,
            finished=finished,
            stop=plan.stop,
            help=plan.here,
        )
    except BaseException:  # no thread starts
        finished()
        raise


def _begin_in_stream(
    array: Array,
    numbers: Any,
    result: Any,
    address: int,
    keep: Any,
    stream: LaunchStream,
    report_bytes: Callable[[int], None],
) -> Future:
    """Start to copy rows to memory of a GPU; see `begin`."""
    if isinstance(numbers, np.ndarray):
        numbers = Numbers(numbers.shape, numbers.reshape(-1), None, numbers.itemsize)
    part, cache, flag = array._part, array.cache, LaunchFlag(array.device)
    nbytes = _row_bytes(array)
    work = _work(array, numbers)

    ended, started = threading.Event(), list[Future]()

    def is_over() -> bool:
        return ended.is_set() or any(future.done() for future in started)

    def settle() -> None:
        part.continued_over(is_over)
        if part.cached:
            cache.reap()

    resident = not part.cached or cache.space(array._nsid).pool.fully_resident
    if part.cached:
        cache.require_no_doubt(array._nsid)
    with part.launch(False):
        if part.cached and resident:
            cache.begin(flag, array._nsid, stores=False)
        elif part.cached:
            cache.raise_pending_error(array._nsid)
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
            )
            started.append(
                rows.begin(numbers, address, ended.set, partial(_range_error, array), keep, work, result, settle)
            )
            if part.cached:
                cache.end(flag, is_over)
            return started[0]
        cache.end(flag)
        copier = FrameRows(array, nbytes=nbytes, stride=array._strides[0], out=address)
        point = stream.point()

        def finished(kept: Any = keep) -> None:
            ended.set()
            part.continued_over(is_over)
            report_bytes(copier.asked)

        return ChunkedTask(
            1,
            lambda chunk: copier.copy(numbers, point, lambda rows: _require_in_range(array, rows)),
            _workers_of(array),
            work=work,
            result=result,
            finished=finished,
            stop=copier.stop,
        )
    except BaseException:
        ended.set()
        part.continued_over(is_over)
        if part.cached:
            cache.end(flag)
        raise


def _in_memory(array: Array, flag: LaunchFlag) -> int | None:
    """Return the address of row 0 if all rows lie in memory, for a launch that has begun; None if they may not."""
    part = array._part
    if not part.cached:
        return part.data + array._origin
    values = array.cache.view_words(array._nsid, flag)
    return values["data"] + array._origin if values["fully_resident"] else None


def _workers_of(array: Array) -> WorkerGroup | None:
    """Return the threads that gather from an array: one per core; behind a cache two, whose waves take turns.

    On a GPU, one thread gives work to the stream, and other threads copy lists of rows.
    """
    if array.device == "interp":
        return None
    if by_stream(array):
        return worker_group(array._part, 1)
    return worker_group(array._part, 2 if array._part.cached else len(os.sched_getaffinity(0)))


def _from_memory(array: Array, rows: NDArray[Any], address: int, here_bytes: int) -> _Plan:
    """Return the plan of a gather from memory; the caller copies the rows if they are in memory, up to `here_bytes`."""
    part, nbytes = array._part, _row_bytes(array)
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
    here = rows.size * nbytes <= here_bytes and rows.size <= HERE_ROWS
    here = here and not (nbytes and copier.absent(0, rows.size))
    if here:
        shares = max(rows.size * nbytes // SHARE_BYTES, rows.size // SHARE_ROWS)
    else:
        shares = max(rows.size * nbytes // PIECE_BYTES, rows.size // PIECE_ROWS)
        shares = min(len(os.sched_getaffinity(0)), shares)
    most = max(1, MAX_CHUNK_BYTES // max(nbytes, 1))
    each = max(1, min(most, -(-rows.size // max(1, shares))))

    def run(chunk: int) -> None:
        first, end = chunk * each, min((chunk + 1) * each, rows.size)
        if nbytes and not here and copier.absent(first, end):
            wrong = copier.fetch(first, end, gap)
        else:
            wrong = copier.copy(first, end)
        if wrong != DONE:
            raise _out_of_range(array, rows, wrong)
        part.require_sound()

    return _Plan(max(1, -(-rows.size // each)), run, here, copier.stop, lambda: copier.fetched[1])


def _through_cache(array: Array, rows: NDArray[Any], address: int, here_bytes: int) -> _Plan:
    """Return the plan of a gather through a cache, whose own threads read: one chunk, never here."""
    del here_bytes
    nbytes = _row_bytes(array)
    copier = CachedRows(array, nbytes=nbytes, stride=array._strides[0], out=address)
    gap = read_gap()

    def run(chunk: int) -> None:
        _require_in_range(array, rows)
        if rows.size and nbytes:
            copier.copy(rows, gap)

    return _Plan(1, run, False, copier.stop, lambda: copier.asked * array.cache.page_size)


def _row_bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def _work(array: Array, numbers: Any) -> str:
    return f"gather of {numbers.size} rows of array {array.name!r}"


def _require_in_range(array: Array, rows: NDArray[Any]) -> None:
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= array.shape[0]):
        raise _range_error(array, rows)


def _range_error(array: Array, rows: NDArray[Any]) -> errors.IndexRangeError:
    bad = np.flatnonzero((rows < 0) | (rows >= array.shape[0]))
    return _out_of_range(array, rows, int(bad[0]))


def _out_of_range(array: Array, rows: NDArray[Any], wrong: int) -> errors.IndexRangeError:
    row, extent = int(rows[wrong]), array.shape[0]
    advice = "gather counts from 0 (a[rows] takes negative numbers)" if row < 0 else "compare the numbers with len(a)"
    return errors.IndexRangeError(
        f"row {row} at place {wrong} of the list is out of range for array {array.name!r} of {extent} rows: {advice}",
        array=array.name,
        index=row,
        size=extent,
    )
