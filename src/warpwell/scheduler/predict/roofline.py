"""Estimate: what a launch takes alone by its counts and the device's peaks, before anything was measured."""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import time
from dataclasses import dataclass, replace

import numpy as np

from ..executor import Capacity, Machine
from ..task import Kind
from .counting import Counts
from .sample import kind_of

_COPIED = 32 << 20

_MACHINES = {
    "H200": Machine(bandwidth=4.8e12, cache=60 << 20),
    "H100": Machine(),
}


def machine_for(device: str, bandwidth: float = 0.0, cache: int = 0) -> Machine:
    """Return the peaks of a device by its name.

    Parameters
    ----------
    device : str
    bandwidth : float
        Bytes a second, of a device whose name is not known; 0: an H100's.
    cache : int
        Bytes of its second-level cache; 0: an H100's.
    """
    known = next((machine for name, machine in _MACHINES.items() if name in device.upper()), None)
    usual = Machine()
    known = known or Machine(bandwidth=bandwidth or usual.bandwidth, cache=cache or usual.cache)
    return replace(known, name=device)


@functools.cache
def host_machine() -> Machine:
    """Return the peaks of this machine's memory: a copy is measured, once a process (tens of milliseconds)."""
    there, here = np.ones(_COPIED, np.uint8), np.ones(_COPIED, np.uint8)
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(here, there)
        best = min(best, time.perf_counter() - began)
    return Machine(bandwidth=2 * _COPIED / best, cache=0, name=f"cpu {_processor()}")


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True)
class Estimate:
    """A static estimate.

    Attributes
    ----------
    instructions, seconds : float
    bandwidth, compute : float
        Parts of the memory's bandwidth and of the issue slots, 0 to 1.
    miss_rate : float
        Of the second-level cache, 0 to 1.
    need : float
        Part of the multiprocessors that its blocks can occupy.
    features : dict
        Numbers for the predictor.
    """

    instructions: float
    seconds: float
    bandwidth: float
    compute: float
    miss_rate: float
    need: float
    features: dict[str, float]

    @property
    def kind(self) -> Kind:
        """Its class."""
        return kind_of(self.bandwidth, self.compute)


def estimate(counts: Counts, *, blocks: int, resident: int, capacity: Capacity, machine: Machine) -> Estimate:
    """Estimate time and shares of a launch alone.

    Its time is the longest of three: issuing its instructions; moving each byte that it touches once; and, where few
    warps are resident, the latency of one warp, wave after wave.

    Parameters
    ----------
    counts : Counts
    blocks : int
        Of the launch.
    resident : int
        Blocks that the device holds at once.
    capacity : Capacity
    machine : Machine
    """
    rate = machine.schedulers * capacity.processors * capacity.clock
    asked = max(1.0, counts.read + counts.written)
    touched = min(float(counts.footprint), asked) if counts.footprint else asked
    if counts.footprint > machine.cache:
        # what is asked for more than once comes again from memory in part
        touched += 0.1 * (asked - touched) * (1 - machine.cache / counts.footprint)
    busy = min(1.0, blocks / capacity.processors)
    issue = counts.instructions / (rate * busy)
    move = touched / machine.bandwidth
    waves = math.ceil(blocks / max(1, resident))
    latency = waves * counts.instructions / counts.warps * machine.gap / capacity.clock
    seconds = machine.start + max(issue / machine.issued, move / machine.moved, latency)
    features = {
        "instructions": counts.instructions, "seconds": seconds, "issue": issue * busy, "move": move,
        "latency": latency, "asked": asked, "footprint": float(counts.footprint), "blocks": float(blocks),
        "assumed": float(counts.assumed),
        **{f"mix_{kind}": value / max(1.0, counts.instructions) for kind, value in counts.mix.items()},
    }  # fmt: skip
    return Estimate(
        counts.instructions, seconds, min(1.0, move / seconds), min(1.0, issue * busy / seconds),
        min(1.0, touched / asked), busy, features,
    )  # fmt: skip
