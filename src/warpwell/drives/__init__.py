"""NVMe controllers that others made, driven by this process.

Files, in the order in which a user meets them:

- machine.py   the NVMe drives of this machine, and who uses them
- binding.py   hands a drive from the kernel's driver to vfio-pci and back, or says why not
"""

from .binding import bind, refusals, unbind
from .machine import KernelNamespace, Machine, PciDrive
