"""The GPUs of this host: `list_gpus`, and their assignment to agents: `assign`."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...driver.environment import FOLDER as LAYER
from ...errors import AgentError
from ...libcuda import driver, uuid_of


def list_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that may be used, in the driver's order.

    A child process queries the driver, because the driver reads ``CUDA_VISIBLE_DEVICES`` once, when it is first
    called, and this process sets the variable later. Call it before there are threads.
    """
    if not has_driver(os.environ):
        return []
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_query_driver()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        reply = stream.read()
    os.waitpid(child, 0)
    found: list[str] = json.loads(reply) if reply else []
    return found


def has_driver(environ: Mapping[str, str]) -> bool:
    """Return True if this process finds the driver of this machine, and not the layer of another job."""
    return not environ.get(LAYER) and driver() is not None


def visible(own: str, gpus: Sequence[str]) -> str:
    """Return an agent's ``CUDA_VISIBLE_DEVICES``: its own GPU, which becomes ordinal 0, and then all other GPUs.

    The agent does not compute on the other GPUs. But the copy engine can only write to GPUs that the process sees; to
    other GPUs, the driver copies with a kernel, which waits until multiprocessors are free (H200, driver 580). A
    process can use only one part of a GPU (MIG).
    """
    return own if own.startswith("MIG") else ",".join([own, *(uuid for uuid in gpus if uuid != own)])


def assign(
    agents: Sequence[int], gpus: Sequence[str], target: str, share: bool, host: str
) -> dict[int, Mapping[str, Any]]:
    """Return target and GPU of each agent of a host, in the order of ranks.

    Parameters
    ----------
    agents : sequence of int
        Ranks.
    gpus : sequence of str
        UUIDs, in the order of their assignment.
    target : {"auto", "cpu", "cuda"}
    share : bool
        Whether several agents may use one GPU.
    host : str
        For messages.

    Raises
    ------
    AgentError
        There are too few GPUs.
    """
    if target == "cpu" or (target == "auto" and not gpus):
        return {rank: {"target": "cpu"} for rank in agents}
    if not gpus:
        raise AgentError(f"host {host} has no GPU: omit --target cuda, or check the driver with nvidia-smi")
    if len(agents) > len(gpus) and not share:
        raise AgentError(
            f"host {host} has {len(gpus)} GPU{'s' * (len(gpus) > 1)} for {len(agents)} agents: start fewer, add hosts, "
            f"or use --share-gpu to run several on one GPU"
        )
    return {rank: {"target": "cuda", "uuid": gpus[k % len(gpus)]} for k, rank in enumerate(agents)}


def _query_driver() -> list[str]:
    library, count = driver(), ctypes.c_int(0)
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for k in range(count.value):
        device = ctypes.c_int(0)
        library.cuDeviceGet(ctypes.byref(device), k)
        digits = (uuid_of(library, device) or bytes(16)).hex()
        found.append(f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}")
    return found
