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
from ..._os import Interrupts, interruptible
from ..fault import LaunchFlag, share_fault_page
from ..gpu.device import check, current, mark, reached
from ..gpu.prepared import check_kernel, pack
from ..signature import BLOCK_THREADS, check_arguments, configuration
from ..struct import DeviceStruct
from .compiling import compiling, explained
from .hooks import seam_for
from .virtual import asks, launch_copy, registers

GENERATED = "warpwell.targets.compiler.compiled"
"""The module that generated launch code belongs to."""

MAX_REGISTERS = 32
"""Registers a thread at most, unless a kernel says otherwise (``@kernel(max_registers=...)``), or walks spans.

A read that hits needs no more; the miss path, held to them, spills where it waits anyway. With 32, all 2,048 threads
of a multiprocessor are resident: sequential hits are 1.7 times as fast as with 64 (H200). Kernels that compute
much between reads want more.
"""

_WRAPPER = """
def {name}(extent0, extent1, extent2{parameters}):
    {begin}
    index = grid({dims})
    if {inside}:
        function({arguments})
"""

_BLOCK_WRAPPER = """
def {name}(extent0, extent1, extent2{parameters}):
    {begin}
    function({arguments})
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

            seam_for("cuda")
            words = val.flat()
            return types.UniTuple(types.int64, len(words)), words
        return ty, val


numba_cuda = NumbaCuda()


def run(
    launch: Any, values: list[Any], total: int, flag: LaunchFlag, interrupts: Interrupts
) -> Callable[[], bool] | None:
    """Run a launch and wait for it; with a stream return at once, with what tells whether it is done."""
    from ..gpu.copies import copy_in, copy_out

    stream = _stream(launch.stream)
    values, copied = copy_in(values, stream)
    start(launch, values, stream, flag)
    done = mark(stream)
    if launch.stream is not None and not copied and not launch.waits:
        if asks_flag(launch.kernel):
            keep(flag, done)
    elif _reached(done, interrupts):
        copy_out(copied, stream)
        return None
    return lambda: reached(done)


_going: dict[LaunchFlag, Any] = {}
"""Flags of launches that go on in streams, each with the event behind its launch."""


def keep(flag: LaunchFlag, done: Any) -> None:
    """Keep the flag of a launch until an event is reached."""
    for kept, event in list(_going.items()):  # a copy: other threads keep the flags of their launches meanwhile
        if _over(event):
            _going.pop(kept, None)
    _going[flag] = done


def _over(event: Any) -> bool:
    """Tell whether an event is reached, or the GPU lost."""
    try:
        return reached(event)
    except errors.KernelError:
        return True


def configured(dispatcher: Any, blocks: Any, threads: Any, stream: Any) -> Any:
    """Return a dispatcher with its grid, of which numba-cuda does not say that it is small: users did not choose it."""
    large = dispatcher.configure((1 << 20,), threads, stream or 0)
    grid = blocks if isinstance(blocks, tuple) else (blocks,)
    large.griddim = (*grid, 1, 1)[:3]
    return large


def start(launch: Any, values: Sequence[Any], stream: Any, flag: LaunchFlag) -> None:
    """Start a launch in a stream of numba-cuda or cuda.core, and no more.

    `flag` must be kept until it is done (see `keep`).
    """
    share_fault_page()
    values = [*values, flag.address] if asks_flag(launch.kernel) else values
    kernel = compiled(launch.kernel, len(launch.shape), len(values))
    extents = (*launch.shape, 1, 1)[:3]
    blocks, threads = configuration(launch.shape, launch.kernel.block)
    if max(blocks[1:], default=0) > 65535:
        raise errors.ArgumentError(
            f"launch shape {launch.shape} has too many outer blocks for a GPU: put the longest dimension last"
        )
    if blocks[0] >= 1 << 31:
        raise errors.ArgumentError(
            f"launch shape {launch.shape} has {blocks[0]} blocks, and a GPU takes fewer than 2**31: launch over "
            "parts, or let each thread do more"
        )
    if not kernel.overloads:
        check_arguments(launch.kernel, values, compiles=False)
    with (
        contextlib.nullcontext() if kernel.overloads else compiling(f"kernel {launch.kernel.__name__!r}"),
        explained(launch.kernel, "cuda"),
    ):
        configured(kernel, blocks, threads, stream)(*extents, *values)


class Series:
    """Launches in the default stream, with few instructions of Python each: numba-cuda's own take 50 us and more.

    Tuples hold words. A kernel's arguments have the same types at each launch of a series. Nothing waits for the
    launches: see `synchronize`. One thread at a time uses a series.

    Parameters
    ----------
    flag : LaunchFlag
        Of all the launches.
    """

    def __init__(self, flag: LaunchFlag) -> None:
        share_fault_page()
        self._flag = flag
        self._places: dict[Any, tuple[_Again, NDArray[np.uint64], NDArray[np.uint64], list[Any]]] = {}
        self._flat: dict[int, tuple[Any, NDArray[np.uint64]]] = {}

    def launch(self, kernel: Any, shape: tuple[int, ...], values: Sequence[Any]) -> None:
        """Start a launch."""
        values = [*values, self._flag.address] if asks_flag(kernel) else values
        if kernel not in self._places:
            again = _again(kernel, len(shape), values)
            self._places[kernel] = again, *pack([0] * again.words), [None] * len(values)
        again, places, addresses, last = self._places[kernel]
        words, floats = places.view(np.int64), places.view(np.float64)
        words[:3] = (*shape, 1, 1)[:3]
        for k, value in enumerate(values):
            kind = type(value)
            if kind is int or kind is tuple:
                words[again.slots[k]] = value
            elif kind is float:
                floats[again.slots[k]] = value
            elif value is not last[k]:
                if id(value) not in self._flat:
                    self._flat[id(value)] = value, again.flattened(k, value)
                places[again.slots[k]] = self._flat[id(value)][1]
                last[k] = value
        again.start(*configuration(shape, kernel.block), int(addresses.ctypes.data))

    def read(self, array: Any) -> NDArray[Any]:
        """Return a small device array as it is after all launches so far."""
        from cuda.bindings import driver

        found = np.empty(array.shape, array.dtype)
        check(driver.cuMemcpyDtoH(found.ctypes.data, int(array.device_ctypes_pointer.value), found.nbytes))
        return found


class _Again:
    """A compiled kernel, and where the words of its arguments lie.

    Attributes
    ----------
    words : int
    slots : list of slice
    """

    def __init__(self, kernel: Any, dims: int, values: Sequence[Any]) -> None:
        from cuda.bindings import driver

        dispatcher = compiled(kernel, dims, len(values))
        types = tuple(dispatcher.typeof_pyval(value) for value in (0, 0, 0, *values))
        if types not in dispatcher.overloads:
            with compiling(f"kernel {kernel.__name__!r}"), explained(kernel, "cuda"):
                dispatcher.compile(types).bind()
        self._kernel = dispatcher.overloads[types]
        self._name = kernel.__name__
        self._launch = driver.cuLaunchKernel
        self._function = driver.CUfunction(int(self._kernel._codelibrary.get_cufunc().handle))
        ends = 3 + np.cumsum([0, *(len(self.flattened(k, value)) for k, value in enumerate(values))])
        self.words = int(ends[-1])
        self.slots = [slice(int(first), int(end)) for first, end in itertools.pairwise(ends)]

    def flattened(self, k: int, value: Any) -> NDArray[np.uint64]:
        """Return the words that argument `k` becomes."""
        words: list[Any] = []
        copied: list[Any] = []
        self._kernel._prepare_args(self._kernel.argument_types[3 + k], value, 0, copied, words)
        if copied:
            raise errors.ArgumentError(f"kernel {self._name!r}: argument {k} is not in device memory")
        return pack(words)[0][: len(words)]

    def start(self, blocks: tuple[int, ...], threads: tuple[int, ...], addresses: int, stream: int = 0) -> None:
        """Launch it with the arguments whose addresses lie at an address, in the stream of a handle."""
        result = self._launch(self._function, *(*blocks, 1, 1)[:3], *(*threads, 1, 1)[:3], 0, stream, addresses, 0)
        if int(result[0]):
            check_kernel(result, self._name)


def _again(kernel: Any, dims: int, values: Sequence[Any]) -> _Again:
    """Return a kernel for arguments of the types of these, made once for each GPU."""
    kinds = tuple(
        (type(v), v.static)
        if isinstance(v, DeviceStruct)
        else (v.dtype, v.ndim)
        if hasattr(v, "dtype")
        else (type(v), len(v) if isinstance(v, tuple) else 0)
        for v in values
    )
    key = ("cuda-again", dims, int(current()[1].device_id), kinds)
    if key not in kernel.compiled:
        kernel.compiled[key] = _Again(kernel, dims, values)
    found: _Again = kernel.compiled[key]
    return found


def launch(kernel: Any, n: int, stream: Any, *values: int) -> None:
    """Launch a kernel of `n` threads over words in a stream of numba-cuda or cuda.core, and return.

    With few instructions of Python, as `Series`.
    """
    share_fault_page()
    places = np.array([n, 1, 1, *values], np.int64)
    addresses = places.ctypes.data + 8 * np.arange(len(places), dtype=np.uint64)
    _again(kernel, 1, [0] * len(values)).start(
        (-(-n // BLOCK_THREADS),), (BLOCK_THREADS,), int(addresses.ctypes.data), int(stream.handle)
    )


def wait(event: Any, participants: Any = ()) -> None:
    """Wait for an event such that Ctrl-C works: it aborts waits in device code, then is raised."""

    def stop() -> None:
        for participant in participants:
            participant.abort()

    with interruptible(stop) as interrupts:
        interrupts.leaves = not participants
        _reached(event, interrupts)


def _reached(event: Any, interrupts: Interrupts) -> bool:
    """Wait for an event; return whether it came, which a second Ctrl-C does not wait for."""
    spins = 0
    while not reached(event):
        try:
            spins += 1
            if spins > 200:
                time.sleep(min(50e-6 * (spins - 200), 1e-3))
        except BaseException as error:  # a signal's: the kernel goes on, and uses what the caller holds
            interrupts.catch(error)
        if len(interrupts.raised) > 1 and interrupts.leaves:
            return False
    return True


def asks_flag(kernel: Any) -> bool:
    """Tell whether a kernel is given its launch's flag as a last argument: where it asks `failed`."""
    key = "cuda-asks"
    if key not in kernel.compiled:
        kernel.compiled[key] = asks(kernel.function)
    return bool(kernel.compiled[key])


def max_registers(kernel: Any) -> int:
    """Return the registers a thread of a kernel at most: what it says, or what the functions that it calls want."""
    key = "cuda-registers"
    if key not in kernel.compiled:
        kernel.compiled[key] = kernel.max_registers or max(MAX_REGISTERS, registers(kernel.function))
    return int(kernel.compiled[key])


def compiled(kernel: Any, dims: int, count: int) -> Any:
    """Return the numba-cuda dispatcher of a kernel for launches of `dims` dimensions."""
    key = ("cuda", dims, count)
    if key not in kernel.compiled:
        from numba import cuda

        options: dict[str, Any] = {
            "extensions": [numba_cuda],
            "max_registers": max_registers(kernel),
        }
        kernel.compiled[key] = cuda.jit(**options)(_wrapper(kernel, dims, count))
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
    if asks_flag(kernel):
        argument_types = (*argument_types, 0)
    with explained(kernel, "cuda"):
        return ptx_of(_wrapper(kernel, dims, len(argument_types)), 3, argument_types, cc)


def ptx_of(function: Any, words: int, argument_types: tuple[Any, ...], cc: tuple[int, int]) -> str:
    """Return the PTX of a generated kernel whose first parameters are `words` integers."""
    from numba import cuda, types
    from numba.cuda.typing.typeof import typeof

    seam_for("cuda")
    signature = [types.int64] * words
    for example in argument_types:
        signature.append(example if isinstance(example, types.Type) else typeof(example))

    with without_gpu(cc):
        text, _result = cuda.compile(function, types.void(*signature), cc=cc, device=False, abi="numba")
    return str(text)


@contextlib.contextmanager
def without_gpu(cc: tuple[int, int]) -> Iterator[None]:
    """Let numba-cuda compile nested functions for `cc`, where it would ask the GPU that is not there."""
    from numba.cuda import compiler, dispatcher

    class NoGpu:
        compute_capability = cc

    asked = [(module, module.get_current_device) for module in (compiler, dispatcher)]
    try:
        for module, _ in asked:
            module.get_current_device = lambda: NoGpu
        yield
    finally:
        for module, function in asked:
            module.get_current_device = function


def _wrapper(kernel: Any, dims: int, count: int) -> Any:
    from .. import atomics, block

    seam_for("cuda")
    names = [f"argument{k}" for k in range(count)]
    name = f"warpwell_{kernel.__name__}"
    passed, begin = beginning(kernel, names)
    source = (_WRAPPER if kernel.block is None else _BLOCK_WRAPPER).format(
        name=name,
        dims=dims,
        inside=INSIDE[dims],
        parameters="".join(f", {n}" for n in names),
        begin=begin,
        arguments=", ".join(passed),
    )
    scope = {
        "function": launch_copy(kernel.function),
        "grid": atomics.grid,
        "set_flag": block.set_flag,
        "has_sizes": block.has_sizes,
        "__name__": GENERATED,
    }
    exec(compile(source, f"<warpwell {kernel.__name__}>", "exec"), scope)
    return scope[name]


def beginning(kernel: Any, names: list[str]) -> tuple[list[str], str]:
    """Return the parameters that are the kernel's own, and what a generated kernel begins with."""
    passed, lines = names, []
    if asks_flag(kernel):
        passed, lines = names[:-1], [f"set_flag({names[-1]})"]
    lines += [f"has_sizes({name})" for name in passed]
    return passed, "; ".join(lines) or "pass"


def _stream(stream: Any) -> Any:
    from numba import cuda

    if stream is None:
        return None
    if hasattr(stream, "__cuda_stream__"):
        return cuda.external_stream(int(stream.__cuda_stream__()[1]))
    if hasattr(stream, "cuda_stream"):
        return cuda.external_stream(int(stream.cuda_stream))
    return stream


def synchronize_stream(stream: Any) -> None:
    """Wait for everything in a stream of any library, as `wait` does."""
    wait(mark(_stream(stream)))


def synchronize(participants: Any = ()) -> None:
    """Wait for everything on the default stream, as `wait` does."""
    wait(mark(), participants)
