"""`Gpu`: GPUs of this host as their driver lists them, without taking any, and who gets which."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import AgentError


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
    agents: Sequence[int], gpus: Sequence[str], target: str, share: bool, host: str, taken: Mapping[str, str] = {}
) -> dict[int, Mapping[str, Any]]:
    """Return target and GPU of each agent of a host: GPU 0, 1, .. in the order of their ranks, but for those in use.

    Parameters
    ----------
    agents : sequence of int
        Ranks.
    gpus : sequence of str
        UUIDs.
    target : {"auto", "cpu", "cuda"}
    share : bool
        Several agents may have one GPU, and one that another job has.
    host : str
        For messages.
    taken : mapping
        GPUs that other jobs have, and who they are.

    Raises
    ------
    AgentError
        There are too few GPUs.
    """
    if target == "cpu" or (target == "auto" and not gpus):
        return {rank: {"target": "cpu"} for rank in agents}
    if not gpus:
        raise AgentError(f"host {host} has no GPU: leave out --target cuda, or check its driver with nvidia-smi")
    free = [uuid for uuid in gpus if uuid not in taken]
    if len(agents) > len(free) and not share:
        used = [uuid for uuid in gpus if uuid in taken]
        others = f", of which other jobs have {len(used)} (GPU {used[0]}: {taken[used[0]]})" if used else ""
        raise AgentError(
            f"host {host} has {len(gpus)} GPU{'s' * (len(gpus) > 1)}{others} for {len(agents)} "
            f"agent{'s' * (len(agents) > 1)}: start fewer, {'wait for them, ' if used else ''}add hosts, or take "
            f"--share-gpu to have several agents on one GPU"
        )
    order = [*free, *(uuid for uuid in gpus if uuid in taken)]
    chosen = {rank: order[k % len(order)] for k, rank in enumerate(agents)}
    return {rank: {"target": "cuda", "gpu": gpus.index(uuid), "uuid": uuid} for rank, uuid in chosen.items()}


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
