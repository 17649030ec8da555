"""`CudaSource`: kernels in CUDA C++, compiled at their first launch, which a scheduler can preempt between blocks."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import errors
from ..._check import checked_device
from ..arguments import is_argument, viewed
from ..blocks.launch import BlockLaunch
from ..fault import LaunchFlag
from ..gpu.device import require_gpu
from ..gpu.memory import address_of
from ..kernel import Launch, by_name, placed
from .parameters import convert_argument, parse_parameters

MAX_THREADS = 1024
"""Maximum number of threads of a block (compute capability 5.0 to 12.0)."""

_MAX_GRID = ((1 << 31) - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_HEADER = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]warpwell\.cuh[>"]', re.MULTILINE)


class CudaSource:
    """A kernel in CUDA C++, compiled by NVRTC for the GPU that runs it.

    ``source[blocks, threads](*args)`` runs the kernel as CUDA's ``<<<blocks, threads>>>`` does, and waits for it. A
    `warpwell.scheduler.Scheduler` takes ``source[blocks, threads]`` as it takes ``kernel[n]``. If the source begins
    with ``#include <warpwell.cuh>``, a scheduler can preempt the kernel between blocks: the source is compiled a second
    time for workers (blocks that stay resident and claim the blocks of the launch), where ``blockIdx`` and ``gridDim``
    describe the claimed block. A thread of such a kernel must not return before a barrier that other threads of its
    block reach.

    Parameters
    ----------
    code : str
        The program. A kernel is ``extern "C" __global__ void name(...)``.
    name : str
        Name of the kernel.
    parameters : dict of str
        Type of each parameter by its name, in the order of the source: a NumPy name such as ``"float32"`` for a number,
        ``"float32*"`` for a pointer, ``"const float32*"`` for a pointer to items that the kernel only reads, and
        ``"void*"`` for a pointer to anything else. NumPy arrays are copied back unless they are const.
    options : sequence of str, optional
        Options of NVRTC, such as ``"-DN=4"`` or ``"--use_fast_math"``. The architecture is the GPU's, unless an option
        names another one.
    cooperative : bool, default False
        Whether blocks wait for one another (grid-wide synchronization), so that all must be resident. Such a kernel
        is never preempted.

    Attributes
    ----------
    parameters : tuple of Parameter
    preemptible : bool
        Whether workers can run the blocks. If not, the kernel runs unmodified, and cannot be preempted.
    reason : TransformError or None
        Why the kernel is not preemptible.

    Raises
    ------
    ArgumentError
        An argument has the wrong type, or a parameter's type is unknown.

    Examples
    --------
    >>> import numpy as np, warpwell as ww
    >>> saxpy = ww.CudaSource(
    ...     '''
    ... #include <warpwell.cuh>
    ... extern "C" __global__ void saxpy(const float *x, float *y, float a, int n)
    ... {
    ...     int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...     if (i < n)
    ...         y[i] += a * x[i];
    ... }
    ... ''',
    ...     "saxpy",
    ...     {"x": "const float32*", "y": "float32*", "a": "float32", "n": "int32"},
    ... )
    >>> saxpy.preemptible
    True
    >>> x, y = np.ones(1000, np.float32), np.zeros(1000, np.float32)
    >>> saxpy[4, 256](x, y, np.float32(2), 1000)  # doctest: +SKIP
    """

    block: int | None = None
    max_registers: int | None = None

    def __init__(
        self,
        code: str,
        name: str,
        parameters: Mapping[str, str],
        *,
        options: Sequence[str] = (),
        cooperative: bool = False,
    ) -> None:
        if not isinstance(code, str) or not isinstance(name, str) or not name.isidentifier():
            raise errors.ArgumentError(
                "CudaSource takes a source text and the name of a kernel in it, both strings", name="name"
            )
        if isinstance(options, str) or not all(isinstance(option, str) for option in options):
            raise errors.ArgumentError(f"options={options!r:.60}: pass a list of strings", name="options")
        self.code = code
        self.name = self.__name__ = name
        self.parameters = parse_parameters(parameters, name)
        self.options = tuple(options)
        self.cooperative = cooperative
        self.reason = self._reason()
        self.preemptible = self.reason is None
        self.compiled: dict[Any, Any] = {}

    def _reason(self) -> errors.TransformError | None:
        if self.cooperative:
            construct, why = "cooperative", "its blocks wait for one another"
        elif not _HEADER.search(self.code):
            construct, why = "include", "its source does not include warpwell.cuh"
        else:
            return None
        message = f"CUDA kernel {self.name!r} runs whole and cannot be preempted: {why}"
        return errors.TransformError(message, construct=construct)

    @property
    def function(self) -> Any:
        """The source itself, which has the attributes that schedulers read from a kernel's function."""
        return self

    def __getitem__(self, configuration: Any) -> SourceLaunch:
        if not isinstance(configuration, tuple) or len(configuration) not in (2, 3):
            raise errors.ArgumentError(
                f"launch shape {configuration!r:.60} of CUDA kernel {self.name!r}: use {self.name}[blocks, threads], "
                f"followed by the bytes of extern __shared__ arrays if the kernel has any"
            )
        blocks, threads, *shared = configuration
        return SourceLaunch(
            self,
            _extents(blocks, _MAX_GRID, "blocks"),
            _extents(threads, _MAX_BLOCK, "threads"),
            shared[0] if shared else 0,
        )

    def __call__(self, *args: Any) -> None:
        """Refuse: a launch needs blocks and threads."""
        raise errors.ArgumentError(f"CUDA kernel {self.name!r} needs a grid: {self.name}[blocks, threads](...)")

    def __reduce__(self) -> tuple[Any, ...]:
        parameters = {parameter.name: parameter.declaration for parameter in self.parameters}
        make = functools.partial(CudaSource, options=self.options, cooperative=self.cooperative)
        return make, (self.code, self.name, parameters)

    def __repr__(self) -> str:
        return f"<CudaSource {self.name!r}>"


class SourceLaunch(Launch):
    """A CUDA C++ kernel with its grid; calling it runs it.

    Parameters
    ----------
    source : CudaSource
    blocks, threads : tuple of int
        Up to three numbers each, x first.
    shared : int
        Bytes of ``extern __shared__`` arrays.
    """

    def __init__(self, source: CudaSource, blocks: tuple[int, ...], threads: tuple[int, ...], shared: Any) -> None:
        if math.prod(threads) > MAX_THREADS:
            message = f"a block must have at most {MAX_THREADS} threads, got {threads}"
            raise errors.ArgumentError(message, name="threads")
        if not isinstance(shared, int | np.integer) or shared < 0:
            message = f"bytes of shared memory must be a number of at least 0, got {shared!r:.60}"
            raise errors.ArgumentError(message, name="shared")
        super().__init__(source, blocks)  # type: ignore[arg-type]
        self.threads = threads
        self.shared = int(shared)

    def subscript(self) -> Any:
        """Return the subscript of the source that makes this launch."""
        return self.shape, self.threads, self.shared

    def configuration(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return blocks and threads."""
        return self.shape, self.threads

    def cut(self, args: Sequence[Any], device: str | None = None) -> BlockLaunch:
        """Return the launch with its arguments, block by block."""
        return SourceBlocks(self, viewed(self.kernel, args), device)

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
        """Run the kernel whole on the current GPU and wait for it. NumPy arrays are copied there and back.

        Parameters
        ----------
        *args
            For a pointer, a NumPy array or an array in device memory (``__cuda_array_interface__``). Numbers are
            converted to the type of the parameter.
        device : str, optional
            Only "cuda" is valid.
        seed, services, aborts, flag
            Ignored; they belong to kernels in Python.
        """
        if named:
            raise by_name(self.kernel, named)
        args = viewed(self.kernel, args)
        if placed(self, args, device):
            return
        blocks = SourceBlocks(self, args, device)
        require_gpu()
        from ..compiler.run_cuda import synchronize

        try:
            blocks.start(None)
            synchronize()
        except BaseException:
            blocks.forget()
            raise
        blocks.end()

    def start(self, args: Sequence[Any], stream: Any) -> None:
        """Run the kernel in a numba-cuda stream, with arrays of the GPU, and return at once."""
        blocks = SourceBlocks(self, args, "cuda")
        try:
            blocks.start(stream)
        finally:
            blocks.forget()


class SourceBlocks(BlockLaunch):
    """A launch of a CUDA C++ kernel with its arguments, block by block."""

    launch: SourceLaunch
    _device_arrays: list[Any]

    def __init__(self, launch: SourceLaunch, args: Sequence[Any], device: str | None = None) -> None:
        source: Any = launch.kernel
        if device is not None:
            device = checked_device(device, among=("cuda",))
        parameters = source.parameters
        if len(args) != len(parameters):
            raise errors.ArgumentError(
                f"CUDA kernel {source.name!r} takes {len(parameters)} arguments ({', '.join(map(str, parameters))}), "
                f"got {len(args)}"
            )
        for value, parameter in zip(args, parameters, strict=True):
            if is_argument(value):
                raise errors.ArgumentError(
                    f"argument {parameter.name!r} of CUDA kernel {source.name!r} is on storage, which only kernels in "
                    f"Python can read; pass an array in memory",
                    name=parameter.name,
                )
        self._converted = [convert_argument(v, p, source.name) for v, p in zip(args, parameters, strict=True)]
        super().__init__(launch, args, "cuda")

    def _check(self) -> None:
        self.reason = self.kernel.reason

    def _shape(self) -> tuple[int, int]:
        if self.total >= 1 << 31:
            raise errors.ArgumentError(f"launch of {self.name!r} over {self.launch.shape} has more than 2^31 blocks")
        return self.total, math.prod(self.launch.threads)

    def begin(self) -> None:
        """Copy NumPy arrays to the GPU, each once, before the first block."""
        from ..gpu import copies  # needs the cuda extra

        source: Any = self.kernel
        pointers = [(v, p) for v, p in zip(self._converted, source.parameters, strict=True) if p.pointer]
        arrays = list({id(v): v for v, _ in pointers}.values())
        self._device_arrays, copied = copies.to_gpu(arrays)
        written = {id(v) for v, p in pointers if not p.constant}
        self._copied = [(array, copy) for array, copy in copied if id(array) in written]
        addresses = {id(v): np.uint64(address_of(d)) for v, d in zip(arrays, self._device_arrays, strict=True)}
        self._values = [
            addresses[id(v)] if p.pointer else v for v, p in zip(self._converted, source.parameters, strict=True)
        ]

    def start(self, stream: Any) -> None:
        """Launch the kernel alone in a stream, None for the default one; compile it if necessary."""
        self.begin()
        forms = self.forms()
        forms.prepare_plain()
        forms.start_plain(stream)

    def _close(self) -> None:
        super()._close()
        self._device_arrays = []

    def forget(self) -> None:
        """Release the arguments without copying arrays back (instead of `end`, after a failure)."""
        self._close()

    def forms(self) -> Any:
        """Return the compiled forms on the current GPU, between `begin` and `end`."""
        from .forms import SourceForms

        return SourceForms(self)

    def kept_forms(self, ordinal: int, words_of: Any) -> Any:
        """Return forms that are prepared on the current GPU; the source keeps the compiled kernels."""
        forms = self.forms()
        forms.prepare()
        return forms


def _extents(extents: Any, maximum: tuple[int, ...], quantity: str) -> tuple[int, ...]:
    parts = extents if isinstance(extents, tuple) else (extents,)
    are_integers = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in parts)
    if (
        not are_integers
        or not 1 <= len(parts) <= 3
        or not all(1 <= n <= m for n, m in zip(parts, maximum, strict=False))
    ):
        raise errors.ArgumentError(
            f"{quantity} must be up to three numbers from 1 to {maximum[: len(parts)]}, got {extents!r:.60}",
            name=quantity,
        )
    return tuple(int(n) for n in parts)
