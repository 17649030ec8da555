"""Sparse matrices that SciPy saved: ``SparseNpz``."""

import contextlib
import zipfile
from collections.abc import Generator, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpwell.array import NpzMember
from warpwell.errors import FormatError, MissingFileError
from warpwell.graph.edge_list import VERTEX_LIMIT, matrix_vertices
from warpwell.graph.lines import Edges, WeightedEdges

_CHUNK = 1 << 17


class SparseNpz:
    """Reads the CSR, CSC or COO matrix of a file of ``scipy.sparse.save_npz`` as edges from row to column.

    Indices are streamed; the pointers of a CSR or CSC matrix are held in memory. A stored zero is an edge too. SciPy is
    not needed, and saves values with every matrix: they are weights, unless all are 1.

    Parameters
    ----------
    path : path-like
        The ``.npz`` file.
    vertices : int, optional
        Vertices of the graph. Required for a matrix that is not square: at least its larger side.
    weights : {"int32", "float32"} or False, optional
        The dtype for which all values are weights, also those that are 1; False skips them.

    Raises
    ------
    MissingFileError
        No such file.
    FormatError
        Not a sparse matrix of SciPy's, a format other than these, or (while iterating) contents that do not
        fit together.
    """

    symmetric = False
    note = ""

    def __init__(self, path: str | Path, vertices: int | None = None, *, weights: str | bool | None = None) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise MissingFileError(
                f"{self.path}: no such file. Check the path; the working folder is {Path.cwd()}.",
                path=self.path,
            )
        self.size = self.path.stat().st_size
        self._done = 0
        with self._zip() as archive:
            names = set(archive.namelist())
            if not {"format.npy", "shape.npy"} <= names:
                raise FormatError(
                    f"{self.path} holds {', '.join(sorted(names)) or 'nothing'}, not a sparse matrix. "
                    "Write one with scipy.sparse.save_npz.",
                    path=self.path,
                )
            kind = self._array(archive, "format").item()
            self._kind = kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
            shape = self._array(archive, "shape")
        if self._kind not in ("csr", "csc", "coo"):
            raise FormatError(
                f"{self.path} holds a matrix in the format {self._kind!r}. "
                "Save it as CSR: scipy.sparse.save_npz(path, matrix.tocsr()).",
                path=self.path,
            )
        if shape.shape != (2,) or shape.dtype.kind not in "iu" or not 0 <= shape.min() <= shape.max() <= VERTEX_LIMIT:
            raise FormatError(
                f"{self.path} has the shape {shape.tolist()}. A graph needs two sides of at most 2**48.",
                path=self.path,
            )
        self._rows, self._columns = (int(side) for side in shape)
        self.vertices: int | None = matrix_vertices(self.path, self._rows, self._columns, vertices)
        self.weighted = weights is not False and self._has_weights(weights)

    def _has_weights(self, weights: str | bool | None) -> bool:
        """Look whether the values are weights: up to the first that is not 1."""
        with self._zip() as archive:
            if "data.npy" not in archive.namelist():
                return False
            with contextlib.closing(self._member(archive, "data")) as member:
                kind = member.dtype.kind
            if kind not in "biuf":
                self.note = f"{self.path.name} has values of {member.dtype}; the graph keeps the edges without weights"
                return False
            if weights is not None:
                return True
            with contextlib.closing(self._stream(archive, "data", "biuf")) as stream:
                return any((values != 1).any() for values in stream)

    def __iter__(self) -> Iterator[Edges | WeightedEdges]:
        """Yield chunks of edges: two int64 arrays of one length, sources and destinations, and weights if any."""
        self._done = 0
        with self._zip() as archive, contextlib.ExitStack() as stack:
            chunks = self._coo(archive) if self._kind == "coo" else self._compressed(archive)
            values: Iterator[npt.NDArray[Any]] = iter(())
            if self.weighted:
                values = stack.enter_context(contextlib.closing(self._stream(archive, "data", "biuf")))
            for rows, columns in chunks:
                self._check(rows, self._rows)
                self._check(columns, self._columns)
                weights = next(values, None)
                if (weights is None) == self.weighted or (weights is not None and weights.size != rows.size):
                    raise self._misfit()
                yield (rows, columns) if weights is None else (rows, columns, weights)
            if next(values, None) is not None:
                raise self._misfit()

    def close(self) -> None:
        """Do nothing: the file is open only while it is read."""

    def position(self) -> int:
        """Return approximately how many of the `size` bytes have been read, for progress bars."""
        return self._done

    def _compressed(self, archive: zipfile.ZipFile) -> Iterator[Edges]:
        """Yield the entries of a CSR matrix by rows, or those of a CSC matrix by columns."""
        pointers = self._array(archive, "indptr").astype(np.int64)
        length = (self._rows if self._kind == "csr" else self._columns) + 1
        if pointers.shape != (length,) or pointers[0] != 0 or (pointers[1:] < pointers[:-1]).any():
            raise self._misfit()
        start = 0
        for minor in self._stream(archive, "indices"):
            stop = start + minor.size
            if stop > pointers[-1]:
                raise self._misfit()
            first, last = np.searchsorted(pointers, (start, stop - 1), "right") - 1
            ends = np.clip(pointers[first : last + 2], start, stop)
            major = np.repeat(np.arange(first, last + 1), ends[1:] - ends[:-1])
            yield (major, minor) if self._kind == "csr" else (minor, major)
            start = stop
        if start != pointers[-1]:
            raise self._misfit()

    def _coo(self, archive: zipfile.ZipFile) -> Iterator[Edges]:
        rows, columns = (self._stream(archive, name) for name in ("row", "col"))
        for pair in zip_longest(rows, columns):
            if pair[0] is None or pair[1] is None or pair[0].size != pair[1].size:
                raise self._misfit()
            yield pair

    def _zip(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except zipfile.BadZipFile as error:
            raise FormatError(
                f"{self.path} is not an .npz file or was not copied whole ({error}).", path=self.path
            ) from error

    def _member(self, archive: zipfile.ZipFile, name: str) -> NpzMember:
        if f"{name}.npy" not in archive.namelist():
            raise self._misfit()
        member = NpzMember(archive, name, self.path)
        if member.dtype.hasobject:
            raise FormatError(f"{member.where} holds Python objects. Write numbers in C order with numpy.save.")
        return member

    def _array(self, archive: zipfile.ZipFile, name: str) -> npt.NDArray[np.generic]:
        with contextlib.closing(self._member(archive, name)) as member:
            whole = member.read(member.shape[0] if member.shape else 1)
            member.finish()
        return whole.reshape(member.shape)

    def _stream(self, archive: zipfile.ZipFile, name: str, kinds: str = "iu") -> Generator[npt.NDArray[Any]]:
        """Yield the items of an array: int64, if they are indices."""
        member = self._member(archive, name)
        if len(member.shape) != 1 or member.dtype.kind not in kinds:
            raise self._misfit()
        packed = archive.getinfo(f"{name}.npy").compress_size
        with contextlib.closing(member):
            for start in range(0, member.shape[0], _CHUNK):
                count = min(_CHUNK, member.shape[0] - start)
                items = member.read(count)
                self._done = min(self.size, self._done + packed * count // member.shape[0])
                yield items.astype(np.int64) if kinds == "iu" else items
            member.finish()

    def _check(self, indices: npt.NDArray[np.int64], limit: int) -> None:
        if indices.size and not (0 <= indices.min() and indices.max() < limit):
            raise FormatError(
                f"{self.path}: an index is outside the matrix of {self._rows} x {self._columns}. "
                "Check the matrix (csr_array.check_format) and save it again.",
                path=self.path,
            )

    def _misfit(self) -> FormatError:
        return FormatError(f"{self.path}: its arrays do not fit together. Save the matrix again.", path=self.path)
