"""What Warpwell needs of the operating system.

- `clock.py`: the monotonic clock of timeouts, which tests can advance
- `probe.py`: ask a child process whether a system call is allowed
"""

from .clock import clock
from .probe import probe

__all__ = ["clock", "probe"]
