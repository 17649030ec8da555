"""Media, and the controller that serves queues from them.

Files, in the order in which a command meets them:

- controller.py   threads that serve queue pairs; namespaces; parking
- serve.py        what a thread does for one queue pair: fetch, check, start, complete, post
- arbitration.py  ... where all threads share all queues: a window, and weights
- returns.py      places for values that the controller chooses when it answers
- medium.py       the interface `Medium`; bases for wrappers and for media written in Python
- ram.py          bytes in host memory
- file.py         a file or block device
- groups.py       `Striped` and `Replicated`: several media as one
- latency.py      an emulated drive, of blocks or of keys and values, and the drives that are known
- faulty.py       faults on purpose, of blocks or of keys and values
- commands.py     commands in flight, locks and words, for native media
"""

from .controller import Controller, service_threads
from .faulty import Faulty, KeyValueFaulty
from .file import FileMedium
from .groups import Replicated, Striped
from .latency import DRIVES, Drive, KeyValueLatency, Latency
from .medium import PENDING, Medium, NativeMedium, PythonMedium
from .ram import RamMedium
