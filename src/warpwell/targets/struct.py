"""DeviceStruct: a host object that passes into kernels by value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import errors
from .device import register_method


class Part(NamedTuple):
    """How ``s["name"]``, a struct of the same class, follows from a struct.

    Attributes
    ----------
    static : hashable
        Its compile-time parameters.
    plus, times : dict of str to int
        Factors of members, and numbers added after that; other members do not change.
    more : dict of str to tuple of int
        Items that are appended to tuples.
    """

    static: Any
    plus: dict[str, int]
    times: dict[str, int]
    more: dict[str, tuple[int, ...]]


class DeviceStruct:
    """Base of host objects that device code receives as a struct of 64-bit integers.

    A subclass names its members in `layout`; each is one integer or a tuple of them. The `static`
    parameters (hashable, small, with a stable ``repr``) are compile-time constants: a kernel is compiled
    once for each. `implementation` chooses, by them, the plain Python device function behind ``s[i]``,
    ``s[i] = v``, ``len(s)`` and methods, and every target calls that same function.

    Parameters
    ----------
    static : hashable
        Compile-time parameters.
    values : dict of str to int or tuple of int
        A value for every member of the layout.
    """

    static: Any

    methods: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Methods in device code: the parameters of each one's `implementation`, the struct first.

    An argument for a parameter `name` is a constant string, by which `implementation` chooses.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, parameters in cls.__dict__.get("methods", {}).items():
            register_method(name, parameters)

    def __init__(self, static: Any, values: dict[str, int | tuple[int, ...]]) -> None:
        self.static = static
        self._values = values

    @classmethod
    def layout(cls, static: Any) -> Sequence[tuple[str, int | None]]:
        """Return the members in order: a name, and None for an integer or the length of a tuple."""
        raise NotImplementedError

    @classmethod
    def implementation(cls, name: str, static: Any, key: int | str | None) -> Callable[..., Any] | None:
        """Return the device function for `name` ("getitem", "setitem", "len", or a method), or None.

        `key` is the last argument if it is a constant string; else the number of integers in the index, or None if the
        first argument is not an integer index.
        """
        raise NotImplementedError

    @classmethod
    def part(cls, static: Any, name: str) -> Part:
        """Return how ``s["name"]`` follows from a struct, for a constant name; raise DTypeError for another name."""
        raise errors.DTypeError(f"{cls.__name__} has no part {name!r}")

    def flat(self) -> tuple[int, ...]:
        """Return the values in the order of the layout, tuples spread out."""
        out: list[int] = []
        for name, count in self.layout(self.static):
            value = self._values[name]
            out.extend([value] if count is None else value)  # type: ignore[arg-type,list-item]
        return tuple(out)

    @property
    def address(self) -> int:
        """Address of the flat values, for compiled `cpu` code."""
        buffer = self.__dict__.get("_buffer")
        if buffer is None:
            buffer = np.array(self.flat(), np.int64)
            self._buffer = buffer
        return int(buffer.ctypes.data)

    # The interpreter runs device code on the object itself.

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        if name in type(self).methods:
            return functools.partial(self._call, name)
        raise AttributeError(f"{type(self).__name__} has no member {name!r} in device code")

    def _call(self, name: str, *args: Any) -> Any:
        index = args[0] if args else None
        key: int | str | None = len(index) if isinstance(index, tuple) else (1 if args else None)
        if args and isinstance(args[-1], str):
            key = args[-1]
        function = self.implementation(name, self.static, key)
        if function is None:
            raise TypeError(f"{type(self).__name__} does not support {name} with these arguments")
        return function(self, *args)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._part_of(self.part(self.static, index))
        return self._call("getitem", index)

    def _part_of(self, part: Part) -> DeviceStruct:
        values: dict[str, int | tuple[int, ...]] = {}
        for name, value in self._values.items():
            if isinstance(value, tuple):
                values[name] = value + part.more.get(name, ())
            else:
                values[name] = value * part.times.get(name, 1) + part.plus.get(name, 0)
        return type(self)(part.static, values)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._call("setitem", index, value)

    def __len__(self) -> int:
        return int(self._call("len"))
