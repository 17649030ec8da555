"""Programs: unmodified CUDA programs share a GPU under the scheduler's `Core`, one process at a time.

Each program has a slot on the GPU's board (``driver/board.py``) with a gate, at which its calls wait in the worker of
the driver layer. One process, the arbiter, opens and closes the gates. Without a live arbiter nothing waits.

- executor: `ProgramExecutor`: gates as an executor of `Core`; `Program`, a slot as the arbiter sees it
- policy: `Programs`: priority with aging, then least use over weight, in time slices
- arbiter: `Arbiter`: attached programs, their jobs, tenants, log; the process of a board
- operator: status, limit and end
- launch: runs a program on this machine's own driver, with the pass-through driver in front of it
"""

from .arbiter import Arbiter, run_arbiter
from .executor import Program, ProgramExecutor
from .launch import run_program
from .operator import end_programs, program_status, set_limits
from .policy import Programs

__all__ = [
    "Arbiter",
    "Program",
    "ProgramExecutor",
    "Programs",
    "end_programs",
    "program_status",
    "run_arbiter",
    "run_program",
    "set_limits",
]
