"""`kernel`: plain Python functions that run once for each index of a launch, on any target."""

from __future__ import annotations

import functools
import logging
import math
import os
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .. import errors
from .._check import checked_device, checked_integer
from .._os import Interrupts, interruptible
from .._settings import settings
from .._trace import traced
from .arguments import KernelArgument, begin, device_of, finish, participants, viewed
from .blocks.launch import BlockLaunch
from .bounds import Record, checked, checking, for_interp
from .compiler.snapshot import Snapshot
from .device import device as mark_device
from .device import is_device
from .fault import LaunchFlag
from .gpu.device import require_gpu
from .interp import interpreter
from .signature import check_arguments, check_launch, configuration, parameters

DEVICES = ("cpu", "cuda", "interp")

MANY_VERSIONS = 8
"""Number of versions of a kernel, each for different values of global variables, from which a warning is logged."""

_log = logging.getLogger(__name__)

Redirect = Callable[[Any, Sequence[Any], str | None], bool]
_redirect: Redirect | None = None


def set_place(redirect: Redirect | None) -> None:
    """Have each launch first call ``redirect(launch, args, device)``; True means that it ran the launch elsewhere."""
    global _redirect
    _redirect = redirect


def placed(launch: Any, args: Sequence[Any], device: str | None) -> bool:
    """Offer a launch to `set_place`'s function; return whether it ran the launch."""
    return _redirect is not None and _redirect(launch, args, device)


class Kernel:
    """A kernel: call it as ``kernel[n](*args)``.

    Parameters
    ----------
    function : callable
        Device code. It finds its index with ``gpu.grid(1)`` (``gpu.grid(2)`` and ``(3)`` for launch shapes).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        max_registers: int | None = None,
        block: int | None = None,
        check: bool | None = False,
    ) -> None:
        if not isinstance(function, types.FunctionType):
            raise errors.ArgumentError(f"{function!r:.60} is not a Python function: put @ww.kernel above a def")
        _check_options(max_registers, block)
        functools.update_wrapper(self, function)
        self.function = function
        self.max_registers = max_registers
        self.block = block
        self.bounds = check
        self.compiled: dict[Any, Any] = {}
        self.checked: set[tuple[int, int]] = set()
        """Numbers of extents and arguments with which launches are known to fit."""
        self.stamp = stamp_of(function.__code__.co_filename)
        """Modification time and size of its file when Python had read it."""
        self._versions: dict[Callable[..., Any], Kernel] = {}
        self._current: tuple[Snapshot, Kernel] | None = None
        """The latest snapshot, and the version that belongs to it."""
        self.original = self
        """The kernel that this one is a version of."""
        self._is_fixed = str(function.__module__).startswith("warpwell.")
        """Whether the global variables of the kernel never change: it is Warpwell's own, or a version."""
        if not is_device(function):
            mark_device(function)

    def __repr__(self) -> str:
        options = {"max_registers": self.max_registers, "block": self.block}
        text = "".join(f", {name}={value}" for name, value in options.items() if value is not None)
        return f"<warpwell.kernel {self.__name__!r}{text}>"  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        options: dict[str, Any] = {"max_registers": self.max_registers, "block": self.block, "check": self.bounds}
        return functools.partial(Kernel, **options), (self.function,)

    def __getitem__(self, configuration: Any) -> Launch:
        return Launch(self, *_parse(configuration))

    def current(self) -> Kernel:
        """Return the kernel that is compiled with the present values of the variables that its code names.

        A version has compiled code of its own, so that a changed variable never runs code with the old value. A kernel
        that names only objects of installed packages is its own version.
        """
        if self._is_fixed:
            return self
        current = self._current
        if current is None or not current[0].is_current():
            snapshot = Snapshot(self.function)
            current = self._current = snapshot, self._version(snapshot.function)
        return current[1]

    def _version(self, function: types.FunctionType) -> Kernel:
        if function is self.function:
            return self
        version = self._versions.get(function)
        if version is None:
            version = Kernel(function, max_registers=self.max_registers, block=self.block, check=self.bounds)
            version.original, version._is_fixed = self, True
            version = self._versions.setdefault(function, version)
            if len(self._versions) == MANY_VERSIONS:
                _log.warning(
                    "kernel %r is compiled for %d values of its global variables: pass a value that changes often as "
                    "an argument",
                    self.__name__,  # type: ignore[attr-defined]
                    MANY_VERSIONS,
                )
        return version

    def checked_variant(self, count: int) -> Kernel:
        """Return the kernel that calls this one with `count` checked arguments (see `bounds`)."""
        key = "checked", count
        if key not in self.compiled:
            name = self.function.__name__
            names = (parameters(self) + [f"argument{k}" for k in range(count)])[:count]
            arguments = ", ".join(f"_checked({name}, _record, {k})" for k, name in enumerate(names))
            function = self.function
            scope: dict[str, Any] = {"_function": function, "_checked": checked, "__name__": function.__module__}
            source = f"def {name}({', '.join([*names, '_record'])}):\n    _function({arguments})\n"
            exec(compile(source, function.__code__.co_filename, "exec"), scope)
            self.compiled[key] = Kernel(scope[name], max_registers=self.max_registers, block=self.block, check=None)
        variant: Kernel = self.compiled[key]
        return variant

    def __call__(self, *args: Any) -> None:
        """Refuse: a launch needs a number of threads."""
        raise errors.ArgumentError(
            f"kernel {self.__name__!r} needs a number of threads: {self.__name__}[n](...)"  # type: ignore[attr-defined]
        )


def stamp_of(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return the modification time and the size of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


class Launch:
    """A kernel with its launch shape; calling it runs it.

    The call returns when the kernel is done. With a stream (on `cuda`) the call returns at once, and an error that
    device code latches for an array on storage is raised by the next operation on that array. NumPy arguments are
    copied to a GPU and back; device arrays are not copied.
    """

    def __init__(
        self, kernel: Kernel, shape: tuple[int, ...], stream: Any = None, *, waits: bool | None = None
    ) -> None:
        self.kernel = kernel
        self.shape = shape
        self.stream = stream
        self.waits = stream is None if waits is None else waits
        """Whether a call waits for the kernel."""

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        stream = "" if self.stream is None else f", in {self.stream!r:.60}"
        return f"<launch of {self.kernel!r} over {shape}{stream}>"

    def __call__(
        self,
        *args: Any,
        device: str | None = None,
        seed: int | None = None,
        services: Sequence[Callable[[], object]] = (),
        aborts: Sequence[Any] = (),
        flag: LaunchFlag | None = None,
        **named: Any,
    ) -> None:
        """Run the kernel.

        Parameters
        ----------
        *args
            The kernel's arguments. Columns (a pandas or Polars Series, an Arrow array) are read without a copy.
        device : str, optional
            Where to run; by default where the arguments are.
        seed : int, optional
            Seed of the scheduler (`interp`).
        services : sequence of callables
            Steps that an interpreted launch calls in addition to its threads.
        aborts : sequence of objects
            Objects whose ``abort(flag)`` is called on Ctrl-C, in addition to the ``abort`` of the arguments.
        flag : LaunchFlag, optional
            The flag by which other threads interrupt this launch. Default: a new one.

        Raises
        ------
        ArgumentError
            The kernel takes other arguments, or requests its index in more or fewer extents than the launch has; or a
            column has nulls or several chunks.
        CompileError
            The kernel cannot be compiled for arguments of these types.
        """
        if named:
            raise by_name(self.kernel, named)
        launch = self.current()
        launch.check(args)
        args = viewed(self.kernel, args)
        if placed(launch, args, device):
            return
        target = checked_device(device or device_of(args), among=DEVICES)
        if target == "interp":
            launch = self  # the interpreter reads variables as Python does
        elif checking(self.kernel):
            self._run_checked(args, target, flag or LaunchFlag(target), seed=seed, services=services, aborts=aborts)
            return
        taking_part = participants(args, target)
        own = flag or LaunchFlag(target)

        def stop() -> None:
            own.interrupt()
            for target_of_abort in (*taking_part, *aborts):
                target_of_abort.abort(own)

        with interruptible(stop) as interrupts:
            interrupts.may_leave = not aborts
            launch._run(args, target, taking_part, own, interrupts, seed=seed, services=services)

    def _run_checked(self, args: Sequence[Any], target: str, flag: LaunchFlag, **options: Any) -> None:
        """Run with bounds checks, and wait for the kernel even if the launch has a stream."""
        record = Record(target, flag)
        launch = Launch(self.kernel.checked_variant(len(args)), self.shape, self.stream, waits=True)
        try:
            launch(*args, record.address, device=target, flag=flag, **options)
        except errors.KernelError as error:
            if (found := record.error(self.kernel)) is not None:
                raise found from error  # recorded only while nothing else had failed, so it came first
            raise
        except BaseException:
            _left.append(record)  # after Ctrl-C the kernel may still run, and record an index
            raise
        if (found := record.error(self.kernel)) is not None:
            raise found

    @traced("launch")
    def _run(
        self,
        args: Sequence[Any],
        target: str,
        participants: Sequence[KernelArgument],
        flag: LaunchFlag,
        interrupts: Interrupts,
        **interpreted: Any,
    ) -> None:
        total = math.prod(self.shape)
        done: Callable[[], bool] | None = None
        started: list[Any] = []
        try:
            values = begin(participants, started, args, flag)
            runner = _runner(target) if total else None
            if runner is not None and target == "cpu" and not runner.is_compiled(self.kernel, values):
                # park the I/O threads while compiling: spinning, they take 20 % of a core from the compiler
                ended, started[:] = list(started), []
                finish(ended, flag)
                runner.compile_launch(self.kernel, values)
                values = begin(participants, started, args, flag)
            if runner is None or interrupts.raised:
                pass  # a launch that Ctrl-C ended before it began
            elif target == "interp":
                self._interpret(values, participants, flag, interrupts, **interpreted)
            else:
                done = runner.run(self, values, total, flag, interrupts)
        finally:
            if done is None:
                finish(started, flag)
        if done is not None:
            for argument in participants:
                argument.launch_continues(flag, done)

    def _interpret(
        self,
        values: list[Any],
        participants: Sequence[KernelArgument],
        flag: LaunchFlag,
        interrupts: Interrupts,
        seed: int | None,
        services: Sequence[Callable[[], object]],
    ) -> None:
        check_arguments(self.kernel, values, compiles=False)
        if checking(self.kernel):
            values = for_interp(self.kernel, values)
        # arrays of one cache have the same steps, and one thread at a time may serve a port
        offered = (step for a in participants for step in getattr(a, "interp_services", list)())
        interrupts.at_once = True
        interpreter.launch(
            self.kernel.function,
            self.shape,
            values,
            seed=settings.seed if seed is None else seed,
            services=list(dict.fromkeys([*services, *offered])),
            coarse_copies=True,
            max_steps=1_000_000_000,
            flag=flag,
        )
        interrupts.at_once = False

    def check(self, args: Sequence[Any]) -> None:
        """Raise `ArgumentError` if the kernel does not take this shape, or this number of arguments."""
        key = len(self.shape), len(args)
        if key not in self.kernel.checked:  # its code is inspected once
            check_launch(self.kernel, self.shape, len(args))
            if math.prod(self.shape):  # an empty launch does not call grid
                self.kernel.checked.add(key)

    def current(self) -> Launch:
        """Return the launch of the kernel's version for the present values of global variables (`Kernel.current`)."""
        kernel = self.kernel.current()
        return self if kernel is self.kernel else Launch(kernel, self.shape, self.stream, waits=self.waits)

    def cut(self, args: Sequence[Any], device: str | None = None) -> BlockLaunch:
        """Return the launch with its arguments, block by block."""
        return BlockLaunch(self.current(), viewed(self.kernel, args), device)

    def subscript(self) -> Any:
        """Return the subscript that makes this launch of the kernel, without the stream."""
        return self.shape

    def configuration(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of blocks and of threads in a block on a GPU, each in the order x, y, z."""
        return configuration(self.shape, self.kernel.block)


_left: list[Record] = []
"""Records of bounds checks of launches that Ctrl-C may have left running: their kernels may still write to them."""


def _check_options(max_registers: Any, block: Any) -> None:
    if block is not None and checked_integer(block, "block", maximum=1024) % 32:
        raise errors.ArgumentError(f"a block of {block} threads: give a multiple of 32, at most 1024", name="block")
    if max_registers is not None:
        checked_integer(max_registers, "max_registers", minimum=16, maximum=255)


def by_name(kernel: Any, named: Iterable[str]) -> errors.ArgumentError:
    """Return the exception for arguments that were passed by name, which launches do not take."""
    listed = ", ".join(f"{name}=" for name in named)
    return errors.ArgumentError(
        f"kernel {kernel.__name__!r} takes positional arguments only, not arguments by name ({listed}): leave the "
        "names out"
    )


def _runner(target: str) -> Any:
    """Return the module that runs launches on a target; imports its compiler."""
    if target == "interp":
        return interpreter
    if target == "cpu":
        from .compiler import run_cpu

        return run_cpu
    require_gpu()
    from .compiler import run_cuda

    return run_cuda


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    max_registers: int | None = None,
    block: int | None = None,
    check: bool = False,
) -> Any:
    """Make a kernel of a plain Python function (a decorator).

    Parameters
    ----------
    function : callable
        Device code; see `Kernel`.
    max_registers : int, optional
        Maximum number of registers per thread on `cuda`. Default: 32, or 64 if the kernel uses spans.
    block : int, optional
        Make a block kernel, with this number of threads per block on `cuda`. Its launch shape counts blocks, and its
        code finds its position with `block_index` and `thread_index` (see `warpwell.targets.primitives`).

    check : bool
        Check every index into NumPy and device arrays, for debugging. If an index is out of range, the launch raises
        `IndexRangeError` after the kernel has run; the error names kernel, argument, index and extent. During the
        launch, a read at such an index returns 0, and a store or an addition there has no effect. ``WARPWELL_CHECK=1``
        checks all kernels that are launched while it is set.

    Examples
    --------
    >>> import numpy as np, warpwell as ww
    >>> from warpwell import gpu
    >>> @ww.kernel
    ... def double(x):
    ...     i = gpu.grid(1)
    ...     x[i] = 2 * x[i]
    >>> x = np.arange(4); double[4](x, device="cpu"); x.tolist()
    [0, 2, 4, 6]
    """
    if function is None:
        _check_options(max_registers, block)  # Here, so that the line of the error is the decorator's.
        return functools.partial(kernel, max_registers=max_registers, block=block, check=check)
    return Kernel(function, max_registers=max_registers, block=block, check=check)


def _parse(configuration: Any) -> tuple[tuple[int, ...], Any]:
    parts: Any = configuration if isinstance(configuration, tuple) else (configuration,)
    stream = None
    if len(parts) > 1 and not isinstance(parts[-1], int | np.integer):
        *parts, stream = parts
        parts = parts[0] if len(parts) == 1 and isinstance(parts[0], tuple) else tuple(parts)
    if not 1 <= len(parts) <= 3 or not all(isinstance(n, int | np.integer) and n >= 0 for n in parts):
        raise errors.ArgumentError(
            f"launch shape {configuration!r} is not 1 to 3 non-negative integers (and a stream): use kernel[n](...)"
        )
    shape = tuple(int(n) for n in parts)
    if math.prod(shape) >= 1 << 63:
        raise errors.ArgumentError(f"launch shape {configuration!r:.80} has more than 2^63 - 1 indices")
    if stream is not None and not any(hasattr(stream, name) for name in _STREAMS):
        raise errors.ArgumentError(
            f"{stream!r:.60} is not a stream: use kernel[n, device.stream()](...)", name="stream"
        )
    return shape, stream


_STREAMS = ("synchronize", "__cuda_stream__", "cuda_stream", "handle")
"""Attributes of streams: of pools, of numba-cuda, and of other libraries."""
