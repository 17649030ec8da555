"""Workers on the `cpu` target: host threads that claim blocks and run them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..fault import FLAG
from . import control as at

_DRIVER = """
def driver(context, control, worker, total, threads{parameters}):
    set_context(context)
    mirror = load_relaxed(control + 8 * MIRROR, DEVICE)
    shift = mirror & 63
    fetch_add(control + 8 * BEGUN, 1, DEVICE)
    blocks = (total + threads - 1) // threads
    while True:
        # The flags are read before the claim, so every claimed block runs.
        if worker < load_acquire(control + 8 * STOP, DEVICE) or worker >= load_relaxed(control + 8 * TARGET, DEVICE):
            break
        block = fetch_add(control + 8 * CURSOR, 1, DEVICE)
        if block >= blocks:
            break
        for index in range(block * threads, min((block + 1) * threads, total)):
            store_relaxed(context, index, BLOCK)
            function({arguments})
        done = fetch_add(control + 8 * DONE, 1, DEVICE)
        if mirror != 0 and done >> shift != (done + 1) >> shift:
            store_relaxed(mirror & -64, done + 1, SYSTEM)
    fetch_add(control + 8 * LEFT, 1, DEVICE)
    set_context(0)
"""


_CONSTANTS = {name: word for name, word in vars(at).items() if name.isupper() and name[0] != "_"}
"""Indices of the words of the control record, by their names in the driver."""


def driver(blocks: Any) -> Any:
    """Return the compiled worker of a `BlockLaunch`."""
    from ..compiler.run_cpu import compile_for, driver_of, host_arrays  # imports the compiler

    values = host_arrays(blocks.kernel, blocks.values)
    compiled = driver_of(blocks.kernel, "cpu-blocks", _DRIVER, len(values), _CONSTANTS)
    compile_for(blocks.kernel, compiled, (0,) * 5, values)
    return compiled


def work(blocks: Any, control: int, worker: int) -> None:
    """Run blocks until none is left; see `BlockLaunch.work`."""
    from ..compiler.run_cpu import host_arrays
    from ..compiler.symbols import forget_context  # imports LLVM

    context = np.zeros(8, np.int64)
    context[1:4] = (*blocks.launch.shape, 1, 1)[:3]  # code divides by them
    context[FLAG] = blocks.flag.address
    values = host_arrays(blocks.kernel, blocks.values)
    try:
        driver(blocks)(context.ctypes.data, control, worker, blocks.total, blocks.threads, *values)
    except BaseException:
        forget_context()
        raise
