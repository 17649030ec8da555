"""Peaks: the memory bandwidth of a device, by its name or as measured. It determines a kernel's class."""

from __future__ import annotations

import functools
import math
import time

import numpy as np

from ..._os import processor_name
from ..executor import Machine

_COPIED_BYTES = 32 << 20
"""Size of the copy that measures the host's memory bandwidth: more than most caches hold."""

# Bytes a second, from NVIDIA's data sheets (SXM).
_BANDWIDTHS = {"H200": 4.8e12, "H100": 3.35e12}


def machine_for(device: str, bandwidth: float = 0.0) -> Machine:
    """Return the peaks of a device by its name; `bandwidth`, bytes a second, is for unknown names (0: an H100's)."""
    bandwidth = next((peak for name, peak in _BANDWIDTHS.items() if name in device.upper()), bandwidth)
    return Machine(bandwidth=bandwidth or Machine.bandwidth, name=device)


@functools.cache
def host_machine() -> Machine:
    """Return the peaks of this machine's memory: a copy is measured, once a process (tens of milliseconds)."""
    source, target = np.ones(_COPIED_BYTES, np.uint8), np.ones(_COPIED_BYTES, np.uint8)
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return Machine(bandwidth=2 * _COPIED_BYTES / best, name=f"cpu {processor_name()}")
