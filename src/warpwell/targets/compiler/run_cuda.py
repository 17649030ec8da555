"""Launches on the `cuda` target, and PTX of kernels without a GPU."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..._os import Interrupts, clock, interruptible
from ...libcuda import check
from ..fault import LaunchFlag, share_fault_page
from ..gpu.device import current, handle_of, mark, reached
from ..gpu.prepared import Prepared, pack
from ..signature import BLOCK_THREADS, check_arguments, configuration
from ..struct import DeviceStruct
from .compiling import compiling, explained
from .hooks import intrinsics_for
from .virtual import launch_copy, registers

GENERATED = "warpwell.targets.compiler.compiled"
"""The module that generated launch code belongs to."""

MAX_REGISTERS = 32
"""Registers a thread at most, unless a kernel says otherwise (``@kernel(max_registers=...)``), or walks spans.

A read that hits needs no more; the miss path, with this limit, spills registers while it waits anyway. With 32, all
2,048 threads of a multiprocessor are resident: sequential hits are 1.7 times as fast as with 64 (H200). Kernels that
compute much between reads need more.
"""

INSIDE = {
    1: "index < extent0",
    2: "index[0] < extent0 and index[1] < extent1",
    3: "index[0] < extent0 and index[1] < extent1 and index[2] < extent2",
}


class NumbaCuda:
    """The argument extension for plain ``@cuda.jit(extensions=[gpu.numba_cuda])`` kernels."""

    def prepare_args(self, ty: Any, val: Any, stream: Any, retr: Any) -> tuple[Any, Any]:
        """Spread a `DeviceStruct` into its words, as the kernel's parameters expect them."""
        if isinstance(val, DeviceStruct):
            from numba.core import types

            intrinsics_for("cuda")
            flat = val.flat()
            return types.UniTuple(types.int64, len(flat)), flat
        return ty, val


numba_cuda = NumbaCuda()


def run(
    launch: Any, values: list[Any], total: int, flag: LaunchFlag, interrupts: Interrupts
) -> Callable[[], bool] | None:
    """Run a launch and wait for it. With a stream, return at once a function that reports whether it is done."""
    from ..gpu.copies import copy_in, copy_out

    stream = _stream(launch.stream)
    values, copied = copy_in(values, stream)
    start(launch, values, stream, flag)
    done = mark(stream)
    if launch.stream is not None and not copied and not launch.waits:
        if reads_launch_flag(launch.kernel):
            keep(flag, done)
    elif _reached(done, interrupts):
        copy_out(copied, stream)
        return None
    return lambda: reached(done)


_running: dict[LaunchFlag, Any] = {}
"""Flags of launches that are running in streams, each with the event after its launch."""


def keep(flag: LaunchFlag, done: Any) -> None:
    """Keep the flag of a launch alive until an event is reached."""
    for running, event in list(_running.items()):  # A copy: other threads add the flags of their launches.
        if _is_over(event):
            _running.pop(running, None)
    _running[flag] = done


def _is_over(event: Any) -> bool:
    """Return True if an event is reached, or the GPU is lost."""
    try:
        return reached(event)
    except errors.KernelError:
        return True


def configured(dispatcher: Any, blocks: tuple[int, ...], threads: tuple[int, ...], stream: Any) -> Any:
    """Return a dispatcher with its grid, without numba-cuda's warning about small grids."""
    large = dispatcher.configure((1 << 20,), threads, stream or 0)
    large.griddim = (*blocks, 1, 1)[:3]
    return large


def start(launch: Any, values: Sequence[Any], stream: Any, flag: LaunchFlag) -> None:
    """Start a launch in a stream of numba-cuda or cuda.core.

    `flag` must be kept until the launch is done (see `keep`).
    """
    share_fault_page()
    values = [*values, flag.address] if reads_launch_flag(launch.kernel) else values
    kernel = compiled(launch.kernel, len(launch.shape), len(values))
    extents = (*launch.shape, 1, 1)[:3]
    blocks, threads = configuration(launch.shape, launch.kernel.block)
    if max(blocks[1:], default=0) > 65535:
        raise errors.ArgumentError(
            f"launch shape {launch.shape} has too many outer blocks for a GPU: put the longest dimension last"
        )
    if blocks[0] >= 1 << 31:
        raise errors.ArgumentError(
            f"launch shape {launch.shape} has {blocks[0]} blocks, but a GPU takes fewer than 2**31: launch over "
            "parts, or let each thread do more"
        )
    if not kernel.overloads:
        check_arguments(launch.kernel, values, compiles=False)
    with (
        contextlib.nullcontext() if kernel.overloads else compiling(f"kernel {launch.kernel.__name__!r}"),
        explained(launch.kernel, "cuda"),
    ):
        configured(kernel, blocks, threads, stream)(*extents, *values)


class CompiledKernel:
    """A kernel that is compiled for arguments of some types, and loaded on the current GPU.

    Parameters
    ----------
    kernel : Kernel
    dispatcher : numba-cuda dispatcher
    leading : int
        Number of integer parameters that come first.
    values : sequence
        Arguments that have the types.

    Attributes
    ----------
    name : str
    dispatcher : numba-cuda dispatcher
    overload : object
        The compiled kernel of numba-cuda.
    unused : list of Prepared
        Launches that no thread uses at the moment, for `launch`: to prepare one takes as long as to launch it.
    """

    def __init__(self, kernel: Any, dispatcher: Any, leading: int, values: Sequence[Any]) -> None:
        self.dispatcher = dispatcher
        self.name = kernel.__name__
        self._leading = leading
        types = tuple(dispatcher.typeof_pyval(value) for value in (*[0] * leading, *values))
        if types not in dispatcher.overloads:
            with compiling(f"kernel {kernel.__name__!r}"), explained(kernel, "cuda"):
                dispatcher.compile(types).bind()
        self.overload = dispatcher.overloads[types]
        self.unused: list[Prepared] = []
        self._slots: list[slice] = []

    def flatten(self, values: Sequence[Any], first: int = 0) -> list[Any] | None:
        """Return the driver's arguments for the values of parameter `first` and later; None if one has to be copied."""
        flat: list[Any] = []
        copied: list[Any] = []
        types = self.overload.argument_types[self._leading + first :]
        for argument_type, value in zip(types, values, strict=False):
            self.overload._prepare_args(argument_type, value, 0, copied, flat)
        return None if copied else flat

    def slots(self, values: Sequence[Any]) -> list[slice]:
        """Return the slots of each argument in `Prepared.values`. The values have the kernel's types.

        They are computed once: to flatten all arguments takes longer than several launches.
        """
        if not self._slots:
            sizes = [len(_packed_argument(self, k, value)) for k, value in enumerate(values)]
            ends = self._leading + np.cumsum([0, *sizes])
            self._slots = [slice(int(first), int(end)) for first, end in itertools.pairwise(ends)]
        return self._slots

    def prepare(self, arguments: Sequence[Any]) -> Prepared:
        """Return the kernel with flat arguments, to be launched."""
        from cuda.bindings import driver

        function = driver.CUfunction(int(self.overload._codelibrary.get_cufunc().handle))
        return Prepared(driver, function, self.name, self._leading, arguments)


class Series:
    """Launches in the default stream by few instructions of Python. A launch by numba-cuda takes 50 us or more.

    Tuples hold words. A kernel's arguments have the same types at each launch of a series. Nothing waits for the
    launches: see `synchronize`. One thread at a time uses a series.

    Parameters
    ----------
    flag : LaunchFlag
        Flag of all the launches.
    """

    def __init__(self, flag: LaunchFlag) -> None:
        share_fault_page()
        self._flag = flag
        self._kernels: dict[Any, tuple[CompiledKernel, Prepared, list[slice], list[Any]]] = {}
        self._flat: dict[int, tuple[Any, NDArray[np.int64]]] = {}

    def compile(self, kernel: Any, shape: tuple[int, ...], values: Sequence[Any]) -> None:
        """Compile a kernel for launches with arguments of the types of these values."""
        values = [*values, self._flag.address] if reads_launch_flag(kernel) else values
        compiled_kernel = _compiled_for(kernel, len(shape), values)
        slots = compiled_kernel.slots(values)
        prepared = compiled_kernel.prepare([0] * sum(slot.stop - slot.start for slot in slots))
        self._kernels[kernel] = compiled_kernel, prepared, slots, [None] * len(values)

    def launch(self, kernel: Any, shape: tuple[int, ...], values: Sequence[Any]) -> None:
        """Start a launch of a kernel that is compiled."""
        values = [*values, self._flag.address] if reads_launch_flag(kernel) else values
        compiled_kernel, prepared, slots, last = self._kernels[kernel]
        arguments = prepared.values
        for k, value in enumerate(values):
            kind = type(value)
            if kind is int or kind is tuple:
                arguments[slots[k]] = value
            elif kind is float:
                arguments.view(np.float64)[slots[k]] = value
            elif value is not last[k]:
                if id(value) not in self._flat:
                    self._flat[id(value)] = value, _packed_argument(compiled_kernel, k, value)
                arguments[slots[k]] = self._flat[id(value)][1]
                last[k] = value
        prepared.launch(*configuration(shape, kernel.block), None, (*shape, 1, 1)[:3])

    def read(self, array: Any) -> NDArray[Any]:
        """Return a copy of a small device array in its state after all launches so far."""
        from cuda.bindings import driver

        found = np.empty(array.shape, array.dtype)
        check(driver.cuMemcpyDtoH(found.ctypes.data, int(array.device_ctypes_pointer.value), found.nbytes))
        return found


_LEADING = 3
"""Integers before a kernel's own parameters: the extents of the launch."""


def _packed_argument(kernel: CompiledKernel, k: int, value: Any) -> NDArray[np.int64]:
    """Return the words of argument `k`."""
    # numba-cuda takes some microseconds for each word of a struct, and a view of a cached array has dozens.
    flat = value.flat() if isinstance(value, DeviceStruct) else kernel.flatten([value], k)
    if flat is None:
        raise errors.ArgumentError(f"kernel {kernel.name!r}: argument {k} is not in device memory")
    return pack(flat)[0][: len(flat)].view(np.int64)


def _compiled_for(kernel: Any, dims: int, values: Sequence[Any]) -> CompiledKernel:
    """Return a kernel that is compiled for arguments of the types of these values, once for each GPU."""
    kinds = tuple(
        (type(v), v.static)
        if isinstance(v, DeviceStruct)
        else (v.dtype, v.ndim)
        if hasattr(v, "dtype")
        else (type(v), len(v) if isinstance(v, tuple) else 0)
        for v in values
    )
    key = ("cuda-series", dims, int(current()[1].device_id), kinds)
    if key not in kernel.compiled:
        kernel.compiled[key] = CompiledKernel(kernel, compiled(kernel, dims, len(values)), _LEADING, values)
    found: CompiledKernel = kernel.compiled[key]
    return found


def launch(kernel: Any, n: int, stream: Any, *values: int) -> None:
    """Launch a kernel of `n` threads over words in a stream of numba-cuda or cuda.core, and return.

    With few instructions of Python, as `Series`.
    """
    share_fault_page()
    compiled_kernel = _compiled_for(kernel, 1, [0] * len(values))
    try:
        prepared = compiled_kernel.unused.pop()
    except IndexError:
        prepared = compiled_kernel.prepare(values)
    prepared.values[_LEADING:] = values
    prepared.launch((-(-n // BLOCK_THREADS),), (BLOCK_THREADS,), stream, (n, 1, 1))  # the driver copies the values
    compiled_kernel.unused.append(prepared)


def wait(event: Any, participants: Any = ()) -> None:
    """Wait for an event. Ctrl-C aborts waits in device code, and is then raised."""

    def stop() -> None:
        for participant in participants:
            participant.abort()

    with interruptible(stop) as interrupts:
        interrupts.may_leave = not participants
        _reached(event, interrupts)


def _reached(event: Any, interrupts: Interrupts) -> bool:
    """Wait for an event; return False if a second Ctrl-C ended the wait."""
    spins, started = 0, clock.monotonic()
    while not reached(event):
        try:
            spins += 1
            if spins > 200:
                time.sleep(min((clock.monotonic() - started) / 16, 1e-3))
        except BaseException as error:
            # An exception of a signal handler: the kernel is running, and uses objects of the caller.
            interrupts.catch(error)
        if len(interrupts.raised) > 1 and interrupts.may_leave:
            return False
    return True


def reads_launch_flag(kernel: Any) -> bool:
    """Return True if a kernel reads `failed`: then its launch flag is its last argument."""
    key = "cuda-asks"
    if key not in kernel.compiled:
        kernel.compiled[key] = launch_copy(kernel.function) is not kernel.function
    return bool(kernel.compiled[key])


def max_registers(kernel: Any) -> int:
    """Return the maximum of registers per thread: the kernel's option, or the demand of functions that it calls."""
    key = "cuda-registers"
    if key not in kernel.compiled:
        kernel.compiled[key] = kernel.max_registers or max(MAX_REGISTERS, registers(kernel.function))
    return int(kernel.compiled[key])


def compiled(kernel: Any, dims: int, count: int) -> Any:
    """Return the numba-cuda dispatcher of a kernel for launches of `dims` dimensions."""
    key = ("cuda", dims, count)
    if key not in kernel.compiled:
        from numba import cuda

        compile_later = cuda.jit(extensions=[numba_cuda], max_registers=max_registers(kernel))
        kernel.compiled[key] = compile_later(_wrapper(kernel, dims, count))
    return kernel.compiled[key]


def ptx(kernel: Any, argument_types: tuple[Any, ...], *, cc: tuple[int, int] = (9, 0), dims: int = 1) -> str:
    """Return the PTX of a kernel for Numba types or example arguments; no GPU is needed.

    Parameters
    ----------
    kernel : Kernel
    argument_types : tuple
        A Numba type or an example value (a `DeviceStruct`, a NumPy array, a number) for each argument.
    cc : (int, int)
        Compute capability.
    """
    kernel = kernel.current()
    if reads_launch_flag(kernel):
        argument_types = (*argument_types, 0)
    with explained(kernel, "cuda"):
        return ptx_of(_wrapper(kernel, dims, len(argument_types)), _LEADING, argument_types, cc)


def ptx_of(function: Any, leading: int, argument_types: tuple[Any, ...], cc: tuple[int, int]) -> str:
    """Return the PTX of a generated kernel whose first parameters are `leading` integers."""
    from numba import cuda, types
    from numba.cuda.typing.typeof import typeof

    intrinsics_for("cuda")
    signature = [types.int64] * leading
    for example in argument_types:
        signature.append(example if isinstance(example, types.Type) else typeof(example))

    with without_gpu(cc):
        text, _result = cuda.compile(function, types.void(*signature), cc=cc, device=False, abi="numba")
    return str(text)


@contextlib.contextmanager
def without_gpu(cc: tuple[int, int]) -> Iterator[None]:
    """Let numba-cuda compile nested functions for `cc` if there is no GPU whose capability it could read."""
    from numba.cuda import compiler, dispatcher

    class NoGpu:
        compute_capability = cc

    functions = [(module, module.get_current_device) for module in (compiler, dispatcher)]
    try:
        for module, _ in functions:
            module.get_current_device = lambda: NoGpu
        yield
    finally:
        for module, function in functions:
            module.get_current_device = function


def _wrapper(kernel: Any, dims: int, count: int) -> Any:
    from .. import primitives

    intrinsics_for("cuda")
    names = [f"argument{k}" for k in range(count)]
    name = f"warpwell_{kernel.__name__}"
    passed, begin = beginning(kernel, names)
    body = [f"function({', '.join(passed)})"]
    if kernel.block is None:
        body = [f"index = grid({dims})", f"if {INSIDE[dims]}:", f"    {body[0]}"]
    parameters = ", ".join(["extent0", "extent1", "extent2", *names])
    source = "\n    ".join([f"def {name}({parameters}):", begin, *body])
    scope = {
        "function": launch_copy(kernel.function),
        "grid": primitives.grid,
        "set_flag": primitives.set_flag,
        "has_sizes": primitives.has_sizes,
        "__name__": GENERATED,
    }
    exec(compile(source, f"<warpwell {kernel.__name__}>", "exec"), scope)
    return scope[name]


def beginning(kernel: Any, names: list[str]) -> tuple[list[str], str]:
    """Return the kernel's own parameters, and the first statement of a generated kernel."""
    own, statements = names, []
    if reads_launch_flag(kernel):
        own, statements = names[:-1], [f"set_flag({names[-1]})"]
    statements += [f"has_sizes({name})" for name in own]
    return own, "; ".join(statements) or "pass"


def _stream(stream: Any) -> Any:
    from numba import cuda

    is_foreign = hasattr(stream, "__cuda_stream__") or hasattr(stream, "cuda_stream")
    return cuda.external_stream(handle_of(stream)) if is_foreign else stream


def synchronize(participants: Any = ()) -> None:
    """Wait for everything on the default stream, as `wait` does."""
    wait(mark(), participants)
