"""Bounds checks of NumPy and device arrays in kernels: a switch for debugging, off by default.

`@kernel(check=True)` switches them on for one kernel, and ``WARPWELL_CHECK=1`` for all, as it is set when a kernel is
launched. Such a launch runs another kernel, which calls the user's with `checked` arguments: compiled for them it has
the checks, and what is compiled for ordinary arrays is what it was.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import errors
from .atomics import DEVICE, SYSTEM, compare_exchange, load_relaxed, store_relaxed, store_release
from .device import device
from .memory import Block, memory_for

if TYPE_CHECKING:
    from .fault import LaunchFlag

_FLAG, _TAKEN, _ARGUMENT, _INDEX, _EXTENT = range(5)
SINK = 64
"""Where additions go that are out of range: behind the record."""
_WORDS = 16


def checking(kernel: Any) -> bool:
    """Tell whether launches of a kernel are checked now.

    Raises
    ------
    ArgumentError
        ``WARPWELL_CHECK`` is neither 0 nor 1.
    """
    if kernel.bounds is not False:
        return bool(kernel.bounds)  # None: those that launch others with checks
    if str(kernel.function.__module__).startswith("warpwell."):
        return False
    text = os.environ.get("WARPWELL_CHECK") or "0"
    if text not in ("0", "1"):
        raise errors.ArgumentError(f"WARPWELL_CHECK is {text!r}: give 1 (or 0)", name="WARPWELL_CHECK")
    return text == "1"


def checked(value: Any, record: int, number: int) -> Any:
    """Return an argument as one whose subscripts are checked (compiled targets; only arrays change)."""
    raise NotImplementedError


@device
def note(record, number, index, extent):  # type: ignore[no-untyped-def]
    """Keep the first index that is out of range; those after a failure of the launch are its consequence (thread)."""
    flag = load_relaxed(record + 8 * _FLAG, SYSTEM)
    if load_relaxed(flag, SYSTEM) == 0 and compare_exchange(record + 8 * _TAKEN, 0, 1, DEVICE) == 0:
        store_relaxed(record + 8 * _ARGUMENT, number, SYSTEM)
        store_relaxed(record + 8 * _INDEX, index, SYSTEM)
        store_relaxed(record + 8 * _EXTENT, extent, SYSTEM)
        store_release(flag, 1, SYSTEM)


class Record:
    """What a launch with checks notes, in memory that host and device share."""

    def __init__(self, target: str, flag: LaunchFlag) -> None:
        self._block: Block = memory_for(target).allocate_shared(8 * _WORDS)
        self._block.words[_FLAG] = flag.address
        self.address = self._block.address

    def error(self, kernel: Any) -> errors.IndexRangeError | None:
        """Return the exception for what was noted."""
        words = self._block.words
        if not words[_TAKEN]:
            return None
        names = parameters(kernel)
        number, index, extent = (int(words[k]) for k in (_ARGUMENT, _INDEX, _EXTENT))
        name = names[number] if number < len(names) else f"argument {number}"
        return out_of_range(kernel.__name__, name, index, extent)


_left: list[Record] = []


def out_of_range(kernel: str, name: str, index: int, extent: int) -> errors.IndexRangeError:
    """Return the exception for an index of an argument."""
    return errors.IndexRangeError(
        f"kernel {kernel!r} used index {index} of its argument {name!r} in a dimension of size {extent}: compare the "
        "index with the size first",
        array=name, kernel=kernel, index=index, size=extent,
    )  # fmt: skip


def run_checked(launch: Any, args: Sequence[Any], target: str, flag: LaunchFlag, **options: Any) -> None:
    """Run a launch with checks, and wait for it also where it was given a stream."""
    from .kernel import Launch

    kernel = launch.kernel
    record = Record(target, flag)
    twin = _twin(kernel, len(args))
    failure: BaseException | None = None
    try:
        Launch(twin, launch.shape, launch.stream)(*args, record.address, device=target, flag=flag, **options)
    except errors.KernelError as error:
        failure = error
    except BaseException:
        _left.append(record)  # Ctrl-C may have left the kernel behind, which notes all the same
        raise
    if launch.stream is not None:
        from .compiler.run_cuda import synchronize_stream

        synchronize_stream(launch.stream)
    found = record.error(kernel)
    if found is not None:
        raise found from failure  # noted only while nothing else had failed, so it came first
    if failure is not None:
        raise failure


def parameters(kernel: Any) -> list[str]:
    """Return the names of a kernel's parameters."""
    from .signature import parameters as of

    return of(kernel)


def _twin(kernel: Any, count: int) -> Any:
    """Return the kernel that calls another one with `count` checked arguments."""
    twin = kernel.twins.get(count)
    if twin is None:
        from .kernel import Kernel

        names = (parameters(kernel) + [f"argument{k}" for k in range(count)])[:count]
        given = ", ".join(f"_checked({name}, _record, {k})" for k, name in enumerate(names))
        function = kernel.function
        scope = {"_function": function, "_checked": checked, "__name__": function.__module__}
        source = f"def {kernel.__name__}({', '.join([*names, '_record'])}):\n    _function({given})\n"
        exec(compile(source, function.__code__.co_filename, "exec"), scope)
        twin = Kernel(scope[kernel.__name__], max_registers=kernel.max_registers, block=kernel.block, check=None)
        kernel.twins[count] = twin
    return twin


# -- interp: device code as Python, on NumPy's arrays ------------------------------------------------------------


class CheckedNumPy(np.ndarray):
    """An array that says what argument of what kernel was subscripted wrongly; so do its rows."""

    said: tuple[str, str] | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.said = getattr(other, "said", None)

    def __getitem__(self, index: Any) -> Any:
        return self._try(super().__getitem__, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._try(super().__setitem__, index, value)

    def _try(self, operation: Callable[..., Any], *args: Any) -> Any:
        try:
            return operation(*args)
        except IndexError as error:
            found = re.search(r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)", str(error))
            if found is None or self.said is None:
                raise
            raise out_of_range(*self.said, int(found[1]), int(found[2])) from None


def for_interp(kernel: Any, values: Sequence[Any]) -> list[Any]:
    """Return a launch's arguments with its arrays checked."""
    out = list(values)
    for k, name in enumerate(parameters(kernel)[: len(out)]):
        if isinstance(out[k], np.ndarray):
            out[k] = out[k].view(CheckedNumPy)
            out[k].said = kernel.__name__, name
    return out
