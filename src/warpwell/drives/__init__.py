"""NVMe controllers that others made, driven by this process.

Files, from memory and registers up to commands:

- arena.py        `DmaArena`: memory that a controller reads and writes by itself
- transport.py    the interface `Transport`: registers, addresses for a controller, loss
- vfio.py         `VfioTransport`: a controller on the PCI bus, through the IOMMU
- host_queue.py   `HostQueue`: a queue pair on which the host submits commands and polls for their completions
- drive.py        `Drive`: a controller that was enabled: what it is, its limits, its queues; `Namespace`: its blocks,
                  and which formats are refused
- opened.py       `open_namespace`: a namespace by name; all users of a process share its drive
- relay.py        forwards the doorbell words of rings, without the interpreter lock
- controller.py   `DriveController`: a cache's own rings, served by a drive; what is done when the drive is lost
- superblock.py   what marks a namespace as holding an array of ours
- formatting.py   `format_array`: makes one, if nobody's data are there
- medium.py       `DriveMedium`: a namespace as a medium, on queues of the host that native threads share

and who may have the drive, before that:

- machine.py      the NVMe drives of this machine, and who uses them
- binding.py      hands a drive from the kernel's driver to vfio-pci and back, or says why not
"""

from .arena import DmaArena
from .binding import bind, refusals, unbind
from .drive import Drive, Namespace
from .formatting import format_array
from .host_queue import HostQueue
from .machine import KernelNamespace, Machine, PciDrive
from .medium import DriveMedium
from .opened import open_namespace
from .transport import Transport
from .vfio import VfioTransport

__all__ = ["Drive", "DriveMedium", "format_array"]
