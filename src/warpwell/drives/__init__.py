"""Third-party NVMe controllers, driven by this process.

Files, from memory and registers up to commands:

- `arena.py`: `DmaArena`, memory that a controller reads and writes.
- `transport.py`: the interface `Transport`: registers, failure, generations.
- `vfio.py`: `VfioTransport`, a controller on the PCI bus, behind the IOMMU.
- `host_queue.py`: `HostQueue`, a queue pair on which the host submits commands and polls for their completions.
- `drive.py`: `Drive`, an enabled controller with its identity, limits and queues; `Namespace`, its blocks.
- `opened.py`: `open_namespace` opens a namespace by name; all users in a process share its drive.
- `doorbell_forwarder.py`: forwards the doorbell words of rings without the interpreter lock.
- `controller.py`: `DriveController` serves a cache's own rings by a drive.
- `medium.py`: `NamespaceMedium` for the host; `DriveMedium`, a namespace as a medium, on queues of native threads.
- `superblock.py`: the superblock of a namespace that holds an array.
- `formatting.py`: `format_array` formats an empty namespace as an array.

The assignment of drives to programs:

- `machine.py`: the NVMe drives of this machine, and their users.
- `binding.py`: binds a drive to vfio-pci and back to the kernel's driver, or reports the reasons against it.
"""

from .arena import DmaArena
from .binding import bind, refusals, unbind
from .controller import DriveController, DriveRings
from .drive import Drive, Namespace
from .formatting import format_array, require_empty
from .host_queue import HostQueue
from .machine import KERNEL_DRIVER, VFIO_DRIVER, KernelNamespace, Machine, PciDrive
from .medium import DriveMedium, NamespaceMedium
from .opened import open_namespace
from .superblock import BYTES, DATA_AT, Superblock
from .transport import Transport
from .vfio import VfioTransport

__all__ = ["Drive", "DriveMedium", "format_array"]
