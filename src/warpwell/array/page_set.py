"""`PageSet`: pages that kernels are about to use. The kernels mark the pages, and the host reads them in waves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..cache import latch_index
from ..targets import DeviceStruct, LaunchFlag, device
from ..targets.primitives import DEVICE, fetch_or, i64, load_relaxed
from .attachment import CacheArgument
from .items import is_contiguous


class PageSet(CacheArgument):
    """A set of pages of an array, which kernels mark and the host then reads into the cache; see `Array.page_set`.

    In a kernel ``pages.add(i)`` marks the page of item `i`, and ``pages.add_range(start, stop)`` marks the pages of
    items [start, stop). Indices are flat, in C order; each call is made by one thread, and has relaxed memory order. On
    the host, `waves` reads the marked pages into the cache with long commands, as many pages at a time as the cache's
    frames hold. While the caller works on one wave, the next one is read. A kernel may use unmarked pages, too: pages
    that are not in the cache are read on demand.

    Arrays without a cache (tiers "mapped", "host" and "device") have nothing to read: `waves` yields all items at once.

    Attributes
    ----------
    device : {"cpu", "cuda", "interp"}

    Examples
    --------
    >>> import numpy as np, warpwell as ww, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "x.npy")
    >>> np.save(path, np.arange(4096))
    >>> with ww.open(path, device="cpu", cache="64KiB", page_size=512) as x:
    ...     pages = x.page_set()
    ...     pages.add_range(100, 300)
    ...     [(first <= 100, end >= 300) for first, end in pages.waves()]
    [(True, True)]
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self._part, self._nsid, self.cache, self.writable = array._part, array._nsid, array.cache, False
        self.device: str = array.device
        self._step = _step(array)
        cache = array.cache
        self._pages = -(-(array._origin + array.size * self._step) // cache.page_size) if array._part.cached else 0
        self._bits = cache.memory.allocate(8 * (-(-self._pages // 64))) if self._pages else None

    # -- marks --------------------------------------------------------------------------------------------------

    def add(self, index: int) -> None:
        """Mark the page of an item (flat index); in kernels, too."""
        self.add_range(index, index + 1)

    def add_range(self, start: int, stop: int) -> None:
        """Mark the pages of items [start, stop) (flat indices); in kernels, too.

        Raises
        ------
        IndexRangeError
            An item is outside of the array. In kernels, the launch raises this after its end.
        """
        self._array._require_open()
        size = self._array.size
        if not 0 <= start <= stop <= size:
            raise errors.IndexRangeError(
                f"items {start} to {stop} of array {self._array.name!r} of {size}: pass 0 <= start <= stop <= size",
                array=self._array.name,
                index=stop if 0 <= start <= size else start,
                size=size,
            )
        if self._bits is None or start == stop:
            return
        page, origin = self._array.cache.page_size, self._array._origin
        last = origin + (stop - 1) * self._step + self._array.dtype.itemsize
        bits = np.unpackbits(self._read_bits().view(np.uint8), bitorder="little")
        bits[(origin + start * self._step) // page : -(-last // page)] = 1
        self._bits.write(0, np.packbits(bits, bitorder="little"))

    def clear(self) -> None:
        """Remove all marks."""
        if self._bits is not None:
            self._bits.write(0, np.zeros(-(-self._pages // 64), np.int64))

    def count(self) -> int:
        """Return the number of marked pages (0 for an array in memory)."""
        return int(np.unpackbits(self._read_bits().view(np.uint8)).sum(dtype=np.int64))

    def _read_bits(self) -> NDArray[np.int64]:
        if self._bits is None:
            return np.zeros(0, np.int64)
        return self._bits.read(0, 8 * (-(-self._pages // 64))).view(np.int64)

    # -- reading ------------------------------------------------------------------------------------------------

    def waves(self) -> Iterator[tuple[int, int]]:
        """Read the marked pages, and yield ascending, disjoint ranges [first, end) of items that cover them.

        When a range is yielded, its pages have been read, except for pages that found no frame. While the caller works
        on the range, the pages of the next range are read. The iteration takes the marks when it starts: launches that
        set them must end before that. During the iteration, kernels may mark pages for the next iteration.
        """
        self._array._require_open()
        if self._bits is None:
            yield 0, self._array.size
            return
        pages = _unpacked(self._read_bits())
        self.clear()
        if not len(pages):
            return
        array = self._array
        parts = np.array_split(pages, -(-len(pages) // array.cache.wave_pages(array._nsid)))
        edges = [0, *(int(part[0]) for part in parts[1:]), self._pages]
        reads = array.cache.bulk.waves(array._nsid, zip(parts, parts, strict=True), once=array.read_once)
        with contextlib.closing(reads):
            for first, end in pairwise(edges):
                array._require_open()
                next(reads)
                yield self._items_from(first), self._items_from(end)

    def _items_from(self, page: int) -> int:
        """Return the first item that starts in a page or after it."""
        byte = page * self._array.cache.page_size - self._array._origin
        return int(min(max(0, -(-byte // self._step)), self._array.size))

    # -- the argument of a kernel -------------------------------------------------------------------------------

    def kernel_struct(self, flag: LaunchFlag | None = None) -> PageSetView:
        """Return the struct that device code receives (see `warpwell.targets.KernelArgument`)."""
        array = self._array
        values: dict[str, int | tuple[int, ...]] = {
            "bits": self._bits.address if self._bits is not None else 0,
            "space": array.cache.view_words(array._nsid, flag)["space"],
            "origin": array._origin,
            "step": self._step,
            "size": array.size,
            "shift": array.cache.page_size.bit_length() - 1,
        }
        return PageSetView((self._bits is not None, array.dtype.itemsize), values)


def _step(array: Any) -> int:
    """Return the bytes between items in C order."""
    step = int(array._strides[-1] if array._strides else array.dtype.itemsize)
    if not is_contiguous(array.shape, array._strides, step):
        raise errors.ArgumentError(
            f"items of array {array.name!r} are not at a constant distance: create the page set of the array of records"
        )
    return step


def _unpacked(bitmap: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ascending numbers of the bits that are set."""
    full = np.flatnonzero(bitmap)
    bits = np.unpackbits(bitmap[full].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    which, bit = np.nonzero(bits)
    return full[which] * 64 + bit


# -- device code ------------------------------------------------------------------------------------------------


class PageSetView(DeviceStruct):
    """A page set in device code; its static parameters are whether there are pages, and the size of an item."""

    methods: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "add": ("pages", "index"),
        "add_range": ("pages", "start", "stop"),
    }

    @classmethod
    def layout(cls, static: Any) -> Sequence[tuple[str, int | None]]:
        """Return the members: address of the bitmap, space of latched errors, and offsets of items."""
        return [(name, None) for name in ("bits", "space", "origin", "step", "size", "shift")]

    @classmethod
    def implementation(cls, name: str, static: Any, key: int | str | None) -> Callable[..., Any] | None:
        """Return the device function of a method."""
        if name not in cls.methods or key != 1:
            return None
        return _made(name, *static)


@functools.cache
def _made(name: str, cached: bool, itemsize: int) -> Callable[..., Any]:
    last_byte = itemsize - 1

    @device
    def mark(pages, start, stop):
        first = (pages.origin + start * pages.step) >> pages.shift
        last = (pages.origin + (stop - 1) * pages.step + last_byte) >> pages.shift
        while first <= last:
            # 64 pages at a time; a mark that is already set costs no atomic
            bits = i64(-1) << (first & 63)
            if last >> 6 == first >> 6:
                bits &= i64(-1) ^ ((i64(-2)) << (last & 63))
            word = pages.bits + ((first >> 6) << 3)
            if load_relaxed(word, DEVICE) & bits != bits:
                fetch_or(word, bits, DEVICE)
            first = ((first >> 6) + 1) << 6

    @device
    def add_range(pages, start, stop):
        low = i64(start)
        high = i64(stop)
        if low < 0 or low > high or high > pages.size:
            wrong = high
            if low < 0 or low >= pages.size:
                wrong = low
            latch_index(pages.space, wrong, pages.size)
        elif cached and low < high:
            mark(pages, low, high)

    @device
    def add(pages, index):
        add_range(pages, index, i64(index) + 1)

    return add if name == "add" else add_range
