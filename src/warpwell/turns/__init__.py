"""Turns: processes share one GPU by leases, with no service and no interception. See ``docs/scheduler.md``, Turns.

In the order in which a turn meets them::

    lease.py     turn, Turn: the user's interface; finds the device of the calling thread, and its seat there
    seat.py      Seat, Station: a thread, and its process, at one device: take the lease, keep it, hand it over
    ahead.py     AheadSeat: a thread whose host goes on while its work waits at gates on the GPU
    choice.py    who is next: priorities, age, use so far; and the limits that an operator sets
    board.py     Board: the file that the processes of a device share: words, kernel locks, bells
    gpu_work.py  Work: how far the GPU is with what a thread has enqueued, by the driver's functions
    operate.py   status, end, limit, limited: what an operator asks and does

Nothing here imports a framework or a compiler: a program that uses PyTorch or CuPy alone loads these files and the
errors.
"""

from .choice import CEILING, HOLD
from .gpu_work import device_name
from .lease import Turn, turn

__all__ = ["Turn", "turn"]
