"""Workers, which claim blocks, on the `cuda` target: the form of a launch that stops between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import primitives
from ..compiler.hooks import intrinsics_for
from ..compiler.run_cuda import (
    GENERATED,
    INSIDE,
    CompiledKernel,
    beginning,
    compiled,
    configured,
    numba_cuda,
    reads_launch_flag,
)
from ..device import device
from ..fault import share_fault_page
from ..gpu.prepared import PreparedForms
from ..primitives import (
    DEVICE,
    SYSTEM,
    barrier,
    fetch_add_as,
    get_claim,
    load_pair,
    load_relaxed,
    put_claim,
    store_relaxed,
    thread_index,
)
from ..signature import configuration
from . import control as at

STOP, MIRROR, CURSOR = (8 * word for word in (at.STOP, at.MIRROR, at.CURSOR))
DONE, BEGUN, LEFT = (8 * word for word in (at.DONE, at.BEGUN, at.LEFT))
"""Offsets of words in the control record, in bytes. `STOP` and `TARGET` are one pair."""

_WORKERS = """
def {name}(
    control, base, chunk, blocks, across, rows, extent0, extent1, extent2{parameters}
):
    {begin}
    worker = base + block_index()
    enter(control)
    ended = 0
    while True:
        first = claim(control, worker, chunk, ended)
        if first < 0 or first >= blocks:
            leave(control)
            return
        ended = min(chunk, blocks - first)
        {start}
        left = ended
        while left > 0:
            {together}
            set_virtual(x, y, z)
            {body}
            {following}
            left -= 1
"""

_START = {
    1: ["x, y, z = first, 0, 0"],
    2: ["y = div_short(first, across)", "x, z = first - y * across, 0"],
    3: [
        "z = div_short(first, across * rows)",
        "y = div_short(first - z * across * rows, across)",
        "x = first - (z * rows + y) * across",
    ],
}
"""Code that computes the position of a block, by the launch's dimensions."""

_FOLLOWING = {
    1: ["x += 1"],
    2: ["x += 1", "if x == across:", "    x = 0", "    y += 1"],
    3: ["x += 1", "if x == across:", "    x = 0", "    y += 1", "    if y == rows:", "        y = 0", "        z += 1"],
}
"""Code that advances to the position of the next block, without a division."""

ALL_LANES = 0xFFFFFFFF

WORD = np.dtype(np.int64)

_LEADING = {"plain": 3, "workers": 9}
"""Numbers of integers before the kernel's own parameters."""


@device
def enter(control):
    """Count a worker that begins (all threads of a block)."""
    if thread_index() == 0:
        fetch_add_as(control + BEGUN, 1, WORD)


@device
def claim(control, worker, chunk, ended):
    """Count the blocks that ended and claim the next; -1 if the worker must leave (all threads of a block).

    The flags are read before the claim, so every claimed block runs.
    """
    barrier()  # the blocks before have ended, for all threads
    if thread_index() == 0:
        before = 0
        if ended != 0:
            before = fetch_add_as(control + DONE, ended, WORD)
        stop, target = load_pair(control + STOP)
        mirror = load_relaxed(control + MIRROR, DEVICE)
        first = -1
        if stop <= worker and worker < target:
            first = fetch_add_as(control + CURSOR, chunk, WORD)
        put_claim(first)
        # The result of the first atomic is used last, when it has arrived.
        if mirror != 0 and before >> (mirror & 63) != (before + ended) >> (mirror & 63):
            store_relaxed(mirror & -64, before + ended, SYSTEM)
    barrier()
    return get_claim()


@device
def leave(control):
    """Count a worker that leaves (all threads of a block, after `claim`)."""
    if thread_index() == 0:
        fetch_add_as(control + LEFT, 1, WORD)


class Forms(PreparedForms):
    """The forms of a `BlockLaunch` that has begun, compiled and loaded on the current GPU: no launch waits for that.

    Attributes
    ----------
    lasting : bool
        Whether launches with equal arguments may use `plain_row`: none has a flag of its own.
    """

    def __init__(self, blocks: Any) -> None:
        share_fault_page()
        kernel, shape, values = blocks.kernel, blocks.launch.shape, blocks.values
        if reads_launch_flag(kernel):
            values = [*values, blocks.flag.address]
        self._grid, self._threads = configuration(shape, kernel.block)
        self._plain_arguments = (*shape, 1, 1)[:3]
        self._worker_arguments = *(*self._grid, 1, 1)[:2], *self._plain_arguments
        self._blocks_count = blocks.blocks
        self._forms, self._resources = _compiled_forms(blocks, values, int(np.prod(self._threads)))
        arguments = self._forms["plain"].flatten(values)
        self._prepared = {}
        if arguments is not None:
            self._prepared = {form: compiled_kernel.prepare(arguments) for form, compiled_kernel in self._forms.items()}
            values = []  # The forms may be kept for later launches, but the arrays must not be.
        self._values = values
        self.lasting = arguments is not None and not (reads_launch_flag(kernel) or blocks.participants)

    def _launch(self, form: str, grid: Any, stream: Any, leading: tuple[int, ...]) -> None:
        if form in self._prepared:
            super()._launch(form, grid, stream, leading)
        else:
            configured(self._forms[form].dispatcher, grid, self._threads, stream)(*leading, *self._values)


def _compiled_forms(
    blocks: Any, values: Sequence[Any], threads: int
) -> tuple[dict[str, CompiledKernel], dict[str, dict[str, int]]]:
    """Return the forms of a launch with blocks of `threads` threads, compiled for values, and their resources.

    Workers may have as many registers as keep the plain kernel's blocks resident: otherwise the compiler uses more
    for the loop around the kernel, and fewer blocks fit.
    """
    kernel, dims = blocks.kernel, len(blocks.launch.shape)
    plain = compiled(kernel, dims, len(values))
    key = ("cuda-forms", dims, tuple(plain.typeof_pyval(v) for v in values))
    if key not in kernel.compiled:
        forms = {"plain": CompiledKernel(kernel, plain, _LEADING["plain"], values)}
        resources = {"plain": _resources(forms["plain"].overload, threads)}
        if blocks.preemptible:
            workers = _form(blocks, dims, len(values), registers_for(resources["plain"]["registers"], threads))
            forms["workers"] = CompiledKernel(kernel, workers, _LEADING["workers"], values)
            resources["workers"] = _resources(forms["workers"].overload, threads)
        kernel.compiled[key] = forms, resources
    found: tuple[dict[str, CompiledKernel], dict[str, dict[str, int]]] = kernel.compiled[key]
    return found


def kept_forms(blocks: Any, ordinal: int, words_of: Callable[[Sequence[Any]], tuple[Any, ...] | None]) -> Forms:
    """Return the forms of a `BlockLaunch` that has begun; an equal earlier launch may have made them.

    Launches are equal if the driver receives the same arguments. ``words_of(values)`` returns these arguments, or None
    if they are unknown. The cached forms hold no array.
    """
    argument_words = words_of(blocks.values)
    if argument_words is None:
        return Forms(blocks)
    key = ordinal, blocks.launch.shape, argument_words, blocks.flag.address if reads_launch_flag(blocks.kernel) else 0
    cache = blocks.kernel.compiled.setdefault("cuda-kept", {})
    found: Forms | None = cache.get(key)
    if found is None:
        found = Forms(blocks)
        if found.plain_row() is not None:
            if len(cache) >= _MAX_CACHED:
                cache.clear()
            cache[key] = found
    return found


_MAX_CACHED = 256
"""Maximum number of cached launches of a kernel."""


def _resources(kernel: Any, threads: int) -> dict[str, int]:
    return {
        "registers": int(kernel.regs_per_thread),
        "shared": int(kernel.shared_mem_per_block),
        "local": int(kernel.local_mem_per_thread),
        "threads": threads,
        "resident": int(kernel.max_cooperative_grid_blocks(threads)),
    }


def registers_for(used: int, threads: int) -> int:
    """Return the most registers a thread with which as many blocks of `threads` are resident as with `used`.

    A multiprocessor has 65,536 registers, allocated to warps in units of 256, and room for 2,048 threads (compute
    capability 9.0). Launches rely on the occupancy that the driver reports, not on this number.
    """
    resident = min(2048 // threads, 65536 // (-(-used // 8) * 8 * threads))
    return min(255, 65536 // (max(1, resident) * threads) // 8 * 8)


def source_of(blocks: Any, dims: int, count: int) -> tuple[str, str, dict[str, Any]]:
    """Return the name, the source and the global variables of workers."""
    name = f"warpwell_workers_{blocks.kernel.__name__}"
    names = [f"argument{k}" for k in range(count)]
    passed, begin = beginning(blocks.kernel, names)
    call = f"function({', '.join(f'opaque({n}, left)' for n in passed)})"
    body = [call]
    if blocks.kernel.block is None:
        body = [f"index = virtual_grid({dims})", f"if {INSIDE[dims]}:", f"    {call}"]
    source = _WORKERS.format(
        name=name,
        parameters="".join(f", {n}" for n in names),
        begin=begin,
        start=_indented(_START[dims], 8),
        # Threads of a block kernel share memory; threads of other kernels share only the block index of their warp.
        together="syncwarp(ALL_LANES)" if blocks.kernel.block is None else "barrier()",
        body=_indented(body, 12),
        following=_indented(_FOLLOWING[dims], 12),
    )
    own = {"enter": enter, "claim": claim, "leave": leave, "ALL_LANES": ALL_LANES}
    scope = {**vars(primitives), **own, "function": blocks.virtual, "__name__": GENERATED}
    return name, source, scope


def _indented(statements: list[str], depth: int) -> str:
    return ("\n" + " " * depth).join(statements)


def ptx(blocks: Any, argument_types: tuple[Any, ...], *, cc: tuple[int, int] = (9, 0)) -> str:
    """Return the PTX of workers, as `run_cuda.ptx` does for the plain kernel; no GPU is needed."""
    from ..compiler.run_cuda import ptx_of

    dims = len(blocks.launch.shape)
    if reads_launch_flag(blocks.kernel):
        argument_types = (*argument_types, 0)
    return ptx_of(_function(blocks, dims, len(argument_types)), _LEADING["workers"], argument_types, cc)


def _function(blocks: Any, dims: int, count: int) -> Any:
    intrinsics_for("cuda")
    name, source, scope = source_of(blocks, dims, count)
    exec(compile(source, f"<warpwell {name}>", "exec"), scope)
    return scope[name]


def _form(blocks: Any, dims: int, count: int, registers: int) -> Any:
    kernel = blocks.kernel
    key = ("cuda", "workers", dims, count, registers)
    if key not in kernel.compiled:
        from numba import cuda

        workers = _function(blocks, dims, count)
        kernel.compiled[key] = cuda.jit(extensions=[numba_cuda], max_registers=registers)(workers)
    return kernel.compiled[key]
