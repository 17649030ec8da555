"""Workers and slices on the `cuda` target: the two forms in which a launch can be stopped between blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from .atomics import DEVICE, div, load_relaxed, rem
from .block import (
    add_relaxed,
    barrier,
    get_claim,
    own_block,
    put_claim,
    set_virtual,
    thread_index,
    virtual_grid,
)
from .device import device, seam_for
from .notice import compiling
from .run_cuda import INSIDE, MAX_REGISTERS, compiled, configuration, numba_cuda

_CURSOR, _DONE, _LIVE, _LEFT = 16, 24, 32, 40

_WORKERS = """
def {name}(control, base, chunk, blocks, period, across, rows, extent0, extent1, extent2{parameters}):
    worker = base + own_block()
    if thread_index() == 0:
        add_relaxed(control + LIVE, 1)
    ended = 0
    while True:
        first = claim(control, worker, chunk, ended, period, {dims}, across, rows)
        if first < 0 or first >= blocks:
            leave(control)
            return
        last = min(first + chunk, blocks)
        for number in range(first, last):
            if number != first:
                place(number, period, {dims}, across, rows)
            {body}
        ended = last - first
"""

_SLICE = """
def {name}(first, across, rows, extent0, extent1, extent2{parameters}):
    number = first + own_block()
    place(number, number + 1, {dims}, across, rows)
    {body}
"""

_GRID_BODY = """index = virtual_grid({dims})
            if {inside}:
                function({arguments})"""


@device
def set_place(number, period, dims, across, rows):
    """Tell a block its virtual index (one thread; a barrier must follow)."""
    if number >= period:
        number = rem(number, period)
    if dims == 1:
        set_virtual(number, 0, 0)
    else:
        line = div(number, across)
        plane = div(line, rows)
        set_virtual(number - line * across, line - plane * rows, plane)


@device
def claim(control, worker, chunk, ended, period, dims, across, rows):
    """Count the blocks that ended and claim the next; -1 where the worker is to leave (all threads of a block).

    What the flags say is looked at first, so whatever is claimed is run.
    """
    barrier()  # the block before has ended, for all threads
    if thread_index() == 0:
        stop = load_relaxed(control, DEVICE)
        target = load_relaxed(control + 8, DEVICE)
        if ended != 0:
            add_relaxed(control + _DONE, ended)
        first = -1
        if stop == 0 and worker < target:
            first = add_relaxed(control + _CURSOR, chunk)
            set_place(first, period, dims, across, rows)
        put_claim(first)
    barrier()
    return get_claim()


@device
def place(number, period, dims, across, rows):
    """Go on to a block (all threads of a block)."""
    barrier()
    if thread_index() == 0:
        set_place(number, period, dims, across, rows)
    barrier()


@device
def leave(control):
    """Note that a worker leaves (all threads of a block)."""
    if thread_index() == 0:
        add_relaxed(control + _LEFT, 1)
        add_relaxed(control + _LIVE, -1)


class Forms:
    """The compiled forms of a `BlockLaunch` on the current GPU: plain, workers and slices."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self._across, self._threads = configuration(blocks.launch.shape, blocks.kernel.block)
        dims = len(blocks.launch.shape)
        count = len(blocks.args)
        self._extents = (*blocks.launch.shape, 1, 1)[:3]
        self._grid = (*self._across, 1, 1)[:2]
        self.plain = compiled(blocks.kernel, dims, count)
        self.workers = _form(blocks, "workers", _WORKERS, dims, count) if blocks.preemptible else None
        self.slices = _form(blocks, "slices", _SLICE, dims, count) if blocks.sliceable else None

    def prepare(self) -> None:
        """Compile and load all forms, so that a launch waits for neither."""
        for dispatcher, words in ((self.plain, 3), (self.workers, 10), (self.slices, 6)):
            if dispatcher is not None:
                self._kernel(dispatcher, words)

    def _kernel(self, dispatcher: Any, words: int) -> Any:
        arguments = [0] * words + self._blocks.values
        types = tuple(dispatcher.typeof_pyval(a) for a in arguments)
        if types not in dispatcher.overloads:
            with compiling(f"kernel {self._blocks.kernel.__name__!r}"):
                dispatcher.compile(types).bind()
        return dispatcher.overloads[types]

    def resources(self, form: str) -> dict[str, int]:
        """Return a form's registers a thread, shared and local bytes, threads, and blocks resident on the whole GPU."""
        dispatcher, words = {"plain": (self.plain, 3), "workers": (self.workers, 10), "slices": (self.slices, 6)}[form]
        kernel = self._kernel(dispatcher, words)
        threads = int(np.prod(self._threads))
        return {
            "registers": int(kernel.regs_per_thread),
            "shared": int(kernel.shared_mem_per_block),
            "local": int(kernel.local_mem_per_thread),
            "threads": threads,
            "resident": int(kernel.max_cooperative_grid_blocks(threads)),
        }

    def start(self, control: int, base: int, workers: int, stream: Any, chunk: int = 1, rounds: int = 1) -> None:
        """Launch `workers` workers, numbered from `base`, that claim `chunk` blocks at a time; return at once.

        With `rounds`, the blocks are run that many times over, in order, which is how a rate is measured.
        """
        blocks = self._blocks.blocks
        words = (control, base, chunk, blocks * rounds, blocks, *self._grid, *self._extents)
        self.workers[workers, self._threads, stream](*words, *self._blocks.values)  # type: ignore[index]

    def start_slice(self, first: int, count: int, stream: Any) -> None:
        """Launch `count` blocks from block `first`; return at once."""
        words = (first, *self._grid, *self._extents)
        self.slices[count, self._threads, stream](*words, *self._blocks.values)  # type: ignore[index]

    def start_plain(self, stream: Any) -> None:
        """Launch the untransformed kernel, whole; return at once."""
        self.plain[self._across, self._threads, stream](*self._extents, *self._blocks.values)


def forms(blocks: Any) -> Forms:
    """Return the forms of a `BlockLaunch`, which has begun."""
    return Forms(blocks)


def to_gpu(values: list[Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Return launch values with NumPy arrays copied to the GPU, and the pairs to be copied back."""
    from numba import cuda

    out, copied = [], []
    for value in values:
        if isinstance(value, np.ndarray):
            there = cuda.to_device(value)
            copied.append((value, there))
            out.append(there)
        elif hasattr(value, "__cuda_array_interface__"):
            out.append(cuda.as_cuda_array(value))
        else:
            out.append(value)
    cuda.default_stream().synchronize()  # streams of executors do not wait for the default one
    return out, copied


def source_of(blocks: Any, template: str, dims: int, count: int) -> tuple[str, str, dict[str, Any]]:
    """Return the name, the source and the names in reach of a form."""
    names = [f"argument{k}" for k in range(count)]
    arguments = ", ".join(names)
    body = f"function({arguments})"
    if blocks.kernel.block is None:
        body = _GRID_BODY.format(dims=dims, inside=INSIDE[dims], arguments=arguments)
    if template is _SLICE:
        body = body.replace("\n        ", "\n")
    name = f"warpwell_{'workers' if template is _WORKERS else 'slice'}_{blocks.kernel.__name__}"
    source = template.format(name=name, dims=dims, parameters="".join(f", {n}" for n in names), body=body)
    scope = {
        "function": blocks.virtual,
        "claim": claim,
        "place": place,
        "leave": leave,
        "own_block": own_block,
        "thread_index": thread_index,
        "virtual_grid": virtual_grid,
        "add_relaxed": add_relaxed,
        "LIVE": _LIVE,
        "__name__": "warpwell.targets.generated",
    }
    return name, source, scope


def ptx(blocks: Any, argument_types: tuple[Any, ...], form: str = "workers", *, cc: tuple[int, int] = (9, 0)) -> str:
    """Return the PTX of a form, as `run_cuda.ptx` does for the plain kernel; no GPU is needed."""
    from .run_cuda import ptx_of

    dims = len(blocks.launch.shape)
    template, words = (_WORKERS, 10) if form == "workers" else (_SLICE, 6)
    return ptx_of(_function(blocks, template, dims, len(argument_types)), words, argument_types, cc)


def _function(blocks: Any, template: str, dims: int, count: int) -> Any:
    seam_for("cuda")
    name, source, scope = source_of(blocks, template, dims, count)
    exec(compile(source, f"<warpwell {name}>", "exec"), scope)
    return scope[name]


def _form(blocks: Any, form: str, template: str, dims: int, count: int) -> Any:
    kernel = blocks.kernel
    key = ("cuda", form, dims, count)
    if key not in kernel.compiled:
        from numba import cuda

        kernel.compiled[key] = cuda.jit(
            extensions=[numba_cuda], max_registers=kernel.max_registers or MAX_REGISTERS
        )(_function(blocks, template, dims, count))
    return kernel.compiled[key]
