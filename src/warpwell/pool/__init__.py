"""Every GPU of a cluster as a local device: agents, one a device, that one ordinary program calls.

See ``docs/pool.md``.
"""

from .communicator import communicator

__all__ = ["communicator"]
