"""Host side of every array on storage: shape, iteration, reductions, and operators.

A whole array may be larger than memory: it supports reductions, which work block by block (`reductions`); operators and
other NumPy functions raise an error, whose message has the code to write instead. On a range of rows, operators and
functions read these rows (`ReadOnUse`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from . import reductions

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
        """Yield each row as a NumPy array, or each item of a 1-D array; about 1 MiB of rows is read at a time."""
        if not self.shape:
            raise TypeError(f"array {self.name!r} has no dimensions and cannot be iterated over: read a[()]")
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
        out = self._read_all()
        return out if dtype is None else out.astype(dtype)

    def _read_all(self) -> NDArray[Any]:
        """Return all items."""
        return np.asarray(self[:] if self.shape else self[()])

    # -- operations that would read all items ------------------------------------------------------------------

    __hash__ = object.__hash__

    def __eq__(self, operand: object) -> bool:
        """Compare by identity with other arrays, as collections need; to compare items, read them first."""
        if operand is None or isinstance(operand, OnStorage):
            return self is operand
        self._refuse(f"a[:] == {operand!r:.20}")

    def __ne__(self, operand: object) -> bool:
        if operand is None or isinstance(operand, OnStorage):
            return self is not operand
        self._refuse(f"a[:] != {operand!r:.20}")

    def __contains__(self, value: object) -> bool:
        self._refuse(f"{value!r:.20} in a[:]")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Reduce in bounded memory; refuse other operations of NumPy on all items."""
        name = next((name for name, function in reductions.UFUNCS.items() if function is ufunc), None)
        if method == "reduce" and name is not None and inputs[0] is self:
            return getattr(self, name)(**{"axis": 0, **options})
        call = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        self._refuse_function(call, inputs)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """Reduce in bounded memory; refuse other functions of NumPy, which would read all items."""
        if function in _BOUNDED:
            return function._implementation(*arguments, **options)
        self._refuse_function(function.__name__, arguments)

    def _refuse_function(self, name: str, arguments: Any) -> NoReturn:
        shown = ("a[:]" if isinstance(value, OnStorage) else f"{value!r:.20}" for value in arguments)
        self._refuse(f"np.{name}({', '.join(shown)})")

    def __getattr__(self, name: str) -> Any:
        if name in READING:
            raise AttributeError(f"items of array {self.name!r} are on storage: read them first, a[:].{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
    def refuse(self: OnStorage, *operands: object) -> NoReturn:
        self._refuse(instead.format(*(f"{o!r:.20}" for o in operands[:1])))

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


_BINARY = dict(
    zip(
        "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split(),
        "+ - * @ / // % ** << >> & | ^".split(),
        strict=True,
    )
)
_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {"neg": "-", "pos": "+", "invert": "~"}

for _name, _sign in {**_BINARY, **_ORDER}.items():
    setattr(OnStorage, f"__{_name}__", _operator(f"__{_name}__", f"a[:] {_sign} {{}}"))
for _name, _sign in _BINARY.items():
    setattr(OnStorage, f"__r{_name}__", _operator(f"__r{_name}__", f"{{}} {_sign} a[:]"))
for _name, _sign in _UNARY.items():
    setattr(OnStorage, f"__{_name}__", _operator(f"__{_name}__", f"{_sign}a[:]"))
OnStorage.__abs__ = _operator("__abs__", "abs(a[:])")  # type: ignore[attr-defined]


def _reduction(name: str) -> Callable[..., Any]:
    def reduce(self: OnStorage, axis: Any = None, *positional: Any, **options: Any) -> Any:
        return reductions.reduce(self, name, axis, *positional, **options)

    reduce.__name__ = reduce.__qualname__ = name
    reduce.__doc__ = f"Return the result of `numpy.ndarray.{name}`, in bounded memory; reads all items."
    return reduce


for _name in reductions.NAMES:
    setattr(OnStorage, _name, _reduction(_name))

_BOUNDED = {
    np.ndim,
    np.shape,
    np.size,
    np.result_type,
    np.amin,
    np.amax,
    *(getattr(np, name) for name in reductions.NAMES),
}
"""Functions of NumPy that read no items, or reduce them by the array's own methods."""


# -- ranges of rows: a[lo:hi] limits how much is read -----------------------------------------------------------------

READING = (
    "argpartition", "argsort", "astype", "clip", "compress", "conj", "copy", "cumprod", "cumsum", "diagonal", "dot",
    "flatten", "item", "nonzero", "ravel", "repeat", "round", "searchsorted", "squeeze", "swapaxes", "take", "tobytes",
    "tofile", "tolist", "trace", "transpose",
)  # fmt: skip
"""Methods of a NumPy array that do not change it, except reductions. In-place methods are missing, because they would
change a copy."""


class ReadOnUse(NDArrayOperatorsMixin, OnStorage):
    """Base of views of rows: each operator and method reads the rows again and passes them to NumPy."""

    __hash__ = object.__hash__

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Read the rows; return NumPy's result. If they are first operand and ``out``, write the result to them."""
        operands = list(map(_read, inputs))
        out: tuple[Any, ...] = options.get("out") or ()
        rows: Any = self
        if len(out) == 1 and out[0] is self is inputs[0]:
            rows._require_writable()
            rows[...] = getattr(ufunc, method)(*operands, **{**options, "out": (operands[0],)})
            return self
        if any(isinstance(value, OnStorage) for value in out):
            raise TypeError(f"out= cannot be rows of array {self.name!r}: assign the result, rows[...] = ...")
        return getattr(ufunc, method)(*operands, **options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """Read the rows; return NumPy's result."""
        if all(issubclass(cls, ReadOnUse) or not issubclass(cls, OnStorage) for cls in types):
            return function._implementation(*arguments, **options)
        self._refuse_function(function.__name__, arguments)

    def __copy__(self) -> NDArray[Any]:  # type: ignore[override]
        return np.array(self)

    def __deepcopy__(self, memo: Any) -> NDArray[Any]:  # type: ignore[override]
        return np.array(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)

    def __contains__(self, value: object) -> bool:
        return _read(value) in np.asarray(self)

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __float__(self) -> float:
        return float(np.asarray(self))

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
    """Return an operand in a form that NumPy takes; raise for an array that is not a view of rows."""
    if isinstance(value, ReadOnUse):
        return np.asarray(value)
    if isinstance(value, OnStorage):
        value._refuse("a[:]")
    return value


def _reading_method(name: str) -> Callable[..., Any]:
    def read(self: ReadOnUse, *args: Any, **options: Any) -> Any:
        return getattr(np.asarray(self), name)(*map(_read, args), **options)

    read.__name__ = read.__qualname__ = name
    read.__doc__ = f"Read the rows; return the result of `numpy.ndarray.{name}`."
    return read


for _name in READING:
    setattr(ReadOnUse, _name, _reading_method(_name))
