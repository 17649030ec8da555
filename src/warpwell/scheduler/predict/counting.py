"""count: how many instructions a launch executes, from its compiled code and its arguments; no GPU is needed.

The static count of each basic block's instructions, times how often warps pass through it (`walk`). Loops whose length
follows from sizes are exact. What depends on data is read where the data is in host memory, and assumed where not;
`Counts.assumed` tells.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...targets import DeviceStruct, KernelArgument, Launch
from ...targets.compiler.run_cuda import configuration, ptx
from .lanes import Lanes, base_address
from .ptx import KINDS, LOAD, STORE, Program, parse
from .walk import WARP, Visits, walk

SECTOR = 32


@dataclass(frozen=True)
class Counts:
    """What a launch executes, by estimate.

    Attributes
    ----------
    warps : int
        Warps of the launch.
    instructions : float
        Machine instructions, counted once a warp.
    mix : dict
        The same by kind (`ptx.KINDS`).
    read, written : float
        Bytes that loads and stores of global memory ask for, in whole sectors of 32 bytes a warp.
    footprint : int
        Bytes of the array arguments.
    assumed : bool
        Whether a trip count was assumed because it depends on data that is not in host memory.
    cut : bool
        Whether loops were too long to be followed to their end, so that the figures are too small.
    """

    warps: int
    instructions: float
    mix: dict[str, float]
    read: float
    written: float
    footprint: int
    assumed: bool
    cut: bool

    @property
    def intensity(self) -> float:
        """Machine instructions of a warp for each byte of its arrays, or of its accesses where they are fewer."""
        return self.instructions / max(1.0, min(float(self.footprint), self.read + self.written))


_programs: weakref.WeakKeyDictionary[Any, dict[Any, Program]] = weakref.WeakKeyDictionary()


def count(
    launch: Launch, arguments: Sequence[Any], *, warps: int = 48, trips: float = 8, data: bool = True,
    program: Program | None = None,
) -> Counts:  # fmt: skip
    """Count the instructions of a launch.

    Parameters
    ----------
    launch : Launch
        ``kernel[shape]``.
    arguments : sequence
        As for the launch. Host arrays are read where control flow depends on them; device arrays are not.
    warps : int
        Warps to follow: of launches with more, a sample.
    trips : float
        Trip count of loops that depend on what is not known.
    data : bool
        Whether host arrays may be read.
    program : Program, optional
        The kernel's PTX; by default it is compiled, and kept for the next time.

    Raises
    ------
    ImportError
        The compiler for GPUs (numba-cuda) is not installed.
    """
    values = [a.kernel_struct() if isinstance(a, KernelArgument) else a for a in arguments]
    program = program or program_of(launch, values)
    chosen, weights = _sample(launch, warps)
    special = _places(launch, chosen)
    numbers, memory = _parameters(program, launch, values)
    lanes = Lanes(chosen.size * WARP, numbers, special, memory if data else {})
    return _summed(program, walk(program, lanes, trips=trips), weights, sum(_nbytes(v) for v in values))


def program_of(launch: Launch, values: Sequence[Any]) -> Program:
    """Return the PTX of a launch for the types of its arguments, compiled once."""
    function, dims = launch.kernel.function, len(launch.shape)
    known = _programs.setdefault(function, {})
    key = dims, launch.kernel.max_registers, tuple(_type_key(v) for v in values)
    if key not in known:
        known[key] = parse(ptx(launch.kernel, tuple(values), dims=dims))
    return known[key]


def _type_key(value: Any) -> Any:
    if _is_array(value):
        flags = getattr(value, "flags", None)
        return str(value.dtype), value.ndim, flags is None or bool(flags["C_CONTIGUOUS"])
    static = getattr(value, "static", None)
    return type(value), static


def _nbytes(value: Any) -> int:
    return int(value.nbytes) if _is_array(value) and hasattr(value, "nbytes") else 0


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and bool(getattr(value, "ndim", False))


def _sample(launch: Launch, most: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return numbers of warps to follow, and how many warps of the launch each stands for.

    Warps whose threads are all within the launch's shape, in part, and not at all are sampled apart. Those with work
    are taken at multiples of the golden ratio, which favours no row and no column.
    """
    blocks, threads = configuration(launch.shape, launch.kernel.block)
    across = -(-int(np.prod(threads)) // WARP)
    total = int(np.prod(blocks)) * across
    if launch.kernel.block is not None:
        kinds = [(np.arange(total) if total <= most else None, total)]
    elif total <= 1 << 20:
        inside = _inside(launch, np.arange(total))
        kinds = [(np.flatnonzero(inside == k), int(np.count_nonzero(inside == k))) for k in (2, 1, 0)]
    else:
        kinds = [(None, total)]  # so many that the edges do not matter
    numbers: list[NDArray[np.int64]] = []
    weights: list[NDArray[np.float64]] = []
    for members, size in kinds:
        if not size:
            continue
        wanted = min(size, most if not numbers else max(4, most // 8))
        places = np.arange(size) if wanted == size else np.unique(
            ((np.arange(1, wanted + 1) * 0.6180339887498949) % 1.0 * size).astype(np.int64))  # fmt: skip
        numbers.append(places if members is None else members[places])
        weights.append(np.full(places.size, size / places.size))
    return np.concatenate(numbers), np.concatenate(weights)


def _places(launch: Launch, warps: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return the special registers of the threads of some warps."""
    blocks, threads = configuration(launch.shape, launch.kernel.block)
    across = -(-int(np.prod(threads)) // WARP)
    lane = np.tile(np.arange(WARP), warps.size)
    block, warp = np.repeat(warps // across, WARP), np.repeat(warps % across, WARP)
    thread = warp * WARP + lane
    special: dict[str, NDArray[np.int64]] = {"%laneid": lane, "%warpid": warp}
    for axis, blocks_here, threads_here in zip("xyz", (*blocks, 1, 1), (*threads, 1, 1), strict=False):
        special[f"%ctaid.{axis}"], block = block % blocks_here, block // blocks_here
        special[f"%tid.{axis}"], thread = thread % threads_here, thread // threads_here
        special[f"%nctaid.{axis}"] = np.full(lane.size, blocks_here)
        special[f"%ntid.{axis}"] = np.full(lane.size, threads_here)
    return special


def _inside(launch: Launch, warps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tell of each warp whether all of its threads are within the launch's shape (2), some (1) or none (0)."""
    blocks, threads = configuration(launch.shape, None)
    across = int(np.prod(threads)) // WARP
    block, row = warps // across, warps % across
    some, all_of = np.ones(warps.size, bool), np.ones(warps.size, bool)
    if len(launch.shape) == 1:
        first = block * threads[0] + row * WARP
        some, all_of = first < launch.shape[0], first + WARP <= launch.shape[0]
    else:  # a warp is a row of a block
        for axis, extent in enumerate(launch.shape[::-1]):
            place, block = block % blocks[axis], block // blocks[axis]
            if axis == 0:
                some, all_of = place * WARP < extent, (place + 1) * WARP <= extent
                continue
            inner, row = row % threads[axis], row // threads[axis]
            within = place * threads[axis] + inner < extent
            some, all_of = some & within, all_of & within
    return some.astype(np.int64) + all_of


def _parameters(
    program: Program, launch: Launch, values: Sequence[Any]
) -> tuple[dict[str, int | float], dict[int, NDArray[Any]]]:
    """Return the kernel's parameters by name, and the host arrays that its loads may read."""
    flat: list[int | float | None] = []
    if launch.kernel.block is None:
        flat += (*launch.shape, 1, 1)[:3]
    memory: dict[int, NDArray[Any]] = {}
    for number, value in enumerate(values):
        if _is_array(value):
            if isinstance(value, np.ndarray) and value.flags["C_CONTIGUOUS"]:
                memory[number] = value
            # meminfo, parent, items, bytes an item, address, shape, strides
            flat += [None, None, int(value.size), int(value.dtype.itemsize), base_address(number)]
            flat += [int(n) for n in (*value.shape, *value.strides)]
        elif isinstance(value, DeviceStruct):
            flat += [int(word) for word in value.flat()]
        elif isinstance(value, bool | int | np.integer | np.bool_):
            flat.append(int(value))
        else:
            flat.append(float(value) if isinstance(value, float | np.floating) else None)
    # another number of parameters: the compiler passes something in a form that is not known here
    pairs = zip(program.parameters, flat, strict=False) if len(flat) == len(program.parameters) else ()
    return {name: value for name, value in pairs if value is not None}, memory


def _summed(program: Program, visits: Visits, weights: NDArray[np.float64], footprint: int) -> Counts:
    times = visits.count @ weights
    mix = dict.fromkeys(KINDS, 0.0)
    moved = {LOAD: 0.0, STORE: 0.0}
    for k, block in enumerate(program.blocks):
        for place, statement in enumerate(block.statements):
            mix[statement.kind] += float(times[k]) * statement.weight
            if statement.kind in moved:
                moved[statement.kind] += float(times[k]) * SECTOR * visits.sectors.get((k, place), 0.0)
    return Counts(int(round(weights.sum())), sum(mix.values()), mix, moved[LOAD], moved[STORE], footprint,
                  visits.assumed, visits.cut)  # fmt: skip
