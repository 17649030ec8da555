"""Order: kernels that are launched one right after the other become resident in that order."""

from __future__ import annotations

import weakref
from typing import Any

from ...targets.blocks.launch import BEGUN
from .cuda_run import CudaRun

SOON = 1e-3
"""Seconds after a launch in which its workers may not have begun; none has been seen to take as long."""


class Order:
    """Lets a kernel begin when the workers of that before it have begun.

    Launches in two streams race, and who wins takes the room: a memory-intensive kernel that was to be resident first,
    and is not, gets next to nothing beside a compute-intensive one (see docs/scheduler.md).

    Parameters
    ----------
    gpu : Gpu
    """

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._before: weakref.ref[CudaRun] | None = None
        self._at = 0.0

    def keep(self, run: CudaRun, now: float) -> None:
        """Put a wait into a run's stream, where its kernel might come too early. It is launched behind it."""
        before = None if self._before is None else self._before()
        placement = run.placement
        shares = placement.partition is None
        if before is not None and before is not run and before.runs and shares and now - self._at < SOON:
            self._gpu.wait_word(run.stream, before.control + 8 * BEGUN, before.top)
        # one without a quota may find no room for all of its workers for long, and gains nothing by being first
        first = shares and placement.workers is not None and run.form == "workers"
        self._before = weakref.ref(run) if first else None
        self._at = now
