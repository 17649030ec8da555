"""`intrinsics_for`: a target's compiler hooks, which are imported when the target is first used, as its compiler is."""

from __future__ import annotations

from typing import Any


def intrinsics_for(target: str) -> Any:
    """Return the compiler hooks of "cpu" or "cuda", with everything that was registered so far."""
    if target == "cpu":
        from .cpu_lowerings import intrinsics as cpu

        return cpu
    from .cuda_lowerings import intrinsics as cuda  # needs the cuda extra

    return cuda
