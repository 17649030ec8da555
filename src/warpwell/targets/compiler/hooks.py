"""`seam_for`: a target's compiler hooks, which are imported when the target is first used, as its compiler is."""

from __future__ import annotations

from typing import Any


def seam_for(target: str) -> Any:
    """Return the compiler hooks of "cpu" or "cuda", with everything that was registered so far."""
    if target == "cpu":
        from .cpu_bodies import seam as cpu

        return cpu
    from .cuda_bodies import seam as cuda  # needs the cuda extra

    return cuda
