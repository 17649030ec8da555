"""Sort edges in bounded memory: `ExternalSort`."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, FormatError

Vertices = npt.NDArray[np.int64]
Weights = npt.NDArray[Any]
Edges = tuple[Vertices, Vertices] | tuple[Vertices, Vertices, Weights]
Rows = npt.NDArray[Any]
"""Edges as records: the field `key` is source and destination, the field `weight` exists if the edges have weights."""

VERTEX_LIMIT = 1 << 48
"""Largest number of vertices: a vertex is exact in a float64, see `_Wide`."""
_BLOCK = 1 << 20
"""Maximum number of edges that are returned or read at a time: 8 MiB of packed keys."""
_MIN_READ = 1 << 8
"""Minimum number of edges that are read from a run at a time."""
_FAN_IN = 256
"""Runs that are merged at once; more of them are merged in several passes."""


class _Packed:
    """Keys of edges between vertices below 2**31: one 64-bit integer."""

    DTYPE: np.dtype[Any] = np.dtype(np.int64)
    LARGEST = (1 << 31) - 1

    @staticmethod
    def pack(sources: Vertices, destinations: Vertices) -> Rows:
        return sources << 31 | destinations

    @staticmethod
    def unpack(keys: Rows) -> tuple[Vertices, Vertices]:
        return keys >> 31, keys & _Packed.LARGEST


class _Wide:
    """Keys of any edges: complex numbers, exact below 2**53, ordered by real, then imaginary part."""

    DTYPE: np.dtype[Any] = np.dtype(np.complex128)

    @staticmethod
    def pack(sources: Vertices, destinations: Vertices) -> Rows:
        keys = np.empty(sources.size, np.complex128)
        keys.real = sources
        keys.imag = destinations
        return keys

    @staticmethod
    def unpack(keys: Rows) -> tuple[Vertices, Vertices]:
        return keys.real.astype(np.int64), keys.imag.astype(np.int64)


_Codec = type[_Packed] | type[_Wide]


@dataclass(frozen=True)
class _Format:
    """The format of rows: how their keys are packed, and the dtype of their weights."""

    codec: _Codec = _Packed
    weights: np.dtype[Any] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        fields = [("key", self.codec.DTYPE)]
        return np.dtype(fields if self.weights is None else [*fields, ("weight", self.weights)])

    def convert(self, rows: Rows, old: "_Format") -> Rows:
        """Return rows of an older format in this one."""
        if old == self:
            return rows
        converted = np.empty(rows.size, self.dtype)
        keys = rows["key"]
        converted["key"] = keys if old.codec is self.codec else self.codec.pack(*old.codec.unpack(keys))
        if self.weights is not None:
            converted["weight"] = rows["weight"]
        return converted


class ExternalSort:
    """Sorts edges by source, destination and weight; those that exceed the memory are spilled to a temporary file.

    Edges become rows in one buffer. A full buffer is sorted and written to the temporary file as a run; at the end the
    runs are merged a block at a time. Without spilling, the buffer is sorted in place.

    Parameters
    ----------
    folder : path-like
        Folder of the temporary file, which has no name and so cannot be left behind.
    memory_bytes : int
        Approximate memory to use; half of it is the buffer, including the memory for sorting it.
    unique : bool, default False
        Yield equal edges only once, with the smallest of their weights.
    weights : {"int32", "float32"}, optional
        Dtype of the weights, if the edges have any.

    Attributes
    ----------
    added : int
        Edges added.
    largest : int
        Largest vertex added, -1 before the first.
    spilled_bytes : int
        Bytes written to temporary files; 0 if all edges fit in memory.
    """

    def __init__(
        self, folder: str | Path, memory_bytes: int, *, unique: bool = False, weights: npt.DTypeLike | None = None
    ) -> None:
        self._folder = Path(folder)
        self._memory = memory_bytes
        self._unique = unique
        self._file: IO[bytes] | None = None
        self._runs: list[_Run] = []
        self._buffer: Rows
        self._fill = 0
        self.added = 0
        self.largest = -1
        self.spilled_bytes = 0
        self._start_buffer(_Format(_Packed, None if weights is None else np.dtype(weights)))

    @property
    def weights(self) -> np.dtype[Any] | None:
        """The dtype of the weights; see `use_floats`."""
        return self._format.weights

    def add(self, sources: Vertices, destinations: Vertices, weights: Weights | None = None) -> None:
        """Add edges: two int64 arrays of equal length, vertices in 0 to 2**48 - 1, and their weights, all finite."""
        if not sources.size:
            return
        largest = int(max(sources.max(), destinations.max()))
        if largest > _Packed.LARGEST and self._format.codec is _Packed:
            self._start_buffer(replace(self._format, codec=_Wide))
        keys = self._format.codec.pack(sources, destinations)
        start = 0
        while start < keys.size:
            if self._fill == self._buffer.size:
                self._spill()
            count = min(keys.size - start, self._buffer.size - self._fill)
            rows = self._buffer[self._fill : self._fill + count]
            rows["key"] = keys[start : start + count]
            if weights is not None:
                rows["weight"] = weights[start : start + count]
            self._fill += count
            start += count
        self.added += keys.size
        self.largest = max(self.largest, largest)

    def use_floats(self) -> None:
        """Change the dtype of the weights to float32, also of those added before."""
        self._start_buffer(replace(self._format, weights=np.dtype(np.float32)))

    def blocks(self) -> Iterator[Edges]:
        """Yield all edges in order, in blocks of two int64 arrays of equal length, and weights. Call it once."""
        if self._runs:
            self._spill()
            self._buffer = self._buffer[:0].copy()  # Its memory is used for the blocks that are merged.
            while len(self._runs) > _FAN_IN:
                self._merge_pass()
            blocks = self._merge(self._runs)
        else:
            blocks = self._sorted_buffer()
        for rows in blocks:
            edges = self._format.codec.unpack(rows["key"])
            yield edges if self.weights is None else (*edges, rows["weight"])

    def close(self) -> None:
        """Release the memory and the temporary file."""
        self._buffer = self._buffer[:0].copy()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "ExternalSort":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_buffer(self, row_format: _Format) -> None:
        """Continue with a buffer of another format."""
        self._spill()
        self._format = row_format
        size = row_format.dtype.itemsize
        if row_format.weights is not None:
            # sorted by an index of a copy of the keys, to another buffer
            size = 2 * size + row_format.codec.DTYPE.itemsize + np.dtype(np.intp).itemsize
        try:
            # np.empty reserves addresses; memory is used once an edge is first written to a place.
            self._buffer = np.empty(max(_MIN_READ, self._memory // 2 // size), row_format.dtype)
        except (MemoryError, ValueError):
            raise ArgumentError(
                f"memory_bytes is {self._memory}, more than this machine has. Use less: larger graphs are "
                "sorted in parts.",
                name="memory_bytes",
            ) from None

    def _sorted_buffer(self) -> Iterator[Rows]:
        """Sort the buffer and yield it in blocks."""
        rows = _sorted(self._buffer[: self._fill])
        blocks = (rows[start : start + _BLOCK] for start in range(0, rows.size, _BLOCK))
        return _distinct(blocks) if self._unique else blocks

    def _spill(self) -> None:
        """Write the buffer as a run and empty it."""
        if self._fill:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)
            self._runs.append(self._write_run(self._file, self._sorted_buffer()))
            self._fill = 0

    def _write_run(self, file: IO[bytes], blocks: Iterable[Rows]) -> "_Run":
        start = file.tell()
        for rows in blocks:
            file.write(np.ascontiguousarray(rows).view(np.uint8).data)
        file.flush()
        nbytes = file.tell() - start
        self.spilled_bytes += nbytes
        return _Run(file, self._format, start, nbytes // self._format.dtype.itemsize)

    def _merge_pass(self) -> None:
        """Merge the runs in groups, into a new temporary file with fewer and longer ones."""
        old, self._file = self._file, tempfile.TemporaryFile(dir=self._folder)
        groups = (self._runs[start : start + _FAN_IN] for start in range(0, len(self._runs), _FAN_IN))
        self._runs = [self._write_run(self._file, self._merge(group)) for group in groups]
        if old is not None:
            old.close()

    def _merge(self, runs: list["_Run"]) -> Iterator[Rows]:
        merged = self._merged(runs)
        return _distinct(merged) if self._unique else merged

    def _merged(self, runs: list["_Run"]) -> Iterator[Rows]:
        """Yield the rows of sorted runs in order."""
        size = self._format.dtype.itemsize + (0 if self.weights is None else 2 * self.weights.itemsize)
        count = min(max(self._memory // 8 // size // len(runs), _MIN_READ), _BLOCK)
        heads = [run.read(count, self._format) for run in runs]
        while any(head.size for head in heads):
            # All rows up to the smallest that ends a head are in memory, so at least that head is used up.
            ends = [head[-1:] for head, run in zip(heads, runs, strict=True) if run.left]
            cuts = [head.size for head in heads]
            if ends:
                bound = _sorted(np.concatenate(ends))[0]
                cuts = [_rows_up_to(head, bound) for head in heads]
            yield _sorted(np.concatenate([head[:cut] for head, cut in zip(heads, cuts, strict=True)]))
            heads = [
                head[cut:] if cut < head.size else run.read(count, self._format)
                for head, cut, run in zip(heads, cuts, runs, strict=True)
            ]


def _sorted(rows: Rows) -> Rows:
    """Sort rows by key, then weight; in place if they have no weights."""
    if "weight" not in rows.dtype.fields:  # type: ignore[operator]
        rows["key"].sort()
        return rows
    rows = rows[np.argsort(rows["key"])]
    keys = rows["key"]
    tied = np.zeros(keys.size + 1, bool)
    np.equal(keys[1:], keys[:-1], out=tied[1:-1])
    if tied.any():
        # Few keys are equal: only their rows are sorted again.
        positions = np.flatnonzero(tied[1:] | tied[:-1])
        tied_rows = rows[positions]
        rows[positions] = tied_rows[np.lexsort((tied_rows["weight"], tied_rows["key"]))]
    return rows


def _rows_up_to(rows: Rows, bound: Any) -> int:
    """Return the number of sorted rows up to and including the row `bound`."""
    keys = np.ascontiguousarray(rows["key"])
    end = int(np.searchsorted(keys, bound["key"], "right"))
    if "weight" not in rows.dtype.fields:  # type: ignore[operator]
        return end
    first = int(np.searchsorted(keys[:end], bound["key"], "left"))
    return first + int(np.searchsorted(rows["weight"][first:end], bound["weight"], "right"))


def _distinct(blocks: Iterable[Rows]) -> Iterator[Rows]:
    """Yield the first row of each key, which has the smallest weight."""
    last = None
    for rows in blocks:
        keys = rows["key"]
        new = np.empty(keys.size, bool)
        new[0] = last is None or keys[0] != last
        np.not_equal(keys[1:], keys[:-1], out=new[1:])
        last = keys[-1]
        if new.any():
            yield rows if new.all() else rows[new]


@dataclass
class _Run:
    """Sorted rows in a temporary file; `left` of them have not been read yet."""

    file: IO[bytes]
    format: _Format
    offset: int
    left: int

    def read(self, count: int, row_format: _Format) -> Rows:
        """Return the next rows, at most `count`, in a format."""
        rows = np.empty(min(count, self.left), self.format.dtype)
        self.left -= rows.size
        unread = memoryview(rows.view(np.uint8).data)
        while unread:
            done = os.preadv(self.file.fileno(), [unread], self.offset)
            if not done:
                raise FormatError("a temporary file of the sort has become shorter. Check the disk and convert again.")
            unread, self.offset = unread[done:], self.offset + done
        return row_format.convert(rows, self.format)
