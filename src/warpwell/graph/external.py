"""Sort edges in bounded memory: `ExternalSort`."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError

Vertices = npt.NDArray[np.int64]
Weights = npt.NDArray[Any]
Edges = tuple[Vertices, Vertices] | tuple[Vertices, Vertices, Weights]
Keys = npt.NDArray[Any]

VERTEX_LIMIT = 1 << 32
"""Largest number of vertices: a key has 32 bits for each end of an edge."""
_BLOCK = 1 << 20
"""Maximum number of edges that are returned at a time: 8 MiB of keys without weights."""
_SAMPLES = 1 << 10
"""Keys of a full buffer that are sampled when it is spilled."""


class ExternalSort(contextlib.AbstractContextManager["ExternalSort"]):
    """Sorts edges by source, destination and weight; those that exceed the memory are spilled to a temporary file.

    Edges become keys in a buffer. A full buffer is sorted and written to the temporary file as a run. Sampled keys then
    divide the runs into parts that fit into the buffer, and each part is sorted again. Without spilling, the buffer is
    sorted in place.

    Parameters
    ----------
    folder : path-like
        Folder of the temporary file, which has no name and so cannot be left behind.
    memory_bytes : int
        Approximate memory to use; half of it is the buffer.
    unique : bool, default False
        Yield equal edges only once, with the smallest of their weights.

    Attributes
    ----------
    added : int
        Edges added.
    largest : int
        Largest vertex added, -1 before the first.
    weights : {"int32", "float32"} or None
        Dtype of the weights: float32 if any chunk has float32 weights.
    """

    def __init__(self, folder: str | Path, memory_bytes: int, *, unique: bool = False) -> None:
        self._folder, self._memory, self._unique = Path(folder), memory_bytes, unique
        self._buffer: Keys = np.empty(0, np.uint64)
        self._fill = 0
        self._runs: list[Keys] = []
        self._file: IO[bytes] | None = None
        self.added, self.largest = 0, -1
        self.weights: str | None = None

    def add(self, sources: Vertices, destinations: Vertices, weights: Weights | None = None) -> None:
        """Add edges: int64 arrays of vertices below `VERTEX_LIMIT`, and finite weights of int32 or float32, or none.

        Raises
        ------
        ArgumentError
            Some edges have weights and some do not.
        """
        if not sources.size:
            return
        dtype = None if weights is None else str(weights.dtype)
        if not self.added:
            self.weights = dtype
            dtype_of_keys = np.dtype(np.uint64 if weights is None else np.complex128)
            steps = max(1, self._memory // 2 // dtype_of_keys.itemsize // _SAMPLES)
            # np.empty reserves addresses; the system allocates a page when a key is first written to it.
            self._buffer = np.empty(steps * _SAMPLES, dtype_of_keys)
        elif (dtype is None) != (self.weights is None):
            advice = "pass weights with every chunk or with none"
            raise ArgumentError(f"some chunks of edges have weights and some do not; {advice}", name="edges")
        elif dtype == "float32":
            self.weights = dtype
        keys = _pack(sources, destinations, weights)
        self.added += keys.size
        self.largest = max(self.largest, int(sources.max()), int(destinations.max()))
        while keys.size:
            if self._fill == self._buffer.size:
                self._spill()
            part = keys[: self._buffer.size - self._fill]
            self._buffer[self._fill : self._fill + part.size] = part
            self._fill += part.size
            keys = keys[part.size :]

    def blocks(self) -> Iterator[Edges]:
        """Yield all edges in order, in blocks of two int64 arrays of equal length, and weights.

        Can be called several times, but only after the last edge was added.
        """
        last = None
        for keys in self._parts():
            for start in range(0, keys.size, _BLOCK):
                columns = _unpack(keys[start : start + _BLOCK], self.weights)
                if self._unique:
                    pairs = columns[0] << 32 | columns[1]
                    is_new = np.append(pairs[0] != last, pairs[1:] != pairs[:-1])
                    last = pairs[-1]
                    columns = tuple(column[is_new] for column in columns)
                if columns[0].size:
                    yield columns  # type: ignore[misc]

    def close(self) -> None:
        """Release the memory and the temporary file."""
        self._buffer, self._runs = self._buffer[:0].copy(), []
        if self._file is not None:
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spill(self) -> None:
        """Write the buffer as a run and empty it."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)
        keys, start = self._buffer[: self._fill], self._file.tell()
        keys.sort()
        self._file.write(keys.view(np.uint8).data)
        self._file.flush()
        self._runs.append(np.memmap(self._file, keys.dtype, "r", start, keys.shape))
        self._fill = 0

    def _parts(self) -> Iterator[Keys]:
        """Yield all keys in order, in parts that fit into the buffer."""
        if self._fill and self._runs:
            self._spill()
            self._buffer = self._buffer[:0].copy()  # Free the buffer, because the parts need its memory.
        elif self._fill:
            self._buffer[: self._fill].sort()
            self._runs, self._fill = [self._buffer[: self._fill]], 0
        runs = self._runs
        if len(runs) < 2:
            yield from runs
            return
        # All runs but the last are full buffers, so the number of a sample gives its run and its position there. Equal
        # keys are in the order of the runs: a sample cuts each run at one position, and no part exceeds the buffer.
        step = runs[0].size // _SAMPLES
        samples = np.concatenate([run[::step] for run in runs])
        width = max(_SAMPLES - len(runs), _SAMPLES // 2)
        starts = [0] * len(runs)
        for sample in [*np.argsort(samples, kind="stable")[width::width], None]:
            ends = [run.size for run in runs]
            if sample is not None:
                origin, key = sample // _SAMPLES, samples[sample]
                ends = [int(np.searchsorted(run, key, "right" if i < origin else "left")) for i, run in enumerate(runs)]
                ends[origin] = sample % _SAMPLES * step
            part = np.concatenate([run[start:end] for run, start, end in zip(runs, starts, ends, strict=True)])
            part.sort(kind="stable")  # Timsort merges sorted runs, several times as fast as the default sorts them.
            yield part
            starts = ends


def _pack(sources: Vertices, destinations: Vertices, weights: Weights | None) -> Keys:
    """Return a number for each edge, in the order of source, destination and weight.

    Without weights it has 32 bits for each end. With weights it is complex, and NumPy orders complex numbers by their
    real, then their imaginary parts: exact integers of 53 bits, for source and upper bits of the destination, and for
    its lower 11 bits and the weight.
    """
    if weights is None:
        return (sources << 32 | destinations).view(np.uint64)
    keys = np.empty(sources.size, np.complex128)
    keys.real = sources << 21 | destinations >> 11
    # Any int32 or float32 is exact in the upper 43 bits of a float64.
    bits = weights.astype(np.float64).view(np.int64) >> 21
    keys.imag = ((destinations & 2047) - 1024 << 43) + (_reorder(bits) + (1 << 42))
    return keys


def _unpack(keys: Keys, weights: str | None) -> tuple[npt.NDArray[Any], ...]:
    """Return sources and destinations, and weights of a dtype if the keys have any."""
    if weights is None:
        return (keys >> 32).view(np.int64), (keys & 0xFFFFFFFF).view(np.int64)
    upper, lower = keys.real.astype(np.int64), keys.imag.astype(np.int64)
    bits = _reorder((lower & (1 << 43) - 1) - (1 << 42))
    values = (bits << 21).view(np.float64).astype(weights)
    return upper >> 21, (upper & (1 << 21) - 1) << 11 | (lower >> 43) + 1024, values


def _reorder(bits: Vertices) -> Vertices:
    """Return the bits of floats as integers in the order of the floats, and the reverse."""
    return bits ^ (bits >> 63 & (1 << 42) - 1)
