"""Workers on the `cpu` target: host threads that claim blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import atomics
from ..compiler.compiled import compile_host
from ..compiler.hooks import seam_for
from ..fault import FLAG

_DRIVER = """
def driver(context, control, worker, total, threads{parameters}):
    set_context(context)
    fetch_add(control + 32, 1, DEVICE)
    fetch_add(control + 56, 1, DEVICE)
    blocks = (total + threads - 1) // threads
    while True:
        # the flags first and the claim second: what is claimed is always run
        if load_acquire(control, DEVICE) != 0 or worker >= load_relaxed(control + 8, DEVICE):
            break
        if worker < load_relaxed(control + 48, DEVICE):
            break
        block = fetch_add(control + 16, 1, DEVICE)
        if block >= blocks:
            break
        for index in range(block * threads, min((block + 1) * threads, total)):
            store_relaxed(context, index, BLOCK)
            function({arguments})
        fetch_add(control + 24, 1, DEVICE)
    fetch_add(control + 40, 1, DEVICE)
    fetch_add(control + 32, -1, DEVICE)
"""


def driver(blocks: Any) -> Any:
    """Return the compiled worker of a `BlockLaunch`."""
    from ..compiler.run_cpu import compile_for, foreign

    kernel, values = blocks.kernel, [np.asarray(v) if foreign(v) else v for v in blocks.values]
    key = ("cpu-blocks", len(values))
    if key not in kernel.compiled:
        seam_for("cpu")
        from ..compiler.cpu_bodies import set_context

        names = [f"argument{k}" for k in range(len(values))]
        source = _DRIVER.format(parameters="".join(f", {n}" for n in names), arguments=", ".join(names))
        scope = {
            name: getattr(atomics, name)
            for name in ("fetch_add", "load_acquire", "load_relaxed", "store_relaxed", "DEVICE", "BLOCK")
        }
        scope |= {"function": kernel.function, "set_context": set_context}
        kernel.compiled[key] = compile_host(source, "driver", scope, kernel.function)
    compiled = kernel.compiled[key]
    compile_for(kernel, compiled, (0, 0, 0, 0, 0), values)
    return compiled


def work(blocks: Any, control: int, worker: int) -> None:
    """See `BlockLaunch.work`."""
    from ..compiler.run_cpu import foreign

    context = np.zeros(8, np.int64)
    context[1:4] = (*blocks.launch.shape, 1, 1)[:3]  # code divides by them
    values = [np.asarray(v) if foreign(v) else v for v in blocks.values]
    context[FLAG] = blocks.flag.address
    driver(blocks)(context.ctypes.data, control, worker, blocks.total, blocks.threads, *values)
