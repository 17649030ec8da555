"""Sort edges in bounded memory: ``ExternalSort``."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from warpwell.errors import ArgumentError, FormatError
from warpwell.graph.lines import Edges
from warpwell.graph.npy import write_array

Keys = npt.NDArray[Any]

# Keys handed on at a time, and the most that is read of a run at a time: 8 MiB of packed ones.
_BLOCK = 1 << 20
# The least that is worth a read of its own.
_LEAST = 1 << 8
# Runs merged at once; more of them are merged in several passes.
_FAN_IN = 256


class ExternalSort:
    """Sorts edges by source, then destination; edges that exceed the memory are spilled to a temporary file.

    Edges become keys in one buffer. A full buffer is sorted and written to the temporary file as a run; at the end the
    runs are merged a block at a time. Without spilling, the buffer is sorted in place.

    Parameters
    ----------
    folder : path-like
        Folder of the temporary file, which has no name and so cannot be left behind.
    memory_bytes : int
        Approximate memory to use; half of it is the buffer.
    unique : bool, default False
        Yield equal edges only once.

    Attributes
    ----------
    added : int
        Edges added.
    largest : int
        Largest vertex added, -1 before the first.
    spilled_bytes : int
        Bytes written to temporary files; 0 if all fitted in memory.

    Raises
    ------
    StorageFullError
        No space is left in `folder` (at any call).
    """

    def __init__(self, folder: str | Path, memory_bytes: int, *, unique: bool = False) -> None:
        self._folder = Path(folder)
        self._memory = memory_bytes
        self._unique = unique
        self._codec: type[_Packed] | type[_Wide] = _Packed
        self._buffer = self._new_buffer()
        self._fill = 0
        self._file: IO[bytes] | None = None
        self._runs: list[_Run] = []
        self.added = 0
        self.largest = -1
        self.spilled_bytes = 0

    def add(self, sources: npt.NDArray[np.int64], destinations: npt.NDArray[np.int64]) -> None:
        """Add edges: two int64 arrays of one length, vertices in 0 to 2**48 - 1."""
        if not sources.size:
            return
        largest = int(max(sources.max(), destinations.max()))
        if largest > _Packed.LARGEST and self._codec is _Packed:
            self._spill()
            self._codec = _Wide
            self._buffer = self._new_buffer()
        keys = self._codec.pack(sources, destinations)
        start = 0
        while start < keys.size:
            if self._fill == self._buffer.size:
                self._spill()
            part = keys[start : start + self._buffer.size - self._fill]
            self._buffer[self._fill : self._fill + part.size] = part
            self._fill += part.size
            start += part.size
        self.added += keys.size
        self.largest = max(self.largest, largest)

    def blocks(self) -> Iterator[Edges]:
        """Yield all edges in order, in blocks of two int64 arrays of one length. Call it once, at the end."""
        if self._runs:
            self._spill()
            self._buffer = np.empty(0, self._codec.DTYPE)  # its memory goes to the blocks that are merged
            while len(self._runs) > _FAN_IN:
                self._merge_pass()
            keys = self._merge(self._runs)
        else:
            keys = self._sort()
        for block in keys:
            yield self._codec.unpack(block)

    def close(self) -> None:
        """Release the memory and the temporary file."""
        self._buffer = np.empty(0, self._codec.DTYPE)
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "ExternalSort":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_buffer(self) -> Keys:
        # np.empty takes addresses, not memory: that comes when an edge is first written to a place.
        dtype = self._codec.DTYPE
        try:
            return np.empty(max(_LEAST, self._memory // 2 // dtype.itemsize), dtype)
        except (MemoryError, ValueError):
            raise ArgumentError(
                f"memory_bytes is {self._memory}, more than this machine has. Use less: larger graphs are "
                "sorted in parts.",
                name="memory_bytes",
            ) from None

    def _new_file(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self._folder, buffering=0)

    def _sort(self) -> Iterator[Keys]:
        """Sort the buffer and yield it in blocks."""
        keys = self._buffer[: self._fill]
        keys.sort()
        slices = (keys[start : start + _BLOCK] for start in range(0, keys.size, _BLOCK))
        return _distinct(slices) if self._unique else slices

    def _spill(self) -> None:
        """Write the buffer as a run and empty it."""
        if self._fill:
            if self._file is None:
                self._file = self._new_file()
            self._runs.append(self._write_run(self._file, self._sort()))
            self._fill = 0

    def _write_run(self, file: IO[bytes], blocks: Iterable[Keys]) -> "_Run":
        start = file.tell()
        for keys in blocks:
            write_array(file, keys, self._folder)
        size = file.tell() - start
        self.spilled_bytes += size
        return _Run(file, self._codec, start, size // self._codec.DTYPE.itemsize)

    def _merge_pass(self) -> None:
        """Merge the runs in groups, into a new temporary file with fewer and longer ones."""
        old, self._file = self._file, self._new_file()
        groups = (self._runs[start : start + _FAN_IN] for start in range(0, len(self._runs), _FAN_IN))
        self._runs = [self._write_run(self._file, self._merge(group)) for group in groups]
        if old is not None:
            old.close()

    def _merge(self, runs: list["_Run"]) -> Iterator[Keys]:
        merged = self._merged(runs)
        return _distinct(merged) if self._unique else merged

    def _merged(self, runs: list["_Run"]) -> Iterator[Keys]:
        """Yield the keys of sorted runs in order."""
        share = self._memory // 8 // self._codec.DTYPE.itemsize // len(runs)
        count = min(max(share, _LEAST), _BLOCK)
        heads = [np.empty(0, self._codec.DTYPE) for _ in runs]
        while True:
            heads = [
                head if head.size else run.read(count, self._codec)
                for head, run in zip(heads, runs, strict=True)
            ]
            if not any(head.size for head in heads):
                return
            # All keys up to the smallest that ends a head are at hand, so at least that head is used up.
            ends = [head[-1] for head, run in zip(heads, runs, strict=True) if run.left]
            cuts = [head.size for head in heads]
            if ends:
                bound = np.array(ends).min()
                cuts = [int(np.searchsorted(head, bound, "right")) for head in heads]
            keys = np.concatenate([head[:cut] for head, cut in zip(heads, cuts, strict=True)])
            keys.sort()
            yield keys
            heads = [head[cut:] for head, cut in zip(heads, cuts, strict=True)]


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


@dataclass
class _Run:
    """Sorted keys in a temporary file, not all read yet."""

    file: IO[bytes]
    codec: type[_Packed] | type[_Wide]
    offset: int
    left: int

    def read(self, count: int, codec: type[_Packed] | type[_Wide]) -> Keys:
        """Return the next keys, at most `count`, as keys of `codec`."""
        size = min(count, self.left) * self.codec.DTYPE.itemsize
        data = os.pread(self.file.fileno(), size, self.offset)
        if len(data) != size:
            raise FormatError(
                "a temporary file of the sort has become shorter. Check the disk and convert again."
            )
        self.offset += size
        keys = np.frombuffer(data, self.codec.DTYPE)
        self.left -= keys.size
        return keys if codec is self.codec else codec.pack(*self.codec.unpack(keys))


def _distinct(blocks: Iterable[Keys]) -> Iterator[Keys]:
    """Yield sorted keys without repetitions."""
    last = None
    for keys in blocks:
        new = np.empty(keys.size, bool)
        new[0] = last is None or keys[0] != last
        np.not_equal(keys[1:], keys[:-1], out=new[1:])
        last = keys[-1]
        yield keys if new.all() else keys[new]
