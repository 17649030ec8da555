"""Every GPU of a cluster as a local device: agents, one a device, that one ordinary program calls.

See ``docs/pool.md``.
"""

from .communicator import communicator
from .plan import Tuning

__all__ = ["Tuning", "communicator"]
