"""Array: data on storage that kernels subscript and the host reads and writes."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import checked_integer
from .._future import Future
from .._os import interruptible
from .._ranges import join_ranges
from ..cache import Statistics
from ..targets import LaunchFlag, PlainFlag
from ..targets.compiler import intrinsics_for
from . import host_access
from .attachment import Attachment, CacheArgument, hand_over
from .header import check_extents
from .items import BFLOAT16, code_of, is_bits, require_bits
from .operators import OnStorage, ReadOnUse
from .page_set import PageSet
from .spans.words import GROUP_BYTES
from .view import ArrayView, ViewField, ViewStatic

TIERS = ("mapped", "storage", "host-cached", "host", "device")
INT64_MAX = (1 << 63) - 1
_UNCOUNTED = {
    tier: f'reads by kernels are not counted in tier "{tier}", which {how}: open with tier="storage" to count them'
    for tier, how in (
        ("mapped", "uses the system's page cache"),
        ("host", "has the file in host memory"),
        ("device", "has the file in device memory"),
    )
}
"""For each tier without a cache, why reads by kernels are not counted, and the next step."""
_How = tuple[bool, bool, bool, int, bool]


class Array(CacheArgument, OnStorage):
    """An n-dimensional array on storage; see `warpwell.open` and `warpwell.create`.

    Kernels receive it as an argument and subscript it (see `ArrayView`). The host reads ``a[3]``, ``a[3, 5]`` and
    ``a[index_array]``, and in mode "r+" also assigns to them. The result of ``a[index_array]`` is on the array's
    device. A range of rows, ``a[10:20]``, is a view (`Rows`). Writes are durable after `flush` (or `close`); before
    that a crash may lose them.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    device : {"cpu", "cuda", "interp"}
    tier : {"mapped", "storage", "host-cached", "host", "device"}
    writable : bool
    name : str
    cache : Cache
        The cache of the array (tiers "mapped", "host" and "device" use only its latch).
    """

    def __init__(self, part: Attachment, *, read_once: bool = False) -> None:
        header = part.header
        self.shape = header.shape
        self.dtype = header.dtype
        self.tier = part.tier
        self.writable = part.writable
        self.name = part.name
        self.cache = part.cache
        self.device = part.cache.device
        self.medium = part.medium
        self.read_once = read_once
        self._strides = _c_strides(header.shape, header.dtype.itemsize)
        self._row_bytes = _row_bytes(header.shape, self._strides, header.dtype)
        self._origin = header.origin
        self._static: tuple[_How, ViewStatic] | None = None
        self._base: Array | None = None
        self._part = part
        self._nsid = part.nsid
        self._finalizer = weakref.finalize(self, hand_over, self._part)
        self._finalizer.atexit = False  # `warpwell.closing` closes arrays that are open at the end of the program

    # -- shape ----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "closed " if self._part.closed else ""
        kind = f"{state}warpwell.{type(self).__name__}"
        dtype = BFLOAT16 if is_bits(self.dtype) else self.dtype
        return f"<{kind} {self.name!r} {self.shape} {dtype} on {self.device}, tier {self.tier}>"

    def reshape(self, *shape: Any) -> Array:
        """Return an array that shares file and cache, with another shape (C order; one extent may be -1)."""
        new_shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        extents = tuple(checked_integer(n, "each extent of a shape", minimum=-1) for n in new_shape)
        items = math.prod(n for n in extents if n != -1)
        if extents.count(-1) == 1 and items > 0:
            extents = tuple(self.size // items if n == -1 else n for n in extents)
        contiguous = self._strides == _c_strides(self.shape, self.dtype.itemsize)
        if -1 in extents or math.prod(extents) != self.size or not contiguous:
            why = "" if contiguous else ": items of a field are not contiguous, np.asarray(a) reads them"
            raise errors.ArgumentError(f"shape {self.shape} cannot become {tuple(new_shape)}{why}")
        check_extents(extents, self.dtype, f"array {self.name!r}")
        return self._derive(extents, self.dtype, _c_strides(extents, self.dtype.itemsize), 0)

    def field(self, name: str) -> Array:
        """Return one field of a record array as an array, which shares cache and file."""
        if self.dtype.fields is None or name not in self.dtype.fields:
            raise errors.ArgumentError(f"array {self.name!r} of {self.dtype} has no field {name!r}")
        dtype, offset = self.dtype.fields[name][:2]
        inner: tuple[int, ...] = ()
        if dtype.subdtype is not None:
            dtype, inner = dtype.subdtype
        return self._derive(self.shape + inner, dtype, self._strides + _c_strides(inner, dtype.itemsize), offset)

    def over(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a part of the file, which begins `offset` bytes after item 0, as an array that shares cache and file.

        All of the new array must be within the file.
        """
        return self._derive(shape, np.dtype(dtype), _c_strides(shape, np.dtype(dtype).itemsize), offset)

    def _derive(
        self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], offset: int, kind: type[Array] | None = None
    ) -> Array:
        self._require_readable()
        derived = object.__new__(kind or type(self))
        derived.__dict__.update(self.__dict__)
        derived.shape, derived.dtype, derived._strides = shape, dtype, strides
        derived._origin = self._origin + offset
        derived._static = None
        derived._row_bytes = _row_bytes(shape, strides, dtype)
        # the root, not an array derived from it; without `or`, for which an array of length 0 is false
        derived._base = self if self._base is None else self._base
        return derived

    # -- kernels --------------------------------------------------------------------------------------------

    def view(self) -> ArrayView:
        """Return the view that a plain ``@cuda.jit(extensions=[gpu.numba_cuda])`` kernel receives for the array.

        Warpwell does not see launches of such kernels: use ``with a.active():`` around launch and synchronization,
        which keeps the controller awake and raises latched errors.
        """
        self._require_open()
        self._part.viewed |= self.writable
        return self._plain_view(None)

    def _plain_view(self, flag: LaunchFlag | None) -> ArrayView:
        if self.device == "cuda":
            intrinsics_for("cuda")  # numba-cuda needs the view's type before it calls the extension
        return self.kernel_struct(flag)

    def kernel_struct(self, flag: LaunchFlag | None = None) -> ArrayView:
        """Return the struct that device code receives (see `warpwell.targets.KernelArgument`)."""
        cached = self._part.cached
        view_words = self.cache.view_words(self._nsid, flag)
        shift = self.cache.page_size.bit_length() - 1 if cached else 0
        direct_mapped = cached and view_words["direct_mapped"] != 0
        how = cached, self.writable, cached and self.cache.full, shift, direct_mapped
        if self._static is None or self._static[0] != how:
            static = _static(self.dtype, self._origin, self._strides, how)
            contiguous = self._strides == _c_strides(self.shape, self.dtype.itemsize)
            numbers = not static.fields and self.dtype.kind in "biufmMV" and self.dtype.itemsize in (1, 2, 4, 8)
            packed = contiguous and numbers and self._origin % GROUP_BYTES == 0
            self._static = how, replace(static, packed=packed)
        static = self._static[1]
        values: dict[str, int | tuple[int, ...]] = {
            "shape": self.shape,
            "strides": self._strides,
            "size": min(self.size, INT64_MAX),
            "space": view_words["space"],
        }
        if cached:
            values |= view_words
            values |= {"origin": self._origin, "once": int(self.read_once)}
        else:
            values["data"] = self._part.data + self._origin
        cache, part, epoch, mapping = self.cache, self._part, self.cache.layout_epoch, self._part.mapping
        is_stale = (lambda: cache.layout_epoch != epoch) if cached else (lambda: part.mapping is not mapping)
        return ArrayView(static, values, is_stale, mapping)

    @contextlib.contextmanager
    def active(self) -> Iterator[ArrayView]:
        """Return a context in which kernels that Warpwell does not launch may use the array's view."""
        flag = PlainFlag() if self.device == "cuda" else LaunchFlag(self.device)

        def abort() -> None:
            flag.interrupt()
            self.abort(flag)

        with contextlib.ExitStack() as on_exit:
            # each launch that begins must end: otherwise the array could not be closed
            with interruptible(lambda: None):
                self.launch_begins(flag)
                on_exit.callback(self.launch_ended, flag)
            view = self._plain_view(flag)
            if self.device == "cuda":
                from ..targets.compiler import synchronize

                on_exit.callback(synchronize, [SimpleNamespace(abort=abort)])
            yield view

    # -- bulk -----------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.field(index)
        self._require_readable()
        row = host_access.read_row(self, index) if type(index) is int and self.shape else self._range(index)
        return host_access.read(self, index) if row is None else row

    def _range(self, index: Any) -> Rows | None:
        """Return the rows of a slice without a step as a view, or None for another index."""
        if type(index) is not slice or index.step not in (None, 1) or not self.shape:
            return None
        first, end, _ = index.indices(self.shape[0])
        count = max(0, end - first)
        offset = first * self._strides[0] if count else 0
        return cast(Rows, self._derive((count, *self.shape[1:]), self.dtype, self._strides, offset, Rows))

    def _read_all(self) -> NDArray[Any]:
        self._require_readable()
        return host_access.read_all(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._require_open()
        self._require_writable()
        if isinstance(index, str):
            self.field(index)[...] = value
            return
        if isinstance(value, Rows) and self._has_at(index, value):
            return  # ``a[lo:hi] += 1`` has already written
        require_bits(self.dtype, value, self.name)
        host_access.write(self, index, value)

    def _has_at(self, index: Any, rows: Rows) -> bool:
        """Return whether an index selects exactly the items of `rows`."""
        own = self if index is Ellipsis else self._range(index)
        names = ("_part", "dtype", "_origin", "shape", "_strides")
        return own is not None and all(getattr(own, name) == getattr(rows, name) for name in names)

    def _require_writable(self) -> None:
        if not self.writable:
            raise errors.ReadOnlyError(f'array {self.name!r} is read-only: open it with mode="r+"')

    # -- residency ------------------------------------------------------------------------------------------

    def _span(self, start: int | None, stop: int | None) -> tuple[int, int]:
        """Return the bytes [first, end) of the file in which rows [start, stop) lie."""
        self._require_open()
        rows = self.shape[0] if self.shape else 1
        first, end, _ = slice(start, stop).indices(rows)
        if end < first:
            raise errors.ArgumentError(
                f"rows {start} to {stop} of {rows} of array {self.name!r}: the stop must not be before the start"
            )
        if end == first or 0 in self.shape:
            return 0, 0
        # the last row of a field ends with its last item, before the first one of the next row
        row = self._strides[0] if self._strides else 0
        inner = sum((n - 1) * step for n, step in zip(self.shape[1:], self._strides[1:], strict=True))
        return self._origin + first * row, self._origin + (end - 1) * row + inner + self.dtype.itemsize

    def page_set(self) -> PageSet:
        """Return an empty set of pages of the array: kernels mark pages in the set, and `PageSet.waves` reads them.

        Raises
        ------
        ArgumentError
            The array is a field, and the distance between its items is not constant.
        """
        self._require_open()
        return PageSet(self)

    def prefetch(self, start: int | None = None, stop: int | None = None) -> Future:
        """Start to read rows [start, stop) into the cache, as many pages as the array's frames hold.

        The pages are read in the background, in large commands; on "interp", they are read before this method returns.
        The result of the future is `warpwell.cache.PrefetchCounts`, also after `cancel`. A failed read is counted, and
        its error is raised by a launch whose kernel uses the page. `evict`, closing, and opening another array on the
        cache cancel the prefetch. In tier "mapped" the system reads the rows into its page cache and does not report
        when it is done.
        """
        first, end = self._residency(start, stop)
        return self.cache.prefetch(self._nsid, first, end, once=self.read_once)

    def pin(self, start: int | None = None, stop: int | None = None) -> None:
        """Read rows [start, stop) and keep their pages in the cache until `unpin`.

        In tier "mapped" the operating system decides which pages stay in memory, and this method only starts to read
        them.

        Raises
        ------
        KernelError
            There are more pages than the array's frames minus one.
        """
        first, end = self._residency(start, stop)
        if end > first:
            self._part.pin(first, end)

    def unpin(self, start: int | None = None, stop: int | None = None) -> None:
        """Unpin rows that `pin` pinned; raise KernelError if they are not pinned."""
        if self._part.cached:
            self._part.unpin(*self._residency(start, stop))

    def evict(self, start: int | None = None, stop: int | None = None) -> None:
        """Write the dirty pages of rows [start, stop) back, and evict all pages of these rows from the cache.

        In tier "mapped" this flushes the array, and the system's page cache drops the pages unless another process maps
        them.
        """
        if self._part.mapping is not None:
            first, end = self._span(start, stop)
            self.flush()
            self._part.mapping.drop(first, end)
            return
        first, end = self._residency(start, stop)
        if end > first:
            with self._part.in_use():
                self.cache.bulk.stop()
                self.cache.evict(self._nsid, (first, end))

    def _residency(self, start: int | None, stop: int | None) -> tuple[int, int]:
        """Return the pages [first, end) of rows [start, stop), or none in the tiers without a cache."""
        first, end = self._span(start, stop)
        if self._part.mapping is not None and end > first:
            self._part.mapping.read_ahead(first, end)
        page = self.cache.page_size
        return (first // page, -(-end // page)) if self._part.cached else (0, 0)

    # -- life -----------------------------------------------------------------------------------------------

    @property
    def byte_range(self) -> tuple[Hashable, int, int]:
        """The array's storage, equal for arrays that share it, and the byte range [first, end) of the items in it."""
        if 0 in self.shape:
            return self._part, self._origin, self._origin
        reach = sum((n - 1) * step for n, step in zip(self.shape, self._strides, strict=True))
        return self._part, self._origin, self._origin + reach + self.dtype.itemsize

    @property
    def stats(self) -> Statistics:
        """Return the statistics of the array's cache, and of the host's reads of the array that bypass the cache."""
        self._require_open()
        part = self._part
        return replace(
            self.cache.stats,
            host_reads=part.host_reads,
            host_bytes=part.host_bytes,
            uncounted=_UNCOUNTED.get(self.tier, ""),
        )

    def flush(self) -> None:
        """Write all changes of kernels and host to storage and make them durable (fdatasync).

        Changes of a launch that still runs may be written or not; the next flush, or close, writes them.

        Raises
        ------
        MediumError
            A write failed; the pages stay in the cache, and flush may be called again.
        """
        self._require_open()
        self._part.flush()

    def recover(self, *, accept_loss: bool = False) -> list[range]:
        """Resume after the loss of the drive that serves the array; return the rows whose writes are possibly lost.

        The drive is reset and started again, unless that has been done. The cache keeps its pages: changes of kernels,
        and pages written since the last `flush`, are written again. The returned rows are in doubt: their pages were
        written after the last flush and were then evicted from the cache, so the drive may have the old items or the
        new ones. While rows are in doubt, launches on the array raise `DriveLostError`; `flush` writes the dirty pages
        and then raises it, too. With `accept_loss` the array can be used again at once; write the returned rows again.

        If the drive is not lost, it is not started again: the call returns the rows that are still in doubt, and with
        `accept_loss` accepts them. Rows are counted along the array's first dimension.

        Raises
        ------
        ArgumentError
            `accept_loss` was given for a field or a range of rows, which cannot return the array's other rows in doubt.
        DriveLostError
            The drive does not restart, for example because its QEMU has exited. The array stays lost.
        DriveError
            A different drive or namespace was found after the restart. The array stays lost.
        SharingError
            A launch uses the cache: wait for it.
        """
        self._require_open()
        if accept_loss and self._base is not None and self.nbytes != self._base.nbytes:
            raise errors.ArgumentError(
                f"this is a part of array {self.name!r}, and its other rows may be in doubt, too: call "
                "recover(accept_loss=True) on the array itself",
                name="accept_loss",
            )
        suspects = self.cache.recover(self._nsid, accept_loss=accept_loss)
        if (failure := self.medium.failure()) is not None:
            raise failure
        row, page = self._strides[0] if self._strides else self.dtype.itemsize, self.cache.page_size
        rows = self.shape[0] if self.shape else 1
        found = [
            (max(0, first * page - self._origin) // row, -(-max(0, end * page - self._origin) // row))
            for first, end in suspects
        ]
        return [range(first, min(end, rows)) for first, end in join_ranges(found) if first < min(end, rows)]

    def close(self) -> None:
        """Flush and release everything (idempotent). A derived array closes nothing.

        A dropped array is closed soon afterwards by the closing thread, and an array that is still open at the end of
        the program is closed then. In both cases, a message on stderr reports changes that cannot be written.

        Raises
        ------
        SharingError
            A launch uses the array: wait for it.
        """
        if self._base is not None:
            return
        if self._part.forked:
            self._part.closed = True
        else:
            self._part.close()
        self._finalizer.detach()

    def _require_open(self) -> None:
        self._part.require_open()

    def _require_readable(self) -> None:
        self._part.require_readable()

    def __enter__(self) -> Array:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rows(ReadOnUse, Array):
    """A range of rows of an array, ``a[lo:hi]``: a view, which reads nothing until it is used.

    It is an `Array` of these rows: kernels take it, ``len``, `shape`, `reshape`, `prefetch` and subscripts work, and
    assigning to it, or ``rows += 1``, writes to the array. NumPy functions, operators, comparisons and non-modifying
    methods of NumPy arrays read the rows each time and return NumPy arrays. `read` returns a copy of the rows in the
    memory of the array's device.
    """

    def __repr__(self) -> str:
        text = super().__repr__()
        return text if self._part.closed else f"{text[:-1]}; numpy.asarray() reads the rows>"

    def read(self) -> Any:
        """Return a copy of the rows: a NumPy array, or on "cuda" a `DeviceArray`."""
        self._require_readable()
        return host_access.read(self, slice(None))

    def copy_to_host(self) -> NDArray[Any]:
        """Return a copy of the rows as a NumPy array."""
        return np.asarray(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device of the result of `read`."""
        return (2, 0) if self.device == "cuda" else (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        """Return a DLPack capsule of the result of `read`."""
        return self.read().__dlpack__(**options)


def _static(dtype: Any, origin: int, strides: tuple[int, ...], how: _How) -> ViewStatic:
    """Return the compile-time parameters of a view and of its fields."""
    itemsize = dtype.itemsize
    cached, writable, full, shift, direct_mapped = how
    unit = itemsize // 2 if dtype.kind == "c" else itemsize
    fields = []
    for name, (kind, offset, *_) in (dtype.fields or {}).items():
        base, inner = kind.subdtype or (kind, ())
        steps = _c_strides(inner, base.itemsize)
        fields.append(ViewField(name, offset, inner, steps, _static(base, origin + offset, strides + steps, how)))
    return ViewStatic(
        dtype=f"V{itemsize}" if fields else code_of(dtype),
        ndim=len(strides),
        aligned=unit & (unit - 1) == 0 and all(n % unit == 0 for n in (origin, *strides)),
        stride=strides[-1] if strides else 0,
        fields=tuple(fields),
        cached=cached,
        writable=writable,
        full=full,
        shift=shift,
        direct_mapped=direct_mapped,
    )


def _row_bytes(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the size in bytes of a row if the rows are contiguous and NumPy has the dtype; else 0."""
    return strides[0] if shape and strides == _c_strides(shape, dtype.itemsize) and not is_bits(dtype) else 0


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
