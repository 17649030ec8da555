"""Interfaces to the operating system.

- `clock.py`: the monotonic clock of timeouts, which tests can advance
- `file_lock.py`: locks of files between processes
- `futex.py`: the number of the futex system call
- `interrupts.py`: Ctrl-C during a compilation and during a launch
- `limits.py`: the limit of open files
- `parent.py`: the end of a process with its parent
- `peer.py`: the process at the other end of a socket
- `processor.py`: the name of the processor
- `probe.py`: probe in a child process whether a system call is allowed
- `threads.py`: `Threads`, daemon threads that are started as needed
"""

from .clock import clock
from .file_lock import file_lock, lock_descriptor, open_for_lock, unlock_descriptor
from .futex import FUTEX
from .interrupts import Interrupts, interruptible, uninterrupted
from .limits import allow_more_files
from .parent import end_with_parent
from .peer import socket_peer
from .probe import probe
from .processor import processor_name
from .threads import Threads

__all__ = [
    "FUTEX",
    "Interrupts",
    "Threads",
    "allow_more_files",
    "clock",
    "end_with_parent",
    "file_lock",
    "interruptible",
    "lock_descriptor",
    "open_for_lock",
    "probe",
    "processor_name",
    "socket_peer",
    "uninterrupted",
    "unlock_descriptor",
]
