"""Programs share a GPU under the scheduler's `Core`, one at a time: unmodified CUDA programs, and leases.

Each program has a slot with a gate on the GPU's board (``driver/board.py``). Calls of an unmodified program wait at the
program's gate, in the worker of the driver layer or in the pass-through driver. Each thread that uses `warpwell.turn`
has a slot of its own, and waits at the gate of that slot. One process, the arbiter, opens and closes the gates. If no
arbiter is alive, calls do not wait, and leases have no order.

- executor: `ProgramExecutor`: gates as an executor of `Core`; `Program`, a slot as the arbiter sees it
- policy: `Programs`: priority with aging, then least use over weight, in time slices
- arbiter: `Arbiter`: attached programs, their jobs, tenants, log; the process of a board
- operator: status, limit and end
- launch: runs a program on this machine's own driver, with the pass-through driver in front of it
- lease: `turn`, the lease of a device for a block of a program; `Lease`, the slot of a thread
- gpu_work: how far the GPU is with the work of a lease

A program with PyTorch or CuPy that uses `turn` does not import NumPy or a compiler here.
"""

from typing import TYPE_CHECKING

from .. import registry

if TYPE_CHECKING:
    from .arbiter import Arbiter, run_arbiter
    from .executor import Program, ProgramExecutor
    from .launch import run_program
    from .lease import Turn, turn
    from .operator import end_programs, known_tenants, program_status, set_limits, tenant_limits
    from .policy import Programs

__all__ = [
    "Arbiter",
    "Program",
    "ProgramExecutor",
    "Programs",
    "Turn",
    "end_programs",
    "known_tenants",
    "program_status",
    "run_arbiter",
    "run_program",
    "set_limits",
    "tenant_limits",
    "turn",
]

_FROM = {
    "arbiter": "Arbiter run_arbiter",
    "executor": "Program ProgramExecutor",
    "lease": "Turn turn",
    "launch": "run_program",
    "operator": "end_programs known_tenants program_status set_limits tenant_limits",
    "policy": "Programs",
}
"""Names of modules that are imported when a name is first used."""

if not TYPE_CHECKING:
    _HOMES = {name: f"{module}:" for module, names in _FROM.items() for name in names.split()}
    __getattr__, __dir__ = registry.on_first_use(__name__, _HOMES)
