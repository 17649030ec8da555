"""Workloads: PolyBench-style programs and a few more in Python, each with a NumPy reference.

>>> from lab.sched.workloads import make
>>> run = make("gemm", 48, "cpu")
>>> for launch, arguments, size in run:
...     launch(*arguments, device="cpu")
>>> run.check()

=================  ======================================================================================
application.py     a program, its launches, its input and the comparison with NumPy
dense.py           matrix product: gemm
matrix_vector.py   atax
stencils.py        conv2d
irregular.py       spmv
streams.py         triad, black_scholes
=================  ======================================================================================
"""

from __future__ import annotations

from warpwell import errors

from . import dense, irregular, matrix_vector, stencils, streams
from .application import Application, Step, Workload

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for module in (dense, matrix_vector, stencils, irregular, streams)
    for workload in module.WORKLOADS
}
"""Every workload by its name."""


def make(name: str, size: int | None = None, device: str = "cpu", *, seed: int = 0) -> Application:
    """Return a workload's launches for a size, with their arguments on a device.

    Parameters
    ----------
    name : str
        One of `WORKLOADS`.
    size : int, optional
        Rows and columns, items or options; `Workload.small` by default.
    device : {"cpu", "cuda", "interp"}
    seed : int
        Seed of the random input.

    Returns
    -------
    Application
        A list of ``(launch, arguments, size features)``; `Application.check` compares with NumPy.

    Raises
    ------
    ArgumentError
        No workload has that name, or the size is below 1.
    """
    if name not in WORKLOADS:
        raise errors.ArgumentError(f"workload {name!r} is unknown; expected one of {', '.join(WORKLOADS)}", name="name")
    workload = WORKLOADS[name]
    return Application(workload, workload.small if size is None else size, device, seed)


__all__ = ["WORKLOADS", "Application", "Step", "make"]
