"""`gather`: copy rows of an array, by their numbers, in the background."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ... import errors
from ..._future import Future
from ..._os import interruptible
from ...targets import LaunchFlag, LaunchStream, empty, handle_of, stream_of
from ..array import Array
from ..device_array import DeviceArray
from ..items import is_contiguous, on_host
from .gpu import copy_in_stream
from .gpu_cached import GpuCachedRows
from .host import CHUNK_BYTES, INLINE_BYTES, MemoryRows
from .page_batches import CachedRows
from .tasks import ChunkedTask, WorkerGroup, worker_group
from .tensors import Indices, Tensor, indices_on_gpu, on_a_gpu, row_indices, tensor_of

MIN_SHARED_CHUNKS = 3
"""Minimum number of chunks of a gather for which other threads help."""


class Copier(Protocol):
    """An object that copies the rows of a gather, chunk by chunk.

    Attributes
    ----------
    chunks : int
        1 or more.
    inline : bool
        Whether the thread that calls `gather` copies, too, and all rows are copied when it returns.
    """

    chunks: int
    inline: bool

    @property
    def bytes_read(self) -> int:
        """Bytes that were read ahead so far."""

    def run(self, chunk: int) -> None:
        """Copy the rows of a chunk."""

    def stop(self) -> None:
        """Let `run` return soon; acquires no lock."""


def gather(array: Array, rows: Any, out: Any = None, stream: Any = None) -> Future:
    """Begin to gather rows of an array; return a future.

    Each page is read once, by long commands over duplicates, neighbors and short gaps, with many commands in flight.
    Pages that kernels have changed and not flushed are taken from the cache.

    Parameters
    ----------
    array : Array
        A row is ``array[i]``: of any shape and any number of bytes.
    rows : array-like of int32 or int64
        Row numbers from 0, in an array of one or more dimensions, in any order; duplicates are allowed. The call copies
        the row numbers, unless they are in GPU memory (for arrays on "cuda"): do not modify those until the gather is
        done.
    out : array, optional
        Where to store the rows: C order, writable, shape ``(*rows.shape, *array.shape[1:])``, the array's dtype; a
        NumPy array, or an array in host memory of a library that has DLPack, such as PyTorch (bfloat16 too). For arrays
        on "cuda": an array in GPU memory, with DLPack or ``__cuda_array_interface__``. Do not use `out` until the
        gather is done. Default: a new NumPy array (bfloat16 as `Array` reads it), or for arrays on "cuda" a new
        `DeviceArray`.
    stream : optional
        For arrays on "cuda": a stream of PyTorch, CuPy or numba-cuda. Rows are read and stored after the work that is
        in the stream at the call. Default: the default stream. For arrays that are entirely in memory (tiers "device"
        and "host"), the gather itself runs in that stream, so later work in the stream may use `out` at once. For other
        arrays, wait for `result` before you use `out`.

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
    indices = indices_of(rows, handle) if gpu else row_indices(rows, copy=False)
    shape = (*indices.shape, *array.shape[1:])
    if isinstance(out, Array):  # DLPack would share a copy of its rows
        raise errors.ArgumentError(
            f"out is array {out.name!r} of Warpwell: gather into a NumPy array, and assign the result to its rows",
            name="out",
        )
    if out is None:
        result, address = new_result(array, shape)
        keep: Any = result
    else:
        keep = tensor_of(out, "out", handle)
        keep.require(shape, array.dtype, array.name)
        result, address, nbytes = out, keep.address, math.prod(shape) * array.dtype.itemsize
        part = array._part
        own_bytes = max(1, array.shape[0]) * max(1, array._strides[0])
        if not part.cached and _overlap(part.data + array._origin, own_bytes, address, nbytes):
            raise errors.ArgumentError(f"out overlaps array {array.name!r}: pass other memory", name="out")
        if isinstance(indices, np.ndarray) and _overlap(int(indices.ctypes.data), indices.nbytes, address, nbytes):
            indices = indices.copy()
    if not gpu:
        return begin(array, indices, result, address, keep, borrowed=True)
    caller = stream_of(array.device, handle)
    for argument in (keep, indices):
        if isinstance(argument, Tensor):
            _wait_for_writer(array, argument, caller)
    return begin(array, indices, result, address, (keep, indices, stream), caller)


def _wait_for_writer(array: Array, tensor: Tensor, caller: Any) -> None:
    """Let the caller's stream wait for the stream that wrote a tensor, which must be in the array's GPU."""
    if tensor.ordinal != 0:
        raise errors.ArgumentError(
            f"an argument is in the memory of GPU {tensor.ordinal}, but array {array.name!r} on GPU 0: copy it to GPU 0"
        )
    if tensor.stream is not None:
        caller.after(stream_of(array.device, tensor.stream).point())


def by_stream(array: Array) -> bool:
    """Return whether rows of an array are gathered to a GPU's memory, in the order of a stream."""
    return array.device == "cuda"


def new_result(array: Array, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Return a new array for rows, in the memory of the array's device, and its address."""
    if array.device == "cuda":
        memory = empty("cuda", max(math.prod(shape) * array.dtype.itemsize, 1), np.uint8)
        found = DeviceArray(memory, shape, array.dtype)
        return found, int(found.__cuda_array_interface__["data"][0])
    result = np.empty(shape, on_host(array.dtype))
    return result, int(result.ctypes.data)


def indices_of(rows: Any, handle: int) -> Indices:
    """Return row indices in host memory or on a GPU, for a gather in a stream."""
    return indices_on_gpu(rows, handle) if on_a_gpu(rows) else row_indices(rows)


def check(array: Any, rows: Any, out: Any, stream: Any) -> None:
    """Raise unless rows of an array can be gathered, with these arguments of `gather`."""
    if not isinstance(array, Array):
        raise errors.ArgumentError(
            f"gather reads an array of this process, from ww.open(path, device=...), not {type(array).__name__}: use "
            "a[rows]",
            name="array",
        )
    if not array.shape:
        raise errors.ArgumentError(f"array {array.name!r} has no dimensions and no rows: read a[()]", name="array")
    gpu = by_stream(array)
    if stream is not None and not gpu:
        raise errors.ArgumentError(
            f'stream is only for arrays on "cuda", but {array.name!r} is on "{array.device}": omit stream',
            name="stream",
        )
    for name, argument in (("rows", rows), ("out", out)):
        if argument is not None and not gpu and on_a_gpu(argument):
            raise errors.ArgumentError(
                f'{name} is in GPU memory, but array {array.name!r} on "{array.device}": pass one in host memory',
                name=name,
            )
    if gpu and out is not None and not isinstance(out, Array) and not on_a_gpu(out):
        raise errors.ArgumentError(
            f'out is in host memory, but array {array.name!r} on "cuda": pass an array in the memory of the GPU, or '
            "copy the result",
            name="out",
        )
    if array.shape[0] and not is_contiguous(array.shape[1:], array._strides[1:], array.dtype.itemsize):
        raise errors.ArgumentError(
            f"items of a row of {array.name!r} are not contiguous: gather from the array of records",
            name="array",
        )


def _overlap(address: int, nbytes: int, out: int, out_bytes: int) -> bool:
    return address < out + out_bytes and out < address + nbytes


def begin(
    array: Array,
    indices: Any,
    result: Any,
    address: int,
    keep: Any,
    stream: LaunchStream | None = None,
    *,
    borrowed: bool = False,
    report_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Future:
    """Start to copy row ``indices.flat[k]`` to row k of memory at `address`; return a future of `result`.

    Parameters
    ----------
    indices : ndarray, or Tensor for a gather in a stream
    keep : object
        Keeps the memory at `address`, until the rows are copied.
    stream : LaunchStream, optional
        For arrays on a GPU: the copy starts after the work that is in the stream at the call.
    borrowed : bool
        Whether the caller may change `indices` later. If so, they are copied, unless the gather is done when this
        returns.
    report_bytes : callable
        Called at the end with the number of bytes that were read ahead from storage.
    """
    array._require_readable()
    with interruptible(lambda: None) as interrupts:  # an array with a half-started gather could not be closed
        future = None if stream is None else _begin_in_stream(array, indices, result, address, keep, stream)
        if future is None:
            copier = _copier(array, indices, address, stream, borrowed)
            future = _begin_task(array, copier, _work(array, indices), result, keep, report_bytes)
        if interrupts.raised:
            future.cancel()
    return future


def _begin_task(
    array: Array, copier: Copier, work: str, result: Any, keep: Any, report_bytes: Callable[[int], None]
) -> Future:
    """Start to copy rows by service threads, and in this thread if the copier is inline; see `begin`."""
    part = array._part
    # a forked child reads a mapping as it is, and takes no lock, which a thread of the parent may have held
    counted = part.mapping is None or not part.forked
    ended = threading.Event()
    is_over = ended.is_set

    def finished(reference: Any = keep) -> None:
        ended.set()
        if counted:
            part.continued_over(is_over)
        report_bytes(copier.bytes_read)

    if counted:
        with part.launch(False):
            pass
        part.launch_continues(is_over)
    alone = copier.inline and (
        copier.chunks < MIN_SHARED_CHUNKS or array.device == "interp" or len(os.sched_getaffinity(0)) == 1
    )
    workers = None if alone else _workers_of(array)
    try:
        return ChunkedTask(
            copier.chunks,
            copier.run,
            workers,
            work=work,
            result=result,
            finished=finished,
            stop=copier.stop,
            help=copier.inline,
        )
    except BaseException:  # no thread can be started
        finished()
        raise


def _begin_in_stream(
    array: Array, indices: Indices, result: Any, address: int, keep: Any, stream: LaunchStream
) -> Future | None:
    """Start to copy rows in the caller's stream if all of them are in memory; otherwise return None."""
    part, cache, flag = array._part, array.cache, LaunchFlag(array.device)
    if part.cached:
        cache.require_no_suspects(array._nsid)
        if not cache.space(array._nsid).pool.fully_resident:
            cache.raise_pending_error(array._nsid)
            return None
    future: Future | None = None

    def is_over() -> bool:
        return future is not None and future.done()

    def settle() -> None:
        part.continued_over(is_over)
        if part.cached:
            cache.reap()

    with contextlib.ExitStack() as on_failure:
        with part.launch(False):
            if part.cached:
                cache.begin(flag, array._nsid, stores=False)
                on_failure.callback(cache.end, flag)
        part.launch_continues(is_over)
        on_failure.callback(part.continued_over, is_over)
        view = cache.view_words(array._nsid, flag) if part.cached else {"data": part.data, "fully_resident": 1}
        if not view["fully_resident"]:
            return None
        future = copy_in_stream(
            array,
            stream,
            indices,
            view["data"] + array._origin,
            address,
            settle=settle,
            work=_work(array, indices),
            result=result,
            keep=keep,
        )
        on_failure.pop_all()
        if part.cached:
            cache.end(flag, is_over)
    return future


def _workers_of(array: Array) -> WorkerGroup | None:
    """Return the threads that gather from an array: one per core; two behind a cache, which alternate between batches.

    On a GPU, one thread submits work to the stream.
    """
    if array.device == "interp":
        return None
    if by_stream(array):
        return worker_group(array._part, 1)
    return worker_group(array._part, 2 if array._part.cached else len(os.sched_getaffinity(0)))


def _copier(array: Array, indices: Any, address: int, stream: LaunchStream | None, borrowed: bool) -> Copier:
    """Return the copier of a gather; see `begin`."""
    if stream is not None:
        return GpuCachedRows(array, indices, address, stream.point())
    flat = indices.reshape(-1)
    if array._part.cached:
        return CachedRows(array, flat.copy() if borrowed else flat, address)
    copier = MemoryRows(array, flat, address, INLINE_BYTES if borrowed else CHUNK_BYTES)
    return copier if copier.inline or not borrowed else MemoryRows(array, flat.copy(), address, 0)


def _work(array: Array, indices: Any) -> str:
    return f"gather of {indices.size} rows of array {array.name!r}"
