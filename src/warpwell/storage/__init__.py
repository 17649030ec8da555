"""Media, and the controller that serves queues from them.

Files, in the order in which a command meets them:

- controller.py   queue pairs and namespaces that are served together
- io_threads.py   the I/O threads of a process, which all its controllers share; parking
- serve.py        fetch (turns, weights, a window of commands in flight), check, start, complete and post commands
- return_slots.py return value queues: slots for values that the controller assigns
- protocol.py     `QueueServer`, which serves the queues of a cache, and `QueueBackend`, which starts one
- host_reads.py   `StagedReads`: long reads of the host into host memory
- cufile.py       `CuFileReads`: reads into device memory by libcufile (GPUDirect Storage)
- gpudirect.py    `GpuDirectReads`: chooses between the two, and falls back
- medium.py       the interface `Medium`, and the base class of media written in Python
- ram.py          bytes in host memory
- file.py         a file or block device
- uring.py        io_uring: many commands of a file in flight
- page_cache.py   pages of a file in the system's page cache, which commands copy
- striped.py      `Striped` and `Replicated`: several media as one
- commands.py     helpers of native media: words of commands and answers, slots of commands in flight, spin locks
"""

from .commands import PENDING, decode_command, set_word, word, write_answer
from .controller import MAX_WEIGHT, Controller, HostThreads, service_threads
from .file import FileMedium
from .gpudirect import CuFileOptions, GpuDirectReads
from .host_reads import StagedReads
from .io_threads import WorkerSlots
from .io_threads import current as current_io_threads
from .medium import (
    Medium,
    NativeMedium,
    PythonMedium,
    carry_out_interpreted,
    complete_nothing,
    python_functions,
    raw_bytes,
)
from .page_cache import is_in_page_cache
from .protocol import NamespaceAddress, QueueBackend, QueueServer, Rings
from .ram import RamMedium
from .return_slots import ReturnSlots, free_return_slot, return_slot_of
from .serve import MAX_PORTS
from .striped import Replicated, Striped
from .uring import allowed as uring_allowed

__all__ = ["FileMedium", "Medium", "PythonMedium", "RamMedium", "Replicated", "Striped"]
