"""What Warpwell needs of the operating system.

- `clock.py`: the monotonic clock of timeouts, which tests can advance
- `file_lock.py`: locks of files between processes
- `futex.py`: the number of the futex system call
- `interrupts.py`: Ctrl-C during a compilation and during a launch
- `limits.py`: the limit of open files
- `probe.py`: ask a child process whether a system call is allowed
- `threads.py`: `Threads`, daemon threads that are started as needed
"""

from .clock import clock
from .file_lock import file_lock, lock_descriptor, open_for_lock, unlock_descriptor
from .futex import FUTEX
from .interrupts import Interrupts, interruptible, uninterrupted
from .limits import allow_more_files
from .probe import probe
from .threads import Threads

__all__ = [
    "FUTEX",
    "Interrupts",
    "Threads",
    "allow_more_files",
    "clock",
    "file_lock",
    "interruptible",
    "lock_descriptor",
    "open_for_lock",
    "probe",
    "uninterrupted",
    "unlock_descriptor",
]
