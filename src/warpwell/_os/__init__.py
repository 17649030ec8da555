"""What Warpwell needs of the operating system.

- `clock.py`: the monotonic clock of timeouts, which tests can advance
"""

from .clock import clock

__all__ = ["clock"]
