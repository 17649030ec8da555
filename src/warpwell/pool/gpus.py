"""`Gpu`: GPUs of this host as their driver lists them, without taking any, and who gets which."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import AgentError


def list_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that may be used, in the driver's order; empty without any.

    The driver is asked in a process of its own, because it reads ``CUDA_VISIBLE_DEVICES`` once, when it is first
    called, and this process will set that later. To be called before there are threads.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_ask()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    found: list[str] = json.loads(said) if said else []
    return found


def visible(own: str, gpus: Sequence[str]) -> str:
    """Return what an agent's ``CUDA_VISIBLE_DEVICES`` says: its own GPU first, which is ordinal 0, and the others.

    It uses none of those; but only of a GPU that it sees does the driver know the way there, and lets the copy engine
    write to its memory. To others a kernel copies, which waits until multiprocessors are free (H200, driver 580).
    A part of a GPU (MIG) stands alone: a process can use no other one.
    """
    return own if own.startswith("MIG") else ",".join([own, *(uuid for uuid in gpus if uuid != own)])


def assign(
    agents: Sequence[int], gpus: Sequence[str], target: str, share: bool, host: str
) -> dict[int, Mapping[str, Any]]:
    """Return target and GPU of each agent of a host: GPU 0, 1, .. in the order of their ranks.

    Parameters
    ----------
    agents : sequence of int
        Ranks.
    gpus : sequence of str
        UUIDs.
    target : {"auto", "cpu", "cuda"}
    share : bool
        Several agents may have one GPU.
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
        raise AgentError(f"host {host} has no GPU: leave out --target cuda, or check its driver with nvidia-smi")
    if len(agents) > len(gpus) and not share:
        raise AgentError(
            f"host {host} has {len(gpus)} GPU{'s' * (len(gpus) > 1)} for {len(agents)} agents: start fewer, add hosts, "
            "or take --share-gpu to have several agents on one GPU"
        )
    return {
        rank: {"target": "cuda", "gpu": k % len(gpus), "uuid": gpus[k % len(gpus)]} for k, rank in enumerate(agents)
    }


def _ask() -> list[str]:
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for k in range(count.value):
        uuid, device = (ctypes.c_ubyte * 16)(), ctypes.c_int(0)
        driver.cuDeviceGet(ctypes.byref(device), k)
        of = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid  # v2: also parts of a GPU (MIG)
        of(uuid, device)
        digits = bytes(uuid).hex()
        found.append(f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}")
    return found
