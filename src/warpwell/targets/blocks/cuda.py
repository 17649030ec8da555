"""Workers, which claim blocks, on the `cuda` target: the form of a launch that stops between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import atomics, block
from ..atomics import SYSTEM, load_pair, store_relaxed
from ..block import add_relaxed, barrier, get_claim, put_claim, thread_index
from ..compiler.compiling import compiling, explained
from ..compiler.hooks import seam_for
from ..compiler.run_cuda import GENERATED, INSIDE, asks_flag, beginning, compiled, configured, numba_cuda
from ..device import device
from ..fault import share_fault_page
from ..gpu.prepared import Prepared
from ..signature import configuration
from . import control as at

STOP, FLOOR, MIRROR, CURSOR = (8 * word for word in (at.STOP, at.FLOOR, at.MIRROR, at.CURSOR))
DONE, BEGUN, LEFT = (8 * word for word in (at.DONE, at.BEGUN, at.LEFT))
"""Offsets of words in the control record, in bytes. `STOP` and `TARGET` are one pair, `FLOOR` and `MIRROR` another."""

_WORKERS = """
def {name}(
    control, base, chunk, blocks, period, across, rows, extent0, extent1, extent2{parameters}
):
    {begin}
    worker = base + own_block()
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
    1: ["x, y, z = number, 0, 0"],
    2: ["y = div_short(number, across)", "x, z = number - y * across, 0"],
    3: [
        "z = div_short(number, across * rows)",
        "y = div_short(number - z * across * rows, across)",
        "x = number - (z * rows + y) * across",
    ],
}
"""Where a block is, by the launch's dimensions."""

_WRAP = ["number = first", "if number >= period:", "    number = rem(number, period)"]
"""Of a launch that is run several times over."""

_FOLLOWING = {
    1: ["x += 1", "if x == period:", "    x = 0"],
    2: ["x += 1", "if x == across:", "    x = 0", "    y += 1", "    if y * across == period:", "        y = 0"],
    3: [
        "x += 1",
        "if x == across:",
        "    x = 0",
        "    y += 1",
        "    if y == rows:",
        "        y = 0",
        "        z += 1",
        "        if z * rows * across == period:",
        "            z = 0",
    ],
}
"""Where the next block is: one after the other, with no division."""

ALL_LANES = 0xFFFFFFFF

_WORDS = {"plain": 3, "workers": 10}
"""Integers before the kernel's own parameters."""


@device
def enter(control):
    """Note that a worker begins (all threads of a block)."""
    if thread_index() == 0:
        add_relaxed(control + BEGUN, 1)


@device
def claim(control, worker, chunk, ended):
    """Count the blocks that ended and claim the next; -1 where the worker is to leave (all threads of a block).

    What the flags say is looked at first, so whatever is claimed is run.
    """
    barrier()  # the blocks before have ended, for all threads
    if thread_index() == 0:
        before = 0
        if ended != 0:
            before = add_relaxed(control + DONE, ended)
        stop, target = load_pair(control + STOP)
        floor, mirror = load_pair(control + FLOOR)
        first = -1
        if stop <= worker and floor <= worker and worker < target:
            first = add_relaxed(control + CURSOR, chunk)
        put_claim(first)
        # what was added to long ago is waited for last
        if mirror != 0 and before >> (mirror & 63) != (before + ended) >> (mirror & 63):
            store_relaxed(mirror & -64, before + ended, SYSTEM)
    barrier()
    return get_claim()


@device
def leave(control):
    """Note that a worker leaves (all threads of a block, behind `claim`)."""
    if thread_index() == 0:
        add_relaxed(control + LEFT, 1)


class Forms:
    """The compiled forms of a `BlockLaunch` on the current GPU: plain and workers."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self._across, self._threads = configuration(blocks.launch.shape, blocks.kernel.block)
        self._extents = (*blocks.launch.shape, 1, 1)[:3]
        self._grid = (*self._across, 1, 1)[:2]
        self._lasting = not (asks_flag(blocks.kernel) or blocks.participants)
        self._values = [*blocks.values, blocks.flag.address] if asks_flag(blocks.kernel) else blocks.values
        self.plain = compiled(blocks.kernel, len(blocks.launch.shape), len(self._values))
        types = tuple(self.plain.typeof_pyval(v) for v in self._values)
        self._key = ("cuda-forms", len(blocks.launch.shape), types)
        self._forms: dict[str, tuple[Any, dict[str, int], Any]] = {}
        self._prepared: dict[str, Prepared] = {}
        self._count = blocks.blocks
        self._row: NDArray[np.int64] | None = None

    def prepare(self) -> None:
        """Compile and load all forms, so that a launch waits for neither.

        The other forms may have as many registers as leave the plain kernel's blocks resident: a compiler that is not
        told takes what a loop around the kernel gains by, and fewer blocks fit.
        """
        if self._prepared:
            return  # of an equal launch before
        share_fault_page()
        blocks = self._blocks
        made = blocks.kernel.compiled
        if self._key not in made:
            dims, count = len(blocks.launch.shape), len(self._values)
            threads = int(np.prod(self._threads))
            found = {"plain": (self.plain, self._kernel(self.plain, _WORDS["plain"]))}
            cap = registers_for(int(found["plain"][1].regs_per_thread), threads)
            if blocks.preemptible:
                workers = _form(blocks, dims, count, cap)
                found["workers"] = (workers, self._kernel(workers, _WORDS["workers"]))
            made[self._key] = {
                form: (dispatcher, _resources(kernel, threads), kernel) for form, (dispatcher, kernel) in found.items()
            }
        self._forms = made[self._key]
        arguments = _flat_arguments(self._forms["plain"][2], _WORDS["plain"], self._values)
        if arguments is not None:
            self._prepared = {form: self._prepare(form, arguments) for form in self._forms}
            # it may be kept for launches to come, and the arrays must not be
            self._blocks, self._values = None, []

    def _prepare(self, form: str, arguments: list[Any]) -> Prepared:
        from cuda.bindings import driver

        function = driver.CUfunction(int(self._forms[form][2]._codelibrary.get_cufunc().handle))
        return Prepared(driver, function, self._blocks.kernel.__name__, _WORDS[form], arguments)

    @property
    def compiled(self) -> bool:
        """Whether `prepare` has nothing to compile."""
        return self._key in self._blocks.kernel.compiled

    def _kernel(self, dispatcher: Any, words: int) -> Any:
        types = tuple(dispatcher.typeof_pyval(a) for a in [0] * words + self._values)
        if types not in dispatcher.overloads:
            name = self._blocks.kernel.__name__
            with compiling(f"kernel {name!r}"), explained(self._blocks.kernel, "cuda"):
                dispatcher.compile(types).bind()
        return dispatcher.overloads[types]

    def resources(self, form: str) -> dict[str, int]:
        """Return a form's registers a thread, shared and local bytes, threads, and blocks resident on the whole GPU."""
        return dict(self._forms[form][1])

    def start(self, control: int, base: int, workers: int, stream: Any, chunk: int = 1, rounds: int = 1) -> None:
        """Launch `workers` workers, numbered from `base`, that claim `chunk` blocks at a time; return at once.

        With `rounds`, the blocks are run that many times over, in order, which is how a rate is measured.
        """
        words = self._words(control, base, chunk, rounds)
        self._launch("workers", (workers,), stream, words)

    def workers_row(self, control: int, base: int, workers: int, chunk: int = 1) -> NDArray[np.int64] | None:
        """Return what `start` launches as a row for the scheduler's native thread, to be kept until it has ended.

        None where the kernel's arguments are no words.
        """
        prepared = self._prepared.get("workers")
        if prepared is None:
            return None
        return prepared.own_row((workers,), self._threads, self._words(control, base, chunk))

    def _words(self, control: int, base: int, chunk: int, rounds: int = 1) -> tuple[int, ...]:
        blocks = self._count
        return control, base, chunk, blocks * rounds, blocks, *self._grid, *self._extents

    def plain_row(self) -> NDArray[np.int64] | None:
        """Return the untransformed kernel as a row; None if its arguments are not words."""
        if self._row is None and "plain" in self._prepared:
            self._row = self._prepared["plain"].row(self._across, self._threads, self._extents)
        return self._row

    @property
    def lasting(self) -> bool:
        """Whether launches with equal words may use `plain_row`: none has words of its own (a flag)."""
        return self._lasting and self.plain_row() is not None

    def start_plain(self, stream: Any) -> None:
        """Launch the untransformed kernel, whole; return at once."""
        self._launch("plain", self._across, stream, self._extents)

    def _launch(self, form: str, grid: Any, stream: Any, words: tuple[int, ...]) -> None:
        prepared = self._prepared.get(form)
        if prepared is not None:
            prepared.launch(grid, self._threads, stream, words)
            return
        dispatcher = self.plain if form == "plain" else self._forms[form][0]
        configured(dispatcher, grid, self._threads, stream)(*words, *self._values)


def kept_forms(blocks: Any, ordinal: int) -> Forms:
    """Return the prepared forms of a `BlockLaunch` that has begun, those of an equal launch before where they are kept.

    Launches are equal if the driver is given the same words for both: what is kept holds no array.
    """
    key: list[Any] = [ordinal, blocks.launch.shape]
    for value in blocks.values:
        about = getattr(value, "__cuda_array_interface__", None)
        if about is not None:
            key += type(value), about["data"], about["shape"], about["strides"], about["typestr"]
        elif isinstance(value, int | np.integer):
            key += type(value), int(value)
        elif isinstance(value, float | np.floating):
            key += type(value), float(value).hex()  # zeros differ, too
        else:
            return _prepared(blocks)
    if asks_flag(blocks.kernel):
        key.append(blocks.flag.address)
    kept = blocks.kernel.compiled.setdefault("cuda-kept", {})
    found: Forms | None = kept.get(tuple(key))
    if found is None:
        found = _prepared(blocks)
        if found.plain_row() is not None:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[tuple(key)] = found
    return found


_MOST_KEPT = 256
"""Of a kernel: launches with other arguments."""


def _prepared(blocks: Any) -> Forms:
    made = Forms(blocks)
    made.prepare()
    return made


def _flat_arguments(kernel: Any, first: int, values: Sequence[Any]) -> list[Any] | None:
    """Return what a numba-cuda kernel's parameters from number `first` on become for the driver.

    None where an argument would have to be copied: such a launch takes numba-cuda's own way.
    """
    found: list[Any] = []
    copied: list[Any] = []
    for kind, value in zip(kernel.argument_types[first:], values, strict=True):
        kernel._prepare_args(kind, value, 0, copied, found)
    return None if copied else found


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

    A multiprocessor has 65,536, handed out to warps in units of 256, and places for 2,048 threads (compute capability
    9.0; the occupancy that a launch relies on is asked of the driver).
    """
    resident = min(2048 // threads, 65536 // (-(-used // 8) * 8 * threads))
    return min(255, 65536 // (max(1, resident) * threads) // 8 * 8)


def source_of(blocks: Any, dims: int, count: int) -> tuple[str, str, dict[str, Any]]:
    """Return the name, the source and the names in reach of workers."""
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
        start=_indented(_WRAP + _START[dims], 8),
        # threads of a block kernel share memory; those of others only their warp's place
        together="syncwarp(ALL_LANES)" if blocks.kernel.block is None else "barrier()",
        body=_indented(body, 12),
        following=_indented(_FOLLOWING[dims], 12),
    )
    own = {"enter": enter, "claim": claim, "leave": leave, "ALL_LANES": ALL_LANES}
    scope = {**vars(atomics), **vars(block), **own, "function": blocks.virtual, "__name__": GENERATED}
    return name, source, scope


def _indented(lines: list[str], depth: int) -> str:
    return ("\n" + " " * depth).join(lines)


def ptx(blocks: Any, argument_types: tuple[Any, ...], *, cc: tuple[int, int] = (9, 0)) -> str:
    """Return the PTX of workers, as `run_cuda.ptx` does for the plain kernel; no GPU is needed."""
    from ..compiler.run_cuda import ptx_of

    dims = len(blocks.launch.shape)
    if asks_flag(blocks.kernel):
        argument_types = (*argument_types, 0)
    return ptx_of(_function(blocks, dims, len(argument_types)), _WORDS["workers"], argument_types, cc)


def _function(blocks: Any, dims: int, count: int) -> Any:
    seam_for("cuda")
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
