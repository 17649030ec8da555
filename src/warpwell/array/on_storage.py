"""Host side of every array on storage: shape, iteration, and operators.

A whole array refuses operators and says what to write instead, since it may be larger than memory. A range of its rows
reads them (`ReadOnUse`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

ITERATION_BYTES = 1 << 20
"""Bytes of rows that iteration reads at a time."""


class OnStorage:
    """Base of `Array` and `RemoteArray`: items stay on storage until the host subscripts the array.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    name : str
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of items."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the items."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Yield row by row as NumPy arrays, or items of one dimension; reads about a MiB of rows at a time."""
        if not self.shape:
            raise TypeError(f"array {self.name!r} has no dimensions, so there is nothing to iterate over: read a[()]")
        return self._rows()

    def _rows(self) -> Iterator[Any]:
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, ITERATION_BYTES // max(row, 1))
        for start in range(0, self.shape[0], step):
            yield from np.asarray(self[start : start + step])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the whole array as a NumPy array (reads all of it).

        Raises
        ------
        ValueError
            ``copy=False``: items on storage can only be copied.
        """
        if copy is False:
            raise ValueError(
                f"items of array {self.name!r} are on storage, so NumPy gets a copy of them: leave copy=False out"
            )
        out = np.asarray(self[:] if self.shape else self[()])
        return out if dtype is None else out.astype(dtype)

    # -- what NumPy arrays do and these do not ------------------------------------------------------------------

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Compare by identity with other arrays, as collections need; to compare items, read them first."""
        if other is None or isinstance(other, OnStorage):
            return self is other
        self._refuse(f"a[:] == {other!r:.20}")

    def __ne__(self, other: object) -> bool:
        if other is None or isinstance(other, OnStorage):
            return self is not other
        self._refuse(f"a[:] != {other!r:.20}")

    def __contains__(self, value: object) -> bool:
        self._refuse(f"{value!r:.20} in a[:]")

    def _refuse(self, instead: str) -> NoReturn:
        raise TypeError(
            f"items of array {self.name!r} are on storage: read them first, {instead}, or use a kernel if they are many"
        )

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"array {self.name!r} is an open file and cannot be copied: np.array(a) reads its items, reshape() "
            f"and field() share them, and another open() has a cache of its own"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"array {self.name!r} is an open file and cannot be pickled: send its path, and open it again there"
        )


def _operator(name: str, instead: str) -> Callable[..., Any]:
    def refuse(self: OnStorage, *other: object) -> NoReturn:
        self._refuse(instead.format(*(f"{o!r:.20}" for o in other[:1])))

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


_BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "matmul": "@",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "lshift": "<<",
    "rshift": ">>",
    "and": "&",
    "or": "|",
    "xor": "^",
}
_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {"neg": "-", "pos": "+", "invert": "~"}

for _name, _sign in {**_BINARY, **_ORDER}.items():
    setattr(OnStorage, f"__{_name}__", _operator(f"__{_name}__", f"a[:] {_sign} {{}}"))
for _name, _sign in _BINARY.items():
    setattr(OnStorage, f"__r{_name}__", _operator(f"__r{_name}__", f"{{}} {_sign} a[:]"))
for _name, _sign in _UNARY.items():
    setattr(OnStorage, f"__{_name}__", _operator(f"__{_name}__", f"{_sign}a[:]"))
OnStorage.__abs__ = _operator("__abs__", "abs(a[:])")  # type: ignore[attr-defined]


# -- ranges of rows: who writes a[lo:hi] has said how much to read ----------------------------------------------------

READING = (
    "all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "clip", "compress", "conj", "copy",
    "cumprod", "cumsum", "diagonal", "dot", "flatten", "item", "max", "mean", "min", "nonzero", "prod", "ravel",
    "repeat", "round", "searchsorted",
    "squeeze", "std", "sum", "swapaxes", "take", "tobytes", "tofile", "tolist", "trace", "transpose",
    "var",
)  # fmt: skip
"""Methods of a NumPy array that change nothing. Those that change it in place are missing: they would change a copy."""


class ReadOnUse(OnStorage):
    """Base of views of rows: each operator and method reads the rows anew and hands them to NumPy."""

    __hash__ = object.__hash__

    def __copy__(self) -> NDArray[Any]:  # type: ignore[override]
        return np.array(self)

    def __deepcopy__(self, memo: Any) -> NDArray[Any]:  # type: ignore[override]
        return np.array(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)

    @property
    def T(self) -> NDArray[Any]:
        """The rows, read and transposed."""
        return np.asarray(self).T

    @property
    def real(self) -> NDArray[Any]:
        """The real parts, read."""
        return np.asarray(self).real

    @property
    def imag(self) -> NDArray[Any]:
        """The imaginary parts, read."""
        return np.asarray(self).imag


def _read(value: Any) -> Any:
    """Return an operand as NumPy takes it; an array that is not a view of rows refuses."""
    if isinstance(value, ReadOnUse):
        return np.asarray(value)
    if isinstance(value, OnStorage):
        value._refuse("a[:]")
    return value


def _reading_method(name: str) -> Callable[..., Any]:
    def read(self: ReadOnUse, *args: Any, **options: Any) -> Any:
        return getattr(np.asarray(self), name)(*map(_read, args), **options)

    read.__name__ = read.__qualname__ = name
    read.__doc__ = f"Read the rows; return what `numpy.ndarray.{name}` does."
    return read


def _reading_operator(name: str, function: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def read(self: ReadOnUse, *other: Any) -> Any:
        operands = [np.asarray(self), *map(_read, other)]
        return function(*(reversed(operands) if reflected else operands))

    read.__name__ = read.__qualname__ = name
    return read


def _writing_operator(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, other: Any) -> Any:
        self._require_writable()
        self[...] = function(np.asarray(self), _read(other))  # a copy in its place would leave the file as it was
        return self

    write.__name__ = write.__qualname__ = name
    return write


_BOTH: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "matmul": operator.matmul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "divmod": divmod,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_OTHERS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
    "abs": operator.abs,
    "bool": bool,
    "int": int,
    "float": float,
    "contains": operator.contains,
}

for _name in READING:
    setattr(ReadOnUse, _name, _reading_method(_name))
for _name, _function in {**_BOTH, **_OTHERS}.items():
    setattr(ReadOnUse, f"__{_name}__", _reading_operator(f"__{_name}__", _function))
for _name, _function in _BOTH.items():
    setattr(ReadOnUse, f"__r{_name}__", _reading_operator(f"__r{_name}__", _function, reflected=True))
for _name in _BINARY:
    setattr(ReadOnUse, f"__i{_name}__", _writing_operator(f"__i{_name}__", getattr(operator, f"i{_name}")))
