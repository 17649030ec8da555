"""Sort edges in bounded memory: ``ExternalSort``."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from warpwell.errors import ArgumentError, FormatError
from warpwell.graph.lines import Edges, WeightedEdges
from warpwell.graph.npy import write_array

Keys = npt.NDArray[Any]
Weights = npt.NDArray[Any]

# Edges handed on at a time, and the most that is read of a run at a time: 8 MiB of packed ones.
_BLOCK = 1 << 20
# The least that is worth a read of its own.
_LEAST = 1 << 8
# Runs merged at once; more of them are merged in several passes.
_FAN_IN = 256


class _Rows(NamedTuple):
    """Keys of edges, and their weights if they have any."""

    keys: Keys
    weights: Weights | None

    def take(self, index: Any) -> "_Rows":
        return _Rows(self.keys[index], None if self.weights is None else self.weights[index])


class ExternalSort:
    """Sorts edges by source, destination and weight; those that exceed the memory are spilled to temporary files.

    Edges become keys in one buffer. A full buffer is sorted and written to the temporary files as a run; at the end the
    runs are merged a block at a time. Without spilling, the buffer is sorted in place.

    Parameters
    ----------
    folder : path-like
        Folder of the temporary files, which have no names and so cannot be left behind.
    memory_bytes : int
        Approximate memory to use; half of it is the buffer, and what sorting it takes.
    unique : bool, default False
        Yield equal edges only once, with the least of their weights.
    weights : {"int32", "float32"}, optional
        The edges have weights of this dtype.

    Attributes
    ----------
    added : int
        Edges added.
    largest : int
        Largest vertex added, -1 before the first.
    spilled_bytes : int
        Bytes written to temporary files; 0 if all fitted in memory.
    weights : numpy.dtype or None
        The dtype of the weights; see `use_floats`.

    Raises
    ------
    StorageFullError
        No space is left in `folder` (at any call).
    """

    def __init__(
        self, folder: str | Path, memory_bytes: int, *, unique: bool = False, weights: npt.DTypeLike | None = None
    ) -> None:
        self._folder = Path(folder)
        self._memory = memory_bytes
        self._unique = unique
        self.weights = None if weights is None else np.dtype(weights)
        self._codec: type[_Packed] | type[_Wide] = _Packed
        self._buffer = self._new_buffer()
        self._fill = 0
        self._files: _Files | None = None
        self._runs: list[_Run] = []
        self.added = 0
        self.largest = -1
        self.spilled_bytes = 0

    def add(
        self,
        sources: npt.NDArray[np.int64],
        destinations: npt.NDArray[np.int64],
        weights: Weights | None = None,
    ) -> None:
        """Add edges: two int64 arrays of one length, vertices in 0 to 2**48 - 1, and their weights, all finite."""
        if not sources.size:
            return
        largest = int(max(sources.max(), destinations.max()))
        if largest > _Packed.LARGEST and self._codec is _Packed:
            self._spill()
            self._codec = _Wide
            self._buffer = self._new_buffer()
        keys = self._codec.pack(sources, destinations)
        room = self._buffer.keys.size
        start = 0
        while start < keys.size:
            if self._fill == room:
                self._spill()
            count = min(keys.size - start, room - self._fill)
            self._buffer.keys[self._fill : self._fill + count] = keys[start : start + count]
            if self._buffer.weights is not None:
                assert weights is not None
                self._buffer.weights[self._fill : self._fill + count] = weights[start : start + count]
            self._fill += count
            start += count
        self.added += keys.size
        self.largest = max(self.largest, largest)

    def use_floats(self) -> None:
        """Make the weights float32 from now on; those added before are converted, too."""
        assert self._buffer.weights is not None
        self.weights = np.dtype(np.float32)
        floats = self._buffer.weights.view(np.float32)
        # As wide as before, and only what was added: the rest of the buffer takes no memory yet.
        floats[: self._fill] = self._buffer.weights[: self._fill].astype(np.float32)
        self._buffer = _Rows(self._buffer.keys, floats)

    def blocks(self) -> Iterator[Edges | WeightedEdges]:
        """Yield all edges in order, in blocks of two int64 arrays of one length, and weights. Call it once."""
        if self._runs:
            self._spill()
            self._release()  # its memory goes to the blocks that are merged
            while len(self._runs) > _FAN_IN:
                self._merge_pass()
            rows = self._merge(self._runs)
        else:
            rows = self._sort()
        for keys, weights in rows:
            edges = self._codec.unpack(keys)
            yield edges if weights is None else (*edges, weights)

    def close(self) -> None:
        """Release the memory and the temporary files."""
        self._release()
        if self._files is not None:
            self._files.close()

    def __enter__(self) -> "ExternalSort":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self) -> None:
        self._buffer = _Rows(np.empty(0, self._codec.DTYPE), None)

    def _new_buffer(self) -> _Rows:
        # np.empty takes addresses, not memory: that comes when an edge is first written to a place.
        dtype, size = self._codec.DTYPE, self._codec.DTYPE.itemsize
        if self.weights is not None:
            size = 2 * (size + self.weights.itemsize) + np.dtype(np.intp).itemsize  # sorted by an index, to a copy
        count = max(_LEAST, self._memory // 2 // size)
        try:
            return _Rows(np.empty(count, dtype), None if self.weights is None else np.empty(count, self.weights))
        except (MemoryError, ValueError):
            raise ArgumentError(
                f"memory_bytes is {self._memory}, more than this machine has. Use less: larger graphs are "
                "sorted in parts.",
                name="memory_bytes",
            ) from None

    def _sort(self) -> Iterator[_Rows]:
        """Sort the buffer and yield it in blocks."""
        rows = _sorted(self._buffer.take(slice(0, self._fill)))
        slices = (rows.take(slice(at, at + _BLOCK)) for at in range(0, rows.keys.size, _BLOCK))
        return _distinct(slices) if self._unique else slices

    def _spill(self) -> None:
        """Write the buffer as a run and empty it."""
        if self._fill:
            if self._files is None:
                self._files = _Files(self._folder, self.weights is not None)
            self._runs.append(self._write_run(self._files, self._sort()))
            self._fill = 0

    def _write_run(self, files: "_Files", blocks: Iterable[_Rows]) -> "_Run":
        start, at = files.keys.tell(), 0 if files.weights is None else files.weights.tell()
        count = 0
        for keys, weights in blocks:
            write_array(files.keys, keys, self._folder)
            self.spilled_bytes += keys.nbytes
            if files.weights is not None and weights is not None:
                write_array(files.weights, weights, self._folder)
                self.spilled_bytes += weights.nbytes
            count += keys.size
        return _Run(files, self._codec, self.weights, start, at, count)

    def _merge_pass(self) -> None:
        """Merge the runs in groups, into new temporary files with fewer and longer ones."""
        old, self._files = self._files, _Files(self._folder, self.weights is not None)
        groups = (self._runs[start : start + _FAN_IN] for start in range(0, len(self._runs), _FAN_IN))
        self._runs = [self._write_run(self._files, self._merge(group)) for group in groups]
        if old is not None:
            old.close()

    def _merge(self, runs: list["_Run"]) -> Iterator[_Rows]:
        merged = self._merged(runs)
        return _distinct(merged) if self._unique else merged

    def _merged(self, runs: list["_Run"]) -> Iterator[_Rows]:
        """Yield the rows of sorted runs in order."""
        size = self._codec.DTYPE.itemsize + (0 if self.weights is None else 3 * self.weights.itemsize)
        count = min(max(self._memory // 8 // size // len(runs), _LEAST), _BLOCK)
        heads = [run.read(count, self._codec, self.weights) for run in runs]
        while any(head.keys.size for head in heads):
            # All rows up to the smallest that ends a head are at hand, so at least that head is used up.
            ends = [head.take(slice(-1, None)) for head, run in zip(heads, runs, strict=True) if run.left]
            cuts = [head.keys.size for head in heads]
            if ends:
                bound = _sorted(_joined(ends)).take(slice(0, 1))
                cuts = [_rows_up_to(head, bound) for head in heads]
            yield _sorted(_joined([head.take(slice(0, cut)) for head, cut in zip(heads, cuts, strict=True)]))
            heads = [
                head.take(slice(cut, None)) if cut < head.keys.size else run.read(count, self._codec, self.weights)
                for head, cut, run in zip(heads, cuts, runs, strict=True)
            ]


def _joined(parts: list[_Rows]) -> _Rows:
    weights = [part.weights for part in parts if part.weights is not None]
    return _Rows(np.concatenate([part.keys for part in parts]), np.concatenate(weights) if weights else None)


def _sorted(rows: _Rows) -> _Rows:
    """Sort rows by key, then weight; in place if they have no weights."""
    if rows.weights is None:
        rows.keys.sort()
        return rows
    rows = rows.take(np.argsort(rows.keys))
    keys, weights = rows
    assert weights is not None
    tied = np.zeros(keys.size + 1, bool)
    np.equal(keys[1:], keys[:-1], out=tied[1:-1])
    if tied.any():
        # Few keys are equal: only these are sorted once more.
        places = np.flatnonzero(tied[1:] | tied[:-1])
        some = weights[places]
        weights[places] = some[np.lexsort((some, keys[places]))]
    return rows


def _rows_up_to(rows: _Rows, bound: _Rows) -> int:
    """Return how many sorted rows are not after the row `bound`."""
    end = int(np.searchsorted(rows.keys, bound.keys[0], "right"))
    if rows.weights is None or bound.weights is None:
        return end
    first = int(np.searchsorted(rows.keys, bound.keys[0], "left"))
    return first + int(np.searchsorted(rows.weights[first:end], bound.weights[0], "right"))


class _Packed:
    """Keys of edges between vertices below 2**31: one 64-bit integer."""

    DTYPE: np.dtype[Any] = np.dtype(np.int64)
    LARGEST = (1 << 31) - 1

    @staticmethod
    def pack(sources: npt.NDArray[np.int64], destinations: npt.NDArray[np.int64]) -> Keys:
        keys = sources << 31
        keys |= destinations
        return keys

    @staticmethod
    def unpack(keys: Keys) -> Edges:
        return keys >> 31, keys & _Packed.LARGEST


class _Wide:
    """Keys of any edges: complex numbers, exact below 2**53, ordered by real, then imaginary part."""

    DTYPE: np.dtype[Any] = np.dtype(np.complex128)

    @staticmethod
    def pack(sources: npt.NDArray[np.int64], destinations: npt.NDArray[np.int64]) -> Keys:
        keys = np.empty(sources.size, np.complex128)
        keys.real = sources
        keys.imag = destinations
        return keys

    @staticmethod
    def unpack(keys: Keys) -> Edges:
        return keys.real.astype(np.int64), keys.imag.astype(np.int64)


class _Files:
    """Temporary files of runs: keys, and weights if there are any."""

    def __init__(self, folder: Path, weighted: bool) -> None:
        self.keys: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)
        self.weights: IO[bytes] | None = None
        if weighted:
            try:
                self.weights = tempfile.TemporaryFile(dir=folder, buffering=0)
            except BaseException:
                self.keys.close()
                raise

    def close(self) -> None:
        self.keys.close()
        if self.weights is not None:
            self.weights.close()


@dataclass
class _Run:
    """Sorted rows in temporary files, not all read yet."""

    files: _Files
    codec: type[_Packed] | type[_Wide]
    dtype: np.dtype[Any] | None
    offset: int
    weights_offset: int
    left: int

    def read(self, count: int, codec: type[_Packed] | type[_Wide], dtype: np.dtype[Any] | None) -> _Rows:
        """Return the next rows, at most `count`, with keys of `codec` and weights of `dtype`."""
        count = min(count, self.left)
        self.left -= count
        keys = _read(self.files.keys, count, self.codec.DTYPE, self.offset)
        self.offset += keys.nbytes
        keys = keys if codec is self.codec else codec.pack(*self.codec.unpack(keys))
        if self.files.weights is None or self.dtype is None or dtype is None:
            return _Rows(keys, None)
        weights = _read(self.files.weights, count, self.dtype, self.weights_offset)
        self.weights_offset += weights.nbytes
        return _Rows(keys, weights.astype(dtype, copy=False))


def _read(file: IO[bytes], count: int, dtype: np.dtype[Any], offset: int) -> npt.NDArray[Any]:
    items = np.empty(count, dtype)
    rest = memoryview(items.view(np.uint8).data)
    while rest:
        done = os.preadv(file.fileno(), [rest], offset)
        if not done:
            raise FormatError("a temporary file of the sort has become shorter. Check the disk and convert again.")
        rest, offset = rest[done:], offset + done
    return items


def _distinct(blocks: Iterable[_Rows]) -> Iterator[_Rows]:
    """Yield the first row of each key, which has the least weight."""
    last = None
    for rows in blocks:
        keys = rows.keys
        new = np.empty(keys.size, bool)
        new[0] = last is None or keys[0] != last
        np.not_equal(keys[1:], keys[:-1], out=new[1:])
        last = keys[-1]
        if new.all():
            yield rows
        elif new.any():
            yield rows.take(new)
