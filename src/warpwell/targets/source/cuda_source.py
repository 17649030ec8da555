"""`CudaSource`: kernels in CUDA C++, compiled when they are launched, that a scheduler can preempt as its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from .parameters import converted
from .text import SourceText

MOST_THREADS = 1024
_GRID = ((1 << 31) - 1, 65535, 65535)
_BLOCK = (1024, 1024, 64)


class CudaSource:
    """A kernel in CUDA C++, compiled by NVRTC for the GPU that it is launched on.

    ``source[blocks, threads](*args)`` runs it, as CUDA's ``<<<blocks, threads>>>`` does, and waits for it. A
    `warpwell.scheduler.Scheduler` takes ``source[blocks, threads]`` as it takes ``kernel[n]``: the same text is
    compiled once more, with ``blockIdx`` and ``gridDim`` as the place that a worker has claimed, so that it is
    preempted between blocks. `preemptible` and `reason` tell whether that can be.

    Parameters
    ----------
    code : str
        The program. A kernel is ``extern "C" __global__ void name(...)``.
    name : str
        Of the kernel.
    options : sequence of str
        Of NVRTC, such as ``"-DN=4"`` or ``"--use_fast_math"``. The architecture is the GPU's, unless one is named here.

    Attributes
    ----------
    parameters : list of Parameter
    preemptible : bool
        Whether workers can run its blocks. Where not, it runs whole.
    reason : TransformError or None
        Why not.

    Raises
    ------
    TransformError
        There is no such kernel, it is a template, it launches kernels, or a parameter is neither a pointer nor a
        number; ``construct`` and ``line`` say which and where.

    Examples
    --------
    >>> import numpy as np, warpwell as ww
    >>> saxpy = ww.CudaSource('''
    ... extern "C" __global__ void saxpy(const float *x, float *y, float a, int n)
    ... {
    ...     int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...     if (i < n)
    ...         y[i] += a * x[i];
    ... }
    ... ''', "saxpy")
    >>> saxpy.preemptible
    True
    >>> x, y = np.ones(1000, np.float32), np.zeros(1000, np.float32)
    >>> saxpy[4, 256](x, y, np.float32(2), 1000)  # doctest: +SKIP
    """

    block: int | None = None
    max_registers: int | None = None

    def __init__(self, code: str, name: str, *, options: Sequence[str] = ()) -> None:
        if not isinstance(code, str) or not isinstance(name, str) or not name.isidentifier():
            raise errors.ArgumentError(
                "CudaSource takes a source text and the name of a kernel in it, both strings", name="name"
            )
        if isinstance(options, str) or not all(isinstance(option, str) for option in options):
            raise errors.ArgumentError(f"options={options!r:.60}: give a list of strings", name="options")
        self.code = code
        self.name = self.__name__ = name
        self.options = tuple(options)
        self.text = SourceText(code, name, self.options)
        self.parameters = self.text.parameters
        self.reason = self.text.reason
        self.preemptible = self.reason is None
        self.compiled: dict[Any, Any] = {}

    @property
    def function(self) -> Any:
        """What is known of a kernel by its function is known of a source by itself."""
        return self

    def __getitem__(self, configuration: Any) -> SourceLaunch:
        if not isinstance(configuration, tuple) or len(configuration) not in (2, 3):
            raise errors.ArgumentError(
                f"launch shape {configuration!r:.60} of CUDA kernel {self.name!r}: use {self.name}[blocks, threads], "
                f"with the bytes of extern __shared__ arrays after them where there are some"
            )
        blocks, threads, *shared = configuration
        return SourceLaunch(
            self, _extents(blocks, _GRID, "blocks"), _extents(threads, _BLOCK, "threads"), shared[0] if shared else 0
        )

    def __call__(self, *args: Any) -> None:
        """Refuse: a launch needs blocks and threads."""
        raise errors.ArgumentError(f"CUDA kernel {self.name!r} needs a grid: {self.name}[blocks, threads](...)")

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.code, self.name, self.options)

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
        if math.prod(threads) > MOST_THREADS:
            raise errors.ArgumentError(f"blocks of {threads} threads: {MOST_THREADS} are the most", name="threads")
        if not isinstance(shared, int | np.integer) or shared < 0:
            raise errors.ArgumentError(f"{shared!r:.60} bytes of shared memory: give a number", name="shared")
        super().__init__(source, blocks)  # type: ignore[arg-type]
        self.threads = threads
        self.shared = int(shared)

    def subscript(self) -> Any:
        """Return what the source is subscripted with to get this launch."""
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
        """Run the kernel on the current GPU, as it is, and wait for it. NumPy arrays are copied there and back.

        Parameters
        ----------
        *args
            Arrays, for pointers: NumPy's, or any in device memory (``__cuda_array_interface__``). Numbers are converted
            to the type of their parameter.
        device : str, optional
            "cuda", if any.
        seed, services, aborts, flag
            Of no use here: they belong to kernels in Python.
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
            blocks.begin()
            forms = blocks.forms()
            forms.prepare_plain()
            forms.start_plain(None)
            synchronize()
        except BaseException:
            blocks.forget()
            raise
        blocks.end()

    def start(self, args: Sequence[Any], stream: Any) -> None:
        """Run the kernel in a numba-cuda stream, with arrays of the GPU, and return at once."""
        blocks = SourceBlocks(self, args, "cuda")
        blocks.begin()
        try:
            forms = blocks.forms()
            forms.prepare_plain()
            forms.start_plain(stream)
        finally:
            blocks.forget()


class SourceBlocks(BlockLaunch):
    """A launch of a CUDA C++ kernel with its arguments, block by block."""

    launch: SourceLaunch
    _there: list[Any]

    def __init__(self, launch: SourceLaunch, args: Sequence[Any], device: str | None = None) -> None:
        source: Any = launch.kernel
        if device is not None:
            device = checked_device(device, among=("cuda",))
        wanted = source.parameters
        if len(args) != len(wanted):
            raise errors.ArgumentError(
                f"CUDA kernel {source.name!r} takes {len(wanted)} arguments ({', '.join(p.text for p in wanted)}), "
                f"and was given {len(args)}"
            )
        for value, parameter in zip(args, wanted, strict=True):
            if is_argument(value):
                raise errors.ArgumentError(
                    f"argument {parameter.name!r} of CUDA kernel {source.name!r} is on storage: only kernels in Python "
                    f"read those; pass an array in memory",
                    name=parameter.name,
                )
        self._converted = [converted(v, p, source.name) for v, p in zip(args, wanted, strict=True)]
        super().__init__(launch, args, "cuda")

    def _check(self) -> None:
        self.reason = self.kernel.reason

    def _shape(self) -> tuple[int, int]:
        if self.total >= 1 << 31:
            raise errors.ArgumentError(f"launch of {self.name!r} over {self.launch.shape} has more than 2^31 blocks")
        return self.total, math.prod(self.launch.threads)

    def begin(self) -> None:
        """Copy NumPy arrays to the GPU (once, before the first block); one that is passed twice is copied once."""
        from ..gpu import copies  # needs the cuda extra

        source: Any = self.kernel
        pointers = [(v, p) for v, p in zip(self._converted, source.parameters, strict=True) if p.pointer]
        arrays = list({id(v): v for v, _ in pointers}.values())
        there, copied = copies.to_gpu(arrays)
        written = {id(v) for v, p in pointers if not p.constant}
        self._copied = [(array, copy) for array, copy in copied if id(array) in written]
        self._there = there  # which keeps the memory
        address = {id(v): np.uint64(address_of(t)) for v, t in zip(arrays, there, strict=True)}
        self._values = [
            address[id(v)] if p.pointer else v for v, p in zip(self._converted, source.parameters, strict=True)
        ]

    def _close(self) -> None:
        super()._close()
        self._there = []

    def forget(self) -> None:
        """Let go of the arguments, with nothing brought back (in place of `end`, after a failure)."""
        self._close()

    def forms(self) -> Any:
        """Return the compiled forms on the current GPU, between `begin` and `end`."""
        from .forms import SourceForms

        return SourceForms(self)

    def kept_forms(self, ordinal: int) -> Any:
        """Return forms that are prepared on the current GPU. What is compiled is kept with the source."""
        forms = self.forms()
        forms.prepare()
        return forms


def _again(code: str, name: str, options: tuple[str, ...]) -> CudaSource:
    return CudaSource(code, name, options=options)


def _extents(given: Any, most: tuple[int, ...], what: str) -> tuple[int, ...]:
    parts = given if isinstance(given, tuple) else (given,)
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in parts)
    if not whole or not 1 <= len(parts) <= 3 or not all(1 <= n <= m for n, m in zip(parts, most, strict=False)):
        raise errors.ArgumentError(
            f"{what} {given!r:.60}: give a number, or a tuple of up to three, from 1 to {most[: len(parts)]}", name=what
        )
    return tuple(int(n) for n in parts)
