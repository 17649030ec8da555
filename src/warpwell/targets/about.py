"""What this machine offers device code: ``gpus``."""

from __future__ import annotations

from typing import Any

from .kernel import has_cuda


def gpus() -> list[dict[str, Any]]:
    """Return name, compute capability and memory (bytes) of each GPU that can be used; empty without any."""
    if not has_cuda():
        return []
    from numba import cuda

    found = []
    for gpu in cuda.gpus.lst:
        with gpu:
            _, total = cuda.current_context().get_memory_info()
            major, minor = gpu.compute_capability
            name = gpu.name.decode() if isinstance(gpu.name, bytes) else str(gpu.name)
            found.append({"name": name, "compute_capability": f"{major}.{minor}", "memory": int(total)})
    return found
