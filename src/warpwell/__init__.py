"""Warpwell: arrays on storage, many times larger than GPU memory, which kernels written in Python can index.

>>> import warpwell as ww
>>> from warpwell import gpu
>>> @ww.kernel
... def in_degree(edges, degree):
...     i = gpu.grid(1)
...     if i < edges.size:
...         gpu.atomic_add(degree, edges[i], 1)

The folders, from the bottom up; each has a map of its files in its own docstring:

    _os/         the clock of timeouts, which tests can advance
    errors/      exceptions
    _check       checks of options
    _settings    settings by environment variables
    _future      results of work in the background
    _trace       ranges for NVIDIA Nsight Systems
    _npy         headers of ``.npy`` files
    _ranges      ranges of integers, such as pages and rows
    replacing    files and folders that appear whole, or not at all
    closing      closes dropped objects, and writes unsaved changes at the end of the program
    json_file    JSON files that users pass
    process_end  ends processes by signals
    shared_file  files with shared fields and locks, for processes that share a device
    registry     names by which lower folders find objects of upper ones: services
    libcuda      the library of the GPU's driver, by ctypes, if cuda.bindings is missing or slow
    targets/     device code: kernels, launches, claiming of blocks; compiled for CPU and GPU, or interpreted
    driver/      unmodified CUDA programs: a library that replaces the driver, and workers that replay its calls
    nvme/        commands and completions as the NVMe specification lays them out
    pool/        the GPUs of a cluster as local devices: agents, transports, copies, jobs
    queues/      rings on which threads submit commands and find completions
    storage/     media, and the controller that carries out commands
    drives/      third-party NVMe controllers: their assignment to programs, and access to them
    cache/       pages in device memory: misses, eviction, write-back, statistics
    array/       `open`, `Array`, and its use by kernels and the host
    graph/       graphs on storage: conversion, search, components
    kv/          key-value stores: log, index, access by kernels, loaders, conversion
    scheduler/   kernels that share one device: tasks, policies, preemption, service
    table/       tables: Arrow files in place, a folder of columns, conversion
    train/       rows and neighborhoods for training: data sets, feature stores, samplers
    programs/    CUDA programs and leases that share a GPU under the scheduler, one at a time
    remote/      arrays, stores and schedulers on the devices of a pool
    testing/     conformance suites for media and executors of your own
    cli/         the `warpwell` command
    gpu          functions for kernels
"""

from typing import TYPE_CHECKING

from . import errors  # Modules of the package import `errors` from here, so it must be imported before them.
from . import registry as _registry

if TYPE_CHECKING:
    from . import drives, gpu, graph, kv, pool, remote, scheduler, storage, table, train
    from .array import Array
    from .array import create_placed as create
    from .array import open_placed as open
    from .array.gather import gather, rows
    from .cache import Cache
    from .pool import broadcast, current_device, empty, empty_like, pinned_empty, to_device, zeros
    from .pool.devices import devices
    from .programs import turn
    from .targets import CudaSource, default_device
    from .targets.kernel import kernel

__version__ = "0.1.0"

__all__ = [
    "Array",
    "Cache",
    "CudaSource",
    "broadcast",
    "create",
    "current_device",
    "default_device",
    "devices",
    "drives",
    "empty",
    "empty_like",
    "errors",
    "gather",
    "gpu",
    "graph",
    "kernel",
    "kv",
    "pinned_empty",
    "pool",
    "remote",
    "rows",
    "scheduler",
    "storage",
    "table",
    "to_device",
    "train",
    "turn",
    "zeros",
]
"""All public names except `open`: ``from warpwell import *`` must not shadow the built-in function."""

# Modules are imported on first use: a command line answers at once, and the processes of a pool start sooner.
_FROM = {
    "": "drives gpu graph kv pool remote scheduler storage table train",
    "array": "Array create=create_placed open=open_placed",
    "array.gather": "gather rows",
    "cache": "Cache",
    "pool.devices": "broadcast current_device devices empty empty_like to_device zeros",
    "pool.host_memory": "pinned_empty",
    "programs": "turn",
    "targets": "CudaSource default_device kernel",
}
_HOMES = {
    name.partition("=")[0]: f"{home}:{name.partition('=')[2]}" if home else name
    for home, names in _FROM.items()
    for name in names.split()
}

# Objects that a folder finds by name because they are defined in a folder above it.
_registry.services.update(
    {
        "open": "warpwell.array:open_array",
        "create": "warpwell.array:create",
        "cache": "warpwell.cache:Cache",
        "array part": "warpwell.remote.array:part",
        "store": "warpwell.kv.opening:open_store",
        "scheduler": "warpwell.remote.scheduler_agent:AgentScheduler",
    }
)
_registry.stand_ins.update(
    dict.fromkeys(("open", "create", "array part"), "warpwell.remote.array:RemoteArray"),
    store="warpwell.remote.store:RemoteStore",
    schedulers="warpwell.remote.scheduler:PoolScheduler",
)

if not TYPE_CHECKING:  # Type checkers report wrong names.
    __getattr__, __dir__ = _registry.on_first_use(__name__, _HOMES)
